// Package reconcile drives one Writer to what the cluster asks for: it takes deltas from a queue, keeps the snapshot
// and the state, and has the difference written. A Service that the kernel refuses is quarantined, so that it keeps
// nothing else from being written; what others change in the kernel is repaired. It does I/O only through its Writer,
// and tells Listeners what happened.
package reconcile

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Loop brings a Writer up to date with a queue. Nothing is written before the queue's sources are all synced, and
// nothing is withdrawn when the loop ends.
type Loop struct {
	Queue   *snapshot.Queue
	Planner *dataplane.Planner
	Writer  Writer
	Log     *slog.Logger
	// Listeners hear what the loop does. They are set before Run.
	Listeners []Listener
	// LeastRest, if not nil, gives the least time from the end of a transaction to the next one.
	LeastRest func() time.Duration

	snapshot *snapshot.Snapshot
	want     wanted
	// unacked is what has changed in the snapshot since the kernel held all of it.
	unacked snapshot.Change
	// wrote says that the last step had the backend write.
	wrote bool
	// dirty says that the kernel does not hold the state: the last transaction failed, or the first is yet to come.
	dirty bool
	// partial says that the backend has not written all of the state yet, and parts and began are what it has written of
	// it, since when.
	partial bool
	parts   dataplane.Receipt
	began   time.Time
	// counted is what had counters after the last transaction, one of dataplane.Counted...; empty before the first.
	counted string
	// queued says whose changes are next, once the first state was written: then filled is set.
	queued fairQueue
	filled bool
	// retryAt is when a failed transaction is tried again, zero if none failed; retryWait is how long the next one will
	// wait.
	retryAt   time.Time
	retryWait time.Duration

	// checkAt is when the next Check is due; it means nothing while dirty.
	checkAt time.Time
	// foreign is how many findings of Check are not repaired yet; blind says that the last Check failed.
	foreign     int
	checkFailed bool

	// busy is when the transaction or check began that is under way; nil if there is none.
	busy atomic.Pointer[time.Time]

	// notScheduled are the Services that ask for too much of IPVS, sorted by name. The list is replaced, never changed.
	notScheduled []Quarantined
	// published are what Quarantined and Unscheduled give; nil if there are none.
	published atomic.Pointer[quarantineLists]
}

// A failed transaction is tried again after retryFirst, then after twice as long each time up to maxRetry.
const (
	retryFirst = 100 * time.Millisecond
	maxRetry   = 30 * time.Second
)

// After a transaction the next one waits for restFactor times as long as it took. So the first change after quiet
// goes out at once, and a burst is gathered for just so long that the kernel, which validates every verdict again at
// each commit, is not busy with us for more than a fifth of the time. After a long transaction, such as the first,
// the rest is maxRest.
const (
	restFactor = 4
	maxRest    = 50 * time.Millisecond
)

// Run works until the context ends, and then returns nil.
func (l *Loop) Run(ctx context.Context) error {
	l.snapshot, l.want, l.dirty, l.retryWait = snapshot.New(), wanted{planner: l.Planner}, true, retryFirst
	l.unacked, l.queued, l.filled = snapshot.Change{}, fairQueue{}, false
	l.notScheduled = nil
	rest, alarm := time.NewTimer(0), time.NewTimer(0)
	defer rest.Stop()
	defer alarm.Stop()
	rested := time.Now()
	for l.await(ctx, alarm) && l.pause(ctx, rest, rested) {
		start := time.Now()
		delta, ready := l.Queue.Take()
		if !ready {
			rest.Reset(0)
			continue
		}
		l.busy.Store(&start)
		err := l.step(ctx, l.takeTurns(delta, start))
		l.busy.Store(nil)
		took := time.Since(start)
		heavy := l.queued.charge(start.Add(took), took, l.parts.Left)
		rested = start.Add(took + l.restAfter(took, heavy))
		rest.Reset(time.Until(rested))
		if err == nil {
			l.retryAt, l.retryWait = time.Time{}, retryFirst
			if !l.partial {
				l.ack()
			}
			continue
		}
		l.Log.Error(
			"failed to apply a transaction; what the kernel held before stays in force",
			"err",
			err,
			"retry",
			l.retryWait,
		)
		l.retryAt, l.retryWait = time.Now().Add(l.retryWait), min(2*l.retryWait, maxRetry)
	}
	return nil
}

