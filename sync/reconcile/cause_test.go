package reconcile

import (
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestCauses: a commit and a failure say which objects changed, since when they waited, and what else there was to do.
func TestCauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []string
		note := func(what string, c *Cause) {
			text := what
			for n := range c.Delta.Services {
				text += " " + n.Name
			}
			if c.Retry {
				text += " again"
			}
			if c.Foreign > 0 {
				text += fmt.Sprintf(" repairs %d", c.Foreign)
			}
			if !c.Since.IsZero() {
				text += fmt.Sprintf(" after %v", c.Began.Sub(c.Since).Round(time.Millisecond))
			}
			got = append(got, text)
		}
		b := &fakeBackend{takes: 5 * time.Millisecond, loop: &Loop{Log: slog.New(slog.DiscardHandler),
			Listeners: []Listener{{
				Committed: func(c Commit) { note("wrote", c.Cause) },
				Failed:    func(f Failure) { note("failed", f.Cause) },
			}}}}
		q, _ := start(t, b)
		put := func(name string) { q.Put(service(name)) }
		put("a")
		time.Sleep(time.Second)
		q.Synced()
		time.Sleep(time.Second)
		put("b")
		time.Sleep(time.Millisecond)
		put("c") // while b is written
		time.Sleep(time.Second)
		b.mu.Lock()
		b.refuse = 1
		b.mu.Unlock()
		put("d")
		time.Sleep(time.Second)
		b.mu.Lock()
		b.look = func() ([]string, time.Duration, error) { return []string{"a set is gone", "a chain"}, time.Hour, nil }
		b.mu.Unlock()
		time.Sleep(time.Second)
		synctest.Wait()
		want := []string{"wrote a after 0s", "wrote b after 0s", "wrote c after 24ms", "failed d after 0s",
			"wrote again after 105ms", "wrote repairs 2"} // 5 ms to fail, and the pause
		if len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
			t.Errorf("got %q; want %q", got, want)
		}
	})
}
