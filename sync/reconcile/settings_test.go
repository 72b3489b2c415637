package reconcile

import (
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestLeastRest: the first change goes out at once, later ones wait for so long after the last transaction, together.
// What needs no transaction does not count, and a shorter time counts at once for the rest after the next
// transaction.
func TestLeastRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var least atomic.Int64
		least.Store(int64(10 * time.Second))
		b := &fakeBackend{loop: &Loop{Log: slog.New(slog.DiscardHandler),
			LeastRest: func() time.Duration { return time.Duration(least.Load()) }}}
		q, _ := start(t, b)
		expect := func(when string, want int) {
			t.Helper()
			synctest.Wait()
			if c := b.calls(); len(c) != want {
				t.Fatalf("%s: %d transactions; want %d", when, len(c), want)
			}
		}
		q.Synced()
		expect("at the start", 1)
		q.Put(service("a"))
		time.Sleep(9 * time.Second)
		q.Put(service("b"))
		expect("during the rest", 1)
		time.Sleep(time.Second + time.Millisecond)
		expect("after the rest", 2)
		time.Sleep(time.Minute)
		q.Notify()
		expect("nothing new", 2)
		q.Put(service("c"))
		expect("after quiet", 3)
		least.Store(0)
		q.Put(service("d"))
		time.Sleep(10*time.Second + time.Millisecond)
		expect("after the last long rest", 4)
		q.Put(service("e"))
		time.Sleep(maxRest)
		expect("after a short rest", 5)
	})
}

// TestBackendAsksForRest: changes wait for as long as the backend wants to rest, but for the first after quiet. A
// configured time takes the place of the backend's, also a shorter one.
func TestBackendAsksForRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var least atomic.Int64
		b := &fakeBackend{receipt: dataplane.Receipt{Rest: 4 * time.Second}, loop: &Loop{
			Log: slog.New(slog.DiscardHandler), LeastRest: func() time.Duration { return time.Duration(least.Load()) }}}
		q := startWith(t, b)
		time.Sleep(time.Minute)
		for _, c := range []struct{ configured, want time.Duration }{
			{0, 4 * time.Second}, {time.Second, time.Second}, {time.Minute, time.Minute},
		} {
			least.Store(int64(c.configured))
			before, begin := len(b.calls()), time.Now()
			for _, name := range []string{"a", "b"} {
				q.Put(service(name))
				synctest.Wait()
				q.Put(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{{Namespace: "default", Name: name}: nil}})
			}
			time.Sleep(2 * time.Minute)
			calls := b.calls()[before:]
			if len(calls) != 2 || !calls[0].at.Equal(begin) || calls[1].at.Sub(begin) != c.want {
				t.Errorf("minSyncPeriod %v: written %d times, from %v on, %+v", c.configured, len(calls), begin, calls)
			}
		}
	})
}

// TestOtherConfig: other settings are written as soon as the loop is stirred, and only what they change.
func TestOtherConfig(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		q := startWith(t, b, service("a"))
		synctest.Wait()
		b.loop.Planner.SetConfig(dataplane.Config{MasqueradeAll: true})
		q.Notify()
		synctest.Wait()
		c := b.calls()
		if len(c) != 2 || !c[1].change.Globals || !b.loop.Planner.State().MasqueradeAll {
			t.Fatalf("%+v; want a second transaction that names the globals", c)
		}
		time.Sleep(time.Minute)
		b.loop.Planner.SetConfig(dataplane.Config{MasqueradeAll: true})
		q.Notify()
		synctest.Wait()
		if c := b.calls(); len(c) != 2 {
			t.Errorf("the same settings are written once more: %+v", c)
		}
	})
}
