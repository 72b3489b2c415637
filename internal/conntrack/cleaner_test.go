package conntrack

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/reconcile/reconciletest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fakeTable is a flow table whose operations take a while.
type fakeTable struct {
	mu    sync.Mutex
	flows []flow
	// takes is how long a list takes; listed when each one began.
	takes  time.Duration
	listed []time.Time
	// fails lets that many lists fail. during is called once, before a list is taken.
	fails  int
	during func()
}

var errTable = errors.New("the table is upset")

func (t *fakeTable) filters() bool { return true }

func (t *fakeTable) narrow() bool { return true }

func (t *fakeTable) list(q query, do func([]flow) error) error {
	t.mu.Lock()
	t.listed = append(t.listed, time.Now())
	t.mu.Unlock()
	time.Sleep(t.takes)
	if t.fails > 0 {
		t.fails--
		return errTable
	}
	t.mu.Lock()
	during := t.during
	t.during = nil
	t.mu.Unlock()
	if during != nil {
		during()
	}
	return do(t.left())
}

func (t *fakeTable) remove(flows []flow) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(t.flows)
	t.flows = slices.DeleteFunc(t.flows, func(f flow) bool {
		return slices.ContainsFunc(flows, func(o flow) bool { return o.frontend == f.frontend && o.endpoint == f.endpoint })
	})
	return n - len(t.flows), nil
}

func (t *fakeTable) left() []flow {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.flows)
}

// looks is how many times the table was listed.
func (t *fakeTable) looks() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.listed)
}

func (t *fakeTable) add(frontend, endpoint string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.flows = append(t.flows, flow{frontend: key(frontend), endpoint: netip.MustParseAddrPort(endpoint)})
}

// since gives when lists began, in seconds after a moment, and forgets them.
func (t *fakeTable) since(start time.Time) (out []float64) {
	for _, at := range t.listed {
		out = append(out, at.Sub(start).Round(time.Millisecond).Seconds())
	}
	t.listed = nil
	return out
}

// backendFunc is a backend that consists of its Apply.
type backendFunc func(*dataplane.State) (dataplane.Receipt, error)

func (f backendFunc) Apply(st *dataplane.State, _ dataplane.Change) (dataplane.Receipt, error) {
	return f(st)
}
func (f backendFunc) Check() ([]string, time.Duration, error) { return nil, 0, nil }
func (f backendFunc) Remove() error                           { return nil }

func fine(*dataplane.State) (dataplane.Receipt, error) { return dataplane.Receipt{}, nil }

// loops are those that Cleaners listen to.
var loops sync.Map

// behind wraps a writer so that it reports to the Cleaner as the loop does. Each Cleaner has one loop.
func behind(c *Cleaner, w reconcile.Writer) reconcile.Writer {
	loop, _ := loops.LoadOrStore(c, &reconciletest.Loop{Listeners: []reconcile.Listener{c.Listener()}})
	loop.(*reconciletest.Loop).Writer = w
	return loop.(*reconciletest.Loop)
}

// rest lets time pass, and then the Cleaner come to rest too.
func rest(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

const dnsKey = "10.96.0.1:53/udp"

var dnsChange = dataplane.Change{Services: []snapshot.Name{name("dns")}}

// running gives a Cleaner at work in a bubble of synctest, over the first look at everything.
func running(t *testing.T, table *fakeTable, st *dataplane.State) (*Cleaner, *[]SweepResult) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var told []SweepResult
	c := newCleaner(table, func(l SweepResult) { told = append(told, l) })
	go c.Run(ctx)
	t.Cleanup(func() { cancel(); synctest.Wait() })
	if st != nil {
		_, err := behind(c, backendFunc(fine)).Apply(st, dataplane.Change{})
		labtest.Check(t, err)
		rest(time.Minute)
		table.listed, told = nil, nil
	}
	return c, &told
}

func TestLooksTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{takes: 5 * time.Millisecond}
		c, told := running(t, table, state(service("dns", dnsKey+">10.0.0.1:53,10.0.0.2:53")))
		table.add(dnsKey, "10.0.0.1:53")
		table.add(dnsKey, "10.0.0.2:53")
		start := time.Now()
		_, err := behind(c, backendFunc(fine)).Apply(state(service("dns", dnsKey+">10.0.0.2:53")), dnsChange)
		labtest.Check(t, err)
		rest(secondSweepAfter / 2)
		if len(table.flows) != 1 {
			t.Errorf("left: %v", table.flows)
		}
		table.add(dnsKey, "10.0.0.1:53") // a packet that was on its way
		rest(time.Minute)
		if len(table.flows) != 1 || table.flows[0].endpoint.String() != "10.0.0.2:53" {
			t.Errorf("left: %v", table.flows)
		}
		if got := table.since(start); !slices.Equal(got, []float64{0, 1.005}) {
			t.Errorf("looked at %v", got)
		}
		want := SweepResult{
			Frontends: 1,
			Lists:     1,
			Flows:     ipfamily.Per[Flows]{{Judged: 2, Removed: 1}},
			Took:      table.takes,
			Worked:    table.takes,
		}
		if !slices.Equal(*told, []SweepResult{want, want}) {
			t.Errorf("told %+v", *told)
		}
	})
}

// TestSweepsEverything: when a proxy starts, and when it has written everything anew, the flows of all frontends are
// checked twice, although no frontend has changed.
func TestSweepsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{}
		c, _ := running(t, table, nil)
		st := state(service("dns", dnsKey+">10.0.0.2:53"))
		for _, receipt := range []dataplane.Receipt{{}, {Full: true}} {
			table.add(dnsKey, "10.0.0.1:53")
			start := time.Now()
			_, err := behind(c, backendFunc(func(*dataplane.State) (dataplane.Receipt, error) {
				return receipt, nil
			})).Apply(st, dataplane.Change{})
			labtest.Check(t, err)
			rest(time.Minute)
			if got := table.since(start); len(table.flows) > 0 || !slices.Equal(got, []float64{0, 1}) {
				t.Errorf("full %v: looked at %v, %d stale flows are left", receipt.Full, got, len(table.flows))
			}
		}
	})
}

