package reconcile

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Quarantined is a Service that the kernel refuses. What the kernel took of it before stays in force, but for what
// other Services have got since.
type Quarantined struct {
	Name snapshot.Name
	// Err is what the kernel says of it.
	Err error
	// Since is when it was first refused, Next when it will be tried again. It is also tried when it changes.
	Since, Next time.Time
}

// quarantineLists are the Services that are not programmed as they should be, sorted by name.
type quarantineLists struct{ quarantined, unscheduled []Quarantined }

// Quarantined gives the Services in quarantine, sorted by name. It is safe for concurrent use; nobody may change the
// list.
func (l *Loop) Quarantined() []Quarantined {
	if lists := l.published.Load(); lists != nil {
		return lists.quarantined
	}
	return nil
}

// Unscheduled gives the Services that are programmed without the Scheduling they ask for, sorted by name: the kernel
// refuses it, or it would be too much. It is safe for concurrent use; nobody may change the list.
func (l *Loop) Unscheduled() []Quarantined {
	if lists := l.published.Load(); lists != nil {
		return lists.unscheduled
	}
	return nil
}

// publishLists makes what is in quarantine known to Quarantined and Unscheduled.
func (l *Loop) publishLists() {
	if len(l.want.quarantined) == 0 {
		var lists *quarantineLists
		if l.notScheduled != nil {
			lists = &quarantineLists{unscheduled: l.notScheduled}
		}
		if lists != nil || l.published.Load() != nil {
			l.published.Store(lists)
		}
		return
	}
	lists := quarantineLists{unscheduled: slices.Clone(l.notScheduled)}
	for n, a := range l.want.quarantined {
		list := &lists.quarantined
		if a.unscheduled {
			list = &lists.unscheduled
		}
		*list = append(*list, Quarantined{Name: n, Err: a.err, Since: a.since, Next: a.next})
	}
	for _, list := range [][]Quarantined{lists.quarantined, lists.unscheduled} {
		slices.SortFunc(list, func(x, y Quarantined) int { return x.Name.Compare(y.Name) })
	}
	l.published.Store(&lists)
}

// A Service that is refused is tried again after firstRetry, then after twice as long each time up to maxTrialWait. Each
// trial that fails costs all others a second transaction, and mostly it takes a change of the Service to end well.
const (
	firstRetry   = time.Second
	maxTrialWait = 5 * time.Minute
	// maxUnscheduledWait is for those that lack only their Scheduling. It ends when somebody else goes, such as a
	// kube-proxy in IPVS mode, and a trial costs the others no transaction of nftables.
	maxUnscheduledWait = 30 * time.Second
)

// quarantine is what there is to know of a Service that the kernel refuses.
type quarantine struct {
	err   error
	since time.Time
	// next is when it is tried again, wait how long it waits for that.
	next time.Time
	wait time.Duration
	// changed says that it has changed since it was refused. Then it is tried at once, and the next trial is when it
	// would be anyway: a Service whose endpoints come and go does not put off its next trial, nor is it a line in the
	// log each time.
	changed bool
	// trial says that the state has it as it should be.
	trial bool
	// unscheduled says that only its Scheduling is refused, so that the state has it as it is without.
	unscheduled bool
}

// due gives when it is to be tried.
func (a *quarantine) due() time.Time {
	if a.changed {
		return a.since
	}
	return a.next
}

// reject takes note of a refusal and says whether it counts: one before the time of a trial does not.
func (a *quarantine) reject(err error, now time.Time) (counts bool) {
	a.err, a.changed, a.trial = err, false, false
	if now.Before(a.next) {
		return false
	}
	a.backOff(now)
	return true
}

// inconclusive takes note that a trial ended without an answer. For one that changed, what was said of it before means
// little.
func (a *quarantine) inconclusive(now time.Time) {
	if a.changed {
		a.wait = 0
	}
	a.changed, a.trial = false, false
	a.backOff(now)
}

func (a *quarantine) backOff(now time.Time) {
	most := maxTrialWait
	if a.unscheduled {
		most = maxUnscheduledWait
	}
	a.wait = min(max(2*a.wait, firstRetry), most)
	a.next = now.Add(a.wait)
}

