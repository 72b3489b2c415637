package nft

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// planner gathers one transaction while it moves the model forward.
type planner struct {
	m   *Model
	txn *Txn
	// chainsBefore holds the count of each numbered chain that this transaction touches, as it was.
	chainsBefore [len(Families)]map[ChainID]int
	// slotsFound, if not nil, are the slots of the frontends in the kernel, whatever the model says of them.
	slotsFound map[slotsKey][]netip.AddrPort
}

// globals takes over what all Services share.
func (p *planner) globals(s *dataplane.State) {
	for i, f := range Families {
		tm, wanted := &p.m.tables[i], StructureOf(s, f)
		wanted.IPVS = tm.structure.IPVS
		tm.restructure(f, wanted)
	}
	p.cidrs(s.ServiceCIDRs)
}

// restructure has a table be made for something else.
func (tm *tableModel) restructure(f Family, wanted Structure) {
	if tm.structure == wanted {
		return
	}
	tm.digest.sub(tm.structure.digest(f))
	tm.digest.add(wanted.digest(f))
	tm.structure = wanted
}

// followElements brings the structures in line with the elements that were planned.
func (m *Model) followElements() {
	for i, f := range Families {
		tm := &m.tables[i]
		wanted := tm.structure
		wanted.IPVS = tm.count[Scheduled] > 0
		tm.restructure(f, wanted)
	}
}

// chainsFollow plans the chains of the structures, where they are not the same as before the transaction.
func (p *planner) chainsFollow() {
	for i, f := range Families {
		if was, is := p.txn.undo.tables[i].structure, p.m.tables[i].structure; was != is {
			p.rewrite(f, layout(f, was).Chains, layout(f, is).Chains)
		}
	}
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
	before := p.m.held(name)
	p.txn.undo.services = append(p.txn.undo.services, wasService{name, before})
	p.settle(before, now)
	p.move(name, before, now)
}

// move plans the way from one settled answer for a Service to another.
func (p *planner) move(name snapshot.Name, before, now *service) {
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
	tm := &p.m.tables[f.index()]
	tm.count[e.Set]++
	tm.digest.add(e.digest())
	p.refer(f, e.Chain, +1)
}

func (p *planner) del(f Family, e Element) {
	tt := &p.txn.Tables[f.index()]
	tt.Del[e.Set] = append(tt.Del[e.Set], e)
	tm := &p.m.tables[f.index()]
	tm.count[e.Set]--
	tm.digest.sub(e.digest())
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