// TestNothingToDo: a change that makes no flow stale causes no sweep.
func TestNothingToDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{}
		c, _ := running(t, table, state(service("dns", dnsKey+">10.0.0.1:53")))
		_, err := behind(c, backendFunc(fine)).Apply(state(service("dns", dnsKey+">10.0.0.1:53,10.0.0.2:53")), dnsChange)
		labtest.Check(t, err)
		rest(time.Minute)
		if len(table.listed) != 0 {
			t.Errorf("listed %d times", len(table.listed))
		}
	})
}

// TestStorm changes a Service a hundred times a second, with a table that takes 50 ms to list.
func TestStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{takes: 50 * time.Millisecond}
		c, told := running(t, table, state(service("dns", dnsKey+">10.0.0.1:53")))
		b := behind(c, backendFunc(fine))
		for i := range 1000 {
			_, err := b.Apply(state(service("dns", dnsKey+">10.0.0."+[]string{"1", "2"}[i%2]+":53")), dnsChange)
			labtest.Check(t, err)
			rest(10 * time.Millisecond)
		}
		worked := time.Duration(0)
		for _, l := range *told {
			worked += l.Worked
		}
		if worked > 10*time.Second/4 || len(*told) < 20 {
			t.Errorf("worked %v of 10 s, in %d looks", worked, len(*told))
		}
	})
}

// TestEndpointArrivesMeanwhile: while flows are listed, a transaction adds an endpoint, and a client reaches it.
func TestEndpointArrivesMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{takes: 5 * time.Millisecond}
		c, _ := running(t, table, state(service("dns", dnsKey+">10.0.0.1:53,10.0.0.2:53")))
		table.during = func() {
			_, err := behind(c, backendFunc(func(*dataplane.State) (dataplane.Receipt, error) {
				table.add(dnsKey, "10.0.0.3:53") // translated by the new rules, before the kernel's word is here
				return dataplane.Receipt{}, nil
			})).Apply(state(service("dns", dnsKey+">10.0.0.2:53,10.0.0.3:53")), dnsChange)
			labtest.Check(t, err)
		}
		_, err := behind(c, backendFunc(fine)).Apply(state(service("dns", dnsKey+">10.0.0.2:53")), dnsChange)
		labtest.Check(t, err)
		rest(time.Minute)
		if len(table.flows) == 0 {
			t.Error("a flow to the new endpoint was removed")
		}
	})
}

// TestFailures: after a failed transaction nothing is deleted until one succeeds; then all frontends are checked. A
// table that cannot be listed is retried after growing pauses.
func TestFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{}
		c, told := running(
			t,
			table,
			state(service("dns", dnsKey+">10.0.0.1:53"), service("old", "10.96.0.2:53/udp>10.0.0.9:53")),
		)
		table.add(dnsKey, "10.0.0.2:53")
		table.add("10.96.0.2:53/udp", "10.0.0.9:53")
		failing := behind(
			c,
			backendFunc(func(*dataplane.State) (dataplane.Receipt, error) { return dataplane.Receipt{}, errTable }),
		)
		oldGone := dataplane.Change{Services: []snapshot.Name{name("old")}}
		if _, err := failing.Apply(state(service("dns", dnsKey+">10.0.0.2:53")), oldGone); err != errTable {
			t.Fatal(err)
		}
		rest(time.Minute)
		if len(table.flows) != 2 || len(*told) != 0 {
			t.Fatalf("left %v, told %v", table.flows, *told)
		}
		table.fails = 3
		start := time.Now()
		_, err := behind(
			c,
			backendFunc(fine),
		).Apply(state(service("dns", dnsKey+">10.0.0.1:53,10.0.0.2:53")), dataplane.Change{})
		labtest.Check(t, err)
		rest(time.Minute)
		if len(table.flows) != 1 || table.flows[0].frontend != key(dnsKey) {
			t.Errorf("left %v", table.flows)
		}
		if got := table.since(start); !slices.Equal(got, []float64{0, 1, 3, 7, 7, 8, 8}) { // two frontends
			t.Errorf("looked at %v", got)
		}
		if l := (*told)[0]; !errors.Is(l.Err, errTable) || (*told)[4].Err != nil {
			t.Errorf("told %+v", *told)
		}
	})
}

// TestFailureMeanwhile: a transaction fails while flows are listed.
func TestFailureMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{}
		c, told := running(t, table, state(service("dns", dnsKey+">10.0.0.1:53,10.0.0.2:53")))
		table.add(dnsKey, "10.0.0.1:53")
		table.during = func() {
			behind(c, backendFunc(func(*dataplane.State) (dataplane.Receipt, error) { return dataplane.Receipt{}, errTable })).
				Apply(state(), dnsChange)
		}
		st := state(service("dns", dnsKey+">10.0.0.2:53"))
		_, err := behind(c, backendFunc(fine)).Apply(st, dnsChange)
		labtest.Check(t, err)
		rest(time.Minute)
		if len(table.flows) != 1 || len(*told) != 1 || !errors.Is((*told)[0].Err, errNotInSync) {
			t.Fatalf("left %v, told %v", table.flows, *told)
		}
		_, err = behind(c, backendFunc(fine)).Apply(st, dataplane.Change{})
		labtest.Check(t, err)
		rest(time.Minute)
		if len(table.flows) != 0 {
			t.Errorf("left %v", table.flows)
		}
	})
}
