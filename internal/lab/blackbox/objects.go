package blackbox

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// Service is where clients reach a Service.
type Service struct {
	// Name is namespace and name, as in EndpointSlices.
	Name string
	// Addresses are the cluster IPs, external IPs and those of load balancers.
	Addresses []netip.Addr
	Ports     []ServicePort
}

// ServicePort is a port of a Service. NodePort is 0 if it has none.
type ServicePort struct{ Port, NodePort uint16 }

// serves says whether a client's destination is one of the Service's.
func (s *Service) serves(to netip.AddrPort) bool {
	own := slices.Contains(s.Addresses, to.Addr())
	return slices.ContainsFunc(s.Ports, func(p ServicePort) bool {
		return own && p.Port == to.Port() || !own && p.NodePort != 0 && p.NodePort == to.Port()
	})
}

// Slice is an EndpointSlice as it is from a time on.
type Slice struct {
	// Name is namespace and name, Service those of its Service. Other names are other slices.
	Name, Service string
	Endpoints     []Endpoint
}

// Endpoint is one of a slice, with all the ports that the slice has.
type Endpoint struct {
	Addr                        netip.Addr
	Ports                       []uint16
	Ready, Serving, Terminating bool
}

func (e *Endpoint) is(a netip.AddrPort) bool {
	return e.Addr == a.Addr() && slices.Contains(e.Ports, a.Port())
}

func same(a, b Endpoint) bool {
	return a.Addr == b.Addr && slices.Equal(a.Ports, b.Ports) && a.Ready == b.Ready && a.Serving == b.Serving &&
		a.Terminating == b.Terminating
}

// usable says whether a proxy may send somebody there: if nothing is ready, to what terminates and still serves.
func (e *Endpoint) usable() bool { return e.Ready || e.Serving && e.Terminating }

func (e *Endpoint) state() string {
	switch {
	case e.Ready:
		return "ready"
	case e.Serving:
		return "terminating and serving"
	case e.Terminating:
		return "terminating"
	}
	return "not ready"
}

// version is a slice from a time on.
type version struct {
	at        time.Time
	endpoints []Endpoint
}

// maxVersions bounds how many endpoints of former versions of slices are kept.
const maxVersions = 200_000

// objects are Services, EndpointSlices and Nodes, and what slices were before.
type objects struct {
	mu       sync.Mutex
	services map[string]Service
	slices   map[string]map[string][]version // by Service and slice, the oldest version first
	// own are slices that the caller writes itself.
	own   map[string]bool
	nodes map[string][]nodeState
	kept  int
}

// nodeState is whether a node is Ready, from a time on.
type nodeState struct {
	at    time.Time
	ready bool
}

func newObjects() *objects {
	return &objects{services: map[string]Service{}, slices: map[string]map[string][]version{}, own: map[string]bool{},
		nodes: map[string][]nodeState{}}
}

// Service takes note of a Service. It keeps one that is deleted.
func (b *Box) Service(s Service) {
	b.objects.mu.Lock()
	defer b.objects.mu.Unlock()
	b.objects.services[s.Name] = s
}

// Slice takes note of an EndpointSlice as it is now; one that is deleted has no endpoints.
func (b *Box) Slice(s Slice) {
	b.objects.mu.Lock()
	defer b.objects.mu.Unlock()
	if !b.objects.own[s.Name] {
		b.objects.slice(s)
	}
}

// Write takes note of an EndpointSlice that the caller is about to write. What others say of this slice later does not
// count: a proxy may hear of a write before a watch of the caller does.
func (b *Box) Write(s Slice) {
	b.objects.mu.Lock()
	defer b.objects.mu.Unlock()
	b.objects.own[s.Name] = true
	b.objects.slice(s)
}

// slice adds a version. One like the last is the same, begun later: that of a write that is repeated. The lock is held.
func (o *objects) slice(s Slice) {
	of := o.slices[s.Service]
	if of == nil {
		of = map[string][]version{}
		o.slices[s.Service] = of
	}
	if n := len(of[s.Name]); n > 0 && o.own[s.Name] && slices.EqualFunc(of[s.Name][n-1].endpoints, s.Endpoints, same) {
		of[s.Name][n-1].at = time.Now()
		return
	}
	of[s.Name] = append(of[s.Name], version{time.Now(), s.Endpoints})
	if o.kept += len(s.Endpoints) + 1; o.kept > maxVersions {
		o.forget()
	}
}

