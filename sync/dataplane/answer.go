package dataplane

import (
	"net/netip"
	"slices"
)

// FrontendAnswer is what happens to the first packet of a connection at a frontend.
type FrontendAnswer struct {
	Cause Cause
	// Route is the row of policy that the packet takes; nil if its sender is refused.
	Route *Route
	// Source is the source range that lets the sender in, if the frontend has any.
	Source netip.Prefix
}

// Answer returns what happens to the first packet of a connection at one of the port's frontends.
func (sp *ServicePort) Answer(f *Frontend, source netip.Addr, o Origin) (a FrontendAnswer) {
	if i := slices.IndexFunc(f.Sources, func(p netip.Prefix) bool { return p.Contains(source) }); i >= 0 {
		a.Source = f.Sources[i]
	} else if f.Sources != nil {
		return FrontendAnswer{Cause: SourceRefused}
	}
	a.Route = &f.Routes[f.row(o)]
	switch pool := a.Route.Pool; {
	case pool == sp.Scheduled(f):
		a.Cause = FrontendScheduled
	case len(pool.Endpoints) > 0:
		a.Cause = FrontendFound
	case pool.Empty == Drop:
		a.Cause = NoLocalEndpoints
	case pool.Empty == Pass:
		a.Cause = FailoverPassed
	default:
		a.Cause = NoEndpoints
	}
	return a
}

// SamePackets reports whether two Services, of which either may be nil, do the same with every packet: they differ at
// most in what decides about counters, and about addresses that several Services claim.
func (s *Service) SamePackets(o *Service) bool {
	if s == nil || o == nil {
		return s == o
	}
	as := *s
	as.Age, as.Counters = o.Age, o.Counters
	return as.equal(o)
}
