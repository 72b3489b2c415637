package status

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/health"
	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Options say what a Tracker knows besides the loop's events. Functions are safe for concurrent use.
type Options struct {
	Version, Backend, Node string
	// Progress returns how far the loop has come, as snapshot.Queue does.
	Progress func() snapshot.Progress
	// Waiting returns what the loop has not settled, as snapshot.Queue does; only Facts needs it.
	Waiting func() snapshot.Waiting
	// Quarantined returns the Services that the kernel rejects, sorted by name, as reconcile.Loop does.
	Quarantined func() []reconcile.Quarantined
	// Ejected, if not nil, returns all ejected endpoints.
	Ejected func() []EjectedEndpoint
	// Preflight, if not nil, returns what was found on this host.
	Preflight func() []Finding
	// Unread, if not nil, returns the manifests that cannot be read.
	Unread func() []Unread
	// Ledger, if not nil, returns where the ledger ends.
	Ledger func() Ledger
}

// Tracker follows a loop and answers with the node's Status. It is safe for concurrent use. Make one with New.
type Tracker struct {
	o       Options
	started time.Time

	// asking lets one caller at a time compute digests. It is locked before mu.
	asking sync.Mutex
	mu     sync.Mutex
	first  time.Time
	// changed are the Services whose digests are still to be computed: the loop must not wait for that.
	changed map[snapshot.Name]changed
	// services and sum are the digests that are computed.
	services map[snapshot.Name]known
	sum      Digest
	failing  *Failing
	drift    Drift
	// recent are the last transactions, the oldest first.
	recent []Change
	// keeping are the Services that are to keep their clients' addresses, as they are programmed.
	keeping map[snapshot.Name]dataplane.NotKept
}

// changed is a Service as it was programmed, and when; without a Service it is gone.
type changed struct {
	service *snapshot.Service
	slices  []*snapshot.Slice
	at      int64 // Unix time in milliseconds
}

// known is the digest of a Service, and since when it is that.
type known struct {
	digest Digest
	since  int64 // Unix time in milliseconds
}

// New returns a Tracker.
func New(o Options) *Tracker {
	return &Tracker{o: o, started: time.Now(), changed: map[snapshot.Name]changed{},
		services: map[snapshot.Name]known{}, keeping: map[snapshot.Name]dataplane.NotKept{}}
}

// Bounds of an answer.
const (
	// maxNamed bounds the Services and endpoints that are named, and maxText the bytes of an error or a finding.
	maxNamed = 100
	maxText  = 300
	// maxFindings bounds the findings of a check that are kept.
	maxFindings = 8
	// maxRecent bounds the transactions that are remembered, and maxChanged the Services that one of them names.
	maxRecent, maxChanged = 20, 3
	// pageSize bounds the digests of an answer, and maxAsked the Services that may be asked for by name.
	pageSize = 5000
	maxAsked = 100
)

// Listener connects the Tracker to a loop.
func (t *Tracker) Listener() reconcile.Listener {
	return reconcile.Listener{InSync: t.inSync, Failed: t.failed, Checked: t.checked, Written: t.written,
		Committed: t.committed}
}

func (t *Tracker) inSync(s reconcile.InSync) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if t.failing = nil; t.first.IsZero() {
		t.first = now
	}
	if len(t.changed) == 0 { // a map that grows is copied again and again
		t.changed = make(map[snapshot.Name]changed, len(s.Change.Services))
	}
	for _, n := range s.Change.Services {
		c := changed{service: s.Snapshot.Services[n], at: now.UnixMilli()}
		if c.service != nil {
			c.slices = slices.AppendSeq(make([]*snapshot.Slice, 0, len(s.Snapshot.Slices[n])),
				maps.Values(s.Snapshot.Slices[n]))
		}
		t.changed[n] = c
	}
}

// compute computes the digests of the Services that have changed. The caller has locked asking.
func (t *Tracker) compute() {
	t.mu.Lock()
	todo := t.changed
	t.changed = map[snapshot.Name]changed{}
	t.mu.Unlock()
	var w writer
	for n, c := range todo {
		was, is := t.services[n], w.of(c.service, c.slices)
		if was.digest == is {
			continue
		}
		if was.digest != 0 {
			t.sum -= ofAll(n, was.digest)
			delete(t.services, n)
		}
		if is != 0 {
			t.sum += ofAll(n, is)
			t.services[n] = known{is, c.at}
		}
	}
}