// Busy gives since when a transaction or check has been under way; zero if there is none. It is safe for concurrent
// use, and setting the clock does not change how long ago it is.
func (l *Loop) Busy() time.Time {
	if since := l.busy.Load(); since != nil {
		return *since
	}
	return time.Time{}
}

// takeTurns gives the changes whose turn it is, of those that came and those that wait. At first everything is.
func (l *Loop) takeTurns(d snapshot.Delta, now time.Time) snapshot.Delta {
	if !l.filled {
		return d
	}
	l.queued.put(d)
	turn := l.queued.next(now, l.weigh)
	turn.Node, turn.ServiceCIDRs, turn.HostAddrs = d.Node, d.ServiceCIDRs, d.HostAddrs
	return turn
}

// restAfter gives how long to rest after a step that took so long. Whoever made it long waits for his next turn in any
// case; others do not have to wait for that part.
func (l *Loop) restAfter(took, heavy time.Duration) time.Duration {
	rest := min(restFactor*(took-heavy), maxRest) + heavy/restFactor
	if l.partial {
		return took / restFactor // others may want to write to the kernel, too
	}
	if l.LeastRest != nil && l.wrote {
		rest = max(rest, l.LeastRest())
	}
	l.wrote = false
	return rest
}

// ack tells that the kernel holds all that was taken.
func (l *Loop) ack() {
	s := InSync{l.snapshot, l.unacked, l.Queue.Ack(l.queued.counts())}
	l.unacked = snapshot.Change{}
	notify(l, func(h *Listener) func(InSync) { return h.InSync }, s)
}

// await waits until there is something to write. While there is not, it looks what others have changed. It returns
// false when the context ends.
func (l *Loop) await(ctx context.Context, alarm *time.Timer) bool {
	for {
		due, check := l.nextDeadline()
		if due.IsZero() {
			alarm.Stop()
		} else {
			alarm.Reset(time.Until(due))
		}
		select {
		case <-ctx.Done():
			return false
		case <-l.Queue.Wake():
			return true
		case <-alarm.C:
		}
		if !check {
			return true
		}
		select {
		case <-l.Queue.Wake(): // a change comes first
			return true
		default:
		}
		if l.check(); l.foreign > 0 {
			return true
		}
	}
}

// nextDeadline gives when the loop has something to do by itself, and whether that is only a Check; zero is never.
func (l *Loop) nextDeadline() (due time.Time, check bool) {
	if l.dirty && !l.partial {
		return l.retryAt, false
	}
	if l.partial {
		return time.Now(), false
	}
	due, check = l.checkAt, true
	if trial, any := l.want.nextTrial(); any && trial.Before(due) {
		due, check = trial, false
	}
	if turn, any := l.queued.nextDue(); any && turn.Before(due) {
		due, check = turn, false
	}
	return due, check
}

// pause waits until the rest after the last transaction is over, at the time given. It returns false when the context
// ends.
func (l *Loop) pause(ctx context.Context, rest *time.Timer, rested time.Time) bool {
	if l.checkNow(rested) {
		l.check()
	}
	select {
	case <-ctx.Done():
		return false
	case <-rest.C:
		return true
	}
}

// step brings the kernel up to date with one delta.
func (l *Loop) step(ctx context.Context, delta snapshot.Delta) error {
	start := time.Now()
	concerned := l.snapshot.Apply(delta)
	l.unacked = l.unacked.With(concerned)
	change, contests := l.Planner.Apply(l.snapshot, concerned)
	before := l.Planner.Before()
	l.reportCrowded(change, before)
	l.reportUnscheduled(change, before)
	l.want.planned(change, before)
	policy := time.Since(start)
	l.reportContests(contests)
	if !l.dirty {
		l.want.startTrials(start)
	}
	if l.want.acknowledged() && !l.dirty && l.foreign == 0 && !l.partial {
		l.publishLists() // a Service that is gone may have been in quarantine, and nothing of it in force
		return nil
	}
	r, err := l.write(ctx)
	l.publishLists()
	if err != nil {
		l.dirty, l.partial, l.parts = true, false, dataplane.Receipt{}
		return err
	}
	if l.partial {
		r = l.parts.Then(r)
	} else {
		l.began = start
	}
	if l.partial = len(r.Left) > 0; l.partial {
		l.parts = r
		return nil
	}
	l.parts = dataplane.Receipt{}
	t := Transaction{
		Receipt: r, Policy: policy, Total: time.Since(l.began), Services: len(l.want.currentState().Services),
		Quarantined: len(l.Quarantined()), Unscheduled: len(l.Unscheduled()), Foreign: l.foreign,
	}
	l.foreign = 0
	l.report(&t)
	return nil
}

