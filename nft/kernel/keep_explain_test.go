package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// where is where a connection ended: at another node, or at an endpoint of the node that it came to.
type where struct {
	node     netip.Addr
	endpoint netip.Addr
	kept     bool
}

// explained returns where explain says that a client's connections end, which come to a node, with their shares: by the
// objects, and by the tables that the node holds, of which both must say the same. From, if not nil, is the node that
// has forwarded the packet.
func (s *segment) explained(n, from *keepNode, p snapshot.Protocol, client netip.Addr) map[where]float64 {
	s.t.Helper()
	f := ipfamily.Of(client)
	key := dataplane.Key{Addr: s.VIP[f], Port: 80, Protocol: p}
	x := dataplane.Explain(s.config(n), n.snap, dataplane.Question{Source: client, Interface: "eth0", Key: key})
	packet := dataplane.Packet{Source: client, Destination: key.Addr, Protocol: p, Port: key.Port, Interface: "eth0"}
	if from != nil {
		packet.MAC = from.mac
	}
	var got *dataplane.Trace
	labtest.Check(s.t, n.Do(func() error {
		i, err := Inspect()
		labtest.Check(s.t, err)
		got, err = i.Trace(s.t.Context(), packet, dataplane.LocalNode{Addrs: n.snap.HostAddrs})
		return errors.Join(err, i.Close())
	}))
	if d := got.Disagreements(x); from == nil && (d != nil || got.Unclear != nil) {
		s.t.Errorf("%s, %s: the objects and the tables disagree: %v %v\n%s", n.Name, p, d, got.Unclear, traceText(got))
	}
	out := map[where]float64{}
	for _, e := range got.Endings {
		to := where{endpoint: e.Endpoint.Addr(), kept: !e.Masquerade}
		if e.Outcome == dataplane.Forwarded {
			to = where{node: e.Endpoint.Addr(), kept: true}
		}
		out[to] += float64(e.Share) / float64(e.Of)
	}
	return out
}

func (s *segment) config(n *keepNode) dataplane.Config {
	return dataplane.Config{NodeName: n.Name, DetectLocal: dataplane.DetectLocal{ClusterCIDRs: labtest.SegmentPods}}
}

// ends connects a client that comes to a node, and returns where the connection ended. It is at another node if a pod
// there sees the client itself.
func (s *segment) ends(entry int, p snapshot.Protocol, client netip.Addr) where {
	s.t.Helper()
	f := ipfamily.Of(client)
	s.port++
	r := s.Outside.Dial(p, s.web(f), lab.Options{Timeout: patience, From: netip.AddrPortFrom(client,
		uint16(1024+s.port%60000))})
	if r.Outcome != lab.Answered {
		s.t.Fatalf("%s from %s: %s", p, client, r)
	}
	to := where{endpoint: r.Destination.Addr(), kept: r.Source.Addr() == client}
	at := s.nodeOf(to.endpoint)
	if at != entry && to.kept {
		to = where{node: s.nodes[at].IP(f), kept: true}
	}
	return to
}

// nodeOf returns the node of a pod.
func (s *segment) nodeOf(pod netip.Addr) int {
	return slices.IndexFunc(s.nodes, func(n *keepNode) bool {
		by := map[string]int{netip.AddrPortFrom(pod, 0).String(): 1}
		return ofNode(by, ipfamily.Of(pod), slices.Index(s.nodes, n)) > 0
	})
}

