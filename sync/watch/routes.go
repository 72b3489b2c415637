package watch

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routeWatch follows the routes of the main table, as far as they say that somebody has the addresses: those of type
// unicast, without the default routes.
type routeWatch struct {
	// stale says that they must be listed, which may not be before due.
	stale bool
	due   time.Time
	// to are the destinations, sorted and unique; none if there are tooMany.
	to      []netip.Prefix
	tooMany bool
}

// list lists the routes. If they change meanwhile, some may be missing, and the list stays stale: where they never
// rest, that is what there is.
func (w *routeWatch) list(handle *netlink.Handle) error {
	began := time.Now()
	var to []netip.Prefix
	tooMany := false
	main := &netlink.Route{Table: unix.RT_TABLE_MAIN, Type: unix.RTN_UNICAST}
	err := handle.RouteListFilteredIter(netlink.FAMILY_ALL, main, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
		p, ok := prefixFrom(r.Dst)
		if !ok || r.Type != unix.RTN_UNICAST || p.Bits() == 0 || p.Addr().IsMulticast() || p.Addr().IsLinkLocalUnicast() {
			return true
		}
		to = append(to, p)
		tooMany = len(to) > maxRoutes
		return !tooMany
	})
	if w.stale = errors.Is(err, netlink.ErrDumpInterrupted); err != nil && !w.stale {
		return fmt.Errorf("routes: %w", err)
	}
	if tooMany {
		to = nil
	}
	slices.SortFunc(to, netip.Prefix.Compare)
	w.to, w.tooMany = slices.Compact(to), tooMany
	w.due = time.Now().Add(max(routePause, routeShare*time.Since(began)))
	return nil
}

// prefixFrom gives the network of an address with its mask.
func prefixFrom(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if a = a.Unmap(); !ok || bits != a.BitLen() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, ones).Masked(), true
}