// Listed says that all Slices so far were there before: that they came is no change.
func (b *Box) Listed() {
	b.objects.mu.Lock()
	defer b.objects.mu.Unlock()
	for _, of := range b.objects.slices {
		for _, versions := range of {
			versions[len(versions)-1].at = b.began
		}
	}
}

// empty says whether nobody has told of any Service.
func (o *objects) empty() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.services) == 0
}

// forget drops the older half of each slice's versions.
func (o *objects) forget() {
	o.kept = 0
	for _, of := range o.slices {
		for name, versions := range of {
			of[name] = slices.Clone(versions[len(versions)/2:])
			for _, v := range of[name] {
				o.kept += len(v.endpoints) + 1
			}
		}
	}
}

// Node takes note of whether a node is Ready now.
func (b *Box) Node(name string, ready bool) {
	b.objects.mu.Lock()
	defer b.objects.mu.Unlock()
	of := b.objects.nodes[name]
	if n := len(of); n == 0 || of[n-1].ready != ready {
		b.objects.nodes[name] = append(of[max(0, n-100):], nodeState{time.Now(), ready})
	}
}

// service returns the Service of a client's destination; false if none is known.
func (o *objects) service(to netip.AddrPort) (Service, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range o.services {
		if s.serves(to) {
			return s, true
		}
	}
	return Service{}, false
}

// at returns the endpoints of a Service at a time that have the family of a client's destination, and since when they
// are as they are.
func (o *objects) at(service string, to netip.Addr, t time.Time) (all []Endpoint, since time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	other := func(v version) bool {
		return len(v.endpoints) > 0 && v.endpoints[0].Addr.Unmap().Is4() != to.Unmap().Is4()
	}
	for _, versions := range o.slices[service] {
		if slices.ContainsFunc(versions, other) {
			continue // a slice has one family all its life
		}
		for i := len(versions) - 1; i >= 0; i-- {
			if !versions[i].at.After(t) {
				all = append(all, versions[i].endpoints...)
				since = later(since, versions[i].at)
				break
			}
		}
	}
	return all, since
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// standing is how an endpoint stands in the slices of all Services at a time.
type standing struct {
	// in says that it is in one that is not only terminating; ready that it is ready.
	in, ready bool
	// left and joined are when it last left and came, before or after the time; zero if it did not.
	left, joined time.Time
	// known says that a slice has ever had it.
	known bool
}

// standing works out how an endpoint stood.
func (o *objects) standing(a netip.AddrPort, t time.Time) (s standing) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, of := range o.slices {
		for _, versions := range of {
			s.follow(a, t, versions)
		}
	}
	return s
}

// follow goes through the versions of one slice.
func (s *standing) follow(a netip.AddrPort, t time.Time, versions []version) {
	was := false
	for i, v := range versions {
		at := slices.IndexFunc(v.endpoints, func(e Endpoint) bool { return e.is(a) })
		ready := at >= 0 && v.endpoints[at].Ready
		switch {
		case ready && !was && i > 0:
			s.joined = v.at
		case !ready && was && (s.left.IsZero() || !v.at.After(t)):
			s.left = v.at
		}
		was = ready
		s.known = s.known || at >= 0
		if !v.at.After(t) && (i+1 == len(versions) || versions[i+1].at.After(t)) {
			s.ready, s.in = s.ready || ready, s.in || at >= 0
		}
	}
}

// words say how an endpoint stood at a time.
func (s standing) words(t time.Time) string {
	switch {
	case !s.known:
		return "which no EndpointSlice has had"
	case s.ready && s.left.After(t):
		return fmt.Sprintf("which left its EndpointSlice %s later", apart(t, s.left))
	case s.ready:
		return "which is ready in its EndpointSlice"
	case !s.left.IsZero() && !s.left.After(t) && s.in:
		return fmt.Sprintf("which is not ready in its EndpointSlice since %s", apart(s.left, t))
	case !s.left.IsZero() && !s.left.After(t):
		return fmt.Sprintf("which left its EndpointSlice %s earlier", apart(s.left, t))
	case !s.in && s.joined.After(t):
		return fmt.Sprintf("which came into its EndpointSlice %s later", apart(t, s.joined))
	}
	return "which is not ready in its EndpointSlice"
}

