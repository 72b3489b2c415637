package blackbox

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestLongConnection has a held connection with more packets than are kept as evidence: both its beginning and its end
// are, in each namespace that it went through, and the end explains it.
func TestLongConnection(t *testing.T) {
	client, server := netip.MustParseAddrPort("10.0.1.5:40000"), netip.MustParseAddrPort("10.0.2.5:8080")
	began := time.Now().Add(-time.Minute)
	forward := tupleOf(unix.IPPROTO_TCP, client, server)
	spaces := []*space{newSpace("outside", sizes{1 << 14, 1, 1, 1, 1}), newSpace("node", sizes{1 << 14, 1, 1, 1, 1})}
	at, seq := began.UnixNano(), uint32(1)
	add := func(way tuple, flags uint8, length uint16) {
		at, seq = at+int64(time.Millisecond), seq+1
		for _, s := range spaces {
			s.packets.add(&packet{at: at, tuple: way, seq: seq, ack: seq, flags: flags, length: length})
		}
	}
	add(forward, syn, 0)
	add(forward.reversed(), syn|ack, 0)
	for range 4 * maxPackets {
		add(forward, ack, 4)
		add(forward.reversed(), ack, 4)
	}
	add(forward.reversed(), fin|ack, 0)
	e := newEvidence(Failure{Client: client, Server: server, Protocol: unix.IPPROTO_TCP, Began: began,
		Failed: time.Unix(0, at), Held: true, Err: "EOF"})
	e.objects = newObjects()
	gather([]*evidence{e}, spaces)
	if cause, text := e.classify(); cause != "server closed" {
		t.Errorf("cause is %q: %s; want %q", cause, text, "server closed")
	}
	seen := map[string]int{}
	for i := range e.packets {
		seen[e.packets[i].space.name]++
	}
	for _, s := range spaces {
		if n := seen[s.name]; n != maxPackets {
			t.Errorf("%d packets of %s are evidence, want %d", n, s.name, maxPackets)
		}
	}
	if s := e.first((*sight).asks); s == nil {
		t.Error("its first packet is no evidence")
	}
}

// TestOtherFamily has a Service of both families whose IPv4 endpoints are not ready any more and whose IPv6 endpoints
// still are: a client of IPv4 had no ready endpoint, whatever transaction was under way.
func TestOtherFamily(t *testing.T) {
	box := New(Config{})
	t.Cleanup(func() {
		if err := box.Close(); err != nil {
			t.Error(err)
		}
	})
	client, server := netip.MustParseAddrPort("10.0.1.5:40000"), netip.MustParseAddrPort("10.96.0.80:80")
	box.Service(Service{Name: "default/echo", Addresses: []netip.Addr{server.Addr()}, Ports: []ServicePort{{Port: 80}}})
	set := func(name, addr string, ready bool) {
		box.Slice(Slice{Name: name, Service: "default/echo", Endpoints: []Endpoint{{Addr: netip.MustParseAddr(addr),
			Ports: []uint16{8080}, Ready: ready, Serving: ready}}})
	}
	set("default/echo-4", "10.0.2.5", true)
	set("default/echo-6", "fd00::5", true)
	box.Listed()
	set("default/echo-4", "10.0.2.5", false)
	now := time.Now()
	node := newSpace("node", sizes{16, 1, 1, 16, 1})
	forward := tupleOf(unix.IPPROTO_TCP, client, server)
	node.packets.add(&packet{at: now.UnixNano(), tuple: forward, seq: 1, flags: syn})
	node.packets.add(&packet{at: now.UnixNano() + 1, tuple: forward.reversed(), ack: 2, flags: rst | ack, out: true})
	node.commits.add(&commit{generation: 7, since: now.UnixNano() - 1e6, at: now.UnixNano() + 1e6})
	e := newEvidence(Failure{Client: client, Server: server, Protocol: unix.IPPROTO_TCP, Began: now, Failed: now})
	e.objects = box.objects
	gather([]*evidence{e}, []*space{node})
	if cause, text := e.classify(); cause != "no ready endpoint" {
		t.Errorf("cause is %q: %s; want %q", cause, text, "no ready endpoint")
	}
}

// TestReplyFirst has a held connection of which only answers were seen where it is translated: the endpoint is what
// they come from, and not where they go.
func TestReplyFirst(t *testing.T) {
	client, server := netip.MustParseAddrPort("10.0.1.5:40000"), netip.MustParseAddrPort("10.96.0.80:80")
	endpoint := netip.MustParseAddrPort("10.0.2.5:8080")
	now := time.Now()
	node := newSpace("node", sizes{16, 1, 1, 1, 1})
	asked, sent := tupleOf(unix.IPPROTO_TCP, client, server), tupleOf(unix.IPPROTO_TCP, client, endpoint)
	for i, way := range []tuple{sent.reversed(), asked.reversed()} {
		node.packets.add(&packet{at: now.UnixNano() + int64(i), tuple: way, seq: 7, ack: 9, flags: ack | push, length: 4})
	}
	e := newEvidence(Failure{Client: client, Server: server, Protocol: unix.IPPROTO_TCP, Began: now, Failed: now,
		Held: true})
	gather([]*evidence{e}, []*space{node})
	if a, translated := e.endpoint(); !translated || a != endpoint {
		t.Errorf("the endpoint is %v, %t; want %v", a, translated, endpoint)
	}
}

// TestSamePort has two connections from the same port fail, one soon after the other: each has its own packets.
func TestSamePort(t *testing.T) {
	client, server := netip.MustParseAddrPort("10.0.1.5:40000"), netip.MustParseAddrPort("10.0.2.5:8080")
	node := newSpace("node", sizes{16, 1, 1, 1, 1})
	var all []*evidence
	for i := range 2 {
		began := time.Now().Add(time.Duration(i-2) * time.Minute)
		node.packets.add(&packet{at: began.UnixNano(), tuple: tupleOf(unix.IPPROTO_TCP, client, server), seq: uint32(i),
			flags: syn})
		all = append(all, newEvidence(Failure{Client: client, Server: server, Protocol: unix.IPPROTO_TCP, Began: began,
			Failed: began.Add(time.Second)}))
	}
	gather(all, []*space{node})
	for i, e := range all {
		<-e.done
		if len(e.packets) != 1 || e.packets[0].seq != uint32(i) {
			t.Errorf("connection %d has the packets %v", i, e.packets)
		}
	}
}
