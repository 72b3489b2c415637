package kernel

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// segment is a router with three nodes on one link, a client behind the router, and a pod on each of two nodes.
type segment struct {
	t                     testing.TB
	wire, router, outside *lab.Host
	nodes                 []*keepNode
	pods                  []*lab.Host
	vip                   ipfamily.Per[netip.Addr]
}

// keepNode is a node with its backend.
type keepNode struct {
	*lab.Host
	name    string
	addrs   ipfamily.Per[netip.Addr]
	mac     snapshot.MAC
	backend *Backend
	planner *dataplane.Planner
	snap    *snapshot.Snapshot
}

func keepAddr(f ipfamily.Family, n int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf(ipfamily.Per[string]{"192.0.2.%d", "2001:db8:2::%d"}[f], n))
}

func keepPod(f ipfamily.Family, node, n int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf(ipfamily.Per[string]{"10.244.%d.%d", "fd00:244:%d::%d"}[f], node, n))
}

var keepBits = ipfamily.Per[int]{24, 64}

// newSegment makes the hosts. Node 0 has the Service's addresses and no pod.
func newSegment(t testing.TB) *segment {
	n := labtest.NewNet(t)
	s := &segment{t: t, wire: labtest.NewHost(t, n, "wire"), router: labtest.NewHost(t, n, "router"),
		outside: labtest.NewHost(t, n, "outside"),
		vip:     ipfamily.Per[netip.Addr]{netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:113::10")}}
	labtest.Check(t, s.wire.AddBridge("br0"))
	plug := func(h *lab.Host, port string, number int) {
		labtest.Check(t, lab.Link(lab.End{Host: h, Link: "eth0"}, lab.End{Host: s.wire, Link: port}, lab.LinkOptions{}))
		labtest.Check(t, s.wire.AddPort("br0", port))
		labtest.Check(t, h.Forward())
		for _, f := range lab.Families() {
			labtest.Check(t, h.AddAddr("eth0", netip.PrefixFrom(keepAddr(f, number), keepBits[f])))
		}
	}
	plug(s.router, "p0", 1)
	labtest.Check(t, lab.Link(lab.End{Host: s.outside, Link: "eth0"}, lab.End{Host: s.router, Link: "out"},
		lab.LinkOptions{}))
	outside := ipfamily.Per[[2]string]{{"198.51.100.7/24", "198.51.100.1/24"}, {"2001:db8:51::7/64", "2001:db8:51::1/64"}}
	for _, f := range lab.Families() {
		labtest.Check(t, s.outside.AddAddr("eth0", netip.MustParsePrefix(outside[f][0])))
		gateway := netip.MustParsePrefix(outside[f][1])
		labtest.Check(t, s.router.AddAddr("out", gateway))
		labtest.Check(t, s.outside.AddRoute(lab.Route{To: everywhere(f), Via: gateway.Addr(), Link: "eth0"}))
	}
	for i, name := range []string{"node-a", "node-b", "node-c"} {
		s.addNode(n, i, name, plug)
	}
	for i, name := range []string{"pod-b", "pod-c"} {
		s.addPod(n, i+1, name)
	}
	for _, f := range lab.Families() {
		labtest.Check(t, s.router.AddRoute(lab.Route{To: netip.PrefixFrom(s.vip[f], f.Bits()), Via: keepAddr(f, 2),
			Link: "eth0"}))
	}
	return s
}

func everywhere(f ipfamily.Family) netip.Prefix {
	return netip.PrefixFrom(ipfamily.Per[netip.Addr]{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[f], 0)
}

func (s *segment) addNode(n *lab.Net, i int, name string, plug func(*lab.Host, string, int)) {
	h := labtest.NewHost(s.t, n, name)
	plug(h, fmt.Sprintf("p%d", i+1), i+2)
	node := &keepNode{Host: h, name: name, snap: snapshot.New()}
	l, err := h.Netlink().LinkByName("eth0")
	labtest.Check(s.t, err)
	node.mac = snapshot.MAC(l.Attrs().HardwareAddr)
	for _, f := range lab.Families() {
		node.addrs[f] = keepAddr(f, i+2)
		labtest.Check(s.t, h.AddRoute(lab.Route{To: everywhere(f), Via: keepAddr(f, 1), Link: "eth0"}))
		for other := range 3 {
			if other != i {
				labtest.Check(s.t, h.AddRoute(lab.Route{To: netip.PrefixFrom(keepPod(f, other, 0), keepBits[f]),
					Via: keepAddr(f, other+2), Link: "eth0"}))
			}
		}
	}
	node.backend = open(s.t, h, Options{})
	pods := []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/32")}
	node.planner = dataplane.NewPlanner(dataplane.Config{NodeName: name,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: pods}})
	s.nodes = append(s.nodes, node)
}

func (s *segment) addPod(n *lab.Net, node int, name string) {
	p := labtest.NewHost(s.t, n, name)
	h := s.nodes[node].Host
	labtest.Check(s.t, lab.Link(lab.End{Host: p, Link: "eth0"}, lab.End{Host: h, Link: "pod"}, lab.LinkOptions{}))
	for _, f := range lab.Families() {
		labtest.Check(s.t, p.AddAddr("eth0", netip.PrefixFrom(keepPod(f, node, 5), keepBits[f])))
		labtest.Check(s.t, h.AddAddr("pod", netip.PrefixFrom(keepPod(f, node, 1), keepBits[f])))
		labtest.Check(s.t, p.AddRoute(lab.Route{To: everywhere(f), Via: keepPod(f, node, 1), Link: "eth0"}))
	}
	for _, proto := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
		_, err := p.Serve(proto, 8080)
		labtest.Check(s.t, err)
	}
	s.pods = append(s.pods, p)
}

var keepService = snapshot.Name{Namespace: "shop", Name: "web"}

// service is the Service, with endpoints on some nodes.
func (s *segment) service(edit func(*snapshot.Service), nodes ...int) snapshot.Delta {
	svc := &snapshot.Service{Name: keepService, ClientAddress: snapshot.ClientAddressKeep, Ports: []snapshot.Port{
		{Name: "tcp", Protocol: snapshot.TCP, Port: 80}, {Name: "udp", Protocol: snapshot.UDP, Port: 80}}}
	d := snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{},
		Services: map[snapshot.Name]*snapshot.Service{keepService: svc}}
	for _, f := range lab.Families() {
		svc.ClusterIPs = append(svc.ClusterIPs, ipfamily.Per[netip.Addr]{netip.MustParseAddr("10.96.0.80"),
			netip.MustParseAddr("fd00:96::80")}[f])
		svc.LoadBalancerIPs = append(svc.LoadBalancerIPs, s.vip[f])
		slice := &snapshot.Slice{Name: snapshot.Name{Namespace: "shop", Name: "web" + f.String()}, Service: "web"}
		for _, p := range svc.Ports {
			slice.Ports = append(slice.Ports, snapshot.SlicePort{Name: p.Name, Protocol: p.Protocol, Port: 8080})
		}
		for _, n := range nodes {
			slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: keepPod(f, n, 5), Node: s.nodes[n].name,
				Ready: true, Serving: true})
		}
		d.Slices[slice.Name] = slice
	}
	if edit != nil {
		edit(svc)
	}
	return d
}

