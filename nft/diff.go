package nft

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// planner gathers one transaction while it moves the model forward.
type planner struct {
	m   *Model
	txn *Txn
	// silent only moves the model: nothing is put into the transaction.
	silent bool
	// changedRequests are namespaces of which Services ask for counters, or no longer ask.
	changedRequests []string
	// fitsHalf says that all that ask may have what they ask for.
	fitsHalf bool
	// planned counts the elements that were added and deleted.
	planned int
	// bucket is where what is planned counts for the digests.
	bucket int
	// chainsBefore holds the count of each numbered chain that this transaction touches, as it was, and kindsBefore the
	// kinds of addresses.
	chainsBefore ipfamily.Per[map[ChainID]int]
	kindsBefore  ipfamily.Per[map[netip.Addr]uint32]
}

// slotsKey names a pool of a family.
type slotsKey struct {
	family ipfamily.Family
	id     uint32
}

// globals takes over what all Services share, but for the trees.
// They may also concern Services, which it returns.
func (p *planner) globals(s *dataplane.State) (concerned []snapshot.Name) {
	if p.m.structureOf(s, ipfamily.IPv4).Device != p.m.tables[0].structure.Device {
		p.leaveIngress()
		concerned = keepers(s)
	}
	for i, f := range ipfamily.All {
		tm, wanted := &p.m.tables[i], p.m.structureOf(s, f)
		wanted.Uses = tm.structure.Uses
		tm.restructure(f, wanted)
	}
	return concerned
}

// restructure has a table be made for something else.
func (tm *tableModel) restructure(f ipfamily.Family, wanted Structure) {
	if tm.structure == wanted {
		return
	}
	was, is := tm.structure, wanted
	was.Uses, is.Uses = 0, 0
	if was != is { // what is in use is not in the digest, which takes as long as a small change
		tm.digests[sharedBucket].sub(was.digest(f))
		tm.digests[sharedBucket].add(is.digest(f))
	}
	tm.structure = wanted
}

// followElements brings the structures in line with the elements that were planned.
func (m *Model) followElements() {
	for i, f := range ipfamily.All {
		tm := &m.tables[i]
		wanted := tm.structure
		wanted.Uses = 0
		for _, set := range optional {
			if tm.count[set] > 0 {
				wanted.Uses = wanted.Uses.With(set)
			}
		}
		tm.restructure(f, wanted)
	}
}

// structures plans the chains of the tables, where they are not the same as before the transaction.
func (p *planner) structures() {
	p.chains()
	for i, f := range ipfamily.All {
		was, is := p.txn.undo.before.tables[i].structure, p.m.tables[i].structure
		if was == is {
			continue
		}
		var kept []ChainID // the numbered chains that are neither new nor gone
		for id := range p.m.tables[i].chains {
			if before, touched := p.chainsBefore[i][id]; !touched || before > 0 {
				kept = append(kept, id)
			}
		}
		slices.SortFunc(kept, compareChains)
		if was.Device != is.Device && was.Device != "" { // its table goes, and all that is in it
			was.Device, p.txn.Tables[i].DropIngress = "", true
		}
		p.rewrite(f, TableOf(f, was, kept).Chains, TableOf(f, is, kept).Chains)
		p.txn.Tables[i].changeSets(was.sets(), is.sets())
	}
}

// changeSets adds and deletes the sets that only one of two layouts has.
func (tt *TableTxn) changeSets(before, now []Set) {
	has := func(sets []Set, id SetID) bool {
		return slices.ContainsFunc(sets, func(s Set) bool { return s.ID == id })
	}
	for _, s := range now {
		if !has(before, s.ID) {
			tt.AddSets = append(tt.AddSets, s)
		}
	}
	for _, s := range before {
		if !has(now, s.ID) {
			tt.DelSets = append(tt.DelSets, s.ID)
		}
	}
}

// rewrite replaces the chains that are not the same in two layouts.
func (p *planner) rewrite(f ipfamily.Family, before, now []Chain) {
	tt := &p.txn.Tables[f]
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
	tt.sortChains()
}

