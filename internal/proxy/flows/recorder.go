package flows

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// RecorderOptions configure a Recorder.
type RecorderOptions struct {
	// Sink gets each record, one at a time. It must not wait for anything.
	Sink func(Record)
	// Look calls a function with all flows; see [conntrack.Walker.Look]. Without it, connections from before the recorder
	// have no record.
	Look func(ctx context.Context, do func(*conntrack.Flow)) error
	// Opens, which must not be nil if Look is not, gets the open connections of each look.
	Opens interface {
		BeginLook()
		AddOpen(Record)
	}
	// Own are the ports of the sockets by which the proxy deletes flows.
	Own map[uint32]bool
	// Names names both sides of a connection.
	Names *Names
	// Sysctl reads a sysctl of connection tracking, such as "nf_conntrack_udp_timeout".
	Sysctl func(name string) (int, error)
	Log    *slog.Logger
}

// Recorder makes records of connections to Services: of those that end, from the kernel's events, and of packets that
// rules reject or drop, from nflog. Make one with Open, add its Listener to the loop, and call Run.
type Recorder struct {
	o      RecorderOptions
	events *conntrack.Events
	// log is nil if this kernel has no nflog, or another process has the group.
	log    *packetLog
	inSync chan struct{}
	// opened is when the recorder subscribed.
	opened time.Time

	// queued are commits that nobody has looked at yet. A lock of its own: the loop waits for nothing else.
	queue struct {
		sync.Mutex
		commits []reconcile.Commit
		synced  bool
	}

	// mu protects what follows.
	mu       sync.Mutex
	services services
	timeouts timeouts
	// resets are those that were logged, and refused the packets that were.
	resets, refused recent
	// undecided are connections that were reset, whose reset may be logged still.
	undecided []undecided
	older     older
	open      openFlows
	settled   time.Time
}

// undecided is a record of a connection that was reset.
type undecided struct {
	record Record
	pair   pair
	start  time.Time
	until  time.Time
}

const (
	// tick is how long events are waited for at a time.
	tick = 200 * time.Millisecond
	// patience is how long a reset may be logged after the end of its connection, and maxUndecided how many of those may
	// wait.
	patience     = 300 * time.Millisecond
	maxUndecided = 4096
	// resetMemory is how long a reset is remembered: longer than the kernel keeps a connection that was reset.
	resetMemory = 3 * time.Minute
	// repeatedWithin is how soon a client sends a packet again that was dropped.
	repeatedWithin = 2 * time.Minute
	// lookEvery is how often all flows are looked at. If that takes long, looks take at most one part in lookShare of the
	// time.
	lookEvery = 30 * time.Second
	lookShare = 20
)

// OpenRecorder subscribes in the network namespace of the calling thread. From then on events wait for Run.
func OpenRecorder(o RecorderOptions) (*Recorder, error) {
	events, err := conntrack.Listen(0)
	if err != nil {
		return nil, err
	}
	r := &Recorder{o: o, events: events, inSync: make(chan struct{}), opened: time.Now(),
		services: newServices(), timeouts: readTimeouts(o.Sysctl),
		resets: recent{memory: resetMemory}, refused: recent{memory: repeatedWithin}}
	if r.log, err = openLog(nft.RecordsGroup); err != nil {
		o.Log.Warn("records will not say who reset a connection, nor what was rejected or dropped", "err", err)
	}
	return r, nil
}

// Logs says whether the recorder takes what rules log: they may log only then.
func (r *Recorder) Logs() bool { return r.log != nil }

// Close closes the sockets. Call it after Run.
func (r *Recorder) Close() error {
	err := r.events.Close()
	if r.log != nil {
		err = errors.Join(err, r.log.Close())
	}
	return err
}

// Losses returns what there was no room for; Sampled is not the recorder's.
func (r *Recorder) Losses() Losses {
	l := Losses{Events: r.events.Lost()}
	if r.log != nil {
		l.Refusals = r.log.Lost()
	}
	return l
}

// SetOpen gives the Sink a record of each connection that begins, too, or no longer.
func (r *Recorder) SetOpen(on bool) error { return r.events.Beginnings(on) }

// Listener returns what the loop must call. It only takes a note.
func (r *Recorder) Listener() reconcile.Listener {
	return reconcile.Listener{
		Committed: func(c reconcile.Commit) {
			r.queue.Lock()
			defer r.queue.Unlock()
			r.queue.commits = append(r.queue.commits, reconcile.Commit{Before: c.Before, After: c.After})
		},
		Written: func(reconcile.Transaction) {
			r.queue.Lock()
			defer r.queue.Unlock()
			if !r.queue.synced {
				r.queue.synced = true
				close(r.inSync)
			}
		},
	}
}

// Run records until the context ends. Before the first state is written, nobody knows whose the frontends are, and
// events wait in the kernel.
func (r *Recorder) Run(ctx context.Context) {
	select {
	case <-r.inSync:
	case <-ctx.Done():
		return
	}
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() {
		r.repeat(ctx, "events of connection tracking", func(deadline time.Time) error {
			defer r.tick()
			return r.events.Receive(deadline, r.event)
		})
	})
	if r.log != nil {
		all.Go(func() {
			r.repeat(ctx, "logged packets", func(deadline time.Time) error { return r.log.receive(deadline, r.logged) })
		})
	}
	if r.o.Look != nil {
		all.Go(func() { r.lookAtFlows(ctx) })
	}
}

// repeat receives until the context ends.
func (r *Recorder) repeat(ctx context.Context, what string, receive func(deadline time.Time) error) {
	for ctx.Err() == nil {
		if err := receive(time.Now().Add(tick)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			r.o.Log.Error("records are incomplete from now on: cannot read "+what, "err", err)
			return
		}
	}
}

