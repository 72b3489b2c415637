package conntrack

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// table is the kernel's table of flows: a *Conn.
type table interface {
	// filters says whether list leaves out flows that a query does not ask for.
	filters() bool
	// narrow says whether queries should ask for less than all flows of a family: the kernel filters, and has many.
	narrow() bool
	list(q query, do func([]flow) error) error
	remove([]flow) (removed int, err error)
	// again reads a flow anew; ok is false if it is gone. It is valid until the next call.
	again(*flow) (f flow, ok bool, err error)
	// reset has ends of connections reset whose flows are removed.
	reset([]connEnd) error
}

// SweepResult is what a Cleaner reports after each sweep.
type SweepResult struct {
	// Frontends is how many frontends were checked.
	Frontends int
	// Flows counts the flows that were found.
	Flows ipfamily.Per[Flows]
	Walked
}

// Flows counts flows.
type Flows struct {
	// Judged counts the flows to the frontends that were checked, and Removed those of them that were deleted. If the
	// kernel lists a flow again, it counts again.
	Judged, Removed int
}

// Cleaner removes flows that a transaction made stale. Make one with NewCleaner, add its Listener to the loop, and run
// the Walker.
type Cleaner struct {
	walker *Walker
	report func(SweepResult)

	// mu protects what follows. While nothing is written, programmed holds the frontends that are in force. During a
	// transaction no flow is judged: one to an endpoint that has just been added would look like a flow to a removed one.
	mu         gate
	programmed frontends
	// tcp knows the TCP frontends in force. Without it, nil, flows of TCP are left alone.
	tcp *Releaser
	// asKubeProxy leaves the flows alone that kube-proxy leaves alone.
	asKubeProxy bool
	// unfinished says that what is to be followed by a check of every frontend was written in part.
	unfinished bool
	// pending holds the frontends to check, and all is a check of every frontend. all.left is 0 if there is none.
	pending map[dataplane.Key]pendingSweep
	all     pendingSweep
}

// pendingSweep says when to check, and how often.
type pendingSweep struct {
	due time.Time
	// left is how many times to check, this time included.
	left int
}

// A frontend is checked as soon as its transaction is committed, and again after secondSweepAfter. At the first check,
// packets may still be on their way that the old rules translated. Their flows enter the table only when they leave the
// host.
const (
	sweepsPerChange  = 2
	secondSweepAfter = time.Second
)

// NewCleaner returns a Cleaner that has seen no transaction yet. After each sweep it calls report, which may be nil. A
// sweep that fails is reported and repeated.
func NewCleaner(w *Walker, report func(SweepResult)) *Cleaner {
	if report == nil {
		report = func(SweepResult) {}
	}
	c := &Cleaner{walker: w, report: report, programmed: frontends{}, pending: map[dataplane.Key]pendingSweep{}}
	w.add(&user{next: c.next, start: func() look { return c.takeDue() }, mostRest: math.MaxInt64})
	return c
}

// SetTCP names the Releaser that listens to the same loop, after the Cleaner. Call it before anything else.
func (c *Cleaner) SetTCP(r *Releaser) { c.tcp = r }

// SetAsKubeProxy has the Cleaner leave the flows alone that kube-proxy leaves alone, or no longer. It may be called at
// any time.
func (c *Cleaner) SetAsKubeProxy(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asKubeProxy = on
}

// Listener returns what the loop must call. Writing waits while the Cleaner deletes a few flows, which takes less than
// a millisecond. It never waits while the Cleaner lists them.
func (c *Cleaner) Listener() reconcile.Listener { return c.mu.listener(c.committed) }

// committed records a transaction that the kernel accepted. The flows of all frontends are checked after the first
// state, after a failed transaction, and after one that wrote everything or repaired something: nobody knows what was
// in force before.
func (c *Cleaner) committed(commit reconcile.Commit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.open()
	now := pendingSweep{time.Now(), sweepsPerChange}
	full := c.checkAll(commit, now)
	for _, k := range c.programmed.replace(commit.Before, commit.After) {
		if _, exists := c.programmed[k]; !exists || !full {
			c.pending[k] = now
		}
	}
	if !full && c.tcp != nil {
		for _, k := range newTCP(commit.Before, commit.After) {
			c.pending[k] = now
		}
	}
	c.mu.inSync = true
	c.walker.wakeUp()
}

