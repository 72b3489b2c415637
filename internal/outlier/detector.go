// Package outlier finds TCP endpoints that do not answer this node, or refuse connections. The kernel gathers evidence,
// probes confirm it, and the result is the Health of Services, from which the planner decides what is ejected. It also
// deletes the unanswered flows to such endpoints, so that their clients' next packets choose again.
//
// docs/decisions/0017-second-chance.md describes the rules.
package outlier

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/conntrack"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Evidence reads what the kernel has gathered.
type Evidence interface {
	// Read returns the endpoints that something was seen of within the last seconds. It is called by one goroutine.
	Read() ([]dataplane.Evidence, error)
}

// Prober probes endpoints. It is safe for concurrent use.
type Prober interface {
	// Probe tries to connect to an endpoint until a connection is accepted, or a time of its own is over.
	Probe(ctx context.Context, endpoint netip.AddrPort) Outcome
}

// Flows is the kernel's table of flows: a *conntrack.Unanswered. Its methods are called one at a time.
type Flows interface {
	Delete(ctx context.Context, endpoints []netip.AddrPort,
		doomed func(endpoint netip.AddrPort, frontend dataplane.Key) bool) (int, error)
	Answers(ctx context.Context, endpoint netip.AddrPort) (conntrack.Answers, error)
}

// Options are what a Detector works with. All but Ejected are required.
type Options struct {
	Evidence Evidence
	Prober   Prober
	Flows    Flows
	// Put takes deltas that have nothing but Health. It must not block.
	Put func(snapshot.Delta)
	Log *slog.Logger
	// Ejected, if not nil, is called when an endpoint is ejected from a Service. It must not block.
	Ejected func(service snapshot.Name, endpoint netip.AddrPort, cause snapshot.Cause)
}

// Detector watches the endpoints of the programmed Services. Call New, add its Listener to the loop, and call Run.
type Detector struct {
	o    Options
	wake chan struct{}

	// inbox holds the Services that were committed since Run looked, nil for those that are gone.
	inboxMu sync.Mutex
	inbox   map[snapshot.Name]*dataplane.Service

	// mu guards the fields below. Nobody does I/O with it.
	mu       sync.Mutex
	services services
	machine  *machine
	// put holds what was put last, of Services with an unhealthy endpoint.
	put   map[snapshot.Name]*snapshot.Health
	stats Stats

	// The fields below are those of Run.
	// last is the evidence of the last reading. readAt is when the next one is due.
	last       map[netip.AddrPort]dataplane.Evidence
	readAt     time.Time
	readFailed bool
	probed     chan probed
	flushed    chan flushed
	flushing   bool
	flushAfter time.Time
	background sync.WaitGroup

	flowsMu sync.Mutex
	// doubting is held by the one probe that compares answers.
	doubting sync.Mutex
}

type probed struct {
	endpoint netip.AddrPort
	finding
}

// flushed is the result of deleting flows.
type flushed struct {
	flows int
	took  time.Duration
	err   error
}

// New returns a Detector that knows of no Service.
func New(o Options) *Detector {
	if o.Ejected == nil {
		o.Ejected = func(snapshot.Name, netip.AddrPort, snapshot.Cause) {}
	}
	return &Detector{
		o: o, wake: make(chan struct{}, 1), inbox: map[snapshot.Name]*dataplane.Service{},
		services: services{byName: map[snapshot.Name]*dataplane.Service{}}, machine: newMachine(),
		put: map[snapshot.Name]*snapshot.Health{}, last: map[netip.AddrPort]dataplane.Evidence{},
		probed: make(chan probed), flushed: make(chan flushed),
	}
}

// Listener returns what the loop must call.
func (d *Detector) Listener() reconcile.Listener { return reconcile.Listener{Committed: d.committed} }

func (d *Detector) committed(c reconcile.Commit) {
	d.inboxMu.Lock()
	for i, svc := range c.After {
		switch {
		case svc != nil:
			d.inbox[svc.Name] = svc
		case c.Before[i] != nil:
			d.inbox[c.Before[i].Name] = nil
		}
	}
	d.inboxMu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// Evidence is read every readEvery, or less often if it takes long: about a fiftieth of the time. Nothing is read
// while no Service asks for it. On a busy machine a reading seems to take long; even so it is not put off for more than
// mostReadPause.
const (
	readEvery     = 250 * time.Millisecond
	readShare     = 50
	mostReadPause = time.Second
	idle          = time.Hour
)

// Run works until ctx is done, and then returns nil.
func (d *Detector) Run(ctx context.Context) error {
	defer d.background.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.wake:
		case <-timer.C:
		case p := <-d.probed:
			d.recordProbe(p)
		case f := <-d.flushed:
			d.recordFlush(f)
		}
		d.takeCommits()
		if d.reads() && !time.Now().Before(d.readAt) {
			d.read()
		}
		d.act(ctx)
		timer.Reset(time.Until(d.nextTime()))
	}
}

