package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// checks gives when Check was called, in seconds after a time, and forgets that.
func (b *fakeBackend) checks(since time.Time) string {
	synctest.Wait()
	var out []string
	b.set(func() {
		for _, at := range b.checked {
			out = append(out, fmt.Sprint(at.Sub(since).Seconds()))
		}
		b.checked = nil
	})
	return strings.Join(out, " ")
}

// TestCheckOnlyWhatIsHeld says that a Check is only made while the kernel holds what was asked for.
func TestCheckOnlyWhatIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{refuse: 3}
		q, _ := start(t, b)
		begin := time.Now()
		expect := func(want string) {
			t.Helper()
			if got := b.checks(begin); got != want {
				t.Errorf("checked at %q; want %q", got, want)
			}
		}
		q.Put(service("a"))
		time.Sleep(3 * time.Second)
		expect("")
		q.Synced() // at 3 s; it is taken at 3.7 s
		time.Sleep(2 * time.Second)
		expect("4.2 4.7")
		b.set(func() { b.refuse = 5 })
		q.Put(service("b")) // at 5 s; it is taken at 8.1 s
		time.Sleep(4 * time.Second)
		expect("8.6")
	})
}

// TestForeignChange says that what a Check finds is repaired at once, by a transaction even if nothing else has changed.
func TestForeignChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		log := noted(b)
		var told []Transaction
		b.loop.Written = func(tr Transaction) { told = append(told, tr) }
		q, _ := start(t, b)
		q.Put(service("a"))
		q.Synced()
		begin := time.Now()
		expectCalls(t, b, begin, "0:1")
		var found []string
		for i := range 20 {
			found = append(found, fmt.Sprintf("set <%d> is gone", i))
		}
		b.set(func() {
			b.look = func() ([]string, time.Duration, error) {
				f := found
				found = nil
				return f, 0, nil
			}
		})
		time.Sleep(3 * time.Second)
		if c := b.calls(); len(c) != 1 || !c[0].change.Empty() {
			t.Errorf("%+v; want one transaction with nothing in its Change", c)
		}
		expectCalls(t, b, begin, "0.5:1")
		if got := b.checks(begin); got != "0.5 1 1.5 2 2.5 3" {
			t.Errorf("checked at %s", got)
		}
		if len(told) != 2 || told[0].Foreign != 0 || told[1].Foreign != 20 {
			t.Errorf("told of %+v", told)
		}
		lines := log.take("WARN")
		if len(lines) != 1 || !strings.Contains(lines[0], "changes=20") || !strings.Contains(lines[0], "<7> is gone") ||
			strings.Contains(lines[0], "<8>") {
			t.Errorf("log: %q", lines)
		}
		// What is not repaired at the first try is counted with the try that succeeds.
		b.set(func() { found, b.refuse = []string{"a chain has another rule"}, 2 })
		time.Sleep(3 * time.Second)
		expectCalls(t, b, begin, "3.5:failed 3.6:failed 3.8:1")
		if len(told) != 3 || told[2].Foreign != 1 {
			t.Errorf("told of %+v", told)
		}
	})
}

// TestCheckAgain says that a backend may ask for a Check of its own time.
func TestCheckAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		left := 3
		b := &fakeBackend{look: func() ([]string, time.Duration, error) {
			if left--; left < 0 {
				return nil, 0, nil
			}
			return nil, 10 * time.Millisecond, nil
		}}
		q, _ := start(t, b)
		q.Synced()
		begin := time.Now()
		time.Sleep(1100 * time.Millisecond)
		if got := b.checks(begin); got != "0.5 0.51 0.52 0.53 1.03" {
			t.Errorf("checked at %s", got)
		}
	})
}

// TestCheckFails says that a Check which fails goes on being made, and is a line in the log once, until it has succeeded.
func TestCheckFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		err := errors.New("no buffer space")
		b := &fakeBackend{}
		log := noted(b)
		q, _ := start(t, b)
		q.Synced()
		begin := time.Now()
		synctest.Wait()
		for range 2 {
			b.set(func() { b.look = func() ([]string, time.Duration, error) { return nil, 0, err } })
			time.Sleep(10 * time.Second)
			if lines := log.take("WARN", "no buffer space"); len(lines) != 1 {
				t.Errorf("log: %q", lines)
			}
			b.set(func() { b.look = nil })
			time.Sleep(time.Second)
			if lines := log.take("WARN"); len(lines) != 0 {
				t.Errorf("log: %q", lines)
			}
		}
		if n := len(strings.Fields(b.checks(begin))); n != 44 {
			t.Errorf("%d checks in 22 seconds", n)
		}
		expectCalls(t, b, begin, "0:0")
	})
}

// TestChangeBeforeCheck says that a change which comes as a Check is due goes first.
func TestChangeBeforeCheck(t *testing.T) {
	b := &fakeBackend{t: t}
	l := &Loop{Queue: snapshot.NewQueue(0), Backend: b, Log: slog.New(slog.DiscardHandler)}
	b.loop = l
	alarm := time.NewTimer(0)
	for range 100 { // where both could be, the runtime chooses at random
		l.checkAt = time.Now()
		time.Sleep(time.Microsecond)
		l.Queue.Put(service("a"))
		if !l.await(context.Background(), alarm) || len(b.checked) > 0 {
			t.Fatal("a Check came before a change")
		}
	}
}

// TestCheckAmidChanges says that changes without a pause put off the Checks for a while, not for ever, and do not wait for
// them any longer than for the rest after a transaction.
func TestCheckAmidChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{takes: 10 * time.Millisecond, checkTakes: 30 * time.Millisecond}
		q, _ := start(t, b)
		q.Synced()
		begin := time.Now()
		for i := range 10_000 {
			q.Put(with(string(rune('a'+i%20)), uint16(1+i)))
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Second)
		var last time.Time
		for i, c := range b.calls()[1:] {
			if d := c.at.Sub(last); i > 0 && (d < 50*time.Millisecond || d > 51*time.Millisecond) && c.at.Sub(begin) < 10*time.Second {
				t.Errorf("transaction %d came %v after the one before; want 10 ms of work and 40 ms of rest", i, d)
			}
			last = c.at
		}
		var before time.Time
		n := 0
		b.set(func() {
			for _, at := range b.checked {
				if d := at.Sub(before); n > 0 && d > 1100*time.Millisecond {
					t.Errorf("no Check for %v", d)
				}
				before = at
				n++
			}
		})
		if n < 9 {
			t.Errorf("%d checks in 11 seconds", n)
		}
	})
}

// TestAdopted says that tables which were found as they should be are a transaction like others.
func TestAdopted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{receipt: dataplane.Receipt{Adopted: true}}
		log := noted(b)
		var told []Transaction
		b.loop.Written = func(tr Transaction) { told = append(told, tr) }
		q, _ := start(t, b)
		q.Put(service("a"))
		q.Synced()
		synctest.Wait()
		if len(told) != 1 || !told[0].Adopted || told[0].Services != 1 {
			t.Errorf("told of %+v", told)
		}
		if lines := log.take("INFO", "carries the Services"); len(lines) != 1 || !strings.Contains(lines[0], "already; nothing was written") ||
			!strings.Contains(lines[0], "services=1") {
			t.Errorf("log: %q", lines)
		}
		b.set(func() { b.receipt = dataplane.Receipt{} })
		q.Put(service("b"))
		synctest.Wait()
		if lines := log.take("INFO"); len(lines) != 0 {
			t.Errorf("log: %q", lines)
		}
	})
}
