package reconcile

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// book notes what a loop tells.
type book struct {
	mu    sync.Mutex
	lines []string
}

func (b *book) note(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lines = append(b.lines, fmt.Sprintf(format, args...))
}

// take gives what was noted since the last call.
func (b *book) take() string {
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	lines := strings.Join(b.lines, "; ")
	b.lines = nil
	return lines
}

// TestInSync: the loop tells when the kernel holds everything, whether that took a transaction or not, and what of the
// snapshot that concerns since the last time, failures included; and it acknowledges the queue.
func TestInSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var noted book
		begin := time.Now()
		b := &fakeBackend{loop: &Loop{Log: slog.New(slog.DiscardHandler)}}
		listen(b, Listener{Failed: func(f Failure) { noted.note("failed: %v", f.Err) }})
		listen(b, Listener{InSync: func(s InSync) {
			noted.note("%d Services, %v %v, triggers %d, node %q", len(s.Snapshot.Services), s.Change.Services, s.Change.Globals,
				len(s.Triggers), s.Snapshot.Node.Leaving)
		}})
		q, _ := start(t, b)
		slice := snapshot.Name{Namespace: "default", Name: "a-1"}
		changed := func() snapshot.Delta {
			return snapshot.Delta{
				Slices: map[snapshot.Name]*snapshot.Slice{slice: {Name: slice, Service: "a", Triggered: time.Now()}},
			}
		}
		expect := func(what, want string) {
			t.Helper()
			if got := noted.take(); got != want {
				t.Errorf("%s: %q; want %q", what, got, want)
			}
			time.Sleep(10 * time.Millisecond) // less than it takes to the next try
		}
		q.Put(service("a"))
		expect("before sync", "")
		q.Synced()
		expect("the first", `1 Services, [default/a] false, triggers 0, node ""`)
		time.Sleep(time.Until(begin.Add(time.Minute)))

		b.set(func() { b.refuse = 1 })
		q.Put(service("b"))
		expect("a failure", "failed: no room")
		if q.Waiting().Since != begin.Add(time.Minute) {
			t.Errorf("waiting since %v", q.Waiting().Since)
		}
		q.Put(changed())
		expect("a second change", `2 Services, [default/a default/b] false, triggers 1, node ""`)
		if w := q.Waiting(); w != (snapshot.Waiting{}) {
			t.Errorf("waiting are %+v", w)
		}

		writes := len(b.calls())
		q.Put(snapshot.Delta{Node: &snapshot.Node{Leaving: "tired"}})
		expect("what concerns no packet", `2 Services, [] false, triggers 0, node "tired"`)
		q.Put(changed())
		expect("a slice without endpoints", `2 Services, [default/a] false, triggers 1, node "tired"`)
		if len(b.calls()) != writes {
			t.Error("that was written")
		}
	})
}
