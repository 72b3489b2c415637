package nft

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// foundOf is what would be found where a state was written, with other slots than it would have now.
func foundOf(st *dataplane.State, r *rand.Rand) (found ipfamily.Per[Found], tables ipfamily.Per[Table]) {
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
		hashed := hashedPools(&found[i].Elements)
		for _, set := range slotSets {
			reslot(found[i].Elements[set], hashed, r)
		}
	}
	return found, tables
}

// reslot gives the endpoints of each pool other slots, unless a hash of the client chooses.
func reslot(elements []Element, hashed map[uint32]bool, r *rand.Rand) {
	pools := map[uint32]int{}
	for i := range elements {
		pools[elements[i].ID()]++
	}
	order := map[uint32][]int{}
	for i := range elements {
		e := &elements[i]
		if hashed[e.ID()] {
			continue
		}
		if order[e.ID()] == nil {
			order[e.ID()] = r.Perm(pools[e.ID()])
		}
		n := e.Slot()
		e.KeyLen -= slotLen
		e.addKeyWord(uint32(order[e.ID()][n]))
	}
}

// stateOfWorld is that of a random cluster.
func stateOfWorld(seed uint64) *dataplane.State {
	w, snap := newCluster(rand.New(rand.NewPCG(seed, 3))), snapshot.New()
	delta := w.Host()
	for range 15 {
		snap.Apply(delta)
		delta = w.Step()
	}
	st, _ := dataplane.Compute(testConfig, snap)
	return st
}

// TestDifferences: what was written is not different, whatever slots its endpoints have; what another state asks for is
// different in as many elements as a transaction would change, and the digest tells.
func TestDifferences(t *testing.T) {
	differed := 0
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 4))
		st, other := stateOfWorld(seed), stateOfWorld(seed+1000)
		found, tables := foundOf(st, r)
		var m, same Model
		m.Load(st)
		for i, f := range ipfamily.All {
			if d := DigestsOfElements(f, m.Layout(f), &found[i]); d != m.tables[i].digests {
				t.Fatalf("seed %d: the digest is %s, not %s", seed, d.Total(), m.tables[i].digests.Total())
			}
		}
		if d := m.Differences(&found, &tables); d != nil {
			t.Fatalf("seed %d: what was written differs: %v", seed, d)
		}
		if d := Inconsistencies(&found); d != nil {
			t.Fatalf("seed %d: what was written contradicts itself: %v", seed, d)
		}
		same.Load(other)
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

// checkDifferences says that minus is there, plus is wanted, and that there is nothing more: texts apart from slots
// tell.
func checkDifferences(t *testing.T, list []Difference, found *ipfamily.Per[Found], wanted *ipfamily.Per[Listing]) {
	t.Helper()
	count := map[string]int{}
	add := func(f ipfamily.Family, e *Element, n int) {
		s := SetByID(e.Set)
		text := e.Text(f, &s)
		if e.Set == Endpoints || e.Set == UncountedEndpoints {
			text = fmt.Sprint(e.ID(), e.Target())
		}
		count[fmt.Sprint(f.NFT(), e.Set, text)] += n
	}
	for i, f := range ipfamily.All {
		for set := range NumSets {
			if !set.IsContent() {
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
		if d.Port == "" && !(d.Set.IsShared() && (d.Set != Addresses || d.Element.PoolID()&0xf > 2)) {
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
		for _, set := range [...]SetID{Pools, InsideServices, Endpoints, UncountedEndpoints, StickyEndpoints} {
			found, _ := foundOf(stateOfWorld(seed), r)
			elements := found[0].Elements[set]
			if len(elements) == 0 {
				continue
			}
			gone := r.IntN(len(elements))
			found[0].Elements[set] = slices.Delete(elements, gone, gone+1)
			d := Inconsistencies(&found)
			if len(d) == 0 {
				t.Fatalf("seed %d: an element of %s is gone, and nothing is said", seed, set)
			}
			noticed[set]++
		}
	}
	if len(noticed) != 5 {
		t.Errorf("noticed %v", noticed)
	}
	var found ipfamily.Per[Found]
	e := frontendElement(Services, dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80})
	e.setID(7)
	found[0].Elements[Services], found[0].Elements[Pools] = []Element{e}, []Element{idElement(Pools, 7)}
	found[0].Elements[Pools][0].setID(7)
	if d := Inconsistencies(&found); len(d) != 1 ||
		!strings.Contains(d[0].Text, "its verdict is none that Verdict writes there") {
		t.Errorf("a verdict of others: %v", d)
	}
}

// TestManyEndpoints: a Service may have more endpoints than the modulus in the type of a slot's key says.
func TestManyEndpoints(t *testing.T) {
	svc := webService()
	slice := &snapshot.Slice{Name: svc.Name, Service: svc.Name.Name,
		Ports: []snapshot.SlicePort{{Name: "a", Protocol: snapshot.TCP, Port: 8080}}}
	for i := range MaxSlots + 10 {
		a := netip.AddrFrom4([4]byte{10, byte(128 + i>>16), byte(i >> 8), byte(i)})
		slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: a, Ready: true, Serving: true})
	}
	snap := snapshot.New()
	snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}})
	st, _ := dataplane.Compute(testConfig, snap)
	found, tables := foundOf(st, rand.New(rand.NewPCG(1, 6)))
	if d := Inconsistencies(&found); d != nil {
		t.Errorf("%d contradictions, the first is %v", len(d), d[0])
	}
	if keys := found[0].SlotKeys()[Endpoints]; len(keys) < len(slice.Endpoints) ||
		len(keys) > len(slice.Endpoints)*5/4 {
		t.Errorf("%d slots are looked for; there are %d", len(keys), len(slice.Endpoints))
	}
	var m Model
	m.Load(st)
	if d := m.Differences(&found, &tables); d != nil {
		t.Errorf("%d differences, the first is %v", len(d), d[0])
	}
}
