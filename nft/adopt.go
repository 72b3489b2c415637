package nft

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Found is one of our tables as it was read back from the kernel.
type Found struct {
	Revision Revision
	Digests  Digests
	// Counts is the number of elements of each set, 0 if the kernel does not report it.
	Counts [NumSets]int
	// Chains holds every chain whose name is one of ours; true if it and its rules are in sync. Foreign are the names of
	// all other chains.
	Chains  map[ChainID]bool
	Foreign []string
	// Misled says that verdict maps do not lead to just these chains.
	Misled bool
	// Missing are the sets that a table should have and has not, and Extra those that it has though nothing needs them.
	Missing, Extra []SetID
	// Elements are those of all sets but Affinity, RevisionSet and DigestSet; they are read only for a repair. Revisions
	// and DigestElements are the elements of the last two.
	Elements                  [NumSets][]Element
	Revisions, DigestElements []Element
}

// Stale says which buckets of the tables' contents are out of sync. Shared is the bucket of what belongs to no Service
// alone.
type Stale [numBuckets + 1]bool

// AllStale is the state of tables that others may have changed.
func AllStale() *Stale {
	var s Stale
	for i := range s {
		s[i] = true
	}
	return &s
}

// Any reports whether any bucket is stale.
func (s *Stale) Any() bool { return *s != Stale{} }

// All reports whether every bucket is stale.
func (s *Stale) All() bool { return *s == *AllStale() }

// Shared reports whether what belongs to no Service alone is stale.
func (s *Stale) Shared() bool { return s[sharedBucket] }

// Element reports whether the bucket of an element is stale.
func (s *Stale) Element(e *Element) bool { return s[e.bucket()] }

// Service reports whether a Service, "namespace/name", is stale.
func (s *Stale) Service(name string) bool { return s[bucketFor(name)] }

// Stale compares what was found with what a model holds after Load.
func (m *Model) Stale(found *ipfamily.Per[Found]) *Stale {
	var s Stale
	for i := range found {
		f, tm := &found[i], &m.tables[i]
		if f.Revision.Counted == "some" || f.Revision == (Revision{}) || f.Revision.Asked != tm.asked {
			return AllStale()
		}
		if slices.ContainsFunc(f.Missing, func(set SetID) bool { return tm.count[set] > 0 }) {
			return AllStale() // whose elements are missing, no digest tells
		}
		for b := range numBuckets {
			s[b] = s[b] || f.Digests[b] != tm.digests[b]
		}
		s[sharedBucket] = s[sharedBucket] || f.Revision.Digest != tm.digests[sharedBucket] || len(f.Foreign) > 0 ||
			!f.intact(m.Structure(ipfamily.All[i]).Chains)
	}
	return &s
}

// Adopt takes over what was found wherever it is not stale: that is not rewritten. It does not read which endpoint has
// which slot, because that only matters when a Service changes: see UnknownSlots.
func (m *Model) Adopt(found *ipfamily.Per[Found], stale *Stale) {
	for i := range found {
		m.tables[i].revision = found[i].Revision.Number
	}
	for name, s := range m.services {
		s.slotsUnknown = false
		if stale.Service(name.String()) {
			continue
		}
		for _, p := range s.ports {
			for i := range p.pools {
				p.pools[i].sortSlots() // as SetSlots expects unknown slots
				s.slotsUnknown = s.slotsUnknown || p.pools[i].anySlot()
			}
		}
	}
}

// AdoptCounting makes a loaded model count as the found tables do, if the budget allows it. Differences are rewritten
// later, in small transactions.
func (m *Model) AdoptCounting(found *ipfamily.Per[Found]) {
	level := slices.Index(countingNames[:], found[0].Revision.Counted)
	if level < 0 || found[1].Revision.Counted != found[0].Revision.Counted || Counting(level) == m.counting {
		return
	}
	m.counting = Counting(level)
	p := m.planner()
	p.silent = true
	for _, name := range m.Names() {
		p.move(name, m.services[name], m.services[name].counted(m.quota()))
	}
	p.chains()
	p.recount(needs{}, true)
}

