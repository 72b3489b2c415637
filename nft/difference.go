package nft

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// Difference is something that a table holds and should not, or should hold and does not.
type Difference struct {
	Family ipfamily.Family
	// Wanted says that it should be there; otherwise it is there and should not be.
	Wanted bool
	// Set is the set of the Element; NumSets if the difference is about the structure.
	Set     SetID
	Element Element
	// Text is the object as nft writes it: an element with its set, a rule with its chain, or a sentence.
	Text string
	// Port is the service port that it belongs to, as in its comment: "namespace/name:port"; empty if none.
	Port string
}

// String returns a line of a listing of differences: "+ ip services { ... }".
func (d Difference) String() string {
	sign := "-"
	if d.Wanted {
		sign = "+"
	}
	return sign + " " + d.Family.NFT() + " " + d.Text
}

// Service returns "namespace/name" of the Service that it belongs to; empty if none.
func (d *Difference) Service() string { return serviceOf(d.Port) }

func serviceOf(comment string) string {
	if i := strings.IndexAny(comment, ":,"); i >= 0 {
		return comment[:i]
	}
	return comment
}

// Differences returns how the found tables differ from what the model holds after its first Plan. It ignores which
// endpoint of a pool has which slot, the sets' sizes, the revision, and which clients are remembered. have are the
// found tables with their rules. The model must not be used afterwards.
func (m *Model) Differences(found *ipfamily.Per[Found], have *ipfamily.Per[Table]) []Difference {
	own := newOwners(found)
	own.model(m)
	m.AdoptCounting(found)
	txn := m.Correct(found, AllStale())
	var out []Difference
	for i, f := range ipfamily.All {
		tt := &txn.Tables[i]
		out = append(out, structureDifferences(f, tt, &have[i])...)
		for set := range NumSets {
			if set.IsContent() {
				out = append(out, elementDifferences(f, set, tt, own)...)
			}
		}
	}
	return out
}

// Differences returns what transactions in a row write, in their order, as differences: Wanted is added, the rest is
// deleted. have are the tables before the first of them, with their rules. What only keeps the books, as revisions, is
// left out, and so are the elements of verdict maps, which follow from the chains.
func Differences(txns []*Txn, have *ipfamily.Per[Table]) (out []Difference) {
	for _, txn := range txns {
		for i, f := range ipfamily.All {
			tt := &txn.Tables[i]
			out = append(out, structureDifferences(f, tt, &have[i])...)
			for set := range NumSets {
				if set.IsContent() && !setsByID[set].Verdicts {
					out = append(out, elementDifferences(f, set, tt, nil)...)
				}
			}
		}
	}
	return out
}

func elementDifferences(f ipfamily.Family, set SetID, tt *TableTxn, own owners) (out []Difference) {
	s := SetByID(set)
	gather := func(elements []Element, wanted bool) {
		for _, e := range elements {
			out = append(out, Difference{Family: f, Wanted: wanted, Set: set, Element: e, Port: own.of(&e),
				Text: s.Name() + " { " + e.Text(f, &s) + " }"})
		}
	}
	gather(tt.Del[set], false)
	gather(tt.Add[set], true)
	slices.SortStableFunc(out, func(a, b Difference) int { return compareElements(f, &s, &a.Element, &b.Element) })
	return out
}

// structureDifferences compares chains and rules.
func structureDifferences(f ipfamily.Family, tt *TableTxn, have *Table) (out []Difference) {
	chain := func(wanted bool, c Chain, rules []Rule) {
		for _, r := range rules {
			out = append(out, Difference{Family: f, Wanted: wanted, Set: NumSets,
				Text: "chain " + c.ID.Name() + " { " + r.Text(f) + " }"})
		}
	}
	chains := tt.AddChains
	if tt.Create != nil {
		chains = slices.Concat(tt.Create.Chains, chains)
	}
	for _, c := range chains {
		chain(true, c, c.Rules)
	}
	for _, c := range tt.Rewrite {
		var held []Rule
		if i := slices.IndexFunc(have.Chains, func(h Chain) bool { return h.ID == c.ID }); i >= 0 {
			held = have.Chains[i].Rules
		}
		less, more := changedRules(f, held, c.Rules)
		chain(false, c, less)
		chain(true, c, more)
	}
	for _, id := range tt.DelChains {
		out = append(out, Difference{Family: f, Set: NumSets, Text: "chain " + id.Name()})
	}
	for _, name := range tt.DelForeign {
		out = append(out, Difference{Family: f, Set: NumSets, Text: "chain " + name})
	}
	return out
}

