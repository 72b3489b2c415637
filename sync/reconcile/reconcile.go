// Package reconcile drives one backend to what the cluster asks for: it takes deltas from a queue, keeps the snapshot and the
// state, and has the difference written. It does I/O only through its Backend.
package reconcile

import (
	"context"
	"log/slog"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Backend makes the kernel carry states. It is told states, not chores; a Change only says where to look.
type Backend interface {
	// Apply takes the kernel from what it holds to a state, as one transaction. After an error the kernel still holds what
	// it held before, and the next Apply must look at the whole state, whatever its Change says.
	Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error)
	// Remove takes everything of ours out of the kernel. That nothing is there is no error.
	Remove() error
}

// Transaction is what the loop tells about each transaction.
type Transaction struct {
	dataplane.Receipt
	// Policy is the time spent on deciding; Total the time from taking the deltas to the kernel's acknowledgement.
	Policy, Total time.Duration
	// Services is how many Services the state holds.
	Services int
}

// Loop brings a backend up to date with a queue. Nothing is written before the queue's sources are all synced, and nothing
// is withdrawn when the loop ends.
type Loop struct {
	Queue   *snapshot.Queue
	Planner *dataplane.Planner
	Backend Backend
	Log     *slog.Logger
	// Written, if not nil, is called after each transaction that succeeded.
	Written func(Transaction)

	snapshot *snapshot.Snapshot
	// behind says that the kernel does not hold the state: the last transaction failed, or the first is yet to come.
	behind bool
}

// A failed transaction is tried again after retryFirst, then after twice as long each time up to retryMost.
const (
	retryFirst = 100 * time.Millisecond
	retryMost  = 30 * time.Second
)

// After a transaction the next one waits for restFactor times as long as it took. So the first change after quiet goes out at
// once, and a burst is gathered for just so long that the kernel, which validates every verdict again at each commit, is not
// busy with us for more than a fifth of the time. After a long transaction, such as the first, the rest is restMost.
const (
	restFactor = 4
	restMost   = 50 * time.Millisecond
)

// Run works until the context ends, and then returns nil.
func (l *Loop) Run(ctx context.Context) error {
	l.snapshot, l.behind = snapshot.New(), true
	var retry <-chan time.Time
	wait, rest := retryFirst, time.NewTimer(0)
	defer rest.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-l.Queue.Wake():
		case <-retry:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-rest.C:
		}
		start := time.Now()
		delta, ready := l.Queue.Take()
		if !ready {
			rest.Reset(0)
			continue
		}
		err := l.step(delta)
		rest.Reset(min(restFactor*time.Since(start), restMost))
		if err != nil {
			l.Log.Error("the kernel refused a transaction; what it held before stays in force", "err", err, "retry", wait)
			retry, wait = time.After(wait), min(2*wait, retryMost)
			continue
		}
		retry, wait = nil, retryFirst
	}
}

// step brings the kernel up to date with one delta.
func (l *Loop) step(delta snapshot.Delta) error {
	start := time.Now()
	change, conflicts := l.Planner.Apply(l.snapshot, l.snapshot.Apply(delta))
	policy := time.Since(start)
	for _, c := range conflicts {
		l.Log.Warn(c.String())
	}
	if change.Empty() && !l.behind {
		return nil
	}
	state := l.Planner.State()
	r, err := l.Backend.Apply(state, change)
	if err != nil {
		l.behind = true
		return err
	}
	if l.behind {
		l.behind = false
		l.Log.Info("the kernel carries the Services", "services", len(state.Services), "elements", r.Added)
	}
	t := Transaction{Receipt: r, Policy: policy, Total: time.Since(start), Services: len(state.Services)}
	l.Log.Debug("transaction", "full", r.Full, "added", r.Added, "replaced", r.Replaced, "removed", r.Removed,
		"messages", r.Messages, "bytes", r.Bytes, "policy", policy, "plan", r.Plan, "encode", r.Encode, "commit", r.Commit)
	if l.Written != nil {
		l.Written(t)
	}
	return nil
}