func (t *Tracker) failed(f reconcile.Failure) {
	if f.Replan {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	since := time.Now()
	if t.failing != nil {
		since = t.failing.Since
	}
	t.failing = &Failing{since, clip.Cut(f.Err.Error(), maxText)}
}

func (t *Tracker) checked(c reconcile.Check) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	t.drift.Checked, t.drift.Error = &now, ""
	if c.Err != nil {
		t.drift.Error = clip.Cut(c.Err.Error(), maxText)
	}
	if len(c.Found) == 0 {
		return
	}
	t.drift.Found += len(c.Found)
	t.drift.FoundAt, t.drift.Last = &now, nil
	for _, text := range c.Found[:min(len(c.Found), maxFindings)] {
		t.drift.Last = append(t.drift.Last, clip.Cut(text, maxText))
	}
}

func (t *Tracker) written(w reconcile.Transaction) {
	if w.Foreign == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	t.drift.Repaired = &now
}

// committed remembers a transaction.
func (t *Tracker) committed(c reconcile.Commit) {
	change := Change{At: time.Now(), Added: c.Added, Replaced: c.Replaced, Removed: c.Removed,
		Seconds: (c.Plan + c.Encode + c.Receipt.Commit).Seconds()}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, after := range c.After {
		service := cmp.Or(after, c.Before[i])
		if service == nil {
			continue
		}
		if change.Count++; len(change.Services) < maxChanged {
			change.Services = append(change.Services, service.Name.String())
		}
		t.noteClients(service.Name, after)
	}
	if len(t.recent) == maxRecent {
		t.recent = slices.Delete(t.recent, 0, 1)
	}
	t.recent = append(t.recent, change)
}

// Facts returns what the Condition of the node is judged by. It costs nothing.
func (t *Tracker) Facts() Facts {
	f := Facts{Started: t.started, Waiting: t.o.Waiting().Since}
	t.mu.Lock()
	defer t.mu.Unlock()
	if f.First = t.first; t.failing != nil {
		f.Failing = t.failing.Since
	}
	return f
}

// Status returns the node's status, without digests of single Services.
func (t *Tracker) Status() Status {
	t.asking.Lock()
	defer t.asking.Unlock()
	return t.status()
}

// status is Status. The caller has locked asking.
func (t *Tracker) status() Status {
	now, p := time.Now(), t.o.Progress()
	s := Status{Schema: Schema, Time: now, Version: t.o.Version, Backend: t.o.Backend, Node: t.o.Node, Started: t.started,
		Received: versionsOf(p.Received), Programmed: versionsOf(p.Programmed),
		Pending: Pending{Services: p.Services, EndpointSlices: p.Slices}}
	if !p.Since.IsZero() {
		s.Pending.LagSeconds = max(0, now.Sub(p.Since).Seconds())
	}
	rejected := t.o.Quarantined()
	s.Quarantined.Count = len(rejected)
	for _, q := range rejected[:min(len(rejected), maxNamed)] {
		s.Quarantined.Services = append(s.Quarantined.Services,
			QuarantinedService{q.Name.String(), q.Since, clip.Cut(q.Err.Error(), maxText)})
	}
	if t.o.Ejected != nil {
		ejected := t.o.Ejected()
		s.Ejected = Ejected{len(ejected), ejected[:min(len(ejected), maxNamed)]}
	}
	if t.o.Preflight != nil {
		found := t.o.Preflight()
		s.Preflight = found[:min(len(found), maxNamed)]
	}
	if t.o.Unread != nil {
		for _, u := range t.o.Unread() {
			if u.Error = clip.Cut(u.Error, maxText); len(s.Unread) < maxNamed {
				s.Unread = append(s.Unread, u)
			}
		}
	}
	if t.o.Ledger != nil {
		end := t.o.Ledger()
		s.Ledger = &end
	}
	t.compute()
	s.Services, s.Digest = len(t.services), t.sum
	t.mu.Lock()
	defer t.mu.Unlock()
	s.Failing, s.Drift, s.ClientAddresses = t.failing, t.drift, t.clients()
	s.Recent = slices.Clone(t.recent)
	slices.Reverse(s.Recent)
	for _, q := range rejected {
		if k, ok := t.services[q.Name]; ok {
			s.Digest += ofAll(q.Name, k.digest+quarantinedMark) - ofAll(q.Name, k.digest)
		}
	}
	if first := t.first; !first.IsZero() {
		s.First = &first
	}
	return s
}