// link is what a node knows of the others; those in failed do not answer.
func (s *segment) link(of *keepNode, failed ...int) *snapshot.Link {
	l := &snapshot.Link{Device: "eth0", Nodes: map[string]snapshot.Neighbour{}}
	for i, n := range s.nodes {
		down := false
		for _, x := range failed {
			down = down || x == i
		}
		if n != of {
			l.Nodes[n.name] = snapshot.Neighbour{Addrs: n.addrs, MACs: []snapshot.MAC{n.mac},
				Failed: ipfamily.Per[bool]{down, down}}
		}
	}
	return l
}

// apply has a node learn.
func (n *keepNode) apply(t testing.TB, d snapshot.Delta) dataplane.Receipt {
	t.Helper()
	c, _ := n.planner.Apply(n.snap, n.snap.Apply(d))
	r, err := n.backend.ApplyAll(n.planner.State(), c)
	labtest.Check(t, err)
	return r
}

// everywhere has all nodes learn, with what each knows of the link.
func (s *segment) learn(d snapshot.Delta, failed ...int) {
	s.t.Helper()
	for _, n := range s.nodes {
		d.Link = s.link(n, failed...)
		n.apply(s.t, d)
	}
}

// dial connects from outside so many times, and counts who answered. Each must have seen the client's own address, if
// kept is set, and another one otherwise.
func (s *segment) dial(p snapshot.Protocol, f ipfamily.Family, n int, kept bool) map[string]int {
	s.t.Helper()
	by := map[string]int{}
	for range n {
		r := s.outside.Dial(p, netip.AddrPortFrom(s.vip[f], 80), lab.Options{})
		if r.Outcome != lab.Answered {
			s.t.Fatalf("%s %s: %s\n%s", p, f, r, labtest.Run(s.t, s.nodes[0].Host, "", "nft", "list", "ruleset", "netdev"))
		}
		if own := r.Source.Addr() == s.outside.IP(f); own != kept {
			s.t.Fatalf("%s %s: %s", p, f, r)
		}
		by[r.Endpoint]++
	}
	return by
}