// changedRules drops the rules that two chains share at their beginnings and ends.
func changedRules(f ipfamily.Family, a, b []Rule) (x, y []Rule) {
	same := func(r, s Rule) bool { return r.Text(f) == s.Text(f) }
	for len(a) > 0 && len(b) > 0 && same(a[0], b[0]) {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && same(a[len(a)-1], b[len(b)-1]) {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return a, b
}

// owners maps addresses to their Services, or to nothing if several have them: their elements do not name the Service
// themselves.
type owners map[netip.Addr]string

// newOwners reads the comments of what was found.
func newOwners(found *ipfamily.Per[Found]) owners {
	own := owners{}
	for i := range found {
		for _, set := range [...]SetID{Services, UncountedServices} {
			for _, e := range found[i].Elements[set] {
				own.add(e.FrontendKey().Addr, serviceOf(e.Comment))
			}
		}
	}
	return own
}

// model adds what a model knows.
func (own owners) model(m *Model) {
	for name, s := range m.services {
		for _, p := range s.ports {
			for i := range p.frontends {
				own.add(p.frontends[i].key.Addr, name.String())
			}
		}
		s.eachAddress(func(_ need, a netip.Addr) { own.add(a, name.String()) })
	}
}

func (own owners) add(a netip.Addr, service string) {
	if other, known := own[a]; known && other != service {
		service = ""
	}
	own[a] = service
}

// of returns the comment of the service port to which an element belongs; for an address it names only the Service.
func (own owners) of(e *Element) string {
	switch {
	case e.Set == Addresses, e.Set == SourceKinds:
		a, _ := netip.AddrFromSlice(e.Key())
		return own[a]
	case e.Set == UnhealthyEndpoints:
		port, _, _ := strings.Cut(e.Comment, ",")
		return port
	case e.Set.IsContent() && !e.Set.IsShared():
		return e.Comment
	}
	return ""
}

// ChainsFor returns the numbered chains to which a table's elements lead, sorted.
func ChainsFor(elements *[NumSets][]Element) []ChainID {
	seen := map[ChainID]bool{}
	for _, set := range append(frontendSets[:], Pools, Remember) {
		for i := range elements[set] {
			for c := elements[set][i].Leads(); c.Kind > numFixedChains && !seen[c]; c = c.next() {
				seen[c] = true
			}
		}
	}
	out := make([]ChainID, 0, len(seen))
	for c := range seen {
		out = append(out, c)
	}
	slices.SortFunc(out, compareChains)
	return out
}

// NumberedChain returns the id of a numbered chain by its name.
func NumberedChain(name string) (id ChainID, ok bool) {
	id, ok = chainByName(name)
	return id, ok && id.Kind > numFixedChains
}

// DigestsOfElements returns the digests that a table with these elements should have.
func DigestsOfElements(f ipfamily.Family, s Structure, found *Found) Digests {
	var d Digests
	d[sharedBucket] = s.digest(f)
	for set := range NumSets {
		for i := range found.Elements[set] {
			e := &found.Elements[set][i]
			if set.IsContent() {
				d[e.bucket()].add(e.digest())
			}
		}
	}
	return d
}

// Inconsistencies returns where a table's elements contradict each other: frontends whose pool is missing, pools whose
// slots are missing, slots without a pool, and pools whose members differ from their slots. It does not compare them
// with the objects.
func Inconsistencies(found *ipfamily.Per[Found]) (out []Difference) {
	own := newOwners(found)
	for i, f := range ipfamily.All {
		c := consistency{family: f, elements: &found[i].Elements, own: own}
		c.checkPools()
		c.checkFrontends()
		slices.SortStableFunc(c.out, func(a, b Difference) int { return cmp.Compare(a.Port, b.Port) })
		out = append(out, c.out...)
	}
	return out
}

// consistency checks one table.
type consistency struct {
	family   ipfamily.Family
	elements *[NumSets][]Element
	own      owners
	out      []Difference
}

func (c *consistency) report(e *Element, format string, args ...any) {
	s := SetByID(e.Set)
	c.out = append(c.out, Difference{Family: c.family, Set: e.Set, Element: *e, Port: c.own.of(e),
		Text: fmt.Sprintf("%s { %s }: ", s.Name(), e.Text(c.family, &s)) + fmt.Sprintf(format, args...)})
}

// checkFrontends checks that every frontend leads to a pool, some frontend to every pool, and all of a pool to one
// chain.
func (c *consistency) checkFrontends() {
	pools, led, inside := map[uint32]bool{}, map[uint32]ChainID{}, map[elementKey]bool{}
	for i := range c.elements[Pools] {
		pools[c.elements[Pools][i].ID()] = true
	}
	for _, set := range [...]SetID{InsideServices, UncountedInsideServices} {
		for i := range c.elements[set] {
			inside[c.elements[set][i].identity()] = true
		}
	}
	for _, set := range frontendSets {
		for i := range c.elements[set] {
			e := &c.elements[set][i]
			id, leads := e.PoolID(), e.Leads()
			first, known := led[id]
			switch {
			case e.IsIndirect():
				if !inside[e.identity()] {
					c.report(e, "%s does not have it", InsideServices)
				}
				continue
			case leads == SharedPool.id() && !pools[id]:
				c.report(e, "its pool is not there")
			case known && first != leads:
				c.report(e, "others of its pool lead to %s", first.Name())
			}
			led[id] = leads
		}
	}
	for _, set := range [...]SetID{Pools, RefusedShares} {
		for i := range c.elements[set] {
			if e := &c.elements[set][i]; led[e.ID()] != SharedPool.id() {
				c.report(e, "no frontend leads there")
			}
		}
	}
}

// frontendSets are the maps from frontends to pools. InsideServices and OutsideServices come behind Services, which may
// lead to them, and each before its twin without counters.
var frontendSets = [...]SetID{Services, UncountedServices, InsideServices, UncountedInsideServices, OutsideServices,
	UncountedOutsideServices}

// checkPools checks the pools with their slots and members.
func (c *consistency) checkPools() {
	members, pools := c.members(), classes(c.elements)
	for _, set := range slotSets {
		slots := c.slots(set)
		for _, e := range pools {
			if e.Leads().Kind < numFixedChains {
				c.checkVerdict(e, set)
			} else if at, n := e.slots(); at == set {
				c.checkSlots(e, n, slots[e.PoolID()], members[e.PoolID()])
			}
		}
		for i := range c.elements[set] {
			e := &c.elements[set][i]
			if _, left := slots[e.ID()][e.Slot()]; left {
				c.report(e, "no pool leads there")
			}
		}
	}
}

// checkVerdict checks a pool without a choice.
func (c *consistency) checkVerdict(e *Element, set SetID) {
	switch e.Leads().Kind {
	case NoEndpoints, NoLocalEndpoints, PassOn, LeftToIPVS:
	default:
		if set == Endpoints { // once is enough
			c.report(e, "its verdict is none that Verdict writes there")
		}
	}
}

// checkSlots checks that a pool has all its slots, and removes them from those that were found.
func (c *consistency) checkSlots(
	e *Element, n uint32, slots map[uint32]netip.AddrPort, members map[netip.AddrPort]bool,
) {
	if c := e.Leads(); !c.Kind.isHash() && n > exactSizes { // as many as need this chain, or more
		n = max(uint32(len(slots)), sizeOfClass(sizeClass(n)-1)+1)
	}
	same, missing, distinct := len(slots) == int(n), -1, map[netip.AddrPort]bool{}
	for slot := range n {
		ep, ok := slots[slot]
		if !ok && missing < 0 {
			missing = int(slot)
			c.report(e, "slot %d is not there", slot)
		}
		same, distinct[ep] = same && members[ep], true
		delete(slots, slot)
	}
	if e.Leads().Kind.isSticky() && (missing < 0) && (!same || len(members) != len(distinct)) {
		c.report(e, "its members are others than its slots")
	}
}

// slots returns the endpoints of one map by pool and slot.
func (c *consistency) slots(set SetID) map[uint32]map[uint32]netip.AddrPort {
	out := map[uint32]map[uint32]netip.AddrPort{}
	for i := range c.elements[set] {
		e := &c.elements[set][i]
		if out[e.ID()] == nil {
			out[e.ID()] = map[uint32]netip.AddrPort{}
		}
		out[e.ID()][e.Slot()] = e.Target()
	}
	return out
}

// members returns the endpoints of the pools with session affinity.
func (c *consistency) members() map[uint32]map[netip.AddrPort]bool {
	out := map[uint32]map[netip.AddrPort]bool{}
	for _, set := range memberSets {
		for i := range c.elements[set] {
			e := &c.elements[set][i]
			if out[e.ID()] == nil {
				out[e.ID()] = map[netip.AddrPort]bool{}
			}
			out[e.ID()][e.Member()] = true
		}
	}
	return out
}

// memberSets are the sets of endpoints of pools with session affinity.
var memberSets = [...]SetID{StickyEndpoints, UncountedStickyEndpoints}
