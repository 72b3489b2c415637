package status

import (
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/verdict-proxy/verdict/internal/proxy/health"
	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Board follows a loop and lists its Services. It is safe for concurrent use. Make one with NewBoard.
type Board struct {
	o BoardOptions

	mu       sync.Mutex
	services map[snapshot.Name]onBoard
	// failed are the Services whose changes the last transactions could not write, and why says why not.
	failed map[snapshot.Name]bool
	why    string
}

// BoardOptions say what a Board knows besides the loop's events. Functions are safe for concurrent use.
type BoardOptions struct {
	// Backend is the name of the backend.
	Backend string
	// Status returns the node's.
	Status func() Status
	// Queued returns what waits to be taken, as snapshot.Queue does.
	Queued func() ([]*snapshot.Service, []snapshot.Name)
	// Quarantined and Unscheduled return what the kernel rejects, as reconcile.Loop does.
	Quarantined, Unscheduled func() []reconcile.Quarantined
}

// onBoard is one Service: as the API has it, with its slices, and as it is programmed. Either may be nil.
type onBoard struct {
	object     *snapshot.Service
	slices     []*snapshot.Slice
	programmed *dataplane.Service
}

const (
	// boardPage bounds the Services of an answer, and maxItems the ports and the addresses of each kind that it names of
	// one.
	boardPage = 1000
	maxItems  = 32
)

// NewBoard returns a Board.
func NewBoard(o BoardOptions) *Board {
	return &Board{o: o, services: map[snapshot.Name]onBoard{}, failed: map[snapshot.Name]bool{}}
}

// Listener connects the Board to a loop.
func (b *Board) Listener() reconcile.Listener {
	return reconcile.Listener{InSync: b.inSync, Committed: b.committed, Failed: b.failedToWrite}
}

func (b *Board) inSync(s reconcile.InSync) {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.failed)
	for _, n := range s.Change.Services {
		e := b.services[n]
		if e.object, e.slices = s.Snapshot.Services[n], nil; !s.TooManyBackends(n) {
			e.slices = s.Snapshot.SlicesOf(n)
		}
		b.put(n, e)
	}
}

func (b *Board) committed(c reconcile.Commit) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, after := range c.After {
		either := after
		if after == nil {
			either = c.Before[i]
		}
		if either == nil {
			continue
		}
		e := b.services[either.Name]
		e.programmed = after
		b.put(either.Name, e)
	}
}

func (b *Board) failedToWrite(f reconcile.Failure) {
	if f.Replan {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.why = clip.Cut(f.Err.Error(), maxText)
	services, of := f.Cause.Delta.Concerns()
	for _, svc := range services {
		b.failed[svc.Name] = true
		e := b.services[svc.Name]
		e.object = svc
		b.services[svc.Name] = e
	}
	for _, n := range of {
		b.failed[n] = true
	}
}

// put stores a Service, or forgets it if nothing is left of it. The caller has locked mu.
func (b *Board) put(n snapshot.Name, e onBoard) {
	if e.object == nil && e.programmed == nil {
		delete(b.services, n)
		return
	}
	b.services[n] = e
}

// countEndpoints counts the addresses in slices.
func countEndpoints(of []*snapshot.Slice) int {
	seen := map[netip.Addr]bool{}
	for _, sl := range of {
		for i := range sl.Endpoints {
			seen[sl.Endpoints[i].Addr] = true
		}
	}
	return len(seen)
}

// List returns the Services that a query asks for, sorted by name, a page at a time: namespace= and name= are those of
// Services, trouble=true leaves out those in order, for=true those that nothing asked for backends of, and
// after=NAMESPACE/NAME begins the next page.
func (b *Board) List(query url.Values) (*Services, error) {
	out := &Services{Status: b.o.Status().Short()}
	after := snapshot.Name{}
	if text := query.Get("after"); text != "" {
		var err error
		if after, err = ParseName(text); err != nil {
			return nil, err
		}
	}
	namespace, name, trouble := query.Get("namespace"), query.Get("name"), query.Get("trouble") == "true"
	all := query.Get("for") != "true"
	v := b.view()
	var names []snapshot.Name
	for n, e := range v.services {
		if n.Compare(after) > 0 && (namespace == "" || n.Namespace == namespace) && (name == "" || n.Name == name) &&
			(all || e.object.For() != "") {
			names = append(names, n)
		}
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	for _, n := range names {
		if len(out.Services) == boardPage {
			out.Next = out.Services[boardPage-1].Service
			break
		}
		if s := v.service(n); !trouble || s.State != Programmed {
			out.Services = append(out.Services, s)
		}
	}
	return out, nil
}

// ServeHTTP answers GET /services. Whoever may ask is as for Tracker.ServeHTTP.
func (b *Board) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s, err := b.List(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	health.AnswerJSON(w, http.StatusOK, s)
}

// boardView is what a Board knows at one moment.
type boardView struct {
	backend  string
	services map[snapshot.Name]onBoard
	waiting  map[snapshot.Name]bool
	why      string
	// rejected and unscheduled are sorted by name.
	rejected, unscheduled []reconcile.Quarantined
}

// view copies what is known, with the Services that wait in the queue.
func (b *Board) view() *boardView {
	v := &boardView{backend: b.o.Backend, services: map[snapshot.Name]onBoard{}, waiting: map[snapshot.Name]bool{},
		rejected: b.o.Quarantined(), unscheduled: b.o.Unscheduled()}
	queued, of := b.o.Queued()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.failed) > 0 {
		v.why = b.why
	}
	maps.Copy(v.services, b.services)
	for n := range b.failed {
		v.waiting[n] = true
	}
	for _, svc := range queued {
		e := v.services[svc.Name]
		e.object, v.waiting[svc.Name] = svc, true
		v.services[svc.Name] = e
	}
	for _, n := range of {
		v.waiting[n] = true
	}
	return v
}

// service describes a Service.
func (v *boardView) service(n snapshot.Name) Service {
	e := v.services[n]
	s := Service{Service: n.String(), State: Programmed, Endpoints: countEndpoints(e.slices)}
	s.addresses(e.object)
	s.ports(e.programmed, v.backend)
	s.judge(e.programmed)
	if q := quarantinedAs(v.unscheduled, n); q != nil && s.State == Programmed {
		s.is(Unscheduled, "IPVS does not schedule it: "+q.Err.Error())
	}
	s.clients(e.programmed)
	switch q := quarantinedAs(v.rejected, n); {
	case q != nil:
		s.is(Rejected, q.Err.Error())
	case v.waiting[n]:
		s.is(Waiting, strings.TrimSuffix("not programmed yet: "+v.why, ": "))
	}
	s.Why = clip.Cut(s.Why, maxText)
	s.Ports = s.Ports[:min(len(s.Ports), maxItems)]
	for _, list := range []*[]netip.Addr{&s.ExternalIPs, &s.LoadBalancerIPs} {
		*list = (*list)[:min(len(*list), maxItems)]
	}
	return s
}
