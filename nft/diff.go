package nft

import (
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Txn is one transaction: what has to be written to take the kernel from what it holds to what it should hold.
type Txn struct {
	// Tables are in the order of Families.
	Tables [len(Families)]TableTxn
	// Forget lists what the affinity maps must no longer name once the transaction is in. Elements of dynamic maps come
	// and go by themselves, and deleting one that is gone would fail the transaction.
	Forget []Forget
}

// TableTxn is one table's part of a transaction. It is written in this order: Create; all of Del; DelChains; the new chains
// and rules; all of Add.
type TableTxn struct {
	// Create, if not nil, replaces the whole table by a new one.
	Create *Table
	// Rewrite holds chains whose rules are replaced.
	Rewrite   []Chain
	AddChains []Chain
	DelChains []ChainID
	// Del and Add hold the elements by their set.
	Del, Add [NumSets][]Element
	// Replaced is how many elements are both in Del and in Add, under the same key with other contents.
	Replaced int
}

// Empty says whether the transaction writes nothing.
func (t *Txn) Empty() bool {
	for i := range t.Tables {
		tt := &t.Tables[i]
		if tt.Create != nil || len(tt.Rewrite)+len(tt.AddChains)+len(tt.DelChains) > 0 {
			return false
		}
		if count(tt.Del)+count(tt.Add) > 0 {
			return false
		}
	}
	return true
}

// count gives the number of elements in a table's Del or Add.
func count(by [NumSets][]Element) int {
	n := 0
	for _, elements := range by {
		n += len(elements)
	}
	return n
}

// Counts gives the number of elements; one that is replaced is neither added nor removed.
func (t *Txn) Counts() (added, replaced, removed int) {
	for i := range t.Tables {
		tt := &t.Tables[i]
		added += count(tt.Add) - tt.Replaced
		replaced += tt.Replaced
		removed += count(tt.Del) - tt.Replaced
	}
	return added, replaced, removed
}

// Forget names entries of an affinity map: those of the pool ID that point to Endpoint, or all of the pool if Endpoint is
// the zero value.
type Forget struct {
	Family   Family
	ID       uint32
	Endpoint netip.AddrPort
}

// Model is what the kernel holds, as far as everything that was planned has been written. The zero value holds nothing. After
// a failed transaction the kernel's content is unknown: start again from a zero Model.
type Model struct {
	filled   bool
	services map[snapshot.Name]*service
	cidrs    []netip.Prefix
	tables   [len(Families)]tableModel
	// pools are the ids in use; a pool's id is found from its name's hash, so that it is the same after a restart.
	pools map[uint32]poolID
	// minSize is the least size of a set; 0 means the default. Tests lower it, to see sets grow.
	minSize uint32
}

type poolID struct {
	port portID
	pool poolIndex
}

type tableModel struct {
	structure Structure
	// chains counts what leads to each numbered chain.
	chains map[ChainID]int
	// clusterIPs and hairpin count the services and ports that need the address.
	clusterIPs, hairpin map[netip.Addr]int
	count               [NumSets]int
	size                [NumSets]uint32
}

// planner gathers one transaction while it moves the model forward.
type planner struct {
	m   *Model
	txn *Txn
	// chainsBefore holds the count of each numbered chain that this transaction touches, as it was.
	chainsBefore [len(Families)]map[ChainID]int
}

// Plan gives the transaction that takes the kernel to a state, and moves the model there. The change says which Services may
// differ from the state planned before; a model that holds nothing takes everything.
func (m *Model) Plan(s *dataplane.State, change dataplane.Change) *Txn {
	if !m.filled {
		return m.fill(s)
	}
	p := m.planner()
	if change.Globals {
		p.globals(s)
	}
	for _, name := range change.Services {
		p.service(name, compileService(s.Services[name]))
	}
	if m.overfull() {
		return m.refill()
	}
	p.chains()
	return p.txn
}

func (m *Model) planner() *planner {
	p := &planner{m: m, txn: &Txn{}}
	for i := range p.chainsBefore {
		p.chainsBefore[i] = map[ChainID]int{}
	}
	return p
}

// fill plans everything for a kernel that holds nothing, or nothing known.
func (m *Model) fill(s *dataplane.State) *Txn {
	*m = Model{
		filled: true, services: make(map[snapshot.Name]*service, len(s.Services)), pools: map[uint32]poolID{}, minSize: m.minSize,
	}
	m.emptyTables()
	for i, f := range Families {
		m.tables[i].structure = StructureOf(s, f)
	}
	names, services := sortedNames(s.Services), make([]*service, len(s.Services))
	for i, name := range names {
		services[i] = compileService(s.Services[name])
	}
	return m.planAll(names, services, s.ServiceCIDRs)
}

// refill plans everything the model holds anew, with larger sets. Slots and pool ids stay as they are.
func (m *Model) refill() *Txn {
	held, cidrs := m.services, m.cidrs
	m.services, m.cidrs = make(map[snapshot.Name]*service, len(held)), nil
	m.emptyTables()
	names, services := sortedNames(held), make([]*service, len(held))
	for i, name := range names {
		services[i] = held[name]
	}
	return m.planAll(names, services, cidrs)
}

// planAll plans new tables with the given services, the names' in their order.
func (m *Model) planAll(names []snapshot.Name, services []*service, cidrs []netip.Prefix) *Txn {
	p := m.planner()
	p.reserve(services)
	for i, name := range names {
		p.service(name, services[i])
	}
	p.cidrs(cidrs)
	p.create()
	return p.txn
}

// reserve makes room for the elements of the large maps, which would otherwise be copied each time they outgrow it.
func (p *planner) reserve(services []*service) {
	var clusterIPs, frontends, slots [len(Families)]int
	for _, s := range services {
		for _, a := range s.clusterIPs {
			clusterIPs[familyOf(a).index()]++
		}
		for _, port := range s.ports {
			f := port.id.family.index()
			frontends[f] += len(port.frontends)
			for i := range port.frontends {
				slots[f] += len(port.insideSlots(&port.frontends[i]))
			}
		}
	}
	for f := range p.txn.Tables {
		p.txn.Tables[f].Add[Services] = make([]Element, 0, frontends[f])
		p.txn.Tables[f].Add[Endpoints] = make([]Element, 0, slots[f])
		p.txn.Tables[f].Add[ClusterIPs] = make([]Element, 0, clusterIPs[f])
		p.m.tables[f].clusterIPs = make(map[netip.Addr]int, clusterIPs[f])
	}
}

func (m *Model) emptyTables() {
	for i := range m.tables {
		m.tables[i] = tableModel{
			structure:  m.tables[i].structure,
			chains:     map[ChainID]int{},
			clusterIPs: map[netip.Addr]int{},
			hairpin:    map[netip.Addr]int{},
		}
	}
}

// create puts the structure before everything that was planned into new tables.
func (p *planner) create() {
	p.chains()
	for i, f := range Families {
		tm := &p.m.tables[i]
		t := layout(f, tm.structure)
		for n := range t.Sets {
			t.Sets[n].Size = max(t.Sets[n].Size, p.m.sizeFor(&t.Sets[n], tm.count[t.Sets[n].ID]))
			tm.size[t.Sets[n].ID] = t.Sets[n].Size
		}
		p.txn.Tables[i].Create = &t
		p.txn.Tables[i].Del, p.txn.Tables[i].Replaced = [NumSets][]Element{}, 0
	}
}

const defaultMinSize = 1024

// sizeFor gives the size of a set: room for half as much again, since a hash table does not grow. Trees have no size.
func (m *Model) sizeFor(s *Set, elements int) uint32 {
	if s.Interval {
		return 0
	}
	size := m.minSize
	if size == 0 {
		size = defaultMinSize
	}
	for int(size) < elements+elements/2 {
		size *= 2
	}
	return size
}

// overfull says whether a set has more elements planned than it takes.
func (m *Model) overfull() bool {
	for i := range m.tables {
		for set, size := range m.tables[i].size {
			if size > 0 && m.tables[i].count[set] > int(size) {
				return true
			}
		}
	}
	return false
}

// globals takes over what all Services share.
func (p *planner) globals(s *dataplane.State) {
	for i, f := range Families {
		tm := &p.m.tables[i]
		before, now := layout(f, tm.structure), layout(f, StructureOf(s, f))
		tm.structure = StructureOf(s, f)
		p.rewrite(f, before.Chains, now.Chains)
	}
	p.cidrs(s.ServiceCIDRs)
}

// rewrite replaces the chains that are not the same in two layouts.
func (p *planner) rewrite(f Family, before, now []Chain) {
	tt := &p.txn.Tables[f.index()]
	find := func(in []Chain, id ChainID) *Chain {
		if n := slices.IndexFunc(in, func(c Chain) bool { return c.ID == id }); n >= 0 {
			return &in[n]
		}
		return nil
	}
	for n := range now {
		switch old := find(before, now[n].ID); {
		case old == nil:
			tt.AddChains = append(tt.AddChains, now[n])
		case !sameRules(f, old.Rules, now[n].Rules):
			tt.Rewrite = append(tt.Rewrite, now[n])
		}
	}
	for n := range before {
		if find(now, before[n].ID) == nil {
			tt.DelChains = append(tt.DelChains, before[n].ID)
		}
	}
}

func sameRules(f Family, a, b []Rule) bool {
	return slices.EqualFunc(a, b, func(x, y Rule) bool { return x.Text(f) == y.Text(f) })
}

func (p *planner) cidrs(now []netip.Prefix) {
	prefixes(p.m.cidrs, now, func(c netip.Prefix) {
		p.del(familyOf(c.Addr()), prefixElement(ServiceCIDRs, c))
	}, func(c netip.Prefix) {
		p.add(familyOf(c.Addr()), prefixElement(ServiceCIDRs, c))
	})
	p.m.cidrs = now
}

// prefixes calls gone and come for the differences of two short lists.
func prefixes(before, now []netip.Prefix, gone, come func(netip.Prefix)) {
	for _, c := range before {
		if !slices.Contains(now, c) {
			gone(c)
		}
	}
	for _, c := range now {
		if !slices.Contains(before, c) {
			come(c)
		}
	}
}

// service takes a Service from what it was to what it should be.
func (p *planner) service(name snapshot.Name, now *service) {
	before := p.m.services[name]
	if before == nil {
		before = &service{}
	}
	for _, a := range now.clusterIPs {
		p.count(p.table(a).clusterIPs, a, +1, addrElement(ClusterIPs, a, 1))
	}
	for _, a := range before.clusterIPs {
		p.count(p.table(a).clusterIPs, a, -1, addrElement(ClusterIPs, a, 1))
	}
	for _, old := range before.ports {
		p.port(old, now.port(old.id))
	}
	for _, n := range now.ports {
		if before.port(n.id) == nil {
			p.port(nil, n)
		}
	}
	if len(now.ports)+len(now.clusterIPs) == 0 {
		delete(p.m.services, name)
	} else {
		p.m.services[name] = now
	}
}

func (s *service) port(id portID) *port {
	if n := slices.IndexFunc(s.ports, func(p *port) bool { return p.id == id }); n >= 0 {
		return s.ports[n]
	}
	return nil
}

func (p *planner) table(a netip.Addr) *tableModel { return &p.m.tables[familyOf(a).index()] }

// count adds to the number of those who need an element, and plans it when the first comes or the last goes. Callers let come
// before they let go: so what stays is never planned.
func (p *planner) count(m map[netip.Addr]int, a netip.Addr, by int, e Element) {
	before := m[a]
	if m[a] += by; m[a] == 0 {
		delete(m, a)
	}
	switch {
	case before == 0:
		p.add(familyOf(a), e)
	case before+by == 0:
		p.del(familyOf(a), e)
	}
}

func (p *planner) add(f Family, e Element) {
	tt := &p.txn.Tables[f.index()]
	tt.Add[e.Set] = append(tt.Add[e.Set], e)
	p.m.tables[f.index()].count[e.Set]++
	p.refer(f, e.Chain, +1)
}

func (p *planner) del(f Family, e Element) {
	tt := &p.txn.Tables[f.index()]
	tt.Del[e.Set] = append(tt.Del[e.Set], e)
	p.m.tables[f.index()].count[e.Set]--
	p.refer(f, e.Chain, -1)
}

func (p *planner) replace(f Family, before, now Element) {
	p.del(f, before)
	p.add(f, now)
	p.txn.Tables[f.index()].Replaced++
}

// refer counts what leads to a numbered chain, and to the chain that one leads to.
func (p *planner) refer(f Family, c ChainID, by int) {
	chains, before := p.m.tables[f.index()].chains, p.chainsBefore[f.index()]
	for ; c.Kind > numFixedChains; c = c.next() {
		if _, ok := before[c]; !ok {
			before[c] = chains[c]
		}
		chains[c] += by
	}
}

// chains plans the numbered chains that something leads to for the first time, and removes those nothing leads to any more.
func (p *planner) chains() {
	for i := range Families {
		tt, tm := &p.txn.Tables[i], &p.m.tables[i]
		for c, before := range p.chainsBefore[i] {
			switch now := tm.chains[c]; {
			case before == 0 && now > 0:
				tt.AddChains = append(tt.AddChains, numbered(c))
			case now == 0:
				if delete(tm.chains, c); before > 0 {
					tt.DelChains = append(tt.DelChains, c)
				}
			}
		}
		// A sticky chain goes to a pick chain, which must be there before it and gone after it.
		slices.SortFunc(tt.AddChains, func(a, b Chain) int { return compareChains(a.ID, b.ID) })
		slices.SortFunc(tt.DelChains, func(a, b ChainID) int { return compareChains(b, a) })
	}
}

func compareChains(a, b ChainID) int {
	if a.Kind != b.Kind {
		return int(a.Kind) - int(b.Kind)
	}
	return int(a.N) - int(b.N)
}

// poolName hashes to the id of a pool. Ids lie apart from the priorities packets carry by themselves.
func (m *Model) newPoolID(p poolID) uint32 {
	const base, mask = 0x56000000, 0xffffff
	h := fnv.New32a()
	h.Write([]byte(p.port.name.String()))
	h.Write([]byte{0, byte(p.port.name.Protocol), byte(p.port.family), byte(p.pool)})
	for id := h.Sum32() & mask; ; id = (id + 1) & mask {
		if _, taken := m.pools[base|id]; !taken && id != 0 {
			m.pools[base|id] = p
			return base | id
		}
	}
}
