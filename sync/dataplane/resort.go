package dataplane

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// MaxResort is how many endpoints of a port a node probes as its last resort.
const MaxResort = 32

// resorts says whether a Service is to use its last resort: it asks for that, and no endpoint of it is ready, or serves
// while it terminates, on any port, of any weight, anywhere in the cluster.
func (b *builder) resorts(s *snapshot.Snapshot, svc *snapshot.Service) bool {
	asks := svc.LastResort == snapshot.LastResortOn || svc.LastResort == snapshot.LastResortDefault && b.host.lastResort
	if !asks || svc.Backends != nil {
		return false
	}
	for _, sl := range s.Slices[svc.Name] {
		for i := range sl.Endpoints {
			if ep := &sl.Endpoints[i]; ep.Ready || ep.Serving && ep.Terminating {
				return false
			}
		}
	}
	return true
}

// mayResort says whether a candidate is to be probed as a last resort. One that terminates will not come back.
func (b *builder) mayResort(c *candidate) bool {
	return b.resort && !c.Ready && !c.Terminating && !c.drains() && !c.ahead
}

// isResort says whether it accepted a probe. UDP has none: what TCP at the same address and port was answered counts.
func (b *builder) isResort(c *candidate) bool {
	if !b.mayResort(c) {
		return false
	}
	u := b.unhealthy(c.addr)
	return u != nil && u.Cause == snapshot.Resort
}

// toProbe returns the endpoints of the port whose endpoints were collected that are to be probed as its last resort. If
// there are too many, each node takes others.
func (b *builder) toProbe(name PortName) (list []netip.AddrPort) {
	if !b.resort || name.Protocol != snapshot.TCP || b.localReady() {
		return nil
	}
	for i := range b.candidates {
		if c := &b.candidates[i]; b.mayResort(c) {
			list = append(list, c.addr)
		}
	}
	if n := len(list); n > MaxResort {
		from := int(nodeOffset(b.host.nodeName, name) * float64(n))
		list = slices.Concat(list[from:], list[:from])[:MaxResort]
		slices.SortFunc(list, netip.AddrPort.Compare)
	}
	return list
}

// keepResort notes which endpoints of a new pool are the last resort.
func (b *builder) keepResort(p *Pool) {
	for i := range b.candidates {
		if c := &b.candidates[i]; c.resort && HasEndpoint(p.Endpoints, c.addr) {
			p.Kept = append(p.Kept, *b.unhealthy(c.addr))
		}
	}
}
