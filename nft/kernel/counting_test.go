package kernel

import (
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestCountersWithinTheirBudget lets a cluster outgrow the budget for counters: what comes is not counted, what was
// there is rewritten by Check, a little at a time, and a new process finds nothing to do.
func TestCountersWithinTheirBudget(t *testing.T) {
	h, _ := host(t)
	const budget = 300
	b := open(t, h, Options{Counters: budget})
	snap, planner := snapshot.New(), dataplane.NewPlanner(configs["cluster CIDR"])
	counts := ""
	grow := func(services int) {
		t.Helper()
		change, _ := planner.Apply(snap, snap.Apply(large(services, 2)))
		r, err := b.ApplyAll(planner.State(), change)
		labtest.Check(t, err)
		counts = r.Counted
		for deadline := time.Now().Add(time.Minute); ; {
			found, again, err := b.Check()
			labtest.Check(t, err)
			if found != nil || time.Now().After(deadline) {
				t.Fatalf("%d Services: found %q, and wants to go on in %v", services, found, again)
			}
			if again == 0 {
				break
			}
		}
	}
	expect := func(services int, frontends, endpoints nft.SetID, level string) {
		t.Helper()
		listed, err := b.List()
		labtest.Check(t, err)
		e := &listed[0].Elements
		counted := 0
		for set := range e {
			for _, l := range e[set] {
				if l.Counted {
					counted++
				}
			}
		}
		if len(e[frontends]) != services || len(e[endpoints]) != 2*services || counted > budget || counts != level {
			t.Errorf("%d Services: %d %s, %d %s, %d counters, %s are counted", services, len(e[frontends]), frontends,
				len(e[endpoints]), endpoints, counted, counts)
		}
	}
	grow(90)
	expect(90, nft.Services, nft.Endpoints, dataplane.CountedEndpoints)
	grow(250)
	expect(250, nft.Services, nft.UncountedEndpoints, dataplane.CountedFrontends)
	grow(400)
	expect(400, nft.UncountedServices, nft.UncountedEndpoints, dataplane.CountedNothing)
	quiet(t, b)
	b = open(t, h, Options{Counters: budget})
	r, err := b.Apply(planner.State(), dataplane.Change{})
	if labtest.Check(t, err); !r.Adopted {
		t.Errorf("a new process finds something to do: %+v", r)
	}
	b = open(t, h, Options{})
	_, err = b.ApplyAll(planner.State(), dataplane.Change{})
	labtest.Check(t, err)
	grow(400)
	if counts != dataplane.CountedEndpoints {
		t.Errorf("with a larger budget %s are counted", counts)
	}
}
