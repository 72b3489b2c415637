package conntrack

import (
	"context"
	"fmt"
	"sync/atomic"
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
}

// watchShare bounds looks at everything: the next one comes after so many times as long as the last one took.
const watchShare = 20

// Watch shows a Watcher all flows at once, and from then on every period, but not so often that it would take more than
// a twentieth of the time.
func (w *Walker) Watch(period time.Duration, to Watcher) {
	o := &watch{Watcher: to, period: period}
	w.add(&user{next: o.next, start: o.start, whole: true})
}

func (o *watch) next(_, _ time.Time) (due time.Time, any bool) { return o.due, true }

func (o *watch) start() look {
	o.began = time.Now()
	return o
}

func (o *watch) queries(bool) []query { return everything() }

func (o *watch) see(_ context.Context, _ *pace, flows []flow) error {
	show(flows, o.Flow)
	return nil
}

func (o *watch) done(_ context.Context, w Walked, retry time.Duration) (vain bool) {
	if o.due = o.began.Add(max(o.period, watchShare*w.Took)); w.Err != nil {
		o.due = time.Now().Add(retry)
	}
	o.Done(o.began, w.Err)
	return true
}

func everything() []query { return []query{{both: true}} }

// show shows flows of a list.
func show(flows []flow, do func(*Flow)) {
	var f Flow
	for i := range flows {
		f.take(&flows[i])
		do(&f)
	}
}

// Look shows all flows once; do may get one twice, and each is valid until it returns. It waits for Run.
func (w *Walker) Look(ctx context.Context, do func(*Flow)) error {
	return w.ask(ctx, &asked{list: func(bool) []query { return everything() },
		show: func(flows []flow) error {
			show(flows, do)
			return nil
		}}, &user{whole: true})
}

// Each calls do with all flows of both families. If the kernel interrupts the list, it begins again, and calls begin.
func (c *Conn) Each(ctx context.Context, begin func(), do func(*Flow)) error {
	err := c.listAgain(everything()[0], begin, func(flows []flow) error {
		show(flows, do)
		return ctx.Err()
	})
	if err != nil {
		return fmt.Errorf("conntrack: list flows: %w", err)
	}
	return nil
}

// asked is a look that somebody waits for. It is due at once: who asks has a pace of his own.
type asked struct {
	list  func(narrow bool) []query
	show  func(flows []flow) error
	ctx   context.Context
	taken atomic.Bool
	ended chan error
}

// ask takes a look for a user who is there for that alone.
func (w *Walker) ask(ctx context.Context, a *asked, u *user) error {
	a.ctx, a.ended = ctx, make(chan error, 1)
	u.next = func(_, _ time.Time) (due time.Time, any bool) { return due, !a.taken.Load() }
	u.start = func() look {
		if a.taken.Swap(true) {
			return nil
		}
		return a
	}
	defer w.add(u)()
	select {
	case err := <-a.ended:
		return err
	case <-ctx.Done():
		if a.taken.Swap(true) {
			return <-a.ended // it has begun
		}
		return ctx.Err()
	}
}

func (a *asked) queries(narrow bool) []query { return a.list(narrow) }

func (a *asked) see(_ context.Context, _ *pace, flows []flow) error {
	if err := a.ctx.Err(); err != nil {
		return err
	}
	return a.show(flows)
}

func (a *asked) done(_ context.Context, w Walked, _ time.Duration) (vain bool) {
	a.ended <- w.Err
	return false
}
