package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
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
	// ends are those that were reset.
	ends []connEnd
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

func (t *fakeTable) reset(ends []connEnd) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ends = append(t.ends, ends...)
	return nil
}

func (t *fakeTable) again(of *flow) (f flow, ok bool, err error) {
	for _, f := range t.left() {
		if f.client == of.client && f.frontend == of.frontend {
			return f, true, nil
		}
	}
	return f, false, nil
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

// behind wraps a writer so that it reports to the Cleaner, and to the Releaser that it asks, as the loop does. Each
// Cleaner has one loop.
func behind(c *Cleaner, w reconcile.Writer) reconcile.Writer {
	if c.tcp == nil {
		c.SetTCP(newReleaser(nil, ReleaserOptions{}))
	}
	loop, _ := loops.LoadOrStore(c,
		&reconciletest.Loop{Listeners: []reconcile.Listener{c.Listener(), c.tcp.Listener()}})
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
	go c.walker.Run(ctx)
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
			Flows:     ipfamily.Per[Flows]{{Judged: 2, Removed: 1}},
			Walked:    Walked{Lists: 1, Took: table.takes, Worked: table.takes},
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

// TestRepairs: after a transaction that repaired something, the flows of all frontends are checked, those of TCP, too;
// if it was written in parts, soon after the first and when it is complete. As kube-proxy, no flow of TCP is listed.
func TestRepairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const webKey = "10.96.0.1:80/tcp"
		left := []snapshot.Name{name("web")}
		st := state(service("web", webKey+">10.0.0.1:80"), service("web2", "10.96.0.2:80/tcp>10.0.0.1:80"))
		for _, test := range []struct {
			what      string
			receipts  []dataplane.Receipt
			kubeProxy bool
			looks     []float64
		}{
			{"nothing", []dataplane.Receipt{{}}, false, nil},
			{"repaired", []dataplane.Receipt{{Repaired: true}}, false, []float64{0, 0, 1, 1}}, // two addresses
			{"written anew", []dataplane.Receipt{{Full: true}}, false, []float64{0, 0, 1, 1}},
			{"in parts", []dataplane.Receipt{{Full: true, Left: left}, {Left: left}, {Left: left}, {}}, false,
				[]float64{1, 1, 1.8, 1.8, 2.8, 2.8}},
			{"as kube-proxy", []dataplane.Receipt{{Full: true}}, true, nil},
		} {
			table := &fakeTable{}
			c, _ := running(t, table, st)
			c.SetAsKubeProxy(test.kubeProxy)
			table.add(webKey, "10.96.0.1:80")
			start := time.Now()
			for i, r := range test.receipts {
				if i > 0 {
					rest(600 * time.Millisecond)
				}
				_, err := behind(c, backendFunc(func(*dataplane.State) (dataplane.Receipt, error) { return r, nil })).
					Apply(st, dataplane.Change{})
				labtest.Check(t, err)
			}
			rest(time.Minute)
			if got := table.since(start); !slices.Equal(got, test.looks) || (len(table.flows) == 0) != (test.looks != nil) {
				t.Errorf("%s: looked at %v, want %v; %d flows are left", test.what, got, test.looks, len(table.flows))
			}
		}
	})
}

// TestCostOfTCP: a first state with 100,000 TCP frontends takes two checks of one list each, and leaves nothing behind
// in the Cleaner.
func TestCostOfTCP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var services []*dataplane.Service
		for i := range 100_000 {
			port := fmt.Sprintf("10.%d.%d.%d:80/tcp>10.0.0.1:80", 96+i>>16, i>>8&255, i&255)
			services = append(services, service(fmt.Sprint(i), port))
		}
		table := &fakeTable{}
		c, told := running(t, table, nil)
		_, err := behind(c, backendFunc(fine)).Apply(state(services...), dataplane.Change{})
		labtest.Check(t, err)
		rest(time.Minute)
		if len(*told) != 2 || (*told)[0].Frontends != len(services) || (*told)[0].Lists != 1 || table.looks() != 2 {
			t.Errorf("told %+v, %d lists", *told, table.looks())
		}
		if len(c.programmed)+len(c.pending) > 0 {
			t.Errorf("%d frontends are held, %d pending", len(c.programmed), len(c.pending))
		}
		s := &sweep{Cleaner: c, all: 1}
		if keys, _ := s.frontends(); len(keys) > maxSingle+1 {
			t.Errorf("%d keys for one query", len(keys))
		}
	})
}
