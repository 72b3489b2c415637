package nft

import (
	"maps"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// A Service that asks for counters is counted, with its endpoints, whatever the level of counting, as long as it
// needs no more than its share of the budget, all that ask in its namespace need no more than one share, and all such
// namespaces together need no more than half of the budget. Otherwise it is counted as if it had not asked. What
// follows from the present Services alone, a process that starts finds to be the same.

// asking sums up Services that ask for counters.
type asking struct {
	// total is how many counters they take, needs what they would need if they had not asked.
	total int
	needs needs
	// names are those of one namespace.
	names map[snapshot.Name]struct{}
}

// asks gives how many counters a Service asks for: 0 if it does not ask, or has no hope.
func (m *Model) asks(s *service) int {
	if s.counters != snapshot.CountersFirst {
		return 0
	}
	frontends, endpoints := s.elements()
	if n := frontends + endpoints; n <= m.share() {
		return n
	}
	return 0
}

// ask takes note of what a Service asks for, or no longer asks for, and says whether that is anything.
func (m *Model) ask(s *service, by int) bool {
	n := m.asks(s)
	if n == 0 {
		return false
	}
	a := m.asking[s.name.Namespace]
	if a == nil {
		a = &asking{names: map[snapshot.Name]struct{}{}}
		if m.asking == nil {
			m.asking = map[string]*asking{}
		}
		m.asking[s.name.Namespace] = a
	}
	m.sumUp(a, -1)
	a.total += by * n
	a.needs.add(m.needsHeld(s), by)
	m.sumUp(a, +1)
	if by > 0 {
		a.names[s.name] = struct{}{}
	} else if delete(a.names, s.name); len(a.names) == 0 {
		delete(m.asking, s.name.Namespace)
	}
	return true
}

// sumUp adds what a namespace asks for to what all do, or takes it away again.
func (m *Model) sumUp(a *asking, by int) {
	if a.total <= m.share() {
		m.asked.total += by * a.total
		m.asked.needs.add(a.needs, by)
	}
}

// prefers says whether a Service that asks for counters gets them, if it is written as it is given.
func (m *Model) prefers(s *service) bool {
	n, all := m.asks(s), m.asked.total
	if n == 0 {
		return false
	}
	if a := m.asking[s.name.Namespace]; a != nil {
		if a.total <= m.share() {
			all -= a.total
		}
		n += a.total - m.asks(m.held(s.name))
	}
	return n <= m.share() && m.withinHalf(all+n)
}

func (m *Model) withinHalf(counters int) bool { return counters <= m.counters()/2 }

// needsHeld gives what a Service needs of the budget, if it is not preferred.
func (m *Model) needsHeld(s *service) needs {
	if s.counters == snapshot.CountersNever {
		return needs{}
	}
	frontends, endpoints := s.elements()
	return needsOf(frontends, endpoints, m.share())
}

// needed is what all Services need of the budget.
func (m *Model) needed() needs {
	n := m.needs
	if m.withinHalf(m.asked.total) {
		for level := range n {
			n[level] += m.asked.total - m.asked.needs[level]
		}
	}
	return n
}

// prefer has those Services counted anew, later and a little at a time, that are preferred since what was planned, or
// no longer are. What they take may be too much for the level.
func (p *planner) prefer() {
	m := p.m
	if all := m.withinHalf(m.asked.total); all != p.half {
		p.asking, p.half = slices.Collect(maps.Keys(m.asking)), all
	}
	if len(p.asking) == 0 {
		return
	}
	p.recount(needs{}, false)
	again := make(map[snapshot.Name]bool, len(m.recount))
	for _, name := range m.recount {
		again[name] = true
	}
	for _, name := range p.txn.Left.Services { // it is written again anyway
		again[name] = true
	}
	slices.Sort(p.asking)
	var names []snapshot.Name
	for _, namespace := range slices.Compact(p.asking) {
		if a := m.asking[namespace]; a != nil {
			for name := range a.names {
				held := m.services[name]
				if !again[name] && held.ports[0].counting != m.quota().of(held) {
					names = append(names, name)
				}
			}
		}
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	m.recount = slices.Concat(m.recount, names)
	p.asking = nil
}

// mark takes note of what is counted, or is not, because a Service asks for that. Digests of elements leave it out.
func (p *planner) mark(s *service, do func(*Digest, Digest)) {
	for _, port := range s.ports {
		asked := &p.m.tables[port.id.family].asked
		switch {
		case s.counters == snapshot.CountersNever:
			do(asked, digestOf([]byte("not counted "+port.id.name.String())))
		case s.counters == snapshot.CountersFirst && port.counting == CountEndpoints:
			do(asked, digestOf([]byte("counted "+port.id.name.String())))
		}
	}
}
