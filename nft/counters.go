package nft

import (
	"net/netip"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// FrontendKeys gives the keys under which a frontend's element may stand.
func FrontendKeys(c dataplane.Counted) [2]Element {
	set := Services
	if c.Outside {
		set = OutsideServices
	}
	return [2]Element{frontendElement(set, c.Key), frontendElement(set.counted(false), c.Key)}
}

// FrontendSets gives the maps that lead from frontends to pools.
func FrontendSets() [4]SetID { return frontendSets }

// CountedSlots gives the keys of the n slots of a pool, where they are counted.
func CountedSlots(pool uint32, proto Protocol, n int) []Element {
	e := idElement(Pools, pool)
	e.Chain = ChainID{Pick, uint32(n)}
	return e.SlotKeys(proto)
}

// PoolKey gives the key of a pool's element.
func PoolKey(id uint32) Element { return idElement(Pools, id) }

// MemberKey gives the key of the element that makes an endpoint a member of a pool that remembers its clients, where it
// is counted.
func MemberKey(pool uint32, ep netip.AddrPort) Element {
	return memberElement(StickyEndpoints, pool, ep)
}

// FrontendCount reads what an element of Services or OutsideServices has counted, whose pool has the given element. It
// is not ok if that leads to no chain that a pool leads to.
func (l *Listed) FrontendCount(pool *Element) (c dataplane.FrontendCount, ok bool) {
	c.Counted = dataplane.Counted{Key: l.FrontendKey(), Outside: l.Set == OutsideServices || l.Set == UncountedOutsideServices}
	c.Packets, c.Uncounted, c.Pool = l.Packets, !l.Counted, pool.ID()
	switch pool.Chain.Kind {
	case NoEndpoints:
		c.Empty = dataplane.Reject
	case NoLocalEndpoints:
		c.Empty = dataplane.Drop
	case LeftToIPVS:
		c.Scheduled = true
	case StickyPick:
		c.Sticky = true
		fallthrough
	case Pick, UncountedPick:
		c.Endpoints = int(pool.Chain.N)
	default:
		return c, false
	}
	return c, true
}

// SlotCount reads what an element of Endpoints has counted, for all frontends of its pool: Counted is left empty.
func (l *Listed) SlotCount() dataplane.EndpointCount {
	return dataplane.EndpointCount{Endpoint: l.Target(), Place: dataplane.Place{Pool: l.ID(), Slot: l.Slot()},
		Packets: l.Packets}
}

// MemberCount reads what an element of StickyEndpoints has counted, for all frontends of its pool: Counted is left
// empty.
func (l *Listed) MemberCount() dataplane.EndpointCount {
	return dataplane.EndpointCount{Endpoint: l.Member(), Place: dataplane.Place{Pool: l.ID(), Sticky: true},
		Packets: l.Packets}
}

// Fill says how full the sets of a table are.
type Fill [NumSets]struct{ Elements, Size int }

// Fill gives how many elements the sets should hold, and how many they take; 0 is no limit. What Affinity holds, nobody
// planned: it counts as empty.
func (m *Model) Fill() (out ipfamily.Per[Fill]) {
	for i := range m.tables {
		for set := range out[i] {
			out[i][set].Elements, out[i][set].Size = m.tables[i].count[set], int(SetByID(SetID(set)).Size)
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

// PoolIDs gives the pools of one family that remember their clients, by the frontends that lead there.
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

// AffinityElement gives the key under which a pool remembers a client.
func AffinityElement(pool uint32, client netip.Addr) Element {
	e := idElement(Affinity, pool)
	e.addKeyWord(bucketOf(client, AffinityBuckets))
	return e
}

// SetData takes an endpoint as the kernel has it. It is not ok if the length is none that a family's endpoints have.
func (e *Element) SetData(f ipfamily.Family, data []byte) bool {
	if len(data) != PaddedLen(f, target) {
		return false
	}
	e.DataLen = uint8(copy(e.data[:], data))
	return true
}
