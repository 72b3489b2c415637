package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// passage is a sender and a node that sends its packets on, over the same link, to a neighbour that nobody is.
type passage struct {
	sender, node *lab.Host
	to           netip.AddrPort
	// took is what a packet took in each round, of the thread that sends it: it does what the node does, too.
	took []time.Duration
}

var (
	benchSender, benchNode = addr("192.0.2.1"), addr("192.0.2.2")
	benchNext, benchPod    = addr("192.0.2.9"), addr("10.244.1.5")
	nobodysMAC             = net.HardwareAddr{2, 0, 0, 0, 0, 9}
)

// benchNeighbour tells a host the link-layer address of another.
func benchNeighbour(b *testing.B, h *lab.Host, a netip.Addr, mac net.HardwareAddr) {
	l, err := h.Netlink().LinkByName("eth0")
	labtest.Check(b, err)
	labtest.Check(b, h.Netlink().NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, Family: unix.AF_INET,
		State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac}))
}

func newPassage(b *testing.B, n *lab.Net, name, at string) *passage {
	p := &passage{sender: labtest.NewHost(b, n, name+"-from"), node: labtest.NewHost(b, n, name),
		to: netip.MustParseAddrPort(at)}
	from, to := lab.End{Host: p.sender, Link: "eth0"}, lab.End{Host: p.node, Link: "eth0"}
	labtest.Check(b, lab.Link(from, to, lab.LinkOptions{}))
	labtest.Check(b, p.sender.AddAddr("eth0", netip.PrefixFrom(benchSender, 24)))
	labtest.Check(b, p.node.AddAddr("eth0", netip.PrefixFrom(benchNode, 24)))
	labtest.Check(b, p.node.Forward())
	for _, device := range []string{"all", "eth0"} { // which would cost what no other way does
		labtest.Check(b, p.node.Sysctl("net/ipv4/conf/"+device+"/send_redirects", "0"))
	}
	l, err := p.node.Netlink().LinkByName("eth0")
	labtest.Check(b, err)
	benchNeighbour(b, p.sender, benchNode, l.Attrs().HardwareAddr)
	benchNeighbour(b, p.node, benchNext, nobodysMAC)
	labtest.Check(b, p.sender.AddRoute(lab.Route{To: netip.PrefixFrom(p.to.Addr(), 32), Via: benchNode, Link: "eth0"}))
	for _, a := range []netip.Addr{p.to.Addr(), benchPod} {
		labtest.Check(b, p.node.AddRoute(lab.Route{To: netip.PrefixFrom(a, 32), Via: benchNext, Link: "eth0"}))
	}
	return p
}

// serve writes a Service with the passage's address whose endpoint is on the neighbour.
func (p *passage) serve(b *testing.B, address snapshot.ClientAddress) *passage {
	svc := &snapshot.Service{Name: keepService, ClientAddress: address, LoadBalancerIPs: []netip.Addr{p.to.Addr()},
		ClusterIPs: []netip.Addr{addr("10.96.0.80")}, Ports: []snapshot.Port{{Protocol: snapshot.UDP, Port: p.to.Port()}}}
	slice := &snapshot.Slice{Name: keepService, Service: svc.Name.Name, Ports: []snapshot.SlicePort{
		{Protocol: snapshot.UDP, Port: 8080}}, Endpoints: []snapshot.Endpoint{
		{Addr: benchPod, Node: "next", Ready: true, Serving: true}}}
	node := &keepNode{Host: p.node, backend: open(b, p.node, Options{}), snap: snapshot.New(),
		planner: dataplane.NewPlanner(dataplane.Config{NodeName: "node", DetectLocal: dataplane.DetectLocal{
			ClusterCIDRs: labtest.SegmentPods}})}
	node.apply(b, snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice},
		Link: &snapshot.Link{Device: "eth0", Nodes: map[string]snapshot.Neighbour{"next": {
			Addrs: ipfamily.Per[netip.Addr]{benchNext}, MACs: []snapshot.MAC{snapshot.MAC(nobodysMAC)}}}}})
	return p
}

// send has so many flows of one socket each send a packet, one after the other, so many times.
func (p *passage) send(b *testing.B, flows, times int) {
	labtest.Check(b, p.sender.Do(func() error {
		sockets := make([]int, flows)
		for i := range sockets {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 20000 + i}); err != nil {
				return err
			}
			sockets[i] = fd
		}
		to, packet := &unix.SockaddrInet4{Addr: p.to.Addr().As4(), Port: int(p.to.Port())}, []byte{0}
		start, err := lab.ThreadTime()
		if err != nil {
			return err
		}
		for n := range flows * times {
			if err := unix.Sendto(sockets[n%flows], packet, 0, to); err != nil {
				return fmt.Errorf("send: %w", err)
			}
		}
		end, err := lab.ThreadTime()
		p.took = append(p.took, (end-start)/time.Duration(flows*times))
		return err
	}))
}

// received is how many packets have come back to the sender, which throws them away.
func (p *passage) received(b *testing.B) uint64 {
	l, err := p.sender.Netlink().LinkByName("eth0")
	labtest.Check(b, err)
	return l.Attrs().Statistics.RxPackets
}

// BenchmarkClientAddress measures, by turns, what a packet of a known flow costs a node that sends it on untranslated,
// beside one that routes it without a proxy, without and with connection tracking, and one that translates it. What it
// costs to send a packet to a node that throws it away is taken off. The figures are medians of the rounds' ratios.
func BenchmarkClientAddress(b *testing.B) {
	const flows, times = 64, 150
	rounds := testkit.Size(21, 3)
	n := labtest.NewNet(b)
	nowhere := newPassage(b, n, "nowhere", "203.0.113.10:80")
	benchNeighbour(b, nowhere.sender, benchNode, nobodysMAC)
	routed, tracked := newPassage(b, n, "routed", "203.0.113.10:80"), newPassage(b, n, "tracked", "203.0.113.10:80")
	const tracks = "table ip t { chain c { type filter hook prerouting priority 0; ct state invalid drop; }; }"
	labtest.Run(b, tracked.node, tracks, "nft", "-f", "-")
	kept := newPassage(b, n, "kept", "203.0.113.10:80").serve(b, snapshot.ClientAddressKeep)
	masqueraded := newPassage(b, n, "masqueraded", "203.0.113.10:80").serve(b, snapshot.ClientAddressMasquerade)
	all := []*passage{nowhere, routed, tracked, kept, masqueraded}
	for _, p := range all { // which makes the flows known
		before := p.received(b)
		p.send(b, flows, 2)
		if came := p.received(b) - before; came < 2*flows && p != nowhere {
			b.Fatalf("%s sent %d of %d packets on", p.node.Name, came, 2*flows)
		}
		p.took = nil
	}
	for b.Loop() {
		for range rounds {
			for _, p := range all {
				p.send(b, flows, times)
			}
		}
	}
	cost := func(p *passage, round int) float64 { return float64(p.took[round] - nowhere.took[round]) }
	for _, p := range []*passage{routed, tracked, masqueraded} {
		ratios := make([]float64, len(p.took))
		for i := range ratios {
			ratios[i] = cost(kept, i) / cost(p, i)
		}
		slices.Sort(ratios)
		b.ReportMetric(ratios[len(ratios)/2], "of-"+p.node.Name)
	}
	slices.Sort(kept.took)
	b.ReportMetric(float64(kept.took[len(kept.took)/2].Nanoseconds()), "ns-with-sending")
}
