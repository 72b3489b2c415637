package watch

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/sloppy"
)

// addrClass says which addresses are valid in a field.
type addrClass uint8

const (
	// valid is every address.
	valid addrClass = iota
	// servable is an address that packets of others can be sent to. Link-local ranges do serve as service ranges.
	servable
	// unicast is what the API server allows as an endpoint or external IP: not link-local either.
	unicast
)

// addr reads an address. It reports one that is invalid, and warns of one that today's API servers reject and those
// before let pass. Field is the path, with %d where i belongs, if it is in a list.
func (f *problemList) addr(field string, i int, text string, need addrClass) (netip.Addr, bool) {
	a, plain, ok := sloppy.ParseAddr(text)
	switch {
	case !ok:
		f.add(indexed(field, i), "%s is not an IP address", quote(text))
		return netip.Addr{}, false
	case a.Zone() != "":
		f.add(indexed(field, i), "%s has a zone: write %s", quote(text), a.WithZone(""))
		return netip.Addr{}, false
	case need == valid:
	case a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}),
		need == unicast && a.IsLinkLocalUnicast():
		f.add(indexed(field, i), "%s is special: nothing can be served there", a)
		return netip.Addr{}, false
	}
	if !plain {
		f.warn(indexed(field, i), "%s is read as %s, as kube-proxy does: write that", quote(text), a)
	}
	return a, true
}

// prefix reads a range, as addr does an address. Then says what follows from an invalid one.
func (f *problemList) prefix(field string, i int, text, then string) (netip.Prefix, bool) {
	p, plain, ok := sloppy.ParsePrefix(text)
	if !ok {
		if _, _, ok := sloppy.ParseAddr(text); ok {
			f.add(indexed(field, i),
				"%s is an address, not a range: add /32 or /128 for this address alone%s", quote(text), then)
		} else {
			f.add(indexed(field, i), "%s is not an address range like 10.0.0.0/8%s", quote(text), then)
		}
	} else if !plain {
		f.warn(indexed(field, i), "%s is read as %s, as kube-proxy does: write that", quote(text), p)
	}
	return p, ok
}

func prefixes(f *problemList, field string, texts []string) []netip.Prefix {
	var out []netip.Prefix
	for i, text := range texts {
		if p, ok := f.prefix(field, i, text, ""); ok {
			out = append(out, p)
		}
	}
	return out
}

// addrs reads a list of addresses and drops duplicates.
func addrs(f *problemList, field string, texts []string, need addrClass) []netip.Addr {
	var (
		out   []netip.Addr
		known uniqueSet[netip.Addr]
	)
	for i, text := range truncate(f, strings.TrimSuffix(field, "[%d]"), texts, maxAddresses) {
		if a, ok := f.addr(field, i, text, need); ok && !known.addSeen(a) {
			out = append(out, a)
		}
	}
	return out
}

// indexed replaces the %d in a path by i, if there is one.
func indexed(field string, i int) string {
	return strings.Replace(field, "%d", fmt.Sprint(i), 1)
}
