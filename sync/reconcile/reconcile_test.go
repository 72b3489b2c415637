package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fakeBackend stands in for a kernel that can refuse: it notes what it is told, and holds it to what a State and a
// Change promise.
type fakeBackend struct {
	t    *testing.T
	loop *Loop

	mu sync.Mutex
	// refuse is how many of the next transactions fail.
	refuse int
	// judge, if not nil, says what else the kernel has against a state.
	judge func(*dataplane.State) error
	// takes is how long a transaction takes; set before the loop runs.
	takes   time.Duration
	receipt dataplane.Receipt
	applied []call
	removed int
	// kernel is what was acknowledged.
	kernel dataplane.State

	// look, if not nil, is what Check does, checkTakes how long it takes; checked is when.
	look       func() ([]string, time.Duration, error)
	checkTakes time.Duration
	checked    []time.Time
}

type call struct {
	at       time.Time
	services int
	state    map[snapshot.Name]*dataplane.Service
	change   dataplane.Change
	failed   bool
}

func (b *fakeBackend) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	c := call{at: time.Now(), services: len(want.Services), state: maps.Clone(want.Services), change: change}
	time.Sleep(b.takes)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.checkState(want)
	b.checkChange(want, change)
	var err error
	if b.refuse > 0 {
		b.refuse--
		err = errors.New("no room")
	} else if b.judge != nil {
		err = b.judge(want)
	}
	c.failed = err != nil
	b.applied = append(b.applied, c)
	if err != nil {
		return dataplane.Receipt{}, err
	}
	b.kernel = *want
	b.kernel.Services = c.state
	return b.receipt, nil
}

// checkState holds a state against the planner's: only what is quarantined may differ, and no two Services share a key.
func (b *fakeBackend) checkState(want *dataplane.State) {
	quarantined, full := b.loop.want.quarantined, b.loop.Planner.State()
	if len(quarantined) == 0 && want != full {
		b.t.Error("nothing is quarantined, and the state is a copy")
	}
	owner := map[dataplane.Key]snapshot.Name{}
	for n, svc := range want.Services {
		for k := range keysOf(svc) {
			if other, taken := owner[k]; taken {
				b.t.Errorf("%v belongs to %v and %v", k, n, other)
			}
			owner[k] = n
		}
		if full.Services[n] == nil {
			b.t.Errorf("%v is gone, and in the state", n)
		}
	}
	for n, svc := range full.Services {
		a, got := quarantined[n], want.Services[n]
		if a == nil || a.trial {
			if got != svc {
				b.t.Errorf("%v is not quarantined, and another in the state", n)
			}
			continue
		}
		if got == svc {
			b.t.Errorf("%v is quarantined, and in the state", n)
		}
		if got == nil {
			continue
		}
		now := keysOf(svc)
		for k := range keysOf(got) {
			if !now[k] {
				b.t.Errorf("%v is quarantined, and has %v", n, k)
			}
		}
		for _, ip := range got.ClusterIPs {
			if !slices.Contains(svc.ClusterIPs, ip) {
				b.t.Errorf("%v is quarantined, and has the cluster IP %v", n, ip)
			}
		}
	}
	globals := *want
	if globals.Services = full.Services; !reflect.DeepEqual(&globals, full) {
		b.t.Errorf("globals are %+v; want %+v", globals, full)
	}
}

// checkChange: what is not named is what was acknowledged.
func (b *fakeBackend) checkChange(want *dataplane.State, change dataplane.Change) {
	names := change.Services
	if !slices.IsSortedFunc(names, snapshot.Name.Compare) || len(slices.Compact(slices.Clone(names))) != len(names) {
		b.t.Errorf("not sorted and unique: %v", change.Services)
	}
	for _, services := range []map[snapshot.Name]*dataplane.Service{want.Services, b.kernel.Services} {
		for n := range services {
			if want.Services[n] != b.kernel.Services[n] && !slices.Contains(change.Services, n) {
				b.t.Errorf("%v is not what was acknowledged, and not named in %v", n, change.Services)
			}
		}
	}
	mixed := b.kernel
	if mixed.Services = want.Services; !change.Globals && !reflect.DeepEqual(&mixed, want) {
		b.t.Error("globals are not what was acknowledged, and not named")
	}
}

