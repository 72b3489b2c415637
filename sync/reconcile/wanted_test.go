package reconcile

import (
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestSucceedKeepsWhatIsLeft: of a Service that is written in part, the version before it stays known, in case the
// kernel rejects the rest; all else is acknowledged, and not requested again.
func TestSucceedKeepsWhatIsLeft(t *testing.T) {
	part, whole := snapshot.Name{Namespace: "shop", Name: "part"}, snapshot.Name{Namespace: "shop", Name: "whole"}
	old := &dataplane.Service{}
	w := wanted{planner: dataplane.NewPlanner(dataplane.Config{}), before: []*dataplane.Service{old, old},
		latest: dataplane.Change{Services: []snapshot.Name{part, whole}, Globals: true}}
	w.succeed([]snapshot.Name{part})
	if len(w.acknowledgedAs) != 1 || w.acknowledgedAs[part] != old {
		t.Errorf("acknowledged as %v; want the old version of %v alone", w.acknowledgedAs, part)
	}
	if _, change := w.request(); len(change.Services) != 1 || change.Services[0] != part || change.Globals {
		t.Errorf("requested again: %+v", change)
	}
	if w.succeed(nil); !w.acknowledged() {
		t.Errorf("not acknowledged: %+v", w)
	}
}

// TestTurnsAreAsOldAsTheirOldest: what a step takes is as old as the oldest change of it, in whichever namespace.
func TestTurnsAreAsOldAsTheirOldest(t *testing.T) {
	var turns fairQueue
	now := time.Unix(1000, 0)
	turns.put(in("bbb", service("old")), now)
	turns.put(in("aaa", service("new")), now.Add(time.Second))
	turns.put(in("bbb", service("newer")), now.Add(2*time.Second))
	turns.next(now.Add(3*time.Second), func(object, *snapshot.Delta) int { return 1 })
	if !turns.oldest.Equal(now) {
		t.Errorf("the oldest is of %v; want %v", turns.oldest, now)
	}
	if turns.next(now.Add(3*time.Second), nil); !turns.oldest.IsZero() {
		t.Errorf("nothing waited, and is of %v", turns.oldest)
	}
}

// TestCreditIsFree: a namespace takes its credit at once, and waits only for what it took beyond that.
func TestCreditIsFree(t *testing.T) {
	now := time.Unix(1000, 0)
	const more = 10 * time.Millisecond
	for took, want := range map[time.Duration]time.Duration{credit: 0, credit + more: share * more} {
		var turns fairQueue
		turns.put(in("aaa", service("web")), now)
		turns.next(now, func(object, *snapshot.Delta) int { return maxNamespaceWeight })
		turns.charge(now, took, nil)
		if wait := max(turns.due("aaa").Sub(now), 0); wait != want {
			t.Errorf("after %v it waits %v; want %v", took, wait, want)
		}
	}
}
