package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fakeBackend stands in for a kernel that can refuse: it notes what it is told.
type fakeBackend struct {
	mu sync.Mutex
	// refuse is how many of the next transactions fail.
	refuse int
	// takes is how long a transaction takes.
	takes   time.Duration
	applied []call
	removed int
}

type call struct {
	at       time.Time
	services int
	change   dataplane.Change
	failed   bool
}

func (b *fakeBackend) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := call{at: time.Now(), services: len(want.Services), change: change, failed: b.refuse > 0}
	b.applied = append(b.applied, c)
	time.Sleep(b.takes)
	if c.failed {
		b.refuse--
		return dataplane.Receipt{}, errors.New("no room")
	}
	return dataplane.Receipt{Added: 1}, nil
}

func (b *fakeBackend) Remove() error { b.removed++; return nil }

func (b *fakeBackend) calls() []call {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]call{}, b.applied...)
}

func service(name string) snapshot.Delta {
	n := snapshot.Name{Namespace: "default", Name: name}
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: {
		Name: n, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, name[0]})},
		Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}},
	}}}
}

// start runs a loop over a queue with one source until the test ends.
func start(t *testing.T, b *fakeBackend) (*snapshot.Queue, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	q := snapshot.NewQueue(1)
	l := Loop{Queue: q, Planner: dataplane.NewPlanner(dataplane.Config{}), Backend: b, Log: slog.New(slog.DiscardHandler)}
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
		q, _ := start(t, b)
		q.Synced()
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

// TestRefusal says that a refused transaction is tried again by itself, less and less often, and at once when there is news;
// and that the loop goes on as if nothing had been once the kernel takes it.
func TestRefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{refuse: 12}
		q, _ := start(t, b)
		q.Put(service("a"))
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
			want = min(2*want, retryMost)
		}
		b.mu.Lock()
		b.refuse = 8
		b.mu.Unlock()
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

// TestBurst says that the first change after quiet goes out at once, and that those of a burst share transactions, the more
// the longer one takes.
func TestBurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{takes: 10 * time.Millisecond}
		q, _ := start(t, b)
		q.Synced()
		time.Sleep(time.Second)
		begin := time.Now()
		for i := range 1000 {
			q.Put(service(string(rune('0' + i%10))))
			q.Put(snapshot.Delta{ServiceCIDRs: &[]netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), 0, 0}), 16)}})
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
