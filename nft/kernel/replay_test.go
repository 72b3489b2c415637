package kernel

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestReplay: the batches of a fill and of changes take another kernel to the same content; what is refused is an
// error.
func TestReplay(t *testing.T) {
	_, b := host(t)
	_, other := host(t)
	b.Sent = func(batch []byte) { labtest.Check(t, other.conn.Replay(batch)) }
	random := rand.New(rand.NewPCG(1, 2))
	snap, planner := cluster(random, 20, false), dataplane.NewPlanner(configs["cluster CIDR"])
	change, _ := planner.Apply(snap, snapshot.Change{})
	for i := range 10 {
		_, err := b.ApplyAll(planner.State(), change)
		labtest.Check(t, err)
		change, _ = planner.Apply(snap, snap.Apply(serviceDelta(random, i, false)))
	}
	other.model = b.model // which says what the structure is
	if got, want := held(t, other), held(t, b); got != want {
		t.Errorf("after the replay, the kernel holds\n%s\nnot\n%s", got, want)
	}

	var last []byte
	b.Sent = func(batch []byte) { last = slices.Clone(batch) }
	change, _ = planner.Apply(snap, snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{
		{Namespace: "default", Name: "s7"}: nil}}))
	_, err := b.ApplyAll(planner.State(), change)
	labtest.Check(t, err)
	if err := b.conn.Replay(last); !errors.Is(err, unix.ENOENT) {
		t.Errorf("what is gone was taken away once more: %v", err)
	}
}

// TestLargeBatchIsLetGo: what only the first fill needs is not held for good.
func TestLargeBatchIsLetGo(t *testing.T) {
	_, b := host(t)
	var sent int
	b.Sent = func(batch []byte) { sent = len(batch) }
	snap := snapshot.New()
	snap.Apply(large(3000, 10))
	st, _ := dataplane.Compute(configs["cluster CIDR"], snap)
	apply(t, b, st)
	if sent <= keepBytes || cap(b.batch.Bytes()) > keepBytes || cap(b.batch.messages) > keepBytes {
		t.Errorf("%d bytes were sent, room for %d bytes and %d notes is left",
			sent, cap(b.batch.Bytes()), cap(b.batch.messages))
	}
}
