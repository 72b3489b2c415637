package status

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestJudge: the condition follows what lasts for half a minute, and nothing shorter.
func TestJudge(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := func(second int) time.Time {
		if second < 0 {
			return time.Time{}
		}
		return start.Add(time.Duration(second) * time.Second)
	}
	type look struct {
		second                  int
		first, waiting, failing int // the second; -1 means not at all
		want                    string
	}
	for name, looks := range map[string][]look{
		"a start as it should be": {
			{0, -1, -1, -1, " "}, {2, -1, 1, -1, " "}, {4, 3, -1, -1, "True Programmed"}, {999, 3, -1, -1, "True Programmed"}},
		"a short failure": {
			{1, 1, -1, -1, "True Programmed"}, {20, 1, 5, 5, "True Programmed"}, {34, 1, 5, 5, "True Programmed"},
			{40, 1, -1, -1, "True Programmed"}},
		"a long failure": {
			{1, 1, -1, -1, "True Programmed"}, {35, 1, 5, 5, "False TransactionsFail"}, {90, 1, 5, 5, "False TransactionsFail"},
			{95, 1, -1, -1, "False TransactionsFail"}, {124, 1, -1, -1, "False TransactionsFail"},
			{125, 1, -1, -1, "True Programmed"}},
		"it is late, gets better and worse": {
			{1, 1, -1, -1, "True Programmed"}, {35, 1, 5, -1, "False Behind"}, {40, 1, -1, -1, "False Behind"},
			{60, 1, 49, -1, "False Behind"}, {89, 1, -1, -1, "False Behind"}, {118, 1, -1, -1, "False Behind"},
			{119, 1, -1, -1, "True Programmed"}},
		"the reason of what lasts stays": {
			{1, 1, -1, -1, "True Programmed"}, {35, 1, 5, -1, "False Behind"}, {70, 1, 5, 40, "False Behind"}},
		"the objects cannot be read": {
			{29, -1, -1, -1, " "}, {30, -1, -1, -1, "Unknown NotListed"}, {60, -1, 59, -1, "Unknown NotListed"},
			{61, 60, -1, -1, "True Programmed"}},
		"the first transaction fails": {
			{10, -1, 5, 5, " "}, {35, -1, 5, 5, "False TransactionsFail"}, {40, 40, -1, -1, "False TransactionsFail"},
			{70, 40, -1, -1, "True Programmed"}},
	} {
		var j Judge
		for _, l := range looks {
			c := j.Look(at(l.second), Facts{Started: start, First: at(l.first), Waiting: at(l.waiting), Failing: at(l.failing)})
			if got := c.Status + " " + c.Reason; got != l.want {
				t.Errorf("%s: after %d s it is %q; want %q", name, l.second, got, l.want)
			}
			if len(c.Message) > maxText || (c.Status != "") != (c.Message != "") {
				t.Errorf("%s: message %q", name, c.Message)
			}
		}
	}
}

// TestFlapping: whatever happens, the condition changes twice a minute at most.
func TestFlapping(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for period := 1; period < 200; period++ {
		var j Judge
		f := Facts{Started: start, First: start}
		last, changes := "", 0
		for second := range 3600 {
			now := start.Add(time.Duration(second) * time.Second)
			if f.Failing = (time.Time{}); second/period%2 == 1 {
				f.Failing = start.Add(time.Duration(second/period*period) * time.Second)
			}
			if c := j.Look(now, f); c.Status != last {
				last, changes = c.Status, changes+1
			}
		}
		if changes > 120 {
			t.Errorf("it changes %d times an hour if transactions fail and succeed for %d s in turn", changes, period)
		}
	}
}

// TestFacts: a Tracker knows what is waiting and failing, and names nothing that tenants write.
func TestFacts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, waiting := newWorld(), snapshot.Waiting{}
		w.o.Waiting = func() snapshot.Waiting { return waiting }
		began := time.Now()
		if f := w.Facts(); f != (Facts{Started: began}) {
			t.Errorf("at the start: %+v", f)
		}
		time.Sleep(time.Second)
		w.apply(service("shop/web", true))
		if f := w.Facts(); !f.First.Equal(began.Add(time.Second)) || !f.Failing.IsZero() {
			t.Errorf("when it is programmed: %+v", f)
		}
		var j Judge
		j.Look(time.Now(), w.Facts())
		waiting.Since = time.Now()
		w.Listener().Failed(reconcile.Failure{Err: errors.New("secret/name is refused")})
		time.Sleep(Late)
		if c := j.Look(time.Now(), w.Facts()); c.Reason != "TransactionsFail" || strings.Contains(c.Message, "secret") {
			t.Errorf("when it fails: %+v", c)
		}
	})
}