func sameRules(f ipfamily.Family, a, b []Rule) bool {
	return slices.EqualFunc(a, b, func(x, y Rule) bool { return x.Text(f) == y.Text(f) })
}

// treeRanges are the elements of each of the trees.
type treeRanges [len(trees)][]netip.Prefix

func rangesOf(s *dataplane.State) treeRanges { return treeRanges{s.ServiceCIDRs, s.SharedRanges} }

// shared takes over the elements that belong to no Service.
func (p *planner) shared(s *dataplane.State) {
	p.trees(rangesOf(s))
	p.settings(s.Settings)
	if p.m.tables[0].structure.Device != "" {
		p.macs(s.NodeMACs)
	}
}

// structureOf returns what a state asks of a family's table, except what follows from its elements.
func (m *Model) structureOf(s *dataplane.State, f ipfamily.Family) Structure {
	out := StructureOf(s, f)
	if m.NoIngress {
		out.Device = ""
	}
	return out
}

// compile compiles a Service for the tables as they are.
func (p *planner) compile(s *dataplane.Service) *service {
	out := compileService(s, p.m.quota())
	if p.m.tables[0].structure.Device == "" {
		for _, q := range out.ports {
			q.kept = kept{}
		}
	}
	return out
}

func (p *planner) trees(now treeRanges) {
	p.bucket = sharedBucket
	for n, set := range trees {
		prefixes(p.m.ranges[n], now[n], func(c netip.Prefix) {
			p.del(ipfamily.Of(c.Addr()), prefixElement(set, c))
		}, func(c netip.Prefix) {
			p.add(ipfamily.Of(c.Addr()), prefixElement(set, c))
		})
	}
	p.m.ranges = now
}

// prefixes calls gone and come for the differences of two lists.
func prefixes(before, now []netip.Prefix, gone, come func(netip.Prefix)) {
	held := make(map[netip.Prefix]bool, len(before))
	for _, c := range before {
		held[c] = true
	}
	for _, c := range now {
		if !held[c] {
			come(c)
		}
		delete(held, c)
	}
	for _, c := range before {
		if held[c] {
			gone(c)
		}
	}
}

// service takes a Service from what it was to what it should be.
func (p *planner) service(name snapshot.Name, now *service) {
	before := p.m.serviceOrEmpty(name)
	p.txn.undo.services = append(p.txn.undo.services, serviceBefore{name, before})
	p.assignSlotsAndIDs(name, before, now)
	p.move(name, before, now)
}

// move plans the way from one settled answer for a Service to another.
func (p *planner) move(name snapshot.Name, before, now *service) {
	p.bucket = bucketFor(name.String())
	p.accountNeeds(before, -1)
	p.accountNeeds(now, +1)
	p.markCounted(before, (*Digest).sub)
	p.markCounted(now, (*Digest).add)
	now.eachAddress(func(n need, a netip.Addr) { p.count(n, a, +1) })
	before.eachAddress(func(n need, a netip.Addr) { p.count(n, a, -1) })
	for i, f := range ipfamily.All {
		p.sources(f, name, before.sources[i], now.sources[i])
	}
	for _, old := range before.ports {
		p.port(old, now.port(old.id))
	}
	for _, n := range now.ports {
		if before.port(n.id) == nil {
			p.port(nil, n)
		}
	}
	if len(now.ports)+len(now.clusterIPs) == 0 && now.sources[0].ranges == nil && now.sources[1].ranges == nil {
		delete(p.m.services, name)
	} else {
		p.m.services[name] = now
	}
}

// accountNeeds takes note of the counters that a Service needs, or no longer needs.
func (p *planner) accountNeeds(s *service, by int) {
	p.m.needs.add(p.m.needsWithout(s), by)
	if p.m.accountRequest(s, by) {
		p.changedRequests = append(p.changedRequests, s.name.Namespace)
	}
}

