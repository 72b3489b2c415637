package nft

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Difference is something that a table holds and should not, or should hold and does not.
type Difference struct {
	Family Family
	// Wanted says that it should be there; otherwise it is there.
	Wanted bool
	// Set is where the Element belongs; else it is about the structure, and NumSets.
	Set     SetID
	Element Element
	// Text is the object as nft writes it: an element with its set, a rule with its chain, or a sentence.
	Text string
	// Port is the service port it belongs to as its comment has it, "namespace/name:port"; empty if it is nobody's.
	Port string
}

// String gives a line of a listing of differences: "+ ip services { ... }".
func (d Difference) String() string {
	sign := "-"
	if d.Wanted {
		sign = "+"
	}
	return sign + " " + d.Family.String() + " " + d.Text
}

// Service gives "namespace/name" of the Service it belongs to; empty if it is nobody's.
func (d *Difference) Service() string { return serviceOf(d.Port) }

func serviceOf(comment string) string {
	service, _, _ := strings.Cut(comment, ":")
	return service
}

// Differences says in what the tables that were found differ from what the model holds after its first Plan. Which endpoint of a
// pool has which slot makes no difference, nor do the sets' sizes, the revision, and what clients are remembered. Have are the
// tables with the rules that were found. The model is of no use afterwards.
func (m *Model) Differences(found *[len(Families)]Found, have *[len(Families)]Table) []Difference {
	own := newOwners(found)
	own.model(m)
	txn := m.Correct(found)
	var out []Difference
	for i, f := range Families {
		tt := &txn.Tables[i]
		out = append(out, structureDifferences(f, tt, &have[i])...)
		for set := range NumSets {
			if set == RevisionSet || set == Affinity {
				continue
			}
			out = append(out, elementDifferences(f, set, tt, own)...)
		}
	}
	return out
}

func elementDifferences(f Family, set SetID, tt *TableTxn, own *owners) (out []Difference) {
	s := SetByID(set)
	gather := func(elements []Element, wanted bool) {
		for _, e := range elements {
			out = append(out, Difference{Family: f, Wanted: wanted, Set: set, Element: e, Port: own.of(f, &e),
				Text: s.Name() + " { " + e.Text(f, &s) + " }"})
		}
	}
	gather(tt.Del[set], false)
	gather(tt.Add[set], true)
	slices.SortStableFunc(out, func(a, b Difference) int { return compareElements(f, &s, &a.Element, &b.Element) })
	return out
}

