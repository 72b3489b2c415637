package dataplane

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// secondChanceOf returns what happens to endpoints of a port that do not answer or refuse.
func (h *host) secondChanceOf(svc *snapshot.Service, p *snapshot.Port) snapshot.SecondChance {
	if p.Protocol != snapshot.TCP || h.secondChance == snapshot.SecondChanceOff {
		return snapshot.SecondChanceOff
	}
	return cmp.Or(svc.SecondChance, h.secondChance)
}

// unhealthy returns what this node found out about an endpoint of the Service; nil if nothing.
func (b *builder) unhealthy(a netip.AddrPort) *snapshot.Unhealthy { return b.health.Find(a) }

// eject removes unhealthy endpoints from a pool that was just built: at most half of it, and thus never the last one.
// Those that have been unhealthy the longest go first. A shared pool has no endpoints and stays as it is.
func (b *builder) eject(p *Pool) {
	most := len(p.Endpoints) / 2
	if b.health == nil || most == 0 {
		return
	}
	for _, e := range p.Endpoints {
		if u := b.unhealthy(e.AddrPort); u != nil {
			p.Ejected = append(p.Ejected, *u)
		}
	}
	if len(p.Ejected) > most {
		slices.SortFunc(p.Ejected, func(x, y snapshot.Unhealthy) int {
			return cmp.Or(x.Since.Compare(y.Since), x.Endpoint.Compare(y.Endpoint))
		})
		p.Ejected = slices.Clip(p.Ejected[:most])
		slices.SortFunc(p.Ejected, func(x, y snapshot.Unhealthy) int { return x.Endpoint.Compare(y.Endpoint) })
	}
	if len(p.Ejected) > 0 {
		p.Endpoints = slices.DeleteFunc(p.Endpoints, func(e Endpoint) bool { return p.ejected(e.AddrPort) })
	}
}

// ejected reports whether an endpoint is among those that were ejected.
func (p *Pool) ejected(a netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(p.Ejected, a, func(u snapshot.Unhealthy, a netip.AddrPort) int {
		return u.Endpoint.Compare(a)
	})
	return found
}

// retryRefused reports whether a refused connection to a pool may be tried again at another endpoint. With session
// affinity or a hash the client would come back to the same one, so none may be unhealthy.
func (b *builder) retryRefused(p *Pool, bound bool) bool {
	if len(p.Endpoints) < 2 {
		return false
	}
	if bound {
		return !slices.ContainsFunc(p.Endpoints, func(e Endpoint) bool { return b.unhealthy(e.AddrPort) != nil })
	}
	return slices.ContainsFunc(p.Endpoints, func(e Endpoint) bool {
		u := b.unhealthy(e.AddrPort)
		return u == nil || u.Cause != snapshot.Refused
	})
}
