package conntrack

import (
	"context"
	"maps"
	"math"
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Prober connects to TCP endpoints, and returns for each whether its host answers: it accepts or refuses. It may take
// about a second. An endpoint that it had no time to probe counts as one that answers.
type Prober func(ctx context.Context, endpoints []netip.AddrPort) (answers []bool)

// ReleaseReason says why connections were released.
type ReleaseReason uint8

const (
	// ReleasedUnanswered means that the endpoint does not acknowledge what the client sent, nor answer a probe.
	ReleasedUnanswered ReleaseReason = iota
	// ReleasedDrain means that the drain deadline of the Service is over.
	ReleasedDrain
	// ReleasedRebalance means that the endpoint serves, and had more than its share of the connections, of which this one
	// was idle.
	ReleasedRebalance
)

var releaseReasonNames = [...]string{"unanswered", "drain", "rebalance"}

func (r ReleaseReason) String() string { return releaseReasonNames[r] }

// Released counts connections to one endpoint of a port that a look released.
type Released struct {
	Port     dataplane.PortName
	Endpoint netip.AddrPort
	Reason   ReleaseReason
	Flows    int
}

// ReleaseResult is what a Releaser reports after each look.
type ReleaseResult struct {
	// Endpoints is how many endpoints the look was for.
	Endpoints int
	// Released has at most one entry for each endpoint and reason.
	Released []Released
	// Reset says why ends of released connections are reset at their next packet only; nil if they are reset at once.
	Reset error
	Walked
}

// ReleaserOptions configure a Releaser.
type ReleaserOptions struct {
	// Probe, if nil, means that no endpoint counts as dead: only drain deadlines release connections.
	Probe Prober
	// Timeouts returns the kernel's timeout for established connections, and the least of those for connections with
	// unacknowledged data; nil means the kernel's defaults.
	Timeouts func() (established, unacknowledged time.Duration)
	// Report, if not nil, is called after each look.
	Report func(ReleaseResult)
}

// Releaser deletes TCP flows to endpoints that are gone, and has their clients reset: at once, or else by the client's
// next packet, which is translated anew. Make one with NewReleaser, add its Listener to the loop, and run the Walker.
//
// An endpoint has departed from a port when the port has no longer got it among its serving endpoints. That alone
// releases nothing: the endpoint may still answer its connections, for hours.
type Releaser struct {
	walker *Walker
	o      ReleaserOptions

	// mu protects what follows, as in a Cleaner.
	mu         gate
	programmed frontends
	// kept holds the other TCP frontends in force, whose connections are not released.
	kept frontends
	// gone holds the endpoints that have departed, and those that are ejected as unanswered.
	gone map[goneKey]*goneEndpoint
	// inFront counts the last looks in a row that left others than urgent endpoints out.
	inFront int
	// discover is when all flows to all frontends are to be listed, to find endpoints that departed unseen; zero if they
	// need not be.
	discover time.Time
	// moving holds the ports that are rebalanced, by their first frontend.
	moving map[dataplane.Key]*rebalancing
}

// goneKey is an endpoint of a port.
type goneKey struct {
	port     dataplane.PortName
	endpoint netip.AddrPort
}

// goneEndpoint is an endpoint whose flows are looked at from time to time. Looks alone use suspects.
type goneEndpoint struct {
	// since is when the endpoint departed, or was ejected.
	since time.Time
	due   time.Time
	// probing says that the endpoint is being probed. silent is when it last answered no probe; zero if it answered the
	// last one.
	probing bool
	silent  time.Time
	// looked is when the last look at it began.
	looked time.Time
	// urgent says that clients may be opening connections to the endpoint, since it departed just now, or the last look
	// found some; or that a probe has just shown that nobody answers; or that a flow is about to be released.
	urgent bool
	// looks is how many looks there were, without those that confirm another. empty is how many of the last ones found no
	// flow.
	looks, empty int
	confirming   bool
	// quick counts the looks that came after openingFor, for clients that wait.
	quick int
	// suspects are the flows without an answer that the last look found.
	suspects map[flowID]suspect
	// cutOff are clients whose flows were released without an answer, while no other flow got one.
	cutOff map[netip.Addr]struct{}
}

// suspect is a flow without an answer: when it was found first, and how many packets its endpoint had sent by then.
type suspect struct {
	first   time.Time
	replies uint64
}

// flowID identifies a flow well enough to recognize it in the next look.
type flowID struct {
	client netip.AddrPort
	id     [4]byte
}

func (f *flow) identity() flowID {
	id := flowID{client: f.client}
	copy(id.id[:], f.id)
	return id
}

// Flows are looked at when an endpoint departs, then after pauses of a second, then after longer ones up to
// longestPause. A look that finds unanswered flows is repeated after confirmAfter.
const (
	shortPauses  = 8
	confirmAfter = time.Second
	longestPause = time.Minute
	// forCompany is how much later an endpoint without flows is looked at for the second time, unless others are looked at
	// before: even an empty table takes long to list.
	forCompany = 500 * time.Millisecond
	// mostQuick bounds the looks that come after openingFor.
	mostQuick = 10
	// mostInFront bounds the looks in a row that are only for urgent endpoints: the kernel walks its table for each
	// endpoint, and some may have many.
	mostInFront = 2
)

// longestRest bounds the pause after a look at a very large table, or on a busy host. Clients wait.
const longestRest = 2 * time.Second

// maxGone bounds how many endpoints are looked at. If there are more, they are discovered later.
const maxGone = 1 << 14

// settleTime is how long the first transactions may take before all flows are listed.
const settleTime = time.Second

// NewReleaser returns a Releaser that has seen no transaction yet. A look that fails is reported and repeated.
func NewReleaser(w *Walker, o ReleaserOptions) *Releaser {
	if o.Report == nil {
		o.Report = func(ReleaseResult) {}
	}
	if o.Timeouts == nil {
		o.Timeouts = func() (established, unacknowledged time.Duration) { return defaultEstablished, defaultTimeout }
	}
	r := &Releaser{walker: w, o: o, programmed: frontends{}, kept: frontends{}, gone: map[goneKey]*goneEndpoint{},
		moving: map[dataplane.Key]*rebalancing{}}
	w.add(&user{next: r.next, start: func() look { return r.takeDue() }, mostRest: longestRest})
	w.add(&user{next: r.nextMoves, start: r.takeMoves, mostRest: math.MaxInt64})
	return r
}

// Listener returns what the loop must call. Writing waits while the Releaser deletes a few flows, which takes less than
// a millisecond. It never waits for a list or a probe.
func (r *Releaser) Listener() reconcile.Listener { return r.mu.listener(r.committed) }

// committed records a transaction that the kernel accepted.
func (r *Releaser) committed(c reconcile.Commit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.open()
	now := time.Now()
	r.programmed.replaceTCP(c.Before, c.After, released)
	r.kept.replaceTCP(c.Before, c.After, func(svc *dataplane.Service, sp *dataplane.ServicePort) bool {
		return sp.Name.Protocol == snapshot.TCP && !released(svc, sp)
	})
	before := make([]earlierPorts, len(c.Before))
	for i, svc := range c.Before {
		before[i] = portsBefore(svc)
	}
	r.rename(c.After, before)
	for i, after := range c.After {
		if after == nil || after.OverCapacity {
			continue
		}
		for _, sp := range after.Ports {
			if sp.Name.Protocol == snapshot.TCP {
				r.follow(before[i].of(sp), sp, now)
				r.rebalanceIfAdded(before[i].of(sp), sp, now)
			}
		}
	}
	if c.First {
		r.discover = now.Add(settleTime)
	}
	r.mu.inSync = true
	r.walker.wakeUp()
}

// portFamily is a port in one IP family.
type portFamily struct {
	port dataplane.PortName
	is4  bool
}

// rename moves the endpoints that departed from a port to the port's new name. Connections know the port by its
// frontend, which does not change with the name.
func (r *Releaser) rename(services []*dataplane.Service, before []earlierPorts) {
	renamed := map[portFamily]dataplane.PortName{}
	for i, after := range services {
		for sp := range after.EachPort() {
			if was := before[i].of(sp); was != nil && was.Name != sp.Name {
				renamed[familyOf(was)] = sp.Name
			}
		}
	}
	if len(renamed) == 0 {
		return
	}
	moved := map[goneKey]*goneEndpoint{}
	for k, g := range r.gone { // two ports may have swapped their names
		if name, ok := renamed[portFamily{k.port, k.endpoint.Addr().Is4()}]; ok {
			moved[goneKey{name, k.endpoint}] = g
			delete(r.gone, k)
		}
	}
	maps.Copy(r.gone, moved)
}

// follow records which endpoints a change of a port removed, ejected, or brought back. The port may be new.
func (r *Releaser) follow(was, now *dataplane.ServicePort, t time.Time) {
	if was != nil {
		eachMissing(was.Serving, now.Serving, func(endpoint netip.AddrPort) {
			k := goneKey{now.Name, endpoint}
			r.add(k, t)
			r.restart(k, t)
		})
	}
	r.forgetServing(now)
	for _, list := range unhealthyLists(now) {
		for _, u := range list {
			if isSilent(&u) {
				r.add(goneKey{now.Name, u.Endpoint}, t)
			}
		}
	}
}

// forgetServing forgets the endpoints that a port has, unless it has ejected them.
func (r *Releaser) forgetServing(sp *dataplane.ServicePort) {
	if len(r.gone) < len(sp.Serving) {
		maps.DeleteFunc(r.gone, func(k goneKey, _ *goneEndpoint) bool {
			return k.port == sp.Name && serves(sp, k.endpoint) && unhealthySince(sp, k.endpoint).IsZero()
		})
		return
	}
	for _, e := range sp.Serving {
		if k := (goneKey{sp.Name, e.AddrPort}); r.gone[k] != nil && unhealthySince(sp, e.AddrPort).IsZero() {
			delete(r.gone, k)
		}
	}
}

// eachMissing calls do for each endpoint of was that now has not. Both are sorted.
func eachMissing(was, now []dataplane.Endpoint, do func(netip.AddrPort)) {
	for _, e := range was {
		for len(now) > 0 && now[0].Compare(e.AddrPort) < 0 {
			now = now[1:]
		}
		if len(now) == 0 || now[0].AddrPort != e.AddrPort {
			do(e.AddrPort)
		}
	}
}

// restart looks anew at an endpoint that departed just now. It may have been ejected before.
func (r *Releaser) restart(k goneKey, t time.Time) {
	if g := r.gone[k]; g != nil {
		g.since, g.due, g.looks, g.empty, g.quick, g.urgent, g.cutOff = t, t, 0, 0, 0, true, nil
	}
}

// add records that an endpoint is gone, unless that is known.
func (r *Releaser) add(k goneKey, t time.Time) {
	if r.gone[k] != nil {
		return
	}
	if len(r.gone) >= maxGone {
		if r.discover.IsZero() {
			r.discover = t.Add(longestPause)
		}
		return
	}
	r.gone[k] = &goneEndpoint{since: t, due: t}
}

// next returns when the next look is due.
func (r *Releaser) next(rested, early time.Time) (due time.Time, any bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.mu.inSync {
		return due, false
	}
	due, any = clock.Later(r.discover, rested), !r.discover.IsZero()
	for _, g := range r.gone {
		at := clock.Later(g.due, rested)
		switch {
		case g.urgent:
			at = clock.Later(g.due, early)
		case g.empty > 0:
			at = clock.Later(g.due.Add(forCompany), rested)
		}
		if !any || at.Before(due) {
			due, any = at, true
		}
	}
	return due, any
}

// takeDue starts a look for the endpoints that are due, or for the urgent ones among them, if these are so few that the
// others would take more time.
func (r *Releaser) takeDue() *releaseLook {
	established, unacknowledged := r.o.Timeouts()
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	l := &releaseLook{releases: releases{Releaser: r}, now: now, idle: idleLimit(unacknowledged),
		idleAcknowledged: idleLimit(established), due: map[goneKey]*lookedAt{}}
	var others []goneKey
	for k, g := range r.gone {
		if !g.due.After(now) {
			l.due[k] = &lookedAt{goneEndpoint: g}
			if !g.urgent {
				others = append(others, k)
			}
		}
	}
	l.urgent = len(l.due) - len(others)
	if len(others) > 0 && l.urgent > 0 && l.urgent <= maxSingleEndpoints && r.inFront < mostInFront {
		r.inFront++
		for _, k := range others {
			delete(l.due, k)
		}
		return l
	}
	r.inFront = 0
	if !r.discover.IsZero() && !r.discover.After(now) {
		l.all, r.discover = true, time.Time{}
	}
	return l
}

// postpone repeats a look that failed. What it found is not used.
func (r *Releaser) postpone(l *releaseLook, wait time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	again := time.Now().Add(wait)
	for _, g := range l.due {
		g.due = again
	}
	if l.all && r.discover.IsZero() {
		r.discover = again
	}
}

// requeue schedules the next look for each endpoint, and forgets those without flows.
func (r *Releaser) requeue(l *releaseLook) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, g := range l.due {
		g.suspects, g.looked = g.found, l.now
		if g.since.After(l.now) {
			continue // it departed during the look, and restart has made the next one due
		}
		if g.empty++; g.flows > 0 {
			g.empty = 0
		}
		if g.empty == 2 {
			if r.gone[k] == g.goneEndpoint {
				delete(r.gone, k)
			}
			continue
		}
		g.due = l.now.Add(g.nextPause(len(g.found) > 0))
		g.hearsay()
		if g.urgent = (g.opening || g.almost) && g.quick < mostQuick; g.urgent {
			g.quick++
			g.due = l.now.Add(openingFor)
		}
		if deadline := g.since.Add(g.drain); g.drain > 0 && deadline.After(l.now) && deadline.Before(g.due) {
			g.due = deadline
		}
	}
}

