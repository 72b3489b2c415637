// Package sloppy reads addresses and ranges as kube-proxy does, whatever the API server let pass in its time: leading
// zeros do not count, and an IPv4 address in IPv6 notation is that IPv4 address.
package sloppy

import (
	"net/netip"

	netutils "k8s.io/utils/net"
)

// ParseAddr reads an address. Plain is false if Go's own parser would not read it so.
func ParseAddr(text string) (a netip.Addr, plain, ok bool) {
	if a, err := netip.ParseAddr(text); err == nil {
		return a.Unmap(), !a.Is4In6(), true
	}
	a, ok = netip.AddrFromSlice(netutils.ParseIPSloppy(text))
	return a.Unmap(), false, ok
}

// ParsePrefix reads a range and clears the host bits of its address. Plain is as for ParseAddr.
func ParsePrefix(text string) (p netip.Prefix, plain, ok bool) {
	if p, err := netip.ParsePrefix(text); err == nil && !p.Addr().Is4In6() {
		return p.Masked(), true, true
	}
	_, n, err := netutils.ParseCIDRSloppy(text)
	if err != nil {
		return netip.Prefix{}, false, false
	}
	a, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	if a.Is4In6() { // so at least the 96 bits before the IPv4 address are fixed
		a, bits = a.Unmap(), bits-96
	}
	return netip.PrefixFrom(a, bits), false, true
}
