package snapshot

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestVersionCompare: versions compare as numbers of any length, and texts that are none have no order.
func TestVersionCompare(t *testing.T) {
	for _, c := range []struct {
		a, b  Version
		order int
		ok    bool
	}{
		{"9", "10", -1, true}, {"10", "9", 1, true}, {"0", "1", -1, true}, {"7", "7", 0, true},
		{"18446744073709551616", "9999", 1, true}, {"", "1", 0, false}, {"01", "1", 0, false}, {"x1", "1", 0, false},
		{"1", "-1", 0, false}, {"1", "1111111111111111111111111111111111111111", 0, false},
	} {
		if order, ok := c.a.Compare(c.b); order != c.order || ok != c.ok {
			t.Errorf("%q and %q: %d %v", c.a, c.b, order, ok)
		}
	}
	for _, c := range []struct {
		v, o Version
		want bool
	}{
		{"9", "10", false}, {"10", "9", true}, {"", "1", false}, {"", "", true}, {"1", "", true}, {"x", "x", true},
		{"x", "1", false},
	} {
		if got := c.v.Reached(c.o); got != c.want {
			t.Errorf("%q reached %q: %v", c.v, c.o, got)
		}
	}
	if a := (Versions{"9", "x"}).Older(Versions{"10", "3"}); a != (Versions{"9", ""}) {
		t.Errorf("the older ones are %+v", a)
	}
}

// TestQueueProgress: the versions of what is programmed follow those of what was put only once the reader has
// acknowledged it, and stay before what it holds for later.
func TestQueueProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, a := NewQueue(1), in("x", "a")
		put := func(services Version, objects ...Name) {
			d := Delta{Versions: Versions{Services: services}, Services: map[Name]*Service{}}
			for _, n := range objects {
				d.Services[n] = named(n)
			}
			q.Put(d)
		}
		want := func(what string, received, programmed Version) {
			t.Helper()
			if p := q.Progress(); p.Received.Services != received || p.Programmed.Services != programmed {
				t.Errorf("%s: %+v; want %q and %q", what, p, received, programmed)
			}
		}
		put("1")
		q.Synced()
		put("2")
		want("before the first transaction", "2", "")
		q.Take()
		q.Ack(Held{})
		want("the first, of nothing", "2", "2")
		for woken(q) {
		}
		put("3")
		want("a bookmark at rest", "3", "3")
		if woken(q) {
			t.Error("a bookmark wakes the reader")
		}
		put("4", a)
		put("5")
		want("put, not taken", "5", "3")
		q.Take()
		put("6")
		want("taken", "6", "3")
		q.Take() // after a failure
		put("7", a)
		q.Ack(Held{})
		want("acknowledged, and more has come", "7", "6")
		q.Take()
		since := time.Now()
		time.Sleep(time.Second)
		q.Ack(Held{Waiting: Waiting{Services: 1, Since: since}, Before: Versions{Services: "6"}})
		put("8")
		want("held for later", "8", "6")
		if p := q.Progress(); p.Services != 1 || !p.Since.Equal(since) {
			t.Errorf("%+v; want a change since %v", p, since)
		}
		q.Take()
		q.Ack(Held{})
		want("nothing held", "8", "8")
		if p := q.Progress(); !p.Since.IsZero() || p.Services != 0 {
			t.Errorf("nothing waits, yet %+v", p)
		}
	})
}
