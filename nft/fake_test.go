package nft

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// fakeTable takes transactions as strictly as the kernel does: what is added must not be there, what is deleted must,
// and a chain must exist while something leads to it.
type fakeTable struct {
	family ipfamily.Family
	chains map[ChainID]string
	sets   [NumSets]map[string]Element
}

func (t *fakeTable) apply(tt *TableTxn) error {
	if tt.Create != nil {
		*t = fakeTable{family: t.family, chains: map[ChainID]string{}}
		for _, s := range tt.Create.Sets {
			t.sets[s.ID] = map[string]Element{}
		}
		tt = &TableTxn{AddChains: slices.Concat(tt.Create.Chains, tt.AddChains), Add: tt.Add, DelChains: tt.DelChains}
	}
	for _, s := range tt.AddSets {
		if t.sets[s.ID] != nil {
			return fmt.Errorf("add set %s: it is there already", s.ID)
		}
		t.sets[s.ID] = map[string]Element{}
	}
	for set, elements := range tt.Del {
		for _, e := range elements {
			if held, ok := t.sets[set][string(e.Key())]; !ok || held.Bits != e.Bits ||
				SetID(set) == RefusedShares && held.data != e.data {
				return fmt.Errorf("delete %v: it is not there", e.describe(t.family))
			}
			delete(t.sets[set], string(e.Key()))
		}
	}
	for _, c := range slices.Concat(tt.AddChains, tt.Rewrite) {
		t.chains[c.ID] = rulesText(t.family, c.Rules)
	}
	for _, id := range tt.DelChains {
		if _, ok := t.chains[id]; !ok {
			return fmt.Errorf("delete chain %s: it is not there", id.Name())
		}
		delete(t.chains, id)
	}
	for _, id := range tt.DelSets {
		if t.sets[id] == nil {
			return fmt.Errorf("delete set %s: it is not there", id)
		}
		t.sets[id] = nil
	}
	for set, elements := range tt.Add {
		for _, e := range elements {
			if t.sets[set] == nil {
				return fmt.Errorf("add %v: there is no such set", e.describe(t.family))
			}
			if _, ok := t.sets[set][string(e.Key())]; ok {
				return fmt.Errorf("add %v: it is there already", e.describe(t.family))
			}
			t.sets[set][string(e.Key())] = e
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
			if next := e.Chain.next(); next.Kind != NoChain && t.chains[next] == "" {
				return fmt.Errorf("%v: it leads to no %s", e.describe(t.family), next.Name())
			}
			if _, ok := t.chains[e.Chain]; !ok {
				return fmt.Errorf("%v: no such chain", e.describe(t.family))
			}
			used[e.Chain.Name()] = true
			used[e.Chain.next().Name()] = true
		}
	}
	for id := range t.chains {
		if id.Kind > numFixedChains && !used[id.Name()] {
			return fmt.Errorf("chain %s: nothing leads to it", id.Name())
		}
	}
	return t.jumps()
}

// jumps reports rules that lead to a chain that is not there.
func (t *fakeTable) jumps() error {
	names := map[string]bool{}
	for id := range t.chains {
		names[id.Name()] = true
	}
	for id, text := range t.chains {
		words := strings.Fields(text)
		for i, word := range words {
			if (word == "goto" || word == "jump") && !names[words[i+1]] {
				return fmt.Errorf("chain %s leads to %s, which is not there", id.Name(), words[i+1])
			}
		}
	}
	return nil
}

// incomplete names a frontend or a pool that leads to something that is not there; empty if there is none.
func (t *fakeTable) incomplete() string {
	found := Found{}
	for set := range t.sets {
		found.Elements[set] = slices.Collect(maps.Values(t.sets[set]))
	}
	both := ipfamily.Per[Found]{}
	both[t.family] = found
	for _, d := range Inconsistencies(&both) {
		return d.Text
	}
	for _, e := range slices.Concat(found.Elements[Services], found.Elements[UncountedServices]) {
		if e.Leads().Kind == Restrict &&
			!slices.ContainsFunc(found.Elements[SourceRanges], func(r Element) bool { return r.ID() == e.PoolID() }) {
			return e.describe(t.family) + ": nobody may use it"
		}
	}
	return ""
}

func (e *Element) describe(f ipfamily.Family) string {
	s := SetByID(e.Set)
	return fmt.Sprintf("%s %s { %s }", f.NFT(), e.Set, e.Text(f, &s))
}

func rulesText(f ipfamily.Family, rules []Rule) string {
	var lines []string
	for _, r := range rules {
		lines = append(lines, r.Text(f))
	}
	return strings.Join(lines, "\n")
}

// lines gives everything the table holds but numbered chains, a line each, in order, whether it is counted or not. The
// slots of a pool are any order of its endpoints, so their lines tell which slots there are and which endpoints, but
// not which is where, unless a hash of the client chooses.
func (t *fakeTable) lines() []string {
	var out []string
	for id, text := range t.chains {
		if id.Kind < numFixedChains && !strings.Contains(text, "uncounted-") {
			out = append(out, "chain "+id.Name()+"\n"+text)
		}
	}
	var all [NumSets][]Element
	for set := range t.sets {
		all[set] = slices.Collect(maps.Values(t.sets[set]))
	}
	hashed := hashedPools(&all)
	for set := range t.sets {
		for _, e := range t.sets[set] {
			line := e.describe(t.family)
			if e.Set == RevisionSet {
				line = "revision " + strings.Fields(e.Comment)[0] // whatever its number, and what is counted
			}
			line = strings.ReplaceAll(line, "uncounted-", "")
			if (e.Set == Endpoints || e.Set == UncountedEndpoints) && !hashed[e.ID()] {
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

// hashedPools gives the pools in which a hash of the client chooses.
func hashedPools(elements *[NumSets][]Element) map[uint32]bool {
	out := map[uint32]bool{}
	for _, e := range classes(elements) {
		out[e.PoolID()] = e.Leads().Kind.isHash()
	}
	return out
}

// found reads a table back, and compares its chains with those of a model's.
func (t *fakeTable) found(m *Model) Found {
	f := Found{Chains: map[ChainID]bool{}}
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
	f.Revisions, f.DigestElements = f.Elements[RevisionSet], f.Elements[DigestSet]
	f.Revision = RevisionOf(f.Revisions)
	var ok bool
	if f.Digests, ok = DigestsOf(f.DigestElements); !ok {
		f.Revision = Revision{}
	}
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
type fakeKernel ipfamily.Per[fakeTable]

func newFakeKernel() *fakeKernel {
	var k fakeKernel
	for i, f := range ipfamily.All {
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

func (k *fakeKernel) found(m *Model) *ipfamily.Per[Found] {
	return &ipfamily.Per[Found]{k[0].found(m), k[1].found(m)}
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
