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

// SweepResult is what a Cleaner tells about each time it looked.
type SweepResult struct {
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
	report func(SweepResult)
	wake   chan struct{}

	// mu is held while the loop writes: as long as it is free, the frontends below are those that are programmed.
	// Without that, a flow to an endpoint which a transaction brought a moment ago would look like one to an endpoint
	// that is gone.
	mu         sync.Mutex
	programmed frontends
	// inSync says that held is what is programmed: the last transaction succeeded. Otherwise nothing is deleted.
	inSync bool
	// pending are the frontends to look at, everything a look at all of them; it has no turns left when there is none.
	pending map[dataplane.Key]pendingSweep
	all     pendingSweep
}

// pendingSweep is when to look.
type pendingSweep struct {
	due time.Time
	// left is how many times to look, this one included.
	left int
}

// A frontend is looked at as soon as the transaction is in, and once more after secondSweepAfter: a packet that was on its
// way then, and translated by the old rules, enters the table only when it leaves the host.
const (
	sweepsPerChange  = 2
	secondSweepAfter = time.Second
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
func NewCleaner(c *Conn, report func(SweepResult)) *Cleaner { return newCleaner(c, report) }

func newCleaner(t table, report func(SweepResult)) *Cleaner {
	if report == nil {
		report = func(SweepResult) {}
	}
	return &Cleaner{
		table:      t,
		report:     report,
		wake:       make(chan struct{}, 1),
		programmed: frontends{},
		pending:    map[dataplane.Key]pendingSweep{},
	}
}

// Listener gives what a loop has to tell the Cleaner. Its Writing waits while the Cleaner deletes a few flows, which
// takes less than a millisecond, and never while it lists them.
func (c *Cleaner) Listener() reconcile.Listener {
	return reconcile.Listener{
		Writing:   c.mu.Lock,
		Committed: c.committed,
		Failed: func(reconcile.Failure) {
			c.inSync = false
			c.mu.Unlock()
		},
	}
}

// committed takes over a transaction that the kernel acknowledged. After one that failed, or that wrote everything
// anew, the flows of all frontends are worth a look: nobody knows what was in force meanwhile.
func (c *Cleaner) committed(commit reconcile.Commit) {
	defer c.mu.Unlock()
	now := pendingSweep{time.Now(), sweepsPerChange}
	full := commit.Full || !c.inSync
	if full {
		c.all = now
	}
	for _, k := range c.programmed.replace(commit.Before, commit.After) {
		if _, exists := c.programmed[k]; !exists || !full {
			c.pending[k] = now
		}
	}
	c.inSync = true
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
		s := c.takeDue()
		l := s.run(ctx)
		if ctx.Err() != nil {
			return nil
		}
		wait := secondSweepAfter
		if l.Err != nil {
			wait, retry = retry, min(2*retry, retryMost)
		} else {
			retry = retryFirst
		}
		c.requeue(s, l.Err != nil, time.Now().Add(wait))
		c.report(l)
		pause(ctx, restFactor*l.Worked)
	}
}

// next gives the time of the earliest turn.
func (c *Cleaner) next() (due time.Time, any bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.inSync {
		return due, false
	}
	if c.all.left > 0 {
		due, any = c.all.due, true
	}
	for _, t := range c.pending {
		if !any || t.due.Before(due) {
			due, any = t.due, true
		}
	}
	return due, any
}

// takeDue takes the turns that are due.
func (c *Cleaner) takeDue() *sweep {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, now := &sweep{Cleaner: c, keys: map[dataplane.Key]int{}}, time.Now()
	for k, t := range c.pending {
		if !t.due.After(now) {
			s.keys[k] = t.left
			delete(c.pending, k)
		}
	}
	if c.all.left > 0 && !c.all.due.After(now) {
		s.all, c.all = c.all.left, pendingSweep{}
	}
	return s
}

// requeue files what a sweep took for another turn, where there is no newer one.
func (c *Cleaner) requeue(s *sweep, failed bool, due time.Time) {
	spent := 1
	if failed {
		spent = 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, left := range s.keys {
		if _, newer := c.pending[k]; !newer && left > spent {
			c.pending[k] = pendingSweep{due, left - spent}
		}
	}
	if c.all.left == 0 && s.all > spent {
		c.all = pendingSweep{due, s.all - spent}
	}
}

// sweep is one look at some frontends.
type sweep struct {
	*Cleaner
	// keys and everything say how many turns each has left.
	keys  map[dataplane.Key]int
	all   int
	stale []flow
	// paused is the time spent on pauses; worked that since the last of them.
	paused       time.Duration
	workingSince time.Time
}

// errNotInSync ends a look: a transaction failed meanwhile, so that nobody knows what is programmed.
var errNotInSync = errors.New("conntrack: a transaction failed; flows are left alone until one succeeds")

// run lists the flows to the sweep's frontends and deletes those that are wrong.
func (s *sweep) run(ctx context.Context) SweepResult {
	start := time.Now()
	s.workingSince = start
	keys := s.frontends()
	l := SweepResult{Frontends: len(keys)}
	l.Err = s.listAll(ctx, keys, &l)
	l.Took = time.Since(start)
	l.Worked = l.Took - s.paused
	return l
}

func (s *sweep) listAll(ctx context.Context, keys []dataplane.Key, l *SweepResult) error {
	filters := s.table.filters()
	for _, q := range queries(keys, filters) {
		l.Lists++
		err := s.table.list(q, func(flows []flow) error {
			if err := s.deleteStale(flows, &l.Flows[q.family]); err != nil {
				return err
			}
			s.throttle(ctx)
			return ctx.Err()
		})
		if err != nil {
			return err
		}
		if filters && !s.table.filters() {
			return s.listAll(ctx, keys, l) // a family at a time, then
		}
		s.throttle(ctx)
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
	if s.all > 0 {
		for k := range s.programmed {
			if _, named := s.keys[k]; !named {
				keys = append(keys, k)
			}
		}
	}
	slices.SortFunc(keys, dataplane.Key.Compare)
	return keys
}

// deleteStale deletes the wrong ones of a few flows. No transaction comes between the judgement and the deletion.
func (s *sweep) deleteStale(flows []flow, count *Flows) error {
	s.lock()
	defer s.mu.Unlock()
	if !s.inSync {
		return errNotInSync
	}
	s.stale = s.stale[:0]
	for i := range flows {
		f := &flows[i]
		if !s.covers(f.frontend) {
			continue
		}
		count.Judged++
		if s.programmed.stale(f) {
			s.stale = append(s.stale, *f)
		}
	}
	if len(s.stale) == 0 {
		return nil
	}
	removed, err := s.table.remove(s.stale)
	count.Removed += removed
	return err
}

// lock waits until no transaction is under way, which is no work: that may take long.
func (s *sweep) lock() {
	start := time.Now()
	s.mu.Lock()
	waited := time.Since(start)
	s.paused += waited
	s.workingSince = s.workingSince.Add(waited)
}

// covers says whether a frontend is one of those to look at. What else the kernel listed is nobody's concern.
func (s *sweep) covers(k dataplane.Key) bool {
	if _, named := s.keys[k]; named {
		return true
	}
	if s.all == 0 {
		return false
	}
	_, exists := s.programmed[k]
	return exists
}

// throttle pauses after each stretch of work.
func (s *sweep) throttle(ctx context.Context) {
	worked := time.Since(s.workingSince)
	if worked < workAtOnce {
		return
	}
	start := time.Now()
	pause(ctx, worked)
	s.workingSince = time.Now()
	s.paused += s.workingSince.Sub(start)
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
