package run

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

const (
	// matrixPort is the port of all Services of a matrix, podPort where pods serve.
	matrixPort = 80
	unusedPort = 81
	podPort    = 8080
)

// labFamily gives a family in the words of the lab.
func labFamily(f cases.Family) ipfamily.Family {
	if f == cases.IPv4 {
		return ipfamily.IPv4
	}
	return ipfamily.IPv6
}

// matrixService gives the Service of a case of a matrix. n tells its external addresses from those of other Services.
func matrixService(c *cases.Case, n int) *v1.Service {
	o := c.Options
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: c.Service, Namespace: c.Theme},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, IPFamilyPolicy: new(v1.IPFamilyPolicyRequireDualStack),
			SessionAffinity: v1.ServiceAffinity(
				o.SessionAffinity,
			), ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicy(o.ExternalTrafficPolicy),
			LoadBalancerSourceRanges: sourceRanges(o.SourceRanges),
		},
		Status: v1.ServiceStatus{LoadBalancer: v1.LoadBalancerStatus{Ingress: ingress(n, o.IPMode)}},
	}
	if o.InternalTrafficPolicy != "" {
		s.Spec.InternalTrafficPolicy = new(v1.ServiceInternalTrafficPolicy(o.InternalTrafficPolicy))
	}
	s.Spec.ExternalIPs = externalIPs(n)
	for _, p := range cases.Protocols {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{
			Name: string(p), Protocol: apiProtocol(p), Port: matrixPort, TargetPort: intstr.FromInt32(podPort),
		})
	}
	return s
}

func apiProtocol(p cases.Protocol) v1.Protocol {
	return map[cases.Protocol]v1.Protocol{cases.TCP: v1.ProtocolTCP, cases.UDP: v1.ProtocolUDP,
		cases.SCTP: v1.ProtocolSCTP}[p]
}

func caseProtocol(p v1.Protocol) cases.Protocol {
	return map[v1.Protocol]cases.Protocol{v1.ProtocolTCP: cases.TCP, v1.ProtocolUDP: cases.UDP,
		v1.ProtocolSCTP: cases.SCTP, "": cases.TCP}[p]
}

func externalIPs(n int) (ips []string) {
	for _, r := range testbed.ExternalRange {
		ips = append(ips, lab.Nth(r, n).String())
	}
	return ips
}

// ingress gives the addresses of a load balancer: those of the router, which answers itself, with ipMode Proxy.
func ingress(n int, mode string) (all []v1.LoadBalancerIngress) {
	for f, r := range testbed.BalancerRange {
		in := v1.LoadBalancerIngress{IP: lab.Nth(r, n).String()}
		if mode == string(v1.LoadBalancerIPModeProxy) {
			in.IP, in.IPMode = testbed.ProxyRange[f].Addr().String(), new(v1.LoadBalancerIPModeProxy)
		}
		all = append(all, in)
	}
	return all
}

// sourceRanges gives ranges for words, of both families.
func sourceRanges(words []string) (ranges []string) {
	add := func(all []netip.Prefix) {
		for _, r := range all {
			ranges = append(ranges, r.String())
		}
	}
	for _, w := range words {
		switch {
		case w == "pods":
			add(testbed.PodRange)
		case w == "nodes":
			add(testbed.NodeRange)
		case w == "everybody":
			ranges = append(ranges, "0.0.0.0/0", "::/0")
		default:
			add(testbed.RangeOf(w))
		}
	}
	return ranges
}

// endpointSlices gives the EndpointSlices of a Service, one of each family.
func endpointSlices(
	t *testbed.Topology,
	namespace, service, name string,
	set map[string]cases.Endpoint,
	ports []discovery.EndpointPort,
	families []cases.Family,
) (all []*discovery.EndpointSlice) {
	for _, f := range families {
		slice := &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf(
					"%s-%s",
					name,
					f,
				), Namespace: namespace, Labels: map[string]string{discovery.LabelServiceName: service},
			},
			AddressType: map[cases.Family]discovery.AddressType{cases.IPv4: discovery.AddressTypeIPv4,
				cases.IPv6: discovery.AddressTypeIPv6}[f],
			Ports:     ports,
			Endpoints: []discovery.Endpoint{},
		}
		for _, host := range slices.Sorted(maps.Keys(set)) {
			slice.Endpoints = append(slice.Endpoints, endpoint(t, host, set[host], f))
		}
		all = append(all, slice)
	}
	return all
}

