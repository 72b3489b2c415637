package dataplane

import "net/netip"

// inRanges reports whether an address is one of Services: in a ServiceCIDR, and in no part of it that others share.
func inRanges(a netip.Addr, cidrs, shared []netip.Prefix) bool {
	return contain(cidrs, a) && !contain(shared, a)
}

// Nowhere returns an endpoint of a Service to which connections are sent although its address is one of Services.
// Nobody answers there, since a connection is translated once. It is not ok if there is none.
func (s *State) Nowhere(svc *Service) (a netip.AddrPort, ok bool) {
	if len(s.ServiceCIDRs) == 0 {
		return a, false
	}
	for sp := range svc.EachPort() {
		for _, pool := range [...]*Pool{sp.Cluster, sp.Local} {
			for i := range pool.Endpoints {
				if inRanges(pool.Endpoints[i].Addr(), s.ServiceCIDRs, s.SharedRanges) {
					return pool.Endpoints[i].AddrPort, true
				}
			}
		}
	}
	return a, false
}
