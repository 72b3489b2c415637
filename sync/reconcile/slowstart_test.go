package reconcile

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// startingCluster drives slowStarts by a clock of its own.
type startingCluster struct {
	snap   *snapshot.Snapshot
	starts slowStarts
	state  *dataplane.State
	now    time.Time
}

func newStartingCluster() *startingCluster {
	c := &startingCluster{snap: snapshot.New(), state: &dataplane.State{}, now: time.Unix(1e9, 0)}
	c.starts.reset()
	return c
}

func (c *startingCluster) apply(filled bool, d snapshot.Delta) {
	changed := c.snap.Apply(d).Services
	c.snap.Apply(c.starts.observe(c.snap, c.state, changed, c.now, filled))
}

// wait takes all steps that are due within a time, and returns how many deltas there were.
func (c *startingCluster) wait(d time.Duration) (steps int) {
	end := c.now.Add(d)
	for {
		due, any := c.starts.nextStep()
		if !any || due.After(end) {
			c.now = end
			return steps
		}
		c.now = due
		steps++
		c.apply(true, c.starts.takeSteps(c.now))
	}
}

// tenths returns how the endpoints 10.0.0.1 to 10.0.0.n start.
func (c *startingCluster) tenths(n int) string {
	list := make([]int, n)
	for i := range list {
		list[i] = snapshot.FullTenths
		if e := c.snap.Starting[startingName].Find(netip.AddrPortFrom(startingAddr(i+1), 80)); e != nil {
			list[i] = int(e.Tenths)
		}
	}
	return fmt.Sprint(list)
}

var startingName = snapshot.Name{Namespace: "a", Name: "web"}

func startingAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }

func startingService(window time.Duration) snapshot.Delta {
	return serviceNamed(startingName, window)
}

func serviceNamed(n snapshot.Name, window time.Duration) snapshot.Delta {
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: {Name: n, SlowStart: window,
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ports:      []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}}}
}

// readyEndpoints gives a slice in which these endpoints are ready, and all others up to 9 are not.
func readyEndpoints(of snapshot.Name, list ...int) snapshot.Delta {
	name := snapshot.Name{Namespace: of.Namespace, Name: of.Name + "-1"}
	sl := &snapshot.Slice{Name: name, Service: of.Name, Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 80}}}
	for _, i := range list {
		sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: startingAddr(i), Ready: true, Serving: true})
	}
	return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{name: sl}}
}

