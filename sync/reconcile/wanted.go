package reconcile

import (
	"maps"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// wanted is the state the kernel is asked for, and how far it has acknowledged that. It is the planner's own state as
// long as the kernel refuses none of its Services.
type wanted struct {
	planner *dataplane.Planner

	// latest is what has changed since the kernel was asked last; before holds the Services it names as they were. They
	// are only filed in held when the transaction fails, which is rare.
	latest dataplane.Change
	before []*dataplane.Service
	// acknowledgedAs holds, of every other Service of which the state may have something the kernel has not acknowledged, what it
	// acknowledged last; nil for a Service it has nothing of. globals says the same of what Change.Globals stands for.
	acknowledgedAs map[snapshot.Name]*dataplane.Service
	globals        bool
	// partial holds, of every Service that is not wholly written (Receipt.Left), what was programmed before its first
	// part.
	partial map[snapshot.Name]*dataplane.Service

	// quarantined are the Services that the kernel refuses.
	quarantined map[snapshot.Name]*quarantine
	// state is the planner's, but for those. It is only there while there are some: else its Services are nil.
	state dataplane.State
}

// currentState gives the state.
func (w *wanted) currentState() *dataplane.State {
	if w.state.Services != nil {
		return &w.state
	}
	return w.planner.State()
}

// request gives the state, and all that may differ in it from what the kernel acknowledged.
func (w *wanted) request() (*dataplane.State, dataplane.Change) {
	missed := slices.SortedFunc(maps.Keys(w.acknowledgedAs), snapshot.Name.Compare)
	return w.currentState(), w.latest.With(dataplane.Change{Services: missed, Globals: w.globals})
}

// acknowledged says that the kernel has acknowledged all of the state.
func (w *wanted) acknowledged() bool {
	return w.latest.Empty() && len(w.acknowledgedAs) == 0 && !w.globals
}

// succeed takes note that the kernel acknowledged the state, but for some Services. The backend goes on with them by
// itself; what they were is only noted for the case that the kernel refuses them.
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
	maps.DeleteFunc(w.acknowledgedAs, func(n snapshot.Name, svc *dataplane.Service) bool { return !waits[n] || svc == nil })
	w.latest, w.before, w.globals = dataplane.Change{}, nil, false
}

// committed gives the Services that the kernel has now acknowledged wholly: as they were before and as they are. Left
// are those it has not. It is called before succeed.
func (w *wanted) committed(left []snapshot.Name) (before, after []*dataplane.Service) {
	now := w.currentState().Services
	if len(w.acknowledgedAs)+len(w.partial)+len(left) == 0 { // mostly
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

// failed takes note that the kernel holds what it held before. A Service that changed several times meanwhile has not
// been acknowledged but in its oldest version.
func (w *wanted) failed() {
	for i, n := range w.latest.Services {
		w.keepAcknowledged(n, w.before[i])
	}
	w.globals = w.globals || w.latest.Globals
	w.latest, w.before = dataplane.Change{}, nil
}

// keepAcknowledged files what the kernel acknowledged last of a Service.
func (w *wanted) keepAcknowledged(n snapshot.Name, svc *dataplane.Service) {
	if _, noted := w.acknowledgedAs[n]; noted {
		return
	}
	if w.acknowledgedAs == nil {
		w.acknowledgedAs = map[snapshot.Name]*dataplane.Service{}
	}
	w.acknowledgedAs[n] = svc
}

// planned takes over what the planner says of its last Apply.
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
		case svc == nil: // there is nothing left to refuse
			delete(w.quarantined, n)
			w.set(n, nil)
		case a.unscheduled && svc.Unscheduled() == svc: // it does not ask for what is refused any more
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

// copyGlobals brings everything of the state that is no Service's up to the planner's.
func (w *wanted) copyGlobals() {
	services := w.state.Services
	w.state = *w.planner.State()
	w.state.Services = services
}

// copyState makes the state one of its own, from which Services can be taken out.
func (w *wanted) copyState() {
	if w.state.Services != nil {
		return
	}
	w.quarantined = map[snapshot.Name]*quarantine{}
	w.state.Services = maps.Clone(w.planner.State().Services)
	w.copyGlobals()
}

// dropCopy makes the state the planner's own again once no Service is in quarantine: they are equal then.
func (w *wanted) dropCopy() {
	if len(w.quarantined) == 0 {
		w.state = dataplane.State{}
	}
}

// quarantine gives what there is to know of a Service that the kernel refuses; from now on there is.
func (w *wanted) quarantine(n snapshot.Name) *quarantine {
	w.copyState()
	a := w.quarantined[n]
	if a == nil {
		a = &quarantine{since: time.Now()}
		w.quarantined[n] = a
	}
	return a
}

// set replaces a Service in the state, which is not the planner's own.
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

// keepLast gives a Service in quarantine what the kernel acknowledged of it, as far as the planner gives that to no
// other Service now. One that is refused as it was acknowledged has nothing to fall back on.
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

// startTrials puts the quarantined Services whose time has come into the state as they should be.
func (w *wanted) startTrials(now time.Time) {
	for n, a := range w.quarantined {
		if !a.due().After(now) {
			a.trial = true
			w.set(n, w.planner.State().Services[n])
		}
	}
}

// nextTrial gives when the first of those in quarantine is due.
func (w *wanted) nextTrial() (due time.Time, any bool) {
	for _, a := range w.quarantined {
		if at := a.due(); !any || at.Before(due) {
			due, any = at, true
		}
	}
	return due, any
}

// endTrials takes back out of the state what is on trial: the transaction failed as a whole, and it may be because of
// them.
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
