package nft

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// FrontendKeys returns the keys under which a frontend's element may be, those with counters in the first half. That of
// Services IsIndirect if there is another.
func FrontendKeys(c dataplane.Counted) (keys []Element) {
	sets := []SetID{Services, InsideServices}
	if c.Outside {
		sets = []SetID{OutsideServices}
	}
	for _, counted := range [...]bool{true, false} {
		for _, set := range sets {
			keys = append(keys, frontendElement(set.counted(counted), c.Key))
		}
	}
	return keys
}

// FrontendKey returns the key of a frontend's element, in the map in which it was when it was read before.
func FrontendKey(c *dataplane.FrontendCount) Element {
	set := Services
	switch {
	case c.Outside:
		set = OutsideServices
	case c.Indirect:
		set = InsideServices
	}
	return frontendElement(set.counted(!c.Uncounted), c.Key)
}

// FrontendSets returns the maps from frontends to pools.
func FrontendSets() [6]SetID { return frontendSets }

// CountedSlots returns the keys of a pool's slots in the map with counters, of which there are at most n.
func CountedSlots(pool uint32, proto Protocol, n int) []Element {
	if n == 0 {
		return nil
	}
	e := idElement(Pools, pool)
	e.setPool(ChainID{Pick, roomFor(n)}, pool)
	return e.SlotKeys(proto)
}

// PoolKey returns the key of a pool's element.
func PoolKey(id uint32) Element { return idElement(Pools, id) }

// LimitedKey returns the key of the element that counts what is over the limits of a pool.
func LimitedKey(id uint32) Element { return idElement(LimitedPools, id) }

// MemberKey returns the key of an endpoint's element in the set, with counters, of members of pools with session
// affinity.
func MemberKey(pool uint32, ep netip.AddrPort) Element {
	return memberElement(StickyEndpoints, pool, ep)
}

// FrontendCount returns the count of an element of the maps of frontends. The class of its pool is in the given
// element: itself, or one of Pools. It is not ok if that element leads to no chain of a pool.
func (l *Listed) FrontendCount(pool *Element) (c dataplane.FrontendCount, ok bool) {
	outside := l.Set == OutsideServices || l.Set == UncountedOutsideServices
	c.Counted = dataplane.Counted{Key: l.FrontendKey(), Outside: outside}
	c.Packets, c.Uncounted, c.Pool = l.Packets, !l.Counted, l.PoolID()
	c.Indirect = l.Set != Services && l.Set != UncountedServices
	switch pool.Leads().Kind {
	case NoEndpoints:
		c.Empty = dataplane.Reject
	case NoLocalEndpoints:
		c.Empty = dataplane.Drop
	case PassOn:
		c.Empty = dataplane.Pass
	case LeftToIPVS:
		c.Scheduled = true
	case StickyPick, StickyHash:
		c.Sticky = true
		fallthrough
	case Pick, UncountedPick, PickHash, UncountedHash, PickHashPort, UncountedHashPort:
		chain := pool.Leads()
		c.Endpoints, c.AtMost = int(chain.N), !chain.Kind.isHash() && chain.N > exactSizes
	default:
		return c, false
	}
	return c, true
}

// SlotCount returns the count of an element of Endpoints, for all frontends of its pool. Counted is left empty.
func (l *Listed) SlotCount() dataplane.EndpointCount {
	return dataplane.EndpointCount{Endpoint: l.Target(), Place: dataplane.Place{Pool: l.ID(), Slot: l.Slot()},
		Packets: l.Packets}
}

// MemberCount returns the count of an element of StickyEndpoints, for all frontends of its pool. Counted is left empty.
func (l *Listed) MemberCount() dataplane.EndpointCount {
	return dataplane.EndpointCount{Endpoint: l.Member(), Place: dataplane.Place{Pool: l.ID(), Sticky: true},
		Packets: l.Packets}
}

// Fill says how full the sets of a table are.
type Fill [NumSets]struct{ Elements, Size int }

// Fill returns how many elements the sets should hold, and how many they can hold; 0 means no limit. Affinity counts as
// empty, because nobody plans its elements.
func (m *Model) Fill() (out ipfamily.Per[Fill]) {
	for i := range m.tables {
		for set := range out[i] {
			out[i][set].Elements, out[i][set].Size = m.tables[i].count[set], int(SetByID(SetID(set)).Size)
		}
	}
	return out
}

// Refuses returns why a rule with a counter refuses packets, given its chain and the first set that it looks up, if
// any.
func Refuses(chain ChainKind, set string) (dataplane.Refusal, bool) {
	switch {
	case set == RefusedShares.String():
		return dataplane.RefusedNoEndpoints, true
	case chain == FirstEndpoint, chain == UncountedFirstEndpoint, chain == Split, chain == SharedPool, chain == RatedPool,
		set == Services.String(), set == UncountedServices.String():
		return dataplane.RefusedOvertaken, true
	case set == DroppingPools.String():
		return dataplane.DroppedOverLimit, true
	case chain == OverLimit:
		return dataplane.RefusedOverLimit, true
	case chain == Restrict:
		return dataplane.RefusedSourceRanges, true
	case chain == Unallocated:
		return dataplane.RefusedUnallocated, true
	case slices.Contains(addressKinds[:], chain):
		return dataplane.RefusedUnusedPort, true
	}
	return 0, false
}

// Refusing returns the chains whose rules turn packets away that no frontend counts as refused.
func Refusing() []ChainKind {
	return append(addressKinds[:], Restrict, OverLimit, Split, SharedPool, RatedPool, Unallocated, FirstEndpoint,
		UncountedFirstEndpoint)
}

// PoolIDs returns the pools of one family with session affinity, by the frontends that lead to them.
func (m *Model) PoolIDs(f ipfamily.Family) map[dataplane.Counted]uint32 {
	out := map[dataplane.Counted]uint32{}
	for _, s := range m.services {
		for _, p := range s.ports {
			if p.id.family != f || p.timeout == 0 {
				continue
			}
			for i := range p.frontends {
				fe := &p.frontends[i]
				out[dataplane.Counted{Key: fe.key}] = p.pools[fe.inside].id
				out[dataplane.Counted{Key: fe.key, Outside: true}] = p.pools[fe.outside].id
			}
		}
	}
	return out
}

// AffinityElement returns the key under which a pool remembers a client.
func AffinityElement(pool uint32, client netip.Addr) Element {
	e := idElement(Affinity, pool)
	e.addKeyWord(bucketOf(client, AffinityBuckets))
	return e
}

// SetData sets the endpoint from the kernel's bytes. It is not ok if their length is wrong for the family.
func (e *Element) SetData(f ipfamily.Family, data []byte) bool {
	if len(data) != PaddedLen(f, target) {
		return false
	}
	e.DataLen = uint8(copy(e.data[:], data))
	return true
}
