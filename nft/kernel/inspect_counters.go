package kernel

import (
	"context"
	"fmt"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Tables is where counters are read: a *Reader, or tables in memory.
type Tables interface {
	// Get returns those of some elements of a set that are there; it only uses the keys of its argument. In a set of
	// ranges it returns the range that holds the key.
	Get(f ipfamily.Family, set nft.SetID, keys []nft.Element) ([]nft.Listed, error)
	// List gives all elements of a set; whole is false if some may be missing.
	List(f ipfamily.Family, set nft.SetID) (elements []nft.Listed, whole bool, err error)
	// Revisions gives the revision of each table.
	Revisions() (ipfamily.Per[nft.Revision], error)
}

// Counters implements reconcile.Inspector.
func (i *Inspector) Counters(_ context.Context, ask dataplane.CountersAsked) (*dataplane.Counters, error) {
	return ReadCounters(i.Reader, ask)
}

// ReadCounters reads counters of tables, as an Inspector does.
func ReadCounters(from Tables, ask dataplane.CountersAsked) (*dataplane.Counters, error) {
	revisions, err := from.Revisions()
	if err != nil {
		return nil, err
	}
	r := counterReading{from: from, out: &dataplane.Counters{Counted: revisions[0].Counted, Whole: true}}
	if revisions != (ipfamily.Per[nft.Revision]{}) {
		r.out.Version = fmt.Sprint(revisions)
	}
	for _, f := range ipfamily.All {
		read := func() error { return r.named(f, ask.Frontends) }
		if ask.All {
			read = func() error { return r.all(f) }
		}
		if err := read(); err != nil {
			return nil, err
		}
		if err := r.endpoints(f, ask.Endpoints, ask.Whole); err != nil {
			return nil, err
		}
		health, err := healthIn(from, f)
		if err != nil {
			return nil, err
		}
		r.out.Unhealthy = append(r.out.Unhealthy, health...)
	}
	return r.out, nil
}

// counterReading is an answer about counters on its way.
type counterReading struct {
	from Tables
	out  *dataplane.Counters
}

// all reads every frontend of a family.
func (r *counterReading) all(f ipfamily.Family) error {
	var pools []nft.Listed
	for _, set := range [...]nft.SetID{nft.Pools, nft.LimitedPools} {
		listed, whole, err := r.from.List(f, set)
		if err != nil {
			return err
		}
		r.out.Whole = r.out.Whole && whole
		r.out.Read += len(listed)
		pools = append(pools, listed...)
	}
	for _, set := range nft.FrontendSets() {
		listed, whole, err := r.from.List(f, set)
		if err != nil {
			return err
		}
		r.out.Whole = r.out.Whole && whole
		r.out.Read += len(listed)
		r.add(listed, pools)
	}
	return nil
}

// named reads some frontends of a family by their keys, each in the map in which it was before, and then their pools.
func (r *counterReading) named(f ipfamily.Family, of []dataplane.FrontendCount) error {
	keys := map[nft.SetID][]nft.Element{}
	for i := range of {
		if of[i].Key.Addr.Is4() == (f == ipfamily.IPv4) {
			k := nft.FrontendKey(&of[i])
			keys[k.Set] = append(keys[k.Set], k)
		}
	}
	var found []nft.Listed
	for _, set := range nft.FrontendSets() {
		if len(keys[set]) == 0 {
			continue
		}
		listed, err := r.from.Get(f, set, keys[set])
		if err != nil {
			return err
		}
		r.out.Read += len(keys[set])
		found = append(found, listed...)
	}
	pools, err := r.pools(f, found)
	if err != nil {
		return err
	}
	r.add(found, pools)
	return nil
}

// pools reads the elements of Pools, and of LimitedPools, that frontends lead to, each once.
func (r *counterReading) pools(f ipfamily.Family, frontends []nft.Listed) ([]nft.Listed, error) {
	var keys, limited []nft.Element
	asked := map[uint32]bool{}
	for i := range frontends {
		if id := frontends[i].PoolID(); frontends[i].InPools() && !asked[id] {
			asked[id] = true
			keys, limited = append(keys, nft.PoolKey(id)), append(limited, nft.LimitedKey(id))
		}
	}
	if len(keys) == 0 {
		return nil, nil
	}
	r.out.Read += len(keys) + len(limited)
	found, err := r.from.Get(f, nft.Pools, keys)
	if err != nil {
		return nil, err
	}
	counts, err := r.from.Get(f, nft.LimitedPools, limited)
	return append(found, counts...), err
}

// add answers with frontends, given their elements of Pools and LimitedPools. One whose pool is not there is shown
// without endpoints.
func (r *counterReading) add(frontends, pools []nft.Listed) {
	byID, over := make(map[uint32]*nft.Element, len(pools)), map[uint32]uint64{}
	for i := range pools {
		if id := pools[i].ID(); pools[i].Set == nft.LimitedPools {
			over[id] = pools[i].Packets
		} else {
			byID[id] = &pools[i].Element
		}
	}
	for i := range frontends {
		l, pool := &frontends[i], &frontends[i].Element
		if l.IsIndirect() {
			continue
		}
		if there := byID[l.PoolID()]; there != nil && l.InPools() {
			pool = there
		}
		c := dataplane.NamedCount{}
		c.FrontendCount, _ = l.FrontendCount(pool)
		c.OverLimit = over[c.Pool]
		c.Uncounted = l.Set.IsUncounted()
		c.Port, _ = l.PortName(c.Key.Protocol)
		r.out.Frontends = append(r.out.Frontends, c)
	}
}

// maxEndpointKeys bounds how many counters of endpoints are read at a time, unless all are asked for.
const maxEndpointKeys = 4096

// endpoints reads the counters of the endpoints of frontends. Those with session affinity count in sticky-endpoints,
// where every connection does, and not only that which was balanced.
func (r *counterReading) endpoints(f ipfamily.Family, of []dataplane.FrontendCount, whole bool) error {
	done := map[uint32]bool{} // frontends of a port share a pool
	asked := 0
	for i := range of {
		fe := &of[i]
		if fe.Key.Addr.Is4() != (f == ipfamily.IPv4) || done[fe.Pool] || fe.Endpoints == 0 {
			continue
		}
		if !whole && asked+fe.Endpoints > maxEndpointKeys {
			continue
		}
		asked += fe.Endpoints
		done[fe.Pool] = true
		if err := r.poolEndpoints(f, fe); err != nil {
			return err
		}
	}
	return nil
}

func (r *counterReading) poolEndpoints(f ipfamily.Family, fe *dataplane.FrontendCount) error {
	key := nft.FrontendKey(fe)
	found, err := r.from.Get(f, key.Set, []nft.Element{key})
	if err != nil {
		return err
	}
	pools, err := r.pools(f, found)
	if err != nil {
		return err
	}
	if found = append(found, pools...); len(found) == 0 {
		return nil
	}
	ask := found[len(found)-1].SlotKeys(fe.Key.Protocol)
	if len(ask) == 0 {
		return nil
	}
	slots, err := r.from.Get(f, ask[0].Set, ask)
	if err != nil {
		return err
	}
	r.out.Read += 1 + len(ask)
	bySlot := func() {
		for i := range slots {
			r.out.Endpoints = append(r.out.Endpoints, slots[i].SlotCount())
		}
	}
	if !fe.Sticky {
		bySlot()
		return nil
	}
	keys := make([]nft.Element, len(slots))
	for i := range slots {
		keys[i] = nft.MemberKey(fe.Pool, slots[i].Target())
	}
	members, err := r.from.Get(f, nft.StickyEndpoints, keys)
	if err != nil {
		return err
	}
	r.out.Read += len(keys)
	if len(members) == 0 { // the budget for counters leaves them out
		bySlot()
	}
	for i := range members {
		r.out.Endpoints = append(r.out.Endpoints, members[i].MemberCount())
	}
	return nil
}
