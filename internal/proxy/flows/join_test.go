package flows

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// What the tests below know of a connection.
var (
	aClient   = netip.MustParseAddrPort("10.244.1.7:40000")
	anEnd     = netip.MustParseAddrPort("10.244.2.9:8080")
	aFrontend = dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80}
	aStart    = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
)

// TestFinish: how a connection ended, from what the kernel and the log know of it.
func TestFinish(t *testing.T) {
	const own, foreign = 77, 78
	for _, c := range []struct {
		flow conntrack.Flow
		// resets are who sent a reset, in order: "client", "endpoint".
		resets  string
		ejected bool
		want    string
	}{
		{conntrack.Flow{State: conntrack.TCPTimeWait, Answered: true}, "", false, "closed"},
		{conntrack.Flow{State: conntrack.TCPFinWait, Answered: true}, "", false, "closed"},
		{conntrack.Flow{State: conntrack.TCPEstablished, Answered: true}, "client", false, "timed out"},
		{conntrack.Flow{State: conntrack.TCPSynReceived, Answered: true}, "", false, "timed out"},
		{conntrack.Flow{State: 1}, "", false, "unanswered"},
		{conntrack.Flow{State: conntrack.TCPClose, Counted: true}, "", false, "unanswered"},
		{conntrack.Flow{State: conntrack.TCPClose}, "", false, "refused by endpoint"},
		{conntrack.Flow{State: conntrack.TCPClose, Counted: true, Received: conntrack.Count{Packets: 1}}, "endpoint", false,
			"refused by endpoint"},
		{conntrack.Flow{State: conntrack.TCPClose, Answered: true}, "", false, "reset"},
		{conntrack.Flow{State: conntrack.TCPClose, Answered: true}, "client", false, "reset by client"},
		{conntrack.Flow{State: conntrack.TCPClose, Answered: true}, "client endpoint", false, "reset by endpoint"},
		{conntrack.Flow{State: conntrack.TCPEstablished, Answered: true, By: own}, "", false, "released"},
		{conntrack.Flow{State: conntrack.TCPEstablished, Answered: true, By: own}, "", true, "ejected"},
		{conntrack.Flow{State: conntrack.TCPEstablished, Answered: true, By: foreign}, "", true,
			"released by another program"},
	} {
		var got []Record
		r := &Recorder{o: RecorderOptions{Own: map[uint32]bool{own: true}, Names: NewNames(),
			Sink: func(r Record) { got = append(got, r) }}, resets: recent{memory: resetMemory}}
		sp := &dataplane.ServicePort{Cluster: &dataplane.Pool{}, Local: &dataplane.Pool{}}
		if c.ejected {
			sp.Cluster.Ejected = []snapshot.Unhealthy{{Endpoint: anEnd}}
		}
		f := c.flow
		f.Frontend, f.Client, f.Endpoint, f.Start = aFrontend, aClient, anEnd, aStart
		// One of an earlier connection with the same addresses does not count.
		r.resets.see(pair{snapshot.TCP, anEnd, aClient}, aStart.Add(-time.Second))
		for i, who := range strings.Fields(c.resets) {
			p := pair{snapshot.TCP, aClient, anEnd}
			if who == "endpoint" {
				p.from, p.to = p.to, p.from
			}
			r.resets.see(p, aStart.Add(time.Duration(i+1)*time.Second))
		}
		r.finish(Record{}, sp, &f, aStart.Add(time.Minute))
		if len(got) != 1 || strings.TrimSpace(string(got[0].End)+" "+got[0].Reason) != c.want {
			t.Errorf("%+v, resets %q, ejected %v: %+v; want %s", c.flow, c.resets, c.ejected, got, c.want)
		}
	}
}

