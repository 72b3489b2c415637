package packets

import (
	"net/netip"
	"slices"
)

// Host is what a Walker must know of the host whose rules it follows.
type Host struct {
	// Addrs are the host's addresses. Loopback addresses are the host's anyway.
	Addrs []netip.Addr
	// Bridged reports whether an interface is a bridge that shows netfilter what it carries (br_netfilter), with an
	// address behind it: what came in there and is translated to that address stays on the bridge. Nil: none is.
	Bridged func(iface string, to netip.Addr) bool
}

// local reports whether an address is the host's.
func (h *Host) local(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(h.Addrs, a) }
