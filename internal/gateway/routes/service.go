package routes

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/sync/watch"
)

// annotationInfrastructure names the labels and annotations that a Service has because its Gateway's infrastructure has
// them, separated by spaces, so that they go when they do. It is not in the domain of annotations that nodes read.
const annotationInfrastructure = "gateway.verdict-proxy.github.io/infrastructure"

// ServiceName is the Service that is a Gateway's. Names of Gateways may be longer than those of Services, and have
// dots.
func ServiceName(gateway types.NamespacedName) types.NamespacedName {
	name := gateway.Name + "-verdict"
	if len(validation.IsDNS1035Label(name)) > 0 {
		sum := sha256.Sum256([]byte(gateway.Name))
		name = fmt.Sprintf("gateway-%x-verdict", sum[:16])
	}
	return types.NamespacedName{Namespace: gateway.Namespace, Name: name}
}

// Owns says whether a Service is the Gateway's.
func Owns(g *Gateway, s *corev1.Service) bool { return s != nil && metav1.IsControlledBy(s, g) }

// serviceType is that of the Gateway's Service: a Gateway that asks for nothing but cluster IPs needs no load balancer.
func (g *gateway) serviceType() corev1.ServiceType {
	if len(g.requests) > 0 && !slices.ContainsFunc(g.requests, func(r addressRequest) bool { return !r.clusterIP() }) {
		return corev1.ServiceTypeClusterIP
	}
	return g.params.serviceType
}

// service is what of the Gateway's Service is ours. Every field that is set there, and no other, is.
func (g *gateway) service(backends string) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: g.serviceName.Name, Namespace: g.serviceName.Namespace,
			Labels: map[string]string{}, Annotations: map[string]string{},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(g.obj,
				schema.GroupVersionKind{Group: gatewayv1.GroupName, Version: "v1", Kind: "Gateway"})}},
		Spec: corev1.ServiceSpec{Type: g.serviceType(), IPFamilyPolicy: new(corev1.IPFamilyPolicyPreferDualStack)},
	}
	g.addMetadata(s, backends)
	for i := range g.listeners {
		if l := &g.listeners[i]; l.serves() {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: l.portName(), Port: l.Port,
				Protocol: corev1.Protocol(l.Protocol), TargetPort: intstr.FromInt32(l.Port)})
		}
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
		s.Spec.ExternalTrafficPolicy = g.params.externalTrafficPolicy
		s.Spec.LoadBalancerClass = g.params.loadBalancerClass
		s.Spec.AllocateLoadBalancerNodePorts = new(g.params.allocateNodePorts)
	}
	g.askForAddresses(&s.Spec)
	return s
}

// portName is the name of the listener's port of the Service.
func (l *listener) portName() string {
	return fmt.Sprintf("%s-%d", strings.ToLower(string(l.Protocol)), l.Port)
}

// askForAddresses sets the addresses that the Gateway asks for. There is one field for an address of a load balancer,
// so the first one is asked for. Never externalIPs: they would take any address from anybody.
func (g *gateway) askForAddresses(spec *corev1.ServiceSpec) {
	var ipv4, ipv6 bool
	for i := range g.requests {
		r := &g.requests[i]
		switch is4 := r.value.Is4(); {
		case r.impossible != "" || !r.value.IsValid():
		case !r.clusterIP() && spec.Type == corev1.ServiceTypeLoadBalancer:
			if spec.LoadBalancerIP == "" {
				spec.LoadBalancerIP = r.value.String()
			}
		case is4 && !ipv4, !is4 && !ipv6:
			ipv4, ipv6 = ipv4 || is4, ipv6 || !is4
			spec.ClusterIPs = append(spec.ClusterIPs, r.value.String())
			spec.ClusterIP = spec.ClusterIPs[0]
		}
	}
}

// addMetadata sets labels and annotations: those of the Gateway's infrastructure, and ours, which win.
func (g *gateway) addMetadata(s *corev1.Service, backends string) {
	var propagated []string
	if in := g.obj.Spec.Infrastructure; in != nil {
		for k, v := range in.Labels {
			if k != labelProxyName && k != corev1.IsHeadlessService {
				s.Labels[string(k)] = string(v)
				propagated = append(propagated, "label:"+string(k))
			}
		}
		for k, v := range in.Annotations {
			s.Annotations[string(k)] = string(v)
			propagated = append(propagated, "annotation:"+string(k))
		}
	}
	slices.Sort(propagated)
	for label, value := range map[string]string{
		gatewayv1.GatewayNameLabelKey:      g.obj.Name,
		gatewayv1.GatewayClassNameLabelKey: string(g.obj.Spec.GatewayClassName),
	} {
		if delete(s.Labels, label); len(validation.IsValidLabelValue(value)) == 0 {
			s.Labels[label] = value
		}
	}
	s.Annotations[watch.AnnotationBackends] = backends
	if delete(s.Annotations, annotationInfrastructure); len(propagated) > 0 {
		s.Annotations[annotationInfrastructure] = strings.Join(propagated, " ")
	}
}

// MergeService returns has with what is ours of the Service in want, and whether it differs from has. What others set
// stays: node ports, cluster IPs, other labels and annotations. The class of a load balancer stays as well, since the
// API server does not let it change.
func MergeService(has, want *corev1.Service) (*corev1.Service, bool) {
	s := has.DeepCopy()
	dropPropagated(s)
	s.Labels = withAll(s.Labels, want.Labels)
	s.Annotations = withAll(s.Annotations, want.Annotations)
	s.Spec.Type, s.Spec.Selector, s.Spec.IPFamilyPolicy = want.Spec.Type, nil, want.Spec.IPFamilyPolicy
	s.Spec.Ports = slices.Clone(want.Spec.Ports)
	s.Spec.ExternalTrafficPolicy = want.Spec.ExternalTrafficPolicy
	s.Spec.AllocateLoadBalancerNodePorts = want.Spec.AllocateLoadBalancerNodePorts
	s.Spec.LoadBalancerIP = want.Spec.LoadBalancerIP
	if want.Spec.Type != corev1.ServiceTypeLoadBalancer {
		s.Spec.LoadBalancerClass, s.Spec.HealthCheckNodePort = nil, 0
	} else if keepNodePorts(s.Spec.Ports, has.Spec.Ports); has.Spec.Type != corev1.ServiceTypeLoadBalancer {
		s.Spec.LoadBalancerClass = want.Spec.LoadBalancerClass
	}
	return s, !equal(has, s)
}

// keepNodePorts sets the node ports of ports that a Service has already.
func keepNodePorts(ports, has []corev1.ServicePort) {
	for i := range ports {
		p := &ports[i]
		for _, was := range has {
			if was.Port == p.Port && protocolOf(was.Protocol) == p.Protocol {
				p.NodePort = was.NodePort
			}
		}
	}
}

// dropPropagated takes away what the Service has of a Gateway's infrastructure.
func dropPropagated(s *corev1.Service) {
	for name := range strings.FieldsSeq(s.Annotations[annotationInfrastructure]) {
		if label, ok := strings.CutPrefix(name, "label:"); ok {
			delete(s.Labels, label)
		} else if annotation, ok := strings.CutPrefix(name, "annotation:"); ok {
			delete(s.Annotations, annotation)
		}
	}
	delete(s.Annotations, annotationInfrastructure)
}

// withAll returns a map with the entries of another one added.
func withAll(m, more map[string]string) map[string]string {
	if m == nil {
		return maps.Clone(more)
	}
	maps.Copy(m, more)
	return m
}
