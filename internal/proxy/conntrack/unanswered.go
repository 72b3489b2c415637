package conntrack

import (
	"context"
	"fmt"
	"maps"
	"net/netip"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Unanswered finds and deletes TCP flows that an endpoint has not answered. Each call takes a few walks of the kernel's
// table, however many endpoints it is for. It is not safe for concurrent use.
type Unanswered struct{ walker *Walker }

// NewUnanswered returns an Unanswered whose Delete waits for the Walker to run.
func NewUnanswered(w *Walker) *Unanswered { return &Unanswered{w} }

// WaitingFlow is a flow that its endpoint has not answered.
type WaitingFlow struct {
	// ID is the kernel's.
	ID       string
	Client   netip.Addr
	Endpoint netip.AddrPort
	Frontend dataplane.Key
}

// Delete deletes those TCP flows to some endpoints that have no answer and that doomed accepts, and returns how many
// the kernel deleted. Flows that no Service translated are never deleted, nor are those in zones other than the default
// one.
func (u *Unanswered) Delete(ctx context.Context, endpoints []netip.AddrPort, doomed func(WaitingFlow) bool) (
	deleted int, err error) {
	wanted := make(map[netip.AddrPort]bool, len(endpoints))
	for _, e := range endpoints {
		wanted[e] = true
	}
	a := &asked{list: func(narrow bool) []query { return endpointQueries(maps.Keys(wanted), false, narrow) }}
	var found []flow
	a.show = func(flows []flow) error {
		found = found[:0]
		for i := range flows {
			f := &flows[i]
			if !f.answered && f.releasable() && wanted[f.endpoint] &&
				doomed(WaitingFlow{string(f.id), f.client.Addr(), f.endpoint, f.frontend}) {
				found = append(found, *f)
			}
		}
		n, err := u.walker.table.remove(found)
		deleted += n
		return err
	}
	if err := u.walker.ask(ctx, a, &user{}); err != nil {
		return deleted, fmt.Errorf("unanswered flows to %d endpoints: %w", len(endpoints), err)
	}
	return deleted, nil
}
