package reconcile

import (
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Listener receives the events of a Loop. Fields that are nil are skipped. The Loop calls its listeners one after
// another in its own goroutine, in the order of events.
//
// The next transaction waits until a listener returns. So a listener must not block: it must do no I/O, and must not
// wait for anything that takes longer than a moment. It must not call the Loop's Run or the Queue's Take. It may keep
// what an event points to, but must not change it. InSync.Snapshot may not be kept.
type Listener struct {
	// Writing is called before the Writer. Exactly one of Committed and Failed follows.
	Writing func()
	// Committed is called after each transaction, as soon as the kernel has acknowledged it.
	Committed func(Commit)
	// Failed is called after each transaction that failed.
	Failed func(Failure)
	// Written is called when the last part of a state is written: after Committed, unless Receipt.Left names Services.
	Written func(Transaction)
	// InSync is called whenever the kernel holds everything that was taken from the queue, except for quarantined
	// Services. That may not have needed a transaction.
	InSync func(InSync)
	// Checked is called after each check for foreign changes.
	Checked func(Check)
	// Quarantined is called with Services that were just quarantined, and the reasons.
	Quarantined func(*dataplane.Refused)
	// Unscheduled is called with Services that are programmed without the Scheduling they ask for, at some or all of
	// their addresses. Either the kernel or the planner rejects it.
	Unscheduled func(*dataplane.Refused)
	// Contested is called with summaries of new conflicts. There may be many.
	Contested func([]dataplane.ConflictSummary)
}

// Commit is one transaction that the kernel acknowledged.
type Commit struct {
	// Before and After are the Services that the transaction may have changed: as they were programmed before, and as
	// they are now. Both have the same order. An entry is nil if the Service did not exist at that time; it may be nil
	// in both. A Service that is not written completely (Receipt.Left) is not named until it is. Its Before is then the
	// version before its first part. So for each Service, the Before of one Commit is the After of the last Commit that
	// named it.
	Before, After []*dataplane.Service
	// Receipt is the one of this transaction alone. If it is Full, the Writer wrote everything, also Services that
	// Before and After do not name.
	dataplane.Receipt
	// First says that the transaction belongs to the first state, which may be written in parts.
	First bool
	// Cause says why the transaction was written. It is valid until the call returns.
	Cause *Cause
}

// Cause says why the Loop called its Writer. The zero Cause is a call that nothing but a change of the configuration
// asked for.
type Cause struct {
	// Delta holds the objects that changed. It must not be changed.
	Delta snapshot.Delta
	// Since is when the oldest change that waited came into the Queue; zero if none waited.
	Since time.Time
	// Began is when the Loop took the changes, and Policy how long it took to decide what follows from them.
	Began  time.Time
	Policy time.Duration
	// Retry says that the transaction before this one failed, and Rest that it continues one that was too large.
	Retry, Rest bool
	// Trial says that Services which the kernel rejected are tried again.
	Trial bool
	// Foreign is how many changes by others are repaired.
	Foreign int
}

// Failure is one transaction that failed. The kernel still holds what it held before.
type Failure struct {
	Err  error
	Took time.Duration
	// Replan says that the Writer is called again at once, with a state without the Services that were rejected by
	// name.
	Replan bool
	// Cause says why the transaction was to be written. It is valid until the call returns.
	Cause *Cause
}

// Check is the result of a check for foreign changes.
type Check struct {
	// Found describes the foreign changes. The next transaction repairs them.
	Found []string
	// Err says why the look failed.
	Err error
}

// Transaction is what the Loop wrote for one state: one Commit or, if that would be too large, several.
type Transaction struct {
	dataplane.Receipt
	// Policy is the time spent on deciding; Total the time from taking the deltas to the kernel's acknowledgement.
	Policy, Total time.Duration
	// Services is how many Services the state holds.
	Services int
	// Quarantined is how many Services the kernel rejects. The state holds their last accepted versions.
	Quarantined int
	// Unscheduled is how many Services are programmed without the Scheduling they ask for: see Loop.Unscheduled.
	Unscheduled int
	// Foreign is how many findings of Check were repaired.
	Foreign int
}

// InSync is what the kernel holds now.
type InSync struct {
	// Snapshot is what is programmed. It is valid until the call returns.
	Snapshot *snapshot.Snapshot
	// State is what follows from it, valid as long.
	State *dataplane.State
	// Change names the Services that may differ from the previous call.
	Change snapshot.Change
	// Triggers are when the changes of slices since the previous call began.
	Triggers []snapshot.Trigger
}

// TooManyBackends reports whether a Service refers to too many endpoints of others: see the reason of this name.
func (s *InSync) TooManyBackends(n snapshot.Name) bool {
	return s.State != nil && s.State.Services[n].NotScheduled() == dataplane.TooManyBackends
}

// notify calls one field of each listener.
func notify[E any](l *Loop, field func(*Listener) func(E), event E) {
	for i := range l.Listeners {
		if hear := field(&l.Listeners[i]); hear != nil {
			hear(event)
		}
	}
}

// apply calls the Writer once, and notifies the listeners unless it fails.
func (l *Loop) apply() (dataplane.Receipt, error) {
	for i := range l.Listeners {
		if l.Listeners[i].Writing != nil {
			l.Listeners[i].Writing()
		}
	}
	r, err := l.Writer.Apply(l.want.request())
	if err != nil {
		return r, err
	}
	c := Commit{Receipt: r, First: !l.filled, Cause: &l.cause}
	c.Before, c.After = l.want.committed(r.Left)
	notify(l, func(h *Listener) func(Commit) { return h.Committed }, c)
	return r, nil
}
