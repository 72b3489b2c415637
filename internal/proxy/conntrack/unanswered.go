package conntrack

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Unanswered finds and deletes TCP flows that an endpoint has not answered. Each call takes a few walks of the kernel's
// table, however many endpoints it is for. It is not safe for concurrent use.
type Unanswered struct {
	walker *Walker
	asked  atomic.Pointer[unansweredLook]
}

// NewUnanswered returns an Unanswered whose Delete waits for the Walker to run.
func NewUnanswered(w *Walker) *Unanswered {
	u := &Unanswered{walker: w}
	w.add(&user{next: u.next, start: u.start})
	return u
}

// WaitingFlow is a flow that its endpoint has not answered.
type WaitingFlow struct {
	// ID is the kernel's.
	ID       string
	Endpoint netip.AddrPort
	Frontend dataplane.Key
}

// unansweredLook is one call of Delete.
type unansweredLook struct {
	*Unanswered
	ctx     context.Context
	wanted  map[netip.AddrPort]bool
	doomed  func(WaitingFlow) bool
	found   []flow
	deleted int
	ended   chan error
}

// Delete deletes those TCP flows to some endpoints that have no answer and that doomed accepts, and returns how many
// the kernel deleted. Flows that no Service translated are never deleted, nor are those in zones other than the default
// one.
func (u *Unanswered) Delete(ctx context.Context, endpoints []netip.AddrPort, doomed func(WaitingFlow) bool) (
	deleted int, err error) {
	l := &unansweredLook{Unanswered: u, ctx: ctx, wanted: make(map[netip.AddrPort]bool, len(endpoints)), doomed: doomed,
		ended: make(chan error, 1)}
	for _, e := range endpoints {
		l.wanted[e] = true
	}
	u.asked.Store(l)
	u.walker.wakeUp()
	select {
	case err = <-l.ended:
	case <-ctx.Done():
		if err = ctx.Err(); !u.asked.CompareAndSwap(l, nil) {
			err = <-l.ended // it has begun
		}
	}
	if err != nil {
		return l.deleted, fmt.Errorf("unanswered flows to %d endpoints: %w", len(endpoints), err)
	}
	return l.deleted, nil
}

// next says that a call is due at once: its caller has a pace of its own.
func (u *Unanswered) next(_, _ time.Time) (due time.Time, any bool) {
	return due, u.asked.Load() != nil
}

func (u *Unanswered) start() look {
	if l := u.asked.Swap(nil); l != nil {
		return l
	}
	return &unansweredLook{ended: make(chan error, 1)} // the caller has gone
}

func (l *unansweredLook) queries(narrow bool) []query {
	return endpointQueries(maps.Keys(l.wanted), false, narrow)
}

// see deletes flows of a datagram.
func (l *unansweredLook) see(_ context.Context, _ *pace, flows []flow) error {
	l.found = l.found[:0]
	for i := range flows {
		f := &flows[i]
		if !f.answered && f.releasable() && l.wanted[f.endpoint] &&
			l.doomed(WaitingFlow{ID: string(f.id), Endpoint: f.endpoint, Frontend: f.frontend}) {
			l.found = append(l.found, *f)
		}
	}
	n, err := l.walker.table.remove(l.found)
	if l.deleted += n; err != nil {
		return err
	}
	return l.ctx.Err()
}

func (l *unansweredLook) done(_ context.Context, w Walked, _ time.Duration) (vain bool) {
	l.ended <- w.Err
	return l.deleted == 0
}
