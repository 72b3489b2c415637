package kernel

import (
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestClientAddressKept: pods see the client's address and port at the address that a node without pods has, endpoints
// get equal shares, and that node tracks none of the connections. Beside it, with policy Cluster the address is lost,
// and with Local the node drops.
func TestClientAddressKept(t *testing.T) {
	s := newSegment(t)
	for _, f := range ipfamily.All {
		for i := range 2 { // node-b has three of four endpoints
			labtest.Check(t, s.Pods[0].AddAddr("eth0", netip.PrefixFrom(labtest.SegmentPod(f, 1, 6+i), f.Bits())))
		}
	}
	s.learn(s.service(nil, 1, 1, 1, 2))
	n := *keepConnections
	for _, f := range ipfamily.All {
		for _, p := range keepProtocols {
			by := s.dial(p, f, n, true)
			x, expected := 0.0, float64(n)/4
			for _, k := range by {
				x += (float64(k) - expected) * (float64(k) - expected) / expected
			}
			if t.Logf("%s %s: %v, chi-square %.1f", p, f, by, x); len(by) != 4 || x > 35 { // once in ten million times
				t.Errorf("%s %s: unequal shares", p, f)
			}
		}
	}
	s.tracksNone(0)
	s.learn(s.service(func(svc *snapshot.Service) { svc.ClientAddress = snapshot.ClientAddressMasquerade }, 1, 2))
	for _, f := range ipfamily.All {
		for _, p := range keepProtocols {
			s.dial(p, f, 20, false)
		}
	}
	s.learn(s.service(func(svc *snapshot.Service) { svc.ExternalLocal = true }, 1, 2))
	for _, f := range ipfamily.All {
		for _, p := range keepProtocols {
			if r := s.Outside.Dial(p, s.web(f), lab.Options{Timeout: 100 * time.Millisecond}); r.Outcome != lab.TimedOut {
				t.Errorf("%s %s: with policy Local, a node without pods: %s", p, f, r)
			}
		}
	}
}

// TestClientAddressMoves: connections stay with their pods while endpoints come, end, and go, and nodes fail, but for
// those of an endpoint that is gone or of a node that fails. New ones, which are opened all the time, lose nothing.
func TestClientAddressMoves(t *testing.T) {
	s := newSegment(t)
	held := func(what string, conns []heldConn, b, c bool) {
		t.Helper()
		got, all := living(conns), byPod(conns)
		for pod, stays := range map[string]bool{"pod-b": b, "pod-c": c} {
			if stays && got[pod] != all[pod] || !stays && got[pod] > 0 {
				t.Errorf("%s: %d of %d connections to %s live", what, got[pod], all[pod], pod)
			}
		}
	}
	news := func(what string, b, c bool) {
		t.Helper()
		by := map[string]int{}
		for _, f := range ipfamily.All {
			got := s.dial(snapshot.TCP, f, 30, true)
			by["pod-b"], by["pod-c"] = by["pod-b"]+ofNode(got, f, 1), by["pod-c"]+ofNode(got, f, 2)
		}
		if by["pod-b"] > 0 != b || by["pod-c"] > 0 != c {
			t.Errorf("%s: new connections go to %v", what, by)
		}
	}
	s.learn(s.service(nil, 1))
	conns := s.hold(*keepHeld / 2)
	stop := s.arrive(*keepRate)
	s.learn(s.service(nil, 1, 2))
	news("pod-c comes", true, true)
	conns = append(conns, s.hold(*keepHeld/2)...)
	held("pod-c comes", conns, true, true)
	s.learn(s.become(s.service(nil, 1, 2), unready, 1))
	news("pod-b is not ready", false, true)
	held("pod-b is not ready", conns, true, true)
	s.learn(s.become(s.service(nil, 1, 2), terminating, 1))
	news("pod-b ends", false, true)
	held("pod-b ends", conns, true, true)
	by, failed := stop()
	if t.Logf("meanwhile %v", by); len(failed) > 0 {
		t.Errorf("%d new connections failed, such as %s", len(failed), failed[0])
	}
	s.learn(s.service(nil, 2))
	news("pod-b is gone", false, true)
	held("pod-b is gone", conns, false, true)
	s.learn(s.service(nil, 1, 2))
	conns = s.hold(*keepHeld)
	s.learn(snapshot.Delta{}, 2) // its link is cut
	news("node-c fails", true, false)
	held("node-c fails", conns, true, false)
}

// TestClientAddressLoops: while nodes learn in any order which endpoints end and which are ready, no packet is
// forwarded twice, and no connection fails. While endpoints come and go, none is forwarded twice either.
func TestClientAddressLoops(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	random := rand.New(rand.NewPCG(47, 1))
	for _, with := range []condition{terminating, gone} {
		seen := s.watch()
		tr := labtest.Traffic{Patience: patience, Target: func(r *rand.Rand) (snapshot.Protocol, netip.AddrPort) {
			return keepProtocols[r.IntN(2)], s.web(ipfamily.All[r.IntN(2)])
		}}
		if with == gone { // whose connections break: clients are not to wait for them
			tr.Patience = 50 * time.Millisecond
		}
		for i := range 3 {
			tr.Open(s.Outside, uint64(i))
		}
		for range *keepNews {
			n, d := s.nodes[random.IntN(3)], s.service(nil, 1, 2)
			d.Link = s.link(n)
			switch other := 1 + random.IntN(2); random.IntN(3) {
			case 0:
				d = s.become(d, with, other)
			case 1:
				d = s.become(d, with, 1, 2)
			}
			n.apply(t, d)
		}
		tr.Stop()
		counts := seen()
		t.Logf("%s: %v; from the router, from a node, forwarded twice: %v", with, &tr, counts)
		for i, c := range counts {
			if c.again > 0 {
				t.Errorf("%s: %s got %d packets that were forwarded twice", with, s.nodes[i].Name, c.again)
			}
		}
		if counts[0].first == 0 || counts[1].forwarded == 0 || counts[2].forwarded == 0 {
			t.Errorf("%s: nothing was forwarded: %v", with, counts)
		}
		if with == terminating {
			tr.Check(t)
		}
		for _, n := range s.nodes {
			labtest.Run(t, n.Host, "", "nft", "delete", "table", "netdev", "watch")
		}
	}
}

// TestClientAddressElsewhere: the Service's address moves to other nodes, with and without a pod, and connections live
// on, since all nodes divide clients alike.
func TestClientAddressElsewhere(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	conns := s.hold(*keepHeld)
	for _, node := range []int{2, 1, 0} {
		s.MoveVIP(node)
		got, all := living(conns), byPod(conns)
		if got["pod-b"]+got["pod-c"] != len(conns) {
			t.Errorf("at %s, %v of %v connections live", s.nodes[node].Name, got, all)
		}
		for _, f := range ipfamily.All {
			for _, p := range keepProtocols {
				if by := s.dial(p, f, 40, true); ofNode(by, f, 1) == 0 || ofNode(by, f, 2) == 0 {
					t.Errorf("at %s, %s %s: %v", s.nodes[node].Name, p, f, by)
				}
			}
		}
	}
}

// TestClientAddressRestart: backends end and others take their tables, under new connections and held ones.
func TestClientAddressRestart(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	conns, stop := s.hold(*keepHeld), s.arrive(*keepRate)
	for _, n := range s.nodes {
		labtest.Check(t, n.backend.Close())
		n.backend = open(t, n.Host, Options{})
		if r := n.apply(t, snapshot.Delta{}); !r.Adopted {
			t.Errorf("%s: not adopted: %+v", n.Name, r)
		}
		if got := living(conns); got["pod-b"]+got["pod-c"] != len(conns) {
			t.Errorf("after a restart at %s, %v of %v connections live", n.Name, got, byPod(conns))
		}
		s.dial(snapshot.TCP, ipfamily.IPv4, 20, true)
	}
	by, failed := stop()
	if t.Logf("meanwhile %v", by); len(failed) > 0 {
		t.Errorf("%d new connections failed, such as %s", len(failed), failed[0])
	}
}

// TestClientAddressPortsAgain: a connection from a port that an earlier one had goes to a node that takes new ones, and
// one of another protocol does not follow it either.
func TestClientAddressPortsAgain(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	const ports = 40
	from := func(p snapshot.Protocol, f ipfamily.Family) (b, c int) {
		for port := range uint16(ports) {
			r := s.Outside.Dial(p, s.web(f), lab.Options{Timeout: patience,
				From: netip.AddrPortFrom(s.Outside.IP(f), 40000+port)})
			if r.Outcome != lab.Answered || r.Source != r.Client {
				t.Fatalf("%s %s from port %d: %s", p, f, 40000+port, r)
			}
			to := map[string]int{r.Destination.String(): 1}
			b, c = b+ofNode(to, f, 1), c+ofNode(to, f, 2)
		}
		return b, c
	}
	for _, f := range ipfamily.All {
		for _, p := range keepProtocols[:2] {
			if b, c := from(p, f); b == 0 || c == 0 {
				t.Errorf("%s %s: %d to node-b, %d to node-c", p, f, b, c)
			}
		}
		table := ipfamily.Per[string]{"verdict", "verdict6"}[f]
		listed := labtest.Run(t, s.nodes[0].Host, "", "nft", "list", "map", "netdev", table, "kept-flows")
		if n := strings.Count(listed, "expires"); n != 2*ports {
			t.Errorf("%s: %d flows are known, want %d", f, n, 2*ports)
		}
	}
	s.learn(s.become(s.service(nil, 1, 2), terminating, 1))
	for _, f := range ipfamily.All {
		if b, c := from(snapshot.TCP, f); b > 0 {
			t.Errorf("%s: %d of %d new connections go to a node whose endpoint ends", f, b, b+c)
		}
	}
}

// TestClientAddressBegins: connections live on when their Service begins to be divided among nodes, ceases to be,
// since an endpoint's node is unknown, and begins again.
func TestClientAddressBegins(t *testing.T) {
	s := newSegment(t)
	for _, f := range ipfamily.All { // node-b's pod has a second address
		labtest.Check(t, s.Pods[0].AddAddr("eth0", netip.PrefixFrom(labtest.SegmentPod(f, 1, 6), f.Bits())))
	}
	s.MoveVIP(1)
	s.learn(s.service(nil, 1))
	conns := s.hold(*keepHeld)
	stays := func(what string) {
		t.Helper()
		got, all := living(conns), byPod(conns)
		if got["pod-b"]+got["pod-c"] != len(conns) {
			t.Errorf("%s: %v of %v connections live", what, got, all)
		}
	}
	s.learn(s.service(nil, 1, 2))
	stays("there are endpoints elsewhere")
	conns = append(conns, s.hold(*keepHeld)...)
	unknown := s.service(nil, 1, 1, 2)
	for _, slice := range unknown.Slices {
		slice.Endpoints[1].Node = ""
	}
	s.learn(unknown)
	stays("an endpoint's node is unknown")
	s.dial(snapshot.TCP, ipfamily.IPv4, 20, false)
	conns = append(conns, s.hold(*keepHeld)...)
	s.learn(s.service(nil, 1, 2))
	stays("all nodes are known again")
	s.dial(snapshot.TCP, ipfamily.IPv4, 20, true)
	s.learn(s.become(s.service(nil, 1, 2), unready, 1, 2))
	stays("none is ready")
	s.learn(s.service(nil, 1))
	if got, all := living(conns), byPod(conns); got["pod-b"] != all["pod-b"] {
		t.Errorf("there are none elsewhere: %v of %v connections live", got, all)
	}
}
