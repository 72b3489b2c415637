package reconcile

import (
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestProgressOfTheKernel: while the kernel refuses, the versions of what is programmed stay, bookmarks or not; once it
// takes all, they are those of the sources. A Service in quarantine does not hold them.
func TestProgressOfTheKernel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{loop: &Loop{Log: slog.New(slog.DiscardHandler)}}
		q, _ := start(t, b)
		put := func(d snapshot.Delta, services, slices snapshot.Version) {
			d.Versions = snapshot.Versions{Services: services, Slices: slices}
			q.Put(d)
			synctest.Wait()
		}
		want := func(what string, services, slices snapshot.Version) {
			t.Helper()
			if got := q.Progress().Programmed; got != (snapshot.Versions{Services: services, Slices: slices}) {
				t.Errorf("%s: programmed are %+v", what, got)
			}
		}
		put(service("a"), "10", "11")
		want("before sync", "", "")
		q.Synced()
		synctest.Wait()
		want("the first", "10", "11")
		time.Sleep(time.Minute)
		b.set(func() { b.refuse = 3 })
		put(service("b"), "12", "")
		put(snapshot.Delta{}, "", "13")
		want("the kernel refuses", "10", "11")
		if p := q.Progress(); p.Received.Slices != "13" || p.Services != 1 || p.Since.IsZero() {
			t.Errorf("the progress is %+v", p)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		want("the kernel takes it", "12", "13")
	})
}

// TestProgressOfTurns: what waits for its namespace's turn holds the versions before it, whatever comes later.
func TestProgressOfTurns(t *testing.T) {
	now := time.Now()
	var turns fairQueue
	weight := func(object, *snapshot.Delta) int { return maxNamespaceWeight }
	put := func(namespace, name string, version snapshot.Version, at time.Time) {
		d := in(namespace, service(name))
		d.Versions.Services = version
		turns.put(d, at)
	}
	put("aaa", "a", "5", now)
	turns.next(now, weight)
	turns.charge(now, 2*time.Second, nil)
	put("aaa", "b", "6", now)
	put("aaa", "b", "7", now.Add(time.Second))
	put("shop", "web", "8", now.Add(time.Second))
	turns.next(now.Add(time.Second), weight)
	h := turns.held()
	if h.Services != 1 || h.Before.Services != "5" || !h.Since.Equal(now) {
		t.Errorf("held are %+v; want one Service since %v, after version 5", h, now)
	}
	due, _ := turns.nextDue()
	turns.next(due, weight)
	if h := turns.held(); h != (snapshot.Held{}) {
		t.Errorf("held are %+v; want nothing", h)
	}
}

// TestHeldByManyNamespaces: what several namespaces hold is as old as the oldest of it, whichever is looked at first.
func TestHeldByManyNamespaces(t *testing.T) {
	now := time.Now()
	var turns fairQueue
	for i := range 20 {
		d := in(fmt.Sprint("n", (i+7)%20), service("a"))
		d.Versions.Services = snapshot.Version(fmt.Sprint(11 + i))
		if i == 0 {
			turns.received.Services = "10"
		}
		turns.put(d, now.Add(time.Duration(i)*time.Second))
	}
	if h := turns.held(); h.Services != 20 || h.Before.Services != "10" || !h.Since.Equal(now) {
		t.Errorf("held are %+v; want 20 Services since %v, after version 10", h, now)
	}
}
