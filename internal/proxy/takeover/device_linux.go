package takeover

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// proxyDevice is the dummy device on which IPVS mode has the addresses of all Services, so that they are this host's.
const proxyDevice = "kube-ipvs0"

// device is kube-ipvs0.
type device struct {
	link  netlink.Link
	addrs []netip.Addr
	// sockets counts connections of this host itself that have one of its addresses as their source.
	sockets int
}

// maxListings bounds how often a list is read again because links, addresses or routes changed meanwhile.
const maxListings = 100

// stable reads a list again as long as it changes while it is read: then entries may be missing from it.
func stable[T any](read func() ([]T, error)) (list []T, err error) {
	for range maxListings {
		if list, err = read(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return list, err
		}
	}
	return nil, fmt.Errorf("others changed the list each of %d times it was read; try again: %w", maxListings, err)
}

func listAddrs(link netlink.Link, family int) ([]netlink.Addr, error) {
	return stable(func() ([]netlink.Addr, error) { return netlink.AddrList(link, family) })
}

func listRoutes(family int, filter *netlink.Route, mask uint64) ([]netlink.Route, error) {
	return stable(func() ([]netlink.Route, error) { return netlink.RouteListFiltered(family, filter, mask) })
}

// findDevice returns nil if there is none.
func findDevice() (*device, error) {
	link, err := netlink.LinkByName(proxyDevice)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("link %s: %w", proxyDevice, err)
	}
	if link.Type() != "dummy" {
		return nil, nil
	}
	d := &device{link: link}
	addrs, err := listAddrs(link, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("addresses of %s: %w", proxyDevice, err)
	}
	bound := map[netip.Addr]bool{}
	for _, a := range addrs {
		if addr, ok := netip.AddrFromSlice(a.IP); ok && !addr.IsLinkLocalUnicast() {
			d.addrs = append(d.addrs, addr.Unmap())
			bound[addr.Unmap()] = true
		}
	}
	d.sockets, err = socketsAt(bound)
	return d, err
}

// localAddrs returns the addresses of this host that are on other devices.
func localAddrs() (map[netip.Addr]bool, error) {
	addrs, err := listAddrs(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("addresses of this host: %w", err)
	}
	link, _ := netlink.LinkByName(proxyDevice)
	local := map[netip.Addr]bool{}
	for _, a := range addrs {
		if addr, ok := netip.AddrFromSlice(a.IP); ok && (link == nil || a.LinkIndex != link.Attrs().Index) {
			local[addr.Unmap()] = true
		}
	}
	return local, nil
}

// redirectSources makes new connections of this host to Services use a source address of its own. As long as a
// Service's address is on the device, the kernel chooses that one, and the connection would end with the device.
// socketsAt counts connections that begin there nevertheless: once the device is up, the kernel adds its IPv6 routes
// once more, some time later.
func (d *device) redirectSources() error {
	var errs []error
	// kube-proxy never sets its device up, and the kernel rejects changes of IPv6 routes of a device that is down.
	if d.link.Attrs().RawFlags&unix.IFF_UP == 0 && slices.ContainsFunc(d.addrs, netip.Addr.Is6) {
		if err := netlink.LinkSetUp(d.link); err != nil {
			errs = append(errs, fmt.Errorf("set link %s up: %w", proxyDevice, err))
		}
	}
	for _, f := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		filter := netlink.Route{Table: unix.RT_TABLE_LOCAL, LinkIndex: d.link.Attrs().Index}
		routes, err := listRoutes(f, &filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_OIF)
		if err != nil || len(routes) == 0 {
			errs = append(errs, err)
			continue
		}
		own, err := outboundAddr(f)
		if err != nil || own == nil {
			errs = append(errs, err) // without a default route there are no connections to endpoints elsewhere either
			continue
		}
		for _, r := range routes {
			if r.Type != unix.RTN_LOCAL || r.Dst == nil || r.Src.Equal(own) {
				continue
			}
			if err := setRouteSource(r, own); err != nil {
				errs = append(errs, fmt.Errorf("source of the route to %s: %w", r.Dst, err))
			}
		}
	}
	return errors.Join(errs...)
}

// setRouteSource changes the source address of connections by a route.
func setRouteSource(old netlink.Route, own net.IP) error {
	changed := old
	changed.Src = own
	if old.Dst.IP.To4() == nil {
		// The kernel's own routes have the metric 0, which no other can have: ours has 1024 and ranks behind them until they
		// are gone.
		changed.Protocol = unix.RTPROT_STATIC
	}
	if err := netlink.RouteReplace(&changed); err != nil || changed.Protocol == old.Protocol {
		return err
	}
	if err := netlink.RouteDel(&old); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// outboundAddr returns this host's source address towards the outside, nil if there is no default route.
func outboundAddr(f int) (net.IP, error) {
	routes, err := listRoutes(f, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, err
	}
	for _, r := range routes {
		if r.Dst != nil {
			if ones, _ := r.Dst.Mask.Size(); ones > 0 {
				continue
			}
		}
		if r.Src != nil {
			return r.Src, nil
		}
		index := r.LinkIndex
		if index == 0 && len(r.MultiPath) > 0 {
			index = r.MultiPath[0].LinkIndex
		}
		link, err := netlink.LinkByIndex(index)
		if err != nil {
			continue
		}
		addrs, err := listAddrs(link, f)
		if err != nil {
			return nil, err
		}
		for _, a := range addrs {
			if a.Scope == unix.RT_SCOPE_UNIVERSE && a.Flags&unix.IFA_F_TEMPORARY == 0 {
				return a.IP, nil
			}
		}
	}
	return nil, nil
}

// remove deletes the device with its addresses.
func (d *device) remove() error {
	if err := netlink.LinkDel(d.link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete link %s: %w", proxyDevice, err)
	}
	return nil
}

// States of a socket in /proc/net/tcp without a live connection: net/tcp_states.h. UDP sockets that are not connected
// have the state of closed TCP ones.
const (
	stateTimeWait = "06"
	stateClose    = "07"
	stateListen   = "0A"
)

// socketsAt counts the connections of this host that have one of these source addresses.
func socketsAt(addrs map[netip.Addr]bool) (n int, err error) {
	for _, name := range []string{"tcp", "tcp6", "udp", "udp6"} {
		list, err := os.ReadFile("/proc/thread-self/net/" + name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return n, err
		}
		for line := range strings.Lines(string(list)) {
			// sl local_address rem_address st ...
			fields := strings.Fields(line)
			if len(fields) < 4 || fields[3] == stateTimeWait || fields[3] == stateClose || fields[3] == stateListen {
				continue
			}
			if at, ok := socketAddr(fields[1]); ok && addrs[at.Addr()] {
				n++
			}
		}
	}
	return n, nil
}

// socketAddr parses an address of /proc/net/tcp: words in this machine's byte order in hexadecimal digits, and the
// port.
func socketAddr(s string) (netip.AddrPort, bool) {
	words, port, _ := strings.Cut(s, ":")
	b, err1 := hex.DecodeString(words)
	p, err2 := hex.DecodeString(port)
	if err1 != nil || err2 != nil || len(b)%4 != 0 || len(p) != 2 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	addr, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(addr.Unmap(), binary.BigEndian.Uint16(p)), ok
}
