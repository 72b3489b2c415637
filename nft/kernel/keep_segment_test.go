package kernel

import (
	"flag"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The sizes of the tests of clients' addresses: `make client-address` has the large ones.
var (
	keepConnections = flag.Int("keep.connections", 400,
		"how many connections of each protocol and family TestClientAddressKept opens")
	keepHeld = flag.Int("keep.held", 120, "how many connections the tests TestClientAddress* hold open")
	keepRate = flag.Int("keep.rate", 100, "how many connections a second they open meanwhile")
	keepNews = flag.Int("keep.news", 150, "how often a node learns something in TestClientAddressLoops")
)

// segment is labtest's, with a backend on each node.
type segment struct {
	*labtest.Segment
	t     testing.TB
	nodes []*keepNode
}

// keepNode is a node with its backend.
type keepNode struct {
	*lab.Host
	mac     snapshot.MAC
	backend *Backend
	planner *dataplane.Planner
	snap    *snapshot.Snapshot
}

func newSegment(t testing.TB) *segment {
	s := &segment{Segment: labtest.NewSegment(t), t: t}
	for _, h := range s.Nodes {
		l, err := h.Netlink().LinkByName("eth0")
		labtest.Check(t, err)
		s.nodes = append(s.nodes, &keepNode{Host: h, mac: snapshot.MAC(l.Attrs().HardwareAddr),
			backend: open(t, h, Options{}), snap: snapshot.New(), planner: dataplane.NewPlanner(dataplane.Config{
				NodeName: h.Name, DetectLocal: dataplane.DetectLocal{ClusterCIDRs: labtest.SegmentPods}})})
	}
	return s
}

var keepService = snapshot.Name{Namespace: "shop", Name: "web"}

// keepProtocols are those of the Service. The lab speaks SCTP itself where the kernel does not.
var keepProtocols = []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}

// service is the Service, with endpoints on some nodes. A node that is named twice has two, at addresses in a row.
func (s *segment) service(edit func(*snapshot.Service), nodes ...int) snapshot.Delta {
	svc := &snapshot.Service{Name: keepService, ClientAddress: snapshot.ClientAddressKeep}
	for _, p := range keepProtocols {
		svc.Ports = append(svc.Ports, snapshot.Port{Name: p.String(), Protocol: p, Port: 80})
	}
	d := snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{},
		Services: map[snapshot.Name]*snapshot.Service{keepService: svc}}
	for _, f := range ipfamily.All {
		svc.ClusterIPs = append(svc.ClusterIPs, ipfamily.Per[netip.Addr]{addr("10.96.0.80"), addr("fd00:96::80")}[f])
		svc.LoadBalancerIPs = append(svc.LoadBalancerIPs, s.VIP[f])
		slice := &snapshot.Slice{Name: snapshot.Name{Namespace: "shop", Name: "web" + f.String()}, Service: "web"}
		for _, p := range svc.Ports {
			slice.Ports = append(slice.Ports, snapshot.SlicePort{Name: p.Name, Protocol: p.Protocol, Port: 8080})
		}
		next := map[int]int{}
		for _, n := range nodes {
			slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: labtest.SegmentPod(f, n, 5+next[n]),
				Node: s.nodes[n].Name, Ready: true, Serving: true})
			next[n]++
		}
		d.Slices[slice.Name] = slice
	}
	if edit != nil {
		edit(svc)
	}
	return d
}

// become has the endpoints of some nodes end and serve (terminating), or end without serving (gone), or not be ready.
func (s *segment) become(d snapshot.Delta, c condition, nodes ...int) snapshot.Delta {
	for _, slice := range d.Slices {
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			if slices.ContainsFunc(nodes, func(n int) bool { return s.nodes[n].Name == e.Node }) {
				e.Ready, e.Serving, e.Terminating = c == ready, c == ready || c == terminating, c == terminating || c == gone
			}
		}
	}
	return d
}