// TestClientAddressExplained: what explain says agrees with what becomes of many real connections of both protocols and
// families: at a node that forwards all, at one that has a share of its own, at one to which others forward, and at one
// that masquerades since it does not know another.
func TestClientAddressExplained(t *testing.T) {
	s := newSegment(t)
	for _, f := range ipfamily.All {
		labtest.Check(t, s.Pods[0].AddAddr("eth0", netip.PrefixFrom(labtest.SegmentPod(f, 1, 6), f.Bits())))
	}
	s.learn(s.service(nil, 1, 1, 2))
	seen := s.watch()
	before := seen()
	agree := func(what string, entry int) {
		t.Helper()
		s.MoveVIP(entry)
		forwards := make([]bool, len(s.nodes))
		for _, f := range ipfamily.All {
			for _, p := range keepProtocols[:2] {
				want, got := s.explained(s.nodes[entry], nil, p, s.Outside.IP(f)), map[where]int{}
				const n = 150
				for range n {
					got[s.ends(entry, p, s.Outside.IP(f))]++
				}
				x := 0.0
				for to, share := range want {
					for i, n := range s.nodes {
						forwards[i] = forwards[i] || to.node == n.IP(f)
					}
					x += (float64(got[to]) - n*share) * (float64(got[to]) - n*share) / (n * share)
					delete(got, to)
				}
				if x > 35 || len(got) > 0 { // once in ten million times
					t.Errorf("%s, %s %s: explained are %v; chi-square %.1f, and besides there are %v", what, f, p, want, x, got)
				}
			}
		}
		after := seen()
		for i, n := range s.nodes {
			first, forwarded := after[i].first-before[i].first, after[i].forwarded-before[i].forwarded
			if (first > 0) != (i == entry) || (forwarded > 0) != forwards[i] {
				t.Errorf("%s: %s got %d packets from the router, and %d from a node; explained is %v", what, n.Name, first,
					forwarded, forwards)
			}
		}
		before = after
	}
	agree("a node without endpoints", 0)
	agree("a node with a share", 1)
	for _, f := range ipfamily.All { // what node-a has forwarded, it translates all
		for to := range s.explained(s.nodes[1], s.nodes[0], snapshot.TCP, s.Outside.IP(f)) {
			if to.node.IsValid() || !to.kept || s.nodeOf(to.endpoint) != 1 {
				t.Errorf("node-b sends what node-a has forwarded to %+v", to)
			}
		}
	}
	unknown := s.link(s.nodes[0])
	delete(unknown.Nodes, "node-c")
	s.nodes[0].apply(t, snapshot.Delta{Link: unknown})
	agree("a node that does not know another one", 0)
	if w := s.explained(s.nodes[0], nil, snapshot.TCP, s.Outside.IP(0)); len(w) != 3 || w[where{node: s.nodes[1].IP4,
		kept: true}] != 0 {
		t.Errorf("the node that should masquerade sends to %v", w)
	}
}

// TestClientAddressExplainedByAddress: where clients are divided by their addresses, explain says of each to which node
// it is forwarded, and there it ends, whichever node it comes to.
func TestClientAddressExplainedByAddress(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(func(svc *snapshot.Service) { svc.Affinity = time.Hour }, 1, 2))
	ends := map[where]int{}
	const clients = 40
	for i := range clients {
		f := ipfamily.All[i%2]
		client := netip.MustParseAddr(fmt.Sprintf(ipfamily.Per[string]{"198.51.100.%d", "2001:db8:51::%d"}[f], 100+i))
		labtest.Check(t, s.Outside.AddAddr("eth0", netip.PrefixFrom(client, ipfamily.Per[int]{24, 64}[f])))
		for entry := range s.nodes {
			s.MoveVIP(entry)
			want := s.explained(s.nodes[entry], nil, snapshot.TCP, client)
			got := s.ends(entry, snapshot.TCP, client)
			if want[got] != 1 || len(want) != 1 {
				t.Errorf("%s to %s ends at %+v, and explained is %v", client, s.nodes[entry].Name, got, want)
			}
			if entry == 0 {
				ends[got]++
			}
		}
	}
	var flows ipfamily.Per[int]
	labtest.Check(t, s.nodes[0].Do(func() error {
		c, err := OpenCounters()
		labtest.Check(t, err)
		flows, err = c.Remembered("kept-flows", time.Second)
		return errors.Join(err, c.Close())
	}))
	if flows != (ipfamily.Per[int]{clients / 2, clients / 2}) {
		t.Errorf("node-a remembers %v flows", flows)
	}
	if len(ends) != 4 { // two nodes of two families
		t.Errorf("all clients are forwarded to %v", ends)
	}
}