// structureDifferences compares chains and rules.
func structureDifferences(f Family, tt *TableTxn, have *Table) (out []Difference) {
	chain := func(wanted bool, c Chain, rules []Rule) {
		for _, r := range rules {
			out = append(out, Difference{Family: f, Wanted: wanted, Set: NumSets, Text: "chain " + c.ID.Name() + " { " + r.Text(f) + " }"})
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

// changedRules leaves out what two chains have in common at their beginnings and ends.
func changedRules(f Family, a, b []Rule) (x, y []Rule) {
	same := func(r, s Rule) bool { return r.Text(f) == s.Text(f) }
	for len(a) > 0 && len(b) > 0 && same(a[0], b[0]) {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && same(a[len(a)-1], b[len(b)-1]) {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return a, b
}

// owners says which service port an element belongs to.
type owners struct {
	frontends map[slotsKey]string
	addrs     map[netip.Addr]string
	pools     map[Family]map[uint32]string
}

// newOwners reads the comments of what was found.
func newOwners(found *[len(Families)]Found) *owners {
	own := &owners{map[slotsKey]string{}, map[netip.Addr]string{}, map[Family]map[uint32]string{IPv4: {}, IPv6: {}}}
	for i, f := range Families {
		for _, e := range found[i].Elements[Services] {
			k := e.slots(0)
			own.addrs[k.addr] = serviceOf(e.Comment)
			own.frontends[anySet(k)] = e.Comment
		}
		for _, set := range [...]SetID{Sticky, OutsideSticky} {
			for _, e := range found[i].Elements[set] {
				own.pools[f][binary.NativeEndian.Uint32(e.data[:])] = own.frontends[anySet(e.slots(0))]
			}
		}
	}
	return own
}

// model adds what a model knows.
func (own *owners) model(m *Model) {
	for name, s := range m.services {
		for _, a := range s.clusterIPs {
			own.addrs[a] = name.String()
		}
		for _, p := range s.ports {
			for i := range p.frontends {
				own.frontends[anySet(slotsKeyOf(Services, p.frontends[i].key))] = p.comment
			}
		}
	}
	for id, p := range m.pools {
		own.pools[p.port.family][id] = commentOf(p.port.name.String())
	}
}

func anySet(k slotsKey) slotsKey {
	k.set = Services
	return k
}

// of gives the comment of the service port that an element belongs to; that of cluster IPs names the Service alone.
func (own *owners) of(f Family, e *Element) string {
	switch e.Set {
	case ServiceCIDRs, Hairpin, Affinity, RevisionSet:
		return ""
	case ClusterIPs:
		a, _ := netip.AddrFromSlice(e.Key())
		return own.addrs[a]
	case StickyEndpoints:
		return own.pools[f][binary.NativeEndian.Uint32(e.key[:])]
	case Endpoints, OutsideEndpoints:
		return own.frontends[anySet(e.slots(slotLen))]
	case SourceRanges:
		return own.frontends[anySet(e.slots(f.AddrLen()))]
	}
	return own.frontends[anySet(e.slots(0))]
}

// TableOf gives the structure of a table with some numbered chains, its sets without their sizes.
func TableOf(f Family, s Structure, chains []ChainID) Table {
	t := layout(f, s)
	for _, id := range chains {
		t.Chains = append(t.Chains, numbered(id))
	}
	return t
}

// ChainsFor gives the numbered chains that a table's elements lead to, sorted.
func ChainsFor(elements *[NumSets][]Element) []ChainID {
	seen := map[ChainID]bool{}
	for _, set := range [...]SetID{Services, OutsideServices, Remember} {
		for i := range elements[set] {
			for c := elements[set][i].Chain; c.Kind > numFixedChains && !seen[c]; c = c.next() {
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

// NumberedChain gives the id of the chain with a name, if it is one of those there are by number.
func NumberedChain(name string) (id ChainID, ok bool) {
	id, ok = chainByName(name)
	return id, ok && id.Kind > numFixedChains
}

// DigestOf gives the digest that a table with such elements should have in its revision.
func DigestOf(f Family, s Structure, elements *[NumSets][]Element) Digest {
	d := s.digest(f)
	for set := range elements {
		if SetID(set) == Affinity || SetID(set) == RevisionSet {
			continue
		}
		for i := range elements[set] {
			d.add(elements[set][i].digest())
		}
	}
	return d
}

// Inconsistencies says in what a table's elements contradict each other: frontends that lead to slots that are not there, slots
// that no frontend leads to, and sticky pools that are not complete. It knows nothing of what the objects ask for.
func Inconsistencies(found *[len(Families)]Found) (out []Difference) {
	own := newOwners(found)
	for i, f := range Families {
		c := consistency{family: f, elements: &found[i].Elements, own: own}
		c.frontends(Services, Endpoints, Sticky)
		c.frontends(OutsideServices, OutsideEndpoints, OutsideSticky)
		slices.SortStableFunc(c.out, func(a, b Difference) int { return cmp.Compare(a.Port, b.Port) })
		out = append(out, c.out...)
	}
	return out
}

// consistency looks at one table.
type consistency struct {
	family   Family
	elements *[NumSets][]Element
	own      *owners
	out      []Difference
}

func (c *consistency) note(wanted bool, e *Element, format string, args ...any) {
	s := SetByID(e.Set)
	c.out = append(c.out, Difference{Family: c.family, Wanted: wanted, Set: e.Set, Element: *e, Port: c.own.of(c.family, e),
		Text: fmt.Sprintf("%s { %s }: ", s.Name(), e.Text(c.family, &s)) + fmt.Sprintf(format, args...)})
}

// frontends looks at the frontends of one map, with their slots and their pools.
func (c *consistency) frontends(set, slots, sticky SetID) {
	pick, stick := Pick, StickyPick
	if set == OutsideServices {
		pick, stick = OutsidePick, OutsideStickyPick
	}
	held := map[slotsKey]map[uint32]netip.AddrPort{}
	for i := range c.elements[slots] {
		e := &c.elements[slots][i]
		n, ep := e.slotOf()
		k := anySet(e.slots(slotLen))
		if held[k] == nil {
			held[k] = map[uint32]netip.AddrPort{}
		}
		held[k][n] = ep
	}
	pools, members := c.pools(sticky)
	for i := range c.elements[set] {
		e := &c.elements[set][i]
		k, n := anySet(e.slots(0)), 0
		switch {
		case e.Chain.Kind == pick || e.Chain.Kind == stick:
			n = int(e.Chain.N)
		case e.Chain.Kind != NoEndpoints && e.Chain.Kind != NoLocalEndpoints && e.Chain.Kind != LeftToIPVS:
			c.note(false, e, "its verdict is none that Verdict writes there")
		}
		there := held[k]
		for slot := range uint32(n) {
			if _, ok := there[slot]; !ok {
				c.note(false, e, "slot %d is not there", slot)
				break
			}
		}
		if e.Chain.Kind == stick && !sameMembers(there, members[pools[k]]) {
			c.note(false, e, "the endpoints of its sticky pool are others than those of its slots")
		}
		for slot := range there {
			if slot < uint32(n) {
				delete(there, slot)
			}
		}
	}
	for i := range c.elements[slots] {
		e := &c.elements[slots][i]
		if n, _ := e.slotOf(); held[anySet(e.slots(slotLen))] != nil {
			if _, left := held[anySet(e.slots(slotLen))][n]; left {
				c.note(false, e, "no frontend leads there")
			}
		}
	}
}

// pools gives the pool of each sticky frontend, and the endpoints of each pool.
func (c *consistency) pools(sticky SetID) (pools map[slotsKey]uint32, members map[uint32][]netip.AddrPort) {
	pools, members = map[slotsKey]uint32{}, map[uint32][]netip.AddrPort{}
	for i := range c.elements[sticky] {
		e := &c.elements[sticky][i]
		pools[anySet(e.slots(0))] = binary.NativeEndian.Uint32(e.data[:])
	}
	for i := range c.elements[StickyEndpoints] {
		e := &c.elements[StickyEndpoints][i]
		id, ep := e.member()
		members[id] = append(members[id], ep)
	}
	return pools, members
}

// member reads an element of StickyEndpoints.
func (e *Element) member() (id uint32, ep netip.AddrPort) {
	n := int(e.KeyLen) - 8
	addr, _ := netip.AddrFromSlice(e.key[4 : 4+n])
	return binary.NativeEndian.Uint32(e.key[:]), netip.AddrPortFrom(addr, binary.BigEndian.Uint16(e.key[4+n:]))
}

func sameMembers(slots map[uint32]netip.AddrPort, members []netip.AddrPort) bool {
	if len(slots) != len(members) {
		return false
	}
	for _, ep := range slots {
		if !slices.Contains(members, ep) {
			return false
		}
	}
	return true
}
