package status

import (
	"fmt"
	"time"
)

// Unsynced says why not everything that the node has read is programmed; empty if it is.
func (s *Status) Unsynced() string {
	p, q := &s.Pending, &s.Quarantined
	switch {
	case s.First == nil:
		return "not all Services are programmed yet"
	case s.Failing != nil:
		return "transactions fail: " + s.Failing.Error
	case len(s.Unread) > 0:
		return fmt.Sprintf("%s cannot be read: %s", s.Unread[0].File, s.Unread[0].Error)
	case q.Count > 0 && len(q.Services) > 0:
		more := ""
		if q.Count > 1 {
			more = fmt.Sprintf(", and %d more", q.Count-1)
		}
		return fmt.Sprintf("the kernel rejects Service %s: %s%s", q.Services[0].Service, q.Services[0].Error, more)
	case p.Services+p.EndpointSlices > 0 || p.LagSeconds > 0:
		return fmt.Sprintf("%d changes of Services and %d of EndpointSlices are pending, the oldest for %.1f s",
			p.Services, p.EndpointSlices, p.LagSeconds)
	}
	return ""
}

// Steady returns a copy without what changes as time passes: two are equal if nothing happened between them.
func (s *Status) Steady() *Status {
	c := *s
	c.Time, c.Pending.LagSeconds = time.Time{}, 0
	if c.Drift.Checked != nil {
		c.Drift.Checked = new(time.Time)
	}
	return &c
}
