package lab

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// End is one end of a link: the name it has inside a host, at most 15 bytes.
type End struct {
	Host *Host
	Link string
}

// LinkOptions say how a link differs from a plain Ethernet.
type LinkOptions struct {
	// MTU in bytes; 0 means 1500.
	MTU int
}

// Link joins two hosts by a veth pair, both ends up. The MAC addresses follow from the names, so that two runs look
// alike.
func Link(a, b End, o LinkOptions) error {
	veth := &netlink.Veth{
		LinkAttrs:        netlink.LinkAttrs{Name: a.Link, MTU: o.MTU, HardwareAddr: mac(a)},
		PeerName:         b.Link,
		PeerHardwareAddr: mac(b),
		PeerMTU:          uint32(o.MTU),
		PeerNamespace:    netlink.NsFd(b.Host.ns.Fd()),
	}
	if err := a.Host.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("lab: link %s %s to %s %s: %w", a.Host.Name, a.Link, b.Host.Name, b.Link, err)
	}
	if err := a.Host.up(a.Link); err != nil {
		return err
	}
	return b.Host.up(b.Link)
}

// mac gives a locally administered address that depends on the names alone.
func mac(e End) net.HardwareAddr {
	sum := fnv.New64a()
	fmt.Fprintf(sum, "%s %s", e.Host.Name, e.Link)
	m := net.HardwareAddr(sum.Sum(nil)[:6])
	m[0] = m[0]&^1 | 2
	return m
}

// AddBridge makes a bridge without ports, up.
func (h *Host) AddBridge(name string) error {
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name, HardwareAddr: mac(End{h, name})}}
	if err := h.nl.LinkAdd(bridge); err != nil {
		return fmt.Errorf("lab: %s: add bridge %s: %w", h.Name, name, err)
	}
	return h.up(name)
}

// AddPort makes a link a port of a bridge. Like Kubernetes' bridges, it gives a frame back to the port it came from if
// that is where it belongs: with net/bridge/bridge-nf-call-iptables, a packet may be translated to the address of its
// own sender.
func (h *Host) AddPort(bridge, link string) error {
	master, err := h.link(bridge)
	if err != nil {
		return err
	}
	port, err := h.link(link)
	if err != nil {
		return err
	}
	if err := h.nl.LinkSetMaster(port, master); err != nil {
		return fmt.Errorf("lab: %s: add port %s to %s: %w", h.Name, link, bridge, err)
	}
	if err := h.nl.LinkSetHairpin(port, true); err != nil {
		return fmt.Errorf("lab: %s: set hairpin mode of %s: %w", h.Name, link, err)
	}
	return nil
}

// AddAddr gives a link an address with the length of its range, usable when AddAddr returns. The first address of a
// family on a link other than the loopback becomes the host's main one. A link may get any number.
func (h *Host) AddAddr(link string, p netip.Prefix) error {
	if err := h.addAddr(link, p); err != nil {
		return err
	}
	return h.WaitReady()
}

func (h *Host) addAddr(link string, p netip.Prefix) error {
	if p.Addr().Is6() && !hasIPv6() {
		return nil
	}
	l, err := h.link(link)
	if err != nil {
		return err
	}
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	if err := h.nl.AddrAdd(l, a); err != nil {
		return fmt.Errorf("lab: %s: add address %s to %s: %w", h.Name, p, link, err)
	}
	switch {
	case link == "lo":
	case p.Addr().Is4() && !h.IP4.IsValid():
		h.IP4 = p.Addr()
	case p.Addr().Is6() && !h.IP6.IsValid():
		h.IP6 = p.Addr()
	}
	return nil
}

// DelAddr takes an address from a link; one that is not there is an error.
func (h *Host) DelAddr(link string, p netip.Prefix) error {
	l, err := h.link(link)
	if err != nil {
		return err
	}
	if err := h.nl.AddrDel(l, &netlink.Addr{IPNet: ipNet(p)}); err != nil {
		return fmt.Errorf("lab: %s: delete address %s from %s: %w", h.Name, p, link, err)
	}
	return nil
}