// TestLived: the kernel's wait after the last packet is no part of a connection's life.
func TestLived(t *testing.T) {
	timeouts := readTimeouts(func(name string) (int, error) {
		n, ok := map[string]int{"nf_conntrack_tcp_timeout_time_wait": 120, "nf_conntrack_tcp_timeout_established": 86400,
			"nf_conntrack_tcp_timeout_unacknowledged": 300, "nf_conntrack_tcp_timeout_close": 10,
			"nf_conntrack_udp_timeout": 30, "nf_conntrack_udp_timeout_stream": 120}[name]
		if !ok {
			return 0, errors.New("unknown")
		}
		return n, nil
	})
	udp := aFrontend
	udp.Protocol = snapshot.UDP
	for _, c := range []struct {
		flow  conntrack.Flow
		after time.Duration
		want  float64
	}{
		{conntrack.Flow{Frontend: aFrontend, State: conntrack.TCPTimeWait}, 125 * time.Second, 5},
		{conntrack.Flow{Frontend: aFrontend, State: conntrack.TCPTimeWait, Left: 100 * time.Second}, 25 * time.Second, 5},
		{conntrack.Flow{Frontend: aFrontend, State: conntrack.TCPClose, Left: 110 * time.Second}, time.Second, 1},
		{conntrack.Flow{Frontend: aFrontend, State: conntrack.TCPEstablished}, 302 * time.Second, 2},
		{conntrack.Flow{Frontend: aFrontend, State: conntrack.TCPTimeWait}, 119 * time.Second, 0},
		{conntrack.Flow{Frontend: udp}, 31 * time.Second, 1},
		{conntrack.Flow{Frontend: udp, Assured: true}, 121 * time.Second, 1},
	} {
		f := c.flow
		f.Start, f.Stop = aStart, aStart.Add(c.after)
		last, got := timeouts.lived(&f, time.Now())
		if got != c.want || last != aStart.Add(time.Duration(got*float64(time.Second))) {
			t.Errorf("%+v ended after %v: it lived for %v s, until %v; want %v", c.flow, c.after, got, last, c.want)
		}
	}
}

// TestNames: an address is named by the last who had it, for a while after; one that two pods have by neither.
func TestNames(t *testing.T) {
	n := NewNames()
	slice := func(name, pod string, addrs ...string) snapshot.Delta {
		s := &snapshot.Slice{Name: snapshot.Name{Namespace: "shop", Name: name}}
		for _, a := range addrs {
			s.Endpoints = append(s.Endpoints, snapshot.Endpoint{Addr: netip.MustParseAddr(a), Pod: pod, Node: "n2", Zone: "b"})
		}
		return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{s.Name: s}}
	}
	now := aStart
	expect := func(what, addr, pod, node string) {
		t.Helper()
		n.settle(now)
		if got := n.endpoint(netip.AddrPortFrom(netip.MustParseAddr(addr), 80)); got.Pod != pod || got.Node != node {
			t.Errorf("%s: %s is %+v; want %q at %q", what, addr, got, pod, node)
		}
	}
	n.Take(slice("a", "web-1", "10.0.0.1", "10.0.0.2"))
	n.Take(slice("b", "web-1", "10.0.0.1"))
	n.Take(slice("c", "other", "10.0.0.2"))
	expect("one pod in two slices", "10.0.0.1", "shop/web-1", "n2")
	expect("two pods", "10.0.0.2", "", "n2")
	n.Take(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{{Namespace: "shop", Name: "a"}: nil}})
	expect("one slice is gone", "10.0.0.1", "shop/web-1", "n2")
	n.Take(slice("b", "web-1"))
	now = now.Add(remembered / 2)
	expect("both are gone", "10.0.0.1", "shop/web-1", "n2")
	n.Take(slice("d", "web-2", "10.0.0.1"))
	expect("another pod", "10.0.0.1", "shop/web-2", "n2")
	n.Take(slice("d", "web-2"))
	n.settle(now)
	now = now.Add(2 * remembered)
	expect("long gone", "10.0.0.1", "", "")

	pod := snapshot.Name{Namespace: "shop", Name: "cart-1"}
	n.Take(snapshot.Delta{Node: &snapshot.Node{Name: "n1", Zone: "a"},
		HostAddrs: &[]netip.Addr{netip.MustParseAddr("192.0.2.1")}})
	n.TakePods(map[snapshot.Name]*watch.Pod{pod: {Addrs: []netip.Addr{aClient.Addr()}, Workload: "shop/cart"}})
	n.settle(now)
	if got := n.client(aClient); got.Pod != "shop/cart-1" || got.Workload != "shop/cart" || got.Node != "n1" ||
		got.Zone != "a" {
		t.Errorf("a pod here is %+v", got)
	}
	if got := n.client(netip.MustParseAddrPort("192.0.2.1:5000")); got.Pod != "" || got.Node != "n1" {
		t.Errorf("this node is %+v", got)
	}
	if got := n.client(netip.MustParseAddrPort("10.0.0.2:5000")); got.Pod != "" || got.Node != "n2" || got.Zone != "b" {
		t.Errorf("a client elsewhere is %+v", got)
	}
	edge := snapshot.Name{Namespace: "edge", Name: "db"}
	for _, svc := range []*snapshot.Service{{Name: edge, Backends: &snapshot.Backends{For: "Gateway edge/db"}}, {}, nil} {
		n.Take(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{edge: svc}})
		if n.settle(now); n.by[edge] != svc.For() || len(n.by) > 1 {
			t.Errorf("the Service is for %q; want %q", n.by[edge], svc.For())
		}
	}
}

