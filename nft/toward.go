package nft

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// A Service may be so large that its change takes several transactions. It then passes through intermediate versions,
// in which each frontend is in its old version, in its new version, or not there yet.

// stepToward returns the next intermediate version, about room elements away from s at most. Without grow, frontends
// are only removed. done says that nothing is left to do: without grow, that all frontends are gone that should be.
func (s *service) stepToward(want *service, room int, grow bool) (next *service, done bool) {
	t := &transition{room: room, grow: grow, done: true}
	next = &service{name: want.name, counters: want.counters, clusterIPs: s.clusterIPs, silent: s.silent,
		pingable: s.pingable, balanced: s.balanced, sources: s.sources}
	if grow { // ranges come before what they restrict
		for i := range next.sources {
			if r := want.sources[i].ranges; r != nil {
				next.sources[i].ranges = t.ranges(s.sources[i].ranges, r)
			}
		}
		if !t.done {
			t.room = 0
		}
	}
	for _, old := range s.ports {
		if p := t.port(old, want.port(old.id)); p != nil {
			next.ports = append(next.ports, p)
		}
	}
	for _, p := range want.ports {
		if s.port(p.id) != nil {
			continue
		}
		if p = t.port(nil, p); p != nil {
			next.ports = append(next.ports, p)
		}
	}
	if !grow || !t.done {
		return next, t.done
	}
	for i := range next.sources { // and go after it
		if r := s.sources[i].ranges; want.sources[i].ranges == nil && r != nil {
			next.sources[i].ranges = t.ranges(r, nil)
		}
	}
	if t.done {
		return want, true
	}
	return next, false
}

// transition is the state of one step through the ports of a Service.
type transition struct {
	room       int
	grow, done bool
}

// reserve reports whether there is room for some more elements; if not, something is left to do.
func (t *transition) reserve(n int) bool {
	if t.room <= 0 {
		t.done = false
		return false
	}
	t.room -= n
	return true
}

// port returns the next version of a port; nil means that it is not there. Either old or want may be nil.
func (t *transition) port(old, want *port) *port {
	var next port
	switch {
	case old == nil && !t.grow:
		return nil
	case old == nil:
		next = *want
		old = &port{}
	default:
		next = *old
	}
	if want == nil {
		want = &port{}
	}
	changes, moves := t.grow && len(want.frontends) > 0, false
	if changes {
		if n := old.moving(want); n > 0 {
			if moves = t.reserve(n); !moves {
				return &next
			}
		}
	}
	next.frontends = t.frontends(old.frontends, want.frontends)
	// Without changes, all frontends stay as they are, since no element may change twice in a transaction.
	if changes && len(next.frontends) > 0 {
		next.crowded = len(next.frontends) > directFrontends
		next.timeout, next.counting, next.local, next.pools = want.timeout, want.counting, want.local, want.pools
		next.limits, next.full, next.fullClients = want.limits, want.full, want.fullClients
		next.kept = want.kept
		t.room -= len(want.kept.slots)
		if n := old.otherClients(want); n > 0 && !t.reserve(n) {
			next.fullClients = old.fullClients
		}
		t.pools(old, &next, moves)
		t.room -= old.leadsElsewhere(&next)
	}
	next.markUsed()
	for i := range next.pools {
		if !next.pools[i].used { // what goes with the last frontend that leads to it leaves less room for others
			t.room -= len(old.pools[i].slots)
			next.pools[i] = pool{}
		}
	}
	if len(next.frontends) == 0 {
		return nil
	}
	return &next
}

// pools changes the pools of a port as far as there is room, or all of their slots if they move.
func (t *transition) pools(old, next *port, moves bool) {
	for i := range next.pools {
		was, is := &old.pools[i], &next.pools[i]
		switch {
		case !is.used:
			*is = *was
		case !moves: // otherwise there is room
			t.slots(was, is)
		}
		if is.refused != was.refused && !t.reserve(rangeCost) {
			is.refused = was.refused
		}
	}
}

// leadsElsewhere returns how many elements change because a pool has another class: those of its frontends.
func (p *port) leadsElsewhere(next *port) int {
	for i := range numPools {
		if p.pools[i].used && next.pools[i].used && p.frontendChain(i) != next.frontendChain(i) {
			return 2 * len(next.frontends)
		}
	}
	return 0
}

// moving returns how many elements of a port change at once if slots go into other maps, since counting or session
// affinity changes, or if endpoints become members or are members no longer; 0 if neither is so. The port then changes
// as a whole: one that kept some of its slots could be what it was before, and never come to an end.
func (p *port) moving(want *port) (n int) {
	moves := false
	for i := range numPools {
		moves = moves || len(p.pools[i].slots) > 0 && want.pools[i].used &&
			(p.slotSet(i) != want.slotSet(i) || p.memberSet() != want.memberSet() || p.sticky(i) != want.sticky(i))
	}
	if !moves {
		return 0
	}
	for i := range numPools {
		n += len(p.pools[i].slots) + len(p.members(i)) + len(want.pools[i].slots) + len(want.members(i))
	}
	return n
}

// frontends walks both sorted lists side by side.
func (t *transition) frontends(old, want []frontend) (next []frontend) {
	const each = 3 // as many elements as one has mostly
	for len(old) > 0 || len(want) > 0 {
		switch {
		case len(want) == 0 || len(old) > 0 && old[0].key.Compare(want[0].key) < 0:
			if !t.reserve(each) {
				next = append(next, old[0])
			}
			old = old[1:]
		case len(old) == 0 || old[0].key.Compare(want[0].key) > 0:
			if t.grow && t.reserve(each) {
				next = append(next, want[0])
			}
			want = want[1:]
		case old[0] == want[0] || !t.grow || !t.reserve(each):
			next = append(next, old[0])
			old, want = old[1:], want[1:]
		default:
			next = append(next, want[0])
			old, want = old[1:], want[1:]
		}
	}
	return next
}

// slots keeps in a pool the slots that its endpoints had, and as many new ones as there is room for, but at least one
// in all. The table of a pool with a hash is written as a whole; without room, the pool stays as it was, or starts with
// one slot. So does a pool of which endpoints had several slots each, and have fewer now.
func (t *transition) slots(old, p *pool) {
	gone := max(len(old.slots)-len(p.slots), 0)
	if p.hash == dataplane.NoHash && old.repeats && gone > 0 && !t.reserve(gone) {
		p.verdict, p.hash, p.repeats, p.slots = old.verdict, old.hash, old.repeats, old.slots
		return
	}
	if p.hash != dataplane.NoHash {
		switch n := p.distance(old) + gone; {
		case n == 0 || t.reserve(n):
		case len(old.slots) > 0:
			p.hash, p.repeats, p.slots = old.hash, old.repeats, old.slots
		default:
			p.slots = p.slots[:1]
		}
		return
	}
	before := make(map[netip.AddrPort]int, len(old.slots))
	for _, ep := range old.slots {
		before[ep]++
	}
	kept := 0
	p.slots = slices.DeleteFunc(slices.Clone(p.slots), func(ep netip.AddrPort) bool {
		if before[ep]--; before[ep] < 0 && !t.reserve(1) && kept > 0 {
			return true
		}
		kept++
		return false
	})
}

// distance returns how many slots are not the same in another pool.
func (pl *pool) distance(old *pool) (n int) {
	for i := range pl.slots {
		if i >= len(old.slots) || old.slots[i] != pl.slots[i] {
			n++
		}
	}
	return n
}