// Route is a line of a routing table.
type Route struct {
	// To is where packets go to; a zero length means everywhere.
	To netip.Prefix
	// Via is the next hop, taken for a neighbour on Link even if no address of Link says so; invalid means To is on the
	// link.
	Via netip.Addr
	// Link is the way out.
	Link string
	// Table is a routing table; 0 means main.
	Table int
}

// AddRoute adds a route.
func (h *Host) AddRoute(r Route) error { return h.changeRoute("add", h.nl.RouteAdd, r) }

// DelRoute removes a route that AddRoute added.
func (h *Host) DelRoute(r Route) error { return h.changeRoute("delete", h.nl.RouteDel, r) }

func (h *Host) changeRoute(verb string, change func(*netlink.Route) error, r Route) error {
	if r.To.Addr().Is6() && !hasIPv6() {
		return nil
	}
	l, err := h.link(r.Link)
	if err != nil {
		return err
	}
	route := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(r.To), Table: r.Table}
	if r.Via.IsValid() {
		route.Gw = r.Via.AsSlice()
		route.Flags = int(netlink.FLAG_ONLINK)
	} else {
		route.Scope = netlink.SCOPE_LINK
	}
	if err := change(route); err != nil {
		return fmt.Errorf("lab: %s: %s route %+v: %w", h.Name, verb, r, err)
	}
	return nil
}

// Forward makes the host a router in both families.
func (h *Host) Forward() error {
	if err := h.Sysctl("net/ipv4/ip_forward", "1"); err != nil || !hasIPv6() {
		return err
	}
	return h.Sysctl("net/ipv6/conf/all/forwarding", "1")
}

// WaitReady waits until the host's links and addresses are usable. The kernel finishes them asynchronously: it drops
// packets on a link that has just come up, and does not know yet that an IPv6 address is its own.
func (h *Host) WaitReady() error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		waiting, err := h.unsettled()
		if errors.Is(err, netlink.ErrDumpInterrupted) {
			waiting, err = "what changes while it is listed", nil
		}
		if err != nil {
			return fmt.Errorf("lab: %s: look at links: %w", h.Name, err)
		}
		if waiting == "" {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("lab: %s: %s is not ready", h.Name, waiting)
		}
	}
}

// unsettled names something that is not ready, or nothing. Links that are down or without a peer do not count.
func (h *Host) unsettled() (string, error) {
	links, err := h.nl.LinkList()
	if err != nil {
		return "", err
	}
	running := make(map[int]bool)
	for _, l := range links {
		a := l.Attrs()
		switch {
		case a.RawFlags&unix.IFF_LOOPBACK != 0:
			running[a.Index] = true
		case a.RawFlags&unix.IFF_LOWER_UP != 0:
			running[a.Index] = true
			if a.OperState != netlink.OperUp {
				return "link " + a.Name, nil
			}
		}
	}
	if !hasIPv6() {
		return "", nil
	}
	addrs, err := h.nl.AddrList(nil, netlink.FAMILY_V6)
	if err != nil {
		return "", err
	}
	local, err := h.nl.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Table: unix.RT_TABLE_LOCAL},
		netlink.RT_FILTER_TABLE)
	if err != nil {
		return "", err
	}
	for _, a := range addrs {
		own := func(r netlink.Route) bool { return r.LinkIndex == a.LinkIndex && r.Dst != nil && r.Dst.IP.Equal(a.IP) }
		if running[a.LinkIndex] && (a.Flags&unix.IFA_F_TENTATIVE != 0 || !slices.ContainsFunc(local, own)) {
			return "address " + a.IP.String(), nil
		}
	}
	return "", nil
}

func (h *Host) up(link string) error {
	l, err := h.link(link)
	if err != nil {
		return err
	}
	if err := h.nl.LinkSetUp(l); err != nil {
		return fmt.Errorf("lab: %s: set link %s up: %w", h.Name, link, err)
	}
	return nil
}

func (h *Host) link(name string) (netlink.Link, error) {
	l, err := h.nl.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("lab: %s: link %s: %w", h.Name, name, err)
	}
	return l, nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
