package conntrack

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// table is the kernel's table of flows: a *Conn.
type table interface {
	// filters says whether list can be trusted to leave out what a query does not ask for.
	filters() bool
	list(q query, do func([]flow) error) error
	remove([]flow) (removed int, err error)
}

// Look is what a Cleaner tells about each time it looked.
type Look struct {
	// Frontends is how many were looked at, Lists how often the kernel walked its table for that.
	Frontends, Lists int
	// Flows counts what was found.
	Flows ipfamily.Per[Flows]
	// Took is the time from begin to end, Worked what is left of it without the pauses.
	Took, Worked time.Duration
	// Err says why the look ended early. It will be repeated.
	Err error
}

// Flows counts flows.
type Flows struct {
	// Judged are those to the frontends that were looked at, Removed those of them that were deleted. One that is listed
	// anew counts anew.
	Judged, Removed int
}

// Cleaner removes the flows that transactions leave wrong. Make one with NewCleaner, have the loop tell its Listener,
// and Run it.
type Cleaner struct {
	table  table
	looked func(Look)
	wake   chan struct{}

	// mu is held while the loop writes: as long as it is free, the frontends below are those that are programmed.
	// Without that, a flow to an endpoint which a transaction brought a moment ago would look like one to an endpoint
	// that is gone.
	mu   sync.Mutex
	held frontends
	// sure says that held is what is programmed: the last transaction succeeded. Otherwise nothing is deleted.
	sure bool
	// turns are the frontends to look at, everything a look at all of them; it has no turns left when there is none.
	turns      map[dataplane.Key]turn
	everything turn
}

// turn is when to look.
type turn struct {
	due time.Time
	// left is how many times to look, this one included.
	left int
}

// A frontend is looked at as soon as the transaction is in, and once more after lookAgain: a packet that was on its
// way then, and translated by the old rules, enters the table only when it leaves the host.
const (
	looks     = 2
	lookAgain = time.Second
)

// After a look that failed, the next one waits for retryFirst, then for twice as long each time up to retryMost.
const (
	retryFirst = time.Second
	retryMost  = time.Minute
)

// A Cleaner works for workAtOnce and then pauses for as long; between two looks it pauses for restFactor times what
// the last one took. So a storm of changes costs a fifth of a core at most, and what piles up meanwhile is looked at
// together.
const (
	workAtOnce = 10 * time.Millisecond
	restFactor = 4
)

// NewCleaner gives a Cleaner that has seen no transaction yet. After each look it calls looked, which may be nil.
func NewCleaner(c *Conn, looked func(Look)) *Cleaner { return newCleaner(c, looked) }

func newCleaner(t table, looked func(Look)) *Cleaner {
	if looked == nil {
		looked = func(Look) {}
	}
	return &Cleaner{
		table:  t,
		looked: looked,
		wake:   make(chan struct{}, 1),
		held:   frontends{},
		turns:  map[dataplane.Key]turn{},
	}
}

// Listener gives what a loop has to tell the Cleaner. Its Writing waits while the Cleaner deletes a few flows, which
// takes less than a millisecond, and never while it lists them.
func (c *Cleaner) Listener() reconcile.Listener {
	return reconcile.Listener{
		Writing:   c.mu.Lock,
		Committed: c.committed,
		Failed: func(reconcile.Failure) {
			c.sure = false
			c.mu.Unlock()
		},
	}
}

// committed takes over a transaction that the kernel acknowledged. After one that failed, or that wrote everything
// anew, the flows of all frontends are worth a look: nobody knows what was in force meanwhile.
func (c *Cleaner) committed(commit reconcile.Commit) {
	defer c.mu.Unlock()
	now := turn{time.Now(), looks}
	full := commit.Full || !c.sure
	if full {
		c.everything = now
	}
	for _, k := range c.held.replace(commit.Before, commit.After) {
		if _, carried := c.held[k]; !carried || !full {
			c.turns[k] = now
		}
	}
	c.sure = true
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Run works until the context ends, and then returns nil. A look that fails is told to looked and repeated.
func (c *Cleaner) Run(ctx context.Context) error {
	retry := retryFirst
	for {
		due, any := c.next()
		timer := time.NewTimer(time.Until(due))
		timeout := timer.C
		if !any {
			timeout = nil
		}
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-c.wake: // an earlier turn, perhaps
			timer.Stop()
			continue
		case <-timeout:
		}
		s := c.begin()
		l := s.look(ctx)
		if ctx.Err() != nil {
			return nil
		}
		wait := lookAgain
		if l.Err != nil {
			wait, retry = retry, min(2*retry, retryMost)
		} else {
			retry = retryFirst
		}
		c.putBack(s, l.Err != nil, time.Now().Add(wait))
		c.looked(l)
		pause(ctx, restFactor*l.Worked)
	}
}

