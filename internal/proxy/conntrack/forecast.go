package conntrack

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Fate is what becomes of an open flow.
type Fate uint8

// The fates.
const (
	// Kept: nobody touches it.
	Kept Fate = iota
	// Deleted: a Cleaner deletes it at once, so its next packet begins a connection anew.
	Deleted
	// Drains: a Releaser deletes it when the drain deadline of its Service is over; before, if nobody answers it.
	Drains
	// Departed: it stays with an endpoint that has left its Service. A Releaser deletes it only if nobody answers it, and
	// if the Service has second chance on.
	Departed
)

// OpenFlow is an open flow to a frontend.
type OpenFlow struct {
	Client   netip.AddrPort
	Frontend dataplane.Key
	// Endpoint is who answers. Untranslated says that the flow began before there was an endpoint: Endpoint is the
	// Frontend itself.
	Endpoint     netip.AddrPort
	Untranslated bool
	// Was and Fate are what becomes of it without the change, and with it.
	Was, Fate Fate
	// Before and After answer at the Frontend before and after the change; nil if nobody does.
	Before, After *dataplane.ServicePort
}

// Forecast says what a Cleaner and a Releaser would do to open flows if some Services changed. It asks these
// themselves: it tells a Cleaner and a Releaser of the change that have no table, and so cannot delete anything.
type Forecast struct {
	sweep *sweep
	look  *releaseLook
	// before and after are the frontends of the Services that change.
	before, after map[dataplane.Key]*dataplane.ServicePort
	// released are those of before that a Releaser looks after.
	released frontends
	seen     map[flowID]struct{}
}

// maxForecast bounds how many flows a Forecast judges.
const maxForecast = 1 << 20

// ErrManyFlows says that there are more flows than a Forecast judges. Those that it has judged are right.
var ErrManyFlows = errors.New("there are more than 1,048,576 flows to the Services that change: only these were judged")

// NewForecast returns a Forecast for Services that change. Both lists have the same order; nil stands for a Service
// that is not there.
func NewForecast(before, after []*dataplane.Service) *Forecast {
	none := make([]*dataplane.Service, len(before))
	w := newWalker(nil)
	c, r := NewCleaner(w, nil), NewReleaser(w, ReleaserOptions{})
	c.SetTCP(r)
	for i, commit := range []reconcile.Commit{{Before: none, After: before}, {Before: before, After: after}} {
		for _, l := range []reconcile.Listener{c.Listener(), r.Listener()} {
			l.Writing()
			l.Committed(commit)
		}
		if i == 0 { // what there was to do before the change
			c.takeDue()
		}
	}
	f := &Forecast{sweep: c.takeDue(), look: r.takeDue(), before: portsOf(before), after: portsOf(after),
		released: frontends{}, seen: map[flowID]struct{}{}}
	f.released.replaceTCP(none, before, released)
	f.look.now = f.look.now.Add(afterAnyDeadline) // so each drain deadline is over
	return f
}

// afterAnyDeadline is longer than any drain deadline.
const afterAnyDeadline = 100 * 365 * 24 * time.Hour

// portsOf returns the frontends of Services, of any protocol.
func portsOf(services []*dataplane.Service) map[dataplane.Key]*dataplane.ServicePort {
	out := map[dataplane.Key]*dataplane.ServicePort{}
	for _, svc := range services {
		for sp, f := range svc.EachFrontend() {
			out[f.Key] = sp
		}
	}
	return out
}

// Read calls do for each flow to a frontend that the Services have before or after the change, once. It only lists
// flows. If there are more than it judges, it returns ErrManyFlows.
func (f *Forecast) Read(ctx context.Context, c *Conn, do func(OpenFlow)) error {
	return f.read(ctx, c, do)
}

func (f *Forecast) read(ctx context.Context, t table, do func(OpenFlow)) error {
	keys := slices.Collect(maps.Keys(f.before))
	for k := range f.after {
		if f.before[k] == nil {
			keys = append(keys, k)
		}
	}
	for {
		narrow := t.narrow()
		for _, q := range merge(queries(keys, narrow)) {
			if err := t.list(q, func(flows []flow) error { return errors.Join(f.judgeAll(flows, do), ctx.Err()) }); err != nil {
				return err
			}
		}
		if !narrow || t.filters() {
			return nil
		}
	}
}

func (f *Forecast) judgeAll(flows []flow, do func(OpenFlow)) error {
	for i := range flows {
		fl := &flows[i]
		before, after := f.before[fl.frontend], f.after[fl.frontend]
		if before == nil && after == nil {
			continue
		}
		id := fl.identity()
		if _, again := f.seen[id]; again {
			continue
		}
		if len(f.seen) == maxForecast {
			return ErrManyFlows
		}
		f.seen[id] = struct{}{}
		if o := (OpenFlow{Client: fl.client, Frontend: fl.frontend, Endpoint: fl.endpoint,
			Untranslated: !fl.translated(), Before: before, After: after}); !o.Untranslated || f.deletes(fl) {
			o.Was, o.Fate = f.fates(fl)
			do(o)
		}
	}
	return nil
}

// fates returns what becomes of a flow without the change, and with it.
func (f *Forecast) fates(fl *flow) (was, is Fate) {
	if f.deletes(fl) {
		return Kept, Deleted
	}
	if fl.frontend.Protocol != snapshot.TCP {
		return Kept, Kept
	}
	if sp := f.released[fl.frontend]; sp != nil && fl.releasable() && !serves(sp, fl.endpoint) {
		if was = Departed; sp.Drain > 0 {
			was = Drains
		}
	}
	sp := f.look.programmed[fl.frontend]
	if sp == nil || !fl.releasable() || serves(sp, fl.endpoint) {
		return was, Kept
	}
	if was != Kept && samePort(f.released[fl.frontend], sp) {
		f.addEarlier(goneKey{sp.Name, fl.endpoint})
	}
	k, _, release := f.look.judge(fl)
	switch g := f.look.due[k]; {
	case release:
		is = Drains
	case g != nil:
		is = Departed
		g.found = nil // what it remembers for a next look, which there is not
	}
	return was, is
}

// deletes reports whether a Cleaner deletes a flow.
func (f *Forecast) deletes(fl *flow) bool {
	return f.sweep.covers(fl.frontend) && f.sweep.isStale(fl)
}

// addEarlier adds an endpoint that had departed from a port before the change: a Releaser knows it as long as there are
// flows to it.
func (f *Forecast) addEarlier(k goneKey) {
	if f.look.due[k] != nil {
		return
	}
	if f.look.add(k, f.look.now); f.look.gone[k] != nil {
		f.look.due[k] = &lookedAt{goneEndpoint: &goneEndpoint{}}
	}
}
