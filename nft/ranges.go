package nft

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// rangeCost is how many other elements a source range, or a refused share, counts for in the limit of a transaction.
// The kernel's sets with ranges take time for each element that is added or deleted, which grows with all ranges in the
// set: a millisecond and more with ten thousand, ten on a busy host. A transaction as such costs little beside that.
const rangeCost = 1024

// rangesChange is what a change of a Service's source ranges, and of refused shares, counts for in the limit of a
// transaction.
func (s *service) rangesChange(want *dataplane.Service) (n int) {
	var now ipfamily.Per[[]netip.Prefix]
	if want != nil {
		for _, sp := range want.Ports {
			for i := range sp.Frontends {
				if r := sp.Frontends[i].Sources; r != nil {
					now[ipfamily.Of(sp.Frontends[i].Key.Addr)] = r
				}
			}
		}
	}
	for i := range s.sources {
		if old := s.sources[i].ranges; !slices.Equal(old, now[i]) {
			n += rangeCost * (len(old) + len(now[i]))
		}
	}
	return n + 2*rangeCost*s.changedShares(want)
}

// changedShares counts the pools of which a Service is to refuse another share.
func (s *service) changedShares(want *dataplane.Service) (n int) {
	held := map[poolID]uint16{}
	s.eachShare(func(p *port, i poolIndex) { held[poolID{port: p.id, pool: i}] = p.pools[i].refused })
	if want != nil {
		for _, sp := range want.Ports {
			family := ipfamily.Of(sp.Frontends[0].Key.Addr)
			for i, pl := range [...]*dataplane.Pool{clusterPool: sp.Cluster, localPool: sp.Local} {
				id := poolID{port: portID{sp.Name, family}, pool: poolIndex(i)}
				if pl.Refused > 0 && leadsTo(sp, pl) {
					if held[id] != pl.Refused {
						n++
					}
					delete(held, id)
				}
			}
		}
	}
	return n + len(held)
}

// leadsTo reports whether a frontend of a port leads to a pool.
func leadsTo(sp *dataplane.ServicePort, pl *dataplane.Pool) bool {
	return slices.ContainsFunc(sp.Frontends, func(f dataplane.Frontend) bool {
		return slices.ContainsFunc(f.Routes, func(r dataplane.Route) bool { return r.Pool == pl })
	})
}

// ranges returns the next version of source ranges, as far as there is room. Both lists are sorted and hold no range
// inside another, and so does the result: a range is replaced together with those inside it or around it.
func (t *transition) ranges(old, want []netip.Prefix) (next []netip.Prefix) {
	if slices.Equal(old, want) {
		return want
	}
	for len(old) > 0 || len(want) > 0 {
		o, w := overlapping(old, want)
		switch {
		case slices.Equal(old[:o], want[:w]), !t.reserve(rangeCost * (o + w)):
			next = append(next, old[:o]...)
		default:
			next = append(next, want[:w]...)
		}
		old, want = old[o:], want[w:]
	}
	return next
}

// overlapping returns how many of the first ranges of two sorted lists overlap with the very first. At most one list
// may be empty.
func overlapping(a, b []netip.Prefix) (fromA, fromB int) {
	switch {
	case len(a) == 0:
		return 0, 1
	case len(b) == 0:
		return 1, 0
	case a[0] == b[0]:
		return 1, 1
	}
	inside := func(list []netip.Prefix, r netip.Prefix) (n int) {
		for n < len(list) && r.Overlaps(list[n]) {
			n++
		}
		return n
	}
	if a[0].Compare(b[0]) < 0 { // a range comes right before those it contains
		return 1, inside(b, a[0])
	}
	return inside(a, b[0]), 1
}
