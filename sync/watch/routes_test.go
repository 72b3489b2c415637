package watch

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func ipNet(t testing.TB, text string) *net.IPNet {
	t.Helper()
	_, n, err := net.ParseCIDR(text)
	must(t, err)
	return n
}

func (v *view) awaitNetworks(own, routes []string) {
	v.t.Helper()
	is := func(have []netip.Prefix, want []string) bool {
		return slices.EqualFunc(have, want, func(p netip.Prefix, text string) bool { return p.String() == text })
	}
	v.await(fmt.Sprintf("networks %q, routes %q", own, routes), func() bool {
		return is(v.snap.HostNetworks.Own, own) && is(v.snap.HostNetworks.Routes, routes)
	})
}

// TestHostNetworks: networks of addresses and unicast routes of the main table count. Default routes do not, nor do
// those that lead nowhere, nor other tables, where local addresses are.
func TestHostNetworks(t *testing.T) {
	ns, h, here := inNamespace(t)
	if !here {
		return
	}
	v := start(t, func(report func(error)) source { return &Host{Namespace: &ns, Report: report} })
	eth0 := newLink(t, h)
	withoutRoute := addr(t, "192.0.2.5/24")
	withoutRoute.Flags = unix.IFA_F_NOPREFIXROUTE
	must(t, h.AddrAdd(eth0, withoutRoute))
	must(t, h.AddrAdd(eth0, addr(t, "10.100.0.5/16")))
	must(t, h.AddrAdd(eth0, addr(t, "10.99.0.5/32"))) // a single address is no network
	link := eth0.Attrs().Index
	for _, r := range []netlink.Route{
		{Dst: ipNet(t, "10.98.0.0/24"), LinkIndex: link},
		{Dst: ipNet(t, "10.98.0.7/32"), LinkIndex: link},
		{Dst: ipNet(t, "0.0.0.0/0"), LinkIndex: link},
		{Dst: ipNet(t, "10.97.0.0/24"), Type: unix.RTN_BLACKHOLE},
		{Dst: ipNet(t, "10.97.1.0/24"), Type: unix.RTN_UNREACHABLE},
		{Dst: ipNet(t, "10.96.0.10/32"), LinkIndex: link, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL,
			Scope: netlink.SCOPE_HOST},
		{Dst: ipNet(t, "10.95.0.0/24"), LinkIndex: link, Table: 100},
	} {
		must(t, h.RouteAdd(&r))
	}
	own := []string{"10.100.0.0/16", "192.0.2.0/24", "fe80::/64"}
	v.awaitNetworks(own, []string{"10.98.0.0/24", "10.98.0.7/32", "10.100.0.0/16"})

	// A pod comes, a network goes.
	must(t, h.RouteAdd(&netlink.Route{Dst: ipNet(t, "10.244.0.9/32"), LinkIndex: link}))
	must(t, h.RouteDel(&netlink.Route{Dst: ipNet(t, "10.98.0.0/24"), LinkIndex: link}))
	must(t, h.AddrDel(eth0, withoutRoute))
	v.awaitNetworks([]string{own[0], own[2]}, []string{"10.98.0.7/32", "10.100.0.0/16", "10.244.0.9/32"})
	if v.synced != 1 || len(v.problems) > 0 {
		t.Errorf("synced %d times, problems %q", v.synced, v.problems)
	}
}

// TestManyRoutes: routes that never rest, and more than anybody looks at, are few deltas and no failure; addresses are
// told at once meanwhile.
func TestManyRoutes(t *testing.T) {
	ns, h, here := inNamespace(t)
	if !here {
		return
	}
	eth0 := newLink(t, h)
	v := start(t, func(report func(error)) source { return &Host{Namespace: &ns, Report: report} })
	v.await("first list", func() bool { return v.synced == 1 })
	for n := range maxRoutes + 1 {
		to := net.IPv4(10, 96+byte(n>>16), byte(n>>8), byte(n))
		must(t, h.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: to, Mask: net.CIDRMask(32, 32)},
			LinkIndex: eth0.Attrs().Index}))
	}
	must(t, h.AddrAdd(eth0, addr(t, "192.0.2.5/32")))
	v.await("an address", func() bool { return slices.Contains(v.snap.HostAddrs, netip.MustParseAddr("192.0.2.5")) })
	v.await("too many routes", func() bool { return v.snap.HostNetworks.TooMany })
	if v.snap.HostNetworks.Routes != nil || len(v.problems) > 0 {
		t.Errorf("%d routes, problems %q", len(v.snap.HostNetworks.Routes), v.problems)
	}
}

// newLink adds a link eth0 that is up.
func newLink(t testing.TB, h *netlink.Handle) (eth0 netlink.Link) {
	t.Helper()
	must(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer"}))
	for _, name := range []string{"peer", "eth0"} {
		var err error
		eth0, err = h.LinkByName(name)
		must(t, err)
		must(t, h.LinkSetUp(eth0))
	}
	return eth0
}
