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

// Quarantined is a Service that the kernel rejects. What the kernel held of it before stays in force, except for
// addresses that other Services have taken since.
type Quarantined struct {
	Name snapshot.Name
	// Err is the kernel's reason.
	Err error
	// Since is when the Service was first rejected, Next when Verdict retries it. A change of the Service also causes a
	// retry.
	Since, Next time.Time
}

// quarantineLists are the Services that are not programmed as they should be, sorted by name.
type quarantineLists struct{ quarantined, unscheduled []Quarantined }

// Quarantined returns the quarantined Services, sorted by name. It is safe for concurrent use. The caller must not
// change the list.
func (l *Loop) Quarantined() []Quarantined {
	if lists := l.published.Load(); lists != nil {
		return lists.quarantined
	}
	return nil
}

// Unscheduled returns the Services that are programmed without the Scheduling they ask for, sorted by name: the kernel
// rejects it, or it exceeds a limit. It is safe for concurrent use. The caller must not change the list.
func (l *Loop) Unscheduled() []Quarantined {
	if lists := l.published.Load(); lists != nil {
		return lists.unscheduled
	}
	return nil
}

// publishLists updates what Quarantined and Unscheduled return.
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

// A rejected Service is retried after firstRetry, then after twice as long each time, up to maxTrialWait. Each trial
// that fails costs all others a second transaction, and usually only a change of the Service helps.
const (
	firstRetry   = time.Second
	maxTrialWait = 5 * time.Minute
	// maxUnscheduledWait is for Services that lack only their Scheduling. That ends when somebody else leaves, such as
	// a kube-proxy in IPVS mode, and a trial costs the others no nftables transaction.
	maxUnscheduledWait = 30 * time.Second
)

// quarantine is what the loop knows of a Service that the kernel rejects.
type quarantine struct {
	err   error
	since time.Time
	// next is when it is retried, and wait is the length of that pause.
	next time.Time
	wait time.Duration
	// changed says that the Service has changed since it was rejected. It is then retried at once, and its regular
	// retry stays where it was. So a Service whose endpoints come and go neither delays its next retry nor fills the
	// log.
	changed bool
	// trial says that the state holds the Service as the planner wants it.
	trial bool
	// unscheduled says that only the Scheduling is rejected. The state holds the Service without it.
	unscheduled bool
}

// due returns when to retry.
func (a *quarantine) due() time.Time {
	if a.changed {
		return a.since
	}
	return a.next
}

// reject records a rejection and says whether it counts. A rejection before the regular retry does not.
func (a *quarantine) reject(err error, now time.Time) (counts bool) {
	a.err, a.changed, a.trial = err, false, false
	if now.Before(a.next) {
		return false
	}
	a.backOff(now)
	return true
}

// inconclusive records that a trial ended without an answer. If the Service has changed, its earlier rejections mean
// little, so the pauses start again from the shortest.
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

// quarantine removes from the state what the kernel rejects, and says whether that changed the state.
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

// quarantineOne replaces a Service by the version that the kernel held before; if the kernel rejects that too, it
// removes the Service. news says that the rejection is new.
func (l *Loop) quarantineOne(n snapshot.Name, err error) (progress, news bool) {
	w := &l.want
	if w.planner.State().Services[n] == nil { // the kernel rejects its removal
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
		l.Log.Error("the kernel rejects this Service; it is quarantined, and its last accepted version stays programmed",
			"service", n.String(), "err", err, "retry", a.wait)
	} else {
		l.Log.Debug("the kernel rejects the new version of this Service, too", "service", n.String(), "err", err)
	}
	w.keepLast(n)
	return true, news
}

// unschedule replaces Services whose Scheduling is rejected by versions without it.
func (l *Loop) unschedule(refused *dataplane.Refused) (progress bool) {
	w := &l.want
	var news []string
	var why error
	for _, n := range slices.SortedFunc(maps.Keys(refused.Services), snapshot.Name.Compare) {
		svc, a := w.planner.State().Services[n], w.quarantined[n]
		if a != nil && !a.trial { // the version in force is scheduled, too
			svc = w.state.Services[n]
		}
		plain := svc.Unscheduled()
		if plain == svc { // the kernel rejects its removal
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
			"services", len(news), "such_as", suchAs(news), "err", why)
		named := *refused
		named.Instead = l.chosenInstead(refused.Services)
		notify(l, func(h *Listener) func(*dataplane.Refused) { return h.Unscheduled }, &named)
	}
	return progress
}

// suchAs names the first few of many names.
func suchAs(names []string) string { return strings.Join(names[:min(3, len(names))], " ") }

// dropService removes a Service from the state: the kernel rejects even the version that it held before.
func (l *Loop) dropService(n snapshot.Name, err error) (progress bool) {
	if l.want.state.Services[n] == nil {
		return false
	}
	l.Log.Error("the kernel rejects the last accepted version of this Service, too; nothing of it is programmed",
		"service", n.String(), "err", err)
	l.want.set(n, nil)
	return true
}

// release records that the kernel accepted the state. Services on trial in it leave quarantine, except those in left.
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
