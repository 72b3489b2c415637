package nft

import (
	"encoding/binary"
	"net/netip"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// frontendsOf and slotsFor give the maps that hold a frontend, and its slots.
func frontendsOf(c dataplane.Counted) SetID {
	if c.Outside {
		return OutsideServices
	}
	return Services
}

func slotsFor(c dataplane.Counted) SetID {
	if c.Outside {
		return OutsideEndpoints
	}
	return Endpoints
}

// FrontendKey gives the key of a frontend's element.
func FrontendKey(c dataplane.Counted) Element { return frontendElement(frontendsOf(c), c.Key) }

// PoolKey gives the key of the element that says which pool a frontend remembers its clients with.
func PoolKey(c dataplane.Counted) Element {
	if c.Outside {
		return frontendElement(OutsideSticky, c.Key)
	}
	return frontendElement(Sticky, c.Key)
}

// SlotKeysOf gives the keys of the first n slots of a frontend.
func SlotKeysOf(c dataplane.Counted, n int) []Element {
	keys := make([]Element, min(n, MaxSlots))
	for i := range keys {
		keys[i] = frontendElement(slotsFor(c), c.Key)
		keys[i].addKeyWord(uint32(i))
	}
	return keys
}

// MemberKey gives the key of the element that makes an endpoint a member of a pool that remembers its clients.
func MemberKey(pool uint32, ep netip.AddrPort) Element { return memberElement(pool, ep) }

// PoolID gives the pool that an element of Sticky or OutsideSticky names.
func (e *Element) PoolID() uint32 { return binary.NativeEndian.Uint32(e.data[:4]) }

// FrontendKey reads the frontend that is the key of an element.
func (e *Element) FrontendKey() dataplane.Key { return e.frontendKey(0) }

// frontendKey reads the frontend that a key begins with; after is the length of what follows.
func (e *Element) frontendKey(after int) dataplane.Key {
	n := int(e.KeyLen) - after - 8
	a, _ := netip.AddrFromSlice(e.key[:n])
	return dataplane.Key{Addr: a, Protocol: snapshot.Protocol(e.key[n]), Port: binary.BigEndian.Uint16(e.key[n+4:])}
}

// FrontendCount reads what an element of Services or OutsideServices has counted. It is not ok if the element leads to no chain
// that a frontend leads to.
func (l *Listed) FrontendCount() (c dataplane.FrontendCount, ok bool) {
	c.Counted = dataplane.Counted{Key: l.FrontendKey(), Outside: l.Set == OutsideServices}
	c.Packets = l.Packets
	switch l.Chain.Kind {
	case NoEndpoints:
		c.Empty = dataplane.Reject
	case NoLocalEndpoints:
		c.Empty = dataplane.Drop
	case LeftToIPVS:
		c.Scheduled = true
	case StickyPick, OutsideStickyPick:
		c.Sticky = true
		fallthrough
	case Pick, OutsidePick:
		c.Endpoints = int(l.Chain.N)
	default:
		return c, false
	}
	return c, true
}

// SlotCount reads what an element of Endpoints or OutsideEndpoints has counted.
func (l *Listed) SlotCount() dataplane.EndpointCount {
	at := dataplane.Counted{Key: l.frontendKey(slotLen), Outside: l.Set == OutsideEndpoints}
	slot, ep := l.slotOf()
	return dataplane.EndpointCount{Counted: at, Endpoint: ep, Place: dataplane.Place{Counted: at, Slot: slot}, Packets: l.Packets}
}

// MemberCount reads what an element of StickyEndpoints has counted, for all frontends of its pool: Counted is left empty.
func (l *Listed) MemberCount() dataplane.EndpointCount {
	n := int(l.KeyLen)
	a, _ := netip.AddrFromSlice(l.key[4 : n-4])
	return dataplane.EndpointCount{
		Endpoint: netip.AddrPortFrom(a, binary.BigEndian.Uint16(l.key[n-4:])),
		Place:    dataplane.Place{Pool: binary.NativeEndian.Uint32(l.key[:4])},
		Packets:  l.Packets,
	}
}

// Fill says how full the sets of a table are.
type Fill [NumSets]struct{ Elements, Size int }

// Fill gives how many elements the sets should hold, and how many they take; 0 is no limit. What Affinity holds, nobody
// planned: it counts as empty.
func (m *Model) Fill() (out [len(Families)]Fill) {
	for i := range m.tables {
		for set := range out[i] {
			out[i][set].Elements, out[i][set].Size = m.tables[i].count[set], int(m.tables[i].size[set])
		}
	}
	return out
}

// Refuses gives what a rule that counts packets turns away, from the set it looks at.
func Refuses(set string) (dataplane.Refusal, bool) {
	switch set {
	case RestrictedServices.String():
		return dataplane.RefusedSourceRanges, true
	case ClusterIPs.String():
		return dataplane.RefusedUnusedPort, true
	case ServiceCIDRs.String():
		return dataplane.RefusedUnallocated, true
	}
	return 0, false
}