// hearsay keeps what a look has found for flows whose clients do not send.
func (g *lookedAt) hearsay() {
	if g.recovered {
		g.cutOff = nil
		return
	}
	if len(g.released) > 0 && g.cutOff == nil {
		g.cutOff = map[netip.Addr]struct{}{}
	}
	for _, client := range g.released {
		g.cutOff[client] = struct{}{}
		g.almost = true
	}
}

// nextPause returns how long to wait for the next look.
func (g *goneEndpoint) nextPause(suspects bool) time.Duration {
	if g.looks >= shortPauses && suspects && !g.confirming {
		g.confirming = true
		return confirmAfter
	}
	g.confirming = false
	g.looks++
	if g.looks <= shortPauses {
		return confirmAfter
	}
	return min(confirmAfter<<min(g.looks-shortPauses, 10), longestPause)
}

// frontend returns the port of a TCP frontend in force; nil if there is none.
func (r *Releaser) frontend(k dataplane.Key) *dataplane.ServicePort {
	if sp := r.programmed[k]; sp != nil {
		return sp
	}
	return r.kept[k]
}

// appendSome appends TCP frontends in force, but no more of each family than queries has use for.
func (r *Releaser) appendSome(to []dataplane.Key) []dataplane.Key {
	var some ipfamily.Per[int]
	for _, fs := range []frontends{r.programmed, r.kept} {
		for k := range fs {
			if n := &some[ipfamily.Of(k.Addr)]; *n <= maxSingle {
				to = append(to, k)
				*n++
			}
		}
	}
	return to
}

