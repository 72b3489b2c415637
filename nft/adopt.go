package nft

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Found is what one of our tables was found to be when it was read back.
type Found struct {
	Revision Revision
	// Sizes are those of the sets. Counts are how many elements they have, 0 if the kernel does not tell.
	Sizes  [NumSets]uint32
	Counts [NumSets]int
	// Chains holds every chain of a name of ours; true if it and its rules are as they should be. Foreign are the others.
	Chains  map[ChainID]bool
	Foreign []string
	// Elements are those of all sets but Affinity and RevisionSet; they are read only if something is to be corrected.
	// Revisions are the elements of RevisionSet.
	Elements  [NumSets][]Element
	Revisions []Element
}

// Adopt compares what was found with what the model holds after its first Plan. If both are the same, nothing of that plan needs
// to be written: the model takes over the sizes and the revision. Then it is not known which endpoint has which slot, but
// that only matters to Services that change: see Unread.
func (m *Model) Adopt(found *[len(Families)]Found) bool {
	for i := range found {
		f := &found[i]
		if f.Revision.Digest != m.tables[i].digest || len(f.Foreign) > 0 || !f.sound(m.Structure(Families[i]).Chains) {
			return false
		}
	}
	for i := range found {
		m.tables[i].revision, m.tables[i].size = found[i].Revision.Number, found[i].Sizes
	}
	for _, s := range m.services {
		s.unread = false
		for _, p := range s.ports {
			for _, slots := range p.slots {
				slices.SortFunc(slots, netip.AddrPort.Compare) // as Learn expects those that nobody knows
				s.unread = s.unread || len(slots) > 1
			}
		}
	}
	return true
}

// sound says whether all of some chains are there and as they should be, and no other.
func (f *Found) sound(chains []Chain) bool {
	return len(f.Chains) == len(chains) && !slices.ContainsFunc(chains, func(c Chain) bool { return !f.Chains[c.ID] })
}

// Correct plans the smallest transaction that takes what was found, elements included, to what the model holds. Slots stay as
// they were found.
func (m *Model) Correct(found *[len(Families)]Found) *Txn {
	for i := range found {
		m.tables[i].size = found[i].Sizes
	}
	p := m.again(found)
	for i := range found {
		m.tables[i].revision = found[i].Revision.Number
		p.correct(Families[i], &found[i])
	}
	if m.overfull() {
		m.rebuildInstead(p.txn)
		return p.txn
	}
	p.grow()
	for i := range found {
		tm, tt := &m.tables[i], &p.txn.Tables[i]
		if !tt.empty() || found[i].Revision.Digest != tm.digest {
			tm.revision++
			tt.Add[RevisionSet] = []Element{Revision{tm.revision, tm.digest}.element()}
			tt.Del[RevisionSet] = found[i].Revisions // whatever claims to be one
		}
	}
	return p.txn
}

// correct turns what was planned as additions to an empty table into the difference to what was found.
func (p *planner) correct(f Family, found *Found) {
	tt := &p.txn.Tables[f.index()]
	for set := range tt.Add {
		if SetID(set) != Affinity && SetID(set) != RevisionSet {
			tt.compare(SetID(set), found.Elements[set])
		}
	}
	tt.AddChains, tt.DelForeign, tt.Sweep = nil, found.Foreign, true
	wanted := p.m.Structure(f).Chains
	for _, c := range wanted {
		switch sound, there := found.Chains[c.ID]; {
		case !there:
			tt.AddChains = append(tt.AddChains, c)
		case !sound:
			tt.Rewrite = append(tt.Rewrite, c)
		}
	}
	for id := range found.Chains {
		if !slices.ContainsFunc(wanted, func(c Chain) bool { return c.ID == id }) {
			tt.DelChains = append(tt.DelChains, id)
		}
	}
	slices.SortFunc(tt.DelChains, func(a, b ChainID) int { return compareChains(b, a) })
}

// elementKey is what tells the elements of one set apart.
type elementKey struct {
	key    [maxKey]byte
	length uint8
	bits   uint8
}

func (e *Element) identity() elementKey { return elementKey{e.key, e.KeyLen, e.Bits} }

