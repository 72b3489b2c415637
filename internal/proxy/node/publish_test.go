package node

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// publishing is a publisher with an API server of its own, in a synctest bubble.
type publishing struct {
	*publisher
	log bytes.Buffer
	// ended is why the proxy ends.
	ended bool

	mu    sync.Mutex
	facts status.Facts
	fails error
	wrote []string
}

// startPublishing runs a publisher with a condition and a taint. The function it returns ends it.
func startPublishing(t *testing.T) (*publishing, func()) {
	p := &publishing{facts: status.Facts{Started: time.Now()}, ended: true}
	apply := func(_ context.Context, w watch.NodeWish) (watch.NodeChange, error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.wrote = append(p.wrote, strings.TrimSpace(w.Condition.Status+" "+w.Condition.Reason+" "+w.WithoutTaint))
		return watch.NodeChange{Condition: w.Condition.Type != "" && p.fails == nil}, p.fails
	}
	p.publisher = newPublisher(&config.Settings{NodeCondition: true, StartupTaint: "taint"}, apply,
		func(error) bool { return p.ended }, slog.New(slog.NewTextHandler(&p.log, nil)))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.run(ctx, func() status.Facts {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.facts
		})
	}()
	return p, func() {
		cancel()
		<-done
	}
}

// set changes what the publisher sees, and what the server answers.
func (p *publishing) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

// after lets time pass and returns what was written meanwhile.
func (p *publishing) after(d time.Duration) []string {
	time.Sleep(d)
	synctest.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	wrote := p.wrote
	p.wrote = nil
	return wrote
}

// TestPublish: the Node is written at once when all Services are programmed, then only when something changes: never
// for a transaction, for a Node that was made anew, and once at the end.
func TestPublish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, end := startPublishing(t)
		expect := func(what string, wrote []string, want ...string) {
			t.Helper()
			if !slices.Equal(wrote, want) {
				t.Errorf("%s: wrote %q; want %q", what, wrote, want)
			}
		}
		p.nodeSeen()
		expect("before all is programmed", p.after(20*time.Second))
		p.set(func() { p.facts.First = time.Now() })
		l := p.listener()
		l.InSync(reconcile.InSync{})
		expect("when all is programmed", p.after(0), "True Programmed taint")
		for range 1000 {
			l.InSync(reconcile.InSync{})
			time.Sleep(time.Millisecond)
		}
		expect("in a day", p.after(24*time.Hour))
		p.nodeSeen()
		expect("the Node has changed", p.after(2*time.Second), "True Programmed taint")
		p.set(func() { p.facts.Failing = time.Now() })
		expect("when transactions have failed for 29 s", p.after(29*time.Second))
		expect("and for 35 s", p.after(6*time.Second), "False TransactionsFail taint")
		expect("and for an hour", p.after(time.Hour))
		p.set(func() { p.facts.Failing = time.Time{} })
		expect("half a minute after", p.after(28*time.Second))
		expect("and later", p.after(12*time.Second), "True Programmed taint")
		end()
		expect("at the end", p.after(0), "Unknown Stopped")
		if n := strings.Count(p.log.String(), "\n"); n > 6 {
			t.Errorf("%d lines in the log:\n%s", n, &p.log)
		}
	})
}

// TestPublishSuccessor: a proxy that hands over, or had nothing to say, says nothing at its end.
func TestPublishSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, end := startPublishing(t)
		end()
		if wrote := p.after(0); wrote != nil {
			t.Errorf("before the first: wrote %q", wrote)
		}
		p, end = startPublishing(t)
		p.set(func() { p.facts.First, p.ended = time.Now(), false })
		p.after(10 * time.Second)
		end()
		if wrote := p.after(0); wrote != nil {
			t.Errorf("with a successor: wrote %q", wrote)
		}
	})
}

// TestPublishRetries: a server that fails is asked ever less often, without end, and the log has the error once.
func TestPublishRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, end := startPublishing(t)
		defer end()
		p.set(func() { p.facts.First, p.fails = time.Now(), errors.New(strings.Repeat("forbidden ", 1000)) })
		if n := len(p.after(10 * time.Second)); n < 2 || n > 4 {
			t.Errorf("%d attempts within 10 s", n)
		}
		p.after(time.Hour)
		if n := len(p.after(24 * time.Hour)); n < 200 || n > 290 {
			t.Errorf("%d attempts in a day", n)
		}
		if text := p.log.String(); strings.Count(text, "level=WARN") != 1 || len(text) > 2*maxPublishError {
			t.Errorf("log of %d bytes: %.2000s", len(text), text)
		}
		p.set(func() { p.fails = nil })
		if n := len(p.after(10 * time.Minute)); n != 1 || !strings.Contains(p.log.String(), "can be written again") {
			t.Errorf("%d attempts when it works again; log: %.2000s", n, &p.log)
		}
		// A Node that does not exist is waited for.
		p.set(func() { p.fails = watch.ErrNoNode })
		p.nodeSeen()
		if n := len(p.after(time.Hour)); n != 1 {
			t.Errorf("%d attempts without a Node", n)
		}
	})
}