// next gives the time of the earliest turn.
func (c *Cleaner) next() (due time.Time, any bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.sure {
		return due, false
	}
	if c.everything.left > 0 {
		due, any = c.everything.due, true
	}
	for _, t := range c.turns {
		if !any || t.due.Before(due) {
			due, any = t.due, true
		}
	}
	return due, any
}

// begin takes the turns that are due.
func (c *Cleaner) begin() *sweep {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, now := &sweep{Cleaner: c, keys: map[dataplane.Key]int{}}, time.Now()
	for k, t := range c.turns {
		if !t.due.After(now) {
			s.keys[k] = t.left
			delete(c.turns, k)
		}
	}
	if c.everything.left > 0 && !c.everything.due.After(now) {
		s.everything, c.everything = c.everything.left, turn{}
	}
	return s
}

// putBack files what a sweep took for another turn, where there is no newer one.
func (c *Cleaner) putBack(s *sweep, failed bool, due time.Time) {
	spent := 1
	if failed {
		spent = 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, left := range s.keys {
		if _, newer := c.turns[k]; !newer && left > spent {
			c.turns[k] = turn{due, left - spent}
		}
	}
	if c.everything.left == 0 && s.everything > spent {
		c.everything = turn{due, s.everything - spent}
	}
}

// sweep is one look at some frontends.
type sweep struct {
	*Cleaner
	// keys and everything say how many turns each has left.
	keys       map[dataplane.Key]int
	everything int
	wrong      []flow
	// rested is the time spent on pauses; worked that since the last of them.
	rested time.Duration
	since  time.Time
}

// errUnsure ends a look: a transaction failed meanwhile, so that nobody knows what is programmed.
var errUnsure = errors.New("conntrack: a transaction failed; flows are left alone until one succeeds")

// look lists the flows to the sweep's frontends and deletes those that are wrong.
func (s *sweep) look(ctx context.Context) Look {
	start := time.Now()
	s.since = start
	keys := s.frontends()
	l := Look{Frontends: len(keys)}
	l.Err = s.work(ctx, keys, &l)
	l.Took = time.Since(start)
	l.Worked = l.Took - s.rested
	return l
}

func (s *sweep) work(ctx context.Context, keys []dataplane.Key, l *Look) error {
	filters := s.table.filters()
	for _, q := range queries(keys, filters) {
		l.Lists++
		err := s.table.list(q, func(flows []flow) error {
			if err := s.judge(flows, &l.Flows[q.family]); err != nil {
				return err
			}
			s.breathe(ctx)
			return ctx.Err()
		})
		if err != nil {
			return err
		}
		if filters && !s.table.filters() {
			return s.work(ctx, keys, l) // a family at a time, then
		}
		s.breathe(ctx)
	}
	return nil
}

// frontends gives what to look at.
func (s *sweep) frontends() []dataplane.Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []dataplane.Key
	for k := range s.keys {
		keys = append(keys, k)
	}
	if s.everything > 0 {
		for k := range s.held {
			if _, named := s.keys[k]; !named {
				keys = append(keys, k)
			}
		}
	}
	slices.SortFunc(keys, dataplane.Key.Compare)
	return keys
}

// judge deletes the wrong ones of a few flows. No transaction comes between the judgement and the deletion.
func (s *sweep) judge(flows []flow, count *Flows) error {
	s.lock()
	defer s.mu.Unlock()
	if !s.sure {
		return errUnsure
	}
	s.wrong = s.wrong[:0]
	for i := range flows {
		f := &flows[i]
		if !s.covers(f.frontend) {
			continue
		}
		count.Judged++
		if s.held.wrong(f) {
			s.wrong = append(s.wrong, *f)
		}
	}
	if len(s.wrong) == 0 {
		return nil
	}
	removed, err := s.table.remove(s.wrong)
	count.Removed += removed
	return err
}

// lock waits until no transaction is under way, which is no work: that may take long.
func (s *sweep) lock() {
	start := time.Now()
	s.mu.Lock()
	waited := time.Since(start)
	s.rested += waited
	s.since = s.since.Add(waited)
}

// covers says whether a frontend is one of those to look at. What else the kernel listed is nobody's concern.
func (s *sweep) covers(k dataplane.Key) bool {
	if _, named := s.keys[k]; named {
		return true
	}
	if s.everything == 0 {
		return false
	}
	_, carried := s.held[k]
	return carried
}

// breathe pauses after each stretch of work.
func (s *sweep) breathe(ctx context.Context) {
	worked := time.Since(s.since)
	if worked < workAtOnce {
		return
	}
	start := time.Now()
	pause(ctx, worked)
	s.since = time.Now()
	s.rested += s.since.Sub(start)
}

// pause waits, unless the context ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
