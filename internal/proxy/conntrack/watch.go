package conntrack

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Watcher gets all flows of both families from time to time.
type Watcher struct {
	// Flow gets each flow, and one perhaps twice. The Flow is valid until it returns.
	Flow func(*Flow)
	// Done is called at the end of a look that began at a time. If it failed, it is repeated.
	Done func(began time.Time, err error)
}

// watch is a Watcher with its pace.
type watch struct {
	Watcher
	period     time.Duration
	due, began time.Time

	// mu protects stopped.
	mu      sync.Mutex
	stopped bool
}

// watchShare bounds looks at everything: the next one comes after so many times as long as the last one took.
const watchShare = 20

// Watch shows a Watcher all flows at once, and from then on every period, but not so often that it would take more than
// a twentieth of the time. After stop, the Watcher is not called any more.
func (w *Walker) Watch(period time.Duration, to Watcher) (stop func()) {
	o := &watch{Watcher: to, period: period}
	u := &user{next: o.next, start: o.start, whole: true}
	w.add(u)
	w.wakeUp()
	return func() {
		w.mu.Lock()
		w.users = slices.DeleteFunc(slices.Clone(w.users), func(other *user) bool { return other == u })
		w.mu.Unlock()
		o.mu.Lock()
		o.stopped = true
		o.mu.Unlock()
	}
}

// Look shows all flows once; do may get one twice, and each is valid until it returns. It waits for Run.
func (w *Walker) Look(ctx context.Context, do func(*Flow)) error {
	ended := make(chan error, 1)
	defer w.Watch(time.Hour, Watcher{do, func(_ time.Time, err error) { ended <- err }})()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err := <-ended:
		return err
	}
}

func (o *watch) next(_, _ time.Time) (due time.Time, any bool) { return o.due, true }

func (o *watch) start() look {
	o.began = time.Now()
	return o
}

func (o *watch) queries(bool) []query { return []query{{both: true}} }

func (o *watch) see(_ context.Context, _ *pace, flows []flow) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	var f Flow
	for i := 0; i < len(flows) && !o.stopped; i++ {
		f.take(&flows[i])
		o.Flow(&f)
	}
	return nil
}

func (o *watch) done(_ context.Context, w Walked, retry time.Duration) (vain bool) {
	if o.due = o.began.Add(max(o.period, watchShare*w.Took)); w.Err != nil {
		o.due = time.Now().Add(retry)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.stopped {
		o.Done(o.began, w.Err)
	}
	return true
}