// TestSlowStart follows endpoints through their slow start.
func TestSlowStart(t *testing.T) {
	c := newStartingCluster()
	c.apply(false, startingService(20*time.Second))
	c.apply(false, readyEndpoints(startingName, 1, 2))
	check := func(when, want string) {
		t.Helper()
		if got := c.tenths(4); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	check("at the start of the proxy", "[10 10 10 10]")
	c.apply(true, readyEndpoints(startingName, 1, 2, 3))
	check("a new endpoint", "[10 10 1 10]")
	full := c.snap.Starting[startingName].Endpoints[0].Full
	if want := c.now.Add(20 * time.Second); !full.Equal(want) {
		t.Errorf("full at %v, want %v", full, want)
	}
	c.wait(2 * time.Second)
	check("after a tenth", "[10 10 1 10]")
	c.wait(2 * time.Second)
	check("after two tenths", "[10 10 2 10]")
	c.wait(5 * time.Second)
	check("within the fifth tenth", "[10 10 4 10]")
	c.apply(true, readyEndpoints(startingName, 1, 2, 3, 4))
	check("another one", "[10 10 4 1]")
	c.wait(11 * time.Second)
	check("the first is done", "[10 10 10 5]")
	c.apply(true, readyEndpoints(startingName, 1, 2, 3))
	c.apply(true, readyEndpoints(startingName, 1, 2, 3, 4))
	check("it fails and comes back", "[10 10 10 1]")
	c.wait(22 * time.Second)
	check("in the end", "[10 10 10 10]")
	if due, any := c.starts.nextStep(); any || len(c.starts.shown) > 0 {
		t.Errorf("all is done, and a step is due at %v, shown %v", due, c.starts.shown)
	}
}

// TestStarts: what begins knows from the snapshot how endpoints start, and says of a change what a Loop would.
func TestStarts(t *testing.T) {
	c := newStartingCluster()
	c.apply(false, startingService(20*time.Second))
	c.apply(false, readyEndpoints(startingName, 1, 2))
	c.apply(true, readyEndpoints(startingName, 1, 2, 3))
	c.wait(8 * time.Second)
	starts := NewStarts(c.snap, c.now)
	delta := readyEndpoints(startingName, 1, 2, 3, 4)
	changed := c.snap.Apply(delta).Services
	c.snap.Apply(starts.After(c.snap, c.state, changed, c.now))
	planned := c.tenths(5)
	c.apply(true, delta)
	if loop := c.tenths(5); planned != loop || loop != "[10 10 4 1 10]" {
		t.Errorf("planned %s, the loop has %s", planned, loop)
	}
	// Of a Service without slow start, nothing starts; one that is new has endpoints of which nobody knows since when.
	c.snap.Apply(startingService(0))
	d := NewStarts(c.snap, c.now).After(c.snap, c.state, []snapshot.Name{startingName}, c.now)
	if len(d.Starting) != 0 {
		t.Errorf("without slow start: %v", d.Starting)
	}
}

// TestSlowStartIsBounded: however long the time is and however many endpoints start together or one after the other, a
// Service takes at most ten steps for each time, and none is shorter than a second.
func TestSlowStartIsBounded(t *testing.T) {
	for _, window := range []time.Duration{time.Second, 3 * time.Second, 30 * time.Second, time.Hour} {
		c := newStartingCluster()
		c.apply(true, startingService(window))
		c.apply(true, readyEndpoints(startingName, 1))
		c.wait(2 * window)
		all := []int{1}
		for i := 2; i < 300; i++ {
			all = append(all, i)
		}
		c.apply(true, readyEndpoints(startingName, all...))
		most := int(window / stepOf(window))
		if steps := c.wait(2 * window); steps > most || c.tenths(2) != "[10 10]" {
			t.Errorf("%v: %d steps, want %d at most; %s", window, steps, most, c.tenths(2))
		}
		// Flapping: each endpoint goes and comes back in the middle of steps.
		steps := 0
		for i := range 20 {
			c.apply(true, readyEndpoints(startingName, all[:len(all)-1-i]...))
			c.apply(true, readyEndpoints(startingName, all...))
			steps += c.wait(window / 20)
		}
		if steps > most+1 {
			t.Errorf("%v: %d steps of flapping endpoints, want %d at most", window, steps, most+1)
		}
	}
}

// TestSlowStartEndsWithItsCause: the steps end with the annotation, the Service or its endpoints.
func TestSlowStartEndsWithItsCause(t *testing.T) {
	for name, end := range map[string]snapshot.Delta{
		"annotation": startingService(0),
		"service":    {Services: map[snapshot.Name]*snapshot.Service{startingName: nil}},
		"endpoints":  readyEndpoints(startingName, 1),
	} {
		c := newStartingCluster()
		c.apply(true, startingService(time.Minute))
		c.apply(true, readyEndpoints(startingName, 1))
		c.wait(time.Hour)
		c.apply(true, readyEndpoints(startingName, 1, 2))
		if c.tenths(2) != "[10 1]" {
			t.Errorf("%s: before, %s", name, c.tenths(2))
		}
		c.apply(true, end)
		if due, any := c.starts.nextStep(); any || len(c.starts.shown) > 0 || len(c.snap.Starting) > 0 {
			t.Errorf("%s: still due %v, shown %v, %v", name, due, c.starts.shown, c.snap.Starting)
		}
	}
}

// TestSlowStartOfServiceThatIsReplaced: a Service is deleted and comes back while an endpoint of it starts, and the
// endpoint leaves. Nobody is told any more that it starts.
func TestSlowStartOfServiceThatIsReplaced(t *testing.T) {
	c := newStartingCluster()
	c.apply(false, startingService(20*time.Second))
	c.apply(true, readyEndpoints(startingName, 1))
	if len(c.starts.shown) != 1 {
		t.Fatal("the endpoint does not start")
	}
	var d snapshot.Delta
	d.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{startingName: nil}})
	d.Merge(startingService(20 * time.Second))
	d.Merge(readyEndpoints(startingName))
	c.apply(true, d)
	if len(c.starts.shown) != 0 || len(c.starts.steps) != 0 || len(c.snap.Starting) != 0 {
		t.Errorf("still shown %v, with %d steps, and in the snapshot %v", c.starts.shown, len(c.starts.steps),
			c.snap.Starting)
	}
}

