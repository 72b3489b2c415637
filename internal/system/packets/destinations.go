package packets

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Key is a destination.
type Key struct {
	Addr     netip.Addr
	Protocol Protocol
	Port     uint16
}

// Compare orders keys by address, protocol and port.
func (k Key) Compare(o Key) int {
	if c := k.Addr.Compare(o.Addr); c != 0 {
		return c
	}
	if k.Protocol != o.Protocol {
		return int(k.Protocol) - int(o.Protocol)
	}
	return int(k.Port) - int(o.Port)
}

// String returns "10.96.0.1:80/tcp".
func (k Key) String() string {
	return netip.AddrPortFrom(k.Addr, k.Port).String() + "/" + k.Protocol.String()
}

// Mentioned are the addresses that rules name.
type Mentioned struct {
	// Keys are destinations; a Key whose Addr is the zero Addr is one at every address of this host, in one family.
	Keys [2][]Key
	// Addrs are destinations of any port, and Ranges ranges of them.
	Addrs  []netip.Addr
	Ranges []Interval
	// Devices are those at whose ingress there are rules, and Senders the link-layer addresses that they compare.
	Devices []string
	Senders [][6]byte
	// Own are the sources that rules compare together with the destination: endpoints that may reach themselves.
	Own []netip.Addr
}

// Mentioned returns what the rules name.
func (r *Rules) Mentioned() *Mentioned {
	m := &Mentioned{}
	for f, tables := range r.tables {
		for _, t := range tables {
			seen := map[*nfSet]bool{}
			for _, c := range t.chains {
				m.Devices = append(m.Devices, c.devices...)
				for i := range c.rules {
					for k := range c.rules[i].ops {
						if op := &c.rules[i].ops[k]; op.kind == opLookup && !op.set.dynamic() && !seen[op.set] {
							seen[op.set] = true
							m.addSet(f, op, t.family.AddrLen())
						}
					}
				}
			}
		}
	}
	slices.Sort(m.Devices)
	m.Devices = slices.Compact(m.Devices)
	slices.SortFunc(m.Senders, func(a, b [6]byte) int { return slices.Compare(a[:], b[:]) })
	return m
}

// addSet adds what the keys of a set name.
func (m *Mentioned) addSet(f int, op *nfOp, addrLen int) {
	protocolPort := func(addr netip.Addr, key string) {
		m.Keys[f] = append(m.Keys[f], Key{addr, Protocol(key[0]), binary.BigEndian.Uint16([]byte(key[4:]))})
	}
	for key := range op.set.exact {
		addr, _ := netip.AddrFromSlice([]byte(key[:min(addrLen, len(key))]))
		switch op.layout {
		case "dpP":
			protocolPort(addr, key[addrLen:])
		case "pP":
			protocolPort(netip.Addr{}, key)
		case "d":
			m.Addrs = append(m.Addrs, addr)
		case "sd", "sdpP":
			m.Own = append(m.Own, addr)
		case "e":
			m.Senders = append(m.Senders, [6]byte([]byte(key)))
		}
	}
	if op.layout != "d" {
		return
	}
	for _, r := range op.set.ranges {
		low, _ := netip.AddrFromSlice(r.low)
		high, _ := netip.AddrFromSlice(r.high)
		m.Ranges = append(m.Ranges, Interval{low, high})
	}
}
