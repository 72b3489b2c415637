package ipvsplugin

import (
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestCrowdOfDraining: whoever has endpoints come and go all the time, each with a connection, has only so many drain;
// the oldest go.
func TestCrowdOfDraining(t *testing.T) {
	k := dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80}
	have, at := newContents(), uint32(1000)
	for round := range 6 {
		var want VirtualService
		want.Key, want.Config = k, Config{Scheduler: "rr"}
		for i := range 500 {
			a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(round), byte(i >> 8), byte(i)}), 80)
			want.Destinations = append(want.Destinations, Destination{a, 1, 0})
		}
		p := &planner{until: at}
		for _, ops := range []func() []op{
			func() []op { return p.prepare(k, have.services[k], &want) },
			func() []op { return p.remove(k, have.services[k], &want) },
		} {
			for _, o := range ops() {
				have.apply(o)
			}
		}
		if again := p.remove(k, have.services[k], &want); len(again) > 0 {
			t.Errorf("round %d: %v", round, again[0])
		}
		if got, most := len(have.services[k].dests), 500+min(500*round, maxDraining); got != most {
			t.Errorf("round %d: %d destinations, want %d", round, got, most)
		}
		at += 10
	}
	oldest := at
	for _, d := range have.services[k].dests {
		if d.Weight == 0 {
			oldest = min(oldest, d.Until)
		}
	}
	if oldest < 1030 {
		t.Errorf("one drains since %d", oldest)
	}
	for _, o := range (&planner{until: at}).remove(k, have.services[k], nil) {
		have.apply(o)
	}
	if got := len(have.services[k].dests); got != maxDraining {
		t.Errorf("of one that is gone %d drain", got)
	}
}
