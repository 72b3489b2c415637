package nft

import (
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Walk is the way of a packet through a table.
type Walk struct {
	// Steps are the rules that looked at the packet before it had a destination, in their order, and Later those behind,
	// with the first of the Endings.
	Steps, Later []Step
	// Endings are what can become of it; their chances add up to 1.
	Endings []dataplane.Ending
}

// Step is one rule on a packet's way.
type Step struct {
	Chain ChainID
	Rule  Rule
	// Found are the elements that it found.
	Found []Listed
	// Matched says that all of the rule was carried out.
	Matched bool
}

// Connections gives what the element that a step found last has counted, or all of which one is chosen; nil if they do
// not count.
func (s *Step) Connections() *uint64 {
	sum := uint64(0)
	for i := range s.Found {
		if s.Found[i].Set != s.Found[len(s.Found)-1].Set {
			continue
		}
		n := s.Found[i].connections()
		if n == nil {
			return nil
		}
		sum += *n
	}
	return &sum
}

// connections gives what an element has counted; nil if it does not count.
func (l *Listed) connections() *uint64 {
	if !l.Counted {
		return nil
	}
	n := l.Packets
	return &n
}

// PortName reads from an element's comment to which service port it belongs. It is not ok if there is none.
func (e *Element) PortName(proto Protocol) (dataplane.PortName, bool) {
	return dataplane.ParsePortName(e.Comment, proto)
}

// Trace gives the walk as an Inspector answers it.
func (w *Walk) Trace(f ipfamily.Family) *dataplane.Trace {
	t := &dataplane.Trace{Cause: w.Cause(), Endings: w.Endings}
	for i := range w.Steps {
		t.Steps = append(t.Steps, w.Steps[i].trace(f))
	}
	for i := range w.Later {
		step := w.Later[i].trace(f)
		step.Translated = true
		t.Steps = append(t.Steps, step)
	}
	if l, _, ok := w.Frontend(); ok {
		t.Port, _ = l.PortName(l.FrontendKey().Protocol)
		t.Connections = l.connections()
	} else if l, ok := w.kept(); ok {
		t.Port, _ = l.PortName(l.FrontendKey().Protocol)
	}
	return t
}

// kept returns the element that had the packet's client divided among nodes.
func (w *Walk) kept() (e Listed, ok bool) {
	for _, s := range w.Steps {
		for _, l := range s.Found {
			if l.Set == KeptServices {
				e, ok = l, true
			}
		}
	}
	return e, ok
}

func (s *Step) trace(f ipfamily.Family) dataplane.TraceStep {
	t := dataplane.TraceStep{Chain: s.Chain.Name(), Rule: s.Rule.Text(f), Matched: s.Matched}
	for i := range s.Found {
		set := SetByID(s.Found[i].Set)
		t.Found = append(t.Found, s.Found[i].Text(f, &set))
	}
	return t
}

// Cause says why, as far as the rules tell.
func (w *Walk) Cause() dataplane.Cause {
	for _, e := range w.Endings {
		switch e.Outcome {
		case dataplane.Sent:
			return dataplane.FrontendFound
		case dataplane.Scheduled:
			return dataplane.FrontendScheduled
		case dataplane.Answered:
			return dataplane.PingAnswered
		}
	}
	if dataplane.OutcomeOf(w.Endings) == dataplane.Forwarded.String() {
		return dataplane.ForwardedToNode
	}
	return w.causeOf()
}

// causeOf is Cause of a packet that goes nowhere, or on as it came: what the last rule says that matched.
func (w *Walk) causeOf() dataplane.Cause {
	for i := len(w.Steps) - 1; i >= 0; i-- {
		s := &w.Steps[i]
		if !s.Matched {
			continue
		}
		if s.Chain.Kind == PassOn && i > 0 && w.Steps[i-1].Rule.looksUp(SharedRanges) {
			return dataplane.NotService
		} else if s.Chain.Kind == PassOn {
			return dataplane.FailoverPassed
		}
		if w.Endings[0].Outcome == dataplane.Untouched {
			continue
		}
		switch s.Chain.Kind {
		case GuardLoopback:
			return dataplane.FromOutsideToLoopback
		case OverLimit:
			return w.overLimit()
		case NoEndpoints:
			return dataplane.NoEndpoints
		case NoLocalEndpoints:
			return dataplane.NoLocalEndpoints
		case Restrict:
			return dataplane.SourceRefused
		case Split, SharedPool, RatedPool, // a frontend of which the pool is gone
			FirstEndpoint, UncountedFirstEndpoint: // or has no slots
			return dataplane.FrontendFound
		case Unallocated:
			return dataplane.Unallocated
		}
		if slices.Contains(addressKinds[:], s.Chain.Kind) {
			if _, found := s.Rule[0].(SetPriority); found { // there is a frontend, of which the pool is gone
				return dataplane.FrontendFound
			}
			return dataplane.UnusedPort
		}
	}
	return dataplane.NotService
}

// overLimit returns whose limit it is that a packet is over.
func (w *Walk) overLimit() dataplane.Cause {
	if slices.ContainsFunc(w.Steps, func(s Step) bool { return s.Matched && s.Rule.looksUp(FullClients) }) {
		return dataplane.ClientOverLimit
	}
	return dataplane.OverLimit
}

// looksUp says whether a rule matches the elements of a set.
func (r Rule) looksUp(set SetID) bool {
	return slices.ContainsFunc(r, func(st Statement) bool {
		l, ok := st.(SetLookup)
		return ok && l.Set == set
	})
}

// Frontend gives the element that led the packet to its pool, and the one that has the pool's class: the same, or that
// of Pools.
func (w *Walk) Frontend() (e, pool Listed, ok bool) {
	for _, s := range w.Steps {
		for _, l := range s.Found {
			if slices.Contains(frontendSets[:], l.Set) {
				e = l
			}
			if l.Set.hasClass() {
				pool, ok = l, ok || !l.InPools()
			}
		}
	}
	return e, pool, ok
}