// intact reports whether exactly a table's sets and chains are there, and its chains in sync.
func (f *Found) intact(chains []Chain) bool {
	return !f.Misled && len(f.Missing)+len(f.Extra) == 0 && len(f.Chains) == len(chains) &&
		!slices.ContainsFunc(chains, func(c Chain) bool { return !f.Chains[c.ID] })
}

// Correct plans the smallest transaction that repairs what was found, including stale elements. Slots stay as they were
// found.
func (m *Model) Correct(found *ipfamily.Per[Found], stale *Stale) *Txn {
	p := m.planner()
	wanted := m.wanted(found, stale)
	for i, f := range ipfamily.All {
		tt := &p.txn.Tables[i]
		tt.Add = wanted[i]
		tt.Sweep = true // whoever wrote what is corrected may have ended before it swept
		p.correct(f, &found[i], stale)
	}
	for i, f := range ipfamily.All {
		tm, tt := &m.tables[i], &p.txn.Tables[i]
		tt.Add[DigestSet] = tm.digests.elements()
		replaced := tt.Replaced // which does not count them
		tt.compare(DigestSet, found[i].DigestElements)
		tt.Replaced = replaced
		tm.revision = found[i].Revision.Number
		if tt.empty() && len(tt.Add[DigestSet])+len(tt.Del[DigestSet]) == 0 && m.Revision(f) == found[i].Revision {
			continue
		}
		tm.revision = p.number(tm.revision)
		tt.Del[RevisionSet] = found[i].Revisions // whatever claims to be one
		tt.Add[RevisionSet] = []Element{m.Revision(f).element()}
	}
	return p.txn
}

// wanted returns the elements that the model holds in stale buckets, each endpoint in the slot in which it was found.
func (m *Model) wanted(found *ipfamily.Per[Found], stale *Stale) (out ipfamily.Per[[NumSets][]Element]) {
	slots := slotsOf(found)
	for name, s := range m.services {
		if !stale.Service(name.String()) {
			continue
		}
		s = s.cloneUnassigned()
		for _, p := range s.ports {
			for i := range p.pools {
				pl := &p.pools[i]
				pl.slots = pl.assigned(slots[slotsKey{p.id.family, pl.id}])
			}
		}
		m.services[name] = s
	}
	out = m.elementsWhere(func(name snapshot.Name) bool { return stale.Service(name.String()) })
	for i := range out {
		var elements [NumSets][]Element
		if stale.Shared() {
			elements = m.tables[i].sharedElements()
		}
		for _, set := range shared {
			out[i][set] = elements[set]
		}
	}
	if stale.Shared() {
		for _, set := range trees {
			for i, elements := range m.Whole(set) {
				out[i][set] = elements
			}
		}
		for i := range out {
			out[i][SettingsSet], out[i][NodeMACs] = settingElements(m.settings), macElements(m.macs)
		}
	}
	return out
}

// shared are the sets whose elements belong to no Service alone.
var shared = [...]SetID{Addresses, SourceKinds, Picks, SplitPicks, PoolPicks, Kinds, Sources, Timeouts, ClientRates,
	ServiceCIDRs, SharedRanges, Hairpin, SettingsSet, NodeMACs}

// trees are the sets for which IsTree is true, in the order of treeRanges.
var trees = [...]SetID{ServiceCIDRs, SharedRanges}

// IsShared reports whether a set's elements belong to no Service alone.
func (s SetID) IsShared() bool { return slices.Contains(shared[:], s) }