func endpoint(t *testbed.Topology, host string, e cases.Endpoint, f cases.Family) discovery.Endpoint {
	node := testbed.NodeOf(host)
	ready, serving := e.Condition == cases.Ready, e.Condition == cases.Ready || e.Condition == cases.Serving
	terminating := e.Condition == cases.Serving || e.Condition == cases.Terminating
	o := discovery.Endpoint{
		Addresses:  []string{t.Host(host).IP(labFamily(f)).String()},
		Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
		NodeName:   &node, Zone: new(testbed.Zones[node]),
	}
	if len(e.Zones)+len(e.Nodes) > 0 {
		o.Hints = &discovery.EndpointHints{}
		for _, z := range e.Zones {
			o.Hints.ForZones = append(o.Hints.ForZones, discovery.ForZone{Name: z})
		}
		for _, n := range e.Nodes {
			o.Hints.ForNodes = append(o.Hints.ForNodes, discovery.ForNode{Name: n})
		}
	}
	return o
}

// writeService creates a Service or updates it, with its status, and gives what the API server made of it.
func writeService(ctx context.Context, b *testbed.Testbed, s *v1.Service) (*v1.Service, error) {
	client := b.Client.CoreV1().Services(s.Namespace)
	status := s.Status
	made, err := client.Create(ctx, s, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		made, err = client.Update(ctx, s, metav1.UpdateOptions{})
	}
	if err != nil {
		return nil, fmt.Errorf("write service %s/%s: %w", s.Namespace, s.Name, err)
	}
	if len(status.LoadBalancer.Ingress) == len(made.Status.LoadBalancer.Ingress) {
		return made, nil
	}
	made.Status = status
	made, err = client.UpdateStatus(ctx, made, metav1.UpdateOptions{})
	if err != nil {
		return nil, fmt.Errorf("write status of service %s/%s: %w", s.Namespace, s.Name, err)
	}
	return made, nil
}

func writeSlice(ctx context.Context, b *testbed.Testbed, s *discovery.EndpointSlice) error {
	client := b.Client.DiscoveryV1().EndpointSlices(s.Namespace)
	_, err := client.Create(ctx, s, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = client.Update(ctx, s, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("write endpointslice %s/%s: %w", s.Namespace, s.Name, err)
	}
	return nil
}

// slicePorts gives the ports of slices for a Service: with the number of the target port, or that of ports.
func slicePorts(spec []v1.ServicePort, ports map[string]int32, only bool) (all []discovery.EndpointPort) {
	for _, p := range spec {
		number := int32(podPort)
		if p.TargetPort.Type == intstr.Int && p.TargetPort.IntVal > 0 {
			number = p.TargetPort.IntVal
		}
		if named, ok := ports[p.Name]; ok {
			number = named
		} else if only {
			continue
		}
		protocol := p.Protocol
		if protocol == "" {
			protocol = v1.ProtocolTCP
		}
		all = append(all, discovery.EndpointPort{Name: new(p.Name), Port: new(number), Protocol: new(protocol)})
	}
	return all
}

// reach gives where a Service is asked; ok is false if it has no such frontend.
func reach(
	t *testbed.Topology,
	s *v1.Service,
	p *v1.ServicePort,
	frontend cases.Frontend,
	f cases.Family,
) (to netip.AddrPort, ok bool) {
	var addr netip.Addr
	port := p.Port
	switch frontend {
	case cases.UnusedPort:
		addr, port = ofFamily(s.Spec.ClusterIPs, f), unusedPort
	case cases.ClusterIP, "":
		addr = ofFamily(s.Spec.ClusterIPs, f)
	case cases.ExternalIP:
		addr = ofFamily(s.Spec.ExternalIPs, f)
	case cases.UnusedExternalPort:
		addr, port = ofFamily(s.Spec.ExternalIPs, f), unusedPort
	case cases.LoadBalancer:
		addr = balancerAddr(s, f)
	case cases.UnusedBalancerPort:
		addr, port = balancerAddr(s, f), unusedPort
	default:
		addr, port = nodePortAddr(t, frontend, f), p.NodePort
	}
	return netip.AddrPortFrom(addr, uint16(port)), addr.IsValid() && port > 0
}

func balancerAddr(s *v1.Service, f cases.Family) netip.Addr {
	var ips []string
	for _, in := range s.Status.LoadBalancer.Ingress {
		ips = append(ips, in.IP)
	}
	return ofFamily(ips, f)
}

func nodePortAddr(t *testbed.Topology, frontend cases.Frontend, f cases.Family) netip.Addr {
	family := labFamily(f)
	switch frontend {
	case cases.NodePortA:
		return t.Host("node-a").IP(family)
	case cases.NodePortB:
		return t.Host("node-b").IP(family)
	case cases.SecondNodePortA:
		return t.SecondAddr("node-a", family)
	}
	if f == cases.IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// ofFamily gives the first address of a family.
func ofFamily(ips []string, f cases.Family) netip.Addr {
	for _, ip := range ips {
		if a, err := netip.ParseAddr(ip); err == nil && a.Is4() == (f == cases.IPv4) {
			return a
		}
	}
	return netip.Addr{}
}
