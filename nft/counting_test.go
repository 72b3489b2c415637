package nft

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestLevelsOfCounting: more is counted, the higher the level, and what a budget is enough for is found by what
// Services need.
func TestLevelsOfCounting(t *testing.T) {
	const share = 10
	var all needs
	for _, svc := range []struct{ frontends, endpoints int }{{2, 3}, {2, 8}, {3, 8}, {10, 100}, {11, 1}} {
		one := needsOf(svc.frontends, svc.endpoints, share)
		for level := CountNothing; level < CountEndpoints; level++ {
			of, next := level.of(svc.frontends, svc.endpoints, share), (level+1).of(svc.frontends, svc.endpoints, share)
			if of > next && level != CountFrontends { // that is for all, and the next for most
				t.Errorf("%v: %s counts %s, %s %s", svc, level, of, level+1, next)
			}
		}
		all.add(one, +1)
	}
	want := needs{0, 2 + 2 + 3 + 10, 2 + 2 + 3 + 10 + 11, 5 + 10 + 3 + 10, 28 + 120}
	if all != want {
		t.Fatalf("they need %v; want %v", all, want)
	}
	for _, test := range []struct {
		from   Counting
		budget int
		want   Counting
	}{
		{CountEndpoints, 148, CountEndpoints},
		{CountEndpoints, 147, CountMostEndpoints},
		{CountEndpoints, 27, CountMostFrontends},
		{CountEndpoints, 16, CountNothing},
		{CountMostFrontends, 40, CountMostFrontends},
		{CountMostFrontends, 30, CountMostFrontends},
		{CountNothing, 33, CountNothing},
		{CountNothing, 34, CountMostFrontends},
		{CountNothing, 56, CountMostEndpoints},
		{CountMostEndpoints, 295, CountMostEndpoints},
		{CountMostEndpoints, 296, CountEndpoints},
	} {
		if got := test.from.within(test.budget, &all); got != test.want {
			t.Errorf("%d counters, and %s so far: %s; want %s", test.budget, test.from, got, test.want)
		}
	}
}

// TestAllAreLarge: where every Service is beyond its share, the frontends of all are better than most of nothing.
func TestAllAreLarge(t *testing.T) {
	all := needsOf(20, 100, 10)
	for budget, want := range map[int]Counting{120: CountEndpoints, 119: CountFrontends, 20: CountFrontends,
		19: CountNothing, 0: CountNothing} {
		if got := CountEndpoints.within(budget, &all); got != want {
			t.Errorf("%d counters: %s; want %s", budget, got, want)
		}
	}
	if got := CountNothing.within(0, &needs{}); got != CountEndpoints {
		t.Errorf("without Services: %s", got)
	}
}

// TestGiantIsNotCounted: a Service that needs more than its share of the budget ends its own counting, and nobody
// else's. When it has gone, everything is counted again.
func TestGiantIsNotCounted(t *testing.T) {
	const small, budget = 20, 3200
	m := Model{Counters: budget}
	kernel := newFakeKernel()
	write := func(endpoints int) {
		t.Helper()
		snap := manyServices(small)
		if endpoints > 0 {
			snap.Apply(giant(endpoints))
		}
		st, _ := dataplane.Compute(testConfig, snap)
		names := append(m.Names(), sortedNames(st.Services)...)
		if err := kernel.apply(m.Plan(st, dataplane.Change{Services: names}, 0)); err != nil {
			t.Fatal(err)
		}
		for len(m.Recounts(10)) > 0 {
			if err := kernel.apply(m.Recount(10, 15)); err != nil {
				t.Fatal(err)
			}
		}
	}
	check := func(level Counting, sets map[SetID]int) {
		t.Helper()
		for set, want := range sets {
			if got := len(kernel[0].sets[set]); got != want {
				t.Errorf("%s: %s has %d elements; want %d", level, set, got, want)
			}
		}
		if m.Counting() != level {
			t.Errorf("%s; want %s", m.Counting(), level)
		}
	}
	write(0)
	slots := len(kernel[0].sets[Endpoints])
	check(CountEndpoints, map[SetID]int{Services: small, UncountedEndpoints: 0})
	write(1000)
	check(CountEndpoints, map[SetID]int{Services: small + 1, Endpoints: slots + 1000, UncountedEndpoints: 0})
	write(5000)
	check(CountMostEndpoints, map[SetID]int{Services: small + 1, Endpoints: slots, UncountedEndpoints: 5000})
	write(0)
	write(0) // the next change sees how much room there is
	check(CountEndpoints, map[SetID]int{Services: small, Endpoints: slots, UncountedEndpoints: 0})
}

// giant is a Service with so many endpoints.
func giant(endpoints int) snapshot.Delta {
	svc := webService()
	svc.Name.Name, svc.ClusterIPs = "giant", []netip.Addr{addr("10.96.9.9")}
	slice := &snapshot.Slice{Name: svc.Name, Service: svc.Name.Name,
		Ports: []snapshot.SlicePort{{Name: "a", Protocol: snapshot.TCP, Port: 8080}}}
	for at := addr("10.245.0.1"); len(slice.Endpoints) < endpoints; at = at.Next() {
		slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: at, Ready: true, Serving: true})
	}
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{svc.Name: slice}}
}

// TestNeedsAreWhatIsCounted: what Services are said to take of the budget is how many elements with counters they have,
// whatever their policies.
func TestNeedsAreWhatIsCounted(t *testing.T) {
	w := newCluster(rand.New(rand.NewPCG(1, 3)))
	w.Asking, w.Weights = false, false
	snap, planner, kernel := snapshot.New(), dataplane.NewPlanner(testConfig), newFakeKernel()
	var m Model
	delta := w.All()
	for step := range 60 {
		change, _ := planner.Apply(snap, snap.Apply(delta))
		if err := kernel.apply(m.Plan(planner.State(), change, 0)); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		frontends, all := 0, 0
		for i := range kernel {
			for id := range NumSets {
				if s := SetByID(id); s.Counter && !id.IsDynamic() {
					all += len(kernel[i].sets[id])
				}
			}
			frontends += len(kernel[i].sets[Services]) + len(kernel[i].sets[InsideServices]) +
				len(kernel[i].sets[OutsideServices])
		}
		if n := m.totalNeeds(); n[CountEndpoints] != all || n[CountFrontends] != frontends {
			t.Fatalf("step %d: needs are %v; counted are %d elements, %d of frontends", step, n, all, frontends)
		}
		delta = w.Step()
	}
}
