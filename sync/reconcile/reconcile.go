// Package reconcile keeps the kernel in line with the cluster's objects through one Writer. Its loop takes deltas from
// a queue, updates the snapshot and the wanted state, and has the Writer write the difference. If the kernel rejects a
// Service, the loop quarantines it, so that other Services can still be written. If somebody else changes what Verdict
// wrote, the loop repairs it. The package does I/O only through its Writer, and reports events to Listeners.
package reconcile

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Loop syncs a Writer with a queue. It writes nothing before all of the queue's sources are synced, and removes nothing
// when it ends.
type Loop struct {
	Queue   *snapshot.Queue
	Planner *dataplane.Planner
	Writer  Writer
	Log     *slog.Logger
	// Listeners are called with the loop's events. Set them before Run.
	Listeners []Listener
	// LeastRest, if not nil, returns the minimum pause between the end of a transaction and the next one. 0 leaves it to
	// the Writer, which may ask for one by Receipt.Rest.
	LeastRest func() time.Duration

	snapshot *snapshot.Snapshot
	want     wanted
	// unacked is what has changed in the snapshot since the kernel last held all of it.
	unacked snapshot.Change
	// wrote says that the last step called the backend, and asked is the rest that the backend asked for.
	wrote bool
	asked time.Duration
	// dirty says that the kernel does not hold the wanted state: the last transaction failed, or the first is still to
	// come.
	dirty bool
	// partial says that the backend has written only a part of the state. parts adds up what it wrote so far, and began
	// is when it started.
	partial bool
	parts   dataplane.Receipt
	began   time.Time
	// cause is that of the current step.
	cause Cause
	// counted says what had counters after the last transaction: one of dataplane.Counted..., or empty before the
	// first.
	counted string
	// queued holds changes that wait. It is used once the first state is written, which sets filled.
	queued fairQueue
	filled bool
	// starts says which endpoints start slowly, and when they take their next step.
	starts slowStarts
	// retryAt is when a failed transaction is retried; zero if none failed. retryWait is the pause after the next
	// failure.
	retryAt   time.Time
	retryWait time.Duration

	// checkAt is when the next Check is due. It has no meaning while dirty.
	checkAt time.Time
	// foreign counts the findings of Check that are not repaired yet. checkFailed says that the last Check failed.
	foreign     int
	checkFailed bool

	// busy is when the current transaction or check started; nil if there is none.
	busy atomic.Pointer[time.Time]

	// notScheduled lists the Services that exceed a limit of IPVS, sorted by name. The list is replaced, never changed.
	notScheduled []Quarantined
	// overlaps is what Overlaps returns; nil if there are none. told are the shared ranges of which the log knows.
	overlaps atomic.Pointer[[]dataplane.Overlap]
	told     []netip.Prefix
	// published holds the lists that Quarantined and Unscheduled return; nil if both are empty.
	published atomic.Pointer[quarantineLists]
}

// A failed transaction is retried after retryFirst, then after twice as long each time, up to maxRetry.
const (
	retryFirst = 100 * time.Millisecond
	maxRetry   = 30 * time.Second
)

// After a transaction the loop rests for restFactor times as long as the transaction took, and for maxRest at most. So
// the first change after a quiet time is written at once, and changes in a burst are gathered. The kernel validates
// every verdict again at each commit; the rest limits that work to a fifth of the time.
const (
	restFactor = 4
	maxRest    = 50 * time.Millisecond
)

// Run syncs until the context ends, and then returns nil.
func (l *Loop) Run(ctx context.Context) error {
	l.snapshot, l.want, l.dirty, l.retryWait = snapshot.New(), wanted{planner: l.Planner}, true, retryFirst
	l.unacked, l.queued, l.filled = snapshot.Change{}, fairQueue{}, false
	l.notScheduled = nil
	l.starts.reset()
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
		waiting := l.Queue.Waiting().Since
		turn := l.takeTurns(delta, start)
		l.cause = Cause{Delta: turn, Since: snapshot.Earlier(waiting, l.queued.oldest), Began: start}
		err := l.step(ctx, turn)
		l.cause = Cause{}
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
		l.Log.Error("failed to apply a transaction; the last applied state stays in force", "err", err, "retry", l.retryWait)
		l.retryAt, l.retryWait = time.Now().Add(l.retryWait), min(2*l.retryWait, maxRetry)
	}
	return nil
}

