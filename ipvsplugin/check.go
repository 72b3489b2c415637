package ipvsplugin

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// How often Check does its parts, and how long it takes for each at most. IPVS counts no transactions and tells
// nobody about them, so that what others do with it shows only by looking.
const (
	drainEvery = 2 * time.Second
	guardEvery = 2 * time.Second
	roundEvery = time.Second
	checkTime  = 2 * time.Millisecond
	// drainPause is how long it rests if there is more that drains than it could look at.
	drainPause = 50 * time.Millisecond
)

// checkProgress is the progress of Check.
type checkProgress struct {
	// strayRoutes says that routes may exist to addresses that no Service needs.
	strayRoutes bool
	// round holds the virtual services, and addrs the addresses, that this round still has to check.
	round []dataplane.Key
	addrs []netip.Addr
	// nextRound, nextDrain and nextGuard are when these are due again.
	nextRound, nextDrain, nextGuard time.Time
	generation                      uint32
	// drains are the draining virtual services that are still to be checked.
	drains []dataplane.Key
}

// Check looks for foreign changes, a part at a time, and removes what has drained.
func (b *Backend) Check() (found []string, again time.Duration, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	found, again, err = b.inner.Check()
	if !b.active || b.stale || b.dirty {
		return found, again, err
	}
	if len(found) > 0 { // whoever flushed the other tables has flushed the guard, too
		b.progress.nextGuard = time.Time{}
	}
	wrong, failed := b.check()
	if failed != nil { // the next Apply reads everything, and says it if that fails, too
		wrong = append(wrong, failed.Error())
	}
	if len(wrong) > 0 {
		b.stale, b.dirty = true, true
	}
	if len(b.progress.drains) > 0 && (again == 0 || again > drainPause) {
		again = drainPause
	}
	return append(found, wrong...), again, err
}

func (b *Backend) check() (wrong []string, err error) {
	start := time.Now()
	if err := b.removeDrained(start); err != nil {
		return nil, err
	}
	for _, part := range []func(time.Time) ([]string, error){b.checkGuard, b.checkServices, b.checkRoutes} {
		w, err := part(start)
		if wrong = append(wrong, w...); err != nil {
			return wrong, err
		}
	}
	return wrong, nil
}

// removeDrained removes destinations that have no connections left or whose time is over, and then what waited for
// them.
func (b *Backend) removeDrained(start time.Time) error {
	w := &b.progress
	if len(w.drains) == 0 {
		if start.Before(w.nextDrain) || len(b.draining) == 0 {
			return nil
		}
		w.nextDrain = start.Add(drainEvery)
		w.drains = sorted(b.draining)
	}
	var r dataplane.Receipt
	var ops []op
	seen := map[dataplane.Key]bool{}
	for n := 0; len(w.drains) > 0 && timeLeft(start, n); n++ {
		k := w.drains[0]
		w.drains = w.drains[1:]
		if b.have.services[k] == nil || !b.draining[k] {
			continue
		}
		more, err := b.removable(k)
		if err != nil {
			return err
		}
		ops = append(ops, more...)
		seen[k] = true
	}
	if err := b.writeRemovals(ops, &r); err != nil {
		return err
	}
	for k := range seen {
		b.updateDraining(k)
	}
	return b.removeRoutes(seen, &r)
}

// removable returns the removals that are possible at a virtual service.
func (b *Backend) removable(k dataplane.Key) ([]op, error) {
	list, err := b.ipvs.handle.Destinations(named(k))
	if err != nil {
		return nil, err
	}
	over := map[netip.AddrPort]bool{}
	now := uint32(b.now().Unix())
	for _, d := range list {
		end := d.UpperThreshold
		over[destinationOf(d).AddrPort] = d.ActiveConnections+d.InactiveConnections == 0 || end != 0 && end <= now
	}
	p := b.planner()
	p.idle = func(_ dataplane.Key, a netip.AddrPort) bool { return over[a] }
	return p.remove(k, b.have.services[k], b.want.services[k]), nil
}

// timeLeft says whether there is time for another step after n. The first step is always allowed.
func timeLeft(start time.Time, n int) bool { return n == 0 || time.Since(start) < checkTime }

// checkServices looks at some virtual services.
func (b *Backend) checkServices(start time.Time) (wrong []string, err error) {
	w := &b.progress
	if len(w.round) == 0 && len(w.addrs) == 0 {
		if start.Before(w.nextRound) {
			return nil, nil
		}
		w.nextRound = start.Add(roundEvery)
		for k := range b.have.services {
			w.round = append(w.round, k)
		}
		for a := range b.routes {
			w.addrs = append(w.addrs, a)
		}
	}
	for n := 0; len(w.round) > 0 && timeLeft(start, n); n++ {
		k := w.round[0]
		w.round = w.round[1:]
		if b.have.services[k] == nil {
			continue
		}
		what, err := b.compare(k)
		if err != nil {
			return wrong, err
		}
		if what != "" {
			wrong = append(wrong, what)
		}
	}
	return wrong, nil
}

// checkRoutes looks at some addresses.
func (b *Backend) checkRoutes(start time.Time) (wrong []string, err error) {
	w := &b.progress
	for n := 0; len(w.addrs) > 0 && len(w.round) == 0 && timeLeft(start, n); n++ {
		a := w.addrs[0]
		w.addrs = w.addrs[1:]
		if _, there := b.routes[a]; !there {
			continue
		}
		takes, err := b.net.takes(a)
		if err != nil {
			return wrong, err
		}
		if !takes {
			wrong = append(wrong, fmt.Sprintf("the local route to %s is gone", a))
		}
	}
	return wrong, nil
}

// checkGuard updates the guard when the host's addresses change, and compares the guard if anybody has committed a
// transaction.
func (b *Backend) checkGuard(start time.Time) (wrong []string, err error) {
	w := &b.progress
	if start.Before(w.nextGuard) {
		return nil, nil
	}
	defer func() { w.nextGuard = start.Add(max(guardEvery, 100*time.Since(start))) }()
	if err := b.readDevices(); err != nil {
		return nil, err
	}
	var r dataplane.Receipt
	if err := b.protect(nil, &r); err != nil {
		return nil, err
	}
	if moved := b.wrongSources(); len(moved) > 0 {
		return []string{"the node's address has changed"}, nil
	}
	generation, err := b.guard.Generation()
	if err != nil || generation == w.generation {
		return nil, err
	}
	same, err := b.guard.holds(b.guarded)
	if err != nil {
		return nil, err
	}
	if !same {
		return []string{"the table " + guardTable + " is not what it was"}, nil
	}
	w.generation = generation
	return nil, nil
}
