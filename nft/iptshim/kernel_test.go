package iptshim

import (
	"fmt"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestSavedEqualsModel restores the texts of random clusters and their changes with real programs: what these save then
// is what the model believes, and a restart writes nothing. In the end all of it is removed.
func TestSavedEqualsModel(t *testing.T) {
	for _, variant := range variants {
		for _, f := range ipfamily.All {
			for _, dispatch := range []Dispatch{Tree, List} {
				t.Run(fmt.Sprintf("%s/%s/%d", variant, f, dispatch), func(t *testing.T) {
					for seed := range uint64(2) {
						savedEqualsModel(t, seed, variant, f, Options{Dispatch: dispatch, Step: 60 * int(dispatch)})
					}
				})
			}
		}
	}
}

func savedEqualsModel(t *testing.T, seed uint64, variant string, f ipfamily.Family, o Options) {
	host, w := labtest.NewHost(t, labtest.NewNet(t), "node"), newWorld(seed, 15)
	snap, planner, model := snapshot.New(), dataplane.NewPlanner(configs[seed%uint64(len(configs))]), New(o)
	delta := w.All()
	for step := range 5 {
		change, _ := planner.Apply(snap, snap.Apply(delta))
		w.refuseSome(planner.State(), change)
		restore(t, host, f, variant, model.Plan(planner.State(), change).Text(f))
		saved := save(t, host, f, variant)
		for i, d := range model.Differences(f, saved) {
			if i < 10 {
				t.Errorf("step %d: %s", step, d)
			}
		}
		again := New(o)
		again.Adopt(f, saved)
		if text := again.Plan(planner.State(), change).Text(f); text != nil {
			t.Fatalf("step %d: a restart writes\n%.3000s", step, text)
		}
		if delta = w.Step(); step == 3 { // so that little is left to come back
			delta = newWorld(seed+1, 15).All()
		}
	}
	restore(t, host, f, variant, RemovalText(save(t, host, f, variant)))
	if text := RemovalText(save(t, host, f, variant)); text != nil {
		t.Errorf("after the removal there is still to remove:\n%s", text)
	}
}
