package blackbox

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// change is one of a route, an address, a neighbour or a link.
type change struct {
	at   int64
	kind changeKind
	// gone says that it was removed, failed, or went down.
	gone bool
	// prefix is the destination of a route, or the one address of the others.
	prefix netip.Prefix
	link   string
}

type changeKind uint8

const (
	routeChange changeKind = iota
	addressChange
	neighbourChange
	linkChange
)

func (c *change) String() string {
	what := [...]string{"route to", "address", "neighbour", "link"}[c.kind]
	then := "is there"
	if c.gone {
		then = [...]string{"is gone", "is gone", "does not answer", "is down or gone"}[c.kind]
	}
	if c.kind == linkChange {
		return fmt.Sprintf("link %s %s", c.link, then)
	}
	object := c.prefix.String()
	if c.prefix.IsSingleIP() {
		object = c.prefix.Addr().String()
	}
	return fmt.Sprintf("%s %s on %s %s", what, object, c.link, then)
}

// about says whether a change concerns the way to an address.
func (c *change) about(a netip.Addr) bool {
	return c.kind != linkChange && c.prefix.IsValid() && c.prefix.Contains(a)
}

// route is what a routing table holds for one destination.
type route struct {
	prefix netip.Prefix
	link   int32
}

// network is what a namespace's links, addresses and routes are just now.
type network struct {
	links     map[int32]string
	addresses map[netip.Addr]string
	routes    map[route]struct{}
}

// maxRoutes bounds how many routes are known of a namespace; what is beyond is not missed when its link goes.
const maxRoutes = 1 << 14

// Attributes of linux/rtnetlink.h and its like, by their message.
const (
	ifName     = unix.IFLA_IFNAME
	ifaAddress = unix.IFA_ADDRESS
	ifaLocal   = unix.IFA_LOCAL
	rtaDst     = unix.RTA_DST
	rtaOif     = unix.RTA_OIF
	ndaDst     = unix.NDA_DST

	neighbourFailed = unix.NUD_FAILED
)

var routeGroups = []int{unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
	unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV6_ROUTE}

const routeBuffer = 4 << 20

// listenRoutes subscribes in the network namespace of the calling thread, and reads what is there.
func listenRoutes() (*netlink.Listener, *network, error) {
	l, err := netlink.Listen(unix.NETLINK_ROUTE, 0, routeBuffer, nil)
	if err != nil {
		return nil, nil, err
	}
	for _, g := range routeGroups {
		err = errors.Join(err, l.Join(g, true))
	}
	n := &network{links: map[int32]string{}, addresses: map[netip.Addr]string{}, routes: map[route]struct{}{}}
	if err = errors.Join(err, n.list()); err != nil {
		return nil, nil, errors.Join(err, l.Close())
	}
	return l, n, nil
}

// list reads links, addresses and routes.
func (n *network) list() error {
	c, err := netlink.Dial(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return err
	}
	for _, list := range []struct {
		get, made uint16
		header    int
	}{
		{unix.RTM_GETLINK, unix.RTM_NEWLINK, unix.SizeofIfInfomsg},
		{unix.RTM_GETADDR, unix.RTM_NEWADDR, unix.SizeofIfAddrmsg},
		{unix.RTM_GETROUTE, unix.RTM_NEWROUTE, unix.SizeofRtMsg},
	} {
		var w netlink.Buffer
		w.End(w.Message(list.get, unix.NLM_F_DUMP, make([]byte, list.header)...))
		err = errors.Join(err, c.Dump(w.Bytes(), nil, func(body []byte) {
			n.apply(netlink.Message{Type: list.made, Body: body}, func(*change) {})
		}))
	}
	return errors.Join(err, c.Close())
}

// apply takes a message over, and calls do with what it changes.
func (n *network) apply(m netlink.Message, do func(*change)) {
	switch m.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		n.applyLink(m, do)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		n.applyAddress(m, do)
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		n.applyRoute(m, do)
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		n.applyNeighbour(m, do)
	}
}

// applyLink removes the routes of a link that goes, of which the kernel tells nothing for IPv4.
func (n *network) applyLink(m netlink.Message, do func(*change)) {
	if len(m.Body) < unix.SizeofIfInfomsg || m.Body[0] == unix.AF_BRIDGE {
		return
	}
	index := int32(binary.NativeEndian.Uint32(m.Body[4:]))
	up := binary.NativeEndian.Uint32(m.Body[8:])&unix.IFF_UP != 0 && m.Type == unix.RTM_NEWLINK
	name := netlink.Find(m.Body[unix.SizeofIfInfomsg:], ifName).Text()
	_, known := n.links[index]
	n.links[index] = name
	if !up {
		for r := range n.routes {
			if r.link == index {
				delete(n.routes, r)
				do(&change{kind: routeChange, gone: true, prefix: r.prefix, link: name})
			}
		}
	}
	if !up || !known {
		do(&change{kind: linkChange, gone: !up, link: name})
	}
}

func (n *network) applyAddress(m netlink.Message, do func(*change)) {
	if len(m.Body) < unix.SizeofIfAddrmsg {
		return
	}
	link := n.links[int32(binary.NativeEndian.Uint32(m.Body[4:]))]
	attributes := netlink.Decode(m.Body[unix.SizeofIfAddrmsg:])
	value := attributes[ifaLocal]
	if value == nil {
		value = attributes[ifaAddress]
	}
	a := addrOf(value)
	if !a.IsValid() {
		return
	}
	gone := m.Type == unix.RTM_DELADDR
	if n.addresses[a] = link; gone {
		delete(n.addresses, a)
	}
	do(&change{kind: addressChange, gone: gone, prefix: netip.PrefixFrom(a, a.BitLen()), link: link})
}

func (n *network) applyRoute(m netlink.Message, do func(*change)) {
	if len(m.Body) < unix.SizeofRtMsg {
		return
	}
	attributes := netlink.Decode(m.Body[unix.SizeofRtMsg:])
	a := addrOf(attributes[rtaDst])
	if !a.IsValid() {
		if a = netip.IPv4Unspecified(); m.Body[0] == unix.AF_INET6 {
			a = netip.IPv6Unspecified()
		}
	}
	r := route{netip.PrefixFrom(a, int(m.Body[1])), int32(netlink.Value(attributes[rtaOif]).Native32())}
	gone := m.Type == unix.RTM_DELROUTE
	if gone {
		delete(n.routes, r)
	} else if len(n.routes) < maxRoutes {
		n.routes[r] = struct{}{}
	}
	do(&change{kind: routeChange, gone: gone, prefix: r.prefix, link: n.links[r.link]})
}

func (n *network) applyNeighbour(m netlink.Message, do func(*change)) {
	if len(m.Body) < unix.SizeofNdMsg {
		return
	}
	a := addrOf(netlink.Find(m.Body[unix.SizeofNdMsg:], ndaDst))
	if !a.IsValid() { // of a bridge
		return
	}
	failed := binary.NativeEndian.Uint16(m.Body[8:])&neighbourFailed != 0
	if m.Type == unix.RTM_DELNEIGH && !failed {
		return // forgotten, since nobody used it
	}
	do(&change{kind: neighbourChange, gone: failed, prefix: netip.PrefixFrom(a, a.BitLen()),
		link: n.links[int32(binary.NativeEndian.Uint32(m.Body[4:]))]})
}
