package conntrack

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const (
	// ejectedFor is how long an endpoint must have been unhealthy before its connections are released although it serves.
	ejectedFor = 3 * time.Second
	// unansweredFor is the least time between two looks that find a flow without an answer. A little of it is left for
	// the clock.
	unansweredFor = 900 * time.Millisecond
	// openingFor is the same for a flow that its endpoint has never answered, if the endpoint no longer serves. Its client
	// still opens the connection, and loses nothing if it is sent elsewhere.
	openingFor = 200 * time.Millisecond
	// probeHolds is how long a probe without an answer says that an endpoint is dead; mostHolds is the same for the first
	// look behind it, which others may have delayed. Otherwise the endpoint would be probed again and again, each time for
	// a look that comes too late.
	probeHolds = 3 * time.Second
	mostHolds  = 15 * time.Second
	// maxSuspects bounds the flows of an endpoint that are remembered between looks. The others wait.
	maxSuspects = 1 << 14
	// defaultTimeout is the kernel's default for nf_conntrack_tcp_timeout_unacknowledged.
	defaultTimeout = 300 * time.Second
)

// releaseLook is one look at the flows to some endpoints.
type releaseLook struct {
	*Releaser
	now time.Time
	// idle is the most that tcpInfo.left of a flow can be if it had no packet for a second.
	idle uint32
	due  map[goneKey]*lookedAt
	// all says that flows to all other endpoints that do not serve are to be found, too.
	all bool
	// urgent is how many endpoints of due are urgent.
	urgent int
	doomed []flow
	counts map[releasedKey]int
}

// lookedAt is an endpoint with what a look found of it.
type lookedAt struct {
	*goneEndpoint
	flows int
	found map[flowID]time.Time
	// opening says that a flow was found that the endpoint has never answered, and that openingFor applies to. doubtful
	// says that one was found that only a probe can judge.
	opening, doubtful bool
	// drain is the port's drain deadline.
	drain time.Duration
}

type releasedKey struct {
	goneKey
	reason ReleaseReason
}

// idleLimit returns the most that tcpInfo.left can be after a second without packets.
func idleLimit(timeout time.Duration) uint32 {
	return uint32(max(timeout/time.Second-2, 0))
}

// queries returns the queries that list the flows to the endpoints.
func (l *releaseLook) queries(narrow bool) []query {
	return endpointQueries(func(yield func(netip.AddrPort) bool) {
		for k := range l.due {
			if !yield(k.endpoint) {
				return
			}
		}
	}, l.all, narrow)
}

// see deletes those of a few flows that must be released. The lock keeps transactions out between the decision and the
// deletion.
func (l *releaseLook) see(ctx context.Context, p *pace, flows []flow) error {
	if err := p.lock(ctx, &l.mu); err != nil {
		return err
	}
	defer l.mu.Unlock()
	if !l.inSync {
		return errNotInSync
	}
	l.doomed = l.doomed[:0]
	doomed := map[releasedKey]int{}
	for i := range flows {
		f := &flows[i]
		if !f.releasable() {
			continue
		}
		if k, reason, ok := l.judge(f); ok {
			l.doomed = append(l.doomed, *f)
			doomed[releasedKey{k, reason}]++
		}
	}
	if len(l.doomed) == 0 {
		return nil
	}
	if _, err := l.walker.table.remove(l.doomed); err != nil {
		return err
	}
	for k, n := range doomed {
		l.counts[k] += n
	}
	return nil
}

// done reports what the look released. It was in vain if it was for urgent endpoints and found no client of theirs.
func (l *releaseLook) done(ctx context.Context, w Walked, retry time.Duration) (vain bool) {
	if ctx.Err() != nil {
		return true
	}
	vain = l.urgent > 0
	for _, g := range l.due {
		vain = vain && len(g.found) == 0
	}
	if w.Err != nil {
		l.postpone(l, retry)
	} else {
		l.probe(ctx)
		l.requeue(l)
	}
	l.o.Report(l.result(w))
	return vain
}

