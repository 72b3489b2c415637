package outlier

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// maxFlush is how many endpoints' flows are deleted before the next pause: all in a few walks of the kernel's table.
// The pause lasts as long as that took, and mostRest at most: the time is not the processor's alone if others are
// busy, and clients wait.
const (
	maxFlush = 1024
	mostRest = 250 * time.Millisecond
)

// scheduleFlush makes a deletion due if evidence goes on.
func (d *Detector) scheduleFlush(now time.Time, t *track) {
	if !t.flush.wanted || !t.flush.due.IsZero() {
		return
	}
	t.flush.wanted = false
	t.flush.due = later(now, t.flush.last.Add(flushAgain))
}

// jobs are endpoints whose unanswered flows are to be deleted at some ports' frontends.
type jobs map[netip.AddrPort][]*dataplane.ServicePort

// startFlush deletes the flows that are due, those of the longest wait first.
func (d *Detector) startFlush(ctx context.Context, now time.Time) {
	if d.flushing || now.Before(d.flushAfter) {
		return
	}
	var due []*track
	for _, t := range d.machine.tracks {
		if !t.flush.due.IsZero() && !now.Before(t.flush.due) {
			due = append(due, t)
		}
	}
	slices.SortFunc(due, func(a, b *track) int { return a.flush.due.Compare(b.flush.due) })
	todo := jobs{}
	for _, t := range due[:min(maxFlush, len(due))] {
		t.flush.due, t.flush.last = time.Time{}, now
		if t.flush.again {
			t.flush.due, t.flush.again = now.Add(flushAgain), false
		}
		if ports := d.flushable(t); len(ports) > 0 {
			todo[t.endpoint] = ports
		}
	}
	if len(todo) == 0 {
		return
	}
	d.flushing = true
	d.background.Go(func() {
		f := d.flush(ctx, todo)
		select {
		case d.flushed <- f:
		case <-ctx.Done():
		}
	})
}

func (d *Detector) flush(ctx context.Context, todo jobs) (f flushed) {
	d.flowsMu.Lock()
	defer d.flowsMu.Unlock()
	start := time.Now()
	f.flows, f.err = d.o.Flows.Delete(ctx, slices.Collect(maps.Keys(todo)),
		func(endpoint netip.AddrPort, frontend dataplane.Key) bool {
			return hasFrontend(todo[endpoint], frontend)
		})
	f.took = time.Since(start)
	return f
}

func (d *Detector) recordFlush(f flushed) {
	d.flushing, d.flushAfter = false, time.Now().Add(min(f.took, mostRest))
	d.mu.Lock()
	d.stats.FlowsDeleted += uint64(f.flows)
	d.mu.Unlock()
	if f.err != nil {
		d.o.Log.Warn("clients may go on waiting for endpoints that do not answer", "err", f.err)
	}
}
