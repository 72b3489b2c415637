package routes

import (
	"cmp"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// gateway is one of ours under computation.
type gateway struct {
	obj         *Gateway
	serviceName types.NamespacedName
	// live is the Service as it is; nil if there is none. taken says that its name is another's.
	live  *corev1.Service
	taken bool
	// params are the class's; nil if there are none.
	params    *parameters
	listeners []listener
	requests  []addressRequest
	// rejected is why the Gateway is not accepted; its Reason is empty if it is.
	rejected gatewayReason
	// served says that the Gateway has a Service.
	served bool
	// routability says that status has the field.
	routability bool

	// addresses are those of the Service that are the Gateway's; noAddress is why one is missing, and its Reason is empty
	// if none is.
	addresses []StatusAddress
	noAddress gatewayReason
	// leftOut says why the backends of a route are not in the annotation.
	leftOut map[*route]string
	needs   []types.NamespacedName
	granted metav1.Condition
}

// addGateways reads the Gateways that are ours.
func (c *computation) addGateways() {
	routability := c.hasRoutability()
	for _, o := range c.Gateways {
		class := c.classes[string(o.Spec.GatewayClassName)]
		if class == nil || o.DeletionTimestamp != nil {
			continue
		}
		live := c.Service(ServiceName(o.Key()))
		taken := live != nil && !Owns(o, live)
		if taken {
			live = nil
		}
		if !class.ours {
			if live != nil && live.Annotations[watch.AnnotationBackends] != "" {
				c.plan.Delete = append(c.plan.Delete, ServiceName(o.Key()))
			}
			continue
		}
		g := &gateway{obj: o, serviceName: ServiceName(o.Key()), live: live, taken: taken, params: class.params,
			listeners: readListeners(o), routability: routability, leftOut: map[*route]string{}}
		if g.params == nil && live != nil {
			g.params = liveParameters(live)
		}
		g.check()
		c.gateways[o.Key()] = g
		c.order = append(c.order, g)
	}
}

// liveParameters are those that a Service was made with: a mistake in a class's parameters takes no Gateway down.
func liveParameters(s *corev1.Service) *parameters {
	p := &parameters{serviceType: s.Spec.Type, externalTrafficPolicy: s.Spec.ExternalTrafficPolicy,
		loadBalancerClass: s.Spec.LoadBalancerClass, allocateNodePorts: or(s.Spec.AllocateLoadBalancerNodePorts, true)}
	p.externalTrafficPolicy = cmp.Or(p.externalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	return p
}

// check sets why the Gateway is not accepted, and whether it has a Service.
func (g *gateway) check() {
	reject := func(reason gatewayv1.GatewayConditionReason, message string) {
		if g.rejected.Reason == "" {
			g.rejected = gatewayReason{reason, message}
		}
	}
	if g.params == nil {
		reject(gatewayv1.GatewayReasonInvalidParameters, fmt.Sprintf("the GatewayClass %s is not accepted",
			g.obj.Spec.GatewayClassName))
	}
	if in := g.obj.Spec.Infrastructure; in != nil && in.ParametersRef != nil {
		reject(gatewayv1.GatewayReasonInvalidParameters,
			"spec.infrastructure.parametersRef is not supported: only the class has parameters")
	}
	var unsupported string
	if g.requests, unsupported = readAddresses(g.obj); unsupported != "" {
		reject(gatewayv1.GatewayReasonUnsupportedAddress, unsupported)
	}
	accepted, served := g.countListeners()
	if accepted == 0 {
		reject(gatewayv1.GatewayReasonListenersNotValid, cmp.Or(g.rejectedListeners(), "the Gateway has no listeners"))
	}
	possible := len(g.requests) == 0
	for i := range g.requests {
		possible = possible || g.requests[i].impossible == ""
	}
	g.served = g.rejected.Reason == "" && !g.taken && served > 0 && possible
}

// countListeners returns how many listeners are accepted, and how many are served if the Gateway is.
func (g *gateway) countListeners() (accepted, served int) {
	for i := range g.listeners {
		if l := &g.listeners[i]; l.rejected.Reason == "" {
			if accepted++; l.serves() {
				served++
			}
		}
	}
	return accepted, served
}

// rejectedListeners says which listeners are not accepted, and why.
func (g *gateway) rejectedListeners() string {
	var list []string
	for i := range g.listeners {
		if l := &g.listeners[i]; l.rejected.Reason != "" {
			list = append(list, "listener "+clip.Visible(string(l.Name), clip.Quoted)+": "+l.rejected.Message)
		}
	}
	return strings.Join(list, "; ")
}

// planGateway adds a Gateway to the plan. All routes are attached.
func (c *computation) planGateway(g *gateway) {
	p := GatewayPlan{Object: g.obj, ServiceName: g.serviceName}
	if g.served {
		p.Service = g.service("")
		used := 0
		for k, v := range p.Service.Annotations {
			used += len(k) + len(v)
		}
		p.Service.Annotations[watch.AnnotationBackends] = g.backends(mostAnnotations - used)
		p.Needs, p.Granted = g.needs, g.granted
	} else if g.live != nil {
		c.plan.Delete = append(c.plan.Delete, g.serviceName)
	}
	if g.rejected.Reason == "" {
		g.addresses, g.noAddress = g.assign()
	}
	why := g.notProgrammed()
	p.Programmed = g.status(why)
	if p.Waiting = p.Programmed; why.Reason == "" {
		p.Waiting = g.status(gatewayReason{gatewayv1.GatewayReasonPending,
			fmt.Sprintf("not all nodes have programmed the Service %s and its backends yet", g.serviceName)})
	}
	c.plan.Gateways = append(c.plan.Gateways, p)
}

// notProgrammed is why the Gateway will not be programmed as it is; its Reason is empty if it will be.
func (g *gateway) notProgrammed() gatewayReason {
	_, served := g.countListeners()
	switch {
	case g.rejected.Reason != "":
		return gatewayReason{gatewayv1.GatewayReasonInvalid, "the Gateway is not accepted"}
	case served == 0:
		return gatewayReason{gatewayv1.GatewayReasonInvalid,
			"no listener can be served: none allows a kind of routes that is supported"}
	case g.taken:
		return gatewayReason{gatewayv1.GatewayReasonNoResources, fmt.Sprintf(
			"the Service %s would be the Gateway's, but is not: it is left alone", g.serviceName)}
	}
	return g.noAddress
}

// status is the Gateway's, given why it is not programmed.
func (g *gateway) status(why gatewayReason) GatewayStatus {
	accepted := condition(gatewayv1.GatewayConditionAccepted, true, gatewayv1.GatewayReasonAccepted,
		"the Gateway is valid", g.obj.Generation)
	if g.rejected.Reason != "" {
		accepted = condition(gatewayv1.GatewayConditionAccepted, false, g.rejected.Reason, g.rejected.Message,
			g.obj.Generation)
	} else if message := g.rejectedListeners(); message != "" {
		accepted = condition(gatewayv1.GatewayConditionAccepted, true, gatewayv1.GatewayReasonListenersNotValid, message,
			g.obj.Generation)
	}
	programmed := condition(gatewayv1.GatewayConditionProgrammed, true, gatewayv1.GatewayReasonProgrammed,
		"all nodes have programmed the Gateway", g.obj.Generation)
	if why.Reason != "" {
		programmed = condition(gatewayv1.GatewayConditionProgrammed, false, why.Reason, why.Message, g.obj.Generation)
	}
	s := GatewayStatus{GatewayStatus: gatewayv1.GatewayStatus{Conditions: []metav1.Condition{accepted, programmed}}}
	if g.served {
		s.Addresses = g.addresses
	}
	if g.routability && g.rejected.Reason == "" {
		s.Conditions = append(s.Conditions, g.addressesAssigned())
	}
	for i := range g.listeners {
		s.Listeners = append(s.Listeners, g.listeners[i].status(g.obj.Generation, why.Reason == "", why.Message))
	}
	return s
}
