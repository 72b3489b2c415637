package inspect

import (
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
)

// routes looks up this host's routes; nil if the host cannot be asked.
type routes struct {
	handle *netlink.Handle
	// bridgeCallsHooks tells for each family whether bridges pass their packets to netfilter (br_netfilter).
	bridgeCallsHooks ipfamily.Per[bool]
}

// openRoutes opens the network namespace of the calling thread.
func openRoutes() (*routes, error) {
	h, err := netlink.NewHandle()
	if err != nil {
		return nil, fmt.Errorf("this host's routes: %w", err)
	}
	r := &routes{handle: h}
	for i, name := range [...]string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		value, err := os.ReadFile("/proc/sys/net/bridge/" + name)
		r.bridgeCallsHooks[i] = err == nil && string(value) != "0\n"
	}
	return r, nil
}

func (r *routes) close() {
	if r != nil {
		r.handle.Close()
	}
}

// lookup returns the source address and the output interface that this host uses for an address.
func (r *routes) lookup(a netip.Addr) (source netip.Addr, iface string, ok bool) {
	if r == nil {
		return source, "", false
	}
	list, err := r.handle.RouteGet(a.AsSlice())
	if err != nil || len(list) == 0 {
		return source, "", false
	}
	source, ok = netip.AddrFromSlice(list[0].Src)
	if link, err := r.handle.LinkByIndex(list[0].LinkIndex); err == nil {
		iface = link.Attrs().Name
	}
	return source.Unmap(), iface, ok
}

// bridged reports whether a packet leaves by the interface that it came in by, and that is a bridge that passes its
// packets to netfilter.
func (r *routes) bridged(iface string, to netip.Addr) bool {
	if _, by, ok := r.lookup(to); !ok || by != iface || !r.bridgeCallsHooks[ipfamily.Of(to)] {
		return false
	}
	link, err := r.handle.LinkByName(iface)
	return err == nil && link.Type() == "bridge"
}
