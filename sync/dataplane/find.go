package dataplane

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// EachPort ranges over a Service's ports. The Service may be nil.
func (s *Service) EachPort() iter.Seq[*ServicePort] {
	return func(yield func(*ServicePort) bool) {
		for i := 0; s != nil && i < len(s.Ports) && yield(s.Ports[i]); i++ {
		}
	}
}

// EachFrontend ranges over a Service's frontends, each with its port. The Service may be nil. It is short enough for
// the compiler to make a loop of it: each change passes some.
func (s *Service) EachFrontend() iter.Seq2[*ServicePort, *Frontend] {
	return func(yield func(*ServicePort, *Frontend) bool) {
		for p := 0; s != nil && p < len(s.Ports); p++ {
			for i := range s.Ports[p].Frontends {
				if !yield(s.Ports[p], &s.Ports[p].Frontends[i]) {
					return
				}
			}
		}
	}
}

// Family is that of the port's frontends.
func (sp *ServicePort) Family() ipfamily.Family { return ipfamily.Of(sp.Frontends[0].Key.Addr) }

// Frontend returns the port's frontend at a key; nil if it has none.
func (sp *ServicePort) Frontend(k Key) *Frontend {
	i, found := slices.BinarySearchFunc(sp.Frontends, k, func(f Frontend, k Key) int { return f.Key.Compare(k) })
	if !found {
		return nil
	}
	return &sp.Frontends[i]
}

// Ejects reports whether an endpoint is among those that were ejected.
func (p *Pool) Ejects(a netip.AddrPort) bool { return snapshot.FindUnhealthy(p.Ejected, a) != nil }

// FindEndpoint returns where an endpoint is in a list as those of pools, sorted.
func FindEndpoint(list []Endpoint, a netip.AddrPort) (int, bool) {
	return slices.BinarySearchFunc(list, a, func(e Endpoint, a netip.AddrPort) int { return e.Compare(a) })
}

// HasEndpoint reports whether such a list has an endpoint.
func HasEndpoint(list []Endpoint, a netip.AddrPort) bool {
	_, found := FindEndpoint(list, a)
	return found
}
