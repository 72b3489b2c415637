package kernel

import (
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestFailedReadLeavesTheModel: if the tables cannot be read back, the model stays what it was. Otherwise it would hold
// what the kernel never saw, and later take that for something that has to be written.
func TestFailedReadLeavesTheModel(t *testing.T) {
	s := &sim{k: newSimKernel(), f: newFaults(), r: rand.New(rand.NewPCG(1, 1))}
	s.k.sent = func([]byte, int, error) {}
	s.k.strict = func(text string) { t.Error(text) }
	b := s.newBackend()
	world, planner := newWalkWorld(s.r), dataplane.NewPlanner(simConfig(s.r))
	snap := world.snapshot(s.r)
	change, _ := planner.Apply(snap, snapshot.Change{})
	if _, err := b.Apply(planner.State(), change); err != nil {
		t.Fatal(err)
	}
	before := b.model.Digests(0)
	for i := range worldServices {
		change, _ = planner.Apply(snap, snap.Apply(world.serviceChange(s.r, i)))
		if len(change.Services) > 0 {
			break
		}
	}
	for _, v := range []verb{verbSets, verbElements} {
		b.syncState = stateStale
		s.f.armed = []*trouble{{verb: v, illness: sendFails, errno: unix.ENOMEM}}
		if _, err := b.Apply(planner.State(), change); err == nil {
			t.Fatalf("%s: there was no error", verbNames[v])
		}
		if b.model.Digests(0) != before {
			t.Errorf("%s: the model holds what the kernel never saw", verbNames[v])
		}
	}
}
