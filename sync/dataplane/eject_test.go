package dataplane

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// sick reads "2:u5 3:r1" as the health of endpoints 10.244.9.2 and 10.244.9.3 at port 8080: unanswered since second 5,
// and refused since second 1.
func sick(text string) *snapshot.Health {
	h := &snapshot.Health{}
	for _, w := range strings.Fields(text) {
		number, what, _ := strings.Cut(w, ":")
		var since int64
		fmt.Sscan(what[1:], &since)
		u := snapshot.Unhealthy{Endpoint: netip.AddrPortFrom(addr("10.244.9."+number), 8080), Since: time.Unix(since, 0)}
		switch what[0] {
		case 'r':
			u.Cause = snapshot.Refused
		case 'l':
			u.Cause = snapshot.Resort
		}
		h.Unhealthy = append(h.Unhealthy, u)
	}
	return h
}

func ejectedNumbers(p *Pool) string {
	var out []string
	for _, u := range p.Ejected {
		out = append(out, strings.TrimPrefix(u.Endpoint.Addr().String(), "10.244.9."))
	}
	return strings.Join(out, " ")
}

// TestEject reads endpoints as TestTopology does. A pool is "endpoints/ejected", with a + if refused connections are
// tried again.
func TestEject(t *testing.T) {
	const on, observe, off = snapshot.SecondChanceOn, snapshot.SecondChanceObserve, snapshot.SecondChanceOff
	tests := []struct {
		what              string
		node, service     snapshot.SecondChance
		affinity          bool
		endpoints, health string
		cluster, local    string
	}{
		{"all are healthy", on, 0, false, "1@here 2@here 3@x", "", "1 2 3/+", "1 2/+"},
		{"one is not", on, 0, false, "1@here 2@here 3@x", "1:u5", "2 3/1+", "2/1+"},
		{"the last one stays", on, 0, false, "1@here", "1:u5", "1/", "1/"},
		{"half of two", on, 0, false, "1@here 2@here", "1:u5 2:u4", "1/2+", "1/2+"},
		{"half of two, and the one that stays refuses", on, 0, false, "1@here 2@here", "1:r5 2:u4", "1/2", "1/2"},
		{"half of five, the longest first", on, 0, false, "1@x 2@x 3@x 4@x 5@x", "1:u3 2:u2 3:r9 4:u1 5:u4", "1 3 5/2 4+",
			"drop"},
		{"since the same time: by address", on, 0, false, "1@x 2@x 3@x", "2:u1 3:u1", "1 3/2+", "drop"},
		{"each pool has its own half", on, 0, false, "1@here 2@here 3@x 4@x", "1:u5 2:u6 3:u4", "2 4/1 3+", "2/1+"},
		{"all that stay refuse", on, 0, false, "1@x 2@x 3@x 4@x", "1:u1 2:u1 3:r2 4:r2", "3 4/1 2", "drop"},
		{"one that stays does not answer", on, 0, false, "1@x 2@x 3@x 4@x", "1:u1 2:u1 3:r2 4:u2", "3 4/1 2+", "drop"},
		{"affinity, all are healthy", on, 0, true, "1@x 2@x", "", "1 2/+", "drop"},
		{"affinity, one is ejected", on, 0, true, "1@x 2@x 3@x", "1:r1", "2 3/1+", "drop"},
		{"affinity, one that stays is not healthy", on, 0, true, "1@x 2@x 3@x", "1:r1 2:u2", "2 3/1", "drop"},
		{"health of others", on, 0, false, "1@x 2@x", "7:u1 8:u1", "1 2/+", "drop"},
		{"health of one that is not ready", on, 0, false, "1@x 2@x:U 3@x", "2:u1 3:u2", "1/3+", "drop"},
		{"the fallback to terminating ones", on, 0, false, "1@x:T 2@x:T", "1:u1", "2/1+", "drop"},
		{"the node observes", observe, 0, false, "1@x 2@x", "1:u1", "1 2/", "drop"},
		{"the Service observes", on, observe, false, "1@x 2@x", "1:u1", "1 2/", "drop"},
		{"the Service asks for it", observe, on, false, "1@x 2@x", "1:u1", "2/1+", "drop"},
		{"the Service asks for nothing", on, off, false, "1@x 2@x", "1:u1", "1 2/", "drop"},
		{"the node's off is last", off, on, false, "1@x 2@x", "1:u1", "1 2/", "drop"},
		{"the zero Config is off", 0, on, false, "1@x 2@x", "1:u1", "1 2/", "drop"},
	}
	text := func(p *Pool) string {
		if len(p.Endpoints) == 0 {
			return p.Empty.String()
		}
		out := numbers(p) + "/" + ejectedNumbers(p)
		if p.RetryRefused {
			out += "+"
		}
		return out
	}
	for _, test := range tests {
		t.Run(test.what, func(t *testing.T) {
			svc := &snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.10"), ExternalIPs: addrs("198.51.100.2"),
				InternalLocal: true, Ports: tcp80(0), SecondChance: test.service}
			if test.affinity {
				svc.Affinity = time.Hour
			}
			sl := sliceOf("web", "web-1")
			for _, w := range strings.Fields(test.endpoints) {
				sl.Endpoints = append(sl.Endpoints, parseEndpoint(w))
			}
			s := snapshot.New()
			put(s, svc, sl)
			s.Apply(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{svc.Name: sick(test.health)}})
			st, _ := Compute(Config{NodeName: "here", SecondChance: test.node}, s)
			checkInvariants(t, st)
			sp, _ := st.frontend(key("10.96.0.10:80"))
			if text(sp.Cluster) != test.cluster || text(sp.Local) != test.local {
				t.Errorf("got %s and %s; want %s and %s", text(sp.Cluster), text(sp.Local), test.cluster, test.local)
			}
			if len(sp.Serving) < len(sp.Cluster.Endpoints)+len(sp.Cluster.Ejected) {
				t.Errorf("serving are only %v", sp.Serving)
			}
		})
	}
}

