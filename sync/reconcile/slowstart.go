package reconcile

import (
	"cmp"
	"container/heap"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// A slow start has one step for each tenth of its time, but no step is shorter than minStep. All endpoints of a Service
// take their steps at the same moments. So a Service changes at most once for each step, however many endpoints start.
const minStep = time.Second

// slowStarts follows the endpoints of Services that ask for a slow start. It reads no clock. Only shown is read by
// others than the loop.
type slowStarts struct {
	services map[snapshot.Name]*slowStart
	// steps holds those of services that have endpoints which start, the next to take a step first.
	steps stepHeap

	// shown is the Starting of each of steps. mu guards it.
	mu    sync.Mutex
	shown map[snapshot.Name]*snapshot.Starting
}

// slowStart is one Service.
type slowStart struct {
	name   snapshot.Name
	window time.Duration
	// slices are the Service's as they were last, and ready the addresses that are ready in them.
	slices map[string]*snapshot.Slice
	ready  map[netip.Addr]bool
	// since is when each endpoint began to start, keyed as snapshot.StartingEndpoint.
	since map[netip.AddrPort]time.Time
	// due is when the next step is due, and index the place in the heap; -1 if no endpoint starts.
	due   time.Time
	index int
}

func (t *slowStarts) reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.services, t.steps = map[snapshot.Name]*slowStart{}, nil
	t.shown = map[snapshot.Name]*snapshot.Starting{}
}

// observe returns how the endpoints of changed Services start now. state is as it was before the change. While
// beginning is false, as before the first state is written, and when a Service is seen for the first time, its
// endpoints are not new: nobody knows since when they are ready.
func (t *slowStarts) observe(
	s *snapshot.Snapshot, state *dataplane.State, changed []snapshot.Name, now time.Time, beginning bool,
) snapshot.Delta {
	var d snapshot.Delta
	for _, n := range changed {
		svc, st := s.Services[n], t.services[n]
		if svc == nil || svc.SlowStart == 0 {
			if st != nil {
				t.remove(st)
				t.put(&d, s, n, nil)
			}
			continue
		}
		known := st != nil
		if !known {
			st = &slowStart{name: n, index: -1}
			t.services[n] = st
		}
		came := st.follow(s.Slices[n])
		if known && beginning {
			st.start(append(came, returned(state.Services[n], s.Health[n])...), now)
		}
		t.put(&d, s, n, t.update(st, svc.SlowStart, now))
	}
	return d
}

// Starts says how endpoints would start if something changed, as a Loop does that has been in sync.
type Starts struct{ starts slowStarts }

// NewStarts returns a Starts for what is known now. A Service's endpoints that start already are in the snapshot.
func NewStarts(s *snapshot.Snapshot, now time.Time) *Starts {
	t := &Starts{}
	t.starts.reset()
	for n, svc := range s.Services {
		if svc.SlowStart == 0 {
			continue
		}
		t.starts.observe(s, nil, []snapshot.Name{n}, now, false)
		st, starting := t.starts.services[n], s.Starting[n]
		if starting == nil {
			continue
		}
		st.since = make(map[netip.AddrPort]time.Time, len(starting.Endpoints))
		for _, e := range starting.Endpoints {
			st.since[e.Endpoint] = e.Full.Add(-svc.SlowStart)
		}
	}
	return t
}

// After returns how the endpoints of Services start once these have changed. State is as it was before. It is called
// once.
func (t *Starts) After(
	s *snapshot.Snapshot, state *dataplane.State, changed []snapshot.Name, now time.Time,
) snapshot.Delta {
	return t.starts.observe(s, state, changed, now, true)
}

// follow takes over the Service's slices. It returns the addresses that became ready, each with port 0.
func (st *slowStart) follow(of map[string]*snapshot.Slice) (came []netip.AddrPort) {
	if maps.Equal(st.slices, of) {
		return nil
	}
	before := st.ready
	st.slices, st.ready = maps.Clone(of), make(map[netip.Addr]bool, len(before))
	for _, sl := range of {
		for i := range sl.Endpoints {
			if sl.Endpoints[i].Ready {
				st.ready[sl.Endpoints[i].Addr] = true
			}
		}
	}
	for a := range st.ready {
		if !before[a] {
			came = append(came, netip.AddrPortFrom(a, 0))
		}
	}
	maps.DeleteFunc(st.since, func(a netip.AddrPort, _ time.Time) bool { return !st.ready[a.Addr()] })
	return came
}

// returned lists the endpoints of a Service that were ejected and are healthy now.
func returned(was *dataplane.Service, now *snapshot.Health) (list []netip.AddrPort) {
	for sp := range was.EachPort() {
		for _, p := range [...]*dataplane.Pool{sp.Cluster, sp.Local} {
			for _, u := range p.Ejected {
				if now.Find(u.Endpoint) == nil {
					list = append(list, u.Endpoint)
				}
			}
		}
	}
	return list
}

