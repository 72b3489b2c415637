package reconcile

import (
	"maps"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// wanted is the state that the kernel should hold, and how much of it the kernel has acknowledged. It is the planner's
// own state unless the kernel rejects some of its Services.
type wanted struct {
	planner *dataplane.Planner

	// latest is what has changed since the last request, and before holds the Services that it names as they were. They
	// move to acknowledgedAs only if the transaction fails, which is rare.
	latest dataplane.Change
	before []*dataplane.Service
	// acknowledgedAs holds, for each other Service that may differ from what the kernel acknowledged, the version that
	// it acknowledged last; nil if the kernel has nothing of it. globals says the same of what Change.Globals stands
	// for.
	acknowledgedAs map[snapshot.Name]*dataplane.Service
	globals        bool
	// partial holds, for each Service that is not written completely (Receipt.Left), the version that was programmed
	// before its first part.
	partial map[snapshot.Name]*dataplane.Service

	// quarantined are the Services that the kernel rejects.
	quarantined map[snapshot.Name]*quarantine
	// state is a copy of the planner's state without them. It exists only while Services are quarantined; otherwise its
	// Services are nil.
	state dataplane.State
}

// currentState returns the state that the kernel should hold.
func (w *wanted) currentState() *dataplane.State {
	if w.state.Services != nil {
		return &w.state
	}
	return w.planner.State()
}

// request returns the state, and everything in it that may differ from what the kernel acknowledged.
func (w *wanted) request() (*dataplane.State, dataplane.Change) {
	missed := slices.SortedFunc(maps.Keys(w.acknowledgedAs), snapshot.Name.Compare)
	return w.currentState(), w.latest.With(dataplane.Change{Services: missed, Globals: w.globals})
}

// acknowledged says whether the kernel has acknowledged all of the state.
func (w *wanted) acknowledged() bool {
	return w.latest.Empty() && len(w.acknowledgedAs) == 0 && !w.globals
}

// succeed records that the kernel acknowledged the state, except for the Services in left. The backend continues with
// those by itself; their old versions are kept in case the kernel rejects them.
func (w *wanted) succeed(left []snapshot.Name) {
	waits := make(map[snapshot.Name]bool, len(left))
	for _, n := range left {
		waits[n] = true
	}
	for i, n := range w.latest.Services {
		if waits[n] && w.before[i] != nil {
			w.keepAcknowledged(n, w.before[i])
		}
	}
	maps.DeleteFunc(w.acknowledgedAs, func(n snapshot.Name, svc *dataplane.Service) bool {
		return !waits[n] || svc == nil
	})
	w.latest, w.before, w.globals = dataplane.Change{}, nil, false
}

// committed returns the Services that the kernel has now acknowledged completely, as they were before and as they are
// now. Services in left are not complete. Call it before succeed.
func (w *wanted) committed(left []snapshot.Name) (before, after []*dataplane.Service) {
	now := w.currentState().Services
	if len(w.acknowledgedAs)+len(w.partial)+len(left) == 0 { // the usual case
		for _, n := range w.latest.Services {
			after = append(after, now[n])
		}
		return w.before, after
	}
	was := make(map[snapshot.Name]*dataplane.Service, len(w.latest.Services)+len(w.acknowledgedAs)+len(w.partial))
	for i, n := range w.latest.Services {
		was[n] = w.before[i]
	}
	maps.Copy(was, w.acknowledgedAs)
	maps.Copy(was, w.partial)
	w.partial = nil
	if len(left) > 0 {
		w.partial = make(map[snapshot.Name]*dataplane.Service, len(left))
	}
	for _, n := range left {
		svc, changed := was[n]
		if !changed {
			svc = now[n]
		}
		w.partial[n] = svc
		delete(was, n)
	}
	before, after = make([]*dataplane.Service, 0, len(was)), make([]*dataplane.Service, 0, len(was))
	for _, n := range slices.SortedFunc(maps.Keys(was), snapshot.Name.Compare) {
		before, after = append(before, was[n]), append(after, now[n])
	}
	return before, after
}

// failed records that the kernel still holds what it held before. If a Service has changed several times since then,
// the kernel acknowledged only its oldest version.
func (w *wanted) failed() {
	for i, n := range w.latest.Services {
		w.keepAcknowledged(n, w.before[i])
	}
	w.globals = w.globals || w.latest.Globals
	w.latest, w.before = dataplane.Change{}, nil
}

// keepAcknowledged records the version of a Service that the kernel acknowledged last, unless one is recorded already.
func (w *wanted) keepAcknowledged(n snapshot.Name, svc *dataplane.Service) {
	if _, noted := w.acknowledgedAs[n]; noted {
		return
	}
	if w.acknowledgedAs == nil {
		w.acknowledgedAs = map[snapshot.Name]*dataplane.Service{}
	}
	w.acknowledgedAs[n] = svc
}

// planned takes over the changes of the planner's last Apply.
func (w *wanted) planned(change dataplane.Change, before []*dataplane.Service) {
	if len(w.quarantined) == 0 {
		w.latest, w.before = change, before
		return
	}
	if change.Globals {
		w.copyGlobals()
	}
	w.globals = w.globals || change.Globals
	for i, n := range change.Services {
		svc, a := w.planner.State().Services[n], w.quarantined[n]
		switch {
		case a == nil:
			w.set(n, svc)
		case svc == nil: // nothing is left to reject
			delete(w.quarantined, n)
			w.set(n, nil)
		case a.unscheduled && svc.Unscheduled() == svc: // it no longer asks for what the kernel rejects
			delete(w.quarantined, n)
			w.set(n, svc)
		case a.unscheduled:
			a.changed = a.changed || before[i] == nil || !svc.ScheduledAs(before[i])
			w.set(n, svc.Unscheduled())
		default:
			a.changed = true
			w.keepLast(n)
		}
	}
	w.dropCopy()
}

// copyGlobals copies everything from the planner's state except Services.
func (w *wanted) copyGlobals() {
	services := w.state.Services
	w.state = *w.planner.State()
	w.state.Services = services
}

// copyState copies the planner's state, so that Services can be removed from the copy.
func (w *wanted) copyState() {
	if w.state.Services != nil {
		return
	}
	w.quarantined = map[snapshot.Name]*quarantine{}
	w.state.Services = maps.Clone(w.planner.State().Services)
	w.copyGlobals()
}

// dropCopy returns to the planner's own state once no Service is quarantined: both are equal then.
func (w *wanted) dropCopy() {
	if len(w.quarantined) == 0 {
		w.state = dataplane.State{}
	}
}

// quarantine returns the quarantine of a Service, and begins one if there is none.
func (w *wanted) quarantine(n snapshot.Name) *quarantine {
	w.copyState()
	a := w.quarantined[n]
	if a == nil {
		a = &quarantine{since: time.Now()}
		w.quarantined[n] = a
	}
	return a
}

// set replaces a Service in the copied state.
func (w *wanted) set(n snapshot.Name, svc *dataplane.Service) {
	w.keepAcknowledged(n, w.state.Services[n])
	if w.acknowledgedAs[n] == svc {
		delete(w.acknowledgedAs, n)
	}
	if svc == nil {
		delete(w.state.Services, n)
	} else {
		w.state.Services[n] = svc
	}
}

// keepLast gives a quarantined Service the version that the kernel acknowledged last, without addresses that the
// planner has given to other Services since. If the kernel now rejects that very version, nothing is left of the
// Service.
func (w *wanted) keepLast(n snapshot.Name) {
	now := w.planner.State().Services[n]
	last, differs := w.acknowledgedAs[n]
	if !differs {
		last = w.state.Services[n]
	}
	if last == now {
		last = nil
	}
	w.set(n, last.Within(now))
}

// startTrials puts quarantined Services that are due back into the state, as the planner wants them, and says whether
// there are any.
func (w *wanted) startTrials(now time.Time) (any bool) {
	for n, a := range w.quarantined {
		if !a.due().After(now) {
			a.trial, any = true, true
			w.set(n, w.planner.State().Services[n])
		}
	}
	return any
}

// nextTrial returns when the first quarantined Service is due.
func (w *wanted) nextTrial() (due time.Time, any bool) {
	for _, a := range w.quarantined {
		if at := a.due(); !any || at.Before(due) {
			due, any = at, true
		}
	}
	return due, any
}

// endTrials takes the Services on trial out of the state again: the transaction failed as a whole, and they may be the
// cause.
func (w *wanted) endTrials() {
	for n, a := range w.quarantined {
		if a.trial {
			a.inconclusive(time.Now())
			if a.unscheduled {
				w.set(n, w.planner.State().Services[n].Unscheduled())
			} else {
				w.keepLast(n)
			}
		}
	}
}
