// Package benchmark measures Service proxies in large clusters, from outside: a real control plane with as many
// Services as wanted, a node with the proxy under test, and packets that tell what the node's kernel has been told.
package benchmark

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

// The addresses. Endpoints are counted up from the beginning of their range, those that come in the place of others
// from its middle. The server's host answers at all of them.
var (
	serviceRange  = netip.MustParsePrefix("10.96.0.0/15")
	endpointRange = netip.MustParsePrefix("10.128.0.0/10")
	podRange      = netip.MustParsePrefix("10.128.0.0/9")
	firstService  = number(netip.MustParseAddr("10.96.1.0"))
	firstEndpoint = number(netip.MustParseAddr("10.128.1.0"))
	firstNewcomer = number(netip.MustParseAddr("10.160.0.0"))
)

func number(a netip.Addr) uint32 { b := a.As4(); return binary.BigEndian.Uint32(b[:]) }

func address(n uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], n)
	return netip.AddrFrom4(b)
}

const (
	servicePort = 80
	// serverPort is where the server says who it was reached as, sinkPort where it takes all that comes.
	serverPort, sinkPort = 8080, 8081
	namespaces           = 20
	nodes                = 100
	nodeName             = "node-0"
	// probes is how many Services there are besides, of one endpoint each, whose changes are looked for.
	probes = 8
)

// cluster is the objects: size.Services ordinary Services, after them the probes, and one that leads to the sink.
type cluster struct {
	size results.Size
	// varied says that the ordinary Services are of many kinds; otherwise all have a cluster IP and no more.
	varied bool

	mu sync.Mutex
	// endpoints are those that each Service has now.
	endpoints [][]netip.Addr
	newcomers uint32
}

func newCluster(size results.Size) *cluster {
	c := &cluster{size: size, endpoints: make([][]netip.Addr, size.Services+probes+1)}
	next := firstEndpoint
	for i := range c.endpoints {
		n := size.Endpoints
		if i >= size.Services {
			n = 1
		}
		for range n {
			c.endpoints[i] = append(c.endpoints[i], address(next))
			next++
		}
	}
	return c
}

func (c *cluster) probe(i int) int { return c.size.Services + i }
func (c *cluster) sink() int       { return c.size.Services + probes }

func (c *cluster) name(i int) string      { return fmt.Sprintf("service-%05d", i) }
func (c *cluster) namespace(i int) string { return fmt.Sprintf("team-%d", i%namespaces) }

func (c *cluster) clusterIP(i int) netip.Addr { return address(firstService + uint32(i)) }

// frontend is where a Service is reached.
func (c *cluster) frontend(i int) netip.AddrPort {
	return netip.AddrPortFrom(c.clusterIP(i), servicePort)
}

func (c *cluster) targetPort(i int) int32 {
	if i == c.sink() {
		return sinkPort
	}
	return serverPort
}

// replace puts an endpoint that nobody had before in the place of one, and gives the slice as it is then, and the
// newcomer.
func (c *cluster) replace(i, endpoint int) (*discovery.EndpointSlice, netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	newcomer := address(firstNewcomer + c.newcomers)
	c.newcomers++
	c.endpoints[i][endpoint] = newcomer
	return c.slice(i), newcomer
}

func (c *cluster) meta(i int, name, kind string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: name, Namespace: c.namespace(i), UID: types.UID(fmt.Sprintf("00000000-0000-4000-8000-%.4s%08d", kind, i)),
		CreationTimestamp: metav1.Unix(1750000000, 0),
	}
}

func (c *cluster) service(i int) *v1.Service {
	ip := c.clusterIP(i).String()
	s := &v1.Service{ObjectMeta: c.meta(i, c.name(i), "aaaa")}
	s.Labels = map[string]string{"app": c.name(i)}
	s.Spec = v1.ServiceSpec{
		Type: v1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
		IPFamilyPolicy: new(v1.IPFamilyPolicySingleStack), SessionAffinity: v1.ServiceAffinityNone,
		InternalTrafficPolicy: new(v1.ServiceInternalTrafficPolicyCluster),
		Ports: []v1.ServicePort{{
			Name: "http", Port: servicePort, Protocol: v1.ProtocolTCP, TargetPort: intstr.FromInt32(c.targetPort(i)),
		}},
	}
	if c.varied && i < c.size.Services {
		c.vary(s, i)
	}
	return s
}

