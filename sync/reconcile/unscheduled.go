package reconcile

import (
	"errors"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// reportUnscheduled reports Services that ask for IPVS and do not get it, wholly or at some addresses, because of a
// limit of Verdict and not of the kernel; and those that get no endpoints for such a limit. It returns those that have
// come to that limit, or fallen below it.
func (l *Loop) reportUnscheduled(change dataplane.Change, before []*dataplane.Service) (also snapshot.Change) {
	news, moved := map[snapshot.Name]error{}, map[snapshot.Name]dataplane.NotScheduled{}
	var wholly, far []string
	var why error
	for i, n := range change.Services {
		was, is := before[i].NotScheduled(), l.Planner.State().Services[n].NotScheduled()
		if was == is {
			continue
		}
		if was.WholeService() || is.WholeService() {
			moved[n] = is
		}
		if was == dataplane.TooManyBackends || is == dataplane.TooManyBackends {
			also.Services = append(also.Services, n)
		}
		switch svc := l.snapshot.Services[n]; {
		case is == dataplane.TooManyBackends:
			news[n] = errors.New(is.String())
			far = append(far, n.String())
		case is.WholeService():
			news[n] = errors.New(is.String())
			wholly, why = append(wholly, n.String()), news[n]
		case is != dataplane.Schedulable && svc != nil && svc.AsksForIPVS():
			news[n] = errors.New(is.String())
		}
	}
	if len(moved) > 0 {
		l.updateNotScheduled(moved)
	}
	if wholly != nil {
		l.Log.Warn("IPVS does not schedule these Services; nftables chooses their endpoints until it does",
			"services", len(wholly), "such_as", suchAs(wholly), "err", why)
	}
	if far != nil {
		l.Log.Warn("these Services refer to too many endpoints of other Services, and get none until there are fewer",
			"services", len(far), "such_as", suchAs(far))
	}
	if len(news) > 0 {
		notify(l, func(h *Listener) func(*dataplane.Refused) { return h.Unscheduled },
			&dataplane.Refused{Services: news, Scheduling: true, Instead: l.chosenInstead(news)})
	}
	return also
}

// chosenInstead returns how the backend chooses the endpoints of Services that IPVS does not schedule.
func (l *Loop) chosenInstead(of map[snapshot.Name]error) map[snapshot.Name]string {
	out := make(map[snapshot.Name]string, len(of))
	for n := range of {
		svc := l.Planner.State().Services[n]
		if out[n] = svc.ChosenBy(); svc.NotScheduled() == dataplane.TooManyBackends {
			out[n] = "from none"
		}
	}
	return out
}

// updateNotScheduled updates the list of Services that get no IPVS at all. why holds every Service whose reason
// changed. The list is replaced, because others may be reading the old one.
func (l *Loop) updateNotScheduled(why map[snapshot.Name]dataplane.NotScheduled) {
	var list []Quarantined
	since := map[snapshot.Name]time.Time{}
	for _, q := range l.notScheduled {
		if _, changed := why[q.Name]; changed {
			since[q.Name] = q.Since
		} else {
			list = append(list, q)
		}
	}
	for n, why := range why {
		if !why.WholeService() {
			continue
		}
		q := Quarantined{Name: n, Err: errors.New(why.String()), Since: since[n]}
		if q.Since.IsZero() {
			q.Since = time.Now()
		}
		list = append(list, q)
	}
	slices.SortFunc(list, func(x, y Quarantined) int { return x.Name.Compare(y.Name) })
	l.notScheduled = list
}
