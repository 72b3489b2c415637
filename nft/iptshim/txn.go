package iptshim

import (
	"bytes"
	"cmp"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Txn is what has to be written to take the kernel from what it holds to what it should hold: a text for each family,
// which iptables-restore --noflush takes in one call. Each table in it is one transaction of the kernel.
type Txn struct {
	families ipfamily.Per[familyTxn]
	undo     []func()
}

// familyTxn is one family's part of a transaction.
type familyTxn struct {
	writes []chain
	drops  []tableChain
	// jumps are the indexes of those that are added.
	jumps []int
	// omitComments leaves out the comments in the chains of service ports.
	omitComments bool
	// step is how many lines one COMMIT has, or a little more; 0 means all.
	step int
}

func (t *familyTxn) empty() bool { return len(t.writes)+len(t.drops)+len(t.jumps) == 0 }

// Empty says whether nothing is written in any family.
func (t *Txn) Empty() bool {
	return t.families[ipfamily.IPv4].empty() && t.families[ipfamily.IPv6].empty()
}

// Counts gives the number of chains that are written and deleted, and of the rules in them.
func (t *Txn) Counts() (chains, deleted, rules int) {
	for i := range t.families {
		ft := &t.families[i]
		chains, deleted, rules = chains+len(ft.writes), deleted+len(ft.drops), rules+len(ft.jumps)
		for _, c := range ft.writes {
			rules += len(c.rules)
		}
	}
	return chains, deleted, rules
}

// Text gives what iptables-restore --noflush has to be told for IPv4, or ip6tables-restore for IPv6; nil if there is
// nothing. If that fails, some of it may be in: then Adopt has to be told what is there.
func (t *Txn) Text(f ipfamily.Family) []byte {
	w := textWriter{}
	w.family(&t.families[f])
	return w.text
}

// OwnersOfLine gives the Services that asked for what stands in a line of Text, counted from 1: none for lines that are
// nobody's, such as COMMIT, several where a chain belongs to several.
func (t *Txn) OwnersOfLine(f ipfamily.Family, line int) []snapshot.Name {
	w := textWriter{owners: []snapshot.Name{}}
	w.family(&t.families[f])
	if line < 1 || line > len(w.owners) || w.owners[line-1] == (snapshot.Name{}) {
		return nil
	}
	return []snapshot.Name{w.owners[line-1]}
}

// textWriter writes the lines of a text, and if asked to whose they are.
type textWriter struct {
	text   []byte
	owners []snapshot.Name
}

func (w *textWriter) line(owner snapshot.Name, parts ...string) {
	for _, p := range parts {
		w.text = append(w.text, p...)
	}
	w.text = append(w.text, '\n')
	w.owned(owner)
}

func (w *textWriter) owned(owner snapshot.Name) {
	if w.owners != nil {
		w.owners = append(w.owners, owner)
	}
}

// family writes all tables of a family's transaction.
func (w *textWriter) family(t *familyTxn) {
	for _, table := range Tables {
		w.table(t, table)
	}
}

// table writes a table's part: all at once, or in steps if it is long. What rules lead to is written before them, and
// what nothing leads to any more is deleted in the end, so that each step leaves Services whole.
func (w *textWriter) table(t *familyTxn, table Table) {
	var added []int
	for _, i := range t.jumps {
		if jumps[i].table == table {
			added = append(added, i)
		}
	}
	writes, drops := t.writesTo(table), t.dropsFrom(table)
	if lines := lineCount(writes) + 2*len(drops); t.step == 0 || lines <= t.step {
		w.block(t, table, writes, drops, added)
		return
	}
	var first, alone, last []chain
	for _, c := range writes {
		switch {
		case c.owner != (snapshot.Name{}):
			alone = append(alone, c)
		case table == NAT && c.name == markChain:
			first = append(first, c)
		case !isBranch(table, c.name):
			last = append(last, c)
		}
	}
	slices.SortStableFunc(alone, func(a, b chain) int { return cmp.Compare(rank(table, b.name), rank(table, a.name)) })
	w.block(t, table, first, nil, nil)
	w.steps(t, table, alone)
	w.steps(t, table, t.branches(table))
	w.block(t, table, last, nil, added)
	// Branches lead to each other: they go at once.
	branches := slices.IndexFunc(drops, func(name string) bool { return commentsRedundant(table, name) })
	if branches < 0 {
		branches = len(drops)
	}
	w.block(t, table, nil, drops[:branches], nil)
	for part := range slices.Chunk(drops[branches:], max(t.step/2, 1)) {
		w.block(t, table, nil, part, nil)
	}
}

// steps writes chains in blocks: each chain after those that its rules lead to.
func (w *textWriter) steps(t *familyTxn, table Table, chains []chain) {
	for len(chains) > 0 {
		n, lines := 0, 0
		for n < len(chains) && lines < t.step {
			lines += 1 + len(chains[n].rules)
			n++
		}
		w.block(t, table, chains[:n], nil, nil)
		chains = chains[n:]
	}
}

func lineCount(chains []chain) (n int) {
	for i := range chains {
		n += 1 + len(chains[i].rules)
	}
	return n
}

// branches gives the branches of a table's trees that are written, each after those under it.
func (t *familyTxn) branches(table Table) (out []chain) {
	for _, c := range t.writes {
		if c.table == table && c.owner == (snapshot.Name{}) && isBranch(table, c.name) {
			out = append(out, c)
		}
	}
	return out
}

// block writes what is one transaction of the kernel, the chains from the last name to the first: the legacy variant's
// programs keep chains in a sorted list, of which they go through less that way (docs/decisions/0012-iptables.md).
func (w *textWriter) block(t *familyTxn, table Table, writes []chain, drops []string, added []int) {
	if len(writes)+len(drops)+len(added) == 0 {
		return
	}
	writes = slices.Clone(writes)
	slices.SortFunc(writes, func(a, b chain) int { return strings.Compare(b.name, a.name) })
	nobody := snapshot.Name{}
	w.line(nobody, "*", string(table))
	for i := range writes {
		w.line(writes[i].owner, ":", writes[i].name, " - [0:0]")
	}
	for _, name := range drops {
		w.line(nobody, ":", name, " - [0:0]")
	}
	for _, i := range added {
		w.text = jumps[i].rule.append(w.text, "-I", jumps[i].from, true)
		w.owned(nobody)
	}
	for i := range writes {
		c := &writes[i]
		comments := !t.omitComments || !commentsRedundant(table, c.name)
		for n := range c.rules {
			w.text = c.rules[n].append(w.text, "-A", c.name, comments)
			w.owned(c.rules[n].owner)
		}
	}
	for _, name := range drops {
		w.line(nobody, "-X ", name)
	}
	w.line(nobody, "COMMIT")
}

// writesTo gives the chains of a table that are written, those of one Service beside each other.
func (t *familyTxn) writesTo(table Table) (out []chain) {
	for _, c := range t.writes {
		if c.table == table {
			out = append(out, c)
		}
	}
	slices.SortStableFunc(out, func(a, b chain) int {
		return cmp.Or(a.owner.Compare(b.owner), cmp.Compare(a.name, b.name))
	})
	return out
}

// dropsFrom gives the chains of a table that are deleted: the branches of trees, then others, each before those that
// its rules led to.
func (t *familyTxn) dropsFrom(table Table) (out []string) {
	for _, d := range t.drops {
		if d.table == table {
			out = append(out, d.chain)
		}
	}
	slices.SortFunc(out, func(a, b string) int {
		return cmp.Or(cmp.Compare(rank(table, a), rank(table, b)), strings.Compare(a, b))
	})
	return out
}

// rank is greater for chains that the rules of others lead to: 0 for branches of trees, then those of service ports.
func rank(table Table, name string) int {
	if !commentsRedundant(table, name) {
		return 0
	}
	return 1 + slices.IndexFunc([]string{fwPrefix, extPrefix, svcPrefix, svlPrefix, sepPrefix},
		func(p string) bool { return strings.HasPrefix(name, p) })
}

// Full gives all of the text for a kernel that holds nothing of ours, as render prints it.
func (m *Model) Full(f ipfamily.Family) []byte {
	fresh := New(m.options)
	return bytes.Clone(fresh.Plan(&m.state, dataplane.Change{}).Text(f))
}