// TestEjectedEndpointStartsSlowly: an endpoint that comes back from ejection starts, one that leaves it as it is
// unready does not.
func TestEjectedEndpointStartsSlowly(t *testing.T) {
	for _, ready := range []bool{true, false} {
		c := newStartingCluster()
		c.apply(false, startingService(20*time.Second))
		c.apply(false, readyEndpoints(startingName, 1, 2))
		ejected := netip.AddrPortFrom(startingAddr(2), 80)
		c.apply(true, snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{
			startingName: {Unhealthy: []snapshot.Unhealthy{{Endpoint: ejected}}}}})
		c.state.Services = map[snapshot.Name]*dataplane.Service{startingName: {Ports: []*dataplane.ServicePort{{
			Cluster: &dataplane.Pool{Ejected: []snapshot.Unhealthy{{Endpoint: ejected}}}, Local: &dataplane.Pool{}}}}}
		if got := c.tenths(2); got != "[10 10]" {
			t.Errorf("ejected: %s", got)
		}
		want := "[10 1]"
		if !ready {
			c.apply(true, readyEndpoints(startingName, 1))
			want = "[10 10]"
		}
		c.apply(true, snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{startingName: nil}})
		if got := c.tenths(2); got != want {
			t.Errorf("back, ready %v: %s, want %s", ready, got, want)
		}
	}
}

// TestSlowStartReachesTheWriter: the loop itself takes the steps, nothing else wakes it, and each is one transaction.
func TestSlowStartReachesTheWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var written []string
		q, _ := start(t, &fakeBackend{judge: func(st *dataplane.State) error {
			var list []uint16
			for _, e := range st.Services[startingName].Ports[0].Cluster.Endpoints {
				list = append(list, e.Weight)
			}
			written = append(written, fmt.Sprint(list))
			return nil
		}})
		q.Put(startingService(10 * time.Second))
		q.Put(readyEndpoints(startingName, 1, 2))
		q.Synced()
		time.Sleep(time.Second)
		synctest.Wait() // the loop is at rest, and so is the list
		written = nil
		q.Put(readyEndpoints(startingName, 1, 2, 3))
		time.Sleep(time.Minute)
		synctest.Wait()
		want := "[11 11 1] [11 11 2] [11 11 3] [11 11 4] [11 11 6] [11 11 7] [11 11 8] [11 11 9] [11 11 10] [0 0 0]"
		if got := strings.Join(written, " "); got != want {
			t.Errorf("written: %s\nwant     %s", got, want)
		}
	})
}

// TestSlowStartsTakeTurns counts what a namespace with a thousand Services can do whose endpoints flap all the time:
// its steps wait in the fair queue with its other changes, a Service has one place there, and the change of another
// namespace goes first.
func TestSlowStartsTakeTurns(t *testing.T) {
	c := newStartingCluster()
	const services = 1000
	var queue fairQueue
	for i := range services {
		n := snapshot.Name{Namespace: "mean", Name: fmt.Sprint("s", i)}
		c.apply(true, serviceNamed(n, time.Second))
		c.apply(true, readyEndpoints(n, 1, 2))
	}
	steps := 0
	for range 60 {
		for i := range services { // all fail, and come back
			n := snapshot.Name{Namespace: "mean", Name: fmt.Sprint("s", i)}
			c.apply(true, readyEndpoints(n, 1))
			c.apply(true, readyEndpoints(n, 1, 2))
		}
		c.now = c.now.Add(time.Second)
		d := c.starts.takeSteps(c.now)
		steps += len(d.Starting)
		queue.put(d, c.now)
	}
	if steps < services || steps > 60*services {
		t.Errorf("%d steps in a minute, want one for each Service and second at most", steps)
	}
	if waiting := len(queue.waiting["mean"].order); waiting != services {
		t.Errorf("%d steps wait, want one for each Service", waiting)
	}
	weight := func(object, *snapshot.Delta) int { return maxNamespaceWeight / 4 }
	if d := queue.next(c.now, weight); len(d.Starting) != 4 {
		t.Errorf("%d steps are written at once, want as many as a namespace may", len(d.Starting))
	}
	queue.charge(c.now, 10*time.Second, nil)
	queue.put(readyEndpoints(snapshot.Name{Namespace: "other", Name: "web"}, 1), c.now)
	if d := queue.next(c.now, weight); len(d.Slices) != 1 || len(d.Starting) != 0 {
		t.Errorf("another namespace's turn: %d slices, %d steps", len(d.Slices), len(d.Starting))
	}
}
