package reconcile

import (
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Listener hears what a Loop does. A field that is nil is not called. The Loop calls its listeners in their order, in
// its own goroutine, in the order in which things happen.
//
// The next transaction waits until a listener returns. So a listener must not block: it must do no I/O and must not
// wait for anybody who takes longer than a moment. It must not call the Loop's Run or the Queue's Take. It may keep
// what an event points to and must not change it, except for InSync.Snapshot.
type Listener struct {
	// Writing is called before the Writer is asked. Exactly one of Committed and Failed follows.
	Writing func()
	// Committed is called after each transaction that the kernel acknowledged, as soon as it did.
	Committed func(Commit)
	// Failed is called after each transaction that failed.
	Failed func(Failure)
	// Written is called when the last part of a state is written: after Committed, unless Receipt.Left names Services.
	Written func(Transaction)
	// InSync is called whenever the kernel holds all that was taken from the queue, but for what is quarantined. It may
	// not have taken a transaction.
	InSync func(InSync)
	// Checked is called after each look at what others changed.
	Checked func(Check)
	// Quarantined is called with Services that are put into quarantine, and why.
	Quarantined func(*dataplane.Refused)
	// Unscheduled is called with Services that are programmed without the Scheduling they ask for, because the kernel
	// refuses it, or because the planner does, at all their addresses or at some.
	Unscheduled func(*dataplane.Refused)
	// Contested is called with new conflicts, summed up; there may be many.
	Contested func([]dataplane.ConflictSummary)
}

// Commit is one transaction that the kernel acknowledged.
type Commit struct {
	// Before and After are the Services that the transaction may have changed: as they were programmed before, and as
	// they are now. Both have the same order; a Service is nil where there is none, which may be in both. A Service that
	// is not wholly written (Receipt.Left) is not named until it is; then its Before is what was programmed before its
	// first part. So for each Service, the Before of one Commit is the After of the last Commit that named it.
	Before, After []*dataplane.Service
	// Receipt is that of this transaction alone. If it is Full, the Writer wrote everything anew, also what Before and
	// After do not name.
	dataplane.Receipt
	// First says that the transaction belongs to the first state, which may be written in parts.
	First bool
}

// Failure is one transaction that failed. The kernel still holds what it held before.
type Failure struct {
	Err  error
	Took time.Duration
	// Replan says that the Writer is asked again at once, for a state without what it refused by name.
	Replan bool
}

// Check is a look at what others changed.
type Check struct {
	// Found says in words what others changed. It is repaired by the next transaction.
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
	// Quarantined is how many Services the kernel refuses. The state has what the kernel took of them before.
	Quarantined int
	// Unscheduled is how many Services are programmed without the Scheduling they ask for: see Loop.Unscheduled.
	Unscheduled int
	// Foreign is how many findings of Check were repaired.
	Foreign int
}

// InSync is what the kernel holds now.
type InSync struct {
	// Snapshot is what is programmed. It holds until the call returns.
	Snapshot *snapshot.Snapshot
	// Change says which Services may differ in it from the call before.
	Change snapshot.Change
	// Triggers are the beginnings of what has changed in slices since the call before.
	Triggers []snapshot.Trigger
}

// notify calls one field of each listener.
func notify[E any](l *Loop, field func(*Listener) func(E), event E) {
	for i := range l.Listeners {
		if hear := field(&l.Listeners[i]); hear != nil {
			hear(event)
		}
	}
}

// apply has the Writer write once, and tells the listeners of it except for a failure.
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
	c := Commit{Receipt: r, First: !l.filled}
	c.Before, c.After = l.want.committed(r.Left)
	notify(l, func(h *Listener) func(Commit) { return h.Committed }, c)
	return r, nil
}