// filterPorts says which ports of a Service count.
type filterPorts func(*dataplane.Service, *dataplane.ServicePort) bool

// released says whether connections to a port may be released. Of a Service with more endpoints than allowed nobody
// knows which ones serve. IPVS remembers its connections by itself.
func released(svc *dataplane.Service, sp *dataplane.ServicePort) bool {
	return sp.Name.Protocol == snapshot.TCP && !svc.OverCapacity && sp.Scheduling == nil
}

// replaceTCP replaces those frontends of Services by those of others in the same order.
func (fs frontends) replaceTCP(before, after []*dataplane.Service, which filterPorts) {
	for _, svc := range before {
		for sp, f := range svc.EachFrontend() {
			if fs[f.Key] == sp { // otherwise another Service already has it
				delete(fs, f.Key)
			}
		}
	}
	// A key may move from one Service to another: remove all old keys before adding the first new one.
	for _, svc := range after {
		for sp, f := range svc.EachFrontend() {
			if which(svc, sp) {
				fs[f.Key] = sp
			}
		}
	}
}

// earlierPorts are the ports that a Service had before a change, by first frontend and by name. A Service may have
// thousands.
type earlierPorts struct {
	byFrontend map[dataplane.Key]*dataplane.ServicePort
	byName     map[portFamily]*dataplane.ServicePort
}