func keysOf(svc *dataplane.Service) map[dataplane.Key]bool {
	keys := map[dataplane.Key]bool{}
	for _, sp := range svc.Ports {
		for i := range sp.Frontends {
			keys[sp.Frontends[i].Key] = true
		}
	}
	return keys
}

func (b *fakeBackend) Check() ([]string, time.Duration, error) {
	at := time.Now()
	time.Sleep(b.checkTakes)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.checked = append(b.checked, at)
	if b.loop.dirty {
		b.t.Error("a Check while the kernel does not hold the state")
	}
	if b.look == nil {
		return nil, 0, nil
	}
	return b.look()
}

func (b *fakeBackend) Remove() error { b.removed++; return nil }

func (b *fakeBackend) calls() []call {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]call{}, b.applied...)
}

// set changes what the kernel does.
func (b *fakeBackend) set(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
}

func service(name string) snapshot.Delta {
	n := snapshot.Name{Namespace: "default", Name: name}
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: {
		Name: n, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, name[0]})},
		Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}},
	}}}
}

// listen adds a listener. The loop must not run yet.
func listen(b *fakeBackend, h Listener) { b.loop.Listeners = append(b.loop.Listeners, h) }

// start runs a loop over a queue with one source until the test ends.
func start(t *testing.T, b *fakeBackend) (*snapshot.Queue, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	q := snapshot.NewQueue(1)
	if b.loop == nil {
		b.loop = &Loop{Log: slog.New(slog.DiscardHandler)}
	}
	l := b.loop
	b.t, l.Queue, l.Planner, l.Writer = t, q, dataplane.NewPlanner(
		dataplane.Config{IPVS: dataplane.IPVS{Mode: dataplane.IPVSAuto}},
	), b
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the loop ended with %v", err)
		}
	})
	return q, cancel
}

// startWith is start for a queue that was told everything.
func startWith(t *testing.T, b *fakeBackend, told ...snapshot.Delta) *snapshot.Queue {
	t.Helper()
	q, _ := start(t, b)
	for _, d := range told {
		q.Put(d)
	}
	q.Synced()
	return q
}

func TestNothingBeforeSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		q, _ := start(t, b)
		q.Put(service("a"))
		time.Sleep(time.Hour)
		if c := b.calls(); len(c) > 0 {
			t.Fatalf("written before the lists were complete: %+v", c)
		}
		q.Put(service("b"))
		q.Synced()
		synctest.Wait()
		if c := b.calls(); len(c) != 1 || c[0].services != 2 {
			t.Fatalf("after sync: %+v; want one transaction with both Services", c)
		}
	})
}

// TestFirstWriteEvenIfEmpty says that a cluster without Services is written, too: what an earlier proxy left must go.
func TestFirstWriteEvenIfEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		startWith(t, b)
		synctest.Wait()
		if c := b.calls(); len(c) != 1 {
			t.Fatalf("%+v; want one transaction", c)
		}
	})
}

func TestOnlyWhatChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		q, cancel := start(t, b)
		q.Put(service("a"))
		q.Synced()
		synctest.Wait()
		q.Put(service("a")) // the same again
		synctest.Wait()
		q.Put(service("b"))
		synctest.Wait()
		c := b.calls()
		if len(c) != 2 || len(c[1].change.Services) != 1 || c[1].change.Services[0].Name != "b" || c[1].change.Globals {
			t.Fatalf("%+v; want a first transaction and one for b alone", c)
		}
		cancel()
		synctest.Wait()
		if len(b.calls()) != 2 || b.removed != 0 {
			t.Fatal("the end of the loop wrote something")
		}
	})
}

// TestCountedIsTold: what is counted is told when it changes, and at the start if it is less than everything.
func TestCountedIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		b := &fakeBackend{}
		b.loop = &Loop{Log: slog.New(slog.NewTextHandler(&log, nil))}
		q, cancel := start(t, b)
		for i, counted := range []string{
			dataplane.CountedEndpoints, dataplane.CountedFrontends, dataplane.CountedFrontends, "",
			dataplane.CountedEndpoints} {
			b.set(func() { b.receipt.Counted = counted })
			q.Put(service(string(rune('a' + i))))
			if i == 0 {
				q.Synced()
			}
			synctest.Wait()
			time.Sleep(time.Minute)
		}
		cancel()
		synctest.Wait()
		var told []string
		for line := range strings.Lines(log.String()) {
			if _, levels, ok := strings.Cut(line, " counted="); ok {
				told = append(told, strings.TrimSpace(levels))
			}
		}
		if want := []string{"frontends before=endpoints", "endpoints before=frontends"}; !slices.Equal(told, want) {
			t.Errorf("told %q; want %q; the log:\n%s", told, want, log.String())
		}
	})
}

