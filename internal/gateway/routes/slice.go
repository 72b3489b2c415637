package routes

import (
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ManagedBy is what EndpointSlices that are ours say in the label discoveryv1.LabelManagedBy, whose values have no
// slashes, unlike ControllerName.
const ManagedBy = "gateway.verdict-proxy.github.io"

// mostEndpoints is how many the API server lets an EndpointSlice have.
const mostEndpoints = 1000

// slices are the EndpointSlices of the Gateway's Service, one for each family. Their endpoints are the cluster IPs of
// the backends that connections are sent to. Nodes ignore them, since the Service names its backends: they are for
// whoever announces only addresses of Services that have endpoints.
func (c *computation) slices(g *gateway) (list []*discoveryv1.EndpointSlice) {
	if g.live == nil {
		return nil // its UID is not known
	}
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: g.serviceName.Namespace,
				Name: g.serviceName.Name + "-" + strings.ToLower(string(family)),
				Labels: map[string]string{discoveryv1.LabelServiceName: g.serviceName.Name,
					discoveryv1.LabelManagedBy: ManagedBy},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: g.serviceName.Name,
					UID: g.live.UID, Controller: new(true)}}},
			AddressType: family, Endpoints: []discoveryv1.Endpoint{}, Ports: g.slicePorts()}
		for _, n := range g.needs {
			if n == g.serviceName {
				continue
			}
			for _, ip := range c.Service(n).Spec.ClusterIPs {
				if a, err := netip.ParseAddr(ip); err == nil && a.Is4() == (family == discoveryv1.AddressTypeIPv4) &&
					len(s.Endpoints) < mostEndpoints {
					s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{ip},
						Conditions: discoveryv1.EndpointConditions{Ready: new(true)}})
				}
			}
		}
		list = append(list, s)
	}
	return list
}

// slicePorts are the Service's, each with the port of its backends if they have the same one.
func (g *gateway) slicePorts() (ports []discoveryv1.EndpointPort) {
	for i := range g.listeners {
		l := &g.listeners[i]
		if !l.serves() {
			continue
		}
		numbers := map[int32]bool{}
		p := discoveryv1.EndpointPort{Name: new(l.portName()), Protocol: new(corev1.Protocol(l.Protocol))}
		if l.first != nil {
			for _, b := range l.first.backends {
				if b.refused == "" && b.weight > 0 {
					numbers[b.port], p.Port = true, new(b.port)
				}
			}
		}
		if len(numbers) != 1 {
			p.Port = new(l.Port)
		}
		ports = append(ports, p)
	}
	return ports
}

// MergeSlice returns has with what is ours of the EndpointSlice in want, and whether it differs from has.
func MergeSlice(has, want *discoveryv1.EndpointSlice) (*discoveryv1.EndpointSlice, bool) {
	s := has.DeepCopy()
	s.Labels = withAll(s.Labels, want.Labels)
	s.OwnerReferences, s.Endpoints, s.Ports = want.OwnerReferences, want.Endpoints, want.Ports
	return s, !equal(has, s)
}