// correct reduces what was planned for an empty table to the difference from what was found.
func (p *planner) correct(f ipfamily.Family, found *Found, stale *Stale) {
	tt := &p.txn.Tables[f]
	for set := range NumSets {
		if set.IsContent() {
			tt.compare(set, found.Elements[set])
		}
	}
	if !stale.Shared() {
		return
	}
	tt.DelForeign = found.Foreign
	wanted := p.m.Structure(f)
	for _, id := range found.Missing {
		tt.AddSets = append(tt.AddSets, SetByID(id))
	}
	tt.DelSets = found.Extra
	for _, c := range wanted.Chains {
		switch sound, there := found.Chains[c.ID]; {
		case !there:
			tt.AddChains = append(tt.AddChains, c)
		case !sound:
			tt.Rewrite = append(tt.Rewrite, c)
		}
	}
	for id := range found.Chains {
		if !slices.ContainsFunc(wanted.Chains, func(c Chain) bool { return c.ID == id }) {
			tt.DelChains = append(tt.DelChains, id)
		}
	}
	tt.sortChains()
}

// elementKey identifies an element within its set.
type elementKey struct {
	key    [maxKey]byte
	length uint8
	bits   uint8
}

func (e *Element) identity() elementKey { return elementKey{e.key, e.KeyLen, e.Bits} }

// compare removes from Add what was found already, and adds to Del what was found but is not wanted.
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
			if set.hasClass() && SetByID(set).Counter && held.Leads().IsNumbered() == e.Leads().IsNumbered() {
				tt.Keep = append(tt.Keep, e) // it refused packets before and after, or served them
			}
		}
	}
	tt.Add[set] = missing
	for i := range found {
		if index[found[i].identity()] == &found[i] {
			tt.Del[set] = append(tt.Del[set], found[i])
		}
	}
}

// slotsOf collects the slots of all pools that were found.
func slotsOf(found *ipfamily.Per[Found]) map[slotsKey][]netip.AddrPort {
	out := map[slotsKey][]netip.AddrPort{}
	for i, f := range ipfamily.All {
		for _, set := range slotSets {
			elements := found[i].Elements[set]
			for j := range elements {
				e := &elements[j]
				n, k := e.Slot(), slotsKey{f, e.ID()}
				if int(n) >= len(elements) { // it is nobody's
					continue
				}
				for int(n) >= len(out[k]) {
					out[k] = append(out[k], netip.AddrPort{})
				}
				out[k][n] = e.Target()
			}
		}
	}
	return out
}

// slotSets are the maps of endpoints.
var slotSets = [...]SetID{Endpoints, UncountedEndpoints}

// Slots are the slots of one pool in the kernel.
type Slots struct {
	Family ipfamily.Family
	// Keys are the elements to read, with only their keys set. The reader replaces them with what the kernel holds under
	// these keys.
	Keys []Element

	service snapshot.Name
	port    portID
	pool    poolIndex
}

// UnknownSlots returns the slots that the caller must read, and pass to SetSlots, before it plans a change of these
// Services.
func (m *Model) UnknownSlots(names []snapshot.Name) []Slots {
	var out []Slots
	for _, name := range names {
		s := m.services[name]
		if s == nil || !s.slotsUnknown {
			continue
		}
		for _, p := range s.ports {
			for i := range numPools {
				if !p.pools[i].anySlot() {
					continue
				}
				x := Slots{Family: p.id.family, service: name, port: p.id, pool: i,
					Keys: make([]Element, len(p.pools[i].slots))}
				for slot, ep := range p.pools[i].slots {
					x.Keys[slot] = p.slotElement(i, slot, ep)
				}
				out = append(out, x)
			}
		}
	}
	return out
}

// SetSlots takes the slots that UnknownSlots named, as read from the kernel. It is not ok if the kernel holds other
// endpoints than it should: then somebody else changed them.
func (m *Model) SetSlots(read []Slots) (ok bool) {
	learnt := make([][]netip.AddrPort, len(read))
	for i, x := range read {
		learnt[i] = make([]netip.AddrPort, len(x.Keys))
		for _, e := range x.Keys {
			n := e.Slot()
			if int(n) >= len(x.Keys) {
				return false
			}
			learnt[i][n] = e.Target()
		}
		sorted := slices.Clone(learnt[i])
		slices.SortFunc(sorted, netip.AddrPort.Compare)
		if !slices.Equal(sorted, m.serviceOrEmpty(x.service).port(x.port).pools[x.pool].slots) {
			return false
		}
	}
	for i, x := range read {
		m.serviceOrEmpty(x.service).port(x.port).pools[x.pool].slots = learnt[i]
		m.services[x.service].slotsUnknown = false
	}
	return true
}

