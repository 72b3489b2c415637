package ledger

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Bounds of a record without its batch.
const (
	maxObjects  = 32
	maxServices = 64
	maxFindings = 8
	maxText     = 500
)

// Sent takes a copy of a batch that the kernel acknowledged. The event of its transaction follows. It is called in the
// loop's goroutine.
func (w *Writer) Sent(batch []byte) {
	if len(batch) > maxBatch {
		w.tooLong = len(batch)
		return
	}
	w.sent = append(w.sent, slices.Clone(batch))
}

// Listener connects the Writer to a loop.
func (w *Writer) Listener() reconcile.Listener {
	return reconcile.Listener{Committed: w.committed, Failed: w.transactionFailed, Checked: w.checked}
}

func (w *Writer) committed(c reconcile.Commit) {
	e := entry{Record: Record{At: time.Now(), Kind: Change, Added: c.Added, Replaced: c.Replaced, Removed: c.Removed,
		Left: len(c.Left)}}
	e.explain(c.Cause)
	e.addWhy(whyFirst, c.First)
	e.addWhy(whyAdopted, c.Adopted)
	e.addWhy(whyRewrite, c.Full && !c.First)
	if len(e.Objects)+len(e.Why) == 0 {
		e.addWhy(whyConfig, true)
	}
	e.whole, e.repairs = c.Full, c.Cause != nil && c.Cause.Foreign > 0
	e.nameServices(&c)
	e.Took.Plan += (c.Plan + c.Encode).Microseconds()
	e.Took.Kernel = c.Receipt.Commit.Microseconds()
	w.put(e)
}

func (w *Writer) transactionFailed(f reconcile.Failure) {
	e := entry{Record: Record{At: time.Now(), Kind: Failed, Error: clip.Cut(f.Err.Error(), maxText)}}
	e.explain(f.Cause)
	e.Took.Kernel = f.Took.Microseconds()
	w.put(e)
}

func (w *Writer) checked(c reconcile.Check) {
	if len(c.Found) > 0 {
		e := entry{Record: Record{At: time.Now(), Kind: Found}}
		for _, text := range c.Found[:min(len(c.Found), maxFindings)] {
			e.Findings = append(e.Findings, clip.Cut(text, maxText))
		}
		w.put(e)
		return
	}
	if len(w.sent)+w.tooLong > 0 { // which elements have counters
		w.put(entry{Record: Record{At: time.Now(), Kind: Change, Why: []string{whyCounters}}})
	}
}

// explain fills in what a cause says.
func (r *Record) explain(c *reconcile.Cause) {
	r.Took = &Took{}
	if c == nil { // a test's loop knows none
		return
	}
	d := &c.Delta
	health, starting := withoutTaken(d.Health, d.Services), withoutTaken(d.Starting, d.Services)
	r.MoreObjects = len(d.Services) + len(d.Slices) + len(health) + len(starting)
	named(r, "EndpointSlice", d.Slices, func(o *Object, s *snapshot.Slice) {
		o.Version, o.Service = string(s.Version), s.Name.Namespace+"/"+s.Service
	})
	named(r, "Health", health, func(*Object, *snapshot.Health) {})
	named(r, "Service", d.Services, func(o *Object, s *snapshot.Service) { o.Version = string(s.Version) })
	named(r, "SlowStart", starting, func(*Object, *snapshot.Starting) {})
	r.MoreObjects -= len(r.Objects)
	r.addWhy(whyNode, d.Node != nil)
	r.addWhy(whyRanges, d.ServiceCIDRs != nil)
	r.addWhy(whyHost, d.HostAddrs != nil || d.HostNetworks != nil || d.Link != nil)
	r.addWhy(whyRest, c.Rest)
	r.addWhy(whyRetry, c.Retry)
	r.addWhy(whyRepair, c.Foreign > 0)
	r.addWhy(whyTrial, c.Trial)
	if !c.Since.IsZero() {
		r.Took.Wait = c.Began.Sub(c.Since).Microseconds()
	}
	r.Took.Plan = c.Policy.Microseconds()
}

// withoutTaken leaves out what a Service that goes has taken along: that is no news (snapshot.Delta.Merge).
func withoutTaken[T any](objects map[snapshot.Name]*T, services map[snapshot.Name]*snapshot.Service,
) map[snapshot.Name]*T {
	out := maps.Clone(objects)
	maps.DeleteFunc(out, func(n snapshot.Name, o *T) bool {
		_, changes := services[n]
		return o == nil && changes
	})
	return out
}

// named adds the first objects by name until there are maxObjects.
func named[T any](r *Record, kind string, objects map[snapshot.Name]*T, fill func(*Object, *T)) {
	for _, n := range first(objects, maxObjects-len(r.Objects)) {
		object := objects[n]
		o := Object{Kind: kind, Name: n.String(), Gone: object == nil}
		if object != nil {
			fill(&o, object)
		}
		r.Objects = append(r.Objects, o)
	}
}

// first returns the first n names, sorted. It does not sort all others: a first state may have 100,000.
func first[T any](objects map[snapshot.Name]*T, n int) []snapshot.Name {
	if n == 0 {
		return nil
	}
	names := make([]snapshot.Name, 0, min(n, len(objects))+1)
	for name := range objects {
		if len(names) == n && name.Compare(names[n-1]) > 0 {
			continue
		}
		i, _ := slices.BinarySearchFunc(names, name, snapshot.Name.Compare)
		names = slices.Insert(names, i, name)
		names = names[:min(len(names), n)]
	}
	return names
}

func (r *Record) addWhy(word string, yes bool) {
	if yes {
		r.Why = append(r.Why, word)
	}
}

// nameServices names the Services that a commit changed.
func (r *Record) nameServices(c *reconcile.Commit) {
	for i, after := range c.After {
		var s *dataplane.Service
		if s = cmp.Or(after, c.Before[i]); s == nil {
			continue
		}
		if len(r.Services) == maxServices {
			r.MoreServices = len(c.After) - i
			return
		}
		r.Services = append(r.Services, s.Name.String())
	}
}
