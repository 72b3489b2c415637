package nft

import (
	"cmp"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Counting says what has counters. A counter costs CounterBytes for each possible processor: little on two processors,
// gigabytes on many.
type Counting uint8

// The levels of counting. "Most" excludes Services that would take more than their share of the budget, so that one
// giant Service does not end the counting for all others.
const (
	// CountNothing counts only what rules refuse.
	CountNothing Counting = iota
	// CountMostFrontends counts connections at the addresses of most Services.
	CountMostFrontends
	// CountFrontends counts them at the addresses of all.
	CountFrontends
	// CountMostEndpoints counts them at the addresses and endpoints of most Services. Of the other Services it counts
	// those at the addresses, if these alone are within the share.
	CountMostEndpoints
	// CountEndpoints counts them at the addresses and endpoints of all.
	CountEndpoints
	numCountings
)

var countingNames = [numCountings]string{dataplane.CountedNothing, dataplane.CountedMostFrontends,
	dataplane.CountedFrontends,
	dataplane.CountedMostEndpoints, dataplane.CountedEndpoints}

// String returns the name used in receipts, metrics and the revision.
func (c Counting) String() string { return countingNames[c] }

// For a port, these say what is counted: a port has no level with "most".
func (c Counting) frontends() bool { return c >= CountFrontends }
func (c Counting) endpoints() bool { return c == CountEndpoints }

// CounterBytes is the memory of a counter for each possible processor.
const CounterBytes = 16

// shares is how many Services can each have their share of the budget.
const shares = 32

// needs is how many counters Services take at each level.
type needs [numCountings]int

// needsOf returns what a Service with so many elements takes.
func needsOf(frontends, endpoints, share int) (n needs) {
	for level := range numCountings {
		switch level.of(frontends, endpoints, share) {
		case CountEndpoints:
			n[level] = frontends + endpoints
		case CountFrontends:
			n[level] = frontends
		}
	}
	return n
}

// add adds what a Service takes, or subtracts it.
func (n *needs) add(o needs, by int) {
	for level := range n {
		n[level] += by * o[level]
	}
}

// of returns what is counted of a Service with so many elements: its endpoints, its frontends, or nothing.
func (c Counting) of(frontends, endpoints, share int) Counting {
	switch {
	case c == CountEndpoints, c == CountMostEndpoints && frontends+endpoints <= share:
		return CountEndpoints
	case c == CountFrontends, c >= CountMostFrontends && frontends <= share:
		return CountFrontends
	}
	return CountNothing
}

// within returns the level that makes the best use of a budget of counters. If the present level exceeds the budget,
// the level changes at once. It only rises to a level that uses at most half of the budget and twice as much as now, so
// that it does not alternate.
func (c Counting) within(budget int, n *needs) Counting {
	fits := n[c] <= budget
	best := CountNothing
	if fits {
		best = c
	}
	for level := range numCountings {
		more := n[level] > n[best] || n[level] == n[best] && n[level] > 0 && level > best
		worth := !fits || 2*n[level] <= budget && (n[level] >= 2*n[c] || level == CountEndpoints)
		if n[level] <= budget && worth && (more || level == CountEndpoints) {
			best = level
		}
	}
	return best
}

// quota decides what is counted of a Service.
type quota struct {
	level Counting
	share int
	// getsCounters says whether a Service that asks for counters gets them, whatever the level.
	getsCounters func(*service) bool
}

func (q quota) of(s *service) Counting {
	frontends, endpoints := s.elements()
	switch {
	case s.counters == snapshot.CountersNever:
		return CountNothing
	case s.counters == snapshot.CountersFirst && q.getsCounters(s):
		return CountEndpoints
	}
	return q.level.of(frontends, endpoints, q.share)
}

func (m *Model) quota() quota { return quota{m.counting, m.share(), m.getsCounters} }

// counters is the budget; share is what one Service may use while the budget is not enough for all.
func (m *Model) counters() int { return cmp.Or(m.Counters, 1<<61) }
func (m *Model) share() int    { return m.counters() / shares }

// elements counts a Service's elements that could have counters.
func (s *service) elements() (frontends, endpoints int) {
	for _, p := range s.ports {
		for i := range p.frontends {
			frontends += p.frontends[i].elements()
		}
		for i := range p.pools {
			endpoints += len(p.pools[i].slots)
		}
	}
	return frontends, endpoints
}

// elements counts a frontend's elements that could have counters.
func (f *frontend) elements() int {
	n := 1
	if f.indirect() {
		n++
	}
	if f.inside != f.outside {
		n++
	}
	return n
}

// counted copies a service, with another counting.
func (s *service) counted(q quota) *service {
	out, level := s.shallowCopy(), q.of(s)
	out.mixed = false
	for _, p := range out.ports {
		p.counting = level
	}
	return out
}