// sources takes who may use a Service's load balancer addresses from what it was to what it should be.
func (p *planner) sources(f ipfamily.Family, name snapshot.Name, before, now sources) {
	planned := p.planned
	defer func() { p.planned += (rangeCost - 1) * (p.planned - planned) }()
	element := func(id uint32, c netip.Prefix) Element { return sourcesElement(name, id, c) }
	if before.id != now.id { // one of them is none
		for _, c := range before.ranges {
			p.del(f, element(before.id, c))
		}
		before.ranges = nil
	}
	prefixes(before.ranges, now.ranges, func(c netip.Prefix) { p.del(f, element(before.id, c)) },
		func(c netip.Prefix) { p.add(f, element(now.id, c)) })
}

func sourcesElement(name snapshot.Name, id uint32, c netip.Prefix) Element {
	e := sourceElement(id, c)
	e.Comment = commentOf(name.String())
	return e
}

func (p *planner) add(f ipfamily.Family, e Element) {
	tt, tm := &p.txn.Tables[f], &p.m.tables[f]
	if !p.silent {
		tt.Add[e.Set] = append(tt.Add[e.Set], e)
	}
	p.planned++
	tm.count[e.Set]++
	tm.digests[p.bucket].add(e.digest())
	p.countReference(f, &e, +1)
}

func (p *planner) del(f ipfamily.Family, e Element) {
	tt, tm := &p.txn.Tables[f], &p.m.tables[f]
	if !p.silent {
		tt.Del[e.Set] = append(tt.Del[e.Set], e)
	}
	p.planned++
	tm.count[e.Set]--
	tm.digests[p.bucket].sub(e.digest())
	p.countReference(f, &e, -1)
}

func (p *planner) replace(f ipfamily.Family, before, now Element) {
	p.del(f, before)
	p.add(f, now)
	p.txn.Tables[f].Replaced++
}

// countReference counts what leads to a numbered chain, and to the chain that one leads to.
func (p *planner) countReference(f ipfamily.Family, e *Element, by int) {
	if !e.Set.hasClass() && e.Set != Remember && e.Set != ClientLimits {
		return
	}
	chains, before := p.m.tables[f].chains, p.chainsBefore[f]
	for c := e.Leads(); c.Kind > numFixedChains; c = c.next() {
		if _, ok := before[c]; !ok {
			before[c] = chains[c]
		}
		chains[c] += by
	}
}

// chains plans the numbered chains that something leads to for the first time, and removes those nothing leads to any
// more.
func (p *planner) chains() {
	p.addresses()
	for i, f := range ipfamily.All {
		tt, tm := &p.txn.Tables[i], &p.m.tables[i]
		var come, gone []ChainID
		for c, before := range p.chainsBefore[i] {
			switch now := tm.chains[c]; {
			case before == 0 && now > 0:
				come = append(come, c)
			case now == 0:
				if delete(tm.chains, c); before > 0 {
					gone = append(gone, c)
				}
			}
		}
		slices.SortFunc(come, compareChains) // the same change is the same bytes
		slices.SortFunc(gone, compareChains)
		p.inShared(func() {
			for _, c := range come {
				tt.AddChains = append(tt.AddChains, numbered(c))
				for _, e := range leadingTo(c) {
					p.add(f, e)
				}
			}
			for _, c := range gone {
				tt.DelChains = append(tt.DelChains, c)
				for _, e := range leadingTo(c) {
					p.del(f, e)
				}
			}
		})
		tt.sortChains()
	}
	p.m.followElements()
}

// sortChains puts chains into an order in which those that others lead to are there before them, and go after them.
func (tt *TableTxn) sortChains() {
	slices.SortFunc(tt.AddChains, func(a, b Chain) int { return compareChains(a.ID, b.ID) })
	slices.SortFunc(tt.DelChains, func(a, b ChainID) int { return compareChains(b, a) })
}

func compareChains(a, b ChainID) int {
	if a.Kind != b.Kind {
		return int(a.Kind) - int(b.Kind)
	}
	return int(a.N) - int(b.N)
}