// TestEjectOnlyTCP: endpoints of UDP and SCTP ports at the same address and port stay.
func TestEjectOnlyTCP(t *testing.T) {
	s := snapshot.New()
	svc := &snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.10")}
	sl := sliceOf("web", "web-1", endpoint("10.244.9.1", "x"), endpoint("10.244.9.2", "x"))
	sl.Ports = nil
	for _, proto := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP} {
		svc.Ports = append(svc.Ports, snapshot.Port{Name: proto.String(), Protocol: proto, Port: 80})
		sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: proto.String(), Protocol: proto, Port: 8080})
	}
	put(s, svc, sl)
	s.Apply(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{svc.Name: sick("1:u1")}})
	st, _ := Compute(Config{SecondChance: snapshot.SecondChanceOn}, s)
	checkInvariants(t, st)
	for _, sp := range st.Services[svc.Name].Ports {
		if tcp := sp.Name.Protocol == snapshot.TCP; (len(sp.Cluster.Ejected) == 1) != tcp ||
			(len(sp.Cluster.Endpoints) == 1) != tcp {
			t.Errorf("%v: %+v", sp.Name, sp.Cluster)
		}
	}
}

// TestEjectionFollowsHealth: a change of health alone changes the Services it is about; the same again, or of endpoints
// that nobody has, changes nothing; and all come back.
func TestEjectionFollowsHealth(t *testing.T) {
	s := openShop(t, Config{SecondChance: snapshot.SecondChanceOn}, webService("a", "10.96.0.1"),
		webService("b", "10.96.0.2"), sliceOf("a", "a-1", endpoint("10.244.9.1", "x"), endpoint("10.244.9.2", "x")))
	health := func(n, text string) snapshot.Change {
		return s.s.Apply(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{name(n): sick(text)}})
	}
	cluster := func() *Pool { return s.p.State().Services[name("a")].Ports[0].Cluster }
	s.expect("one does not answer", health("a", "1:u5"), "a |")
	if p := cluster(); numbers(p) != "2" || ejectedNumbers(p) != "1" {
		t.Errorf("pool %+v", p)
	}
	s.expect("the same again", health("a", "1:u5"), "|")
	s.expect("nobody's", health("a", "1:u5 9:u5"), "|")
	s.expect("without endpoints", health("b", "1:u5"), "|")
	s.expect("of a Service that is not there", health("c", "1:u5"), "|")
	s.expect("now it refuses", health("a", "1:r5"), "a |")
	s.expect("all answer", health("a", ""), "a |")
	if p := cluster(); numbers(p) != "1 2" || p.Ejected != nil || !p.RetryRefused {
		t.Errorf("pool %+v", p)
	}
	s.expect("again", health("a", "2:u9"), "a |")
	s.p.SetConfig(Config{SecondChance: snapshot.SecondChanceObserve})
	s.expect("the node only observes", snapshot.Change{}, "globals a b |")
	if p := cluster(); numbers(p) != "1 2" || p.RetryRefused {
		t.Errorf("pool %+v", p)
	}
}

