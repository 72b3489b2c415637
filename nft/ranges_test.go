package nft

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestRangesGoInParts: many source ranges of a Service are exchanged a few at a time, and on the way no two overlap.
func TestRangesGoInParts(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	list := func() (out []netip.Prefix) {
		for range r.IntN(20) {
			out = append(out, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(r.IntN(8)), byte(r.IntN(4)), 0}),
				14+r.IntN(12)).Masked())
		}
		slices.SortFunc(out, netip.Prefix.Compare)
		kept := out[:0]
		for _, p := range out {
			if len(kept) == 0 || !kept[len(kept)-1].Contains(p.Addr()) {
				kept = append(kept, p)
			}
		}
		return kept
	}
	for range 5000 {
		old, want := list(), list()
		for step := 0; !slices.Equal(old, want); step++ {
			tr := &transition{room: 1 + r.IntN(4)*rangeCost, grow: true, done: true}
			next := tr.ranges(old, want)
			for i := range next {
				if i > 0 && (next[i-1].Compare(next[i]) >= 0 || next[i-1].Overlaps(next[i])) {
					t.Fatalf("from %v to %v by %v", old, want, next)
				}
			}
			if tr.done != slices.Equal(next, want) || step > 50 {
				t.Fatalf("step %d from %v to %v: %v, done %v", step, old, want, next, tr.done)
			}
			old = next
		}
	}
}

// TestRangesAreBounded counts the ranges in each transaction while they come, change and go.
func TestRangesAreBounded(t *testing.T) {
	service := func(octet byte, ranges int) *dataplane.State {
		svc := webService()
		svc.LoadBalancerIPs = []netip.Addr{addr("198.51.100.1")}
		for i := range ranges {
			svc.SourceRanges = append(svc.SourceRanges,
				netip.PrefixFrom(netip.AddrFrom4([4]byte{octet, 1, byte(i >> 8), byte(i)}), 32))
		}
		return stateOf(svc, 1)
	}
	nobody, _ := dataplane.Compute(testConfig, snapshot.New())
	const limit, most = 16384, 2*1000*rangeCost/16384 + 16
	var m Model
	kernel := newFakeKernel()
	name := webService().Name
	for i, st := range []*dataplane.State{service(11, 0), service(11, 1000), service(12, 1000), service(12, 999),
		service(11, 0),
		service(13, 1000), nobody} {
		parts := 0
		for left := (dataplane.Change{Services: []snapshot.Name{name}}); !left.Empty(); parts++ {
			txn := m.Plan(st, left, limit)
			n := len(txn.Tables[0].Add[SourceRanges]) + len(txn.Tables[0].Del[SourceRanges])
			if n > limit/rangeCost+2 && txn.Tables[0].Create == nil {
				t.Errorf("state %d: %d ranges in one transaction", i, n)
			}
			if err := kernel.apply(txn); err != nil {
				t.Fatal(err)
			}
			restricted := false
			for _, e := range kernel[0].sets[Services] {
				restricted = restricted || e.Leads().Kind == Restrict
			}
			if ranges := len(kernel[0].sets[SourceRanges]); restricted && ranges == 0 || parts > most {
				t.Fatalf("state %d, part %d: restricted %v to %d ranges", i, parts, restricted, ranges)
			}
			left = txn.Left
		}
		want := newFakeKernel()
		if err := want.apply(new(Model).Plan(st, dataplane.Change{}, 0)); err != nil {
			t.Fatal(err)
		}
		if d := kernel.diff(want); d != nil {
			t.Fatal(fmt.Sprint("state ", i, ": ", d))
		}
	}
}
