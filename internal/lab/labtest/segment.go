package labtest

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Segment is a router and three nodes on one link, a client behind the router, and a pod on each of two nodes. The
// router sends what is for VIP to the node without a pod.
type Segment struct {
	// Wire is the bridge, Outside the client. Node i is at ports[i+1] of the bridge.
	Wire, Router, Outside *lab.Host
	// Nodes are node-a, node-b and node-c; Pods are pod-b and pod-c, on the latter two, which answer at port 8080.
	Nodes, Pods []*lab.Host
	// VIP is an address that nobody has.
	VIP ipfamily.Per[netip.Addr]

	t testing.TB
}

// SegmentPods are the ranges of all pods.
var SegmentPods = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/32")}

var segmentBits = ipfamily.Per[int]{24, 64}

// SegmentAddr returns an address on the link: the router has 1, and node i has i+2.
func SegmentAddr(f ipfamily.Family, n int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf(ipfamily.Per[string]{"192.0.2.%d", "2001:db8:2::%d"}[f], n))
}

// SegmentPod returns an address of a node's pods: its pod has 5.
func SegmentPod(f ipfamily.Family, node, n int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf(ipfamily.Per[string]{"10.244.%d.%d", "fd00:244:%d::%d"}[f], node, n))
}

// SegmentPort returns the name of node i's port of the bridge.
func SegmentPort(node int) string { return fmt.Sprintf("p%d", node+1) }

// NewSegment makes one.
func NewSegment(t testing.TB) *Segment {
	n := NewNet(t)
	s := &Segment{t: t, Wire: NewHost(t, n, "wire"), Router: NewHost(t, n, "router"), Outside: NewHost(t, n, "outside"),
		VIP: ipfamily.Per[netip.Addr]{netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:113::10")}}
	Check(t, s.Wire.AddBridge("br0"))
	s.plug(s.Router, SegmentPort(-1), 1)
	Check(t, lab.Link(lab.End{Host: s.Outside, Link: "eth0"}, lab.End{Host: s.Router, Link: "out"}, lab.LinkOptions{}))
	outside := ipfamily.Per[[2]string]{{"198.51.100.7/24", "198.51.100.1/24"}, {"2001:db8:51::7/64", "2001:db8:51::1/64"}}
	for _, f := range ipfamily.All {
		Check(t, s.Outside.AddAddr("eth0", netip.MustParsePrefix(outside[f][0])))
		gateway := netip.MustParsePrefix(outside[f][1])
		Check(t, s.Router.AddAddr("out", gateway))
		Check(t, s.Outside.AddRoute(lab.Route{To: everywhere(f), Via: gateway.Addr(), Link: "eth0"}))
	}
	for i, name := range []string{"node-a", "node-b", "node-c"} {
		s.addNode(n, i, name)
	}
	for i, name := range []string{"pod-b", "pod-c"} {
		s.addPod(n, i+1, name)
	}
	s.MoveVIP(0)
	return s
}

// FillIngress hooks so many chains to the ingress of a host's device that the kernel takes no more.
func FillIngress(t testing.TB, h *lab.Host, device string) {
	t.Helper()
	const hooks = 1024 // MAX_HOOK_COUNT
	text := "add table netdev full\n"
	for i := range hooks {
		text += fmt.Sprintf("add chain netdev full c%d { type filter hook ingress device %q priority %[1]d; }\n", i, device)
	}
	Run(t, h, text, "nft", "-f", "-")
}

func everywhere(f ipfamily.Family) netip.Prefix {
	return netip.PrefixFrom(ipfamily.Per[netip.Addr]{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[f], 0)
}

// MoveVIP has the router send what is for VIP to another node.
func (s *Segment) MoveVIP(node int) {
	for _, f := range ipfamily.All {
		Run(s.t, s.Router, "", "ip", "route", "replace", s.VIP[f].String(), "via", SegmentAddr(f, node+2).String())
	}
}

// plug connects a host to the bridge.
func (s *Segment) plug(h *lab.Host, port string, number int) {
	Check(s.t, lab.Link(lab.End{Host: h, Link: "eth0"}, lab.End{Host: s.Wire, Link: port}, lab.LinkOptions{}))
	Check(s.t, s.Wire.AddPort("br0", port))
	Check(s.t, h.Forward())
	for _, f := range ipfamily.All {
		Check(s.t, h.AddAddr("eth0", netip.PrefixFrom(SegmentAddr(f, number), segmentBits[f])))
	}
}

func (s *Segment) addNode(n *lab.Net, i int, name string) {
	h := NewHost(s.t, n, name)
	s.plug(h, SegmentPort(i), i+2)
	for _, f := range ipfamily.All {
		Check(s.t, h.AddRoute(lab.Route{To: everywhere(f), Via: SegmentAddr(f, 1), Link: "eth0"}))
		for other := range 3 {
			if other != i {
				Check(s.t, h.AddRoute(lab.Route{To: netip.PrefixFrom(SegmentPod(f, other, 0), segmentBits[f]),
					Via: SegmentAddr(f, other+2), Link: "eth0"}))
			}
		}
	}
	s.Nodes = append(s.Nodes, h)
}

func (s *Segment) addPod(n *lab.Net, node int, name string) {
	p, h := NewHost(s.t, n, name), s.Nodes[node]
	Check(s.t, lab.Link(lab.End{Host: p, Link: "eth0"}, lab.End{Host: h, Link: "pod"}, lab.LinkOptions{}))
	for _, f := range ipfamily.All {
		Check(s.t, p.AddAddr("eth0", netip.PrefixFrom(SegmentPod(f, node, 5), segmentBits[f])))
		Check(s.t, h.AddAddr("pod", netip.PrefixFrom(SegmentPod(f, node, 1), segmentBits[f])))
		Check(s.t, p.AddRoute(lab.Route{To: everywhere(f), Via: SegmentPod(f, node, 1), Link: "eth0"}))
	}
	for _, proto := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP} {
		_, err := p.Serve(proto, 8080)
		Check(s.t, err)
	}
	s.Pods = append(s.Pods, p)
}
