package routes

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// routeReasonNoReadyListeners is a reason of the condition Accepted of a route all of whose listeners, or the Gateway,
// are not served. The API has no reason for it.
const routeReasonNoReadyListeners gatewayv1.RouteConditionReason = "NoReadyListeners"

// route is a TCPRoute or a UDPRoute.
type route struct {
	plan     RoutePlan
	kind     string
	protocol corev1.Protocol
	spec     *gatewayv1.CommonRouteSpec
	refs     []gatewayv1.BackendRef
	// unsupported is why the rules are not supported; empty if they are.
	unsupported string
	// backends are those of refs, and resolved says why some are refused. Both are for all parents.
	backends []backend
	resolved routeReason
	parents  []attachment
}

// attachment is what a reference of a route to a Gateway of ours leads to.
type attachment struct {
	ref *gatewayv1.ParentReference
	to  *gateway
	// matched says that the reference selects a listener, and listeners are those that allow the route, too.
	matched   bool
	listeners []*listener
}

func tcpRoute(o *gatewayv1.TCPRoute) *route {
	r := &route{kind: kindTCP, protocol: corev1.ProtocolTCP, spec: &o.Spec.CommonRouteSpec,
		plan: RoutePlan{Object: o, Status: &o.Status.RouteStatus}}
	for i := range o.Spec.Rules {
		r.refs = o.Spec.Rules[i].BackendRefs
	}
	r.check(len(o.Spec.Rules))
	return r
}

func udpRoute(o *gatewayv1.UDPRoute) *route {
	r := &route{kind: kindUDP, protocol: corev1.ProtocolUDP, spec: &o.Spec.CommonRouteSpec,
		plan: RoutePlan{Object: o, Status: &o.Status.RouteStatus}}
	for i := range o.Spec.Rules {
		r.refs = o.Spec.Rules[i].BackendRefs
	}
	r.check(len(o.Spec.Rules))
	return r
}

// check checks what definitions of the API check, too: older ones, which the cluster may have, do not.
func (r *route) check(rules int) {
	if rules != 1 {
		r.unsupported = fmt.Sprintf("spec.rules: a %s has one rule, and not %d", r.kind, rules)
	} else if n := len(r.refs); n > snapshot.MaxBackends {
		r.unsupported = fmt.Sprintf("spec.rules[0].backendRefs: %d are too many: %d at most", n, snapshot.MaxBackends)
	}
	for i := range r.refs {
		if w := or(r.refs[i].Weight, 1); r.unsupported == "" && (w < 0 || w > snapshot.MaxBackendWeight) {
			r.unsupported = fmt.Sprintf("spec.rules[0].backendRefs[%d].weight: %d is not a number from 0 to %d", i, w,
				snapshot.MaxBackendWeight)
		}
	}
	if r.unsupported != "" {
		r.refs = nil
	}
}

func (r *route) name() string {
	return r.kind + " " + r.plan.Object.GetNamespace() + "/" + r.plan.Object.GetName()
}

// addRoute attaches a route to the listeners of our Gateways.
func (c *computation) addRoute(r *route) {
	c.routes = append(c.routes, r)
	for i := range r.spec.ParentRefs {
		ref := &r.spec.ParentRefs[i]
		if !isKind(ref.Group, or(ref.Kind, "Gateway"), "Gateway") {
			continue
		}
		g := c.gateways[types.NamespacedName{Name: string(ref.Name),
			Namespace: string(or(ref.Namespace, gatewayv1.Namespace(r.plan.Object.GetNamespace())))}]
		if g != nil {
			r.parents = append(r.parents, c.attach(r, ref, g))
		}
	}
	if len(r.parents) > 0 {
		c.resolve(r)
	}
}

// attach finds the listeners of a Gateway that a route attaches to.
func (c *computation) attach(r *route, ref *gatewayv1.ParentReference, g *gateway) attachment {
	a := attachment{ref: ref, to: g}
	for i := range g.listeners {
		l := &g.listeners[i]
		if or(ref.SectionName, l.Name) != l.Name && *ref.SectionName != "" || or(ref.Port, l.Port) != l.Port {
			continue
		}
		a.matched = true
		if c.allows(g, l, r.kind, r.plan.Object.GetNamespace()) {
			a.listeners = append(a.listeners, l)
		}
	}
	if r.unsupported != "" || !a.served() {
		return a
	}
	for _, l := range a.listeners {
		if l.last != r {
			l.last = r
			l.attached++
		}
		if l.serves() && (l.first == nil || older(r.plan.Object, l.first.plan.Object) < 0) {
			l.first = r
		}
	}
	return a
}

// served says whether any of the listeners is.
func (a *attachment) served() bool {
	return a.to.served && slices.ContainsFunc(a.listeners, (*listener).serves)
}

// accepted is the condition Accepted of a route by one parent.
func (r *route) accepted(a *attachment) metav1.Condition {
	no := func(reason gatewayv1.RouteConditionReason, message string) metav1.Condition {
		return condition(gatewayv1.RouteConditionAccepted, false, reason, message, r.plan.Object.GetGeneration())
	}
	switch {
	case !a.matched:
		return no(gatewayv1.RouteReasonNoMatchingParent, "the Gateway has no listener with this sectionName and port")
	case len(a.listeners) == 0:
		return no(gatewayv1.RouteReasonNotAllowedByListeners, fmt.Sprintf(
			"no listener that is referred to allows a %s of namespace %s", r.kind, r.plan.Object.GetNamespace()))
	case r.unsupported != "":
		return no(gatewayv1.RouteReasonUnsupportedValue, r.unsupported)
	case !a.to.served:
		return no(routeReasonNoReadyListeners, "the Gateway is not served")
	case !a.served():
		return no(routeReasonNoReadyListeners, "no listener that allows the route is served")
	}
	return condition(gatewayv1.RouteConditionAccepted, true, gatewayv1.RouteReasonAccepted, r.acceptedMessage(a),
		r.plan.Object.GetGeneration())
}

// mostLost is how many listeners with older routes a message names.
const mostLost = 4

// acceptedMessage says where older routes are served in place of the route.
func (r *route) acceptedMessage(a *attachment) string {
	var lost []string
	for _, l := range a.listeners {
		if l.first != nil && l.first != r && len(lost) < mostLost {
			lost = append(lost, fmt.Sprintf("listener %s serves %s", l.Name, l.first.name()))
		}
	}
	if len(lost) == 0 {
		return "the route is served"
	}
	return "one route is served per listener, the oldest: " + strings.Join(lost, ", ")
}

// planRoute adds a route with the conditions of all its parents to the plan.
func (c *computation) planRoute(r *route) {
	for i := range r.parents {
		a := &r.parents[i]
		accepted := r.accepted(a)
		resolved := r.resolved
		if why, left := a.to.leftOut[r]; left {
			resolved = routeReason{routeReasonTooLarge, why}
		}
		r.plan.Parents = append(r.plan.Parents, RouteParent{
			Gateway: a.to.obj.Key(),
			Waits:   accepted.Status == metav1.ConditionTrue,
			Status: gatewayv1.RouteParentStatus{ParentRef: *a.ref.DeepCopy(), ControllerName: c.Controller,
				Conditions: []metav1.Condition{accepted, condition(gatewayv1.RouteConditionResolvedRefs,
					resolved.Reason == gatewayv1.RouteReasonResolvedRefs, resolved.Reason, resolved.Message,
					r.plan.Object.GetGeneration())}},
		})
	}
	c.plan.Routes = append(c.plan.Routes, r.plan)
}