func (l *releaseLook) result(w Walked) ReleaseResult {
	result := ReleaseResult{Endpoints: len(l.due), Walked: w}
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

// judge says whether a flow must be released, and why.
func (l *releaseLook) judge(f *flow) (k goneKey, reason ReleaseReason, release bool) {
	sp := l.programmed[f.frontend]
	if sp == nil {
		return k, 0, false
	}
	k = goneKey{sp.Name, f.endpoint}
	serving, early := serves(sp, f.endpoint), false
	if serving {
		since := unhealthySince(sp, f.endpoint)
		if since.IsZero() {
			return k, 0, false
		}
		early = l.now.Sub(since) < ejectedFor
	}
	g := l.due[k]
	if g == nil {
		if l.all {
			l.add(k, l.now)
		}
		return k, 0, false
	}
	g.flows++
	if !serving && sp.Drain > 0 {
		if g.drain = sp.Drain; !l.now.Before(g.since.Add(sp.Drain)) {
			return k, ReleasedDrain, true
		}
	}
	return k, ReleasedUnanswered, sp.SecondChance == snapshot.SecondChanceOn && l.unanswered(g, f, serving) && !early
}

// unhealthySince returns since when an endpoint that a port has ejected or doubts does not answer; zero if there is no
// such endpoint, or for another cause.
func unhealthySince(sp *dataplane.ServicePort, endpoint netip.AddrPort) time.Time {
	for _, list := range unhealthyLists(sp) {
		if u := snapshot.FindUnhealthy(list, endpoint); u != nil && isSilent(u) {
			return u.Since
		}
	}
	return time.Time{}
}

func unhealthyLists(sp *dataplane.ServicePort) [4][]snapshot.Unhealthy {
	return [...][]snapshot.Unhealthy{sp.Cluster.Ejected, sp.Cluster.Kept, sp.Local.Ejected, sp.Local.Kept}
}

// isSilent says that nobody was answered for some seconds. Whether a connection is released is then its own affair: it
// has no answer to what its client sent.
func isSilent(u *snapshot.Unhealthy) bool { return u.Cause == snapshot.Unanswered }

// unanswered says whether nobody answers a flow: an earlier look found it without an answer too, there has been no
// packet for a second, and the endpoint answers no probe. It remembers the flow for the next look. If the endpoint no
// longer serves, and has never answered the flow, an earlier look is enough.
//
// An endpoint that acknowledges nothing may still be alive behind a policy that forbids probes, and a client may send
// without a pause. Their packets renew the flow.
func (l *releaseLook) unanswered(g *lookedAt, f *flow, serving bool) bool {
	if f.answered && !(f.tcp.established && f.tcp.unacknowledged) {
		return false
	}
	id := flowID{client: f.client}
	copy(id.id[:], f.id)
	first, known := g.suspects[id]
	if !known {
		first = l.now
	}
	if len(g.found) < maxSuspects {
		if g.found == nil {
			g.found = map[flowID]time.Time{}
		}
		g.found[id] = first
	}
	if !f.answered && !serving {
		g.opening = true
		return l.now.Sub(first) >= openingFor
	}
	g.doubtful = true
	return l.now.Sub(first) >= unansweredFor && g.isDead(l.now) && (!f.answered || f.tcp.left <= l.idle)
}

// isDead reports whether a probe has found lately that nobody answers.
func (g *goneEndpoint) isDead(now time.Time) bool {
	holds := probeHolds
	if g.silent.After(g.looked) {
		holds = mostHolds
	}
	return now.Sub(g.silent) < holds
}

// probe probes the endpoints that need it, each once at a time. It does not wait for that, which may take a second:
// clients that open connections to these and other endpoints must not wait either.
func (l *releaseLook) probe(ctx context.Context) {
	if l.o.Probe == nil {
		return
	}
	var probed []*goneEndpoint
	var endpoints []netip.AddrPort
	l.mu.Lock()
	for k, g := range l.due {
		if g.doubtful && !g.probing {
			g.probing = true
			probed, endpoints = append(probed, g.goneEndpoint), append(endpoints, k.endpoint)
		}
	}
	l.mu.Unlock()
	if len(probed) > 0 {
		l.walker.background.Go(func() { l.probed(probed, l.now, l.o.Probe(ctx, endpoints)) })
	}
}

// probed records which endpoints answered, since a look began. If a later look could not know yet that one does not, it
// is repeated now, and confirms the first. The next look at an endpoint that nobody answers goes before others.
func (r *Releaser) probed(endpoints []*goneEndpoint, began time.Time, answers []bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for i, g := range endpoints {
		g.probing, g.silent = false, time.Time{}
		if answers[i] {
			continue
		}
		g.silent, g.urgent = now, true
		if g.looked.After(began) && g.due.After(now) {
			g.due, g.confirming = now, true
		}
	}
	r.walker.wakeUp()
}
