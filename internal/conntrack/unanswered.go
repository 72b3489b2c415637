package conntrack

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Unanswered finds and deletes TCP flows that an endpoint has not answered. Each call walks the kernel's table. It is
// not safe for concurrent use, and needs a Conn of its own.
type Unanswered struct{ conn *Conn }

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

// Delete deletes the TCP flows to an endpoint that have no answer, if begun at a frontend that doomed accepts, and
// returns how many the kernel deleted. Flows that no Service translated are never deleted, nor are those in zones other
// than the default one.
func (u *Unanswered) Delete(ctx context.Context, endpoint netip.AddrPort,
	doomed func(frontend dataplane.Key) bool) (deleted int, err error) {
	var found []flow
	err = u.each(ctx, endpoint, func(flows []flow) error {
		found = found[:0]
		for i := range flows {
			if f := &flows[i]; !f.answered && doomed(f.frontend) {
				found = append(found, *f)
			}
		}
		n, err := u.conn.remove(found)
		deleted += n
		return err
	})
	if err != nil {
		return deleted, fmt.Errorf("unanswered flows to %v: %w", endpoint, err)
	}
	return deleted, nil
}

// Answers returns who waits for an endpoint, of the flows that a Service translated.
func (u *Unanswered) Answers(ctx context.Context, endpoint netip.AddrPort) (Answers, error) {
	a := Answers{Waiting: map[netip.Addr]struct{}{}, Answered: map[string]struct{}{}}
	err := u.each(ctx, endpoint, func(flows []flow) error {
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

// each calls do with the translated TCP flows to an endpoint, one datagram at a time.
func (u *Unanswered) each(ctx context.Context, endpoint netip.AddrPort, do func([]flow) error) error {
	q := query{family: ipfamily.Of(endpoint.Addr()), protocol: snapshot.TCP, endpoint: endpoint}
	if !u.conn.filters() {
		q = query{family: q.family}
	}
	var found []flow
	err := u.conn.list(q, func(flows []flow) error {
		found = found[:0]
		for i := range flows {
			f := &flows[i]
			if f.frontend.Protocol == snapshot.TCP && f.endpoint == endpoint && f.translated() && !f.zoned {
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
	if err == nil && q.protocol != 0 && !u.conn.filters() {
		return u.each(ctx, endpoint, do) // the kernel does not filter: list all
	}
	return err
}
