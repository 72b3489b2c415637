package ipvsplugin

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// Packets to an address that the host does not have are forwarded and never get to IPVS. So each address has a route
// of type local, which makes the kernel take them in without the address being on any device.
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

// route is a local route of ours; source is the address that connections of the node to it come from, invalid if the
// kernel takes the address itself.
type route struct{ to, source netip.Addr }

func rtmsg(f ipfamily.Family, bits int, protocol byte) []byte {
	return []byte{
		f.NFProto(),
		byte(bits),
		0,
		0,
		unix.RT_TABLE_LOCAL,
		protocol,
		unix.RT_SCOPE_HOST,
		unix.RTN_LOCAL,
		0,
		0,
		0,
		0,
	}
}

// write writes the message that adds, replaces or deletes a route.
func (n rtnetlink) write(typ, flags uint16, r route) {
	m := n.out.Message(typ, flags, rtmsg(ipfamily.Of(r.to), r.to.BitLen(), routeProtocol)...)
	n.out.Attr(rtaDst, r.to.AsSlice()...)
	n.out.Native32(rtaOIF, loopback)
	n.out.Native32(rtaPriority, routeMetric)
	if r.source.IsValid() && typ == unix.RTM_NEWROUTE {
		n.out.Attr(rtaPrefSrc, r.source.AsSlice()...)
	}
	n.out.End(m)
}

// add adds routes, or gives those that are there another source. It gives those that the kernel refuses, with what it
// says.
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
		n.out.Reset()
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

// request writes a message without attributes as the only one in the buffer, and returns its bytes.
func (n rtnetlink) request(typ, flags uint16, header []byte) []byte {
	n.out.Reset()
	n.out.End(n.out.Message(typ, flags, header...))
	return n.out.Bytes()
}

// list gives our routes.
func (n rtnetlink) list() (map[netip.Addr]netip.Addr, error) {
	all := map[netip.Addr]netip.Addr{}
	for _, f := range ipfamily.All {
		h := rtmsg(f, 0, routeProtocol)
		h[6] = 0 // no filter by scope
		var routes []route
		err := n.Dump(n.request(unix.RTM_GETROUTE, unix.NLM_F_DUMP, h), func() { routes = nil }, func(body []byte) {
			if len(body) < rtmLen || body[4] != unix.RT_TABLE_LOCAL || body[5] != routeProtocol {
				return
			}
			a := netlink.Decode(body[rtmLen:])
			if to := addrOf(uint16(body[0]), a[rtaDst]); to.IsValid() {
				routes = append(routes, route{to, addrOf(uint16(body[0]), a[rtaPrefSrc])})
			}
		})
		if err != nil && !(f == ipfamily.IPv6 && noIPv6(err)) {
			return nil, fmt.Errorf("route: list local routes: %w", err)
		}
		for _, r := range routes {
			all[r.to] = r.source
		}
	}
	return all, nil
}

// gateways gives the addresses by way of which this host has routes, in all of its tables.
func (n rtnetlink) gateways() (map[netip.Addr]bool, error) {
	found := map[netip.Addr]bool{}
	for _, f := range ipfamily.All {
		h := make([]byte, rtmLen) // no filter
		h[0] = f.NFProto()
		err := n.Dump(n.request(unix.RTM_GETROUTE, unix.NLM_F_DUMP, h), nil, func(body []byte) {
			if len(body) >= rtmLen && body[7] == unix.RTN_UNICAST {
				addGateways(found, body[rtmLen:], uint16(f.NFProto()))
			}
		})
		if err != nil && !(f == ipfamily.IPv6 && noIPv6(err)) {
			return nil, fmt.Errorf("route: list routes: %w", err)
		}
	}
	return found, nil
}

// addGateways reads the next hops of a route, which may have several, and of IPv4 also one of IPv6.
func addGateways(found map[netip.Addr]bool, attrs []byte, family uint16) {
	for typ, v := range netlink.Each(attrs) {
		switch typ {
		case rtaGateway:
			found[addrOf(family, v)] = true
		case rtaVia:
			if len(v) > 2 {
				found[addrOf(v.Native16(), v[2:])] = true
			}
		case rtaMultipath:
			for hops := v; len(hops) >= rtnhLen; {
				size := int(hops.Native16())
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
	h[0], h[1] = byte(number(a)), byte(a.BitLen())
	n.out.Reset()
	m := n.out.Message(unix.RTM_GETROUTE, 0, h...)
	n.out.Attr(rtaDst, a.AsSlice()...)
	n.out.End(m)
	body, err := n.Get(n.out.Bytes())
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("route: look up %s: %w", a, err)
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
	request := n.request(unix.RTM_GETADDR, unix.NLM_F_DUMP, make([]byte, ifaLen))
	err = n.Dump(request, func() { list = nil }, func(body []byte) {
		if len(body) < ifaLen {
			return
		}
		family := uint16(body[0])
		d := device{global: body[3] == unix.RT_SCOPE_UNIVERSE, own: netlink.Value(body[4:]).Native32() == loopback}
		for typ, v := range netlink.Each(body[ifaLen:]) {
			if typ == ifaLocal || typ == ifaAddress && !d.IsValid() {
				d.Addr = addrOf(family, v)
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
