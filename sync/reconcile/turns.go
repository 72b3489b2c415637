package reconcile

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Whoever may write objects in a namespace can change them as often and make them as large as the API server lets him,
// and all of it goes through one loop. So time is accounted by namespace. What a namespace's changes took is charged to
// it; once it owes something, its next changes wait until that is paid, and meanwhile the later replace the earlier.
// Others go ahead.
const (
	// share is the part of the time that a namespace may take in the long run: one in so many.
	share = 5
	// credit is what it may take at once, as for a rollout after some quiet.
	credit = 250 * time.Millisecond
	// maxPause bounds how long changes wait, whatever the ones before them took.
	maxPause = 30 * time.Second
	// maxNamespaceWeight bounds the changes that one namespace has in one step, and maxStepWeight those of all, by the weight of
	// Services: about their elements. A Service that is larger is alone.
	maxNamespaceWeight = 1 << 14
	maxStepWeight      = 1 << 16
	// lightWeight is that of changes which need not wait until others, that take much longer, are written with them.
	lightWeight = 1 << 10
	// rangeWeight is that of a source range: the kernel takes about a hundred times as long for one as for another
	// element, once there are ten thousand.
	rangeWeight = 100
	// maxCharge bounds what is charged for each unit of weight, so that nobody pays for what somebody else's
	// transaction took.
	maxCharge = 100 * time.Microsecond
)

// fairQueue says whose changes are next. The zero value has none waiting.
type fairQueue struct {
	waiting map[string]*namespace
	// paid is when the account of a namespace will be as good as new; one that is not in it, is.
	paid map[string]time.Time
	// running are the weights of what is being written.
	running map[string]int
	// lightLast says that the last step was for changes of little weight only; the next one is for all.
	lightLast bool
}

// namespace is what waits of one. Objects are in the order in which they came first.
type namespace struct {
	delta snapshot.Delta
	order []object
}

// object is the name of a Service or of a slice.
type object struct {
	name  snapshot.Name
	slice bool
}

// put adds what came.
func (t *fairQueue) put(d snapshot.Delta) {
	for n, svc := range d.Services {
		ns := t.namespace(n.Namespace)
		if _, waits := ns.delta.Services[n]; !waits {
			ns.order = append(ns.order, object{n, false})
		}
		ns.delta.Services[n] = svc
	}
	for n, sl := range d.Slices {
		ns := t.namespace(n.Namespace)
		if _, waits := ns.delta.Slices[n]; !waits {
			ns.order = append(ns.order, object{n, true})
		}
		ns.delta.Slices[n] = sl
	}
}

func (t *fairQueue) namespace(name string) *namespace {
	ns := t.waiting[name]
	if ns == nil {
		ns = &namespace{}
		ns.delta.Services = map[snapshot.Name]*snapshot.Service{}
		ns.delta.Slices = map[snapshot.Name]*snapshot.Slice{}
		if t.waiting == nil {
			t.waiting = map[string]*namespace{}
		}
		t.waiting[name] = ns
	}
	return ns
}

// next gives the changes whose turn it is: of the namespaces that owe nothing, and of each only so much. The weight is
// that of an object.
func (t *fairQueue) next(now time.Time, weight func(object, *snapshot.Delta) int) snapshot.Delta {
	var ready []string
	for name := range t.waiting {
		if !t.due(name).After(now) {
			ready = append(ready, name)
		}
	}
	slices.SortFunc(ready, func(a, b string) int { return cmp.Or(t.paid[a].Compare(t.paid[b]), cmp.Compare(a, b)) })
	if light := t.light(ready, weight); len(light) > 0 && len(light) < len(ready) && !t.lightLast {
		ready, t.lightLast = light, true
	} else {
		t.lightLast = false
	}
	out, room := snapshot.Delta{}, maxStepWeight
	for _, name := range ready {
		if room <= 0 {
			break
		}
		room -= t.takeFrom(name, min(room, maxNamespaceWeight), &out, weight)
	}
	return out
}

// light gives the namespaces of some of which little waits.
func (t *fairQueue) light(names []string, weight func(object, *snapshot.Delta) int) (light []string) {
	for _, name := range names {
		ns, sum := t.waiting[name], 0
		for _, o := range ns.order {
			if sum += weight(o, &ns.delta); sum > lightWeight {
				break
			}
		}
		if sum <= lightWeight {
			light = append(light, name)
		}
	}
	return light
}

