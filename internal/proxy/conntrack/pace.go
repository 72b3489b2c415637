package conntrack

import (
	"context"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// Work is done for workAtOnce, then there is a pause as long. When all of it is done, there is a pause restFactor times
// as long as the work took, and leastRest at least. So many changes in a row cost at most a fifth of a core, and
// changes that arrive during the pause are handled together.
//
// Even an empty table takes long to list: the kernel locks each of its 262,144 buckets, some 10 ms in all on a virtual
// machine. Without leastRest, 100 changed endpoints a second took 0.22 cores, with it 0.11. Most looks find nobody:
// after those that were in vain, there is a pause of vainRest at least. A client that opens a connection sends again
// after a second; two looks, openingFor apart, must have found it by then.
const (
	workAtOnce = 10 * time.Millisecond
	restFactor = 4
	leastRest  = 200 * time.Millisecond
	vainRest   = 400 * time.Millisecond
)

// A look that fails is repeated after retryFirst, then after twice as long each time, up to retryMost.
const (
	retryFirst = time.Second
	retryMost  = time.Minute
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
	// inSync says that the last transaction succeeded. Otherwise nobody knows what the kernel holds, and nothing is
	// deleted.
	inSync bool
}

// listener returns what the loop must call: transactions close the gate, and committed opens it, with the gate locked.
func (g *gate) listener(committed func(reconcile.Commit)) reconcile.Listener {
	return reconcile.Listener{
		Writing:   g.close,
		Committed: committed,
		Failed: func(reconcile.Failure) {
			g.Lock()
			defer g.Unlock()
			g.inSync = false
			g.open()
		},
	}
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

// throttle pauses after each stretch of work. The pause is the time for what is done between, if that is not nil.
func (p *pace) throttle(ctx context.Context, between func()) {
	worked := time.Since(p.workingSince)
	if worked < workAtOnce {
		return
	}
	start := time.Now()
	if between != nil {
		between()
	}
	clock.Pause(ctx, worked-time.Since(start))
	p.workingSince = time.Now()
	p.paused += p.workingSince.Sub(start)
}
