// Package ipfamily is the one type for an IP family, and for what exists once for each family.
package ipfamily

import "net/netip"

// Family is an IP family. Its value is an index into a Per; the zero value is IPv4.
type Family uint8

// The families.
const (
	IPv4 Family = iota
	IPv6
)

// All lists both families in the order in which everything is read and written.
var All = [...]Family{IPv4, IPv6}

// Per holds a value for each family, indexed by it.
type Per[T any] [len(All)]T

// The kernel's numbers of the families: NFPROTO_IPV4 and NFPROTO_IPV6, which equal AF_INET and AF_INET6.
const (
	nfprotoIPv4 = 2
	nfprotoIPv6 = 10
)

// Of returns the family of an address. An IPv4-mapped IPv6 address is IPv6; so is the zero Addr, which belongs to
// neither.
func Of(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// OfNFProto returns the family with a number of the kernel; ok is false for any other number.
func OfNFProto(n uint8) (f Family, ok bool) {
	switch n {
	case nfprotoIPv4:
		return IPv4, true
	case nfprotoIPv6:
		return IPv6, true
	}
	return 0, false
}

// String returns "IPv4" or "IPv6".
func (f Family) String() string { return Per[string]{"IPv4", "IPv6"}[f] }

// NFT returns the family as nft writes it: "ip" or "ip6".
func (f Family) NFT() string { return Per[string]{"ip", "ip6"}[f] }

// NFProto returns the kernel's number of the family, which is NFPROTO_IPV4 or NFPROTO_IPV6 and equals AF_INET or
// AF_INET6.
func (f Family) NFProto() uint8 { return Per[uint8]{nfprotoIPv4, nfprotoIPv6}[f] }

// Version returns 4 or 6.
func (f Family) Version() int { return Per[int]{4, 6}[f] }

// Bits returns the length of an address in bits.
func (f Family) Bits() int { return Per[int]{32, 128}[f] }

// AddrLen returns the length of an address in bytes.
func (f Family) AddrLen() int { return f.Bits() / 8 }

// Has reports whether an address belongs to the family; the zero Addr belongs to none.
func (f Family) Has(a netip.Addr) bool { return a.IsValid() && Of(a) == f }

// Last returns the last address of a range.
func Last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(b); bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
