package nft

import (
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Model is what the kernel holds, as far as everything that was planned has been written. The zero value holds nothing. A
// transaction that the kernel did not take is taken back by Rollback.
type Model struct {
	// Fixed says that this kernel's sets keep the size they were made with, as those before Linux 6.3 do.
	Fixed bool

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
	digest              Digest
	// revision is the number that the table has; 0 means that it has none we know of.
	revision uint32
}

// undo is what takes a transaction back.
type undo struct {
	// whole, if not nil, is the model as it was before everything was planned anew.
	whole *Model
	// The rest is what single changes did before that.
	services []wasService
	cidrs    []netip.Prefix
	tables   [len(Families)]tableModel
}

type wasService struct {
	name   snapshot.Name
	before *service
}

// Filled says whether anything was ever planned.
func (m *Model) Filled() bool { return m.filled }

// Plan gives the transaction that takes the kernel to a state, and moves the model there. The change says which Services may
// differ from the state planned before; a model that holds nothing takes everything. What Unread names must have been learnt.
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
	p.chains()
	m.followElements()
	p.chainsFollow()
	if m.overfull() {
		m.rebuildInstead(p.txn)
		return p.txn
	}
	p.grow()
	p.revise()
	return p.txn
}

// Rollback takes back a transaction that is not in the kernel: the last one that was planned.
func (m *Model) Rollback(t *Txn) {
	u := &t.undo
	if u.whole != nil {
		*m = *u.whole
	}
	p := m.planner()
	for _, was := range u.services {
		m.release(m.services[was.name])
	}
	for _, was := range u.services {
		m.register(was.before)
		p.move(was.name, m.held(was.name), was.before)
	}
	p.chains()
	m.cidrs, m.tables = u.cidrs, u.tables
}

// held gives what a Service is for us, never nil.
func (m *Model) held(name snapshot.Name) *service {
	if s := m.services[name]; s != nil {
		return s
	}
	return &service{}
}

func (m *Model) planner() *planner {
	p := &planner{m: m, txn: &Txn{undo: undo{cidrs: m.cidrs, tables: m.tables}}}
	for i := range p.chainsBefore {
		p.chainsBefore[i] = map[ChainID]int{}
	}
	return p
}

// fill plans everything for a kernel that holds nothing, or nothing known.
func (m *Model) fill(s *dataplane.State) *Txn {
	whole := *m
	*m = Model{
		Fixed: m.Fixed, filled: true, services: make(map[snapshot.Name]*service, len(s.Services)), pools: map[uint32]poolID{},
		minSize: m.minSize,
	}
	for i, f := range Families {
		m.tables[i].structure = StructureOf(s, f)
	}
	m.emptyTables()
	names, services := sortedNames(s.Services), make([]*service, len(s.Services))
	for i, name := range names {
		services[i] = compileService(s.Services[name])
	}
	p := m.planAll(names, services, s.ServiceCIDRs, nil)
	p.create(false)
	p.txn.undo = undo{whole: &whole, cidrs: whole.cidrs, tables: whole.tables}
	return p.txn
}

// Rebuild plans everything the model holds anew, with sets that are large enough. The affinity maps stay, and so does which
// endpoint has which slot.
func (m *Model) Rebuild() *Txn {
	p := m.again(nil)
	p.create(true)
	return p.txn
}

// letGo has a transaction that makes everything anew delete the chains that another would have: those stay otherwise.
func (t *Txn) letGo(instead *Txn) {
	for i := range t.Tables {
		t.Tables[i].DelChains, t.Tables[i].DelForeign = instead.Tables[i].DelChains, instead.Tables[i].DelForeign
	}
}

// Recreate is Rebuild in new tables: it makes no use of anything that is there.
func (m *Model) Recreate() *Txn {
	p := m.again(nil)
	p.create(false)
	return p.txn
}

// again plans all the model holds as additions to empty sets. Slots are those that were found, or as they are.
func (m *Model) again(found *[len(Families)]Found) *planner {
	whole := *m
	m.services, m.cidrs = make(map[snapshot.Name]*service, len(whole.services)), nil
	m.emptyTables()
	names, services := sortedNames(whole.services), make([]*service, len(whole.services))
	for i, name := range names {
		services[i] = whole.services[name]
		if found != nil || services[i].unread { // its slots become known
			services[i] = services[i].clone()
		}
	}
	p := m.planAll(names, services, whole.cidrs, found)
	p.txn.undo = undo{whole: &whole, cidrs: whole.cidrs, tables: whole.tables}
	return p
}

// clone copies a service as it was before its slots were assigned.
func (s *service) clone() *service {
	c := &service{clusterIPs: s.clusterIPs, ports: make([]*port, len(s.ports))}
	for i, p := range s.ports {
		q := *p
		for pool := range q.slots {
			q.slots[pool] = slices.Clone(q.slots[pool])
			slices.SortFunc(q.slots[pool], netip.AddrPort.Compare)
		}
		c.ports[i] = &q
	}
	return c
}

