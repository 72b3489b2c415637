package gateway

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/flowcontrol"
)

// ref names what is written: an object, or its status.
type ref struct {
	resource, sub string
	name          types.NamespacedName
}

// job is a write that is to be made.
type job struct {
	ref
	// basis says what it follows from: after a failure, another basis is tried at once.
	basis string
	do    func(ctx context.Context) error
}

// failure is what became of a write that failed.
type failure struct {
	err   error
	basis string
	times int
	until time.Time
}

// writer makes the writes that the last look at the world asked for, some at once, and one at a time of each object.
type writer struct {
	limiter flowcontrol.RateLimiter
	log     *slog.Logger
	// done is called after each write, with its outcome.
	done func(r ref, err error)

	mu     sync.Mutex
	queue  []job
	ready  *sync.Cond
	busy   map[ref]bool
	failed map[ref]failure
}

const (
	// writers is how many writes are made at once, and writeTimeout bounds one.
	writers      = 8
	writeTimeout = 10 * time.Second
	// A write that failed is made again after firstRetry, then after twice as long each time, up to lastRetry; up to
	// lastRejected if the server answered that it does not want it.
	firstRetry, lastRetry, lastRejected = 250 * time.Millisecond, 10 * time.Second, 5 * time.Minute
)

func newWriter(l flowcontrol.RateLimiter, log *slog.Logger, done func(ref, error)) *writer {
	w := &writer{limiter: l, log: log, done: done, busy: map[ref]bool{}, failed: map[ref]failure{}}
	w.ready = sync.NewCond(&w.mu)
	return w
}

// run writes until ctx is done.
func (w *writer) run(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.ready.Broadcast()
	})
	defer stop()
	var all sync.WaitGroup
	defer all.Wait()
	for range writers {
		all.Go(func() {
			for {
				j, ok := w.take(ctx)
				if !ok {
					return
				}
				w.finish(ctx, j, w.write(ctx, j))
			}
		})
	}
}

func (w *writer) write(ctx context.Context, j job) error {
	if err := w.limiter.Wait(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return j.do(ctx)
}

// take returns the next job.
func (w *writer) take(ctx context.Context) (j job, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for ctx.Err() == nil {
		if len(w.queue) > 0 {
			j, w.queue = w.queue[0], w.queue[1:]
			w.busy[j.ref] = true
			return j, true
		}
		w.ready.Wait()
	}
	return j, false
}

// finish notes what became of a job.
func (w *writer) finish(ctx context.Context, j job, err error) {
	w.mu.Lock()
	delete(w.busy, j.ref)
	f := w.failed[j.ref]
	switch {
	case err == nil || ctx.Err() != nil:
		delete(w.failed, j.ref)
	default:
		most := lastRetry
		if isRejected(err) {
			most = lastRejected
		}
		w.failed[j.ref] = failure{err, j.basis, f.times + 1, time.Now().Add(min(firstRetry<<min(f.times, 20), most))}
		if f.times == 2 && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) { // the world is behind
			w.log.Warn("failed to write "+j.resource+"; retrying", "object", j.name.String(), "err", err)
		}
	}
	w.mu.Unlock()
	w.done(j.ref, err)
}

// isRejected reports whether the server does not want what was sent.
func isRejected(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsForbidden(err)
}

// replace takes what is to be written now, in place of what was to be written before. Namespaces take turns. It leaves
// out what is being written, since that changes what is to be written next, and what failed not long ago: wait is until
// the first of that may be tried again, 0 if there is none.
func (w *writer) replace(jobs []job) (wait time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	asked, turn, turns := map[ref]bool{}, map[string]int{}, map[ref]int{}
	w.queue = slices.DeleteFunc(jobs, func(j job) bool {
		if asked[j.ref] = true; w.busy[j.ref] {
			return true
		}
		if f, ok := w.failed[j.ref]; ok && f.basis == j.basis && now.Before(f.until) {
			if left := f.until.Sub(now); wait == 0 || left < wait {
				wait = left
			}
			return true
		}
		turns[j.ref] = turn[j.name.Namespace]
		turn[j.name.Namespace]++
		return false
	})
	slices.SortStableFunc(w.queue, func(a, b job) int { return turns[a.ref] - turns[b.ref] })
	maps.DeleteFunc(w.failed, func(r ref, _ failure) bool { return !asked[r] && !w.busy[r] })
	w.ready.Broadcast()
	return wait
}

// failureOf returns the error of the last write of something, if it failed.
func (w *writer) failureOf(r ref) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failed[r].err
}
