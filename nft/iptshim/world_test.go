package iptshim

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

var configs = []dataplane.Config{
	{NodeName: "node-1", LocalhostNodePorts: true,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{prefix("10.244.0.0/16"), prefix("fd00:244::/32")}}},
	{NodeName: "node-1"},
	{NodeName: "node-1", MasqueradeAll: true, DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{prefix("10.244.0.0/16")}}},
	{NodeName: "node-1", DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"}},
	{NodeName: "node-1", DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: "pod"}},
}

// world gives the deltas of a random cluster that keeps changing.
type world struct {
	*rand.Rand
	services int
}

func newWorld(seed uint64, services int) world {
	return world{rand.New(rand.NewPCG(seed, 7)), services}
}

func (w world) yes() bool { return w.IntN(2) == 0 }

func (w world) host() snapshot.Delta {
	addrs := []netip.Addr{addr("127.0.0.1"), addr("192.0.2.1"), addr("2001:db8::1")}
	if w.yes() {
		addrs = append(addrs, addr("2001:db8::2"))
	}
	node := snapshot.Node{Name: "node-1", Addresses: addrs[1:]}
	if w.IntN(4) == 0 {
		node.Addresses = nil
	}
	cidrs := []netip.Prefix{prefix("10.96.0.0/16")}
	if w.yes() {
		cidrs = append(cidrs, prefix("fd00:96::/112"))
	}
	return snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &cidrs, Node: &node}
}

func (w world) service(i int) *snapshot.Service {
	s := &snapshot.Service{Name: snapshot.Name{Namespace: "default", Name: fmt.Sprintf("s%d", i)},
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i % 5), byte(1 + i)})}}
	if w.IntN(8) == 0 {
		s.ClusterIPs[0] = netip.AddrFrom4([4]byte{10, 98, 0, byte(1 + i)})
	}
	if w.yes() {
		s.ClusterIPs = append(s.ClusterIPs, addr(fmt.Sprintf("fd00:96::%d:%x", i%3, i+1)))
	}
	s.InternalLocal, s.ExternalLocal = w.yes(), w.yes()
	if w.yes() {
		s.Affinity = time.Duration(1+w.IntN(2)) * time.Hour
	}
	if w.yes() {
		s.LoadBalancerIPs = []netip.Addr{addr(fmt.Sprintf("203.0.113.%d", w.IntN(4))), addr("2001:db8:1::1"), addr("192.0.2.1")}
		for range w.IntN(4) {
			s.SourceRanges = append(s.SourceRanges, netip.PrefixFrom(addr("198.51.100.0"), 24+w.IntN(8)).Masked())
		}
		s.HealthCheckNodePort = uint16(32000 + i)
	}
	if w.IntN(4) == 0 {
		s.ExternalIPs = []netip.Addr{addr("203.0.113.77"), addr("10.96.0.200")}
	}
	ports := []snapshot.Port{
		{Name: "a", Protocol: snapshot.TCP, Port: 80, NodePort: 30000 + uint16(w.IntN(40))},
		{Name: "b", Protocol: snapshot.UDP, Port: 53},
		{Name: "c", Protocol: snapshot.SCTP, Port: 80, NodePort: 30000 + uint16(w.IntN(9))},
	}
	if w.IntN(6) == 0 {
		ports[0].NodePort = 80 // as a load balancer's port at this node's own address
	}
	if w.IntN(10) == 0 {
		for n := range 40 {
			ports = append(ports, snapshot.Port{Name: fmt.Sprint("p", n), Protocol: snapshot.TCP, Port: uint16(1000 + w.IntN(60000)), NodePort: uint16(31000 + 41*i + n)})
		}
		w.Shuffle(len(ports), func(a, b int) { ports[a], ports[b] = ports[b], ports[a] })
	}
	s.Ports = ports[:1+w.IntN(len(ports))]
	return s
}

func (w world) slice(i, part int) *snapshot.Slice {
	s := &snapshot.Slice{
		Name:    snapshot.Name{Namespace: "default", Name: fmt.Sprintf("s%d-%d", i, part)},
		Service: fmt.Sprintf("s%d", i),
		Ports: []snapshot.SlicePort{{Name: "a", Protocol: snapshot.TCP, Port: 8080}, {Name: "b", Protocol: snapshot.UDP, Port: 53},
			{Name: "c", Protocol: snapshot.SCTP, Port: 9}},
	}
	for n := range 40 {
		s.Ports = append(s.Ports, snapshot.SlicePort{Name: fmt.Sprint("p", n), Protocol: snapshot.TCP, Port: uint16(9000 + n)})
	}
	format := []string{"10.244.1.%d", "fd00:244::%x"}[part]
	for n := range w.IntN(14) {
		if w.yes() {
			continue
		}
		e := snapshot.Endpoint{Addr: addr(fmt.Sprintf(format, n+1)), Ready: w.yes(), Node: fmt.Sprintf("node-%d", 1+w.IntN(2))}
		e.Serving, e.Terminating = e.Ready || w.yes(), !e.Ready && w.yes()
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

func (w world) step() snapshot.Delta {
	var d snapshot.Delta
	for range 1 + w.IntN(3) {
		i := w.IntN(w.services)
		switch w.IntN(9) {
		case 0:
			d.Merge(w.host())
		case 1:
			d.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{w.service(i).Name: nil}})
		case 2, 3, 4:
			s := w.service(i)
			d.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: s}})
		default:
			s := w.slice(i, w.IntN(2))
			d.Merge(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{s.Name: s}})
		}
	}
	return d
}

// all gives a delta with every Service.
func (w world) all() snapshot.Delta {
	d := w.host()
	for i := range w.services {
		s := w.service(i)
		d.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: s}})
		for part := range 2 {
			sl := w.slice(i, part)
			d.Merge(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{sl.Name: sl}})
		}
	}
	return d
}
