package snapshot

import (
	"net/netip"
	"slices"
	"time"
)

// Starting are the endpoints of a Service that became ready a short time ago and start slowly. It is immutable, and
// replaced as a whole.
type Starting struct {
	// Endpoints are sorted by Endpoint and unique. The Service may no longer have some of them.
	Endpoints []StartingEndpoint
}

// StartingEndpoint is an endpoint that does not get all of its share of new connections yet.
type StartingEndpoint struct {
	// Endpoint with port 0 stands for all ports of the address.
	Endpoint netip.AddrPort `json:"endpoint"`
	// Tenths of its share are what it gets: 1 to 9.
	Tenths uint8 `json:"tenths"`
	// Full is when it gets all of its share.
	Full time.Time `json:"full"`
}

// FullTenths are the Tenths of an endpoint that does not start slowly.
const FullTenths = 10

// Find returns how an endpoint starts; nil if it gets all of its share. The Starting may be nil.
func (s *Starting) Find(a netip.AddrPort) (found *StartingEndpoint) {
	if s == nil {
		return nil
	}
	for _, key := range [...]netip.AddrPort{a, netip.AddrPortFrom(a.Addr(), 0)} {
		i, ok := slices.BinarySearchFunc(s.Endpoints, key, func(e StartingEndpoint, a netip.AddrPort) int {
			return e.Endpoint.Compare(a)
		})
		if ok && (found == nil || s.Endpoints[i].Tenths < found.Tenths) {
			found = &s.Endpoints[i]
		}
	}
	return found
}