// TestRetryWithHash: a client whose hash leads to an endpoint that refuses comes back to it, so its connection is tried
// again only while no endpoint is known to be unhealthy.
func TestRetryWithHash(t *testing.T) {
	for scheduler, want := range map[string][2]bool{snapshot.Random: {true, true}, snapshot.Hash: {true, false}} {
		svc := webService("a", "10.96.0.1")
		svc.Scheduling = &snapshot.Scheduling{Scheduler: scheduler}
		s := openShop(t, Config{SecondChance: snapshot.SecondChanceOn}, svc, sliceOf("a", "a-1",
			endpoint("10.244.9.1", "x"), endpoint("10.244.9.2", "x"), endpoint("10.244.9.3", "x"),
			endpoint("10.244.9.4", "x")))
		for i, text := range []string{"", "1:r1 2:r2 3:r3"} { // of which one is kept
			s.p.Apply(s.s, s.s.Apply(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{name("a"): sick(text)}}))
			if got := s.p.State().Services[name("a")].Ports[0].Cluster.RetryRefused; got != want[i] {
				t.Errorf("%s, unhealthy %q: tried again: %v", scheduler, text, got)
			}
		}
	}
}

// TestEjectLaws compares random pools with the rules, spelled out the slow way, in any order of the slices.
func TestEjectLaws(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	full := 0
	for range 3000 {
		n := r.IntN(9)
		var eps []snapshot.Endpoint
		h := &snapshot.Health{}
		for i := range n {
			eps = append(eps, endpoint(fmt.Sprint("10.244.9.", i+1), "x"))
			if r.IntN(2) == 0 {
				h.Unhealthy = append(h.Unhealthy, snapshot.Unhealthy{Since: time.Unix(int64(r.IntN(3)), 0),
					Endpoint: netip.AddrPortFrom(eps[i].Addr, 8080), Cause: snapshot.Cause(r.IntN(2))})
			}
		}
		want := slices.Clone(h.Unhealthy)
		slices.SortStableFunc(want, func(a, b snapshot.Unhealthy) int { return a.Since.Compare(b.Since) })
		if len(want) > n/2 {
			want, full = want[:n/2], full+1
		}
		slices.SortFunc(want, func(a, b snapshot.Unhealthy) int { return a.Endpoint.Compare(b.Endpoint) })
		var first *Pool
		for range 3 {
			r.Shuffle(len(eps), func(i, j int) { eps[i], eps[j] = eps[j], eps[i] })
			cut := r.IntN(n + 1)
			s := snapshot.New()
			put(s, webService("web", "10.96.0.1"), sliceOf("web", "1", eps[:cut]...), sliceOf("web", "2", eps[cut:]...))
			s.Apply(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{name("web"): h}})
			st, _ := Compute(Config{SecondChance: snapshot.SecondChanceOn}, s)
			checkInvariants(t, st)
			p := st.Services[name("web")].Ports[0].Cluster
			if !slices.Equal(p.Ejected, want) || len(p.Endpoints) != n-len(want) {
				t.Fatalf("of %d with %+v ejected are %+v, left are %v; want %+v", n, h, p.Ejected, p.Endpoints, want)
			}
			if first != nil && !first.equal(p) {
				t.Fatalf("%+v, and in another order %+v", first, p)
			}
			first = p
		}
	}
	if full < 100 {
		t.Errorf("the limit counted only %d times", full)
	}
}
