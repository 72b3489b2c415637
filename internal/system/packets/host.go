package packets

import (
	"net/netip"
	"slices"
)

// Host is what a Walker must know of the host whose rules it follows.
type Host struct {
	// Addrs are the host's addresses. Loopback addresses are the host's anyway.
	Addrs []netip.Addr
	// Bridges are the interfaces that are bridges and show netfilter what they carry (br_netfilter), with the addresses
	// behind them: what is translated from another address to one of these stays on the bridge.
	Bridges map[string][]netip.Prefix
}

// local reports whether an address is the host's.
func (h *Host) local(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(h.Addrs, a) }