// Busy returns when the current transaction or check started; zero if there is none. It is safe for concurrent use. The
// time is monotonic, so setting the clock does not affect it.
func (l *Loop) Busy() time.Time {
	if since := l.busy.Load(); since != nil {
		return *since
	}
	return time.Time{}
}

// takeTurns returns the changes to write now, out of the new ones and those that wait. Before the first state is
// written it returns all.
func (l *Loop) takeTurns(d snapshot.Delta, now time.Time) snapshot.Delta {
	if !l.filled {
		l.queued.received = d.Versions
		return d
	}
	l.queued.put(d, now)
	steps := l.starts.takeSteps(now)
	steps.Versions = d.Versions // which are those of all that was received
	l.queued.put(steps, now)
	turn := l.queued.next(now, l.weigh)
	turn.Node, turn.ServiceCIDRs, turn.HostAddrs, turn.HostNetworks = d.Node, d.ServiceCIDRs, d.HostAddrs, d.HostNetworks
	turn.Link = d.Link
	return turn
}

// restAfter returns how long to rest after a step that took so long. heavy is the part of it that namespaces took which
// have to wait for their next turn anyway; others need not wait for that part.
func (l *Loop) restAfter(took, heavy time.Duration) time.Duration {
	rest := min(restFactor*(took-heavy), maxRest) + heavy/restFactor
	if l.partial {
		return took / restFactor // other processes may want to write to the kernel
	}
	if l.wrote {
		least := l.asked
		if l.LeastRest != nil {
			least = cmp.Or(l.LeastRest(), least)
		}
		rest = max(rest, least)
	}
	l.wrote = false
	return rest
}

// ack reports that the kernel holds everything that was taken from the queue.
func (l *Loop) ack() {
	s := InSync{l.snapshot, l.Planner.State(), l.unacked, l.Queue.Ack(l.queued.held())}
	l.unacked = snapshot.Change{}
	notify(l, func(h *Listener) func(InSync) { return h.InSync }, s)
}

// await waits until there is something to write. While there is nothing, it checks for foreign changes. It returns
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
		case <-l.Queue.Wake():
			check = false
		case <-alarm.C:
			select { // of several that are ready, select takes any: a change comes first
			case <-l.Queue.Wake():
				check = false
			default:
			}
		}
		if ctx.Err() != nil {
			return false
		}
		if !check {
			return true
		}
		if l.check(); l.foreign > 0 {
			return true
		}
	}
}

// nextDeadline returns when the loop has to act without a new change, and whether only a Check is due then.
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
	if step, any := l.starts.nextStep(); any && step.Before(due) {
		due, check = step, false
	}
	return due, check
}

// pause waits until the given time, when the rest after the last transaction ends. It returns false when the context
// ends.
func (l *Loop) pause(ctx context.Context, rest *time.Timer, rested time.Time) bool {
	if l.checkNow(rested) {
		l.check()
	}
	select {
	case <-ctx.Done():
	case <-rest.C:
	}
	return ctx.Err() == nil
}

