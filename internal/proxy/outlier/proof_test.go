package outlier

import (
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// TestProof: what suffices to say that an endpoint of few clients is dead. Its last answer was at 0 s.
func TestProof(t *testing.T) {
	const ms = time.Millisecond
	type denied struct {
		client byte
		at     time.Duration
		// released says that the client's connection, which began later than that, was deleted.
		released bool
	}
	for name, c := range map[string]struct {
		denied   []denied
		accepted map[byte]time.Duration
		want     bool
	}{
		"two packets of one connection": {[]denied{{1, 3000 * ms, false}}, map[byte]time.Duration{1: 5000 * ms}, false},
		"two clients": {[]denied{{1, 3000 * ms, false}, {2, 3000 * ms, false}, {1, 4000 * ms, false},
			{2, 4000 * ms, false}}, map[byte]time.Duration{1: 5000 * ms, 2: 5000 * ms}, true},
		"two clients, of whom a policy forbids one all endpoints": {[]denied{{1, 3000 * ms, false}, {2, 3000 * ms, false},
			{2, 3300 * ms, false}, {2, 3600 * ms, false}, {2, 3900 * ms, false}},
			map[byte]time.Duration{1: 5000 * ms, 2: 2900 * ms}, false},
		"connections that are deleted": {[]denied{{1, 3000 * ms, false}, {1, 3300 * ms, true}, {1, 3600 * ms, true},
			{1, 3900 * ms, true}}, map[byte]time.Duration{1: 5000 * ms}, true},
		"connections whose packets were seen": {[]denied{{1, 3000 * ms, false},
			{1, 2300 * ms, true}, {1, 2600 * ms, true}, {1, 2900 * ms, true}}, map[byte]time.Duration{1: 5000 * ms}, false},
		"connections of somebody whom it never accepted": {[]denied{{1, 3000 * ms, true}, {1, 4000 * ms, true},
			{1, 5000 * ms, true}, {1, 6000 * ms, true}}, map[byte]time.Duration{1: 5000 * ms}, false},
		"one packet of three each seconds": {[]denied{{1, 3000 * ms, false}, {1, 6000 * ms, false}},
			map[byte]time.Duration{1: 5000 * ms}, true},
	} {
		t.Run(name, func(t *testing.T) {
			begin := time.Now()
			at := func(d time.Duration) time.Time { return begin.Add(d) }
			address := func(n byte) netip.Addr { return netip.AddrFrom4([4]byte{10, 244, 9, n}) }
			m := newMachine()
			tr := &track{trackKey: trackKey{shop, endpoint(1)},
				ports: []*dataplane.ServicePort{port("shop", 1, 2)}}
			m.answers.observe(at(0), []dataplane.Answer{{Endpoint: endpoint(1)}})
			for _, d := range c.denied {
				if d.released {
					tr.proof.release(at(d.at), map[netip.Addr]bool{address(d.client): true})
					continue
				}
				client := dataplane.Pair{Client: address(d.client), Endpoint: endpoint(1)}
				tr.proof.add(at(d.at), at(0), []dataplane.Pair{client})
			}
			accepted := map[netip.Addr][]dataplane.Pair{}
			for n, d := range c.accepted {
				accepted[address(n)] = []dataplane.Pair{{Client: address(n), Endpoint: endpoint(2),
					Ago: 7*time.Second - d}}
			}
			if got := m.elsewhere(at(7*time.Second), tr, accepted); got != c.want {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// TestProbeAfterProof: a probe that began before the proof says nothing of an endpoint with few clients: what forbade
// it may be over, as it is for the client whom another endpoint accepted.
func TestProbeAfterProof(t *testing.T) {
	now := time.Now()
	m, tr := newMachine(), &track{trackKey: trackKey{shop, endpoint(1)}}
	tr.begun, tr.ended = now.Add(-600*time.Millisecond), now.Add(-100*time.Millisecond)
	tr.proof.suffices(now.Add(-500 * time.Millisecond))
	tr.proof.suffices(now)
	if m.probedSince(now, tr) {
		t.Error("by an earlier probe")
	}
	tr.begun = now.Add(-400 * time.Millisecond)
	if !m.probedSince(now, tr) {
		t.Error("not by a later probe")
	}
	if m.probedSince(now.Add(proofLasts), tr) {
		t.Error("by an old probe")
	}
}
