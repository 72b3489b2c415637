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
		expect("3.7 4.2 4.7")
		b.set(func() { b.refuse = 5 })
		q.Put(service("b")) // at 5 s; it is taken at 8.1 s
		time.Sleep(4 * time.Second)
		expect("8.1 8.6")
	})
}

// TestForeignChange says that what a Check finds is repaired at once, by a transaction even if nothing else has
// changed.
func TestForeignChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		log := noted(b)
		var told []Transaction
		listen(b, Listener{Written: func(tr Transaction) { told = append(told, tr) }})
		startWith(t, b, service("a"))
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
		if got := b.checks(begin); got != "0 0.5 0.5 1 1.5 2 2.5 3" {
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
		startWith(t, b)
		begin := time.Now()
		time.Sleep(1100 * time.Millisecond)
		if got := b.checks(begin); got != "0 0.01 0.02 0.03 0.53 1.03" {
			t.Errorf("checked at %s", got)
		}
	})
}

// TestCheckFails says that a Check which fails goes on being made, and is a line in the log once, until it has
// succeeded.
func TestCheckFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		err := errors.New("no buffer space")
		b := &fakeBackend{}
		log := noted(b)
		startWith(t, b)
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
		if n := len(strings.Fields(b.checks(begin))); n != 45 {
			t.Errorf("%d checks in 22 seconds", n)
		}
		expectCalls(t, b, begin, "0:0")
	})
}

// TestChangeBeforeCheck says that a change which comes as a Check is due goes first.
func TestChangeBeforeCheck(t *testing.T) {
	b := &fakeBackend{t: t}
	l := &Loop{Queue: snapshot.NewQueue(0), Writer: b, Log: slog.New(slog.DiscardHandler)}
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

// TestCheckAmidChanges says that changes without a pause put off the Checks for a while if the rests between
// transactions are short, but not for ever, and that they do not wait for a Check where it fits into a rest.
func TestCheckAmidChanges(t *testing.T) {
	for _, c := range []struct {
		takes, checkTakes time.Duration
		// most is the time between two transactions at most, least that between two Checks.
		most, least time.Duration
	}{
		{10 * time.Millisecond, 30 * time.Millisecond, 51 * time.Millisecond, 50 * time.Millisecond},
		{time.Millisecond, 3 * time.Millisecond, 6 * time.Millisecond, CheckEvery},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := &fakeBackend{takes: c.takes, checkTakes: c.checkTakes}
			q := startWith(t, b)
			for i := range 50_000 {
				q.Put(with(string(rune('a'+i%20)), uint16(1+i)))
				time.Sleep(100 * time.Microsecond)
			}
			end := time.Now()
			synctest.Wait()
			calls := b.calls()[1:]
			for i := 1; i < len(calls); i++ {
				if d := calls[i].at.Sub(calls[i-1].at); d < 5*c.takes || d > c.most {
					t.Errorf("transaction %d came %v after the one before; they take %v", i, d, c.takes)
				}
			}
			b.set(func() {
				at := append(b.checked, end)
				for i := 1; i < len(at); i++ {
					d := at[i].Sub(at[i-1])
					if d > c.least+60*time.Millisecond || d < c.least && at[i] != end {
						t.Errorf("for %v no Check; want %v", d, c.least)
					}
				}
				if len(at) < 4 {
					t.Errorf("Checks at %v", b.checked)
				}
			})
		})
	}
}

// TestAdopted says that tables which were found as they should be are a transaction like others.
func TestAdopted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{receipt: dataplane.Receipt{Adopted: true}}
		log := noted(b)
		var told []Transaction
		listen(b, Listener{Written: func(tr Transaction) { told = append(told, tr) }})
		q := startWith(t, b, service("a"))
		synctest.Wait()
		if len(told) != 1 || !told[0].Adopted || told[0].Services != 1 {
			t.Errorf("told of %+v", told)
		}
		if lines := log.take("INFO", "Services are programmed"); len(lines) != 1 ||
			!strings.Contains(lines[0], "already; nothing was written") || !strings.Contains(lines[0], "services=1") {
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