// apart is how long it is from one time to another, for people.
func apart(from, to time.Time) string {
	d := to.Sub(from)
	if d < time.Second {
		return fmt.Sprintf("%.1f ms", d.Seconds()*1000)
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// unready lists nodes that were not Ready at a time, with since when.
func (o *objects) unready(t time.Time) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var all []string
	for name, states := range o.nodes {
		for i := len(states) - 1; i >= 0; i-- {
			if states[i].at.After(t) {
				continue
			}
			if !states[i].ready {
				all = append(all, fmt.Sprintf("%s is not Ready since %s", name, states[i].at.Format("15:04:05.0")))
			}
			break
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// words list the endpoints of a Service at a time, of a destination's family.
func (o *objects) words(service string, to netip.Addr, t time.Time) string {
	all, since := o.at(service, to, t)
	if since.IsZero() {
		return fmt.Sprintf("Service %s has no EndpointSlice", service)
	}
	ready := 0
	for _, e := range all {
		if e.Ready {
			ready++
		}
	}
	return fmt.Sprintf("Service %s has %d ready endpoints of %d, since %s (%s)", service, ready, len(all), apart(since, t),
		since.Format("15:04:05.000"))
}

// readyAt says how many endpoints of a Service, of a destination's family, were ready at a time, and since when its
// slices were as they were.
func (o *objects) readyAt(service string, to netip.Addr, t time.Time) (ready int, since time.Time) {
	all, since := o.at(service, to, t)
	for _, e := range all {
		if e.usable() {
			ready++
		}
	}
	return ready, since
}

// Span is a time; To is zero as long as it lasts.
type Span struct{ From, To time.Time }

// WithoutEndpoints returns when a Service had no usable endpoint of any family, as far as that is after a time. From is
// zero if it had none from the beginning.
func (b *Box) WithoutEndpoints(service string, since time.Time) []Span {
	b.objects.mu.Lock()
	defer b.objects.mu.Unlock()
	return without(b.objects.slices[service], since, func(*Endpoint) bool { return true })
}

// without returns when no slice had a usable endpoint that counts, as far as that is after a time.
func without(of map[string][]version, since time.Time, counts func(*Endpoint) bool) (all []Span) {
	type change struct {
		at     time.Time
		name   string
		usable bool
	}
	var changes []change
	for name, versions := range of {
		for _, v := range versions {
			usable := slices.ContainsFunc(v.endpoints, func(e Endpoint) bool { return e.usable() && counts(&e) })
			changes = append(changes, change{v.at, name, usable})
		}
	}
	slices.SortStableFunc(changes, func(a, b change) int { return a.at.Compare(b.at) })
	if len(changes) > 0 {
		all = []Span{{}}
	}
	now := map[string]bool{}
	for i, c := range changes {
		if now[c.name] = c.usable; !c.usable {
			delete(now, c.name)
		}
		open := len(all) > 0 && all[len(all)-1].To.IsZero()
		switch {
		case i+1 < len(changes) && changes[i+1].at.Equal(c.at): // several at once
		case len(now) == 0 && !open:
			all = append(all, Span{From: c.at})
		case len(now) > 0 && open:
			all[len(all)-1].To = c.at
		}
	}
	return slices.DeleteFunc(all, func(s Span) bool { return !s.To.IsZero() && !s.To.After(since) })
}

// becameUsable returns when a Service got endpoints of a destination's family last before a time, after it had none;
// false if it did not.
func (o *objects) becameUsable(service string, to netip.Addr, t time.Time) (at time.Time, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	family := func(e *Endpoint) bool { return e.Addr.Unmap().Is4() == to.Unmap().Is4() }
	for _, s := range without(o.slices[service], time.Time{}, family) {
		if !s.To.IsZero() && !s.To.After(t) {
			at, ok = s.To, true
		}
	}
	return at, ok
}
