// Package snapshottest makes clusters up at random, for tests that hold one computation against another.
package snapshottest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Options says what Services of a random cluster are like. There are few of everything, so that names, addresses and
// ports collide.
type Options struct {
	// Services is how many Services come and go, 1 to 250, and Endpoints how many a slice has at most. Each Service has
	// up to two slices, one of each family.
	Services, Endpoints int
	// NodePorts is from how many node ports one is chosen for TCP.
	NodePorts int
	// Asking has some Services ask to be counted, or not to be, and to be scheduled by IPVS.
	Asking bool
	// Weights has some Services ask for a hash of the client, and some endpoints have weights.
	Weights bool
	// Backends has some Services refer to others, of which some may not be there.
	Backends bool
	// Odd has some Services at external IPs, at the node's own address, at a node port that is another frontend's port
	// there, at cluster IPs outside of the ServiceCIDRs, and with some forty ports; and the Node without addresses.
	Odd bool
}

// Cluster gives the deltas of a random cluster that keeps changing, as seen from node-1. Its random numbers are for
// other choices of a test, too.
type Cluster struct {
	*rand.Rand
	Options
}

// Yes is true half of the time.
func (c Cluster) Yes() bool { return c.IntN(2) == 0 }

// Host gives a delta of the node's addresses, its Node object and the ServiceCIDRs.
func (c Cluster) Host() snapshot.Delta {
	addrs := []netip.Addr{addr("127.0.0.1"), addr("192.0.2.1"), addr("2001:db8::1")}
	if c.Yes() {
		addrs = append(addrs, addr("2001:db8::2"))
	}
	node := snapshot.Node{Name: "node-1", Addresses: addrs[1:]}
	if c.Odd && c.IntN(4) == 0 {
		node.Addresses = nil
	}
	cidrs := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	if c.Yes() {
		cidrs = append(cidrs, netip.MustParsePrefix("10.97.0.0/16"), netip.MustParsePrefix("fd00:96::/112"))
	}
	return snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &cidrs, Node: &node}
}

// Service gives the Service of a number, with anything about it chosen anew but its name and its IPv4 cluster IP.
func (c Cluster) Service(i int) *snapshot.Service {
	s := &snapshot.Service{Name: snapshot.Name{Namespace: "default", Name: fmt.Sprintf("s%d", i)},
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i % 5), byte(1 + i)})}}
	if c.Yes() {
		s.ClusterIPs = append(s.ClusterIPs, addr(fmt.Sprintf("fd00:96::%x", i+1)))
	}
	s.InternalLocal, s.ExternalLocal = c.Yes(), c.Yes()
	s.ExternalFailover = snapshot.ExternalFailover(c.IntN(4))
	if c.Yes() {
		s.Affinity = time.Duration(1+c.IntN(2)) * time.Hour
	}
	if c.Yes() {
		s.LoadBalancerIPs = []netip.Addr{addr(fmt.Sprintf("203.0.113.%d", c.IntN(4))), addr("2001:db8:1::1")}
		for range c.IntN(4) {
			s.SourceRanges = append(s.SourceRanges, netip.PrefixFrom(addr("198.51.100.0"), 24+c.IntN(8)).Masked())
		}
		s.HealthCheckNodePort = uint16(29000 + i) // an API server gives no port away twice
	}
	if c.IntN(5) == 0 { // so many frontends that they share the class of their pool
		for n := range 4 {
			s.ExternalIPs = append(s.ExternalIPs, netip.AddrFrom4([4]byte{198, 18, byte(i), byte(1 + n)}))
		}
	}
	s.Ports = []snapshot.Port{
		{Name: "a", Protocol: snapshot.TCP, Port: 80, NodePort: 30000 + uint16(c.IntN(c.NodePorts))},
		{Name: "b", Protocol: snapshot.UDP, Port: 53},
		{Name: "c", Protocol: snapshot.SCTP, Port: 80, NodePort: 30000 + uint16(c.IntN(1+c.NodePorts/4))},
	}
	if c.Odd {
		c.odd(i, s)
	}
	s.Ports = s.Ports[:1+c.IntN(len(s.Ports))]
	if c.Asking {
		c.asks(s)
	}
	if c.Weights {
		c.weighs(s)
	}
	if c.Backends && c.IntN(3) == 0 {
		c.refers(s)
	}
	return s
}

// refers gives each port of a Service up to three backends.
func (c Cluster) refers(s *snapshot.Service) {
	s.Backends = &snapshot.Backends{For: "Gateway default/" + s.Name.Name}
	for _, p := range s.Ports {
		of := snapshot.PortBackends{Port: p.Name}
		for range 1 + c.IntN(3) {
			n := snapshot.Name{Namespace: "default", Name: fmt.Sprintf("s%d", c.IntN(c.Services))}
			of.To = append(of.To, snapshot.Backend{Service: n, Port: p.Port, Weight: uint32(c.IntN(4))})
		}
		s.Backends.Ports = append(s.Backends.Ports, of)
	}
}