// takeCommits takes over what was committed.
func (d *Detector) takeCommits() {
	d.inboxMu.Lock()
	inbox := d.inbox
	d.inbox = map[snapshot.Name]*dataplane.Service{}
	d.inboxMu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, svc := range inbox {
		d.replace(name, svc)
	}
	now := time.Now()
	for name, svc := range inbox {
		d.publish(name)
		eachPort(svc, func(sp *dataplane.ServicePort) {
			d.eachTrack(sp, func(t *track) { d.checkEjected(now, t) })
		})
	}
}

// checkEjected sees to it that the flows to an endpoint are deleted once it is ejected.
func (d *Detector) checkEjected(now time.Time, t *track) {
	was := t.flush.ejected
	t.flush.ejected = t.ejectedFrom(snapshot.Name{})
	if was || !t.flush.ejected || t.state != unhealthy {
		return
	}
	t.announced = true
	if t.cause == snapshot.Unanswered { // nobody waits for one that refuses
		t.flush.due, t.flush.again = now, true
	}
	d.stats.Ejections[t.cause]++
	for _, name := range t.services() {
		if t.ejectedFrom(name) {
			d.o.Ejected(name, t.endpoint, t.cause)
		}
	}
	d.log(t).Warn("ejected an endpoint: " + t.cause.String())
}

// log returns a logger that names an endpoint.
func (d *Detector) log(t *track) *slog.Logger {
	return d.o.Log.With("service", t.ports[0].Name.Service.String(), "endpoint", t.endpoint.String(),
		"since", t.since.Format(time.RFC3339), "probes", t.probes)
}

// services returns the names of the Services that have the endpoint, sorted and unique.
func (t *track) services() (names []snapshot.Name) {
	for _, sp := range t.ports {
		names = append(names, sp.Name.Service)
	}
	return slices.Compact(names)
}

func (d *Detector) reads() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.services.watched > 0
}

// read reads the evidence, and suspects endpoints of which there is more than before.
func (d *Detector) read() {
	start := time.Now()
	list, err := d.o.Evidence.Read()
	var grown map[netip.AddrPort]bool
	if err == nil {
		grown = d.grown(list)
	}
	d.mu.Lock()
	if err != nil {
		d.stats.ReadErrors++
	}
	unknown := map[netip.AddrPort]bool{}
	for e := range grown {
		if d.machine.tracks[e] == nil && mayProbe(e.Addr()) {
			unknown[e] = true
		}
	}
	ports := d.services.find(unknown)
	for e := range grown {
		d.machine.suspect(start, e, ports[e])
	}
	d.mu.Unlock()
	if err != nil && !d.readFailed {
		d.o.Log.Warn("endpoints that do not answer are not found for now", "err", err)
	}
	d.readFailed = err != nil
	d.readAt = time.Now().Add(min(max(readEvery, readShare*time.Since(start)), mostReadPause))
}

// mayProbe says whether an address is not one that means this node or its link, whoever named it in a slice.
func mayProbe(a netip.Addr) bool {
	return !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.IsMulticast() && !a.IsUnspecified()
}

// grown returns the endpoints of which something was seen since the last reading.
func (d *Detector) grown(list []dataplane.Evidence) map[netip.AddrPort]bool {
	grown, next := map[netip.AddrPort]bool{}, make(map[netip.AddrPort]dataplane.Evidence, len(list))
	for _, e := range list {
		// A count that has become smaller began anew.
		if was := d.last[e.Endpoint]; e.Unanswered+e.Refused > 0 && e != was {
			grown[e.Endpoint] = true
		}
		next[e.Endpoint] = e
	}
	d.last = next
	return grown
}

// act does whatever is due.
func (d *Detector) act(ctx context.Context) {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.machine.advance(now) {
		d.changed(now, t)
	}
	for _, t := range d.machine.start(now) {
		refs := d.references(t)
		d.background.Go(func() {
			p := probed{t.endpoint, d.probe(ctx, t.endpoint, refs)}
			select {
			case d.probed <- p:
			case <-ctx.Done():
			}
		})
	}
	for _, t := range d.machine.tracks {
		if t.state == unhealthy {
			d.announceKept(now, t)
			d.scheduleFlush(now, t)
		}
	}
	d.startFlush(ctx, now)
}

