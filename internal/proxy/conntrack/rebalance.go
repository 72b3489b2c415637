package conntrack

import (
	"context"
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// A port is rebalanced by looks rebalanceEvery apart, or later if its connections are not idle, until no endpoint has
// more than its share and a fifth, or rebalanceFor is over.
const (
	rebalanceEvery = time.Second
	rebalanceFor   = time.Hour
	// maxMoves and maxNodeMoves bound how many connections of a namespace, and of all, a look ends. Of a port, it is a
	// twentieth.
	maxMoves     = 50
	maxNodeMoves = 100
	// maxRebalanced bounds how many ports are rebalanced at a time, and maxNamespaceRebalanced those of a namespace.
	maxRebalanced          = 1024
	maxNamespaceRebalanced = 32
)

// rebalancing is a port to which endpoints were added.
type rebalancing struct {
	namespace  string
	since, due time.Time
	// counts are the established connections that the last look found; nil if there was none.
	counts map[netip.AddrPort]int
	// vain counts looks that found connections to end, of which none was idle.
	vain int
}

// rebalanceIfAdded begins to rebalance a port if its pool got an endpoint, or if the Service has just asked for it.
func (r *Releaser) rebalanceIfAdded(was, now *dataplane.ServicePort, t time.Time) {
	pool := now.RebalancePool()
	if pool == nil || was == nil {
		return
	}
	added := was.Rebalance == 0
	for _, before := range []*dataplane.Pool{was.Cluster, was.Local} {
		if len(before.Endpoints) > 0 {
			eachMissing(pool.Endpoints, before.Endpoints, func(netip.AddrPort) { added = true })
		}
	}
	k := now.Frontends[0].Key
	if !added {
		return
	}
	if m := r.moving[k]; m != nil {
		m.since, m.due, m.vain = t, t, 0
		return
	}
	same := 0
	for _, m := range r.moving {
		if m.namespace == now.Name.Service.Namespace {
			same++
		}
	}
	if len(r.moving) < maxRebalanced && same < maxNamespaceRebalanced {
		r.moving[k] = &rebalancing{namespace: now.Name.Service.Namespace, since: t, due: t}
	}
}

// nextMoves returns when the next look is due.
func (r *Releaser) nextMoves(rested, _ time.Time) (due time.Time, any bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.moving {
		if !any || m.due.Before(due) {
			due, any = m.due, true
		}
	}
	return clock.Later(due, rested), any && r.mu.inSync
}

// rebalanceLook is one look at the flows of ports that are rebalanced.
type rebalanceLook struct {
	releases
	now                         time.Time
	established, unacknowledged time.Duration
	ports                       map[dataplane.Key]*rebalanced
	keys                        []dataplane.Key
	// left is how many connections of each namespace may be ended, and leftAll of all.
	left    map[string]int
	leftAll int
}

// rebalanced is a port with what a look has counted of it.
type rebalanced struct {
	*rebalancing
	pool  *dataplane.Pool
	found map[netip.AddrPort]int
	// excess is how many connections of an endpoint are to be ended, and moved how many were.
	excess map[netip.AddrPort]int
	moved  int
}

// takeMoves starts a look at the ports that are due, and forgets those that have changed so that they are not
// rebalanced.
func (r *Releaser) takeMoves() look {
	established, unacknowledged := r.o.Timeouts()
	r.mu.Lock()
	defer r.mu.Unlock()
	l := &rebalanceLook{releases: releases{Releaser: r}, now: time.Now(), established: established,
		unacknowledged: unacknowledged, ports: map[dataplane.Key]*rebalanced{}, left: map[string]int{},
		leftAll: maxNodeMoves}
	for k, m := range r.moving {
		sp := r.programmed[k]
		if sp == nil || sp.RebalancePool() == nil || l.now.Sub(m.since) > rebalanceFor {
			delete(r.moving, k)
			continue
		}
		if m.due.After(l.now) {
			continue
		}
		p := &rebalanced{rebalancing: m, pool: sp.RebalancePool(), found: map[netip.AddrPort]int{}}
		p.excess = excess(p.pool, m.counts)
		l.ports[k], l.left[m.namespace] = p, maxMoves
		for _, f := range sp.Frontends {
			l.keys = append(l.keys, f.Key)
		}
	}
	if len(l.ports) == 0 {
		return nil
	}
	return l
}

// excess returns how many connections a look may end of each endpoint of a pool that has more than its share and a
// fifth: down to the share, and a twentieth of all.
func excess(pool *dataplane.Pool, counts map[netip.AddrPort]int) map[netip.AddrPort]int {
	total, weights, over := 0, 0, 0
	for _, e := range pool.Endpoints {
		total += counts[e.AddrPort]
		weights += max(int(e.Weight), 1)
	}
	out := map[netip.AddrPort]int{}
	for _, e := range pool.Endpoints {
		share, n := total*max(int(e.Weight), 1), counts[e.AddrPort]
		if 5*weights*(n-1) >= 6*share { // more than 6/5 of the share, rounded up
			out[e.AddrPort] = n - share/weights
			over += out[e.AddrPort]
		}
	}
	budget := max(total/20, 1)
	for e, n := range out {
		if over > budget {
			out[e] = (n*budget + over - 1) / over
		}
	}
	return out
}

func (l *rebalanceLook) queries(narrow bool) []query { return queries(l.keys, narrow) }

// see counts flows, and ends idle ones of endpoints that have too many.
func (l *rebalanceLook) see(ctx context.Context, p *pace, flows []flow) error {
	return l.end(ctx, p, flows, l.judge)
}

// judge says whether a flow is to be ended.
func (l *rebalanceLook) judge(f *flow) (k goneKey, reason ReleaseReason, release bool) {
	sp := l.programmed[f.frontend]
	if sp == nil || !f.tcp.established {
		return k, 0, false
	}
	p := l.ports[sp.Frontends[0].Key]
	if p == nil {
		return k, 0, false
	}
	if p.excess[f.endpoint] == 0 || l.left[p.namespace] == 0 || l.leftAll == 0 || sp.RebalancePool() == nil ||
		!l.isIdle(f, sp.Rebalance) || !l.isStillIdle(f, sp.Rebalance) {
		p.found[f.endpoint]++
		return k, 0, false
	}
	p.excess[f.endpoint]--
	l.left[p.namespace]--
	l.leftAll--
	p.moved++
	return goneKey{sp.Name, f.endpoint}, ReleasedRebalance, true
}

// isIdle says whether there was no packet for a time, and nothing is on its way. A flow that is forgotten sooner than
// unacknowledged data is may have had a timeout of its own: nobody knows when its last packet was.
func (l *rebalanceLook) isIdle(f *flow, least time.Duration) bool {
	left := time.Duration(f.tcp.left+1) * time.Second
	return f.answered && !f.tcp.unacknowledged && !f.tcp.unreceived && l.established-left >= least &&
		(left > l.unacknowledged+time.Second || l.established <= l.unacknowledged)
}

// isStillIdle reads the flow anew: others were listed before it, and a request may have come meanwhile.
func (l *rebalanceLook) isStillIdle(f *flow, least time.Duration) bool {
	now, ok, err := l.walker.table.again(f)
	return ok && err == nil && l.isIdle(&now, least)
}

// done schedules the next look at each port, or none if its shares are even.
func (l *rebalanceLook) done(ctx context.Context, w Walked, retry time.Duration) (vain bool) {
	if ctx.Err() != nil {
		return true
	}
	l.mu.Lock()
	every := max(rebalanceEvery, watchShare*w.Worked)
	for k, p := range l.ports {
		even := len(p.excess)+len(excess(p.pool, p.found)) == 0 // in two looks
		switch first := p.counts == nil; {
		case w.Err != nil:
			p.due = time.Now().Add(retry)
			continue
		case even && !first && l.moving[k] == p.rebalancing && !p.since.After(l.now):
			delete(l.moving, k)
		case p.moved > 0 || first || l.left[p.namespace] == 0 || l.leftAll == 0:
			p.vain, p.due = 0, l.now.Add(every)
		default:
			p.vain, p.due = min(p.vain+1, 10), l.now.Add(max(every, min(rebalanceEvery<<p.vain, longestPause)))
		}
		p.counts = p.found
	}
	l.mu.Unlock()
	if result := l.result(len(l.ports), w); len(result.Released) > 0 || w.Err != nil {
		l.o.Report(result)
	}
	return false
}