// takeFrom moves the first changes of a namespace into a delta, up to about some weight, and gives theirs.
func (t *fairQueue) takeFrom(name string, most int, out *snapshot.Delta, weight func(object, *snapshot.Delta) int,
) (sum int) {
	ns, n := t.waiting[name], 0
	for ; n < len(ns.order) && (n == 0 || sum < most); n++ {
		o := ns.order[n]
		w := weight(o, &ns.delta)
		if n > 0 && sum+w > most {
			break
		}
		sum += w
		if o.slice {
			out.Merge(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{o.name: ns.delta.Slices[o.name]}})
			delete(ns.delta.Slices, o.name)
		} else {
			out.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{o.name: ns.delta.Services[o.name]}})
			delete(ns.delta.Services, o.name)
		}
	}
	if ns.order = ns.order[n:]; len(ns.order) == 0 {
		delete(t.waiting, name)
	}
	if t.running == nil {
		t.running = map[string]int{}
	}
	t.running[name] += sum
	return sum
}

// due is when a namespace has its turn again.
func (t *fairQueue) due(name string) time.Time {
	paid := t.paid[name]
	if paid.IsZero() {
		return paid
	}
	return paid.Add(-share * credit)
}

// nextDue is when the first of those that wait has its turn; zero if nobody waits.
func (t *fairQueue) nextDue() (due time.Time, any bool) {
	for name := range t.waiting {
		if at := t.due(name); !any || at.Before(due) {
			due, any = at, true
		}
	}
	return due, any
}

// counts counts what waits.
func (t *fairQueue) counts() (w snapshot.Waiting) {
	for _, ns := range t.waiting {
		w.Services, w.Slices = w.Services+len(ns.delta.Services), w.Slices+len(ns.delta.Slices)
	}
	return w
}

// charge has those whose changes were written pay for the time that took, each by the weight of them; left are the
// Services that are not all written. It gives the part of the time that was taken by who has to wait now.
func (t *fairQueue) charge(now time.Time, took time.Duration, left []snapshot.Name) (heavy time.Duration) {
	sum := 0
	for _, w := range t.running {
		sum += w
	}
	for name, w := range t.running {
		part := min(time.Duration(float64(took)*float64(w)/float64(max(sum, 1))), time.Duration(w)*maxCharge)
		paid := t.paid[name]
		if paid.Before(now) {
			paid = now
		}
		if t.paid == nil {
			t.paid = map[string]time.Time{}
		}
		paid = paid.Add(share * part)
		if most := now.Add(share*credit + maxPause); paid.After(most) {
			paid = most
		}
		if t.paid[name] = paid; t.due(name).After(now) {
			heavy += part
		}
	}
	unfinished := map[string]bool{}
	for _, n := range left {
		unfinished[n.Namespace] = true
	}
	maps.DeleteFunc(t.running, func(name string, _ int) bool { return !unfinished[name] })
	maps.DeleteFunc(t.paid, func(_ string, paid time.Time) bool { return !paid.After(now) })
	return heavy
}

// weigh says about how many elements a change of an object is looked at for: those of the Service as it is in force,
// the addresses that it asks for, and what the object has.
func (l *Loop) weigh(o object, d *snapshot.Delta) int {
	w, owner := 1, o.name
	if o.slice {
		owner = l.snapshot.Owner(o.name)
		if sl := d.Slices[o.name]; sl != nil {
			w += len(sl.Endpoints) * max(len(sl.Ports), 1)
			owner = snapshot.Name{Namespace: o.name.Namespace, Name: sl.Service}
		}
	}
	for _, svc := range []*snapshot.Service{l.snapshot.Services[owner], d.Services[owner]} {
		if svc != nil {
			w += len(svc.Ports)*(1+len(svc.ExternalIPs)+len(svc.LoadBalancerIPs)) + rangeWeight*len(svc.SourceRanges)
		}
	}
	return w + weightOf(l.Planner.State().Services[owner])
}

// weightOf is about how many elements a Service has, which may be nil.
func weightOf(svc *dataplane.Service) (w int) {
	if svc == nil {
		return 0
	}
	for _, sp := range svc.Ports {
		w += len(sp.Frontends) + len(sp.Cluster.Endpoints) + len(sp.Local.Endpoints)
	}
	return w
}
