package reconcile

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Users who may write to a namespace can change its objects as often, and make them as large, as the API server allows.
// All changes go through one loop, so the loop accounts for time by namespace. It charges a namespace for the time that
// its changes took. While a namespace owes time, its further changes wait, and later ones replace earlier ones. Other
// namespaces go first.
const (
	// share is the part of the time that a namespace may take in the long run: one in so many.
	share = 5
	// credit is how much time it may take at once, as for a rollout after a quiet time.
	credit = 250 * time.Millisecond
	// maxPause bounds how long changes wait, however long earlier ones took.
	maxPause = 30 * time.Second
	// maxNamespaceWeight bounds the changes of one namespace in one step, and maxStepWeight those of all namespaces.
	// The weight of a Service is about the number of its elements. A Service that exceeds the limit is written alone.
	maxNamespaceWeight = 1 << 14
	maxStepWeight      = 1 << 16
	// lightWeight is the most weight of changes that are written before heavier ones, so that they do not wait for
	// them.
	lightWeight = 1 << 10
	// rangeWeight is the weight of a source range, and of a refused share. Once there are ten thousand, the kernel takes
	// about a hundred times as long for one as for another element.
	rangeWeight = 100
	// maxCharge bounds the charge for each unit of weight, so that no namespace pays for the transactions of others.
	maxCharge = 100 * time.Microsecond
)

// fairQueue holds changes that wait, and decides which are written next. The zero value is empty.
type fairQueue struct {
	waiting map[string]*namespace
	// paid is when a namespace will have paid what it owes. A namespace without an entry owes nothing.
	paid map[string]time.Time
	// running holds the weight of what is being written, by namespace.
	running map[string]int
	// received are the versions of everything that was taken from the loop's queue.
	received snapshot.Versions
	// oldest is when the oldest of what next returned last was taken from the loop's queue.
	oldest time.Time
	// lightLast says that the last step had only light changes; the next one takes all.
	lightLast bool
}

// namespace is what waits of one namespace. order lists its objects in the order in which they first came.
type namespace struct {
	delta snapshot.Delta
	order []queued
}

// queued is an object that waits.
type queued struct {
	object
	// since is when it was taken from the loop's queue, and before are the versions of all that was taken before it.
	since  time.Time
	before snapshot.Versions
}

// object is the name of something that changes, with its kind. Health and
// Starting have the name of their Service.
type object struct {
	name snapshot.Name
	kind objectKind
}

type objectKind uint8

const (
	aService objectKind = iota
	aSlice
	aHealth
	aStarting
)

// put adds changes that were taken from the loop's queue now. Those that came together wait in the order of their
// names.
func (t *fairQueue) put(d snapshot.Delta, now time.Time) {
	putAll(t, aService, now, d.Services,
		func(d *snapshot.Delta) *map[snapshot.Name]*snapshot.Service { return &d.Services })
	putAll(t, aSlice, now, d.Slices, func(d *snapshot.Delta) *map[snapshot.Name]*snapshot.Slice { return &d.Slices })
	putAll(t, aHealth, now, d.Health, func(d *snapshot.Delta) *map[snapshot.Name]*snapshot.Health { return &d.Health })
	putAll(t, aStarting, now, d.Starting,
		func(d *snapshot.Delta) *map[snapshot.Name]*snapshot.Starting { return &d.Starting })
	t.received = d.Versions
}

// putAll adds changes of one kind; of finds those that wait.
func putAll[T any](t *fairQueue, kind objectKind, now time.Time, changes map[snapshot.Name]*T,
	of func(*snapshot.Delta) *map[snapshot.Name]*T) {
	for _, n := range slices.SortedFunc(maps.Keys(changes), snapshot.Name.Compare) {
		ns := t.namespace(n.Namespace)
		waiting := of(&ns.delta)
		if _, waits := (*waiting)[n]; !waits {
			ns.order = append(ns.order, queued{object{n, kind}, now, t.received})
		}
		snapshot.Put(waiting, n, changes[n])
	}
}

func (t *fairQueue) namespace(name string) *namespace {
	ns := t.waiting[name]
	if ns == nil {
		ns = &namespace{}
		if t.waiting == nil {
			t.waiting = map[string]*namespace{}
		}
		t.waiting[name] = ns
	}
	return ns
}

