// Package gateway is the controller of Gateway API: it watches Gateways and routes, writes the Services that they stand
// for, and their statuses once all nodes have programmed them (docs/decisions/0036-gateway.md). What follows from the
// objects is computed by the package routes, as a whole and from scratch, whenever something has changed.
package gateway

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/internal/answers/collector"
	"github.com/verdict-proxy/verdict/internal/system/clock"
)

// Controller writes what Gateways need while this process leads. Make one with New.
type Controller struct {
	api     *api
	log     *slog.Logger
	observe func(time.Duration)

	mu sync.Mutex
	// writes counts writes by resource and outcome, since the process began.
	writes map[Write]uint64
	// leading is the work under way; nil while this process does not lead.
	leading *leader
}

// Write is a kind of write: a resource, or its status as in "gateways/status", and its outcome, one of Outcomes.
type Write = [2]string

// Outcomes are those of writes: it was made; the object had changed meanwhile; the server does not want it; it failed
// otherwise.
var Outcomes = []string{"written", "conflict", "rejected", "failed"}

// Stats is what a Controller counts.
type Stats struct {
	// Objects counts the known objects by their resource, and Programmed the Gateways that all nodes have programmed.
	// Both are empty while this process does not lead.
	Objects    map[string]int
	Programmed int
	Writes     map[Write]uint64
}

// New returns a Controller. Observe, if not nil, is told how long each change of a Gateway took until all nodes had it.
func New(config *rest.Config, log *slog.Logger, observe func(time.Duration)) (*Controller, error) {
	a, err := newAPI(config)
	if err != nil {
		return nil, err
	}
	if observe == nil {
		observe = func(time.Duration) {}
	}
	return &Controller{api: a, log: log, observe: observe, writes: map[Write]uint64{}}, nil
}

// leader is the work of a process that leads. Nothing of it outlives that.
type leader struct {
	api     *api
	world   *world
	writer  *writer
	tracker *tracker
}

// settle is how long changes are gathered before it is computed what follows from them, at least; and twice as long as
// that took the last time, so that whoever changes much does not keep a processor busy.
const settle = 50 * time.Millisecond

// Lead writes until ctx is done. Ask says what nodes have programmed.
func (c *Controller) Lead(ctx context.Context, ask collector.Asker) {
	w := newWorld(c.api, c.log)
	l := &leader{api: c.api, world: w, tracker: newTracker(ask, w.changed, c.observe)}
	l.writer = newWriter(c.api.limiter, c.log, func(r ref, err error) {
		c.count(r, err)
		w.changed()
	})
	c.lead(l)
	defer c.lead(nil)
	var all sync.WaitGroup
	defer l.tracker.all.Wait()
	defer all.Wait()
	all.Go(func() { w.run(ctx) })
	all.Go(func() { l.writer.run(ctx) })
	wake := time.NewTimer(0)
	defer wake.Stop()
	for took := time.Duration(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-w.dirty:
			clock.Pause(ctx, max(settle, 2*took))
		case <-wake.C:
		}
		begin := time.Now()
		wake.Reset(l.pass(ctx))
		took = time.Since(begin)
	}
}

func (c *Controller) lead(l *leader) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leading = l
}

// count counts a write.
func (c *Controller) count(r ref, err error) {
	outcome := Outcomes[3]
	switch {
	case err == nil:
		outcome = Outcomes[0]
	case apierrors.IsConflict(err):
		outcome = Outcomes[1]
	case isRejected(err):
		outcome = Outcomes[2]
	}
	name := r.resource
	if r.sub != "" {
		name += "/" + r.sub
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writes[Write{name, outcome}]++
}

// Stats returns what was counted so far.
func (c *Controller) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := Stats{Objects: map[string]int{}, Writes: map[Write]uint64{}}
	maps.Copy(s.Writes, c.writes)
	if c.leading != nil {
		c.leading.count(&s)
	}
	return s
}

// count counts the known objects.
func (l *leader) count(s *Stats) {
	w := l.world
	w.mu.RLock()
	s.Objects[classes], s.Objects[gateways] = len(w.classes.known), len(w.gateways.known)
	s.Objects[tcpRoutes], s.Objects[udpRoutes] = len(w.tcp.known), len(w.udp.known)
	w.mu.RUnlock()
	l.tracker.mu.Lock()
	defer l.tracker.mu.Unlock()
	for _, p := range l.tracker.has {
		if p.programmed {
			s.Programmed++
		}
	}
}