// compare leaves in Add what is not among the elements that were found, and puts into Del what is too much there.
func (tt *TableTxn) compare(set SetID, found []Element) {
	index := make(map[elementKey]*Element, len(found))
	for i := range found {
		index[found[i].identity()] = &found[i]
	}
	missing := tt.Add[set][:0]
	for _, e := range tt.Add[set] {
		held := index[e.identity()]
		delete(index, e.identity())
		if held != nil && held.same(&e) {
			continue
		}
		missing = append(missing, e)
		if held != nil {
			tt.Del[set] = append(tt.Del[set], *held)
			tt.Replaced++
		}
	}
	tt.Add[set] = missing
	for i := range found {
		if index[found[i].identity()] == &found[i] {
			tt.Del[set] = append(tt.Del[set], found[i])
		}
	}
}

// slotsKey is a frontend as it begins the keys of its slots.
type slotsKey struct {
	set  SetID
	addr netip.Addr
	port [8]byte // protocol and port, padded as in the key
}

func slotsKeyOf(set SetID, k dataplane.Key) slotsKey {
	e := frontendElement(set, k)
	return e.slots(0)
}

// slots gives the frontend that a key begins with; after is the length of what follows.
func (e *Element) slots(after int) slotsKey {
	n := int(e.KeyLen) - after - 8
	a, _ := netip.AddrFromSlice(e.key[:n])
	return slotsKey{e.Set, a, [8]byte(e.key[n : n+8])}
}

// slotOf gives the number and the endpoint of an element of Endpoints or OutsideEndpoints.
func (e *Element) slotOf() (n uint32, ep netip.AddrPort) {
	addr, _ := netip.AddrFromSlice(e.data[:e.DataLen-4])
	return binary.NativeEndian.Uint32(e.key[e.KeyLen-slotLen:]),
		netip.AddrPortFrom(addr, binary.BigEndian.Uint16(e.data[e.DataLen-4:]))
}

// slotsOf gathers the slots of all frontends that were found.
func slotsOf(found *[len(Families)]Found) map[slotsKey][]netip.AddrPort {
	out := map[slotsKey][]netip.AddrPort{}
	for i := range found {
		for _, set := range [...]SetID{Endpoints, OutsideEndpoints} {
			for j := range found[i].Elements[set] {
				e := &found[i].Elements[set][j]
				n, ep := e.slotOf()
				if n >= MaxSlots {
					continue
				}
				k := e.slots(slotLen)
				for int(n) >= len(out[k]) {
					out[k] = append(out[k], netip.AddrPort{})
				}
				out[k][n] = ep
			}
		}
	}
	return out
}

// found gives the slots that a port's pools have in the kernel.
func (p *planner) found(want *port) (slots [numPools][]netip.AddrPort) {
	for pool := range slots {
		if set, key, ok := want.slotsAt(poolIndex(pool)); ok {
			slots[pool] = p.slotsFound[slotsKeyOf(set, key)]
		}
	}
	return slots
}

// slotsAt gives a place where the slots of a pool can be read: all frontends that choose from it have the same.
func (p *port) slotsAt(pool poolIndex) (set SetID, key dataplane.Key, ok bool) {
	for i := range p.frontends {
		f := &p.frontends[i]
		switch chosen := (answer{pool: pool}); {
		case f.inside == chosen:
			return Endpoints, f.key, true
		case f.outside == chosen:
			return OutsideEndpoints, f.key, true
		}
	}
	return 0, key, false
}

// Slots are those of one pool, as the kernel has them.
type Slots struct {
	Family Family
	// Keys are the elements to read, only their keys set. The reader leaves in them what the kernel holds under these keys.
	Keys []Element

	service snapshot.Name
	port    portID
	pool    poolIndex
}

// Unread gives the slots that have to be read, and given to Learn, before a change of these Services can be planned.
func (m *Model) Unread(names []snapshot.Name) []Slots {
	var out []Slots
	for _, name := range names {
		s := m.services[name]
		if s == nil || !s.unread {
			continue
		}
		for _, p := range s.ports {
			for pool := range p.slots {
				set, key, ok := p.slotsAt(poolIndex(pool))
				if n := len(p.slots[pool]); ok && n > 1 {
					x := Slots{Family: p.id.family, service: name, port: p.id, pool: poolIndex(pool), Keys: make([]Element, n)}
					for i := range n {
						x.Keys[i] = slotElement(set, key, i, p.slots[pool][i])
					}
					out = append(out, x)
				}
			}
		}
	}
	return out
}