// take removes an object from what waits, and adds it to out.
func (ns *namespace) take(o object, out *snapshot.Delta) {
	switch d := &ns.delta; o.kind {
	case aService:
		move(&out.Services, d.Services, o.name)
	case aSlice:
		move(&out.Slices, d.Slices, o.name)
	case aHealth:
		move(&out.Health, d.Health, o.name)
	case aStarting:
		move(&out.Starting, d.Starting, o.name)
	}
}

func move[T any](to *map[snapshot.Name]*T, from map[snapshot.Name]*T, n snapshot.Name) {
	snapshot.Put(to, n, from[n])
	delete(from, n)
}

// next takes the changes of the namespaces that owe nothing, up to a limit for each. weight returns the weight of an
// object.
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
	t.oldest = time.Time{}
	out, room := snapshot.Delta{}, maxStepWeight
	for _, name := range ready {
		if room <= 0 {
			break
		}
		room -= t.takeFrom(name, min(room, maxNamespaceWeight), &out, weight)
	}
	return out
}

// light returns those of some namespaces whose waiting changes weigh little.
func (t *fairQueue) light(names []string, weight func(object, *snapshot.Delta) int) (light []string) {
	for _, name := range names {
		ns, sum := t.waiting[name], 0
		for _, o := range ns.order {
			if sum += weight(o.object, &ns.delta); sum > lightWeight {
				break
			}
		}
		if sum <= lightWeight {
			light = append(light, name)
		}
	}
	return light
}

// takeFrom moves the first changes of a namespace into out, up to about most in weight, and returns their weight.
func (t *fairQueue) takeFrom(name string, most int, out *snapshot.Delta, weight func(object, *snapshot.Delta) int,
) (sum int) {
	ns, n := t.waiting[name], 0
	for ; n < len(ns.order) && (n == 0 || sum < most); n++ {
		o := ns.order[n]
		w := weight(o.object, &ns.delta)
		if n > 0 && sum+w > most {
			break
		}
		sum += w
		t.oldest = snapshot.Earlier(t.oldest, o.since)
		ns.take(o.object, out)
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

// due returns when a namespace may write again.
func (t *fairQueue) due(name string) time.Time {
	paid := t.paid[name]
	if paid.IsZero() {
		return paid
	}
	return paid.Add(-share * credit)
}

// nextDue returns when the first namespace with waiting changes may write; any is false if nothing waits. One that owes
// nothing could write as soon as its first change came: it may have let lighter changes go ahead.
func (t *fairQueue) nextDue() (due time.Time, any bool) {
	for name, ns := range t.waiting {
		at := t.due(name)
		if at.IsZero() {
			at = ns.order[0].since
		}
		if !any || at.Before(due) {
			due, any = at, true
		}
	}
	return due, any
}

// held returns what waits. Health and Starting are no objects of the cluster and do not count.
func (t *fairQueue) held() (h snapshot.Held) {
	for _, ns := range t.waiting {
		h.Services, h.Slices = h.Services+len(ns.delta.Services), h.Slices+len(ns.delta.Slices)
		first := slices.IndexFunc(ns.order, func(o queued) bool { return o.kind == aService || o.kind == aSlice })
		switch {
		case first < 0:
		case h.Since.IsZero():
			h.Since, h.Before = ns.order[first].since, ns.order[first].before
		default:
			h.Since = snapshot.Earlier(h.Since, ns.order[first].since)
			h.Before = h.Before.Older(ns.order[first].before)
		}
	}
	return h
}

// charge divides the time that a step took among the namespaces whose changes it wrote, by weight. left are the
// Services that are not written completely. It returns the part of the time taken by namespaces that now have to wait.
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

// weigh returns about how many elements have to be compared for a change of an object: those of the Service in force,
// the addresses that it asks for, and the object's own; and those of the Services that refer to it, also of other
// namespaces, which have to be granted that.
func (l *Loop) weigh(o object, d *snapshot.Delta) int {
	w, owner := 1, o.name
	if o.kind == aSlice {
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
	services := l.Planner.State().Services
	for n := range l.snapshot.Referrers(owner) {
		if w += 1 + weightOf(services[n]); w > maxNamespaceWeight { // more makes no difference
			break
		}
	}
	return w + weightOf(services[owner])
}

// weightOf returns about how many elements a Service has. The Service may be nil.
func weightOf(svc *dataplane.Service) (w int) {
	for sp := range svc.EachPort() {
		w += len(sp.Frontends) + len(sp.Cluster.Endpoints) + len(sp.Local.Endpoints)
		if sp.Cluster.Refused > 0 || sp.Local.Refused > 0 {
			w += rangeWeight
		}
	}
	return w
}