// TestCrowdedIsToldOnce: that a Service has too many endpoints is told when it becomes so, and not with each change.
func TestCrowdedIsToldOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		b := &fakeBackend{}
		b.loop = &Loop{Log: slog.New(slog.NewTextHandler(&log, nil))}
		q, cancel := start(t, b)
		q.Synced()
		crowd := func(addr string, ports int) {
			d := endpoint("a", addr)
			for _, sl := range d.Slices {
				for i := range ports {
					sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: "x", Protocol: snapshot.TCP, Port: uint16(i + 1)})
				}
			}
			q.Put(d)
			time.Sleep(time.Minute)
		}
		const many = 1<<17 - 1 // ports of slices are too many, with those that every slice here has
		var told []int
		q.Put(service("a"))
		for _, ports := range []int{many, many, 0, many} {
			crowd("10.1.0.1", ports)
			synctest.Wait()
			told = append(told, strings.Count(log.String(), "too many endpoints"))
		}
		d := service("b") // and of one that is new
		of := endpoint("b", "10.1.0.2")
		for _, sl := range of.Slices {
			sl.Ports = append(sl.Ports, make([]snapshot.SlicePort, many)...)
		}
		d.Merge(of)
		q.Put(d)
		time.Sleep(time.Minute)
		cancel()
		synctest.Wait()
		told = append(told, strings.Count(log.String(), "too many endpoints"))
		if want := []int{1, 1, 1, 2, 3}; !slices.Equal(told, want) {
			t.Errorf("told %v times; want %v", told, want)
		}
	})
}

// TestRefusal says that a refused transaction is tried again by itself, less and less often, and at once when there
// is news; and that the loop goes on as if nothing had been once the kernel takes it.
func TestRefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{refuse: 12}
		q, _ := start(t, b)
		q.Put(service("a"))
		synctest.Wait() // else it may be woken twice
		q.Synced()
		time.Sleep(10 * time.Minute)
		c := b.calls()
		if len(c) != 13 || c[12].failed {
			t.Fatalf("%d transactions; want 12 that fail and one that does not", len(c))
		}
		want := retryFirst
		for i := 1; i < len(c); i++ {
			if got := c[i].at.Sub(c[i-1].at); got != want {
				t.Errorf("try %d came after %v; want %v", i, got, want)
			}
			want = min(2*want, maxRetry)
		}
		b.set(func() { b.refuse = 8 })
		q.Put(service("b"))
		time.Sleep(5 * time.Second) // the next try would be a while off
		before := len(b.calls())
		q.Put(service("c"))
		synctest.Wait()
		if got := len(b.calls()); got != before+1 {
			t.Errorf("news did not lead to a try at once")
		}
		time.Sleep(10 * time.Minute)
		c = b.calls()
		if last := c[len(c)-1]; last.failed || last.services != 3 {
			t.Errorf("in the end: %+v; want all three Services", last)
		}
		count := len(c)
		time.Sleep(time.Hour)
		if len(b.calls()) != count {
			t.Error("the loop went on writing after it had succeeded")
		}
	})
}

// TestBurst says that the first change after quiet goes out at once, and that those of a burst share transactions,
// the more the longer one takes.
func TestBurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{takes: 10 * time.Millisecond}
		q := startWith(t, b)
		time.Sleep(time.Second)
		begin := time.Now()
		for i := range 1000 {
			q.Put(service(string(rune('0' + i%10))))
			q.Put(
				snapshot.Delta{ServiceCIDRs: &[]netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), 0, 0}), 16)}},
			)
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Second)
		c := b.calls()[1:]
		if d := c[0].at.Sub(begin); d != 0 {
			t.Errorf("the first change waited for %v", d)
		}
		for i := 1; i < len(c); i++ {
			if d := c[i].at.Sub(c[i-1].at); d < 50*time.Millisecond || d > 51*time.Millisecond {
				t.Errorf("transaction %d came %v after the one before; want 10 ms of work and 40 ms of rest", i, d)
			}
		}
		if n := len(c); n < 20 || n > 22 {
			t.Errorf("%d transactions in a second", n)
		}
	})
}