// ElementsOf returns the elements of some Services that the kernel should hold, in the order of Families. Their slots
// must be known.
func (m *Model) ElementsOf(names []snapshot.Name) ipfamily.Per[[NumSets][]Element] {
	of := make(map[snapshot.Name]bool, len(names))
	for _, name := range names {
		of[name] = true
	}
	if len(names) == len(m.services) {
		return m.elementsWhere(func(name snapshot.Name) bool { return of[name] })
	}
	return m.plannedElements(names)
}

func (m *Model) elementsWhere(which func(snapshot.Name) bool) ipfamily.Per[[NumSets][]Element] {
	return m.plannedElements(slices.DeleteFunc(m.Names(), func(name snapshot.Name) bool { return !which(name) }))
}

// plannedElements plans some Services for empty tables.
func (m *Model) plannedElements(names []snapshot.Name) (out ipfamily.Per[[NumSets][]Element]) {
	scratch := &Model{pools: m.pools, services: map[snapshot.Name]*service{}}
	for i := range scratch.tables {
		scratch.tables[i] = tableModel{chains: map[ChainID]int{}, needed: map[sharedAddr]int{}}
	}
	p := scratch.planner()
	for _, name := range names {
		if s := m.services[name]; s != nil {
			p.move(name, &service{}, s)
		}
	}
	for i := range out {
		out[i] = p.txn.Tables[i].Add
		for a := range p.kindsBefore[i] { // of which others may need something, too
			m.tables[i].addKinds(&out[i], a)
		}
	}
	return out
}

// Names returns the Services that the model holds, sorted.
func (m *Model) Names() []snapshot.Name { return sortedNames(m.services) }

// Count returns how many elements a set should hold.
func (m *Model) Count(f ipfamily.Family, set SetID) int { return m.tables[f].count[set] }

