package ipvsplugin

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// Packets to an address that the host does not have are forwarded and never get to IPVS. So each address has a route of type
// local, which makes the kernel take them in without the address being on any device.
const (
	// routeProtocol marks routes as ours.
	routeProtocol = 86
	// routeMetric lets the host's own addresses go first, whose routes have the metric 0.
	routeMetric = 22084
	loopback    = 1 // the index of lo, in every network namespace
)

// Attributes of rtnetlink.
const (
	rtaDst       = 1
	rtaOIF       = 4
	rtaGateway   = 5
	rtaPriority  = 6
	rtaPrefSrc   = 7
	rtaMultipath = 9
	rtaVia       = 18
	ifaAddress   = 1
	ifaLocal     = 2

	rtmLen  = 12 // of struct rtmsg
	rtnhLen = 8  // of struct rtnexthop
	ifaLen  = 8  // of struct ifaddrmsg
)

// rtnetlink reads and writes routes. It is for one goroutine at a time.
type rtnetlink struct{ *socket }

// route is a local route of ours; source is the address that connections of the node to it come from, invalid if the kernel takes
// the address itself.
type route struct{ to, source netip.Addr }

func rtmsg(family uint16, bits int, protocol byte) []byte {
	return []byte{byte(family), byte(bits), 0, 0, unix.RT_TABLE_LOCAL, protocol, unix.RT_SCOPE_HOST, unix.RTN_LOCAL, 0, 0, 0, 0}
}

// write writes the message that adds, replaces or deletes a route.
func (n rtnetlink) write(typ, flags uint16, r route) {
	n.out.message(typ, flags, rtmsg(familyOf(r.to), r.to.BitLen(), routeProtocol), func() {
		n.out.attr(rtaDst, r.to.AsSlice()...)
		n.out.native32(rtaOIF, loopback)
		n.out.native32(rtaPriority, routeMetric)
		if r.source.IsValid() && typ == unix.RTM_NEWROUTE {
			n.out.attr(rtaPrefSrc, r.source.AsSlice()...)
		}
	})
}

// add adds routes, or gives those that are there another source. It gives those that the kernel refuses, with what it says.
func (n rtnetlink) add(routes []route) (map[netip.Addr]error, error) {
	return n.all("add", unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, routes)
}

// remove deletes routes. That one is gone is no error.
func (n rtnetlink) remove(routes []route) error {
	failed, err := n.all("delete", unix.RTM_DELROUTE, 0, routes)
	return errors.Join(append(slices.Collect(maps.Values(failed)), err)...)
}

func (n rtnetlink) all(verb string, typ, flags uint16, routes []route) (map[netip.Addr]error, error) {
	failed := map[netip.Addr]error{}
	for part := range slices.Chunk(routes, maxBatch) {
		n.out.begin()
		for _, r := range part {
			n.write(typ, flags, r)
		}
		refused, err := n.commit()
		if err != nil {
			return failed, err
		}
		for i, errno := range refused {
			if typ == unix.RTM_NEWROUTE || errno != unix.ESRCH {
				failed[part[i].to] = fmt.Errorf("route: %s local route to %s: %w", verb, part[i].to, errno)
			}
		}
	}
	return failed, nil
}

// list gives our routes.
func (n rtnetlink) list() (map[netip.Addr]netip.Addr, error) {
	routes := map[netip.Addr]netip.Addr{}
	for _, family := range []uint16{unix.AF_INET, unix.AF_INET6} {
		h := rtmsg(family, 0, routeProtocol)
		h[6] = 0 // no filter by scope
		err := n.dump(unix.RTM_GETROUTE, h, nil, func() { clear(routes) }, func(body []byte) {
			if len(body) < rtmLen || body[4] != unix.RT_TABLE_LOCAL || body[5] != routeProtocol {
				return
			}
			var r route
			for typ, v := range attributes(body[rtmLen:]) {
				switch typ {
				case rtaDst:
					r.to = v.addr(uint16(body[0]))
				case rtaPrefSrc:
					r.source = v.addr(uint16(body[0]))
				}
			}
			if r.to.IsValid() {
				routes[r.to] = r.source
			}
		})
		if err != nil && !(family == unix.AF_INET6 && noIPv6(err)) {
			return nil, fmt.Errorf("route: list local routes: %w", err)
		}
	}
	return routes, nil
}

// gateways gives the addresses by way of which this host has routes, in all of its tables.
func (n rtnetlink) gateways() (map[netip.Addr]bool, error) {
	found := map[netip.Addr]bool{}
	for _, family := range []uint16{unix.AF_INET, unix.AF_INET6} {
		h := make([]byte, rtmLen) // no filter
		h[0] = byte(family)
		err := n.dump(unix.RTM_GETROUTE, h, nil, func() {}, func(body []byte) {
			if len(body) >= rtmLen && body[7] == unix.RTN_UNICAST {
				addGateways(found, body[rtmLen:], family)
			}
		})
		if err != nil && !(family == unix.AF_INET6 && noIPv6(err)) {
			return nil, fmt.Errorf("route: list routes: %w", err)
		}
	}
	return found, nil
}

// addGateways reads the next hops of a route, which may have several, and of IPv4 also one of IPv6.
func addGateways(found map[netip.Addr]bool, attrs []byte, family uint16) {
	for typ, v := range attributes(attrs) {
		switch typ {
		case rtaGateway:
			found[v.addr(family)] = true
		case rtaVia:
			if len(v) > 2 {
				found[v[2:].addr(v.native16())] = true
			}
		case rtaMultipath:
			for hops := v; len(hops) >= rtnhLen; {
				size := int(hops.native16())
				if size < rtnhLen || size > len(hops) {
					break
				}
				addGateways(found, hops[rtnhLen:size], family)
				hops = hops[min((size+3)&^3, len(hops)):]
			}
		}
	}
}

// noIPv6 says whether an error is that of a kernel that was started without IPv6.
func noIPv6(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT)
}

// takes says whether the host takes in what is sent to an address.
func (n rtnetlink) takes(a netip.Addr) (bool, error) {
	h := make([]byte, rtmLen)
	h[0], h[1] = byte(familyOf(a)), byte(a.BitLen())
	body, err := n.get(unix.RTM_GETROUTE, h, func() { n.out.attr(rtaDst, a.AsSlice()...) })
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("route: look for %s: %w", a, err)
	}
	return len(body) >= rtmLen && body[7] == unix.RTN_LOCAL, nil
}

// device is an address that is on a device of this host.
type device struct {
	netip.Addr
	// global says that it may be talked to from anywhere; own, that its device is lo.
	global, own bool
}

// addresses lists the addresses on devices.
func (n rtnetlink) addresses() (list []device, err error) {
	err = n.dump(unix.RTM_GETADDR, make([]byte, ifaLen), nil, func() { list = nil }, func(body []byte) {
		if len(body) < ifaLen {
			return
		}
		family := uint16(body[0])
		d := device{global: body[3] == unix.RT_SCOPE_UNIVERSE, own: value(body[4:]).native32() == loopback}
		for typ, v := range attributes(body[ifaLen:]) {
			if typ == ifaLocal || typ == ifaAddress && !d.IsValid() {
				d.Addr = v.addr(family)
			}
		}
		if d.IsValid() {
			list = append(list, d)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("route: list addresses: %w", err)
	}
	return list, nil
}
