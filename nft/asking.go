package nft

import (
	"maps"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// A Service that asks for counters gets them for its frontends and endpoints, whatever the level of counting, within
// three limits: the Service needs at most its share of the budget, all such Services of its namespace need at most one
// share, and all such namespaces need at most half of the budget. Otherwise it is counted as if it had not asked. This
// follows from the present Services alone, so a restarted process comes to the same result.

// counterRequests sums up Services that ask for counters.
type counterRequests struct {
	// total is how many counters they take; needs is what they would need if they had not asked.
	total int
	needs needs
	// services are those of one namespace.
	services map[snapshot.Name]struct{}
}

// requestedCounters returns how many counters a Service asks for: 0 if it does not ask, or cannot get them.
func (m *Model) requestedCounters(s *service) int {
	if s.counters != snapshot.CountersFirst {
		return 0
	}
	frontends, endpoints := s.elements()
	if n := frontends + endpoints; n <= m.share() {
		return n
	}
	return 0
}

// accountRequest adds or removes a Service's request, and returns whether it has one.
func (m *Model) accountRequest(s *service, by int) bool {
	n := m.requestedCounters(s)
	if n == 0 {
		return false
	}
	a := m.requests[s.name.Namespace]
	if a == nil {
		a = &counterRequests{services: map[snapshot.Name]struct{}{}}
		if m.requests == nil {
			m.requests = map[string]*counterRequests{}
		}
		m.requests[s.name.Namespace] = a
	}
	m.addToTotal(a, -1)
	a.total += by * n
	a.needs.add(m.needsWithout(s), by)
	m.addToTotal(a, +1)
	if by > 0 {
		a.services[s.name] = struct{}{}
	} else if delete(a.services, s.name); len(a.services) == 0 {
		delete(m.requests, s.name.Namespace)
	}
	return true
}

// addToTotal adds a namespace's requests to the total, or subtracts them.
func (m *Model) addToTotal(a *counterRequests, by int) {
	if a.total <= m.share() {
		m.requested.total += by * a.total
		m.requested.needs.add(a.needs, by)
	}
}

// getsCounters reports whether a Service that asks for counters gets them, if it is written as given.
func (m *Model) getsCounters(s *service) bool {
	n, all := m.requestedCounters(s), m.requested.total
	if n == 0 {
		return false
	}
	if a := m.requests[s.name.Namespace]; a != nil {
		if a.total <= m.share() {
			all -= a.total
		}
		n += a.total - m.requestedCounters(m.serviceOrEmpty(s.name))
	}
	return n <= m.share() && m.fitsHalfBudget(all+n)
}

func (m *Model) fitsHalfBudget(counters int) bool { return counters <= m.counters()/2 }

// needsWithout returns what a Service needs of the budget if its request is not granted.
func (m *Model) needsWithout(s *service) needs {
	if s.counters == snapshot.CountersNever {
		return needs{}
	}
	frontends, endpoints := s.elements()
	return needsOf(frontends, endpoints, m.share())
}

// totalNeeds is what all Services need of the budget.
func (m *Model) totalNeeds() needs {
	n := m.needs
	if m.fitsHalfBudget(m.requested.total) {
		for level := range n {
			n[level] += m.requested.total - m.requested.needs[level]
		}
	}
	return n
}

// recountRequests schedules recounts of Services whose request is granted since the last plan, or no longer granted.
// What they take may be too much for the level.
func (p *planner) recountRequests() {
	m := p.m
	if all := m.fitsHalfBudget(m.requested.total); all != p.fitsHalf {
		p.changedRequests, p.fitsHalf = slices.Collect(maps.Keys(m.requests)), all
	}
	if len(p.changedRequests) == 0 {
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
	slices.Sort(p.changedRequests)
	var names []snapshot.Name
	for _, namespace := range slices.Compact(p.changedRequests) {
		if a := m.requests[namespace]; a != nil {
			for name := range a.services {
				held := m.services[name]
				if !again[name] && held.ports[0].counting != m.quota().of(held) {
					names = append(names, name)
				}
			}
		}
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	m.recount = slices.Concat(m.recount, names)
	p.changedRequests = nil
}

// markCounted updates the digest of what is counted, or is not, because a Service asks for it or is written in part.
// Digests of elements leave that out.
func (p *planner) markCounted(s *service, do func(*Digest, Digest)) {
	for _, port := range s.ports {
		asked := &p.m.tables[port.id.family].asked
		switch {
		case s.mixed: // no process ever wants this, so the next one writes everything that is not as it should be
			do(asked, digestOf([]byte("written in part "+port.id.name.String())))
		case s.counters == snapshot.CountersNever:
			do(asked, digestOf([]byte("not counted "+port.id.name.String())))
		case s.counters == snapshot.CountersFirst && port.counting == CountEndpoints:
			do(asked, digestOf([]byte("counted "+port.id.name.String())))
		}
	}
}