// maxContests bounds the lines in the log about new conflicts after one change.
const maxContests = 4

// contested tells of new conflicts.
func (l *Loop) reportContests(contests []dataplane.ConflictSummary) {
	if len(contests) == 0 {
		return
	}
	more := l.Planner.OmittedConflicts()
	for i, c := range contests {
		if i < maxContests {
			l.Log.Warn("Services claim the same addresses; the one that was there first keeps them", "first", c.Key.String(),
				"addresses", c.Keys, "kept by", c.Winner.String(), "left out", c.Loser.String())
		} else {
			more += c.Keys
		}
	}
	if more > 0 {
		l.Log.Warn("more Services claim the same addresses", "addresses", more)
	}
	notify(l, func(h *Listener) func([]dataplane.ConflictSummary) { return h.Contested }, contests)
}

// crowded tells of Services that have become too large.
func (l *Loop) reportCrowded(change dataplane.Change, before []*dataplane.Service) {
	for i, n := range change.Services {
		if svc := l.Planner.State().Services[n]; svc != nil && svc.OverCapacity &&
			(before[i] == nil || !before[i].OverCapacity) {
			l.Log.Warn("this Service has more endpoints than are served", "service", n.String())
		}
	}
}

// write has the kernel take the state. As long as it refuses Services by name, it is asked at once for a state
// without them.
func (l *Loop) write(ctx context.Context) (dataplane.Receipt, error) {
	l.wrote = true
	for {
		start := time.Now()
		r, err := l.apply()
		if err == nil {
			l.release(r.Left)
			return r, nil
		}
		took := time.Since(start)
		l.want.failed()
		var refused *dataplane.Refused
		replan := errors.As(err, &refused) && l.quarantine(refused) && ctx.Err() == nil
		notify(l, func(h *Listener) func(Failure) { return h.Failed }, Failure{Err: err, Took: took, Replan: replan})
		if !replan {
			l.want.endTrials()
			return r, err
		}
	}
}

// report tells of a transaction that succeeded.
func (l *Loop) report(t *Transaction) {
	switch {
	case t.Adopted:
		l.Log.Info("all Services are programmed already; nothing was written", "services", t.Services)
	case l.dirty:
		l.Log.Info("all Services are programmed", "services", t.Services, "elements", t.Added)
	}
	if t.Foreign > 0 {
		l.Log.Info("the tables are repaired", "full", t.Full, "added", t.Added, "replaced", t.Replaced, "removed", t.Removed,
			"took", t.Total)
	}
	if was := cmp.Or(l.counted, dataplane.CountedEndpoints); t.Counted != "" && t.Counted != was {
		l.Log.Info("changed what is counted, to fit counterMemoryMiB", "counted", t.Counted, "before", was)
	}
	l.counted = cmp.Or(t.Counted, l.counted)
	// The backend may have left something for later. A Check that is overdue stays so, or steady changes would put it off.
	if now := time.Now(); l.dirty || l.checkAt.After(now) {
		l.checkAt = now
	}
	l.dirty, l.filled = false, true
	l.Log.Debug("transaction", "full", t.Full, "added", t.Added, "replaced", t.Replaced, "removed", t.Removed,
		"messages", t.Messages, "bytes", t.Bytes, "policy", t.Policy, "plan", t.Plan, "encode", t.Encode, "commit", t.Commit)
	notify(l, func(h *Listener) func(Transaction) { return h.Written }, *t)
}
