package outlier

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// flush says when the flows that wait for an endpoint are deleted. If the endpoint is unhealthy, those are all that it
// has not answered. If it is doubted, it may answer others, and those are the ones that were there in the look before,
// too: the word of a client counts for this client.
type flush struct {
	// wanted says that evidence came for an endpoint that has accepted no probe, or that flows wait for it.
	wanted bool
	// due is when to look; zero if not at all. again says that this is not the last time.
	due   time.Time
	again bool
	// last is when the last look began, and before when the one before it did.
	last, before time.Time
	// waiting are the flows that the last look at a doubted endpoint found. Looks go on until then, since clients whose
	// flows were deleted may choose it once more.
	waiting map[string]bool
	until   time.Time
	// ejected says that the endpoint was ejected when its Service was committed last.
	ejected bool
}

const (
	// flushAgain is how long after the first time flows are deleted a second time: packets may have been on their way that
	// the old rules translated. While evidence goes on, flows are deleted as often.
	flushAgain = time.Second
	// lookAgain is how long flows to a doubted endpoint must have waited: longer than an answer takes.
	lookAgain = 300 * time.Millisecond
	// chooseAgain is how long a client may wait before it sends again, for its first attempts.
	chooseAgain = 4 * time.Second
	// maxFlush is how many endpoints' flows are looked at before the next pause: all in a few walks of the kernel's table.
	// The pause lasts as long as that took, and mostRest at most: the time is not the processor's alone if others are
	// busy, and clients wait. If all endpoints are doubted only, it takes restShare times as long as the look, up to twice
	// mostRest.
	maxFlush  = 1024
	mostRest  = 250 * time.Millisecond
	restShare = 4
	// maxWaiting bounds the flows that are remembered of a look at an endpoint.
	maxWaiting = 4096
)

func (t *track) flushPause() time.Duration {
	if t.state == unhealthy {
		return flushAgain
	}
	return lookAgain
}

// scheduleFlush makes a look due if evidence goes on.
func (d *Detector) scheduleFlush(now time.Time, t *track) {
	if !t.flush.wanted || !t.flush.due.IsZero() || t.state != unhealthy && t.state != doubted {
		return
	}
	t.flush.wanted = false
	t.flush.due = clock.Later(now, t.flush.last.Add(t.flushPause()))
}

// job is one endpoint of a Service: at which ports' frontends flows are deleted, and of which.
type job struct {
	trackKey
	ports []*dataplane.ServicePort
	// doubted says that only flows in before go, which began after began. waiting are those that were found now, and
	// released the clients of those that went, maxDenied at most.
	doubted         bool
	began           time.Time
	before, waiting map[string]bool
	released        map[netip.Addr]bool
	gone            int
}

// jobs are those of each endpoint.
type jobs map[netip.AddrPort][]*job

// flushed is the result of deleting flows.
type flushed struct {
	jobs  jobs
	flows int
	took  time.Duration
	err   error
}

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
		began := t.flush.before
		t.flush.due, t.flush.before, t.flush.last = time.Time{}, t.flush.last, now
		if t.flush.again {
			t.flush.due, t.flush.again = now.Add(t.flushPause()), false
		}
		p := d.machine.answers.of[t.endpoint]
		if t.state == doubted && p != nil && now.Sub(p.last) < resent {
			continue // it answers, and who waits is somebody that it will not answer
		}
		if ports := d.flushable(t); len(ports) > 0 {
			todo[t.endpoint] = append(todo[t.endpoint], &job{trackKey: t.trackKey, ports: ports, began: began,
				doubted: t.state == doubted, before: t.flush.waiting, waiting: map[string]bool{},
				released: map[netip.Addr]bool{}})
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

func (d *Detector) flush(ctx context.Context, todo jobs) flushed {
	f := flushed{jobs: todo}
	start := time.Now()
	f.flows, f.err = d.o.Flows.Delete(ctx, slices.Collect(maps.Keys(todo)), todo.doomed)
	f.took = time.Since(start)
	return f
}

// doomed says whether a flow goes.
func (j jobs) doomed(f conntrack.WaitingFlow) bool {
	for _, job := range j[f.Endpoint] {
		switch {
		case !hasFrontend(job.ports, f.Frontend):
		case !job.doubted, job.before[f.ID]:
			job.gone++
			if job.doubted && len(job.released) < maxDenied {
				job.released[f.Client] = true
			}
			return true
		case len(job.waiting) < maxWaiting:
			job.waiting[f.ID] = true
		}
	}
	return false
}

func (d *Detector) recordFlush(f flushed) {
	now, rest := time.Now(), min(restShare*f.took, 2*mostRest)
	d.mu.Lock()
	for _, list := range f.jobs {
		for _, job := range list {
			if !job.doubted {
				rest = min(f.took, mostRest)
			} else if t := d.machine.tracks[job.trackKey]; t != nil && t.state == doubted {
				if job.gone > 0 {
					t.evidence, t.flush.until = now, now.Add(chooseAgain)
				}
				t.proof.release(job.began, job.released)
				t.flush.waiting = job.waiting
				t.flush.wanted = t.flush.wanted || len(job.waiting) > 0 || now.Before(t.flush.until)
			}
		}
	}
	d.stats.FlowsDeleted += uint64(f.flows)
	d.mu.Unlock()
	d.flushing, d.flushAfter = false, now.Add(rest)
	if f.err != nil {
		d.o.Log.Warn("clients may go on waiting for endpoints that do not answer", "err", f.err)
	}
}