// The addresses of varied Services, and how many node ports there are of each kind: the range has 2,768.
var (
	firstBalancer = number(netip.MustParseAddr("198.18.1.0"))
	firstExternal = number(netip.MustParseAddr("198.19.1.0"))
)

const (
	firstNodePort, firstHealthPort = 30000, 32000
	nodePorts, healthPorts         = 1900, 700
)

// vary makes the Service one of eight kinds, so that policies, affinity and ranges of sources meet. Affinity is rare:
// kube-proxy makes a set for each endpoint then, and takes minutes to write ten thousands of them.
func (c *cluster) vary(s *v1.Service, i int) {
	n := i / 8
	if n%25 == 1 {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{
			ClientIP: &v1.ClientIPConfig{TimeoutSeconds: new(int32(10800))},
		}
	}
	external := v1.ServiceExternalTrafficPolicyCluster
	if n%2 == 1 {
		external = v1.ServiceExternalTrafficPolicyLocal
	}
	switch i % 8 {
	case 1:
		if n < nodePorts {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = v1.ServiceTypeNodePort, external
			s.Spec.Ports[0].NodePort = int32(firstNodePort + n)
		}
	case 3, 5:
		if external == v1.ServiceExternalTrafficPolicyLocal && (i%8 != 3 || n >= healthPorts) {
			external = v1.ServiceExternalTrafficPolicyCluster
		}
		if external == v1.ServiceExternalTrafficPolicyLocal {
			s.Spec.HealthCheckNodePort = int32(firstHealthPort + n)
		}
		s.Spec.Type, s.Spec.ExternalTrafficPolicy = v1.ServiceTypeLoadBalancer, external
		s.Spec.AllocateLoadBalancerNodePorts = new(false)
		ip := address(firstBalancer + uint32(i)).String()
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: ip, IPMode: new(v1.LoadBalancerIPModeVIP)}}
		if i%8 == 5 {
			s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24", address(firstEndpoint+uint32(i)).String() + "/32"}
		}
	case 7:
		s.Spec.ExternalIPs = []string{address(firstExternal + uint32(i)).String()}
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
	}
}

// ipAddress is the object by which the API server remembers that a cluster IP is taken.
func (c *cluster) ipAddress(i int) *networking.IPAddress {
	a := &networking.IPAddress{ObjectMeta: c.meta(i, c.clusterIP(i).String(), "bbbb")}
	a.Namespace = ""
	a.Labels = map[string]string{
		"ipaddress.kubernetes.io/ip-family":  "IPv4",
		"ipaddress.kubernetes.io/managed-by": "ipallocator.k8s.io",
	}
	a.Spec.ParentRef = &networking.ParentReference{Resource: "services", Namespace: c.namespace(i), Name: c.name(i)}
	return a
}

// slice gives the EndpointSlice of a Service as it is now.
func (c *cluster) slice(i int) *discovery.EndpointSlice { return c.sliceOf(i, c.endpoints[i]) }

// sliceOf gives the EndpointSlice of a Service with these endpoints.
func (c *cluster) sliceOf(i int, endpoints []netip.Addr) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{ObjectMeta: c.meta(i, c.name(i)+"-0", "cccc"), AddressType: discovery.AddressTypeIPv4}
	s.Labels = map[string]string{
		discovery.LabelServiceName: c.name(i), discovery.LabelManagedBy: "endpointslice-controller.k8s.io", "app": c.name(i),
	}
	s.Ports = []discovery.EndpointPort{{Name: new("http"), Port: new(c.targetPort(i)), Protocol: new(v1.ProtocolTCP)}}
	for j, a := range endpoints {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses:  []string{a.String()},
			Conditions: discovery.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			NodeName:   new(fmt.Sprintf("node-%d", (i+j)%nodes)),
			TargetRef:  &v1.ObjectReference{Kind: "Pod", Namespace: c.namespace(i), Name: fmt.Sprintf("%s-%d", c.name(i), j)},
		})
	}
	return s
}

// spread gives n Services that lie evenly among the ordinary ones, the first and the last among them; all if there
// are fewer.
func (c *cluster) spread(n int) (all []int) {
	last := c.size.Services - 1
	if n > last {
		n = last + 1
	}
	for i := range n {
		all = append(all, last*i/max(n-1, 1))
	}
	return all
}