// OwnersOf returns, for each rejected element, the Services for which the transaction adds it. The transaction must be
// the last one planned.
func (m *Model) OwnersOf(t *Txn, refused *ipfamily.Per[[]Element]) (out ipfamily.Per[[][]snapshot.Name]) {
	names := make([]snapshot.Name, 0, len(t.undo.services))
	for _, was := range t.undo.services {
		names = append(names, was.name)
	}
	if len(names) == 0 { // what it adds may be of any Service
		names = m.Names()
	}
	type place struct {
		set SetID
		key elementKey
	}
	var places ipfamily.Per[map[place][]int]
	for f, elements := range refused {
		places[f], out[f] = map[place][]int{}, make([][]snapshot.Name, len(elements))
		for i := range elements {
			at := place{elements[i].Set, elements[i].identity()}
			places[f][at] = append(places[f][at], i)
		}
	}
	for i, name := range names { // of which there may be many: each is looked at once
		for f, sets := range m.plannedElements(names[i : i+1]) {
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

// InsideKeys returns the keys of the found frontends that lead to split or restrict, for each map that they may be in.
func (f *Found) InsideKeys() map[SetID][]Element {
	out := map[SetID][]Element{}
	for _, set := range frontendSets {
		for i := range f.Elements[set] {
			if e := &f.Elements[set][i]; e.IsIndirect() {
				for _, inside := range [...]SetID{InsideServices, UncountedInsideServices} {
					out[inside] = append(out[inside], frontendElement(inside, e.FrontendKey()))
				}
			}
		}
	}
	return out
}

// PoolKeys returns the keys of the found frontends' elements of Pools, each once.
func (f *Found) PoolKeys() (keys []Element) {
	seen := map[uint32]bool{}
	for _, set := range frontendSets {
		for i := range f.Elements[set] {
			if e := &f.Elements[set][i]; e.InPools() && !seen[e.PoolID()] {
				seen[e.PoolID()] = true
				keys = append(keys, PoolKey(e.PoolID()))
			}
		}
	}
	return keys
}

// SlotKeys returns the keys of the slots to which the found pools lead, for each map of slots.
func (f *Found) SlotKeys() map[SetID][]Element {
	proto := map[uint32]Protocol{}
	for _, set := range frontendSets {
		for i := range f.Elements[set] {
			e := &f.Elements[set][i]
			proto[e.PoolID()] = e.FrontendKey().Protocol
		}
	}
	out := map[SetID][]Element{Endpoints: nil, UncountedEndpoints: nil}
	for _, e := range classes(&f.Elements) {
		if p, ok := proto[e.PoolID()]; ok {
			set, _ := e.slots()
			out[set] = append(out[set], e.SlotKeys(p)...)
		}
	}
	return out
}

// MemberKeys returns the keys of the members that the found pools should have, judging by their slots, for each set of
// members.
func (f *Found) MemberKeys() map[SetID][]Element {
	out := map[SetID][]Element{StickyEndpoints: nil, UncountedStickyEndpoints: nil}
	sticky := map[uint32]bool{}
	for _, e := range classes(&f.Elements) {
		sticky[e.PoolID()] = e.Leads().Kind.isSticky()
	}
	known := map[elementKey]bool{} // since endpoints may have several slots
	for i := range f.Elements[UncountedEndpoints] {
		e := &f.Elements[UncountedEndpoints][i]
		if !sticky[e.ID()] {
			continue
		}
		member := memberElement(StickyEndpoints, e.ID(), e.Target())
		if known[member.identity()] {
			continue
		}
		known[member.identity()] = true
		for set := range out {
			member.Set = set
			out[set] = append(out[set], member)
		}
	}
	return out
}

// SlotKeys returns the keys of the slots of a pool, given an element that has its class.
func (e *Element) SlotKeys(proto Protocol) []Element {
	set, n := e.slots()
	keys := make([]Element, n)
	for slot := range keys {
		keys[slot] = idElement(set, e.PoolID())
		k := &keys[slot]
		k.key[k.KeyLen] = byte(proto)
		k.KeyLen += 4
		k.addKeyWord(uint32(slot))
	}
	return keys
}

// slots returns the map to which the class of an element leads, and the number of slots from which one is chosen: some
// of the last may be missing.
func (e *Element) slots() (set SetID, n uint32) {
	switch c := e.Leads(); c.Kind {
	case Pick, PickHash, PickHashPort:
		return Endpoints, c.N
	case UncountedPick, StickyPick, UncountedHash, UncountedHashPort, StickyHash:
		return UncountedEndpoints, c.N
	}
	return Endpoints, 0
}

// IsWhole reports whether Whole knows all elements of a set.
func (s SetID) IsWhole() bool {
	return setsByID[s].Interval || setsByID[s].Verdicts || s == SettingsSet || s == NodeMACs
}

// Whole returns all elements that a set of ranges, of settings or of verdicts should hold, in the order of Families.
func (m *Model) Whole(set SetID) (out ipfamily.Per[[]Element]) {
	switch {
	case set == SettingsSet:
		return ipfamily.Per[[]Element]{settingElements(m.settings), settingElements(m.settings)}
	case set == NodeMACs:
		return ipfamily.Per[[]Element]{macElements(m.macs), macElements(m.macs)}
	case setsByID[set].Verdicts:
		for i := range out {
			out[i] = VerdictElements(slices.Collect(maps.Keys(m.tables[i].chains)))[set]
		}
		return out
	}
	if n := slices.Index(trees[:], set); n >= 0 {
		for _, c := range m.ranges[n] {
			i := ipfamily.Of(c.Addr())
			out[i] = append(out[i], prefixElement(set, c))
		}
		return out
	}
	for name, s := range m.services {
		if set == RefusedShares {
			s.eachShare(func(p *port, i poolIndex) { out[p.id.family] = append(out[p.id.family], p.shareElement(i)) })
			continue
		}
		for i := range s.sources {
			for _, c := range s.sources[i].ranges {
				out[i] = append(out[i], sourcesElement(name, s.sources[i].id, c))
			}
		}
	}
	return out
}
