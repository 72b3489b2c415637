package logging

import (
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// output is what a log writes to.
type output struct {
	mu sync.Mutex
	b  strings.Builder
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

// take gives what was written since the last call, line by line.
func (o *output) take() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	text := strings.TrimSuffix(o.b.String(), "\n")
	o.b.Reset()
	if text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

var formats = map[string]func(io.Writer, *slog.HandlerOptions) slog.Handler{
	"text": func(w io.Writer, o *slog.HandlerOptions) slog.Handler { return slog.NewTextHandler(w, o) },
	"json": func(w io.Writer, o *slog.HandlerOptions) slog.Handler { return slog.NewJSONHandler(w, o) },
}

// limited runs a test with a log in each format, and a clock that only moves when all wait.
func limited(t *testing.T, test func(t *testing.T, l *Limit, log *slog.Logger, out *output)) {
	for name, format := range formats {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				out := &output{}
				l := NewLimit(format(out, &slog.HandlerOptions{Level: slog.LevelDebug}))
				test(t, l, slog.New(l), out)
				time.Sleep(time.Hour) // what is left to be told
			})
		})
	}
}

// TestOneWhoFloods: who provokes many lines gets a burst, then few, and how many were left out is told, once.
func TestOneWhoFloods(t *testing.T) {
	limited(t, func(t *testing.T, l *Limit, log *slog.Logger, out *output) {
		for i := range 10_000 {
			log.Warn(fmt.Sprintf("Service evil/web-%d: spec.ports[0].port: 80800 is not a port", i))
		}
		if n := len(out.take()); n != burst {
			t.Errorf("%d lines were written; want %d", n, burst)
		}
		log.Warn("Service shop/web: spec.ports[0].port: 80800 is not a port")
		log.Error("failed to apply a transaction")
		log.With("server", "metrics").Info("now listening")
		if n := len(out.take()); n != 3 {
			t.Errorf("of others %d lines were written; want 3", n)
		}
		time.Sleep(sumEvery + time.Second)
		told := out.take()
		if len(told) != 1 || !strings.Contains(told[0], "left out 9900 lines: 9900 of level WARN like") ||
			!strings.Contains(told[0], "Service evil") || !strings.Contains(told[0], "within") {
			t.Errorf("told %q", told)
		}
		if l.LeftOut() != 9900 {
			t.Errorf("counted %d", l.LeftOut())
		}
		for range 100 { // it is a steady trickle from then on
			log.Warn("Service evil/web: again")
		}
		if n := len(out.take()); n != int((sumEvery+time.Second)/interval) {
			t.Errorf("after %v %d lines were written", sumEvery+time.Second, n)
		}
	})
}

// TestManyWhoFlood: from many namespaces, or with a message that is never the same, there is a bound for all of a
// severity, and errors have one of their own.
func TestManyWhoFlood(t *testing.T) {
	limited(t, func(t *testing.T, l *Limit, log *slog.Logger, out *output) {
		for i := range 100_000 {
			log.Warn(fmt.Sprintf("message %d", i))
		}
		warnings := len(out.take())
		if warnings < maxKinds || warnings > allBurst {
			t.Errorf("%d lines were written", warnings)
		}
		if len(l.kinds) > maxKinds+1 || len(l.skipped) > maxKinds {
			t.Errorf("%d kinds, %d skipped are kept", len(l.kinds), len(l.skipped))
		}
		log.Error("failed to apply a transaction")
		if n := len(out.take()); n != 1 {
			t.Error("an error is crowded out by warnings")
		}
		time.Sleep(sumEvery)
		synctest.Wait()
		told := out.take()
		if len(told) != 1 || len(told[0]) > 1000 ||
			!strings.Contains(told[0], fmt.Sprintf("left out %d lines", 100_000-warnings)) ||
			!strings.Contains(told[0], "of other kinds") {
			t.Errorf("told %q", told)
		}
		time.Sleep(time.Hour)
		if told := out.take(); told != nil {
			t.Errorf("nothing was left out, and it told %q", told)
		}
	})
}

// TestWhatIsNotLimited: lines that the operator asked for, and the ordinary pace of a log.
func TestWhatIsNotLimited(t *testing.T) {
	limited(t, func(t *testing.T, l *Limit, log *slog.Logger, out *output) {
		for range 10_000 {
			log.Debug("transaction")
		}
		for range 1000 {
			log.Info("removed connection tracking entries to removed endpoints")
			time.Sleep(time.Second)
		}
		if n := len(out.take()); n != 11_000 || l.LeftOut() != 0 {
			t.Errorf("%d lines were written, %d left out", n, l.LeftOut())
		}
		log.Warn(strings.Repeat("x", 1<<20), "service", "shop/web")
		if text := out.take()[0]; len(text) > maxMessage+200 || !strings.Contains(text, "shop/web") {
			t.Errorf("a line has %d bytes", len(text))
		}
	})
}

// TestKindsComeBack: a kind that said nothing for a while makes room for another one.
func TestKindsComeBack(t *testing.T) {
	limited(t, func(t *testing.T, l *Limit, log *slog.Logger, out *output) {
		for i := range maxKinds {
			log.Warn(fmt.Sprintf("message %d", i))
		}
		time.Sleep(interval)
		for range burst + 1 {
			log.Warn("a flood of one kind")
		}
		if n := len(l.kinds); n != 1 {
			t.Errorf("%d kinds are kept; want the new one", n)
		}
		if n := len(out.take()); n != maxKinds+burst {
			t.Errorf("%d lines were written; want %d", n, maxKinds+burst)
		}
	})
}
