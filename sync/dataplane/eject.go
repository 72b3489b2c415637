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

// eject removes unhealthy endpoints from a pool that was just built: at most some of it. Those that have been unhealthy
// the longest go first, by whole seconds, as a backend tells them. A shared pool has no endpoints and stays as it is.
func (b *builder) eject(p *Pool, most int) {
	if b.health == nil || len(p.Endpoints) == 0 {
		return
	}
	for _, e := range p.Endpoints {
		switch u := b.unhealthy(e.AddrPort); {
		case u == nil || u.Cause == snapshot.Resort: // which does not matter where others are ready
		case u.Doubtful:
			p.Kept = append(p.Kept, *u)
		default:
			p.Ejected = append(p.Ejected, *u)
		}
	}
	byEndpoint := func(x, y snapshot.Unhealthy) int { return x.Endpoint.Compare(y.Endpoint) }
	if len(p.Ejected) > most {
		slices.SortFunc(p.Ejected, func(x, y snapshot.Unhealthy) int {
			return cmp.Or(cmp.Compare(x.Since.Unix(), y.Since.Unix()), x.Endpoint.Compare(y.Endpoint))
		})
		p.Kept = append(p.Kept, p.Ejected[most:]...)
		p.Ejected = append([]snapshot.Unhealthy(nil), p.Ejected[:most]...)
		slices.SortFunc(p.Ejected, byEndpoint)
	}
	slices.SortFunc(p.Kept, byEndpoint)
	if len(p.Ejected) > 0 {
		p.Endpoints = slices.DeleteFunc(p.Endpoints, func(e Endpoint) bool { return p.Ejects(e.AddrPort) })
	}
}

// retryRefused reports whether a refused connection to a pool may be tried again at another endpoint. With session
// affinity or a hash the client would come back to the same one, so none may be unhealthy. Ejected endpoints count: one
// of two may just have got the packet that it refuses.
func (b *builder) retryRefused(p *Pool, bound bool) bool {
	if len(p.Endpoints)+len(p.Ejected) < 2 {
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
