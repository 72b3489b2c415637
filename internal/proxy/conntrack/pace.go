package conntrack

import (
	"context"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
)

// Work is done for workAtOnce, then there is a pause as long. When all of it is done, there is a pause restFactor times
// as long as the work took, and leastRest at least. So many changes in a row cost at most a fifth of a core, and
// changes that arrive during the pause are handled together.
//
// Even an empty table takes long to list: the kernel locks each of its 262,144 buckets, some 10 ms in all on a virtual
// machine. Without leastRest, 100 changed endpoints a second took 0.22 cores, with it 0.11.
const (
	workAtOnce = 10 * time.Millisecond
	restFactor = 4
	leastRest  = 200 * time.Millisecond
)

// pace spreads work over time, and measures it.
type pace struct {
	start time.Time
	// paused is the time spent in pauses. workingSince is when the last pause ended.
	paused       time.Duration
	workingSince time.Time
}

func (p *pace) begin() {
	now := time.Now()
	*p = pace{start: now, workingSince: now}
}

// took returns the time since the work began, and the part of it without pauses.
func (p *pace) took() (took, worked time.Duration) {
	took = time.Since(p.start)
	return took, took - p.paused
}

// gate is a mutex that also keeps out, by lock, those who must not work during a transaction. A transaction may take
// long, and nobody else waits for it.
type gate struct {
	sync.Mutex
	// closed ends with the transaction that is under way; nil if there is none.
	closed chan struct{}
}

// close waits for those who work now, and keeps out others until open.
func (g *gate) close() {
	g.Lock()
	defer g.Unlock()
	g.closed = make(chan struct{})
}

// open lets them in. The caller has locked the gate.
func (g *gate) open() {
	if g.closed != nil {
		close(g.closed)
		g.closed = nil
	}
}

// lock locks a gate once it is open, unless ctx ends before. The wait may be long and does not count as work.
func (p *pace) lock(ctx context.Context, g *gate) error {
	start := time.Now()
	defer func() {
		waited := time.Since(start)
		p.paused += waited
		p.workingSince = p.workingSince.Add(waited)
	}()
	for g.Lock(); g.closed != nil; g.Lock() {
		closed := g.closed
		g.Unlock()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-closed:
		}
	}
	return nil
}

// throttle pauses after each stretch of work.
func (p *pace) throttle(ctx context.Context) {
	worked := time.Since(p.workingSince)
	if worked < workAtOnce {
		return
	}
	start := time.Now()
	clock.Pause(ctx, worked)
	p.workingSince = time.Now()
	p.paused += p.workingSince.Sub(start)
}

// repeat calls work whenever it is due, until the context ends. next says when that is, if at all: not before rested,
// when the rest after the last work is over, or not before early, when a short rest is, if clients wait for it. wake
// makes it ask again. Work that fails is due again after retry, and returns how long it worked.
func repeat(ctx context.Context, wake <-chan struct{}, next func(rested, early time.Time) (due time.Time, any bool),
	work func(retry time.Duration) (worked time.Duration, err error), mostRest time.Duration) {
	retry := retryFirst
	var rested, early time.Time
	for {
		due, any := next(rested, early)
		timer := time.NewTimer(time.Until(due))
		timeout := timer.C
		if !any {
			timeout = nil
		}
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-wake: // perhaps something is due earlier
			timer.Stop()
			continue
		case <-timeout:
		}
		worked, err := work(retry)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			retry = min(2*retry, retryMost)
		} else {
			retry = retryFirst
		}
		now := time.Now()
		rested = now.Add(max(leastRest, min(restFactor*worked, mostRest)))
		early = now.Add(max(leastRest, min(worked, mostRest)))
	}
}
