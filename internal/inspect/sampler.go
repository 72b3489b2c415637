package inspect

import (
	"cmp"
	"context"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

const (
	// listAlways is how many frontends there may be for all of them to be read each time.
	listAlways = 4096
	// keysPerSecond is how many elements are read otherwise, of frontends and of the pools they lead to: first those
	// that are looked at, the others in turn.
	keysPerSecond = 2000
	// relistAfter is how long new frontends may stay unseen if there are too many to read all of them each time.
	relistAfter = 30 * time.Second
)

// meter is a counter of the kernel, with what it was when it was last read.
type meter struct {
	connections uint64
	at          time.Time
	// rate is in connections a second; measured says that there were two readings.
	rate     float64
	measured bool
}

// read takes a reading. A counter that went back belongs to an element that was replaced: it began anew.
func (m *meter) read(connections uint64, at time.Time) {
	if !m.at.IsZero() && at.After(m.at) {
		more := connections
		if connections >= m.connections {
			more = connections - m.connections
		}
		m.rate, m.measured = float64(more)/at.Sub(m.at).Seconds(), true
	}
	m.connections, m.at = connections, at
}

// frontendMeter counts the connections to a frontend, by its Counted.
type frontendMeter struct {
	meter
	dataplane.NamedCount
	port *portMeter
	seen int
}

// name is that of the service port, or the address of a frontend of which the kernel does not say whose it is.
func (m *frontendMeter) name() string {
	if m.Port == (dataplane.PortName{}) {
		return m.Key.String()
	}
	return m.Port.String()
}

// endpointMeter counts the connections to an endpoint of a port, over all of its frontends.
type endpointMeter struct {
	addr netip.AddrPort
	// places are the counters that add up to it.
	places map[endpointPlace]*meter
	// scheduler adds up what IPVS says of it; nil if that has not got it.
	scheduler *dataplane.SchedulerCount
}

// endpointPlace tells one counter of an endpoint from others: a place of a pool, or the frontend at which IPVS counts
// it.
type endpointPlace struct {
	place    dataplane.Place
	frontend dataplane.Key
}

func (e *endpointMeter) sum() (rate float64, total uint64) {
	for _, m := range e.places {
		rate, total = rate+m.rate, total+m.connections
	}
	return rate, total
}

// portMeter is a service port: the line of top.
type portMeter struct {
	name      string
	port      dataplane.PortName
	frontends []*frontendMeter
	// endpoints are read only while somebody looks at them.
	endpoints map[netip.AddrPort]*endpointMeter
	// scheduler adds up what IPVS says of its frontends; nil if they are not looked at, or it schedules none.
	scheduler *dataplane.SchedulerCount
}

func (p *portMeter) sum() (rate float64, total uint64) {
	for _, f := range p.frontends {
		rate, total = rate+f.rate, total+f.connections
	}
	return rate, total
}

// notCounted says whether nothing is counted at the addresses of the port.
func (p *portMeter) notCounted() bool {
	return !slices.ContainsFunc(p.frontends, func(f *frontendMeter) bool { return !f.Uncounted })
}

// scheduled says whether IPVS chooses the endpoint at any frontend of the port.
func (p *portMeter) scheduled() bool {
	return slices.ContainsFunc(p.frontends, func(f *frontendMeter) bool { return f.Scheduled })
}

// choices gives the most endpoints that any frontend of the port chooses from.
func (p *portMeter) choices() int {
	n := 0
	for _, f := range p.frontends {
		n = max(n, f.Endpoints)
	}
	return n
}

// Sampler reads counters again and again, and makes rates of them.
type Sampler struct {
	// Only, if not empty, is the one Service, or service port, that counts.
	Only string

	from reconcile.Inspector
	now  func() time.Time

	frontends map[dataplane.Counted]*frontendMeter
	ports     map[string]*portMeter
	// listed is when all frontends were read, with the version of then; round counts such readings, next is whose turn
	// it is.
	listed           time.Time
	version, counted string
	round            int
	next             int
	order            []*frontendMeter
	// read is how many elements the last sample read.
	read int
}

// NewSampler gives a sampler that has read nothing yet.
func NewSampler(from reconcile.Inspector) *Sampler {
	return &Sampler{from: from, now: time.Now, frontends: map[dataplane.Counted]*frontendMeter{},
		ports: map[string]*portMeter{}}
}

// Installed says whether anything was found to count.
func (s *Sampler) Installed() bool { return s.version != "" || len(s.ports) > 0 }

// Names gives the service ports that are known, unsorted.
func (s *Sampler) Names() (names []string) {
	for name := range s.ports {
		names = append(names, name)
	}
	return names
}

// Sample reads counters. Visible are the ports that somebody looks at, expanded those whose endpoints too. All reads
// every frontend, whatever it costs; otherwise interval, the time since the last sample, bounds how many are read.
func (s *Sampler) Sample(ctx context.Context, visible, expanded []string, interval time.Duration, all bool) error {
	s.read = 0
	if all || len(s.frontends) <= listAlways {
		if err := s.list(ctx); err != nil {
			return err
		}
	} else if err := s.slice(ctx, visible, int(interval.Seconds()*keysPerSecond)); err != nil {
		return err
	}
	if err := s.endpoints(ctx, expanded); err != nil {
		return err
	}
	for name, p := range s.ports {
		if !slices.Contains(expanded, name) {
			p.endpoints, p.scheduler = nil, nil
		}
	}
	return nil
}

// list reads all frontends; those that are gone are forgotten.
func (s *Sampler) list(ctx context.Context) error {
	c, err := s.from.Counters(ctx, dataplane.CountersAsked{All: true})
	if err != nil {
		return err
	}
	s.round++
	s.read += c.Read
	s.version, s.counted, s.listed = c.Version, c.Counted, s.now()
	for i := range c.Frontends {
		s.take(&c.Frontends[i], s.listed)
	}
	s.ports = map[string]*portMeter{}
	s.order = s.order[:0]
	for key, m := range s.frontends {
		if m.seen != s.round && c.Whole { // else those that are missing may still be there
			delete(s.frontends, key)
			continue
		}
		s.order = append(s.order, m)
		name := m.name()
		if s.ports[name] == nil {
			s.ports[name] = cmp.Or(m.port, &portMeter{name: name, port: m.Port})
			s.ports[name].frontends = s.ports[name].frontends[:0]
		}
		m.port = s.ports[name]
		m.port.frontends = append(m.port.frontends, m)
	}
	return nil
}

// take takes a reading of a frontend.
func (s *Sampler) take(c *dataplane.NamedCount, at time.Time) {
	m := s.frontends[c.Counted]
	if m == nil || m.Port != c.Port {
		m = &frontendMeter{NamedCount: *c}
		if name := m.name(); s.Only != "" && name != s.Only && !strings.HasPrefix(name, s.Only+":") {
			return
		}
		s.frontends[c.Counted] = m
	}
	m.NamedCount, m.seen = *c, s.round
	m.meter.read(c.Packets, at)
}

// slice reads some of the frontends: those of visible ports, and then as many others as are left.
func (s *Sampler) slice(ctx context.Context, visible []string, most int) error {
	ask := dataplane.CountersAsked{}
	wanted, pools := map[*frontendMeter]bool{}, map[uint32]bool{}
	want := func(m *frontendMeter) {
		if !wanted[m] {
			ask.Frontends = append(ask.Frontends, m.FrontendCount)
		}
		wanted[m], pools[m.Pool] = true, true
	}
	for _, name := range visible {
		if p := s.ports[name]; p != nil {
			for _, m := range p.frontends {
				want(m)
			}
		}
	}
	for n := 0; len(wanted)+len(pools)+1 < most && n < len(s.order); n++ {
		want(s.order[s.next%len(s.order)])
		s.next++
	}
	c, err := s.from.Counters(ctx, ask)
	if err != nil {
		return err
	}
	if c.Version != s.version && s.now().Sub(s.listed) >= relistAfter {
		return s.list(ctx)
	}
	s.read += c.Read
	at := s.now()
	for i := range c.Frontends {
		m := s.frontends[c.Frontends[i].Counted]
		if m != nil && m.Port == c.Frontends[i].Port { // others are seen when all are read again
			s.take(&c.Frontends[i], at)
		}
	}
	return nil
}

// endpoints reads the counters of the endpoints of ports.
func (s *Sampler) endpoints(ctx context.Context, names []string) error {
	for _, name := range names {
		p := s.ports[name]
		if p == nil {
			continue
		}
		var ask dataplane.CountersAsked
		for _, m := range p.frontends {
			ask.Endpoints = append(ask.Endpoints, m.FrontendCount)
		}
		c, err := s.from.Counters(ctx, ask)
		if err != nil {
			return err
		}
		s.read += c.Read
		p.take(c, s.now())
	}
	return nil
}

// take takes readings of all endpoints of a port.
func (p *portMeter) take(c *dataplane.Counters, now time.Time) {
	found := map[netip.AddrPort]*endpointMeter{}
	at := func(ep netip.AddrPort) *endpointMeter {
		if found[ep] == nil {
			found[ep] = &endpointMeter{addr: ep, places: map[endpointPlace]*meter{}}
		}
		return found[ep]
	}
	count := func(ep netip.AddrPort, place endpointPlace, connections uint64) {
		m := &meter{}
		if before := p.endpoints[ep]; before != nil && before.places[place] != nil {
			m = before.places[place]
		}
		m.read(connections, now)
		at(ep).places[place] = m
	}
	for i := range c.Endpoints {
		e := &c.Endpoints[i]
		count(e.Endpoint, endpointPlace{place: e.Place}, e.Packets)
	}
	p.scheduler = nil
	for i := range c.Scheduled {
		is := &c.Scheduled[i]
		if p.scheduler == nil {
			p.scheduler = &dataplane.SchedulerCount{}
		}
		if !is.Endpoint.IsValid() {
			p.scheduler.Add(is)
			continue
		}
		count(is.Endpoint, endpointPlace{frontend: is.Frontend}, is.Connections)
		ep := at(is.Endpoint)
		if ep.scheduler == nil {
			ep.scheduler = &dataplane.SchedulerCount{}
		}
		ep.scheduler.Add(is)
		p.scheduler.Active += is.Active
		p.scheduler.Inactive += is.Inactive
	}
	p.endpoints = found
}

// Sample is what top shows.
type Sample struct {
	// Interval is the time between the readings, and Rate that of all ports together, in connections a second.
	Interval time.Duration
	Rate     float64
	Ports    []PortSample
	// Counted is one of dataplane.CountedEndpoints and its like; empty if that is not known.
	Counted string
}

// PortSample is a service port in a sample.
type PortSample struct {
	// Port has no name if the kernel does not say whose the frontend is; Name is then its address.
	Port  dataplane.PortName
	Name  string
	Rate  float64
	Total uint64
	// NotCounted says that nothing is counted at its addresses.
	NotCounted bool
	// Choices is the most endpoints that any of its frontends chooses from; Scheduled says that IPVS chooses.
	Choices   int
	Scheduled bool
	// Scheduler is nil, and Frontends and Endpoints are empty, unless somebody looks at the port.
	Scheduler *dataplane.SchedulerCount
	Frontends []FrontendSample
	Endpoints []EndpointSample
}

// FrontendSample is a frontend in a sample.
type FrontendSample struct {
	dataplane.Counted
	Rate  float64
	Total uint64
}

// EndpointSample is an endpoint in a sample.
type EndpointSample struct {
	netip.AddrPort
	Rate      float64
	Total     uint64
	Scheduler *dataplane.SchedulerCount
}

// The orders in which ports are shown.
const (
	ByRate  = "rate"
	ByTotal = "total"
	ByName  = "name"
)

// Orders are all of them.
var Orders = []string{ByRate, ByTotal, ByName}

// Result gives what is known now, in an order, without frontends and endpoints.
func (s *Sampler) Result(order string, interval time.Duration) *Sample {
	out := &Sample{Interval: interval, Counted: s.counted, Ports: make([]PortSample, 0, len(s.ports))}
	for _, p := range s.ports {
		rate, total := p.sum()
		out.Rate += rate
		out.Ports = append(out.Ports, PortSample{Port: p.port, Name: p.name, Rate: rounded(rate), Total: total,
			Choices:   p.choices(),
			Scheduled: p.scheduled(), NotCounted: p.notCounted()})
	}
	out.Rate = rounded(out.Rate)
	slices.SortFunc(out.Ports, func(a, b PortSample) int {
		return compareIn(order, a.Rate, b.Rate, a.Total, b.Total, a.Name, b.Name)
	})
	return out
}

// rounded leaves three digits after the point: a rate is no more exact than that.
func rounded(r float64) float64 { return math.Round(r*1000) / 1000 }

func compareIn(order string, rateA, rateB float64, totalA, totalB uint64, nameA, nameB string) int {
	byNames := strings.Compare(nameA, nameB)
	switch order {
	case ByName:
		return byNames
	case ByTotal:
		return cmp.Or(cmp.Compare(totalB, totalA), byNames)
	}
	return cmp.Or(cmp.Compare(rateB, rateA), cmp.Compare(totalB, totalA), byNames)
}

// Details fills in a port's frontends and endpoints, as far as somebody looks at them.
func (s *Sampler) Details(t *PortSample, order string) {
	p := s.ports[t.Name]
	t.Scheduler = p.scheduler
	for _, f := range p.frontends {
		t.Frontends = append(t.Frontends, FrontendSample{f.Counted, rounded(f.rate), f.connections})
	}
	slices.SortFunc(t.Frontends, func(a, b FrontendSample) int {
		return cmp.Or(a.Key.Compare(b.Key), compareBool(a.Outside, b.Outside))
	})
	for _, e := range p.endpoints {
		rate, total := e.sum()
		t.Endpoints = append(t.Endpoints, EndpointSample{e.addr, rounded(rate), total, e.scheduler})
	}
	slices.SortFunc(t.Endpoints, func(a, b EndpointSample) int {
		if order == ByName {
			return a.Compare(b.AddrPort)
		}
		return cmp.Or(compareIn(order, a.Rate, b.Rate, a.Total, b.Total, "", ""), a.Compare(b.AddrPort))
	})
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// Detailed gives what is known, with the endpoints of some ports.
func (s *Sampler) Detailed(order string, interval time.Duration, expanded map[string]bool) *Sample {
	sample := s.Result(order, interval)
	for i := range sample.Ports {
		if expanded[sample.Ports[i].Name] {
			s.Details(&sample.Ports[i], order)
		}
	}
	return sample
}

// Notice says what cannot be seen because it is not counted; empty if all is.
func (s *Sample) Notice() string {
	n := notCounted(s.Counted)
	if n == "" && slices.ContainsFunc(s.Ports, func(p PortSample) bool { return p.NotCounted }) {
		return notByWishMany
	}
	return n
}
