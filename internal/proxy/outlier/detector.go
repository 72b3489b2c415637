// Package outlier finds TCP endpoints that answer no client of this node. The kernel gathers what clients see, a probe
// clears an endpoint that accepts it, and the result is the Health of Services, from which the planner decides what is
// ejected. It also deletes flows that wait for an endpoint in vain, so that their clients' next packets choose again.
//
// docs/decisions/0017-second-chance.md describes the rules.
package outlier

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/internal/system/wake"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Evidence reads what the kernel has gathered. It is called by one goroutine.
type Evidence interface {
	// Read returns which endpoints did not answer, or refused, at which frontends within the last seconds.
	Read() ([]dataplane.Evidence, error)
	// Answers returns the endpoints that answered anybody within the last minutes.
	Answers() ([]dataplane.Answer, error)
	// Forsaken returns clients that an endpoint accepted within the last minutes, and does not accept now.
	Forsaken() ([]dataplane.Pair, error)
	// Accepted returns clients that an endpoint accepted within the last minutes.
	Accepted() ([]dataplane.Pair, error)
}

// Prober probes endpoints. It is safe for concurrent use.
type Prober interface {
	// Probe tries to connect to an endpoint until a connection is accepted, or a time of its own is over.
	Probe(ctx context.Context, endpoint netip.AddrPort, how Manner) Outcome
}

// Manner says how an endpoint is probed.
type Manner struct {
	// Gently means with fewer packets, of which too many may get lost.
	Gently bool
	// Path, if not empty, is asked for by HTTP.
	Path string
}

// Flows is the kernel's table of flows: a *conntrack.Unanswered. Its method is called once at a time.
type Flows interface {
	Delete(ctx context.Context, endpoints []netip.AddrPort, doomed func(conntrack.WaitingFlow) bool) (int, error)
}

// Options are what a Detector works with. All but Ejected and LastResort are required.
type Options struct {
	Evidence Evidence
	Prober   Prober
	Flows    Flows
	// Put takes deltas that have nothing but Health. It must not block.
	Put func(snapshot.Delta)
	Log *slog.Logger
	// Ejected, if not nil, is called when an endpoint is ejected from a Service. It must not block.
	Ejected func(service snapshot.Name, endpoint netip.AddrPort, cause snapshot.Cause)
	// LastResort, if not nil, is called when an endpoint that is not ready is used. It must not block.
	LastResort func(service snapshot.Name, endpoint netip.AddrPort)
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
	// last is the evidence of the last reading. readAt, answersAt and proveAt are when the next readings are due.
	last map[seen]dataplane.Evidence
	// owners are the Services that had the frontends of the last new evidence.
	owners                     map[dataplane.Key]snapshot.Name
	readAt, answersAt, proveAt time.Time
	readFailed                 bool
	probed                     chan probed
	flushed                    chan flushed
	flushing                   bool
	flushAfter                 time.Time
	background                 sync.WaitGroup
}

// seen is what evidence is about.
type seen struct {
	frontend dataplane.Key
	endpoint netip.AddrPort
}

type probed struct {
	trackKey
	outcome Outcome
}

// New returns a Detector that knows of no Service.
func New(o Options) *Detector {
	if o.Ejected == nil {
		o.Ejected = func(snapshot.Name, netip.AddrPort, snapshot.Cause) {}
	}
	if o.LastResort == nil {
		o.LastResort = func(snapshot.Name, netip.AddrPort) {}
	}
	d := &Detector{
		o: o, wake: make(chan struct{}, 1), inbox: map[snapshot.Name]*dataplane.Service{},
		services: services{byName: map[snapshot.Name]*dataplane.Service{}}, machine: newMachine(),
		put: map[snapshot.Name]*snapshot.Health{}, last: map[seen]dataplane.Evidence{},
		probed: make(chan probed), flushed: make(chan flushed),
	}
	d.machine.began = time.Now()
	return d
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
	wake.Up(d.wake)
}

// Evidence is read every readEvery, or less often if that is much work: about a fiftieth of a processor's time, but not
// less often than every mostReadPause. Nothing is read while no Service asks for it. Answers are read as often, or less
// often if there are many: they take up to a two-hundredth of the time while nobody is under suspicion.
const (
	readEvery        = 250 * time.Millisecond
	readShare        = 50
	mostReadPause    = time.Second
	answersShare     = 200
	mostAnswersPause = 5 * time.Second
	idle             = time.Hour
)

// restAfter returns how long to rest after some work, before evidence is read again.
func restAfter(took time.Duration) time.Duration {
	return min(max(readEvery, readShare*took), mostReadPause)
}

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
		d.prove()
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
			d.eachTrack(svc.Name, sp, func(t *track) {
				d.checkEjected(now, t)
				d.checkResort(t)
			})
		})
	}
}

// checkEjected sees to it that the flows to an endpoint are deleted once it is ejected.
func (d *Detector) checkEjected(now time.Time, t *track) {
	was := t.flush.ejected
	t.flush.ejected = t.ejected()
	if was || !t.flush.ejected || t.state != unhealthy {
		return
	}
	t.announced = true
	if t.cause == snapshot.Unanswered { // nobody waits for one that refuses
		t.flush.due, t.flush.again = now, true
	}
	d.stats.Ejections[t.cause]++
	d.o.Ejected(t.service, t.endpoint, t.cause)
	d.log(t).Warn("ejected an endpoint: " + t.cause.String())
}

// log returns a logger that names an endpoint.
func (d *Detector) log(t *track) *slog.Logger {
	return d.o.Log.With("service", t.service.String(), "endpoint", t.endpoint.String(),
		"since", t.since.Format(time.RFC3339), "probes", t.probes)
}

func (d *Detector) reads() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.services.watched > 0
}