// announceKept logs that an unhealthy endpoint is not ejected.
func (d *Detector) announceKept(now time.Time, t *track) {
	if t.announced || now.Sub(t.judged) < time.Second {
		return
	}
	t.announced = true
	d.log(t).Warn("an unhealthy endpoint stays, since too few others are left: " + t.cause.String())
}

// changed publishes that an endpoint's health has changed, and logs it.
func (d *Detector) changed(now time.Time, t *track) {
	for _, name := range t.services() {
		d.publish(name)
	}
	switch {
	case t.state != unhealthy:
		d.log(t).Info("an endpoint is back", "after", now.Sub(t.judged).Round(time.Millisecond).String())
	case !slices.ContainsFunc(t.ports, func(sp *dataplane.ServicePort) bool {
		return sp.SecondChance == snapshot.SecondChanceOn
	}) && !t.announced:
		t.announced = true
		d.log(t).Warn("an endpoint would be ejected: " + t.cause.String())
	}
}

// publish puts the health of a Service if it has changed.
func (d *Detector) publish(name snapshot.Name) {
	h, was := d.health(name), d.put[name]
	switch {
	case h == nil && was == nil:
		return
	case h == nil:
		delete(d.put, name)
	case was != nil && slices.Equal(h.Unhealthy, was.Unhealthy):
		return
	default:
		d.put[name] = h
	}
	d.o.Put(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{name: h}})
}

// repeat puts the health of a track's Services again: a Service that is deleted and made again loses it.
func (d *Detector) repeat(t *track) {
	for _, name := range t.services() {
		if h := d.put[name]; h != nil {
			d.o.Put(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{name: h}})
		}
	}
}

// nextTime returns when Run must look again.
func (d *Detector) nextTime() time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	at := time.Now().Add(idle)
	if d.services.watched > 0 {
		at = d.readAt
	}
	if next, any := d.machine.next(); any && next.Before(at) {
		at = later(next, time.Now().Add(pace))
	}
	return at
}

// pace bounds how often Run looks if something is due that has to wait, as probes do when there are too many.
const pace = 50 * time.Millisecond

func (d *Detector) recordProbe(p probed) {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stats.Probes[p.outcome]++
	t := d.machine.tracks[p.endpoint]
	switch {
	case d.machine.found(now, p.endpoint, p.finding):
		d.changed(now, t)
	case t != nil && t.state == unhealthy:
		d.repeat(t)
	}
}

// probe probes an endpoint and its references.
func (d *Detector) probe(ctx context.Context, endpoint netip.AddrPort, refs []netip.AddrPort) (f finding) {
	answers := make(chan Outcome, len(refs))
	refCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, ref := range refs {
		d.background.Go(func() { answers <- d.o.Prober.Probe(refCtx, ref) })
	}
	if f.outcome = d.o.Prober.Probe(ctx, endpoint); f.outcome != Silent {
		return f
	}
	for range refs {
		// A refusal is an answer, too.
		if a := <-answers; a == Accepted || a == Rejected {
			f.proven = true
			return f
		}
	}
	d.compareAnswers(ctx, endpoint, &f)
	return f
}

// Answers are compared after compareTicks, which take a second or longer if timers are late, or still longer if the
// kernel's table is large.
const (
	compareTicks = 50
	compareShare = 20
)

// compareAnswers finds out whether an endpoint answers clients though it does not answer this node. It does so for one
// endpoint at a time, and otherwise nothing, since it reads the whole table twice.
func (d *Detector) compareAnswers(ctx context.Context, endpoint netip.AddrPort, f *finding) {
	if !d.doubting.TryLock() {
		return
	}
	defer d.doubting.Unlock()
	start := time.Now()
	before, err := d.answers(ctx, endpoint)
	if err != nil || len(before.Waiting) < enoughWaiting {
		return
	}
	took := time.Since(start)
	for n := 0; ctx.Err() == nil && (n < compareTicks || time.Since(start) < (compareShare+1)*took); n++ {
		pause(ctx, tick)
	}
	now, err := d.answers(ctx, endpoint)
	if err != nil {
		return
	}
	f.waiting = len(now.Waiting)
	for id := range maps.Keys(now.Answered) {
		if _, old := before.Answered[id]; !old {
			f.answered = true
		}
	}
}

func (d *Detector) answers(ctx context.Context, endpoint netip.AddrPort) (conntrack.Answers, error) {
	d.flowsMu.Lock()
	defer d.flowsMu.Unlock()
	return d.o.Flows.Answers(ctx, endpoint)
}

func pause(ctx context.Context, wait time.Duration) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
