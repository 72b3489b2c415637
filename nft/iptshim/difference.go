package iptshim

import (
	"maps"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Difference is a rule or a chain that is there and should not be, or should be there and is not.
type Difference struct {
	Family ipfamily.Family
	Table  Table
	// Chain is the chain it is about.
	Chain string
	// Wanted says that it should be there; otherwise it is there.
	Wanted bool
	// Rule is what stands after "-A CHAIN"; empty if it is about the chain itself.
	Rule string
	// Service is whose it is; the zero Name says that it is nobody's, or that it is not known.
	Service snapshot.Name
}

// String gives a line as iptables-save has it: "+ IPv4 nat -A KUBE-SVC-... -j KUBE-SEP-...".
func (d Difference) String() string {
	sign := "- "
	if d.Wanted {
		sign = "+ "
	}
	line := ":" + d.Chain
	if d.Rule != "" {
		line = "-A " + d.Chain + d.Rule
	}
	return sign + d.Family.String() + " " + string(d.Table) + " " + line
}

// Differences says in what the tables of a family, as iptables-save printed them, differ from what was planned.
// Comments in the chains of service ports make none, since large clusters have no such, nor does the order of rules in
// KUBE-SERVICES and other lists.
func (m *Model) Differences(f ipfamily.Family, saved *Saved) []Difference {
	fresh := New(m.options)
	txn := fresh.Plan(&m.state, dataplane.Change{})
	c := comparison{family: f, saved: saved}
	wanted := map[tableChain]bool{}
	for _, t := range Tables {
		for _, ch := range txn.families[f].writesTo(t) {
			wanted[tableChain{t, ch.name}] = true
			c.chain(&ch)
		}
	}
	for _, t := range Tables {
		if table := saved.tables[t]; table != nil {
			for _, name := range slices.Sorted(maps.Keys(table.chains)) {
				if isOurs(t, name) && !wanted[tableChain{t, name}] {
					c.foreign(t, name)
				}
			}
		}
	}
	for i := range jumps {
		j := &jumps[i]
		if fresh.families[f].structure.wants(j) && !saved.hasJump(j) {
			c.note(Difference{Table: j.table, Chain: j.from, Wanted: true, Rule: j.rule.text()})
		}
	}
	return c.out
}

// comparison gathers differences of one family.
type comparison struct {
	family ipfamily.Family
	saved  *Saved
	out    []Difference
}

func (c *comparison) note(d Difference) {
	d.Family = c.family
	c.out = append(c.out, d)
}

// chain compares a chain that should be there.
func (c *comparison) chain(want *chain) {
	if !c.saved.has(want.table, want.name) {
		c.note(Difference{Table: want.table, Chain: want.name, Wanted: true, Service: want.owner})
	}
	have := c.saved.chain(want.table, want.name)
	if have.digest() == want.digest() {
		return
	}
	words := func(r rule) string {
		if commentsRedundant(want.table, want.name) {
			r.comment = ""
		}
		return r.text()
	}
	less, more := changed(have.rules, want.rules, words)
	for i, rules := range [...][]rule{less, more} {
		for _, r := range rules {
			c.note(Difference{Table: want.table, Chain: want.name, Wanted: i == 1, Rule: r.text(),
				Service: serviceOf(r, want.owner)})
		}
	}
	if len(less)+len(more) == 0 && want.owner != (snapshot.Name{}) { // the order of a Service's own rules decides
		for _, r := range want.rules {
			c.note(Difference{Table: want.table, Chain: want.name, Wanted: true, Rule: r.text(), Service: want.owner})
		}
	}
}

// changed gives the rules that only one of two chains has.
func changed(have, want []rule, words func(rule) string) (less, more []rule) {
	left := map[string]int{}
	for _, r := range want {
		left[words(r)]++
	}
	for _, r := range have {
		if left[words(r)]--; left[words(r)] < 0 {
			less = append(less, r)
		}
	}
	left = map[string]int{}
	for _, r := range have {
		left[words(r)]++
	}
	for _, r := range want {
		if left[words(r)]--; left[words(r)] < 0 {
			more = append(more, r)
		}
	}
	return less, more
}

// foreign notes a chain that should not be there.
func (c *comparison) foreign(t Table, name string) {
	c.note(Difference{Table: t, Chain: name})
	for _, r := range c.saved.chain(t, name).rules {
		c.note(Difference{Table: t, Chain: name, Rule: r.text(), Service: serviceOf(r, snapshot.Name{})})
	}
}

// serviceOf reads the Service from a rule that was found, or takes the owner of the chain.
func serviceOf(r rule, owner snapshot.Name) snapshot.Name {
	if r.owner != (snapshot.Name{}) {
		return r.owner
	}
	if owner != (snapshot.Name{}) {
		return owner
	}
	for _, word := range strings.Fields(r.comment) {
		if namespace, name, ok := strings.Cut(word, "/"); ok {
			name, _, _ = strings.Cut(name, ":")
			return snapshot.Name{Namespace: namespace, Name: name}
		}
	}
	return snapshot.Name{}
}
