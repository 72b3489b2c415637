package conntrack

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Unanswered finds and deletes TCP flows that an endpoint has not answered. Each call walks the kernel's table a few
// times, however many endpoints it is for. It is not safe for concurrent use, and needs a Conn of its own.
type Unanswered struct{ table table }

// NewUnanswered returns an Unanswered that uses a Conn.
func NewUnanswered(c *Conn) *Unanswered { return &Unanswered{c} }

// Answers says who waits for an endpoint, and whom it has answered.
type Answers struct {
	// Waiting are the addresses of clients that have no answer, at most a few.
	Waiting map[netip.Addr]struct{}
	// Answered are the kernel's ids of flows that have one, at most some thousands.
	Answered map[string]struct{}
}

// Bounds of Answers. Two waiting clients are as good as a hundred.
const (
	maxWaiting  = 16
	maxAnswered = 4096
)

// Delete deletes the TCP flows to some endpoints that have no answer, if begun at a frontend that doomed accepts, and
// returns how many the kernel deleted. Flows that no Service translated are never deleted, nor are those in zones other
// than the default one.
func (u *Unanswered) Delete(ctx context.Context, endpoints []netip.AddrPort,
	doomed func(endpoint netip.AddrPort, frontend dataplane.Key) bool) (deleted int, err error) {
	var found []flow
	err = u.each(ctx, endpoints, func(flows []flow) error {
		found = found[:0]
		for i := range flows {
			if f := &flows[i]; !f.answered && doomed(f.endpoint, f.frontend) {
				found = append(found, *f)
			}
		}
		n, err := u.table.remove(found)
		deleted += n
		return err
	})
	if err != nil {
		return deleted, fmt.Errorf("unanswered flows to %d endpoints: %w", len(endpoints), err)
	}
	return deleted, nil
}

// Answers returns who waits for an endpoint, of the flows that a Service translated.
func (u *Unanswered) Answers(ctx context.Context, endpoint netip.AddrPort) (Answers, error) {
	a := Answers{Waiting: map[netip.Addr]struct{}{}, Answered: map[string]struct{}{}}
	err := u.each(ctx, []netip.AddrPort{endpoint}, func(flows []flow) error {
		for i := range flows {
			switch f := &flows[i]; {
			case !f.answered && len(a.Waiting) < maxWaiting:
				a.Waiting[f.client.Addr()] = struct{}{}
			case f.answered && len(a.Answered) < maxAnswered:
				a.Answered[string(f.id)] = struct{}{}
			}
		}
		return nil
	})
	if err != nil {
		return Answers{}, fmt.Errorf("flows to %v: %w", endpoint, err)
	}
	return a, nil
}

// each calls do with the translated TCP flows to some endpoints, one datagram at a time.
func (u *Unanswered) each(ctx context.Context, endpoints []netip.AddrPort, do func([]flow) error) error {
	wanted := make(map[netip.AddrPort]bool, len(endpoints))
	for _, e := range endpoints {
		wanted[e] = true
	}
	narrow := u.table.narrow()
	var found []flow
	for _, q := range endpointQueries(slices.Values(endpoints), false, narrow) {
		err := u.table.list(q, func(flows []flow) error {
			found = found[:0]
			for i := range flows {
				f := &flows[i]
				if f.frontend.Protocol == snapshot.TCP && wanted[f.endpoint] && f.translated() && !f.zoned {
					found = append(found, *f)
				}
			}
			if len(found) > 0 {
				if err := do(found); err != nil {
					return err
				}
			}
			return ctx.Err()
		})
		if err != nil {
			return err
		}
		if narrow && !u.table.filters() {
			return u.each(ctx, endpoints, do) // now one family at a time
		}
	}
	return nil
}