// checkAll says whether a transaction is followed by a check of every frontend, and schedules it. If the state is
// written in parts, the check comes when it is complete, and once a little after the first part: to complete it may
// take long.
func (c *Cleaner) checkAll(commit reconcile.Commit, now pendingSweep) bool {
	began := c.unfinished
	if !began && !commit.Full && !commit.First && !commit.Repaired && c.mu.inSync {
		return false
	}
	c.unfinished = len(commit.Left) > 0
	switch {
	case !c.unfinished:
		c.all = now
	case !began:
		c.all = pendingSweep{now.due.Add(secondSweepAfter), sweepsPerChange}
	}
	return true
}

// next returns when the earliest pending sweep is due.
func (c *Cleaner) next(rested, _ time.Time) (due time.Time, any bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.mu.inSync {
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
	return clock.Later(due, rested), any
}

// takeDue starts a sweep of everything that is due.
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

// requeue schedules the next check of what a sweep has checked, unless a newer one is pending.
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

// sweep is one check of some frontends.
type sweep struct {
	*Cleaner
	// keys and all say how many checks are left for each, this one included.
	keys map[dataplane.Key]int
	all  int
	// result counts what the sweep has found so far.
	result SweepResult
	stale  ipfamily.Per[[]flow]
}

// errNotInSync ends a sweep: a transaction failed during it, so nobody knows what is programmed.
var errNotInSync = errors.New("conntrack: a transaction failed; flows are left alone until one succeeds")

func (s *sweep) queries(narrow bool) []query {
	keys, n := s.frontends()
	s.result.Frontends = n
	list := queries(keys, narrow)
	for i := range list {
		list[i].unanswered = list[i].protocol == snapshot.TCP // no other one is stale
	}
	return list
}

func (s *sweep) done(ctx context.Context, w Walked, retry time.Duration) (vain bool) {
	if ctx.Err() != nil {
		return true
	}
	wait := secondSweepAfter
	if w.Err != nil {
		wait = retry
	}
	s.requeue(s, w.Err != nil, time.Now().Add(wait))
	s.result.Walked = w
	s.report(s.result)
	return s.result.Flows[ipfamily.IPv4].Removed+s.result.Flows[ipfamily.IPv6].Removed == 0
}

// frontends returns the frontends to check, in any order, and how many they are. Of those of TCP it may leave out what
// makes no difference to the queries.
func (s *sweep) frontends() (keys []dataplane.Key, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys = slices.Collect(maps.Keys(s.keys))
	if s.all > 0 {
		for k := range s.programmed {
			if _, named := s.keys[k]; !named {
				keys = append(keys, k)
			}
		}
	}
	n = len(keys)
	if s.all > 0 && s.tcp != nil && !s.asKubeProxy {
		s.tcp.mu.Lock()
		defer s.tcp.mu.Unlock()
		keys = s.tcp.appendSome(keys)
		n += len(s.tcp.programmed) + len(s.tcp.kept)
	}
	return keys, n
}

// see deletes the stale ones of a few flows. The lock keeps transactions out between the decision and the deletion.
func (s *sweep) see(ctx context.Context, p *pace, flows []flow) error {
	if err := p.lock(ctx, &s.mu); err != nil {
		return err
	}
	defer s.mu.Unlock()
	if !s.mu.inSync {
		return errNotInSync
	}
	if s.tcp != nil { // the loop closes in the same order, and then opens both: the Releaser's is about to open
		if err := p.lock(ctx, &s.tcp.mu); err != nil {
			return err
		}
		defer s.tcp.mu.Unlock()
	}
	for i := range s.stale {
		s.stale[i] = s.stale[i][:0]
	}
	for i := range flows {
		f := &flows[i]
		if !s.covers(f.frontend) {
			continue
		}
		family := ipfamily.Of(f.frontend.Addr)
		s.result.Flows[family].Judged++
		if s.isStale(f) && !(s.asKubeProxy && s.programmed.leftByKubeProxy(f)) {
			s.stale[family] = append(s.stale[family], *f)
		}
	}
	for family, stale := range s.stale {
		removed, err := s.walker.table.remove(stale)
		s.result.Flows[family].Removed += removed
		if err != nil {
			return err
		}
	}
	return nil
}

// covers says whether a frontend is one of those to check. The kernel may list other flows, too.
func (s *sweep) covers(k dataplane.Key) bool {
	if _, named := s.keys[k]; named {
		return true
	}
	if s.all == 0 {
		return false
	}
	if k.Protocol == snapshot.TCP {
		return s.tcp != nil && s.tcp.frontend(k) != nil
	}
	_, exists := s.programmed[k]
	return exists
}

// isStale says whether a flow to a checked frontend must be deleted.
func (s *sweep) isStale(f *flow) bool {
	if f.frontend.Protocol == snapshot.TCP {
		return s.tcp != nil && staleTCP(f, s.tcp.frontend(f.frontend))
	}
	return s.programmed.stale(f)
}
