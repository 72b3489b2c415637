package snapshot

import (
	"net/netip"
	"slices"
)

// HostNetworks are what this host reaches other than by its default route. The zero value says that nothing is known.
type HostNetworks struct {
	// Own are the networks of the addresses on its interfaces, without those of a single address, and Routes the
	// destinations of the unicast routes in its main table. Both are masked, sorted and unique.
	Own, Routes []netip.Prefix
	// TooMany says that there are more routes than a Snapshot holds; it has none of them.
	TooMany bool
}

// Overlapping returns those that overlap some ranges. A route to a whole range, or to more, is not among them: it says
// where addresses without any better route go, and CNI plugins add such a route for the Services themselves.
func (n HostNetworks) Overlapping(ranges []netip.Prefix) HostNetworks {
	out := HostNetworks{TooMany: n.TooMany}
	for _, p := range n.Own {
		if slices.ContainsFunc(ranges, p.Overlaps) {
			out.Own = append(out.Own, p)
		}
	}
	for _, p := range n.Routes {
		if slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Bits() < p.Bits() && r.Contains(p.Addr()) }) {
			out.Routes = append(out.Routes, p)
		}
	}
	return out
}

// Equal reports whether two HostNetworks say the same.
func (n HostNetworks) Equal(o HostNetworks) bool {
	return n.TooMany == o.TooMany && slices.Equal(n.Own, o.Own) && slices.Equal(n.Routes, o.Routes)
}
