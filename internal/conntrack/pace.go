package conntrack

import (
	"context"
	"sync"
	"time"
)

// Work is done for workAtOnce, then there is a pause as long. When all of it is done, there is a pause restFactor times
// as long as the work took. So many changes in a row cost at most a fifth of a core, and changes that arrive during the
// pause are handled together.
const (
	workAtOnce = 10 * time.Millisecond
	restFactor = 4
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

// lock waits for a mutex that is locked during transactions. The wait may be long and does not count as work.
func (p *pace) lock(mu *sync.Mutex) {
	start := time.Now()
	mu.Lock()
	waited := time.Since(start)
	p.paused += waited
	p.workingSince = p.workingSince.Add(waited)
}

// throttle pauses after each stretch of work.
func (p *pace) throttle(ctx context.Context) {
	worked := time.Since(p.workingSince)
	if worked < workAtOnce {
		return
	}
	start := time.Now()
	pause(ctx, worked)
	p.workingSince = time.Now()
	p.paused += p.workingSince.Sub(start)
}

// pause waits until the time has passed or the context ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