// odd makes a Service what few are.
func (c Cluster) odd(i int, s *snapshot.Service) {
	if c.IntN(8) == 0 {
		s.ClusterIPs[0] = netip.AddrFrom4([4]byte{10, 98, 0, byte(1 + i)})
	}
	if len(s.ClusterIPs) > 1 && c.IntN(3) > 0 {
		s.ClusterIPs[1] = addr(fmt.Sprintf("fd00:96::%d:%x", 1+c.IntN(2), i+1))
	}
	if len(s.LoadBalancerIPs) > 0 {
		s.LoadBalancerIPs = append(s.LoadBalancerIPs, addr("192.0.2.1"))
	}
	if c.IntN(4) == 0 {
		s.ExternalIPs = append(s.ExternalIPs, addr("203.0.113.77"), addr("10.96.0.200"))
	}
	if c.IntN(6) == 0 {
		s.Ports[0].NodePort = 80 // as a load balancer's port at this node's own address
	}
	if c.IntN(10) > 0 {
		return
	}
	for n := range manyPorts {
		s.Ports = append(s.Ports, snapshot.Port{Name: fmt.Sprint("p", n), Protocol: snapshot.TCP,
			Port: uint16(1000 + c.IntN(60000)), NodePort: uint16(31000 + (manyPorts+1)*i + n)})
	}
	c.Shuffle(len(s.Ports), func(a, b int) { s.Ports[a], s.Ports[b] = s.Ports[b], s.Ports[a] })
}

// manyPorts is how many ports an odd Service has besides the usual ones.
const manyPorts = 40

func (c Cluster) asks(s *snapshot.Service) {
	if c.IntN(4) == 0 {
		s.Scheduling = &snapshot.Scheduling{Scheduler: "lc"}
	}
	if c.IntN(3) == 0 {
		s.Counters = snapshot.Counters(1 + c.IntN(2))
	}
}

func (c Cluster) weighs(s *snapshot.Service) {
	switch n := c.IntN(6); {
	case s.Scheduling != nil:
	case n == 0:
		s.Scheduling = &snapshot.Scheduling{Scheduler: snapshot.Hash, Port: c.Yes()}
	case n == 1:
		s.Scheduling = &snapshot.Scheduling{Weights: map[string]uint16{"node-1": uint16(c.IntN(3)), "node-2": 2}}
	}
}

// Slice gives a slice of the Service of a number, with other endpoints: part 0 has those of IPv4, part 1 those of IPv6.
func (c Cluster) Slice(i, part int) *snapshot.Slice {
	s := &snapshot.Slice{
		Name:    snapshot.Name{Namespace: "default", Name: fmt.Sprintf("s%d-%d", i, part)},
		Service: fmt.Sprintf("s%d", i),
		Ports: []snapshot.SlicePort{
			{Name: "a", Protocol: snapshot.TCP, Port: 8080},
			{Name: "b", Protocol: snapshot.UDP, Port: 53},
			{Name: "c", Protocol: snapshot.SCTP, Port: 9},
		},
	}
	if c.Odd {
		for n := range manyPorts {
			s.Ports = append(s.Ports,
				snapshot.SlicePort{Name: fmt.Sprint("p", n), Protocol: snapshot.TCP, Port: uint16(9000 + n)})
		}
	}
	format := []string{"10.244.1.%d", "fd00:244::%x"}[part]
	for n := range c.IntN(c.Endpoints + 1) {
		if c.Yes() {
			continue
		}
		e := snapshot.Endpoint{Addr: addr(fmt.Sprintf(format, n+1)), Ready: c.Yes(),
			Node: fmt.Sprintf("node-%d", 1+c.IntN(2))}
		e.Serving, e.Terminating = e.Ready || c.Yes(), !e.Ready && c.Yes()
		if c.Weights && c.IntN(4) == 0 {
			e.Weight = snapshot.Weight{Given: true, Parts: snapshot.PartsOf(uint16(c.IntN(20)))}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

// Step changes one to three things.
func (c Cluster) Step() snapshot.Delta {
	var d snapshot.Delta
	for range 1 + c.IntN(3) {
		i := c.IntN(c.Services)
		switch c.IntN(8) {
		case 0:
			d.Merge(c.Host())
		case 1:
			d.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{c.Service(i).Name: nil}})
		case 2, 3:
			d.Merge(services(c.Service(i)))
		default:
			d.Merge(slices(c.Slice(i, c.IntN(2))))
		}
	}
	return d
}

// All gives a delta with the host, and every Service and slice.
func (c Cluster) All() snapshot.Delta {
	d := c.Host()
	for i := range c.Services {
		d.Merge(services(c.Service(i)))
		d.Merge(slices(c.Slice(i, 0)))
		d.Merge(slices(c.Slice(i, 1)))
	}
	return d
}

func services(s *snapshot.Service) snapshot.Delta {
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: s}}
}

func slices(s *snapshot.Slice) snapshot.Delta {
	return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{s.Name: s}}
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }
