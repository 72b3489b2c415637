package conntrack

import (
	"context"
	"net/netip"
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
	// defaultTimeout is the kernel's default for nf_conntrack_tcp_timeout_unacknowledged, and defaultEstablished for
	// nf_conntrack_tcp_timeout_established.
	defaultTimeout     = 300 * time.Second
	defaultEstablished = 5 * 24 * time.Hour
)

// releaseLook is one look at the flows to some endpoints.
type releaseLook struct {
	releases
	now time.Time
	// idle is the most that tcpInfo.left of a flow can be if it had no packet for a second; idleAcknowledged is the same
	// for a flow of which everything is acknowledged.
	idle, idleAcknowledged uint32
	due                    map[goneKey]*lookedAt
	// all says that flows to all other endpoints that do not serve are to be found, too.
	all bool
	// urgent is how many endpoints of due are urgent.
	urgent int
}

// lookedAt is an endpoint with what a look found of it.
type lookedAt struct {
	*goneEndpoint
	flows int
	found map[flowID]suspect
	// opening says that a flow was found that the endpoint has never answered, and that openingFor applies to. doubtful
	// says that one was found that only a probe can judge. almost says that one will be released soon, if there is no
	// packet. recovered says that one was answered that had no answer at the last look.
	opening, doubtful, almost, recovered bool
	// released are the clients' addresses of the flows that are released without an answer.
	released []netip.Addr
	// drain is the port's drain deadline.
	drain time.Duration
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

func (l *releaseLook) see(ctx context.Context, p *pace, flows []flow) error {
	return l.end(ctx, p, flows, l.judge)
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
	l.o.Report(l.result(len(l.due), w))
	return vain
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

// unanswered says whether nobody answers a flow: an earlier look found it without an answer too, the endpoint has sent
// nothing since, and it answers no probe. It remembers the flow for the next look. If the endpoint no longer serves,
// and has never answered the flow, an earlier look is enough.
//
// An endpoint that has not acknowledged everything may still be alive behind a policy that forbids probes: a client may
// send without a pause. If the kernel does not count packets, those of both sides renew the flow.
func (l *releaseLook) unanswered(g *lookedAt, f *flow, serving bool) bool {
	id, now := f.identity(), suspect{l.now, f.replies}
	was, known := g.suspects[id]
	if f.answered && !(f.tcp.established && f.tcp.unacknowledged) {
		g.recovered = g.recovered || known && f.tcp.established
		return !serving && f.tcp.established && l.isCutOff(g, f)
	}
	if known && was.replies == f.replies {
		now = was
	}
	if len(g.found) < maxSuspects {
		if g.found == nil {
			g.found = map[flowID]suspect{}
		}
		g.found[id] = now
	}
	if !f.answered && !serving {
		g.opening = true
		return l.now.Sub(now.first) >= openingFor
	}
	g.doubtful = true
	if l.now.Sub(now.first) < unansweredFor || !g.isDead(l.now) {
		return false
	}
	if f.answered && !f.counted && f.tcp.left > l.idle {
		g.almost = true
		return false
	}
	if f.answered && !serving && len(g.released) < maxSuspects {
		g.released = append(g.released, f.client.Addr())
	}
	return true
}

// isCutOff says whether a flow without unacknowledged data leads nowhere, by the word of others: an earlier look
// released flows of the same client, or of two others, to the same endpoint, and none was answered since.
func (l *releaseLook) isCutOff(g *lookedAt, f *flow) bool {
	if len(g.cutOff) == 0 {
		return false
	}
	if _, same := g.cutOff[f.client.Addr()]; !same && len(g.cutOff) == 1 {
		return false
	}
	g.doubtful = true
	cut := g.isDead(l.now) && f.tcp.left <= l.idleAcknowledged
	g.almost = g.almost || !cut
	return cut
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