// read reads the evidence and the answers, and suspects endpoints of which there is more evidence than before.
func (d *Detector) read() {
	start := time.Now()
	var err error
	var grown map[seen]snapshot.Cause
	took := work(func() {
		var list []dataplane.Evidence
		if list, err = d.o.Evidence.Read(); err == nil {
			grown = d.grown(list)
		}
	})
	answers, answersErr := d.readAnswers(start, len(grown) > 0)
	d.mu.Lock()
	if err = errors.Join(err, answersErr); err != nil {
		d.stats.ReadErrors++
	}
	if answers != nil {
		d.machine.answers.observe(start, answers)
	}
	d.suspect(start, grown)
	d.mu.Unlock()
	if err != nil && !d.readFailed {
		d.o.Log.Warn("endpoints that do not answer are not found for now", "err", err)
	}
	d.readFailed = err != nil
	d.readAt = time.Now().Add(restAfter(took))
}

// readAnswers reads the answers if that is due: soon, if an endpoint is under suspicion. nil means that it is not due.
func (d *Detector) readAnswers(now time.Time, suspicion bool) ([]dataplane.Answer, error) {
	d.mu.Lock()
	suspicion = suspicion || d.machine.decides()
	d.mu.Unlock()
	if now.Before(d.answersAt) && !suspicion {
		return nil, nil
	}
	var answers []dataplane.Answer
	var err error
	took := work(func() { answers, err = d.o.Evidence.Answers() })
	if err != nil {
		return nil, err
	}
	share := answersShare
	if suspicion {
		share = readShare
	}
	d.answersAt = time.Now().Add(min(max(readEvery, time.Duration(share)*took), mostAnswersPause))
	return append([]dataplane.Answer{}, answers...), nil
}

// suspect finds the Services that new evidence is about. Endpoints that are not known yet are looked for in a Service
// once, however many they are.
func (d *Detector) suspect(now time.Time, grown map[seen]snapshot.Cause) {
	d.resolve(grown)
	fresh := map[snapshot.Name]map[netip.AddrPort]snapshot.Cause{}
	for s, cause := range grown {
		name, known := d.owners[s.frontend]
		switch k := (trackKey{name, s.endpoint}); {
		case !known || !mayProbe(s.endpoint.Addr()):
		case d.machine.tracks[k] != nil:
			d.machine.suspect(now, k, cause, nil)
		case fresh[name] == nil:
			fresh[name] = map[netip.AddrPort]snapshot.Cause{s.endpoint: cause}
		default:
			fresh[name][s.endpoint] = cause
		}
	}
	for name, endpoints := range fresh {
		for e, ports := range d.services.with(name, endpoints) {
			d.machine.suspect(now, trackKey{name, e}, endpoints[e], ports)
		}
	}
}

// resolve finds out which Services have the frontends of new evidence. It remembers them as long as there is new
// evidence, since all Services have to be looked through for one that is not known.
func (d *Detector) resolve(grown map[seen]snapshot.Cause) {
	owners, wanted := map[dataplane.Key]snapshot.Name{}, map[dataplane.Key]bool{}
	for s := range grown {
		if name, known := d.owners[s.frontend]; known && d.services.hasFrontend(name, s.frontend) {
			owners[s.frontend] = name
		} else {
			wanted[s.frontend] = true
		}
	}
	d.services.find(wanted, owners)
	d.owners = owners
}

// mayProbe says whether an address is not one that means this node or its link, whoever named it in a slice.
func mayProbe(a netip.Addr) bool {
	return !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.IsMulticast() && !a.IsUnspecified()
}

// grown returns of what more was seen since the last reading.
func (d *Detector) grown(list []dataplane.Evidence) map[seen]snapshot.Cause {
	grown, next := map[seen]snapshot.Cause{}, make(map[seen]dataplane.Evidence, len(list))
	for _, e := range list {
		// A count that has become smaller began anew.
		at := seen{e.Frontend, e.Endpoint}
		switch was := d.last[at]; {
		case e.Unanswered > 0 && e.Unanswered != was.Unanswered:
			grown[at] = snapshot.Unanswered
		case e.Refused > 0 && e.Refused != was.Refused:
			grown[at] = snapshot.Refused
		}
		next[at] = e
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
		key, how := t.trackKey, t.manner()
		d.background.Go(func() {
			p := probed{key, d.o.Prober.Probe(ctx, key.endpoint, how)}
			select {
			case d.probed <- p:
			case <-ctx.Done():
			}
		})
	}
	for _, t := range d.machine.tracks {
		if t.state == unhealthy && t.asks != asResort {
			d.announceKept(now, t)
		}
		d.scheduleFlush(now, t)
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
	d.publish(t.service)
	switch {
	case t.asks == asResort: // the commit shows whether it is used
	case t.state != unhealthy && t.returned.Equal(now):
		d.log(t).Info("an endpoint is back", "after", now.Sub(t.judged).Round(time.Millisecond).String())
	case t.state == unhealthy && !t.announced && !slices.ContainsFunc(t.ports, func(sp *dataplane.ServicePort) bool {
		return sp.SecondChance == snapshot.SecondChanceOn
	}):
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

// repeat puts the health of a track's Service again: a Service that is deleted and made again loses it.
func (d *Detector) repeat(t *track) {
	if h := d.put[t.service]; h != nil {
		d.o.Put(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{t.service: h}})
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
		at = clock.Later(next, time.Now().Add(pace))
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
	t := d.machine.tracks[p.trackKey]
	switch {
	case d.machine.found(now, p.trackKey, p.outcome):
		d.changed(now, t)
	case t != nil && (t.state == unhealthy || t.asks == asResort):
		d.repeat(t)
	}
}
