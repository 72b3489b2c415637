// Package iptshim prints Services as iptables rules, for hosts where only iptables works: with the chains, comments and
// marks that kube-proxy has in its iptables mode, so that whoever knows those finds them. It decides which lines have
// to be written, reads what iptables-save says, and follows packets through it; it runs no program and touches no
// socket.
package iptshim

import (
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Options say how rules are written. The zero value is what kube-proxy does, but for Dispatch.
type Options struct {
	// MasqueradeMark is the bit that marks packets to be masqueraded; 0 stands for kube-proxy's, 0x4000.
	MasqueradeMark uint32
	// Dispatch is how packets find their Service.
	Dispatch Dispatch
	// KeepInvalid leaves packets alone that belong to no connection. They are dropped otherwise, where the node forwards
	// them: set it where nf_conntrack_tcp_be_liberal is set.
	KeepInvalid bool
	// Comments are written in all chains even with more than 1,000 endpoints, where kube-proxy and we leave them out in
	// the chains of single service ports.
	Comments bool
	// Step is after how many lines a long text has a COMMIT; 0 means only at the end of each table. The legacy variant
	// wants 0: it writes the whole table at each. The nft variant, at least up to 1.8.9, compares each line with the names
	// of all chains since the last one, so that its time grows by the square of Step: StepNFT is good for it. Every step
	// leaves Services whole.
	Step int
}

// StepNFT is the Step for the nft variant of iptables.
const StepNFT = 3000

// defaultMark is kube-proxy's masqueradeBit, 14.
const defaultMark = 1 << 14

func (o *Options) mark() uint32 {
	if o.MasqueradeMark == 0 {
		return defaultMark
	}
	return o.MasqueradeMark
}

// manyEndpoints is from how many on the chains of service ports have no comments.
const manyEndpoints = 1000

// Model mirrors the kernel's rules after everything that was planned. A new one takes it that the kernel
// holds nothing: if it may hold something, Adopt comes before the first Plan. It is not safe for concurrent use.
type Model struct {
	options  Options
	filled   bool
	state    dataplane.State
	families ipfamily.Per[*familyModel]
}

// familyModel is what the programs of one family have been told.
type familyModel struct {
	family    ipfamily.Family
	structure structure
	// held are the digests of all chains of ours. Jumps says which are there, by their index, and referred names chains
	// that rules of others lead to, which cannot be deleted.
	held     [len(Tables)]map[string]uint64
	jumps    map[int]bool
	referred map[tableChain]bool
	services map[snapshot.Name]*service
	lists    [numLists]*list
	// nodePorts counts the node ports that each address has. Endpoints counts chains of endpoints, outside cluster IPs in
	// no ServiceCIDR.
	nodePorts          map[netip.Addr]int
	endpoints, outside int
}

// tableChain names a chain.
type tableChain struct {
	table Table
	chain string
}

// service is what was made of a Service.
type service struct {
	chains    []string
	rows      []row
	nodePorts []netip.Addr
	endpoints int
	outside   int
}

// New gives a Model for a kernel that holds nothing of ours.
func New(o Options) *Model {
	m := &Model{options: o}
	for _, f := range ipfamily.All {
		m.families[f] = newFamily(f)
	}
	return m
}

func newFamily(f ipfamily.Family) *familyModel {
	fm := &familyModel{family: f, jumps: map[int]bool{}, referred: map[tableChain]bool{}}
	for i := range fm.held {
		fm.held[i] = map[string]uint64{}
	}
	return fm
}

func (t Table) index() int { return slices.Index(Tables[:], t) }

// Filled says whether anything was ever planned.
func (m *Model) Filled() bool { return m.filled }

// Plan gives the texts that take the kernel to a state, and moves the model there; Revert takes it back. The change
// says which Services may differ from the state planned before. All are looked at the first time, and whenever it names
// Globals.
func (m *Model) Plan(s *dataplane.State, change dataplane.Change) *Txn {
	t := &Txn{}
	if all := !m.filled || change.Globals; all {
		was := *m
		t.undo = append(t.undo, func() { *m = was })
		m.fill(s, t)
		return t
	}
	if len(change.Services) > 0 {
		m.recordServices(s, change.Services, t)
	}
	for _, f := range ipfamily.All {
		m.families[f].planChange(&m.options, s, change.Services, &t.families[f], &t.undo)
	}
	return t
}

// recordServices remembers the Services of a state, for whoever wants all of the text.
func (m *Model) recordServices(s *dataplane.State, names []snapshot.Name, t *Txn) {
	for _, n := range names {
		before, had := m.state.Services[n]
		t.undo = append(t.undo, func() {
			if delete(m.state.Services, n); had {
				m.state.Services[n] = before
			}
		})
		if svc := s.Services[n]; svc != nil {
			m.state.Services[n] = svc
		} else {
			delete(m.state.Services, n)
		}
	}
}

// fill plans everything. What is there and as it should be is not written again.
func (m *Model) fill(s *dataplane.State, t *Txn) {
	m.filled, m.state = true, *s
	m.state.Services = maps.Clone(s.Services)
	if m.state.Services == nil {
		m.state.Services = map[snapshot.Name]*dataplane.Service{}
	}
	for _, f := range ipfamily.All {
		was := m.families[f]
		fm := newFamily(f)
		fm.structure, fm.jumps, fm.referred = structureOf(s, f), maps.Clone(was.jumps), was.referred
		for i := range fm.held {
			fm.held[i] = maps.Clone(was.held[i])
		}
		fm.fill(&m.options, s, &t.families[f])
		m.families[f] = fm
	}
}

// fill compiles all Services of a state for a family, and drops what is left of others.
func (fm *familyModel) fill(o *Options, s *dataplane.State, t *familyTxn) {
	fm.services, fm.nodePorts = make(map[snapshot.Name]*service, len(s.Services)), map[netip.Addr]int{}
	var rows [numLists][]row
	for _, svc := range s.Services {
		for _, a := range nodePortAddrs(fm.family, svc) {
			fm.nodePorts[a]++
		}
		fm.outside += fm.structure.outside(fm.family, svc)
	}
	p := planner{familyModel: fm, txn: t, seen: map[tableChain]bool{}}
	c := fm.compiler()
	for _, n := range sortedNames(s.Services) {
		made := p.service(c, s.Services[n])
		fm.services[n] = made
		fm.endpoints += made.endpoints
		for _, r := range made.rows {
			rows[r.list] = append(rows[r.list], r)
		}
	}
	tails := fm.structure.tails(fm.nodePorts, fm.outside > 0)
	for id := range numLists {
		slices.SortFunc(rows[id], compareRows)
		l := &list{id: id, family: fm.family, tree: o.Dispatch == Tree, rows: rows[id], tail: tails[id],
			branches: map[string][]string{}}
		fm.lists[id] = l
		l.render(nil, p.write, p.drop)
	}
	for _, ch := range o.chains(fm.structure) {
		p.write(ch)
	}
	p.sweep()
	p.jumps()
	t.omitComments, t.step = fm.endpoints > manyEndpoints && !o.Comments, o.Step
}

func (fm *familyModel) compiler() *compiler {
	return &compiler{family: fm.family, pods: fm.structure.pods, nodePorts: fm.nodePorts}
}

// planChange plans a change of some Services.
func (fm *familyModel) planChange(o *Options, s *dataplane.State, names []snapshot.Name, t *familyTxn, undo *[]func()) {
	p := planner{familyModel: fm, txn: t, undo: undo}
	outside := fm.outside > 0
	names, moved := fm.count(s, names, undo)
	var gone, come [numLists][]row
	c := fm.compiler()
	for _, n := range names {
		was, made := fm.services[n], p.service(c, s.Services[n])
		if was == nil {
			was = &service{}
		}
		for _, name := range without(was.chains, made.chains) {
			p.drop(NAT, name)
		}
		out, in := differing(was.rows, made.rows)
		for _, r := range out {
			gone[r.list] = append(gone[r.list], r)
		}
		for _, r := range in {
			come[r.list] = append(come[r.list], r)
		}
		p.recordService(n, made)
	}
	if moved = moved || outside != (fm.outside > 0); moved {
		p.tails()
	}
	for id, l := range fm.lists {
		keys := l.change(gone[id], come[id])
		if keys == nil && !moved {
			continue
		}
		*undo = append(*undo, func() {
			l.change(come[id], gone[id])
			l.render(keys, func(chain) {}, func(Table, string) {})
		})
		if keys == nil {
			keys = []string{}
		}
		l.render(keys, p.write, p.drop)
	}
	p.jumps()
	t.omitComments, t.step = fm.endpoints > manyEndpoints && !o.Comments, o.Step
}

// count follows the node port addresses and the cluster IPs outside of the changed Services. If the addresses are
// others now, moved is true, and every Service with node ports is named with those that changed.
func (fm *familyModel) count(s *dataplane.State, names []snapshot.Name, undo *[]func()) (
	all []snapshot.Name, moved bool,
) {
	before, outside := maps.Clone(fm.nodePorts), fm.outside
	*undo = append(*undo, func() { fm.nodePorts, fm.outside = before, outside })
	for _, n := range names {
		if was := fm.services[n]; was != nil {
			for _, a := range was.nodePorts {
				if fm.nodePorts[a]--; fm.nodePorts[a] == 0 {
					delete(fm.nodePorts, a)
				}
			}
			fm.outside -= was.outside
		}
	}
	for _, n := range names {
		for _, a := range nodePortAddrs(fm.family, s.Services[n]) {
			fm.nodePorts[a]++
		}
		fm.outside += fm.structure.outside(fm.family, s.Services[n])
	}
	same := func(int, int) bool { return true }
	if maps.EqualFunc(before, fm.nodePorts, same) {
		return names, false
	}
	all = slices.Clone(names)
	for n, svc := range fm.services {
		if len(svc.nodePorts) > 0 {
			all = append(all, n)
		}
	}
	slices.SortFunc(all, snapshot.Name.Compare)
	return slices.Compact(all), true
}

// differing gives the rows that only one of two sides has.
func differing(was, now []row) (gone, come []row) {
	if slices.Equal(was, now) {
		return nil, nil
	}
	return without(was, now), without(now, was)
}

// without gives what is in a list and not in another, in its order. Both may be long.
func without[T comparable](list, other []T) (left []T) {
	there := make(map[T]bool, len(other))
	for _, x := range other {
		there[x] = true
	}
	for _, x := range list {
		if !there[x] {
			left = append(left, x)
		}
	}
	return left
}

// planner gathers what one family's text has to say.
type planner struct {
	*familyModel
	txn *familyTxn
	// undo is nil where all of the model is kept for that.
	undo *[]func()
	// seen are the chains that were written, if whatever else is there has to go.
	seen map[tableChain]bool
}

// service compiles a Service and writes its chains.
func (p *planner) service(c *compiler, s *dataplane.Service) *service {
	out := c.service(s)
	made := &service{rows: out.rows, nodePorts: nodePortAddrs(p.family, s), endpoints: out.endpoints,
		outside: p.structure.outside(p.family, s)}
	for _, ch := range out.chains {
		made.chains = append(made.chains, ch.name)
		p.write(ch)
	}
	return made
}

// recordService remembers what was made of a Service.
func (p *planner) recordService(n snapshot.Name, made *service) {
	was, had := p.services[n]
	endpoints := p.endpoints
	*p.undo = append(*p.undo, func() {
		p.endpoints = endpoints
		if delete(p.services, n); had {
			p.services[n] = was
		}
	})
	if had {
		p.endpoints -= was.endpoints
	}
	p.endpoints += made.endpoints
	p.services[n] = made
	if len(made.chains)+len(made.rows) == 0 {
		delete(p.services, n)
	}
}

// tails gives the lists the rules that stand after their rows.
func (p *planner) tails() {
	tails := p.structure.tails(p.familyModel.nodePorts, p.outside > 0)
	for id, l := range p.lists {
		was := l.tail
		*p.undo = append(*p.undo, func() { l.tail = was })
		l.tail = tails[id]
	}
}

// write has a chain written if it is not so already.
func (p *planner) write(c chain) {
	d := c.digest()
	if p.seen != nil {
		p.seen[tableChain{c.table, c.name}] = true
	}
	held := p.held[c.table.index()]
	was, had := held[c.name]
	if had && was == d {
		return
	}
	p.undoDigest(held, c.name)
	held[c.name] = d
	p.txn.writes = append(p.txn.writes, c)
}

// undoDigest has a chain's digest restored if the transaction is taken back.
func (p *planner) undoDigest(held map[string]uint64, name string) {
	if p.undo == nil {
		return
	}
	was, had := held[name]
	*p.undo = append(*p.undo, func() {
		if delete(held, name); had {
			held[name] = was
		}
	})
}

// drop has a chain deleted; one that rules of others lead to is only emptied.
func (p *planner) drop(t Table, name string) {
	held := p.held[t.index()]
	if _, had := held[name]; !had {
		return
	}
	if p.referred[tableChain{t, name}] {
		p.write(chain{table: t, name: name})
		return
	}
	p.undoDigest(held, name)
	delete(held, name)
	p.txn.drops = append(p.txn.drops, tableChain{t, name})
}

// sweep drops all chains that were not written.
func (p *planner) sweep() {
	for i, t := range Tables {
		for _, name := range slices.Sorted(maps.Keys(p.held[i])) {
			if !p.seen[tableChain{t, name}] && name != loopbackChain {
				p.drop(t, name)
			}
		}
	}
}

// jumps adds those that are missing.
func (p *planner) jumps() {
	for i := range jumps {
		if j := &jumps[i]; p.structure.wants(j) && !p.familyModel.jumps[i] {
			p.familyModel.jumps[i] = true
			p.txn.jumps = append(p.txn.jumps, i)
			if p.undo != nil {
				*p.undo = append(*p.undo, func() { delete(p.familyModel.jumps, i) })
			}
		}
	}
}

var seed = maphash.MakeSeed()

// digest tells the contents of chains apart.
func (c *chain) digest() uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	comments := !commentsRedundant(c.table, c.name)
	for i := range c.rules {
		r := &c.rules[i]
		h.WriteString(r.before)
		if comments {
			h.WriteByte('"')
			h.WriteString(r.comment)
			h.WriteByte('"')
		}
		h.WriteString(r.after)
		h.WriteByte('\n')
	}
	return h.Sum64()
}

// sortedNames gives the keys of a map of Services in order.
func sortedNames[V any](m map[snapshot.Name]V) []snapshot.Name {
	return slices.SortedFunc(maps.Keys(m), snapshot.Name.Compare)
}

// Revert takes back a transaction that is not in the kernel: the last one that was planned.
func (m *Model) Revert(t *Txn) {
	for i := len(t.undo) - 1; i >= 0; i-- {
		t.undo[i]()
	}
}
