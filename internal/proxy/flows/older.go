package flows

import (
	"context"
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// older are the flows that were there before the recorder. The kernel tells the end only of those that began while
// somebody listened (nf_conntrack_events is 2), so these are looked at from time to time until they are gone.
type older struct {
	flows map[flowKey]*olderFlow
	// since is when they were first looked at, and looks how often.
	since time.Time
	looks int
}

// flowKey tells a flow from all others.
type flowKey struct {
	client   netip.AddrPort
	frontend dataplane.Key
	id       uint32
	zone     uint16
}

// olderFlow is a flow as the last look in which it was there found it.
type olderFlow struct {
	conntrack.Flow
	at   time.Time
	look int
}

// maxOlder bounds how many flows are looked at. The others have no record.
const maxOlder = 1 << 16

func keyOf(f *conntrack.Flow) flowKey { return flowKey{f.Client, f.Frontend, f.ID, f.Zone} }

// ended forgets a flow whose end the kernel tells. It returns since when it was known, if it is one of the older ones.
func (o *older) ended(f *conntrack.Flow) time.Time {
	if k := keyOf(f); o.flows[k] != nil {
		delete(o.flows, k)
		return o.since
	}
	return time.Time{}
}

// lookAtFlows looks at all flows from time to time: at those from before the recorder, to see when they are gone, and
// at open ones, for the sums.
func (r *Recorder) lookAtFlows(ctx context.Context) {
	next := time.NewTimer(0)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		}
		began := time.Now()
		if err := r.look(ctx, began); err != nil && ctx.Err() == nil {
			r.o.Log.Warn("failed to list connections for records, will retry: sums lack open ones until then", "err", err)
		}
		next.Reset(max(lookEvery, lookShare*time.Since(began)))
	}
}

// look looks at all flows once, and makes records of those that are gone.
func (r *Recorder) look(ctx context.Context, now time.Time) error {
	o := &r.older
	r.mu.Lock()
	r.settle(now)
	r.open.looks++
	r.mu.Unlock()
	r.o.Opens.BeginLook()
	err := r.o.Look(ctx, func(f *conntrack.Flow) {
		if !f.Translated() {
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		k := keyOf(f)
		r.seeOpen(k, f, now)
		if o.looks == 0 && len(o.flows) < maxOlder && !f.Start.After(r.opened) &&
			r.services.owner(f.Frontend, f.Start) != nil {
			if o.flows == nil {
				o.flows = map[flowKey]*olderFlow{}
			}
			o.flows[k] = &olderFlow{}
		}
		if known := o.flows[k]; known != nil {
			*known = olderFlow{*f, now, o.looks}
		}
	})
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if o.looks == 0 {
		o.since = now
	}
	for k, f := range o.flows {
		if f.look < o.looks-1 { // if the kernel tells its end, that has been read by the second look
			delete(o.flows, k)
			r.vanished(f, now)
		}
	}
	o.looks++
	r.open.looked()
	return nil
}

// seeOpen tells the sums of an open connection.
func (r *Recorder) seeOpen(k flowKey, f *conntrack.Flow, now time.Time) {
	if !isOpen(f) && r.open.flows[k] == nil {
		return
	}
	record, _, ok := r.recordOf(f, now)
	if !ok || !r.open.see(k, &record, f.Assured) {
		return
	}
	if record.End = Open; !isOpen(f) {
		record.End = Closed
	}
	r.o.Opens.AddOpen(record)
}

// vanished makes a record of a flow that was gone at the last two looks. One of TCP whose time was not over has ended
// by a reset, or since somebody deleted it.
func (r *Recorder) vanished(f *olderFlow, now time.Time) {
	record, sp, ok := r.recordOf(&f.Flow, now)
	if !ok {
		return
	}
	r.open.ended(keyOf(&f.Flow), &record)
	record.Time, record.Since, record.End = f.at, r.older.since, endOf(&f.Flow)
	if !f.Start.IsZero() {
		record.Seconds = f.at.Sub(f.Start).Seconds()
	}
	if record.End == TimedOut && f.Left > 2*lookEvery {
		record.End = r.resetBy(pair{f.Frontend.Protocol, f.Client, f.Endpoint}, f.Start)
		if record.End == Reset && !dataplane.HasEndpoint(sp.Serving, f.Endpoint) {
			record.End = Released
		}
		if record.End == Reset && ejected(sp, f.Endpoint) {
			record.End = Ejected
		}
	}
	r.o.Sink(record)
}