// start begins the slow start of endpoints that are ready.
func (st *slowStart) start(list []netip.AddrPort, now time.Time) {
	for _, a := range list {
		if !st.ready[a.Addr()] {
			continue
		}
		if st.since == nil {
			st.since = map[netip.AddrPort]time.Time{}
		}
		st.since[a] = now
	}
}

func stepOf(window time.Duration) time.Duration { return max(window/snapshot.FullTenths, minStep) }

// update ends the slow starts whose time is over, and returns the others; nil if there are none.
func (t *slowStarts) update(st *slowStart, window time.Duration, now time.Time) *snapshot.Starting {
	maps.DeleteFunc(st.since, func(_ netip.AddrPort, began time.Time) bool { return now.Sub(began) >= window })
	if len(st.since) == 0 {
		t.stop(st)
		st.window = window
		return nil
	}
	step := stepOf(window)
	switch {
	case st.index < 0 || window != st.window:
		st.due = now.Add(step)
	case !st.due.After(now):
		st.due = st.due.Add((now.Sub(st.due)/step + 1) * step)
	}
	st.window = window
	if st.index < 0 {
		heap.Push(&t.steps, st)
	} else {
		heap.Fix(&t.steps, st.index)
	}
	return st.starting(now)
}

// starting returns the endpoints that start, which must be some.
func (st *slowStart) starting(now time.Time) *snapshot.Starting {
	out := &snapshot.Starting{Endpoints: make([]snapshot.StartingEndpoint, 0, len(st.since))}
	step := stepOf(st.window)
	for a, began := range st.since {
		full := st.due
		if left := began.Add(st.window).Sub(full); left > 0 {
			full = full.Add((left + step - 1) / step * step)
		}
		tenths := snapshot.FullTenths * now.Sub(began) / st.window
		out.Endpoints = append(out.Endpoints, snapshot.StartingEndpoint{Endpoint: a, Full: full,
			Tenths: uint8(min(max(tenths, 1), snapshot.FullTenths-1))})
	}
	slices.SortFunc(out.Endpoints, func(a, b snapshot.StartingEndpoint) int { return a.Endpoint.Compare(b.Endpoint) })
	return out
}

// put shows a Service's Starting, and adds it to a delta if it differs from that in the snapshot. The snapshot may have
// lost it already, as when the Service was deleted and came back.
func (t *slowStarts) put(d *snapshot.Delta, s *snapshot.Snapshot, n snapshot.Name, is *snapshot.Starting) {
	t.show(n, is)
	was := s.Starting[n]
	if was == is || was != nil && is != nil && slices.Equal(was.Endpoints, is.Endpoints) {
		return
	}
	snapshot.Put(&d.Starting, n, is)
}

// show tells others than the loop how a Service's endpoints start; nil if none does.
func (t *slowStarts) show(n snapshot.Name, is *snapshot.Starting) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shown[n] = is; is == nil {
		delete(t.shown, n)
	}
}

func (t *slowStarts) remove(st *slowStart) {
	t.stop(st)
	delete(t.services, st.name)
}

func (t *slowStarts) stop(st *slowStart) {
	if st.index >= 0 {
		heap.Remove(&t.steps, st.index)
	}
}

// nextStep returns when the next step is due; any is false if no endpoint starts.
func (t *slowStarts) nextStep() (due time.Time, any bool) {
	if len(t.steps) == 0 {
		return time.Time{}, false
	}
	return t.steps[0].due, true
}

// takeSteps returns the Services whose step is due, as changes that take their turn with all others of their
// namespaces. A Service whose turn comes late takes all the steps that were due by then as one.
func (t *slowStarts) takeSteps(now time.Time) (d snapshot.Delta) {
	for len(t.steps) > 0 && !t.steps[0].due.After(now) {
		st, step := t.steps[0], stepOf(t.steps[0].window)
		st.due = st.due.Add((now.Sub(st.due)/step + 1) * step)
		heap.Fix(&t.steps, 0)
		snapshot.Put(&d.Starting, st.name, st.starting(now))
	}
	return d
}

// stepHeap is a heap by due.
type stepHeap []*slowStart

func (h stepHeap) Len() int { return len(h) }

func (h stepHeap) Less(i, j int) bool {
	return cmp.Or(h[i].due.Compare(h[j].due), h[i].name.Compare(h[j].name)) < 0
}

func (h stepHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *stepHeap) Push(x any) {
	st := x.(*slowStart)
	st.index = len(*h)
	*h = append(*h, st)
}

func (h *stepHeap) Pop() any {
	last := len(*h) - 1
	st := (*h)[last]
	(*h)[last] = nil
	*h, st.index = (*h)[:last], -1
	return st
}

// Starting returns the endpoints that start slowly now, by Service. Safe for concurrent use.
func (l *Loop) Starting() map[snapshot.Name]*snapshot.Starting {
	l.starts.mu.Lock()
	defer l.starts.mu.Unlock()
	return maps.Clone(l.starts.shown)
}
