package iptshim

import (
	"bytes"
	"cmp"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Txn is what has to be written to take the kernel from what it holds to what it should hold: a text for each family, which
// iptables-restore --noflush takes in one call. Each table in it is one transaction of the kernel.
type Txn struct {
	families [len(Families)]familyTxn
	undo     []func()
}

// familyTxn is one family's part of a transaction.
type familyTxn struct {
	writes []chain
	drops  []tableChain
	// jumps are the indexes of those that are added.
	jumps []int
	// brief leaves out the comments in the chains of service ports.
	brief bool
}

func (t *familyTxn) empty() bool { return len(t.writes)+len(t.drops)+len(t.jumps) == 0 }

// Empty says whether nothing is written in any family.
func (t *Txn) Empty() bool { return t.families[IPv4].empty() && t.families[IPv6].empty() }

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

// Text gives what iptables-restore --noflush has to be told for IPv4, or ip6tables-restore for IPv6; nil if there is nothing.
func (t *Txn) Text(f Family) []byte {
	w := textWriter{}
	w.family(&t.families[f])
	return w.text
}

// Blame gives the Services that asked for what stands in a line of Text, counted from 1: none for lines that are nobody's, such as
// COMMIT, several where a chain belongs to several.
func (t *Txn) Blame(f Family, line int) []snapshot.Name {
	w := textWriter{owners: []snapshot.Name{}}
	w.family(&t.families[f])
	if line < 1 || line > len(w.owners) || w.owners[line-1] == (snapshot.Name{}) {
		return nil
	}
	return []snapshot.Name{w.owners[line-1]}
}

// BlameChain gives the Services that asked for what Text writes to a chain, sorted; none if it is nobody's.
func (t *Txn) BlameChain(f Family, table Table, name string) (names []snapshot.Name) {
	for _, c := range t.families[f].writes {
		if c.table != table || c.name != name {
			continue
		}
		names = append(names, c.owner)
		for i := range c.rules {
			names = append(names, c.rules[i].owner)
		}
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	names = slices.Compact(names)
	return slices.DeleteFunc(names, func(n snapshot.Name) bool { return n == snapshot.Name{} })
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

func (w *textWriter) table(t *familyTxn, table Table) {
	writes, drops, nobody := t.of(table), t.dropped(table), snapshot.Name{}
	added := slices.DeleteFunc(slices.Clone(t.jumps), func(i int) bool { return jumps[i].table != table })
	if len(writes)+len(drops)+len(added) == 0 {
		return
	}
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
		comments := !t.brief || !bare(table, c.name)
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

// of gives the chains of a table that are written, sorted by name.
func (t *familyTxn) of(table Table) (out []chain) {
	for _, c := range t.writes {
		if c.table == table {
			out = append(out, c)
		}
	}
	slices.SortStableFunc(out, func(a, b chain) int { return cmp.Compare(a.name, b.name) })
	return out
}

func (t *familyTxn) dropped(table Table) (out []string) {
	for _, d := range t.drops {
		if d.table == table {
			out = append(out, d.chain)
		}
	}
	slices.SortFunc(out, strings.Compare)
	return out
}

// Full gives all of the text for a kernel that holds nothing of ours, as render prints it.
func (m *Model) Full(f Family) []byte {
	fresh := New(m.options)
	return bytes.Clone(fresh.Plan(&m.state, dataplane.Change{}).Text(f))
}