// settle reads what the loop and the sources said since the last time. It is called with the lock.
func (r *Recorder) settle(now time.Time) {
	r.queue.Lock()
	commits := r.queue.commits
	r.queue.commits = nil
	r.queue.Unlock()
	before := r.services.ipvs
	for _, c := range commits {
		r.services.replace(c.Before, c.After, now)
	}
	if r.services.ipvs && !before {
		if err := r.events.WithIPVS(); err != nil {
			r.o.Log.Warn("there are no records of connections that IPVS schedules", "err", err)
		}
	}
	r.o.Names.settle(now)
	if now.Sub(r.settled) > time.Minute {
		r.settled, r.timeouts = now, readTimeouts(r.o.Sysctl)
		r.services.forget(now)
	}
}

// tick decides what has waited long enough.
func (r *Recorder) tick() {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settle(now)
	n := 0
	for n < len(r.undecided) && r.undecided[n].until.Before(now) {
		u := &r.undecided[n]
		u.record.End = r.resetBy(u.pair, u.start)
		r.o.Sink(u.record)
		n++
	}
	r.undecided = r.undecided[n:]
	if len(r.undecided) == 0 {
		r.undecided = nil
	}
}

// event makes a record of a flow that ended, or began.
func (r *Recorder) event(f *conntrack.Flow, ended bool) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settle(now)
	since := time.Time{}
	if ended {
		since = r.older.ended(f)
	}
	record, sp, ok := r.recordOf(f, now)
	if !ok {
		return
	}
	record.Since = since
	if !ended {
		record.Time, record.Seconds, record.End = now, 0, Open
		r.o.Sink(record)
		return
	}
	r.open.ended(keyOf(f), &record)
	r.finish(record, sp, f, now)
}

// recordOf returns a record of a flow without its end; not ok if no Service has or had its frontend, or
// if that is left out.
func (r *Recorder) recordOf(f *conntrack.Flow, now time.Time) (_ Record, sp *dataplane.ServicePort, ok bool) {
	if sp = r.services.owner(f.Frontend, f.Start); sp == nil || r.o.Names.off[sp.Name.Service] {
		return Record{}, nil, false
	}
	record := Record{
		Service: sp.Name.Service.String(), Port: sp.Name.Port, For: r.o.Names.by[sp.Name.Service],
		Protocol: protocolName(f.Frontend.Protocol), Client: r.o.Names.client(f.Client),
		Frontend: netip.AddrPortFrom(f.Frontend.Addr, f.Frontend.Port),
		Endpoint: r.o.Names.endpoint(f.Endpoint), Sent: Traffic(f.Sent), Received: Traffic(f.Received), Weight: 1,
	}
	record.Time, record.Seconds = r.timeouts.lived(f, now)
	return record, sp, true
}

// finish decides how a connection ended. If it was reset, and that is not logged, it may be soon.
func (r *Recorder) finish(record Record, sp *dataplane.ServicePort, f *conntrack.Flow, now time.Time) {
	record.End = endOf(f)
	switch {
	case r.o.Own[f.By]:
		if record.End = Released; ejected(sp, f.Endpoint) {
			record.End = Ejected
		}
	case f.By != 0:
		record.End, record.Reason = Released, "by another program"
	case record.End == Reset:
		p := pair{f.Frontend.Protocol, f.Client, f.Endpoint}
		if record.End = r.resetBy(p, f.Start); record.End == Reset && r.log != nil && len(r.undecided) < maxUndecided {
			r.undecided = append(r.undecided, undecided{record, p, f.Start, now.Add(patience)})
			return
		}
	}
	r.o.Sink(record)
}

// resetBy says which side sent the last reset of a connection that began at some time.
func (r *Recorder) resetBy(p pair, start time.Time) End {
	client, endpoint := r.resets.last(p), r.resets.last(pair{p.protocol, p.to, p.from})
	if client.Before(start) {
		client = time.Time{}
	}
	if endpoint.Before(start) {
		endpoint = time.Time{}
	}
	switch {
	case client.After(endpoint):
		return ResetByClient
	case endpoint.After(client):
		return ResetByEndpoint
	}
	return Reset
}

// logged takes a packet that a rule logged.
func (r *Recorder) logged(p *logged) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.prefix == nft.LoggedReset {
		r.resets.see(pair{p.protocol, p.from, p.to}, now)
		return
	}
	end, reason := Rejected, ""
	if chain, ok := strings.CutPrefix(p.prefix, nft.LoggedRejected); ok {
		reason = chain
	} else if chain, ok := strings.CutPrefix(p.prefix, nft.LoggedDropped); ok {
		end, reason = Dropped, chain
	} else {
		return
	}
	if last := r.refused.see(pair{p.protocol, p.from, p.to}, now); now.Sub(last) < repeatedWithin {
		return // the client sends it again
	}
	r.settle(now)
	record := Record{Time: now, Protocol: protocolName(p.protocol), Frontend: p.to, Client: r.o.Names.client(p.from),
		Sent: Traffic{Packets: 1, Bytes: p.bytes}, End: end, Reason: reason, Weight: 1}
	k := dataplane.Key{Addr: p.to.Addr(), Protocol: p.protocol, Port: p.to.Port()}
	service, known := r.services.addrs[p.to.Addr()]
	if sp := r.services.owner(k, now); sp != nil {
		service, known, record.Port = sp.Name.Service, true, sp.Name.Port
	}
	if r.o.Names.off[service] {
		return
	}
	if known {
		record.Service, record.For = service.String(), r.o.Names.by[service]
	}
	r.o.Sink(record)
}

// protocolName returns the name of a protocol in records.
func protocolName(p snapshot.Protocol) string { return strings.ToUpper(p.String()) }
