package nft

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// foundOf is what would be found where a state was written, with other slots than it would have now.
func foundOf(st *dataplane.State, r *rand.Rand) (found [2]Found, tables [2]Table) {
	order := map[string]map[uint32]uint32{}
	for i, l := range List(st) {
		found[i].Chains = map[ChainID]bool{}
		for _, c := range l.Table.Chains {
			found[i].Chains[c.ID] = true
		}
		tables[i] = l.Table
		for set := range l.Elements {
			for _, e := range l.Elements[set] {
				found[i].Elements[set] = append(found[i].Elements[set], e.Element)
			}
		}
		for _, set := range [...]SetID{Endpoints, OutsideEndpoints} {
			reslot(found[i].Elements[set], &found[i], order, r)
		}
	}
	return found, tables
}

// reslot gives the endpoints of each pool other slots, the same at all of its frontends.
func reslot(elements []Element, found *Found, order map[string]map[uint32]uint32, r *rand.Rand) {
	pools := map[slotsKey]string{}
	eps := map[slotsKey][]string{}
	for i := range elements {
		_, ep := elements[i].slotOf()
		eps[elements[i].slots(slotLen)] = append(eps[elements[i].slots(slotLen)], ep.String())
	}
	for k, list := range eps {
		slices.Sort(list)
		pools[k] = strings.Join(list, " ") // frontends with the same endpoints may be of one pool
	}
	for i := range elements {
		e := &elements[i]
		k := e.slots(slotLen)
		id := pools[k]
		if order[id] == nil {
			order[id] = map[uint32]uint32{}
			for n, to := range r.Perm(len(eps[k])) {
				order[id][uint32(n)] = uint32(to)
			}
		}
		n, _ := e.slotOf()
		e.KeyLen -= slotLen
		e.addKeyWord(order[id][n])
	}
}

// stateOfWorld is that of a random cluster.
func stateOfWorld(seed uint64) *dataplane.State {
	w, snap := world{rand.New(rand.NewPCG(seed, 3))}, snapshot.New()
	delta := w.host()
	for range 15 {
		snap.Apply(delta)
		delta = w.step()
	}
	st, _ := dataplane.Compute(testConfig, snap)
	return st
}

// TestDifferences: what was written is not different, whatever slots its endpoints have; what another state asks for is different in
// as many elements as a transaction would change, and the digest tells.
func TestDifferences(t *testing.T) {
	differed := 0
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 4))
		st, other := stateOfWorld(seed), stateOfWorld(seed+1000)
		found, tables := foundOf(st, r)
		var m, same Model
		m.Plan(st, dataplane.Change{})
		for i, f := range Families {
			if d := DigestOf(f, m.tables[i].structure, &found[i].Elements); d != m.Revision(f).Digest {
				t.Fatalf("seed %d: the digest is %s, not %s", seed, d, m.Revision(f).Digest)
			}
		}
		if d := m.Differences(&found, &tables); d != nil {
			t.Fatalf("seed %d: what was written differs: %v", seed, d)
		}
		if d := Inconsistencies(&found); d != nil {
			t.Fatalf("seed %d: what was written contradicts itself: %v", seed, d)
		}
		same.Plan(other, dataplane.Change{})
		list := List(other)
		if d := same.Differences(&found, &tables); len(d) > 0 {
			differed++
			checkDifferences(t, d, &found, &list)
		}
	}
	if differed < 50 {
		t.Errorf("only %d pairs of states differed", differed)
	}
}

// checkDifferences says that minus is there, plus is wanted, and that there is nothing more: texts apart from slots tell.
func checkDifferences(t *testing.T, list []Difference, found *[2]Found, wanted *[2]Listing) {
	t.Helper()
	count := map[string]int{}
	add := func(f Family, e *Element, n int) {
		s := SetByID(e.Set)
		text := e.Text(f, &s)
		if e.Set == Endpoints || e.Set == OutsideEndpoints {
			k := e.slots(slotLen)
			_, ep := e.slotOf()
			text = fmt.Sprint(k, ep)
		}
		count[fmt.Sprint(f, e.Set, text)] += n
	}
	for i, f := range Families {
		for set := range NumSets {
			if set == RevisionSet || set == Affinity {
				continue
			}
			for k := range found[i].Elements[set] {
				add(f, &found[i].Elements[set][k], 1)
			}
			for k := range wanted[i].Elements[set] {
				add(f, &wanted[i].Elements[set][k].Element, -1)
			}
		}
	}
	for _, d := range list {
		if d.Set == NumSets {
			continue
		}
		n := -1
		if d.Wanted {
			n = 1
		}
		add(d.Family, &d.Element, n)
		if d.Port == "" && d.Set != Hairpin && d.Set != ServiceCIDRs {
			t.Fatalf("%v is nobody's", d)
		}
	}
	for text, n := range count {
		if n != 0 {
			t.Fatalf("%s is left over %d times", text, n)
		}
	}
}

// TestInconsistencies takes single elements out of what belongs together.
func TestInconsistencies(t *testing.T) {
	noticed := map[SetID]int{}
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 5))
		for _, set := range [...]SetID{Services, Endpoints, OutsideServices, OutsideEndpoints, Sticky, StickyEndpoints} {
			found, _ := foundOf(stateOfWorld(seed), r)
			elements := found[0].Elements[set]
			if len(elements) == 0 {
				continue
			}
			gone := r.IntN(len(elements))
			of, _ := elements[gone].Chain, 0
			found[0].Elements[set] = slices.Delete(elements, gone, gone+1)
			d := Inconsistencies(&found)
			if (set == Services || set == OutsideServices) && of.Kind < numFixedChains {
				continue // nothing hangs on it
			}
			if len(d) == 0 {
				t.Fatalf("seed %d: an element of %s is gone, and nothing is said", seed, set)
			}
			noticed[set]++
		}
	}
	if len(noticed) != 6 {
		t.Errorf("noticed %v", noticed)
	}
	var found [2]Found
	e := frontendElement(Services, dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80})
	found[0].Elements[Services] = []Element{e}
	if d := Inconsistencies(&found); len(d) != 1 || !strings.Contains(d[0].Text, "its verdict is none that Verdict writes there") {
		t.Errorf("a verdict of others: %v", d)
	}
}
