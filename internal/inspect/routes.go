package inspect

import (
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
)

// routes answers questions about this host's routing; nil stands for a host that cannot be asked.
type routes struct {
	handle *netlink.Handle
	// called says of each family, IPv4 first, whether bridges show netfilter the packets they carry (br_netfilter).
	called ipfamily.Per[bool]
}

// openRoutes asks the network namespace of the calling thread.
func openRoutes() (*routes, error) {
	h, err := netlink.NewHandle()
	if err != nil {
		return nil, fmt.Errorf("this host's routes: %w", err)
	}
	r := &routes{handle: h}
	for i, name := range [...]string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		value, err := os.ReadFile("/proc/sys/net/bridge/" + name)
		r.called[i] = err == nil && string(value) != "0\n"
	}
	return r, nil
}

func (r *routes) close() {
	if r != nil {
		r.handle.Close()
	}
}

// to gives the source address that a packet of this host's own to an address would have, and the interface it would
// leave by.
func (r *routes) to(a netip.Addr) (source netip.Addr, iface string, ok bool) {
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

// bridged says whether a packet that came in by an interface and goes to an address stays on that interface, a bridge
// that shows it to netfilter.
func (r *routes) bridged(iface string, to netip.Addr) bool {
	if _, by, ok := r.to(to); !ok || by != iface || !r.called[ipfamily.Of(to)] {
		return false
	}
	link, err := r.handle.LinkByName(iface)
	return err == nil && link.Type() == "bridge"
}