// quarantine takes out of the state what the kernel refuses, and says whether that makes it another state.
func (l *Loop) quarantine(refused *dataplane.Refused) (progress bool) {
	if refused.Scheduling {
		return l.unschedule(refused)
	}
	news := map[snapshot.Name]error{}
	for _, n := range slices.SortedFunc(maps.Keys(refused.Services), snapshot.Name.Compare) {
		moved, counts := l.quarantineOne(n, refused.Services[n])
		progress = progress || moved
		if counts {
			news[n] = refused.Services[n]
		}
	}
	if len(news) > 0 {
		notify(l, func(h *Listener) func(*dataplane.Refused) { return h.Quarantined }, &dataplane.Refused{Services: news})
	}
	return progress
}

// quarantineOne goes back from what a Service should be to what the kernel took of it before, and from that to nothing.
// News says that this was not known.
func (l *Loop) quarantineOne(n snapshot.Name, err error) (progress, news bool) {
	w := &l.want
	if w.planner.State().Services[n] == nil { // it is its end that is refused
		return false, false
	}
	a := w.quarantined[n]
	if _, differs := w.acknowledgedAs[n]; a != nil && !a.trial && (!a.unscheduled || !differs) {
		a.unscheduled = false
		return l.dropService(n, err), false
	}
	a = w.quarantine(n)
	a.unscheduled = false
	if news = a.reject(err, time.Now()); news {
		l.Log.Error(
			"the kernel refuses this Service; it is quarantined, and what the kernel held of it before stays in force",
			"service",
			n.String(),
			"err",
			err,
			"retry",
			a.wait,
		)
	} else {
		l.Log.Debug("the kernel refuses this Service as it is now, too", "service", n.String(), "err", err)
	}
	w.keepLast(n)
	return true, news
}

// unschedule has the state hold Services without the Scheduling that is refused.
func (l *Loop) unschedule(refused *dataplane.Refused) (progress bool) {
	w := &l.want
	var news []string
	var why error
	for _, n := range slices.SortedFunc(maps.Keys(refused.Services), snapshot.Name.Compare) {
		svc, a := w.planner.State().Services[n], w.quarantined[n]
		if a != nil && !a.trial { // what is in force in its place is scheduled, too
			svc = w.state.Services[n]
		}
		plain := svc.Unscheduled()
		if plain == svc { // it is its end that is refused
			continue
		}
		progress = true
		if a == nil || a.trial {
			a = w.quarantine(n)
			a.unscheduled = true
			if a.reject(refused.Services[n], time.Now()) {
				news, why = append(news, n.String()), cmp.Or(why, a.err)
			}
		}
		w.set(n, plain)
	}
	if news != nil {
		l.Log.Warn("IPVS does not schedule these Services; nftables chooses their endpoints until it does",
			"services", len(news), "such as", suchAs(news), "err", why)
		notify(l, func(h *Listener) func(*dataplane.Refused) { return h.Unscheduled }, refused)
	}
	return progress
}

// suchAs names a few of many.
func suchAs(names []string) string { return strings.Join(names[:min(3, len(names))], " ") }

// dropService takes a Service out of the state of which the kernel refuses even what it took before.
func (l *Loop) dropService(n snapshot.Name, err error) (progress bool) {
	if l.want.state.Services[n] == nil {
		return false
	}
	l.Log.Error("the kernel refuses what it held of this Service, too; nothing of it is in force",
		"service", n.String(), "err", err)
	l.want.set(n, nil)
	return true
}

// release takes note that the kernel took the state, and all that was on trial in it.
func (l *Loop) release(left []snapshot.Name) {
	l.want.succeed(left)
	scheduled := 0
	for n, a := range l.want.quarantined {
		switch {
		case !a.trial, slices.Contains(left, n):
			continue
		case a.unscheduled:
			scheduled++
		default:
			l.Log.Info("the Service is programmed again; it leaves quarantine", "service", n.String())
		}
		delete(l.want.quarantined, n)
	}
	if scheduled > 0 {
		l.Log.Info("IPVS schedules these Services now", "services", scheduled)
	}
	l.want.dropCopy()
}
