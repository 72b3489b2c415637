package node

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/wake"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/watch"
)

const (
	// publishInterval is how often the publisher looks whether the Condition is another one.
	publishInterval = 5 * time.Second
	// publishDelay is the delay after a first failure, and maxPublishDelay what it grows to. publishPause is the least
	// time between two readings of the Node.
	publishDelay, maxPublishDelay = time.Second, 5 * time.Minute
	publishPause                  = time.Second
	// publishTimeout bounds what one attempt takes, and farewellTimeout what the last one takes, at the end.
	publishTimeout, farewellTimeout = 15 * time.Second, 2 * time.Second
)

// publisher keeps this node's Node object up to date: it writes the condition, and removes the taint of the start. It
// runs beside the loop, which waits for nothing of it.
type publisher struct {
	// apply is that of a watch.NodeWriter.
	apply func(context.Context, watch.NodeWish) (watch.NodeChange, error)
	// condition says that there is to be one. taint is the key of the taint to remove; empty means none.
	condition bool
	taint     string
	// ends reports whether the proxy, cancelled with a cause, has no successor.
	ends func(cause error) bool
	log  *slog.Logger

	// wake has the publisher look at once, and seen read the Node though nothing has changed here.
	wake, seen chan struct{}

	judge status.Judge
	// applied is the last wish that the Node has; due is when the next attempt may be made, and delay follows if it fails.
	applied watch.NodeWish
	stale   bool
	due     time.Time
	delay   time.Duration
	failure string
}

// newPublisher returns the publisher that the settings ask for.
func newPublisher(s *config.Settings, apply func(context.Context, watch.NodeWish) (watch.NodeChange, error),
	ends func(error) bool, log *slog.Logger) *publisher {
	return &publisher{apply: apply, condition: s.NodeCondition, taint: s.StartupTaint, ends: ends, log: log,
		wake: make(chan struct{}, 1), seen: make(chan struct{}, 1)}
}

// listener has the publisher look as soon as all Services are programmed.
func (p *publisher) listener() reconcile.Listener {
	first := true
	return reconcile.Listener{InSync: func(reconcile.InSync) {
		if first {
			first = false
			wake.Up(p.wake)
		}
	}}
}

// nodeSeen has the publisher read the Node: it is new or has changed. A Node that was made anew has the taint again,
// and no condition. It may be called on nil.
func (p *publisher) nodeSeen() {
	if p != nil {
		wake.Up(p.seen)
	}
}

// run publishes until ctx is done.
func (p *publisher) run(ctx context.Context, facts func() status.Facts) {
	tick := time.NewTicker(publishInterval)
	defer tick.Stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			p.farewell(ctx)
			return
		case <-p.seen:
			p.stale = true
		case <-p.wake:
		case <-tick.C:
		case <-timer.C:
		}
		p.look(ctx, facts())
		if wait := time.Until(p.due); wait > 0 {
			timer.Reset(wait)
		}
	}
}

// look writes what the Node lacks, unless an attempt was made a moment ago.
func (p *publisher) look(ctx context.Context, f status.Facts) {
	now := time.Now()
	wish := p.wish(now, f)
	if wish == (watch.NodeWish{}) || wish == p.applied && !p.stale || now.Before(p.due) {
		return
	}
	limited, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	changed, err := p.apply(limited, wish)
	if ctx.Err() != nil {
		return
	}
	p.report(wish, changed)
	if err != nil && !errors.Is(err, watch.ErrNoNode) {
		p.failed(err)
		return
	}
	if p.failure != "" {
		p.log.Info("the Node can be written again")
	}
	// A Node that does not exist is seen when it does.
	p.applied, p.stale, p.failure, p.delay, p.due = wish, false, "", 0, time.Now().Add(publishPause)
}

// wish returns what the Node is to be like now.
func (p *publisher) wish(now time.Time, f status.Facts) (w watch.NodeWish) {
	if c := p.judge.Look(now, f); p.condition && c != (status.Condition{}) {
		w.Condition = nodeCondition(c)
	}
	if !f.First.IsZero() {
		w.WithoutTaint = p.taint
	}
	return w
}

func nodeCondition(c status.Condition) watch.NodeCondition {
	return watch.NodeCondition{Type: status.ConditionType, Status: c.Status, Reason: c.Reason, Message: c.Message}
}

func (p *publisher) report(wish watch.NodeWish, changed watch.NodeChange) {
	if changed.Taint {
		p.log.Info("removed the taint from the Node: all Services are programmed", "taint", wish.WithoutTaint)
	}
	if changed.Condition {
		p.log.Info("the Node's condition is written", "condition", wish.Condition.Type, "status", wish.Condition.Status,
			"reason", wish.Condition.Reason)
	}
}

// failed sets the time of the next attempt, and logs the error unless it was the last one, too.
func (p *publisher) failed(err error) {
	p.delay = min(max(2*p.delay, publishDelay), maxPublishDelay)
	// Whatever has failed on all nodes at once is not tried again by all at once.
	p.due = time.Now().Add(p.delay + rand.N(p.delay/4))
	text := err.Error()
	if len(text) > maxPublishError {
		text = text[:maxPublishError] + "…"
	}
	if p.failure != text {
		p.log.Warn("failed to write the Node; retrying", "err", text)
	}
	p.failure = text
}

// maxPublishError bounds an error in the log, in bytes.
const maxPublishError = 1000

// farewell says that nobody looks after the node any more. It is tried once: what a proxy that was killed has written
// stays, too.
func (p *publisher) farewell(ctx context.Context) {
	if !p.condition || p.applied.Condition.Type == "" || !p.ends(context.Cause(ctx)) {
		return
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewellTimeout)
	defer cancel()
	wish := watch.NodeWish{Condition: nodeCondition(status.Stopped)}
	changed, err := p.apply(last, wish)
	p.report(wish, changed)
	if err != nil && !errors.Is(err, watch.ErrNoNode) {
		p.failed(err)
	}
}
