package conntrack

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/internal/system/wake"
)

// Walker lists the kernel's table for all who need its flows, so that one walk of the kernel serves those who need them
// at about the same time. Make one with NewWalker, hand it to its users, and call Run.
type Walker struct {
	table table
	wake  chan struct{}
	// background is what the users do beside the walks.
	background sync.WaitGroup

	// mu protects users. What is in a user is for Run alone.
	mu    sync.Mutex
	users []*user
}

// user is somebody for whom a Walker lists flows, with its pace.
type user struct {
	// next returns when flows are to be listed, if at all: not before rested, when the rest after the last look is over,
	// or not before early, when a short rest is, if clients wait for it.
	next func(rested, early time.Time) (due time.Time, any bool)
	// start starts a look at what is due; nil if nothing is any more.
	start func() look
	// mostRest bounds the rest after a look that took long.
	mostRest time.Duration
	// whole says that the user wants everything, for which others must not wait if that is much.
	whole bool

	rested, early time.Time
	// retry is how long a look that fails is put off.
	retry time.Duration
	// look is under way; nil if none is. left are the queries that are still to be answered for it.
	look look
	left []query
	Walked
}

// look is what a user wants of the table at one time.
type look interface {
	// queries selects the flows that the look is for. If they are not narrow, there is one query for each family.
	queries(narrow bool) []query
	// see judges the flows of one datagram. Others may be among them, and some may come again. An error ends the look.
	see(ctx context.Context, p *pace, flows []flow) error
	// done ends the look, which is repeated after retry if it failed. It was in vain if it was for clients that wait, and
	// found none.
	done(ctx context.Context, w Walked, retry time.Duration) (vain bool)
}

// Walked says what the lists for a look took.
type Walked struct {
	// Lists is how many times the kernel walked its table for the look, and perhaps for others.
	Lists int
	// Took is the time from start to end. Worked is the look's share of the time for its lists, without the pauses.
	Took, Worked time.Duration
	// Err says why the look ended early. It is repeated.
	Err error
}

// NewWalker returns a Walker without users.
func NewWalker(c *Conn) *Walker { return newWalker(c) }

func newWalker(t table) *Walker { return &Walker{table: t, wake: make(chan struct{}, 1)} }

// add adds a user, and returns what removes it.
func (w *Walker) add(u *user) (remove func()) {
	u.retry = retryFirst
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.users = slices.Clone(w.users); u.whole { // these are the last, and see who else is due
		w.users = append(w.users, u)
	} else {
		w.users = slices.Insert(w.users, 0, u)
	}
	w.wakeUp()
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.users = slices.DeleteFunc(slices.Clone(w.users), func(other *user) bool { return other == u })
	}
}

func (w *Walker) all() []*user {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.users
}

// wakeUp has Run ask the users anew when a look is due.
func (w *Walker) wakeUp() { wake.Up(w.wake) }

// Run lists flows whenever a user wants it, until the context ends, and then returns nil.
func (w *Walker) Run(ctx context.Context) error {
	defer w.background.Wait()
	for {
		var timeout <-chan time.Time
		var due time.Time
		for _, u := range w.all() {
			if at, any := u.next(u.rested, u.early); any && (timeout == nil || at.Before(due)) {
				due, timeout = at, time.After(time.Until(at))
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-w.wake: // perhaps something is due earlier
		case <-timeout:
			w.round(ctx, false)
		}
	}
}

// round lists flows for the looks that are due. In the pauses of a long round, there may be another one within it, so
// that nobody waits for a list of somebody else's. If there are few flows, whoever wants any is served, though it is to
// rest: the list is the same.
func (w *Walker) round(ctx context.Context, within bool) {
	r := &round{table: w.table, narrow: w.table.narrow()}
	if !within {
		r.between = func() { w.round(ctx, true) }
	}
	now := time.Now()
	for _, u := range w.all() {
		rested, early := u.rested, u.early
		if !within && !r.narrow {
			rested, early = now, now
		}
		due, any := u.next(rested, early)
		waits := u.whole && (within || r.narrow && len(r.users) > 0 && !r.users[0].whole)
		if any && !due.After(now) && u.look == nil && !waits {
			u.Walked = Walked{}
			if u.look = u.start(); u.look != nil {
				r.users = append(r.users, u)
			}
		}
	}
	r.run(ctx)
}

// round is one walk, or several, for the looks that are due at one time.
type round struct {
	table  table
	narrow bool
	users  []*user
	// between, if not nil, is called in pauses.
	between func()
	pace
}

// run lists flows until all looks have ended.
func (r *round) run(ctx context.Context) {
	r.begin()
	served, vain := r.users, true
	for len(r.users) > 0 {
		lists := r.plan()
		vain = r.end(ctx) && vain
		for _, q := range lists {
			r.list(ctx, q)
			if r.narrow && !r.table.filters() {
				break // what is left is listed anew, without a filter
			}
			vain = r.end(ctx) && vain
		}
		r.narrow = false
	}
	for _, u := range served { // those who were served together are due together again
		u.rest(vain, 0)
	}
}

// plan returns the lists that serve all looks.
func (r *round) plan() []query {
	var all []query
	for _, u := range r.users {
		u.left = u.look.queries(r.narrow)
		all = append(all, u.left...)
	}
	return merge(all)
}

// list shows a list to the looks that asked for it.
func (r *round) list(ctx context.Context, q query) {
	var asked []*user
	for _, u := range r.users {
		if n := len(u.left); n > 0 {
			if u.left = slices.DeleteFunc(u.left, q.covers); len(u.left) < n {
				asked = append(asked, u)
				u.Lists++
			}
		}
	}
	if len(asked) == 0 {
		return
	}
	_, before := r.took()
	err := r.table.list(q, func(flows []flow) (err error) {
		going := 0
		for _, u := range asked {
			if u.Err == nil {
				u.Err = u.look.see(ctx, &r.pace, flows)
			}
			if err = u.Err; err == nil {
				going++
			}
		}
		if going == 0 {
			return err
		}
		r.throttle(ctx, r.between)
		return ctx.Err()
	})
	_, after := r.took()
	for _, u := range asked {
		u.Worked += (after - before) / time.Duration(len(asked))
		if u.Err == nil {
			u.Err = err
		}
	}
	r.throttle(ctx, r.between)
}

// end ends the looks that failed, or for which nothing is left to list, and says whether all of them were in vain.
func (r *round) end(ctx context.Context) (vain bool) {
	vain = true
	r.users = slices.DeleteFunc(slices.Clone(r.users), func(u *user) bool {
		if len(u.left) > 0 && u.Err == nil {
			return false
		}
		if u.Err == nil {
			u.retry = retryFirst
		}
		u.Took, _ = r.took()
		vain = u.look.done(ctx, u.Walked, u.retry) && vain
		if u.look = nil; u.Err != nil {
			u.retry = min(2*u.retry, retryMost)
		}
		u.rest(false, u.Worked)
		return true
	})
	return vain
}

// rest has the user rest after a look that worked for a time.
func (u *user) rest(vain bool, worked time.Duration) {
	now, least := time.Now(), leastRest
	if vain {
		least = vainRest
	}
	u.rested = clock.Later(u.rested, now.Add(max(least, min(restFactor*worked, u.mostRest))))
	u.early = clock.Later(u.early, now.Add(max(least, min(worked, u.mostRest))))
}