// TestOwners: a connection belongs to the Service that had its frontend when it began, also after that is gone.
func TestOwners(t *testing.T) {
	service := func(name string) *dataplane.Service {
		sp := &dataplane.ServicePort{Name: dataplane.PortName{Service: snapshot.Name{Namespace: "shop", Name: name},
			Protocol: snapshot.TCP}, Frontends: []dataplane.Frontend{{Key: aFrontend}}}
		return &dataplane.Service{Name: sp.Name.Service, Ports: []*dataplane.ServicePort{sp}}
	}
	s := newServices()
	first, same, second := service("first"), service("first"), service("second")
	at := func(minutes int) time.Time { return aStart.Add(time.Duration(minutes) * time.Minute) }
	owner := func(of services, begun time.Time) string {
		if sp := of.owner(aFrontend, begun); sp != nil {
			return sp.Name.Service.Name
		}
		return ""
	}
	list := func(svc *dataplane.Service) []*dataplane.Service { return []*dataplane.Service{svc} }
	s.replace(list(nil), list(first), at(0))
	s.replace(list(first), list(same), at(1))
	s.replace(append(list(same), nil), append(list(nil), second), at(2))
	for begun, want := range map[time.Time]string{at(0): "first", at(1): "first", at(3): "second", {}: "second"} {
		if got := owner(s, begun); got != want {
			t.Errorf("begun %v: %q; want %q", begun, got, want)
		}
	}
	s.replace(list(second), list(nil), at(5))
	if got := owner(s, at(3)); got != "second" {
		t.Errorf("just gone: %q", got)
	}
	s.forget(at(5).Add(2 * remembered))
	if got := owner(s, at(3)); got != "" || len(s.addrs)+len(s.now)+len(s.gone) > 0 {
		t.Errorf("long gone: %q, %+v", got, s)
	}
}

// TestFailures: what the proxy ended before there was an answer did not fail, as its client's next packet began anew.
func TestFailures(t *testing.T) {
	one := Traffic{Packets: 1, Bytes: 60}
	for _, test := range []struct {
		Record
		want bool
	}{
		{Record{End: Unanswered, Protocol: "TCP", Sent: one}, true},
		{Record{End: Unanswered, Protocol: "UDP", Sent: one}, false},
		{Record{End: Ejected, Protocol: "TCP", Sent: one}, false},
		{Record{End: Released, Protocol: "TCP", Sent: one}, false},
		{Record{End: Ejected, Protocol: "TCP", Sent: one, Received: one}, true},
		{Record{End: Released, Protocol: "TCP"}, true}, // nothing was counted
		{Record{End: Refused, Protocol: "TCP", Sent: one, Received: one}, true},
		{Record{End: Closed, Protocol: "TCP", Sent: one, Received: one}, false},
	} {
		if got := test.Failure(); got != test.want {
			t.Errorf("%s %s, received %d: a failure %v", test.Protocol, test.End, test.Received.Packets, got)
		}
	}
}