// step applies one delta and writes the difference.
func (l *Loop) step(ctx context.Context, delta snapshot.Delta) error {
	start := time.Now()
	concerned := l.snapshot.Apply(delta)
	started := l.starts.observe(l.snapshot, l.Planner.State(), concerned.Services, start, l.filled)
	concerned = concerned.With(l.snapshot.Apply(started))
	l.unacked = l.unacked.With(concerned)
	change, contests := l.Planner.Apply(l.snapshot, concerned)
	before := l.Planner.Before()
	l.reportCrowded(change, before)
	l.reportNowhere(change, before)
	l.unacked = l.unacked.With(l.reportUnscheduled(change, before))
	l.want.planned(change, before)
	policy := time.Since(start)
	l.reportContests(contests)
	if change.Globals {
		l.reportOverlaps()
	}
	l.cause.Policy, l.cause.Foreign, l.cause.Rest = policy, l.foreign, l.partial
	l.cause.Retry = l.dirty && !l.retryAt.IsZero()
	if !l.dirty {
		l.cause.Trial = l.want.startTrials(start)
	}
	if l.want.acknowledged() && !l.dirty && l.foreign == 0 && !l.partial {
		l.publishLists() // a removed Service may have been quarantined
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

// Overlaps returns where the ServiceCIDRs are used by something other than Services. It is safe for concurrent use.
func (l *Loop) Overlaps() []dataplane.Overlap {
	if found := l.overlaps.Load(); found != nil {
		return *found
	}
	return nil
}

// reportOverlaps logs that something else has addresses in a range of Services, once for each part of the range.
func (l *Loop) reportOverlaps() {
	found, now := l.Planner.Overlaps(), l.Planner.State().SharedRanges
	l.overlaps.Store(&found)
	known := func(p netip.Prefix) bool {
		return slices.ContainsFunc(l.told, func(t netip.Prefix) bool { return t.Bits() <= p.Bits() && t.Contains(p.Addr()) })
	}
	switch {
	case len(now) == 0 && len(l.told) > 0:
		l.Log.Info("the range of Services no longer overlaps addresses that others use")
		l.told = nil
	case slices.ContainsFunc(now, func(p netip.Prefix) bool { return !known(p) }):
		l.Log.Warn("the range of Services overlaps addresses that others use: "+dataplane.OverlapAdvice,
			"overlaps", dataplane.DescribeOverlaps(found))
		l.told = now
	}
}

// maxContests bounds how many new conflicts one change may log.
const maxContests = 4

// reportContests reports new conflicts.
func (l *Loop) reportContests(contests []dataplane.ConflictSummary) {
	if len(contests) == 0 {
		return
	}
	more := l.Planner.OmittedConflicts()
	for i, c := range contests {
		if i < maxContests {
			l.Log.Warn("Services claim the same addresses; "+c.Winner.Before(c.Loser), "first", c.Key.String(),
				"addresses", c.Keys, "kept_by", c.Winner.String(), "left_out", c.Loser.String())
		} else {
			more += c.Keys
		}
	}
	if more > 0 {
		l.Log.Warn("more Services claim the same addresses", "addresses", more)
	}
	notify(l, func(h *Listener) func([]dataplane.ConflictSummary) { return h.Contested }, contests)
}

// reportCrowded logs Services that have become too large.
func (l *Loop) reportCrowded(change dataplane.Change, before []*dataplane.Service) {
	for i, n := range change.Services {
		if svc := l.Planner.State().Services[n]; svc != nil && svc.OverCapacity &&
			(before[i] == nil || !before[i].OverCapacity) && svc.NotScheduled() != dataplane.TooManyBackends {
			l.Log.Warn("this Service has too many endpoints; only some are used", "service", n.String())
		}
	}
}

// reportNowhere logs Services that have come to have an endpoint at an address of Services.
func (l *Loop) reportNowhere(change dataplane.Change, before []*dataplane.Service) {
	st, more := l.Planner.State(), 0
	for i, n := range change.Services {
		at, now := st.Nowhere(st.Services[n])
		if !now {
			continue
		}
		if _, already := st.Nowhere(before[i]); already {
			continue
		}
		if more++; more <= maxContests {
			l.Log.Warn("an endpoint of this Service is itself an address of Services: connections sent there reach nobody",
				"service", n.String(), "endpoint", at.String())
		}
	}
	if more -= maxContests; more > 0 {
		l.Log.Warn("more Services have an endpoint that is an address of Services", "services", more)
	}
}

// write has the Writer apply the state. While the kernel rejects Services by name, write quarantines them and tries
// again at once without them.
func (l *Loop) write(ctx context.Context) (dataplane.Receipt, error) {
	l.wrote, l.asked = true, 0
	for {
		start := time.Now()
		r, err := l.apply()
		if err == nil {
			l.asked = r.Rest
			l.release(r.Left)
			return r, nil
		}
		took := time.Since(start)
		l.want.failed()
		var refused *dataplane.Refused
		replan := errors.As(err, &refused) && l.quarantine(refused) && ctx.Err() == nil
		notify(l, func(h *Listener) func(Failure) { return h.Failed },
			Failure{Err: err, Took: took, Replan: replan, Cause: &l.cause})
		if !replan {
			l.want.endTrials()
			return r, err
		}
	}
}

// report logs a transaction that succeeded, and notifies the listeners.
func (l *Loop) report(t *Transaction) {
	switch {
	case t.Adopted:
		l.Log.Info("all Services are programmed already; nothing was written", "services", t.Services)
	case l.dirty:
		l.Log.Info("all Services are programmed", "services", t.Services, "elements", t.Added)
	}
	if t.Foreign > 0 {
		l.Log.Info("repaired the tables", "full", t.Full, "added", t.Added, "replaced", t.Replaced, "removed", t.Removed,
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
