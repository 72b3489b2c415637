package kernel

import (
	"context"
	"slices"
	"sync/atomic"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// simTurns orders the driver of a simulation and the loop for the race detector. Both use the simulation's fields, each
// while the other is blocked. The detector knows that what the loop did happens before a Wait of the driver's returns.
// It does not know the other direction: it is the bubble's clock that lets the loop go on. So the driver says that its
// turn is over, and the loop looks at that wherever it enters the simulation: through a wire or a listener. Nobody
// waits here. If both ever acted at once, the detector would report it.
type simTurns struct {
	over atomic.Uint64
	// queue is that of the process: the loop locks it before it plans, and so sees that the driver's turn is over before
	// it enters the simulation.
	queue *snapshot.Queue
}

// end ends the driver's turn.
func (t *simTurns) end() {
	t.over.Add(1)
	t.queue.Waiting()
}

// wait ends the driver's turn, until the loop is blocked again.
func (t *simTurns) wait() {
	t.end()
	synctest.Wait()
}

// pass ends the driver's turn for some time.
func (t *simTurns) pass(d time.Duration) {
	t.end()
	time.Sleep(d)
	synctest.Wait()
}

// enter begins the loop's turn.
func (t *simTurns) enter() { t.over.Load() }

// entering is a listener's function that enters the simulation first.
func entering[E any](t *simTurns, hear func(E)) func(E) {
	return func(event E) {
		t.enter()
		hear(event)
	}
}

// simSocket is a wire by which the loop enters the simulation.
type simSocket struct {
	netlink.Wire
	turns *simTurns
}

func (w *simSocket) Send(b []byte) error {
	w.turns.enter()
	return w.Wire.Send(b)
}

func (w *simSocket) Recv(b []byte, wait bool) (int, error) {
	w.turns.enter()
	return w.Wire.Recv(b, wait)
}

func (w *simSocket) Room(n int) (int, error) {
	w.turns.enter()
	return w.Wire.Room(n)
}

func (w *simSocket) Close() error {
	w.turns.enter()
	return w.Wire.Close()
}

// observe reads what metrics and health read of a process while it runs, and takes no turns: whatever the loop changes
// without a lock after it has shown it is a race.
func (p *simProcess) observe(ctx context.Context) (seen int) {
	for {
		select {
		case <-ctx.Done():
			return seen
		case <-time.After(701 * time.Millisecond):
		}
		waiting, progress := p.queue.Waiting(), p.queue.Progress()
		seen += waiting.Services + progress.Slices
		for _, q := range slices.Concat(p.loop.Quarantined(), p.loop.Unscheduled()) {
			seen += len(q.Err.Error())
		}
		for _, s := range p.loop.Starting() {
			seen += len(s.Endpoints)
		}
		if fill := p.backend.Fill(); fill != nil {
			seen += fill[0][nft.Services].Elements
		}
		if !p.loop.Busy().IsZero() {
			seen++
		}
	}
}
