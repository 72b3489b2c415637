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