// TestClientAddressKept: pods see the client at the address that a node without pods has, and that node tracks none of
// the connections.
func TestClientAddressKept(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	for _, f := range lab.Families() {
		for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
			const n = 400
			by := s.dial(p, f, n, true)
			if !labtest.Plausible(by["pod-b"], n, 0.5) {
				t.Errorf("%s %s: %v", p, f, by)
			}
		}
	}
	out := labtest.Run(t, s.nodes[0].Host, "", "cat", "/proc/sys/net/netfilter/nf_conntrack_count")
	if strings.TrimSpace(out) != "0" {
		t.Errorf("the node that forwards tracks %s flows", out)
	}
	s.learn(s.service(func(svc *snapshot.Service) { svc.ClientAddress = snapshot.ClientAddressMasquerade }, 1, 2))
	for _, f := range lab.Families() {
		s.dial(snapshot.TCP, f, 20, false)
	}
}

// TestClientAddressListed: nft lists what the backend writes at the ingress as render prints it, and a backend that
// comes later adopts it, finds nothing, repairs what others change, and removes it.
func TestClientAddressListed(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	a := s.nodes[0]
	if got, want := held(t, a.backend), wanted(a.planner.State()); got != want {
		t.Fatalf("%s", labtest.FirstDifference(got, want))
	}
	quiet(t, a.backend)
	for _, n := range labtest.Nfts(t) {
		for table, f := range map[string]ipfamily.Family{"verdict": ipfamily.IPv4, "verdict6": ipfamily.IPv6} {
			listed := labtest.Run(t, a.Host, "", n.Path, "list", "table", "netdev", table)
			var text strings.Builder
			l := nft.List(a.planner.State())[f]
			labtest.Check(t, l.Print(&text))
			for _, c := range nft.IngressChains(f, "eth0") {
				for _, r := range c.Rules {
					if !strings.Contains(text.String(), r.Text(f)) || !strings.Contains(plainList(listed), plainList(r.Text(f))) {
						t.Errorf("%s does not list: %s\n%s", n.Path, r.Text(f), listed)
					}
				}
			}
		}
	}
	for _, n := range labtest.Nfts(t) { // what it lists, it loads, and then lists the same
		listed := labtest.Run(t, a.Host, "", n.Path, "list", "table", "netdev", "verdict6")
		labtest.Run(t, s.outside, listed, n.Path, "-f", "-")
		got := labtest.Run(t, s.outside, "", n.Path, "list", "table", "netdev", "verdict6")
		if plainFlows(got) != plainFlows(listed) {
			t.Errorf("%s: %s", n.Path, labtest.FirstDifference(got, listed))
		}
		labtest.Run(t, s.outside, "", n.Path, "flush", "ruleset")
	}
	labtest.Check(t, a.backend.Close())
	a.backend = open(t, a.Host, Options{})
	if r := a.apply(t, snapshot.Delta{}); !r.Adopted || r.Bytes != 0 {
		t.Errorf("not adopted: %+v", r)
	}
	quiet(t, a.backend)
	labtest.Run(t, a.Host, "", "nft", "flush", "map", "netdev", "verdict", "kept-slots")
	if found := check(t, a.backend); len(found) == 0 {
		t.Error("nobody sees that the slots are gone")
	}
	a.apply(t, snapshot.Delta{})
	quiet(t, a.backend)
	s.dial(snapshot.TCP, ipfamily.IPv4, 20, true)
	a.apply(t, snapshot.Delta{Link: &snapshot.Link{}})
	if out := labtest.Run(t, a.Host, "", "nft", "list", "tables", "netdev"); out != "" {
		t.Errorf("without a device there is %s", out)
	}
	s.dial(snapshot.TCP, ipfamily.IPv4, 20, false)
	a.apply(t, snapshot.Delta{Link: s.link(a)})
	s.dial(snapshot.TCP, ipfamily.IPv4, 20, true)
	labtest.Check(t, a.backend.Remove())
	if out := labtest.Run(t, a.Host, "", "nft", "list", "tables"); out != "" {
		t.Errorf("there remains %s", out)
	}
}

// plainFlows takes out what rules have added.
func plainFlows(s string) string {
	return regexp.MustCompile(`expires [0-9a-z]+`).ReplaceAllString(s, "")
}

// plainList takes out what versions of nft write in different ways.
func plainList(s string) string {
	return strings.NewReplacer("8192 != 0", "0x2000 != 0x0", "8191 != 0", "0x1fff != 0x0").Replace(s)
}

