package nft

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// fakeTable takes transactions as strictly as the kernel does: what is added must not be there, what is deleted must, and a
// chain must exist while something leads to it.
type fakeTable struct {
	family Family
	chains map[ChainID]string
	sets   [NumSets]map[string]Element
	size   [NumSets]uint32
	// fixed sets do not grow.
	fixed bool
	// midway says that more steps of the same transaction are to come: chains may wait for what leads to them.
	midway bool
}

func (t *fakeTable) apply(tt *TableTxn) error {
	if tt.Create != nil {
		before := *t
		*t = fakeTable{family: t.family, chains: map[ChainID]string{}, fixed: t.fixed, midway: t.midway}
		for _, s := range tt.Create.Sets {
			t.sets[s.ID], t.size[s.ID] = map[string]Element{}, s.Size
		}
		if tt.Keep { // chains stay, without their rules
			t.sets[Affinity] = before.sets[Affinity]
			for id := range before.chains {
				t.chains[id] = ""
			}
		}
		tt = &TableTxn{AddChains: slices.Concat(tt.Create.Chains, tt.AddChains), Add: tt.Add, DelChains: tt.DelChains}
	}
	for _, s := range tt.Resize {
		if !t.fixed {
			t.size[s.ID] = s.Size
		}
	}
	for set, elements := range tt.Del {
		for _, e := range elements {
			if held, ok := t.sets[set][string(e.Key())]; !ok || held.Bits != e.Bits {
				return fmt.Errorf("delete %v: it is not there", e.describe(t.family))
			}
			delete(t.sets[set], string(e.Key()))
		}
	}
	for _, id := range tt.DelChains {
		if _, ok := t.chains[id]; !ok {
			return fmt.Errorf("delete chain %s: it is not there", id.Name())
		}
		delete(t.chains, id)
	}
	for _, c := range slices.Concat(tt.AddChains, tt.Rewrite) {
		t.chains[c.ID] = rulesText(t.family, c.Rules)
	}
	for set, elements := range tt.Add {
		for _, e := range elements {
			if _, ok := t.sets[set][string(e.Key())]; ok {
				return fmt.Errorf("add %v: it is there already", e.describe(t.family))
			}
			t.sets[set][string(e.Key())] = e
		}
		if n := len(t.sets[set]); t.size[set] > 0 && n > int(t.size[set]) {
			return fmt.Errorf("%s: %d elements in a set of size %d", SetID(set), n, t.size[set])
		}
	}
	return t.dangling()
}

// dangling reports what leads to a chain that is not there, and numbered chains nothing leads to.
func (t *fakeTable) dangling() error {
	used := map[string]bool{}
	for set := range t.sets {
		for _, e := range t.sets[set] {
			if e.Chain.Kind == NoChain {
				continue
			}
			if _, ok := t.chains[e.Chain]; !ok {
				return fmt.Errorf("%v: no such chain", e.describe(t.family))
			}
			used[e.Chain.Name()] = true
			used[e.Chain.next().Name()] = true
		}
	}
	for id := range t.chains {
		if id.Kind > numFixedChains && !used[id.Name()] && !t.midway {
			return fmt.Errorf("chain %s: nothing leads to it", id.Name())
		}
	}
	return nil
}

func (e *Element) describe(f Family) string {
	s := SetByID(e.Set)
	return fmt.Sprintf("%s %s { %s }", f, e.Set, e.Text(f, &s))
}

func rulesText(f Family, rules []Rule) string {
	var lines []string
	for _, r := range rules {
		lines = append(lines, r.Text(f))
	}
	return strings.Join(lines, "\n")
}

// lines gives everything the table holds, a line each, in order. The slots of a pool are any order of its endpoints, so
// their lines tell which slots there are and which endpoints, but not which is where.
func (t *fakeTable) lines() []string {
	var out []string
	for id, text := range t.chains {
		out = append(out, "chain "+id.Name()+"\n"+text)
	}
	for set := range t.sets {
		for _, e := range t.sets[set] {
			line := e.describe(t.family)
			if e.Set == RevisionSet {
				line = "revision " + e.Comment // whatever its number
			}
			if e.Set == Endpoints || e.Set == OutsideEndpoints {
				key, data, _ := strings.Cut(line, " : ")
				i := strings.LastIndex(key, " . ")
				out = append(out, "slot "+key, "endpoint "+key[:i]+" : "+data)
				continue
			}
			out = append(out, line)
		}
	}
	slices.Sort(out)
	return out
}

// found reads a table back, and compares its chains with those of a model's.
func (t *fakeTable) found(m *Model) Found {
	f := Found{Chains: map[ChainID]bool{}, Sizes: t.size}
	wanted := map[ChainID]string{}
	for _, c := range m.Structure(t.family).Chains {
		wanted[c.ID] = rulesText(t.family, c.Rules)
	}
	for id, text := range t.chains {
		want, ok := wanted[id]
		f.Chains[id] = !ok || text == want
	}
	for set := range t.sets {
		for _, e := range t.sets[set] {
			f.Elements[set] = append(f.Elements[set], e)
		}
	}
	f.Revisions = f.Elements[RevisionSet]
	f.Revision = RevisionOf(f.Revisions)
	return f
}

// copy gives a table that changes on its own.
func (t *fakeTable) copy() fakeTable {
	c := *t
	c.chains = maps.Clone(t.chains)
	for set := range c.sets {
		c.sets[set] = maps.Clone(t.sets[set])
	}
	return c
}

// fakeKernel is both tables.
type fakeKernel [len(Families)]fakeTable

func newFakeKernel() *fakeKernel {
	var k fakeKernel
	for i, f := range Families {
		k[i].family = f
	}
	return &k
}

// apply takes a transaction as a whole or not at all.
func (k *fakeKernel) apply(txn *Txn) error {
	before := fakeKernel{k[0].copy(), k[1].copy()}
	for i := range k {
		if err := k[i].apply(&txn.Tables[i]); err != nil {
			*k = before
			return err
		}
	}
	return nil
}

func (k *fakeKernel) found(m *Model) *[len(Families)]Found {
	return &[len(Families)]Found{k[0].found(m), k[1].found(m)}
}

// diff gives the lines that only one of two kernels holds.
func (k *fakeKernel) diff(want *fakeKernel) []string {
	count := map[string]int{}
	for i := range k {
		for _, l := range k[i].lines() {
			count[l]++
		}
		for _, l := range want[i].lines() {
			count[l]--
		}
	}
	var out []string
	for _, l := range slices.Sorted(maps.Keys(count)) {
		switch n := count[l]; {
		case n > 0:
			out = append(out, "too much: "+l)
		case n < 0:
			out = append(out, "missing: "+l)
		}
	}
	return out
}