// portsBefore indexes the ports of a Service, which may be nil.
func portsBefore(svc *dataplane.Service) (p earlierPorts) {
	if svc == nil {
		return p
	}
	p.byFrontend = make(map[dataplane.Key]*dataplane.ServicePort, len(svc.Ports))
	p.byName = make(map[portFamily]*dataplane.ServicePort, len(svc.Ports))
	for _, sp := range svc.Ports {
		p.byFrontend[sp.Frontends[0].Key], p.byName[familyOf(sp)] = sp, sp
	}
	return p
}

// of returns what a port was: the port with its first frontend, whatever its name was, or else the one with its name
// and family; nil if the port is new.
func (p earlierPorts) of(now *dataplane.ServicePort) *dataplane.ServicePort {
	if was := p.byFrontend[now.Frontends[0].Key]; was != nil {
		return was
	}
	return p.byName[familyOf(now)]
}

func familyOf(sp *dataplane.ServicePort) portFamily {
	return portFamily{sp.Name, sp.Frontends[0].Key.Addr.Is4()}
}

// samePort reports whether two ports are of one Service, and have the same first frontend, or the same name and family.
func samePort(was, now *dataplane.ServicePort) bool {
	return was.Name.Service == now.Name.Service &&
		(was.Frontends[0].Key == now.Frontends[0].Key || familyOf(was) == familyOf(now))
}