// digests returns the digests of Services by name; those that are unknown have none. The caller has locked asking.
func (t *Tracker) digests(names []snapshot.Name) (out []ServiceDigest) {
	rejected := t.o.Quarantined()
	for _, n := range names {
		k, ok := t.services[n]
		if !ok {
			continue
		}
		if quarantinedAs(rejected, n) != nil {
			k.digest += quarantinedMark
		}
		out = append(out, ServiceDigest{n.String(), k.digest, time.UnixMilli(k.since)})
	}
	return out
}

// Holds reports of each goal whether this node has reached it.
func (t *Tracker) Holds(goals []Goal) []bool {
	t.asking.Lock()
	defer t.asking.Unlock()
	programmed := versionsOf(t.o.Progress().Programmed)
	rejected := t.o.Quarantined()
	t.compute()
	out := make([]bool, len(goals))
	for i := range goals {
		g := &goals[i]
		d := t.services[g.Service].digest
		set := quarantinedAs(rejected, g.Service) != nil
		if set {
			d = 0
		}
		out[i] = g.Reached(programmed, d, set)
	}
	return out
}

// quarantinedAs looks a Service up in a list that is sorted by name; nil if it is not there.
func quarantinedAs(list []reconcile.Quarantined, n snapshot.Name) *reconcile.Quarantined {
	at, found := slices.BinarySearchFunc(list, n, func(q reconcile.Quarantined, n snapshot.Name) int {
		return q.Name.Compare(n)
	})
	if !found {
		return nil
	}
	return &list[at]
}

// page returns the names of the Services after one, at most pageSize, and says whether there are more. The caller has
// locked asking.
func (t *Tracker) page(after snapshot.Name) (names []snapshot.Name, more bool) {
	for n := range t.services {
		if n.Compare(after) > 0 {
			names = append(names, n)
		}
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	if len(names) > pageSize {
		return names[:pageSize], true
	}
	return names, false
}

// Answer returns the Status with what a query asks for: service=NAMESPACE/NAME, up to maxAsked times, or digests=all
// for those of all Services, a page at a time, after=NAMESPACE/NAME for the next page.
func (t *Tracker) Answer(query url.Values) (Status, error) {
	var names []snapshot.Name
	asked := query["service"]
	if len(asked) > maxAsked {
		return Status{}, fmt.Errorf("service: %d are more than %d", len(asked), maxAsked)
	}
	for _, text := range asked {
		n, err := ParseName(text)
		if err != nil {
			return Status{}, fmt.Errorf("service: %w", err)
		}
		names = append(names, n)
	}
	t.asking.Lock()
	defer t.asking.Unlock()
	s, next := t.status(), ""
	switch which := query.Get("digests"); which {
	case "":
	case "all":
		after, err := snapshot.Name{}, error(nil)
		if text := query.Get("after"); text != "" {
			if after, err = ParseName(text); err != nil {
				return Status{}, fmt.Errorf("after: %w", err)
			}
		}
		more := false
		if names, more = t.page(after); more {
			next = names[len(names)-1].String()
		}
	default:
		return Status{}, fmt.Errorf("digests: %.100q is not all", which)
	}
	s.Digests, s.Next = t.digests(names), next
	return s, nil
}

// ParseName reads NAMESPACE/NAME.
func ParseName(text string) (n snapshot.Name, err error) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok || namespace == "" || name == "" || len(text) > 2*253+1 {
		return n, fmt.Errorf("%.100q is not NAMESPACE/NAME", text)
	}
	return snapshot.Name{Namespace: namespace, Name: name}, nil
}

// ServeHTTP answers GET /status. The answer names Services and endpoints: the caller must see to it that only processes
// of this host may ask (health.OnlyHost).
func (t *Tracker) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s, err := t.Answer(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	health.AnswerJSON(w, http.StatusOK, s)
}
