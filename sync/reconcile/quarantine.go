package reconcile

import (
	"maps"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Quarantined is a Service that the kernel refuses. What the kernel took of it before stays in force, but for what other
// Services have got since.
type Quarantined struct {
	Name snapshot.Name
	// Err is what the kernel says of it.
	Err error
	// Since is when it was first refused, Next when it will be tried again. It is also tried when it changes.
	Since, Next time.Time
}

// Quarantined gives the Services that are set aside, sorted by name. It is safe for concurrent use; nobody may change the
// list.
func (l *Loop) Quarantined() []Quarantined {
	if list := l.quarantined.Load(); list != nil {
		return *list
	}
	return nil
}

// publish makes what is aside known to Quarantined.
func (l *Loop) publish() {
	if len(l.want.aside) == 0 {
		if l.quarantined.Load() != nil {
			l.quarantined.Store(nil)
		}
		return
	}
	list := make([]Quarantined, 0, len(l.want.aside))
	for n, a := range l.want.aside {
		list = append(list, Quarantined{Name: n, Err: a.err, Since: a.since, Next: a.next})
	}
	slices.SortFunc(list, func(x, y Quarantined) int { return x.Name.Compare(y.Name) })
	l.quarantined.Store(&list)
}

// A Service that is refused is tried again after trialFirst, then after twice as long each time up to trialMost. Each trial
// that fails costs all others a second transaction, and mostly it takes a change of the Service to end well.
const (
	trialFirst = time.Second
	trialMost  = 5 * time.Minute
)

// aside is what there is to know of a Service that the kernel refuses.
type aside struct {
	err   error
	since time.Time
	// next is when it is tried again, wait how long it waits for that.
	next time.Time
	wait time.Duration
	// changed says that it has changed since it was refused. Then it is tried at once, and the next trial is when it would be
	// anyway: a Service whose endpoints come and go does not put off its next trial, nor is it a line in the log each time.
	changed bool
	// trial says that the state has it as it should be.
	trial bool
}

// due gives when it is to be tried.
func (a *aside) due() time.Time {
	if a.changed {
		return a.since
	}
	return a.next
}

// refused takes note of a refusal and says whether it counts: one before the time of a trial does not.
func (a *aside) refused(err error, now time.Time) (counts bool) {
	a.err, a.changed, a.trial = err, false, false
	if now.Before(a.next) {
		return false
	}
	a.backOff(now)
	return true
}

// unanswered takes note that a trial ended without an answer. For one that changed, what was said of it before means little.
func (a *aside) unanswered(now time.Time) {
	if a.changed {
		a.wait = 0
	}
	a.changed, a.trial = false, false
	a.backOff(now)
}

func (a *aside) backOff(now time.Time) {
	a.wait = min(max(2*a.wait, trialFirst), trialMost)
	a.next = now.Add(a.wait)
}

// setAside takes out of the state what the kernel refuses, and says whether that makes it another state.
func (l *Loop) setAside(refused *dataplane.Refused) (progress bool) {
	for _, n := range slices.SortedFunc(maps.Keys(refused.Services), snapshot.Name.Compare) {
		if l.setOneAside(n, refused.Services[n]) {
			progress = true
		}
	}
	return progress
}

// setOneAside goes back from what a Service should be to what the kernel took of it before, and from that to nothing.
func (l *Loop) setOneAside(n snapshot.Name, err error) (progress bool) {
	w := &l.want
	if w.planner.State().Services[n] == nil { // it is its end that is refused
		return false
	}
	a := w.aside[n]
	if a != nil && !a.trial {
		return l.giveUp(n, err)
	}
	if a == nil {
		w.part()
		a = &aside{since: time.Now()}
		w.aside[n] = a
	}
	if a.refused(err, time.Now()) {
		l.Log.Error("the kernel refuses this Service; what it held of it before stays in force",
			"service", n.String(), "err", err, "retry", a.wait)
	} else {
		l.Log.Debug("the kernel refuses this Service as it is now, too", "service", n.String(), "err", err)
	}
	w.keepLast(n)
	return true
}

// giveUp takes a Service out of the state of which the kernel refuses even what it took before.
func (l *Loop) giveUp(n snapshot.Name, err error) (progress bool) {
	if l.want.state.Services[n] == nil {
		return false
	}
	l.Log.Error("the kernel refuses what it held of this Service, too; nothing of it is in force",
		"service", n.String(), "err", err)
	l.want.set(n, nil)
	return true
}

// release takes note that the kernel took the state, and all that was on trial in it.
func (l *Loop) release() {
	l.want.succeed()
	for n, a := range l.want.aside {
		if a.trial {
			delete(l.want.aside, n)
			l.Log.Info("the kernel takes this Service again", "service", n.String())
		}
	}
	l.want.join()
}