// planAll plans the given services, the names' in their order, for empty sets.
func (m *Model) planAll(names []snapshot.Name, services []*service, cidrs []netip.Prefix, found *[len(Families)]Found) *planner {
	p := m.planner()
	if found != nil {
		p.slotsFound = slotsOf(found)
	}
	p.reserve(services)
	nothing := &service{}
	for i, name := range names {
		p.settle(nothing, services[i])
		p.move(name, nothing, services[i])
	}
	p.cidrs(cidrs)
	p.chains()
	m.followElements()
	return p
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

// emptyTables leaves of the tables their structure, sizes and revision.
func (m *Model) emptyTables() {
	for i, f := range Families {
		m.tables[i] = tableModel{
			structure:  m.tables[i].structure,
			chains:     map[ChainID]int{},
			clusterIPs: map[netip.Addr]int{},
			hairpin:    map[netip.Addr]int{},
			size:       m.tables[i].size,
			digest:     m.tables[i].structure.digest(f),
			revision:   m.tables[i].revision,
		}
	}
}

// create puts the structure before everything that was planned into empty sets.
func (p *planner) create(keep bool) {
	for i, f := range Families {
		tm, tt := &p.m.tables[i], &p.txn.Tables[i]
		t := layout(f, tm.structure)
		for n := range t.Sets {
			t.Sets[n].Size = p.m.sizeFor(&t.Sets[n], tm.count[t.Sets[n].ID])
			tm.size[t.Sets[n].ID] = t.Sets[n].Size
		}
		tt.Create, tt.Keep, tt.Sweep = &t, keep, keep
		tt.Del, tt.Replaced = [NumSets][]Element{}, 0
		tm.revision++
		tt.Add[RevisionSet] = []Element{Revision{tm.revision, tm.digest}.element()}
	}
}

// revise replaces the revision of the tables that the transaction writes to.
func (p *planner) revise() {
	for i := range Families {
		tm, tt := &p.m.tables[i], &p.txn.Tables[i]
		if tt.empty() {
			continue
		}
		tt.Del[RevisionSet] = []Element{Revision{tm.revision, p.txn.undo.tables[i].digest}.element()}
		tm.revision++
		tt.Add[RevisionSet] = []Element{Revision{tm.revision, tm.digest}.element()}
	}
}

const defaultMinSize = 1024

// sizeFor gives the size of a set: room for half as much again, since a hash table does not grow. Trees have no size.
func (m *Model) sizeFor(s *Set, elements int) uint32 {
	if s.Interval || s.Size > 0 {
		return s.Size
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

// overfull says whether a set has more elements planned than it will ever take.
func (m *Model) overfull() bool {
	for i := range m.tables {
		for set, size := range m.tables[i].size {
			if m.Fixed && size > 0 && m.tables[i].count[set] > int(size) {
				return true
			}
		}
	}
	return false
}

// grow gives the sets that are nearly full a larger size, while there is still room for what may come before it is seen that
// this kernel does not do that.
func (p *planner) grow() {
	if p.m.Fixed {
		return
	}
	for i, f := range Families {
		tm := &p.m.tables[i]
		for set, size := range tm.size {
			if size == 0 || tm.count[set] <= int(size-size/8) {
				continue
			}
			s := SetByID(SetID(set))
			if s.Size > 0 {
				continue
			}
			s.Size = p.m.sizeFor(&s, tm.count[set])
			tm.size[set] = s.Size
			p.txn.Tables[f.index()].Resize = append(p.txn.Tables[f.index()].Resize, s)
		}
	}
}

// MakeRoom has a transaction, the last one planned, give its sets room for what goes beside what comes: written in steps, a set holds
// both for a while. Where sets cannot grow, the transaction becomes one that makes everything anew, if it has to.
func (m *Model) MakeRoom(t *Txn) {
	for i := range t.Tables {
		tm, tt := &m.tables[i], &t.Tables[i]
		for set, size := range tm.size {
			s, need := SetByID(SetID(set)), tm.count[set]+tt.leaving(SetID(set))
			if tt.Create != nil || size == 0 || s.Size > 0 || need <= int(size) {
				continue
			}
			if m.Fixed {
				m.rebuildInstead(t)
				return
			}
			s.Size = m.sizeFor(&s, need)
			tm.size[set] = s.Size
			tt.Resize = slices.DeleteFunc(tt.Resize, func(r Set) bool { return r.ID == s.ID })
			tt.Resize = append(tt.Resize, s)
		}
	}
}

// rebuildInstead turns a transaction, the last one planned, into one that makes everything anew.
func (m *Model) rebuildInstead(t *Txn) {
	undo, again := t.undo, m.Rebuild()
	again.letGo(t)
	if undo.whole == nil {
		undo.whole = again.undo.whole
	}
	again.undo = undo
	*t = *again
}

// Sized tells the model which size a set turned out to have.
func (m *Model) Sized(f Family, set SetID, size uint32) { m.tables[f.index()].size[set] = size }

// Revision gives that of a table after the last transaction that was planned.
func (m *Model) Revision(f Family) Revision {
	tm := &m.tables[f.index()]
	return Revision{tm.revision, tm.digest}
}

// newPoolID hashes to the id of a pool. Ids lie apart from the priorities packets carry by themselves.
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

// release frees the pool ids of a service, which may be nil; register takes them back.
func (m *Model) release(s *service) {
	s.eachPool(func(id uint32, _ poolID) { delete(m.pools, id) })
}

func (m *Model) register(s *service) {
	s.eachPool(func(id uint32, p poolID) { m.pools[id] = p })
}

func (s *service) eachPool(do func(id uint32, p poolID)) {
	if s == nil {
		return
	}
	for _, p := range s.ports {
		for i, id := range p.stickyIDs {
			if id != 0 {
				do(id, poolID{p.id, poolIndex(i)})
			}
		}
	}
}

// Remembers says whether an element of Affinity names an endpoint that its pool has.
func (m *Model) Remembers(f Family, e *Element) bool {
	id, ep := e.AffinityOf(f)
	pool, ok := m.pools[id]
	if !ok || pool.port.family != f {
		return false
	}
	port := m.held(pool.port.name.Service).port(pool.port)
	if port == nil {
		return false
	}
	return slices.Contains(port.members(int(pool.pool)), ep)
}
