package inspect

import (
	"cmp"
	"context"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const (
	// listAlways is the number of frontends up to which all are read each time.
	listAlways = 4096
	// keysPerSecond limits how many elements are read if there are more frontends: first the visible ones, then the others
	// in turn.
	keysPerSecond = 2000
	// relistAfter is how long new frontends may stay unseen if there are too many to read each time.
	relistAfter = 30 * time.Second
)

// meter is a counter of the kernel, and its last reading.
type meter struct {
	connections uint64
	at          time.Time
	// rate is in connections per second. measured is true after two readings.
	rate     float64
	measured bool
}

// update adds a reading. If the counter is lower than before, its element was replaced and counted from 0.
func (m *meter) update(connections uint64, at time.Time) {
	if !m.at.IsZero() && at.After(m.at) {
		m.rate, m.measured = float64(dataplane.Increase(m.connections, connections))/at.Sub(m.at).Seconds(), true
	}
	m.connections, m.at = connections, at
}

// frontendMeter counts the connections to a frontend, by its Counted.
type frontendMeter struct {
	meter
	dataplane.NamedCount
	// over counts what was over the limits of its pool.
	over meter
	port *portMeter
	seen int
}

// name returns the name of the Service port, or the frontend's address if the kernel does not name its Service.
func (m *frontendMeter) name() string {
	if m.Port == (dataplane.PortName{}) {
		return m.Key.String()
	}
	return m.Port.String()
}

// endpointMeter counts the connections to an endpoint of a port, over all of its frontends.
type endpointMeter struct {
	addr netip.AddrPort
	// places are the counters whose sum is the endpoint's.
	places map[endpointPlace]*meter
	// scheduler sums IPVS's counts of the endpoint; nil if IPVS does not have it.
	scheduler *dataplane.SchedulerCount
}

// endpointPlace identifies one counter of an endpoint: its place in a pool, or the frontend at which IPVS counts it.
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

// portMeter is a Service port: one line of top.
type portMeter struct {
	name      string
	port      dataplane.PortName
	frontends []*frontendMeter
	// endpoints are read only while they are shown.
	endpoints map[netip.AddrPort]*endpointMeter
	// scheduler sums IPVS's counts of the frontends; nil if they are not shown, or IPVS schedules none.
	scheduler *dataplane.SchedulerCount
}

func (p *portMeter) sum() (rate float64, total uint64) {
	for _, f := range p.frontends {
		rate, total = rate+f.rate, total+f.connections
	}
	return rate, total
}

// overLimits sums what was over the limits of the port's pools, which frontends share.
func (p *portMeter) overLimits() (rate float64, total uint64) {
	type pool struct {
		v4 bool
		id uint32
	}
	seen := map[pool]bool{}
	for _, f := range p.frontends {
		if of := (pool{f.Key.Addr.Is4(), f.Pool}); !seen[of] {
			seen[of] = true
			rate, total = rate+f.over.rate, total+f.over.connections
		}
	}
	return rate, total
}

// notCounted reports whether no frontend of the port is counted.
func (p *portMeter) notCounted() bool {
	return !slices.ContainsFunc(p.frontends, func(f *frontendMeter) bool { return !f.Uncounted })
}

// scheduled reports whether IPVS chooses the endpoint at any frontend of the port.
func (p *portMeter) scheduled() bool {
	return slices.ContainsFunc(p.frontends, func(f *frontendMeter) bool { return f.Scheduled })
}

// choices returns the size of the largest pool of any frontend of the port. It may be a bound.
func (p *portMeter) choices() (n int, atMost bool) {
	for _, f := range p.frontends {
		if f.Endpoints > n {
			n, atMost = f.Endpoints, f.AtMost
		}
	}
	return n, atMost
}

// Sampler reads counters repeatedly, and computes rates.
type Sampler struct {
	// Only, if not empty, is the one Service, or Service port, that is sampled.
	Only string
	// Records is the address of the proxy's metrics server, which is asked for traffic; zero: it is not asked.
	Records netip.AddrPort
	traffic trafficMeter
	// Health is that of its health server, which is asked what asked for Services' backends; zero: it is not asked.
	Health netip.AddrPort
	by     map[string]string // by Service
	byRead time.Time

	from reconcile.Inspector
	now  func() time.Time

	frontends map[dataplane.Counted]*frontendMeter
	ports     map[string]*portMeter
	// listed is when all frontends were last read, and version that of the tables then. round counts such readings, and
	// next is the frontend whose turn it is.
	listed           time.Time
	version, counted string
	round            int
	next             int
	order            []*frontendMeter
	// unhealthy is what the tables said of endpoints.
	unhealthy []dataplane.EndpointHealth
	// read is how many elements the last sample read.
	read int
}

// NewSampler returns a sampler without readings.
func NewSampler(from reconcile.Inspector) *Sampler {
	return &Sampler{from: from, now: time.Now, frontends: map[dataplane.Counted]*frontendMeter{},
		ports: map[string]*portMeter{}}
}

// Installed reports whether there is anything to count.
func (s *Sampler) Installed() bool { return s.version != "" || len(s.ports) > 0 }

// Names returns the known Service ports, unsorted.
func (s *Sampler) Names() []string { return slices.Collect(maps.Keys(s.ports)) }

// Sample reads counters. Visible are the ports that are shown, and expanded those whose endpoints are shown too. With
// all, it reads every frontend at any cost; otherwise interval, the time since the last sample, limits how many are
// read.
func (s *Sampler) Sample(ctx context.Context, visible, expanded []string, interval time.Duration, all bool) error {
	s.read = 0
	if all || len(s.frontends) <= listAlways {
		if err := s.readAll(ctx); err != nil {
			return err
		}
	} else if err := s.readSlice(ctx, visible, int(interval.Seconds()*keysPerSecond)); err != nil {
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
	if s.Records.IsValid() {
		s.traffic.read(ctx, s.Records, s.now())
	}
	s.readBy(ctx)
	return nil
}

// readAll reads all frontends, and drops those that are gone.
func (s *Sampler) readAll(ctx context.Context) error {
	c, err := s.from.Counters(ctx, dataplane.CountersAsked{All: true})
	if err != nil {
		return err
	}
	s.round++
	s.read += c.Read
	s.version, s.counted, s.listed, s.unhealthy = c.Version, c.Counted, s.now(), c.Unhealthy
	for i := range c.Frontends {
		s.record(&c.Frontends[i], s.listed)
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

// record stores a reading of a frontend.
func (s *Sampler) record(c *dataplane.NamedCount, at time.Time) {
	m := s.frontends[c.Counted]
	if m == nil || m.Port != c.Port {
		m = &frontendMeter{NamedCount: *c}
		if name := m.name(); s.Only != "" && name != s.Only && !strings.HasPrefix(name, s.Only+":") {
			return
		}
		s.frontends[c.Counted] = m
	}
	m.NamedCount, m.seen = *c, s.round
	m.meter.update(c.Packets, at)
	m.over.update(c.OverLimit, at)
}

// readSlice reads some frontends: those of visible ports, then others as far as the limit allows.
func (s *Sampler) readSlice(ctx context.Context, visible []string, most int) error {
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
		return s.readAll(ctx)
	}
	s.read += c.Read
	s.unhealthy = c.Unhealthy
	at := s.now()
	for i := range c.Frontends {
		m := s.frontends[c.Frontends[i].Counted]
		if m != nil && m.Port == c.Frontends[i].Port { // others are seen when all are read again
			s.record(&c.Frontends[i], at)
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

// take stores readings of all endpoints of a port.
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
		m.update(connections, now)
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

// Sample is the content of top; as JSON it is in docs/ANSWERS.md.
type Sample struct {
	// Interval is the seconds between the readings. Rate is the sum of all ports, in connections per second.
	Interval float64 `json:"intervalSeconds"`
	Rate     float64 `json:"rate"`
	// PortCount is how many service ports there are; Ports may have fewer.
	PortCount int          `json:"portCount"`
	Ports     []PortSample `json:"ports"`
	// Counted is one of dataplane.CountedEndpoints and its like; empty if unknown.
	Counted string `json:"counted,omitempty"`
	// TrafficMinute is when the minute began that ports have the Traffic of; zero without records.
	TrafficMinute time.Time `json:"trafficMinute,omitzero"`
}

// PortSample is a service port in a sample.
type PortSample struct {
	// Name is that of the service port, and Service and Port its parts. If the kernel does not name the frontend's
	// Service, Name and Service are the address.
	Name    string `json:"-"`
	Service string `json:"service"`
	Port    string `json:"port,omitempty"`
	// For names what asked for the Service's backends; empty if nobody said, or no proxy answers.
	For   string  `json:"for,omitempty"`
	Rate  float64 `json:"rate"`
	Total uint64  `json:"total"`
	// OverLimit are the packets of these that were over a limit of the Service; nil if none was.
	OverLimit *OverLimitSample `json:"overLimit,omitempty"`
	// Traffic is that of the connections which ended in the last whole minute, its average; nil without records.
	Traffic *Traffic `json:"traffic,omitempty"`
	// NotCounted is true if no frontend of the port is counted.
	NotCounted bool `json:"notCounted,omitempty"`
	// Choices is the size of the largest pool of any frontend; AtMost says that it is a bound, at most a quarter too
	// large. Scheduled is true if IPVS chooses.
	Choices   int  `json:"endpointCount"`
	AtMost    bool `json:"endpointCountAtMost,omitempty"`
	Scheduled bool `json:"scheduled,omitempty"`
	// Scheduler is nil, and Frontends and Endpoints are empty, unless the port is expanded.
	Scheduler *dataplane.SchedulerCount `json:"ipvs,omitempty"`
	Frontends []FrontendSample          `json:"frontends"`
	Endpoints []EndpointSample          `json:"endpoints,omitempty"`
	// Ejected are endpoints of the Service that new connections from this node do not reach, whatever their port.
	Ejected []EjectedSample `json:"ejected,omitempty"`
}

// OverLimitSample counts the packets that were refused or dropped because of limits.
type OverLimitSample struct {
	Rate  float64 `json:"rate"`
	Total uint64  `json:"total"`
}

// EjectedSample is an ejected endpoint.
type EjectedSample struct {
	socket
	Cause string    `json:"cause"`
	Since time.Time `json:"since"`
}

// FrontendSample is a frontend in a sample.
type FrontendSample struct {
	socket
	Protocol string  `json:"protocol"`
	Outside  bool    `json:"outside,omitempty"`
	Rate     float64 `json:"rate"`
	Total    uint64  `json:"total"`
}

// EndpointSample is an endpoint in a sample.
type EndpointSample struct {
	socket
	Rate      float64                   `json:"rate"`
	Total     uint64                    `json:"total"`
	Scheduler *dataplane.SchedulerCount `json:"ipvs,omitempty"`
}

// The orders in which ports are shown.
const (
	ByRate  = "rate"
	ByTotal = "total"
	ByName  = "name"
)

// Orders are all of them.
var Orders = []string{ByRate, ByTotal, ByName}

// Result returns the latest sample in an order, without frontends and endpoints.
func (s *Sampler) Result(order string, interval time.Duration) *Sample {
	out := &Sample{Interval: interval.Seconds(), Counted: s.counted, PortCount: len(s.ports),
		Ports: make([]PortSample, 0, len(s.ports))}
	ejected := ejectedOf(s.unhealthy)
	for _, p := range s.ports {
		rate, total := p.sum()
		choices, atMost := p.choices()
		out.Rate += rate
		var over *OverLimitSample
		if rate, total := p.overLimits(); total > 0 {
			over = &OverLimitSample{rounded(rate), total}
		}
		service := p.name
		if p.port != (dataplane.PortName{}) {
			service = p.port.Service.String()
		}
		out.Ports = append(out.Ports, PortSample{Name: p.name, Service: service, Port: p.port.Port, For: s.by[service],
			Rate: rounded(rate), Total: total, Choices: choices, AtMost: atMost, Scheduled: p.scheduled(), OverLimit: over,
			NotCounted: p.notCounted(), Ejected: ejected[p.port.Service], Traffic: s.traffic.of(service, p.port.Port)})
	}
	if s.traffic.ports != nil {
		out.TrafficMinute = s.traffic.minute
	}
	out.Rate = rounded(out.Rate)
	slices.SortFunc(out.Ports, func(a, b PortSample) int {
		return compareIn(order, a.Rate, b.Rate, a.Total, b.Total, a.Name, b.Name)
	})
	return out
}

// rounded keeps three decimal places: a rate is not more exact than that.
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

// Details fills in a port's frontends and endpoints, if it is expanded.
func (s *Sampler) Details(t *PortSample, order string) {
	p := s.ports[t.Name]
	t.Scheduler = p.scheduler
	for _, f := range slices.SortedFunc(slices.Values(p.frontends), func(a, b *frontendMeter) int {
		return cmp.Or(a.Key.Compare(b.Key), compareBool(a.Outside, b.Outside))
	}) {
		t.Frontends = append(t.Frontends, FrontendSample{socket{f.Key.Addr, f.Key.Port}, f.Key.Protocol.String(), f.Outside,
			rounded(f.rate), f.connections})
	}
	for _, e := range p.endpoints {
		rate, total := e.sum()
		t.Endpoints = append(t.Endpoints, EndpointSample{socketOf(e.addr), rounded(rate), total, e.scheduler})
	}
	slices.SortFunc(t.Endpoints, func(a, b EndpointSample) int {
		if order == ByName {
			return a.AddrPort().Compare(b.AddrPort())
		}
		return cmp.Or(compareIn(order, a.Rate, b.Rate, a.Total, b.Total, "", ""),
			a.AddrPort().Compare(b.AddrPort()))
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

// Detailed returns the latest sample with the endpoints of some ports.
func (s *Sampler) Detailed(order string, interval time.Duration, expanded map[string]bool) *Sample {
	sample := s.Result(order, interval)
	for i := range sample.Ports {
		if expanded[sample.Ports[i].Name] {
			s.Details(&sample.Ports[i], order)
		}
	}
	return sample
}

// ejectedOf returns the endpoints that are ejected from each Service, each once.
func ejectedOf(list []dataplane.EndpointHealth) map[snapshot.Name][]EjectedSample {
	ejected := map[snapshot.Name][]EjectedSample{}
	for _, e := range list {
		same := func(o EjectedSample) bool { return o.AddrPort() == e.Endpoint }
		if of := ejected[e.Port.Service]; e.Ejected && !slices.ContainsFunc(of, same) {
			ejected[e.Port.Service] = append(of, EjectedSample{socketOf(e.Endpoint), e.Cause.String(), e.Since})
		}
	}
	return ejected
}

// Notice explains what is missing because it is not counted; empty if everything is.
func (s *Sample) Notice() string {
	n := notCounted(s.Counted)
	if n == "" && slices.ContainsFunc(s.Ports, func(p PortSample) bool { return p.NotCounted }) {
		return notByWishMany
	}
	return n
}