// link is what a node knows of the others; those in failed do not answer.
func (s *segment) link(of *keepNode, failed ...int) *snapshot.Link {
	l := &snapshot.Link{Device: "eth0", Nodes: map[string]snapshot.Neighbour{}}
	for i, n := range s.nodes {
		if down := slices.Contains(failed, i); n != of {
			l.Nodes[n.Name] = snapshot.Neighbour{Addrs: ipfamily.Per[netip.Addr]{n.IP4, n.IP6},
				MACs: []snapshot.MAC{n.mac}, Failed: ipfamily.Per[bool]{down, down}}
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

// learn has all nodes learn, with what each knows of the link.
func (s *segment) learn(d snapshot.Delta, failed ...int) {
	s.t.Helper()
	for _, n := range s.nodes {
		d.Link = s.link(n, failed...)
		n.apply(s.t, d)
	}
}

// web is the Service's address and port of a family.
func (s *segment) web(f ipfamily.Family) netip.AddrPort { return netip.AddrPortFrom(s.VIP[f], 80) }

// dial connects from outside so many times, and counts who answered. Each must have seen the client's own address and
// port, if kept is set, and another address otherwise.
func (s *segment) dial(p snapshot.Protocol, f ipfamily.Family, n int, kept bool) map[string]int {
	s.t.Helper()
	by := map[string]int{}
	for range n {
		r := s.Outside.Dial(p, s.web(f), lab.Options{})
		if r.Outcome != lab.Answered {
			s.t.Fatalf("%s %s: %s", p, f, r)
		}
		if own := r.Source.Addr() == s.Outside.IP(f); own != kept || kept && r.Client.IsValid() && r.Source != r.Client {
			s.t.Fatalf("%s %s: %s", p, f, r)
		}
		by[r.Destination.String()]++
	}
	return by
}

// ofNode counts those of dial that a node's pod has answered.
func ofNode(by map[string]int, f ipfamily.Family, node int) (n int) {
	for destination, k := range by {
		if a := netip.MustParseAddrPort(destination).Addr(); netip.PrefixFrom(labtest.SegmentPod(f, node, 0),
			ipfamily.Per[int]{24, 64}[f]).Contains(a) {
			n += k
		}
	}
	return n
}

// tracksNone fails the test if a node tracks a connection.
func (s *segment) tracksNone(node int) {
	s.t.Helper()
	out := labtest.Run(s.t, s.nodes[node].Host, "", "cat", "/proc/sys/net/netfilter/nf_conntrack_count")
	if strings.TrimSpace(out) != "0" {
		s.t.Errorf("%s tracks %s connections", s.nodes[node].Name, out)
	}
}

// heldConn is a connection that is open, and the pod that answered it.
type heldConn struct {
	*lab.Conn
	pod string
}

// hold opens connections.
func (s *segment) hold(n int) (conns []heldConn) {
	s.t.Helper()
	for i := range n {
		c, r := s.Outside.Open(snapshot.TCP, s.web(ipfamily.All[i%2]), lab.Options{Timeout: patience})
		if c == nil {
			s.t.Fatal(r)
		}
		s.t.Cleanup(func() { c.Close() })
		conns = append(conns, heldConn{c, r.Endpoint})
	}
	return conns
}

// patience is how long a client waits for an answer that must come: a machine may be busy.
const patience = 10 * time.Second

// living asks over all connections and counts those that answer, by pod.
func living(conns []heldConn) map[string]int {
	var all sync.WaitGroup
	var mu sync.Mutex
	out := map[string]int{}
	for _, c := range conns {
		all.Go(func() {
			if c.Ping(patience).Outcome == lab.Answered {
				mu.Lock()
				out[c.pod]++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return out
}

// byPod counts connections by the pod that answered.
func byPod(conns []heldConn) map[string]int {
	out := map[string]int{}
	for _, c := range conns {
		out[c.pod]++
	}
	return out
}

// arrive opens new connections all the time, so many a second, until stop is called. It returns how many each pod
// answered, and what became of the others.
func (s *segment) arrive(rate int) (stop func() (by map[string]int, failed []lab.Result)) {
	var all sync.WaitGroup
	var mu sync.Mutex
	by, failed, end := map[string]int{}, []lab.Result(nil), make(chan struct{})
	dial := func(n int) {
		r := s.Outside.Dial(snapshot.TCP, s.web(ipfamily.All[n%2]), lab.Options{Timeout: patience})
		mu.Lock()
		defer mu.Unlock()
		if by[r.Endpoint]++; r.Outcome != lab.Answered {
			failed = append(failed, r)
		}
	}
	all.Go(func() {
		tick := time.NewTicker(time.Second / time.Duration(rate))
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-end:
				return
			case <-tick.C:
				all.Go(func() { dial(n) })
			}
		}
	})
	return func() (map[string]int, []lab.Result) {
		close(end)
		all.Wait()
		return by, failed
	}
}

// The packets to the Service that come in at a node: from the router, from a node, and from nodes twice.
type hops struct{ first, forwarded, again int }

// watch has the nodes count the packets to the Service's addresses that come in, by how many hops they have made since
// the client, and those that a node sends as a third hop or later. It returns what each has counted. What nobody
// translates, as a reset of a connection that no node knows any more, counts for nothing: whatever the policy, a node
// sends it to the router, as it has no such address, and the router sends it back.
func (s *segment) watch() func() []hops {
	s.t.Helper()
	var rules strings.Builder
	var macs []string
	for _, n := range s.nodes {
		macs = append(macs, net.HardwareAddr(n.mac[:]).String())
	}
	again := "< 62 ether saddr { " + strings.Join(macs, ", ") + " } "
	for counter, ttl := range map[string]string{"first": "63", "forwarded": "62", "again": again + "tcp flags & rst == 0",
		"more": again + "meta l4proto != tcp"} {
		fmt.Fprintf(&rules, "meta pkttype host ip daddr %v ip ttl %s counter name %s\n", s.VIP[0], ttl, counter)
		fmt.Fprintf(&rules, "meta pkttype host ip6 daddr %v ip6 hoplimit %s counter name %s\n", s.VIP[1], ttl, counter)
	}
	for _, n := range s.nodes {
		labtest.Run(s.t, n.Host, `table netdev watch {
			counter first { }
			counter forwarded { }
			counter again { }
			counter more { }
			chain c { type filter hook ingress device "eth0" priority -500; `+rules.String()+`}
		}`, "nft", "-f", "-")
	}
	counters := regexp.MustCompile(`counter (\w+) \{\s+packets (\d+)`)
	return func() (out []hops) {
		s.t.Helper()
		for _, n := range s.nodes {
			counts := map[string]int{}
			text := labtest.Run(s.t, n.Host, "", "nft", "list", "table", "netdev", "watch")
			for _, m := range counters.FindAllStringSubmatch(text, -1) {
				var err error
				counts[m[1]], err = strconv.Atoi(m[2])
				labtest.Check(s.t, err)
			}
			out = append(out, hops{counts["first"], counts["forwarded"], counts["again"] + counts["more"]})
		}
		return out
	}
}
