package nft

import (
	"bytes"
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Model mirrors the kernel's tables after every planned transaction. The zero value holds nothing. Rollback
// undoes a transaction that the kernel rejected.
type Model struct {
	// Counters is how many counters elements may have, in both tables together; 0 means no limit.
	Counters int
	// NoIngress leaves clients' addresses unkept, whatever a state says: the kernel does not take the tables for that.
	NoIngress bool
	// Generation is the revision number of the next transaction, or of its first part; 0 means one more than the last. If
	// it is the kernel's own number of that transaction, a later process can tell that nobody has written anything since.
	Generation uint32

	filled   bool
	services map[snapshot.Name]*service
	ranges   treeRanges
	settings []string
	// macs are the elements of NodeMACs.
	macs   []snapshot.MAC
	tables ipfamily.Per[tableModel]
	// counting is the level for new elements. recount are the Services whose elements still have another level.
	counting Counting
	recount  []snapshot.Name
	// needs is what all Services need of the budget if no request is granted. requests are the Services that ask for
	// counters, by namespace, and requested sums up the namespaces that ask for at most one share.
	needs     needs
	requests  map[string]*counterRequests
	requested counterRequests
	// pools are the ids in use. A pool's id is found from the hash of its name, so that it is the same after a restart.
	pools map[uint32]poolID
}

// poolID is what an id stands for: a pool of a port or, with sourcesOf, the source ranges of a Service.
type poolID struct {
	port portID
	pool poolIndex
	// node is a node's name in keptPool; empty for the pool itself.
	node string
}

type tableModel struct {
	structure Structure
	// chains counts the references to each numbered chain.
	chains map[ChainID]int
	// needed counts the services and ports that need something of an address.
	needed  map[sharedAddr]int
	count   [NumSets]int
	digests Digests
	// asked is a digest of what is counted, or is not, because a Service asks for that.
	asked Digest
	// revision is the table's number; 0 means unknown.
	revision uint32
}

// sharedAddr is an address of which Services or ports need something.
type sharedAddr struct {
	need need
	addr netip.Addr
}

// undo holds what Rollback needs.
type undo struct {
	// before is the model as it was, but for its maps: these are the model's own, unless everything was planned anew.
	before Model
	// services are the Services that are no longer in the maps as they were; none if everything was planned.
	services []serviceBefore
	// earlier, if not nil, was planned before this transaction and is not written by itself.
	earlier *Txn
}

type serviceBefore struct {
	name   snapshot.Name
	before *service
}

// Filled reports whether anything was ever planned.
func (m *Model) Filled() bool { return m.filled }

// Counting returns the level of counting. Elements that were written before it changed may still have another level.
func (m *Model) Counting() Counting { return m.counting }

// Plan returns a transaction that takes the kernel towards a state, and updates the model. The change names the
// Services that may differ from the last state; a model that holds nothing plans everything. The caller must pass what
// UnknownSlots names to SetSlots first.
//
// A transaction has about limit elements at most, 0 meaning no limit, and never leaves half of a frontend. Txn.Left
// names what is still to be planned.
func (m *Model) Plan(s *dataplane.State, change dataplane.Change, limit int) *Txn {
	if !m.filled {
		return m.fill(s, limit)
	}
	p := m.planner()
	if change.Globals {
		change = change.With(dataplane.Change{Services: p.globals(s)})
	}
	p.plan(s, change.Services, limit)
	if change.Globals {
		p.txn.Left.Globals = len(p.txn.Left.Services) > 0
	}
	if change.Globals && !p.txn.Left.Globals { // what turns packets away comes after what would have served them
		p.shared(s)
	}
	p.structures()
	p.revise()
	return p.txn
}

// plan plans Services as the state has them, or as many as limit allows.
func (p *planner) plan(s *dataplane.State, names []snapshot.Name, limit int) {
	n := p.m.fitting(s, names, limit)
	// Checking everything that waits in each transaction would cost as much again for each. The last transaction checks
	// whether more can be counted.
	growth := p.m.additionalNeeds(s, names[:min(n+1, len(names))])
	if n < len(names) {
		p.recount(growth, false)
		p.planPart(s, names, limit)
		p.recountRequests()
		return
	}
	p.recount(growth, true)
	for _, name := range names {
		p.service(name, p.compile(s.Services[name]))
	}
	p.recountRequests()
}

// Fits reports whether some Services have so few elements, before and after, that they can be written at once.
func (m *Model) Fits(s *dataplane.State, names []snapshot.Name, limit int) bool {
	return m.fitting(s, names, limit) == len(names)
}

// fitting returns how many of the first Services have so few elements; all if there is no limit.
func (m *Model) fitting(s *dataplane.State, names []snapshot.Name, limit int) int {
	if limit <= 0 {
		return len(names)
	}
	n := 0
	for i, name := range names {
		n += m.serviceOrEmpty(name).size() + sizeOf(s.Services[name]) + m.serviceOrEmpty(name).rangesChange(s.Services[name])
		if n > limit {
			return i
		}
	}
	return len(names)
}

// planPart is plan for more Services than fit. A frontend may move from one to another, or from one port to another: it
// is deleted before it is added.
func (p *planner) planPart(s *dataplane.State, names []snapshot.Name, limit int) {
	left := &p.txn.Left.Services
	target := func(name snapshot.Name) *service { return p.compile(s.Services[name]) }
	for _, name := range names {
		done := true
		if before := p.m.services[name]; before != nil && before.losesFrontend(s.Services[name]) {
			var next *service
			next, done = p.stepToward(before, target(name), limit-p.planned, false)
			p.service(name, next)
		}
		if !done || p.planned >= limit {
			*left = names
			return
		}
	}
	var parts []snapshot.Name // which are large: what else waits goes first
	defer func() { *left = append(*left, parts...) }()
	for i, name := range names {
		before, next, done := p.m.serviceOrEmpty(name), target(name), true
		if room := limit - p.planned; next.size()+before.size()+before.rangesChange(s.Services[name]) > room {
			next, done = p.stepToward(before, next, room, true)
		}
		p.service(name, next)
		if !done {
			parts = append(parts, name)
		}
		if p.planned >= limit {
			*left = slices.Clone(names[i+1:])
			return
		}
	}
}

// stepToward takes a Service a step further.
func (p *planner) stepToward(before, want *service, room int, grow bool) (next *service, done bool) {
	next, done = before.stepToward(want, room, grow)
	level := p.m.quota().of(next)
	next.mixed = slices.ContainsFunc(next.ports, func(q *port) bool { return q.counting != level })
	return next, done
}

// losesFrontend reports whether a Service has a frontend that it should not have, or that belongs to another port.
func (s *service) losesFrontend(want *dataplane.Service) bool {
	type owned struct {
		port dataplane.PortName
		key  dataplane.Key
	}
	stay := map[owned]bool{}
	if want != nil {
		for _, sp := range want.Ports {
			for i := range sp.Frontends {
				stay[owned{sp.Name, sp.Frontends[i].Key}] = true
			}
		}
	}
	return slices.ContainsFunc(s.ports, func(p *port) bool {
		return slices.ContainsFunc(p.frontends, func(f frontend) bool { return !stay[owned{p.id.name, f.key}] })
	})
}

// Recount plans some of the Services whose elements have another level of counting than they should, up to about limit
// elements: at least one port. Their slots must be known: Recounts names the Services.
func (m *Model) Recount(n, limit int) *Txn {
	p := m.planner()
	names := m.recount[:min(n, len(m.recount))]
	done := 0
	for ; done < len(names) && p.planned < limit; done++ {
		held := m.services[names[done]]
		if held == nil {
			continue
		}
		next, all := held.counted(m.quota()), true
		if room := limit - p.planned; held.size()+next.size() > room {
			next, all = p.stepToward(held, next, room, true)
		}
		if p.service(names[done], next); !all {
			break
		}
	}
	m.recount = m.recount[done:]
	p.structures()
	p.revise()
	return p.txn
}

// Recounts returns up to n Services that the next Recount plans.
func (m *Model) Recounts(n int) []snapshot.Name { return m.recount[:min(n, len(m.recount))] }

// shallowCopy copies a service; its pools share their slots with it.
func (s *service) shallowCopy() *service {
	out := &service{name: s.name, counters: s.counters, mixed: s.mixed, clusterIPs: s.clusterIPs, silent: s.silent,
		pingable: s.pingable, balanced: s.balanced, sources: s.sources,
		ports: make([]*port, len(s.ports))}
	for i, p := range s.ports {
		q := *p
		out.ports[i] = &q
	}
	return out
}

// additionalNeeds is what some Services will need more than now, for each level.
func (m *Model) additionalNeeds(s *dataplane.State, names []snapshot.Name) (more needs) {
	for _, name := range names {
		n := m.needsOf(s.Services[name])
		n.add(m.needsWithout(m.serviceOrEmpty(name)), -1)
		for level := range n {
			more[level] += max(n[level], 0)
		}
	}
	return more
}

// needsOf returns what a Service will need at most; nil needs nothing.
func (m *Model) needsOf(svc *dataplane.Service) needs {
	frontends, endpoints := 0, 0
	if svc != nil && svc.Counters != snapshot.CountersNever {
		for _, sp := range svc.Ports {
			for i := range sp.Frontends {
				fe := &sp.Frontends[i]
				frontends++
				switch {
				case fe.Route(dataplane.Node).Pool != fe.Route(dataplane.Anyone).Pool:
					frontends += 2
				case fe.Sources != nil:
					frontends++
				}
			}
			endpoints += len(sp.Cluster.Endpoints) + len(sp.Local.Endpoints)
		}
	}
	return needsOf(frontends, endpoints, m.share())
}

// recount lowers the level of counting if Services need more than the budget and, if raise is set, raises it if more
// can be counted. Existing elements are rewritten later, in small transactions.
func (p *planner) recount(more needs, raise bool) {
	m := p.m
	more.add(m.totalNeeds(), +1)
	level := m.counting.within(m.counters(), &more)
	if level != m.counting && (raise || more[m.counting] > m.counters()) {
		m.counting, m.recount = level, m.Names()
	}
}

// Rollback undoes the last planned transaction, which must not be in the kernel.
func (m *Model) Rollback(t *Txn) {
	u := &t.undo
	p := m.planner()
	for _, was := range u.services {
		m.release(m.services[was.name])
	}
	for _, was := range slices.Backward(u.services) { // one may have been planned twice
		m.register(was.name, was.before)
		p.move(was.name, m.serviceOrEmpty(was.name), was.before)
	}
	p.chains()
	noIngress := m.NoIngress // is a fact about the kernel, which it may have told just now
	*m = u.before
	m.NoIngress = noIngress
	if u.earlier != nil {
		m.Rollback(u.earlier)
	}
}

// serviceOrEmpty returns a compiled Service, never nil.
func (m *Model) serviceOrEmpty(name snapshot.Name) *service {
	if s := m.services[name]; s != nil {
		return s
	}
	return &service{}
}

func (m *Model) planner() *planner {
	p := &planner{m: m, fitsHalf: m.fitsHalfBudget(m.requested.total), txn: &Txn{undo: undo{before: *m}}}
	for i := range p.chainsBefore {
		p.chainsBefore[i], p.kindsBefore[i] = map[ChainID]int{}, map[netip.Addr]uint32{}
	}
	return p
}

// fill plans everything, or a first part, for a kernel whose content is empty or unknown.
func (m *Model) fill(s *dataplane.State, limit int) *Txn {
	before := *m
	m.clear(s)
	names := sortedNames(s.Services)
	p := m.planner()
	p.reserve(s, limit)
	p.plan(s, names, limit)
	if p.txn.Left.Globals = len(p.txn.Left.Services) > 0; !p.txn.Left.Globals {
		p.shared(s)
	}
	p.create()
	p.txn.undo = undo{before: before}
	return p.txn
}

// reserve allocates the large sets' elements, which would otherwise be copied each time they grow.
func (p *planner) reserve(s *dataplane.State, limit int) {
	var frontends, endpoints ipfamily.Per[int]
	all := 0
	for _, svc := range s.Services {
		for _, sp := range svc.Ports {
			f, n := ipfamily.Of(sp.Frontends[0].Key.Addr), len(sp.Cluster.Endpoints)+len(sp.Local.Endpoints)
			frontends[f], endpoints[f] = frontends[f]+len(sp.Frontends), endpoints[f]+n
			all += 3*len(sp.Frontends) + n
		}
	}
	if limit <= 0 {
		limit = all
	}
	for i := range ipfamily.All {
		room := func(n int) []Element { return make([]Element, 0, n*min(limit, all)/max(all, 1)+n/64) }
		add := &p.txn.Tables[i].Add
		add[Services], add[Addresses] = room(frontends[i]), room(frontends[i])
		add[Endpoints] = room(endpoints[i])
	}
}

// clear resets the model to tables without elements.
func (m *Model) clear(s *dataplane.State) {
	*m = Model{Counters: m.Counters, Generation: m.Generation, NoIngress: m.NoIngress, filled: true,
		services: make(map[snapshot.Name]*service, len(s.Services)), pools: map[uint32]poolID{}, tables: m.tables}
	m.counting = m.expected(s)
	for i, f := range ipfamily.All {
		m.tables[i].structure = m.structureOf(s, f)
	}
	m.emptyTables()
}

// expected returns the level of counting once all of a state is planned.
func (m *Model) expected(s *dataplane.State) Counting {
	var all needs
	for _, svc := range s.Services {
		all.add(m.needsOf(svc), +1)
	}
	return CountEndpoints.within(m.counters(), &all)
}

// Load makes the model hold a state as if it were already written. The transaction that it returns writes nothing; its
// Rollback restores what the model held before.
func (m *Model) Load(s *dataplane.State) *Txn {
	before := *m
	m.clear(s)
	p := m.planner()
	p.silent = true
	p.plan(s, sortedNames(s.Services), 0)
	p.applyRecount()
	p.shared(s)
	p.chains()
	return &Txn{undo: undo{before: before}}
}

// PlanNothing returns a transaction that writes nothing and leaves all of a change.
func (m *Model) PlanNothing(left dataplane.Change) *Txn {
	return &Txn{Left: left, undo: undo{before: *m}}
}

// applyRecount makes the model hold what Recount would write, as if it were already written.
func (p *planner) applyRecount() {
	for _, name := range p.m.recount {
		if held := p.m.services[name]; held != nil {
			p.move(name, held, held.counted(p.m.quota()))
		}
	}
	p.m.recount = nil
}

// Recreate plans everything that the model holds for new tables, and uses nothing that is there. affinity are the
// entries of clients to keep; those that Remembers rejects are dropped.
func (m *Model) Recreate(affinity *ipfamily.Per[[]Listed]) *Txn {
	before := *m
	m.services, m.ranges, m.settings = make(map[snapshot.Name]*service, len(before.services)), treeRanges{}, nil
	m.macs = nil
	m.needs, m.requests, m.requested = needs{}, nil, counterRequests{}
	m.emptyTables()
	p := m.planner()
	for _, name := range sortedNames(before.services) {
		s := before.services[name].cloneUnassigned() // its slots become known
		p.assignSlotsAndIDs(name, before.services[name].cloneWithoutSlots(), s)
		p.move(name, &service{}, s)
	}
	p.trees(before.ranges)
	p.settings(before.settings)
	p.macs(before.macs)
	for i, f := range ipfamily.All {
		for _, e := range affinity[i] {
			if m.Remembers(f, &e.Element) {
				p.txn.Tables[i].Affinity = append(p.txn.Tables[i].Affinity, e)
			}
		}
	}
	p.create()
	p.txn.undo = undo{before: before}
	return p.txn
}

// cloneUnassigned copies a service as it was before its slots were assigned.
func (s *service) cloneUnassigned() *service {
	c := s.shallowCopy()
	for _, p := range c.ports {
		for n := range p.pools {
			p.pools[n].slots = slices.Clone(p.pools[n].slots)
			p.pools[n].sortSlots()
		}
	}
	return c
}

// cloneWithoutSlots copies a service with its ids, but without slots.
func (s *service) cloneWithoutSlots() *service {
	c := s.shallowCopy()
	for _, p := range c.ports {
		for n := range p.pools {
			p.pools[n].slots = nil
		}
	}
	return c
}

// emptyTables resets the tables to their structure and revision, without what follows from elements.
func (m *Model) emptyTables() {
	for i, f := range ipfamily.All {
		was := &m.tables[i]
		was.structure.Uses = 0
		m.tables[i] = tableModel{structure: was.structure, chains: map[ChainID]int{}, needed: map[sharedAddr]int{},
			revision: was.revision}
		tm := &m.tables[i]
		tm.digests[sharedBucket] = was.structure.digest(f)
		for set, elements := range fixedElements() {
			for n := range elements {
				tm.count[set]++
				tm.digests[sharedBucket].add(elements[n].digest())
			}
		}
	}
}

// create adds the structure to everything that was planned for empty tables.
func (p *planner) create() {
	p.chains()
	for i, f := range ipfamily.All {
		t := layout(f, p.m.tables[i].structure)
		p.txn.Tables[i].Create = &t
	}
	for i, f := range ipfamily.All {
		tm, tt := &p.m.tables[i], &p.txn.Tables[i]
		tt.Del, tt.DelChains, tt.Keep, tt.Replaced = [NumSets][]Element{}, nil, nil, 0
		for set, elements := range fixedElements() {
			tt.Add[set] = append(tt.Add[set], elements...)
		}
		// The kernel lists ranges in the order in which they were added: use the order in which nft loads them.
		for _, set := range [...]SetID{SourceRanges, RefusedShares} {
			slices.SortFunc(tt.Add[set], func(a, b Element) int { return bytes.Compare(a.Key(), b.Key()) })
		}
		tm.revision = p.number(tm.revision)
		tt.Add[RevisionSet] = []Element{p.m.Revision(f).element()}
		tt.Add[DigestSet] = tm.digests.elements()
	}
}

// revise replaces the revision of the tables to which the transaction writes.
func (p *planner) revise() {
	before := &p.txn.undo.before
	for i, f := range ipfamily.All {
		tm, was, tt := &p.m.tables[i], &before.tables[i], &p.txn.Tables[i]
		if tt.empty() && was.asked == tm.asked && before.countingText() == p.m.countingText() {
			continue
		}
		tt.Del[RevisionSet] = []Element{before.Revision(f).element()}
		tm.revision = p.number(tm.revision)
		tt.Add[RevisionSet] = []Element{p.m.Revision(f).element()}
		tt.Del[DigestSet], tt.Add[DigestSet] = was.digests.changed(&tm.digests)
	}
}

// number returns the number of a table's next revision, once all chains are planned.
func (p *planner) number(last uint32) uint32 {
	switch {
	case p.m.Generation == 0:
		return last + 1
	case p.txn.InTwo(): // the revision is in the second of two transactions
		return p.m.Generation + 1
	}
	return p.m.Generation
}

// Revision returns a table's revision after the last planned transaction.
func (m *Model) Revision(f ipfamily.Family) Revision {
	tm := &m.tables[f]
	return Revision{tm.revision, tm.digests[sharedBucket], m.countingText(), tm.asked}
}

// Digests returns a table's digests after the last planned transaction.
func (m *Model) Digests(f ipfamily.Family) Digests { return m.tables[f].digests }

// countingText is what a revision says of counters: the level, or "some" if it differs between Services.
func (m *Model) countingText() string {
	if len(m.recount) > 0 {
		return "some"
	}
	return m.counting.String()
}

// newPoolID finds a free id for a pool, from a hash. There are sixteen million: what else pools take would not fit into
// a node's memory before.
func (m *Model) newPoolID(p poolID) uint32 {
	for id := p.number(); ; id = (id + 1) & PoolMask {
		if _, taken := m.pools[id]; !taken && id >= firstPool {
			m.pools[id] = p
			return id
		}
	}
}

// number returns the number that a pool has if no other has it.
func (p poolID) number() uint32 {
	sum := p.hash()
	return uint32(sum^sum>>poolBits^sum>>(2*poolBits)) & PoolMask
}

// hash returns a hash of the pool's name that is the same on all nodes.
func (p poolID) hash() uint64 {
	h := fnv.New64a()
	h.Write([]byte(p.port.name.String()))
	h.Write([]byte{0, byte(p.port.name.Protocol), byte(p.port.family.NFProto()), byte(p.pool)})
	h.Write([]byte(p.node))
	return h.Sum64()
}

// release frees the ids of a service, which may be nil; register takes them again.
func (m *Model) release(s *service) {
	s.eachID(snapshot.Name{}, func(id uint32, _ poolID) { delete(m.pools, id) })
}

func (m *Model) register(name snapshot.Name, s *service) {
	s.eachID(name, func(id uint32, p poolID) { m.pools[id] = p })
}

func (s *service) eachID(name snapshot.Name, do func(id uint32, p poolID)) {
	if s == nil {
		return
	}
	for i, f := range ipfamily.All {
		if id := s.sources[i].id; id != 0 {
			do(id, sourcesID(name, f))
		}
	}
	for _, p := range s.ports {
		for i := range p.pools {
			if id := p.pools[i].id; id != 0 {
				do(id, poolID{port: p.id, pool: poolIndex(i)})
			}
		}
		if p.kept.used() {
			do(p.kept.id, keptID(p.id, ""))
		}
		for i := range p.kept.nodes {
			do(p.kept.nodes[i].id, keptID(p.id, p.kept.nodes[i].name))
		}
	}
}

// sourcesID identifies the source ranges of a Service.
func sourcesID(name snapshot.Name, f ipfamily.Family) poolID {
	return poolID{port: portID{dataplane.PortName{Service: name}, f}, pool: sourcesOf}
}

// Remembers reports whether an element of Affinity names an endpoint that its pool has.
func (m *Model) Remembers(f ipfamily.Family, e *Element) bool {
	port, pool, ok := m.pool(f, e.ID())
	return ok && slices.Contains(port.members(pool), e.Target())
}

// Sticky reports whether any Service of a family has session affinity.
func (m *Model) Sticky(f ipfamily.Family) bool { return m.tables[f].count[Remember] > 0 }

// ServiceOf returns the Service whose pool has an id.
func (m *Model) ServiceOf(id uint32) (snapshot.Name, bool) {
	name, ok := m.pools[id]
	return name.port.name.Service, ok
}

// pool returns the pool with an id, and its port.
func (m *Model) pool(f ipfamily.Family, id uint32) (*port, poolIndex, bool) {
	name, ok := m.pools[id]
	if !ok || name.port.family != f || name.pool >= numPools {
		return nil, 0, false
	}
	p := m.serviceOrEmpty(name.port.name.Service).port(name.port)
	return p, name.pool, p != nil
}