// TestClientAddressMoves: a connection stays with its pod while endpoints come to other nodes, and goes with its node.
func TestClientAddressMoves(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1))
	hold := func(n int) (conns []*lab.Conn) {
		for range n {
			c, r := s.outside.Open(snapshot.TCP, netip.AddrPortFrom(s.vip[ipfamily.IPv4], 80), lab.Options{})
			if c == nil {
				t.Fatal(r)
			}
			t.Cleanup(func() { c.Close() })
			conns = append(conns, c)
		}
		return conns
	}
	alive := func(conns []*lab.Conn) (n int) {
		for _, c := range conns {
			if c.Ping(time.Second).Outcome == lab.Answered {
				n++
			}
		}
		return n
	}
	first := hold(60)
	s.learn(s.service(nil, 1, 2))
	second := hold(60)
	if n, m := alive(first), alive(second); n != 60 || m != 60 {
		t.Errorf("%d and %d of 60 connections outlived that a node got an endpoint", n, m)
	}
	s.learn(snapshot.Delta{}, 2) // its link is cut
	if by := s.dial(snapshot.TCP, ipfamily.IPv4, 40, true); by["pod-b"] != 40 {
		t.Errorf("a node that fails gets connections: %v", by)
	}
	if n := alive(first); n != 60 {
		t.Errorf("%d of 60 connections outlived that another node failed", n)
	}
	s.learn(s.service(nil, 2)) // both are back, and the endpoint on one is gone
	if by := s.dial(snapshot.TCP, ipfamily.IPv4, 40, true); by["pod-c"] != 40 {
		t.Errorf("a node without endpoints gets connections: %v", by)
	}
}

// TestClientAddressFragments: datagrams in fragments arrive, and so do ICMP errors about what a pod has sent.
func TestClientAddressFragments(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	for _, f := range lab.Families() {
		for range 20 {
			s.datagram(f, 4096)
		}
		s.tooBig(f)
	}
	out := labtest.Run(t, s.nodes[0].Host, "", "cat", "/proc/sys/net/netfilter/nf_conntrack_count")
	if strings.TrimSpace(out) != "0" {
		t.Errorf("the node that forwards tracks %s flows", out)
	}
}

// datagram sends a long one, and expects it back.
func (s *segment) datagram(f ipfamily.Family, size int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	c, err := s.outside.DialContext(ctx, "udp", netip.AddrPortFrom(s.vip[f], 80).String())
	labtest.Check(s.t, err)
	defer c.Close()
	labtest.Check(s.t, c.SetDeadline(time.Now().Add(2*time.Second)))
	sent := strings.Repeat("x", size)
	_, err = c.Write([]byte(sent))
	labtest.Check(s.t, err)
	got := make([]byte, 1<<16)
	n, err := c.Read(got)
	if err != nil {
		s.t.Fatalf("%s: %d bytes: %v", f, size, err)
	}
	if text := string(got[:n]); !strings.HasSuffix(text, sent) || !strings.Contains(text, s.outside.IP(f).String()) {
		s.t.Errorf("%s: %.100q came back", f, text)
	}
}

// tooBig narrows the way to the client after a connection is open, and has much come back.
func (s *segment) tooBig(f ipfamily.Family) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, err := s.outside.DialContext(ctx, "tcp", netip.AddrPortFrom(s.vip[f], 80).String())
	labtest.Check(s.t, err)
	defer c.Close()
	narrow := func(mtu string) { // on both sides, as a link takes no more than its other end
		labtest.Run(s.t, s.outside, "", "ip", "link", "set", "eth0", "mtu", mtu)
		labtest.Run(s.t, s.router, "", "ip", "link", "set", "out", "mtu", mtu)
	}
	narrow("1300")
	labtest.Check(s.t, c.SetDeadline(time.Now().Add(5*time.Second)))
	const size = 64 << 10
	go c.Write(make([]byte, size))
	if n, err := io.ReadAtLeast(c, make([]byte, 2*size), size); err != nil {
		s.t.Fatalf("%s: %d bytes came back: %v", f, n, err)
	}
	narrow("1500")
}

// TestClientAddressWithoutDevice: while the device is not there, all else is written, and once a state has one that is,
// clients keep their addresses.
func TestClientAddressWithoutDevice(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	a := s.nodes[0]
	labtest.Check(t, a.backend.KeepSupported())
	d := s.service(nil, 1)
	d.Link = s.link(a)
	d.Link.Device = "eth9"
	a.apply(t, d)
	s.dial(snapshot.TCP, ipfamily.IPv4, 10, false)
	a.apply(t, s.service(nil, 1, 2))
	a.apply(t, snapshot.Delta{Link: s.link(a)})
	s.dial(snapshot.TCP, ipfamily.IPv4, 10, true)
	quiet(t, a.backend)
	b := open(t, a.Host, Options{})
	labtest.Check(t, a.backend.Close())
	a.backend = b
	a.planner.SetConfig(dataplane.Config{NodeName: "node-a", CannotKeep: true})
	a.apply(t, snapshot.Delta{})
	s.dial(snapshot.TCP, ipfamily.IPv4, 10, false)
}