// Learn takes what was read of the slots that Unread named. It is not ok if the kernel does not hold the endpoints that it
// should: then somebody changed it.
func (m *Model) Learn(read []Slots) (ok bool) {
	learnt := make([][]netip.AddrPort, len(read))
	for i, x := range read {
		learnt[i] = make([]netip.AddrPort, len(x.Keys))
		for _, e := range x.Keys {
			n, ep := e.slotOf()
			if int(n) >= len(x.Keys) {
				return false
			}
			learnt[i][n] = ep
		}
		sorted := slices.Clone(learnt[i])
		slices.SortFunc(sorted, netip.AddrPort.Compare)
		if !slices.Equal(sorted, m.held(x.service).port(x.port).slots[x.pool]) {
			return false
		}
	}
	for i, x := range read {
		m.held(x.service).port(x.port).slots[x.pool] = learnt[i]
		m.services[x.service].unread = false
	}
	return true
}

// Holds gives the elements that the kernel should hold of some Services, in the order of Families. Their slots must be known.
func (m *Model) Holds(names []snapshot.Name) [len(Families)][NumSets][]Element {
	scratch := &Model{pools: m.pools, services: map[snapshot.Name]*service{}}
	for i := range scratch.tables {
		scratch.tables[i] = tableModel{chains: map[ChainID]int{}, clusterIPs: map[netip.Addr]int{}, hairpin: map[netip.Addr]int{}}
	}
	p := scratch.planner()
	for _, name := range names {
		if s := m.services[name]; s != nil {
			p.move(name, &service{}, s)
		}
	}
	var out [len(Families)][NumSets][]Element
	for i := range out {
		out[i] = p.txn.Tables[i].Add
	}
	return out
}

// Names gives the Services the model holds, sorted.
func (m *Model) Names() []snapshot.Name { return sortedNames(m.services) }

// Count gives how many elements a set should hold.
func (m *Model) Count(f Family, set SetID) int { return m.tables[f.index()].count[set] }

// Askers gives, of each of some elements, the Services for whose sake a transaction, the last one planned, adds it.
func (m *Model) Askers(t *Txn, refused *[len(Families)][]Element) (out [len(Families)][][]snapshot.Name) {
	names := make([]snapshot.Name, 0, len(t.undo.services))
	for _, was := range t.undo.services {
		names = append(names, was.name)
	}
	if t.undo.whole != nil {
		names = m.Names()
	}
	type place struct {
		set SetID
		key elementKey
	}
	var places [len(Families)]map[place][]int
	for f, elements := range refused {
		places[f], out[f] = map[place][]int{}, make([][]snapshot.Name, len(elements))
		for i := range elements {
			at := place{elements[i].Set, elements[i].identity()}
			places[f][at] = append(places[f][at], i)
		}
	}
	for i, name := range names { // of which there may be many: each is looked at once
		for f, sets := range m.Holds(names[i : i+1]) {
			if len(places[f]) == 0 {
				continue
			}
			for set := range sets {
				for e := range sets[set] {
					for _, n := range places[f][place{SetID(set), sets[set][e].identity()}] {
						out[f][n] = append(out[f][n], name)
					}
				}
			}
		}
	}
	return out
}

// SlotKeys gives the keys of the slots that elements of Services or OutsideServices lead to.
func SlotKeys(set SetID, frontends []Element) []Element {
	var keys []Element
	for _, e := range frontends {
		if e.Chain.Kind < numFixedChains {
			continue
		}
		for n := range min(e.Chain.N, MaxSlots) {
			slot := Element{Set: set, KeyLen: e.KeyLen, key: e.key}
			slot.addKeyWord(n)
			keys = append(keys, slot)
		}
	}
	return keys
}

// Ranges gives all elements that a set of ranges should hold, in the order of Families.
func (m *Model) Ranges(set SetID) (out [len(Families)][]Element) {
	if set == ServiceCIDRs {
		for _, c := range m.cidrs {
			i := familyOf(c.Addr()).index()
			out[i] = append(out[i], prefixElement(set, c))
		}
		return out
	}
	for _, s := range m.services {
		for _, p := range s.ports {
			i := p.id.family.index()
			for j := range p.frontends {
				for _, c := range p.frontends[j].sources {
					out[i] = append(out[i], sourceElement(p.frontends[j].key, c))
				}
			}
		}
	}
	return out
}
