package conntrack

import (
	"context"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// releases is what a look releases.
type releases struct {
	*Releaser
	doomed []flow
	ends   []connEnd
	counts map[releasedKey]int
	// reset says why some ends of released connections are not told.
	reset error
}

type releasedKey struct {
	goneKey
	reason ReleaseReason
}

// end deletes those of a few flows that must be released, and has their ends reset.
func (l *releases) end(ctx context.Context, p *pace, flows []flow,
	judge func(*flow) (goneKey, ReleaseReason, bool)) error {
	if err := l.remove(ctx, p, flows, judge); err != nil {
		return err
	}
	if err := l.walker.table.reset(l.ends); err != nil {
		l.reset = err
	}
	return nil
}

// remove deletes flows. The lock keeps transactions out between the decision and the deletion.
func (l *releases) remove(ctx context.Context, p *pace, flows []flow,
	judge func(*flow) (goneKey, ReleaseReason, bool)) error {
	l.doomed, l.ends = l.doomed[:0], l.ends[:0]
	if err := p.lock(ctx, &l.mu); err != nil {
		return err
	}
	defer l.mu.Unlock()
	if !l.mu.inSync {
		return errNotInSync
	}
	doomed := map[releasedKey]int{}
	for i := range flows {
		f := &flows[i]
		if !f.releasable() {
			continue
		}
		if k, reason, ok := judge(f); ok {
			l.doomed = append(l.doomed, *f)
			l.ends = append(l.ends, f.toReset(reason)...)
			doomed[releasedKey{k, reason}]++
		}
	}
	if len(l.doomed) == 0 {
		return nil
	}
	if _, err := l.walker.table.remove(l.doomed); err != nil {
		return err
	}
	if l.counts == nil {
		l.counts = map[releasedKey]int{}
	}
	for k, n := range doomed {
		l.counts[k] += n
	}
	return nil
}

func (l *releases) result(endpoints int, w Walked) ReleaseResult {
	result := ReleaseResult{Endpoints: endpoints, Reset: l.reset, Walked: w}
	for k, n := range l.counts {
		result.Released = append(result.Released, Released{k.port, k.endpoint, k.reason, n})
	}
	slices.SortFunc(result.Released, func(a, b Released) int { return a.Endpoint.Compare(b.Endpoint) })
	return result
}

// releasable says whether a flow may be released at all: it is one of TCP that a Service translated, in the default
// zone.
func (f *flow) releasable() bool {
	return f.frontend.Protocol == snapshot.TCP && !f.zoned && f.translated()
}

// toReset returns the ends of a flow that are to be told that it is released: not a client that is still opening its
// connection, nor an endpoint that does not answer.
func (f *flow) toReset(why ReleaseReason) []connEnd {
	switch {
	case !f.answered:
		return nil
	case why == ReleasedUnanswered:
		return []connEnd{f.clientEnd()}
	}
	return []connEnd{f.clientEnd(), f.endpointEnd()}
}
