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

// WaitingFlow is a flow that its endpoint has not answered.
type WaitingFlow struct {
	// ID is the kernel's.
	ID       string
	Endpoint netip.AddrPort
	Frontend dataplane.Key
}

// Delete deletes those TCP flows to some endpoints that have no answer and that doomed accepts, and returns how many
// the kernel deleted. Flows that no Service translated are never deleted, nor are those in zones other than the default
// one.
func (u *Unanswered) Delete(ctx context.Context, endpoints []netip.AddrPort, doomed func(WaitingFlow) bool) (
	deleted int, err error) {
	var found []flow
	err = u.each(ctx, endpoints, func(flows []flow) error {
		found = found[:0]
		for i := range flows {
			f := &flows[i]
			if !f.answered && doomed(WaitingFlow{ID: string(f.id), Endpoint: f.endpoint, Frontend: f.frontend}) {
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
