package main

import (
	"cmp"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// counters is where top reads; a *kernel.Reader.
type counters interface {
	Get(f ipfamily.Family, set nft.SetID, keys []nft.Element) ([]nft.Listed, error)
	List(f ipfamily.Family, set nft.SetID) (elements []nft.Listed, whole bool, err error)
	Revisions() (ipfamily.Per[nft.Revision], error)
}

const (
	// listAlways is how many frontends there may be for all of them to be listed each time.
	listAlways = 4096
	// keysPerSecond is how many elements are read by their keys otherwise, of frontends and of the pools they lead to: first
	// those that are looked at, the others in turn.
	keysPerSecond = 2000
	// relistAfter is how long new frontends may stay unseen if there are too many to list them each time.
	relistAfter = 30 * time.Second
)

// meter is a counter of the kernel, with what it was when it was last read.
type meter struct {
	packets uint64
	at      time.Time
	// rate is in connections a second; measured says that there were two readings.
	rate     float64
	measured bool
}

// read takes a reading. A counter that went back belongs to an element that was replaced: it began anew.
func (m *meter) read(packets uint64, at time.Time) {
	if !m.at.IsZero() && at.After(m.at) {
		more := packets
		if packets >= m.packets {
			more = packets - m.packets
		}
		m.rate, m.measured = float64(more)/at.Sub(m.at).Seconds(), true
	}
	m.packets, m.at = packets, at
}

// frontendMeter counts the connections to a frontend: one element of services or outside-services.
type frontendMeter struct {
	meter
	element nft.Element
	// pool is the element of the pool that it leads to.
	pool   nft.Element
	count  dataplane.FrontendCount
	family ipfamily.Family
	port   *portMeter
	seen   int
}

// endpointMeter counts the connections to an endpoint of a port, over all of its frontends.
type endpointMeter struct {
	addr netip.AddrPort
	// elements are the counters that add up to it, by their set and key.
	elements map[string]*meter
	// ipvs adds up what IPVS says of it; nil if that has not got it.
	ipvs *topIPVS
}

func (e *endpointMeter) sum() (rate float64, total uint64) {
	for _, m := range e.elements {
		rate, total = rate+m.rate, total+m.packets
	}
	return rate, total
}

// portMeter is a service port: the line of top.
type portMeter struct {
	name      string
	frontends []*frontendMeter
	// endpoints are read only while somebody looks at them.
	endpoints map[netip.AddrPort]*endpointMeter
	// ipvs adds up what IPVS says of its frontends; nil if they are not looked at, or it schedules none.
	ipvs *topIPVS
}

func (p *portMeter) sum() (rate float64, total uint64) {
	for _, f := range p.frontends {
		rate, total = rate+f.rate, total+f.packets
	}
	return rate, total
}

// notCounted says whether nothing is counted at the addresses of the port.
func (p *portMeter) notCounted() bool {
	return !slices.ContainsFunc(p.frontends, func(f *frontendMeter) bool { return !f.count.Uncounted })
}

// scheduled says whether IPVS chooses the endpoint at any frontend of the port.
func (p *portMeter) scheduled() bool {
	return slices.ContainsFunc(p.frontends, func(f *frontendMeter) bool { return f.count.Scheduled })
}

// choices gives the most endpoints that any frontend of the port chooses from.
func (p *portMeter) choices() int {
	n := 0
	for _, f := range p.frontends {
		n = max(n, f.count.Endpoints)
	}
	return n
}

// sampler reads the counters, and remembers.
type sampler struct {
	from counters
	ipvs func(dataplane.Key) (ipvsplugin.ServiceStatistics, bool, error)
	now  func() time.Time
	// only, if not empty, is the one Service, or service port, that counts.
	only string

	frontends map[string]*frontendMeter
	pools     map[poolOfFamily]nft.Element
	ports     map[string]*portMeter
	// listed is when all frontends were listed, with the revisions of then; round counts listings, next is whose turn it is.
	listed    time.Time
	revisions ipfamily.Per[nft.Revision]
	round     int
	next      int
	order     []*frontendMeter
	// read is how many elements the last sample read.
	read int
}

type poolOfFamily struct {
	family ipfamily.Family
	id     uint32
}

func newSampler(from counters) *sampler {
	return &sampler{from: from, ipvs: ipvsplugin.ReadService, now: time.Now, frontends: map[string]*frontendMeter{},
		pools: map[poolOfFamily]nft.Element{}, ports: map[string]*portMeter{}}
}

// sample reads counters. Visible are the ports that somebody looks at, expanded those whose endpoints too. All reads every
// frontend, whatever it costs.
func (s *sampler) sample(visible, expanded []string, interval time.Duration, all bool) error {
	s.read = 0
	revisions, err := s.from.Revisions()
	if err != nil {
		return err
	}
	due := revisions != s.revisions && s.now().Sub(s.listed) >= relistAfter
	if all || len(s.frontends) <= listAlways || due {
		if err := s.list(); err != nil {
			return err
		}
		s.revisions, s.listed = revisions, s.now()
	} else if err := s.slice(visible, int(interval.Seconds()*keysPerSecond)); err != nil {
		return err
	}
	for _, name := range expanded {
		if p := s.ports[name]; p != nil {
			if err := s.endpoints(p); err != nil {
				return err
			}
		}
	}
	for name, p := range s.ports {
		if !slices.Contains(expanded, name) {
			p.endpoints, p.ipvs = nil, nil
		}
	}
	return nil
}

// list reads all frontends; those that are gone are forgotten.
func (s *sampler) list() error {
	s.round++
	for _, f := range ipfamily.All {
		pools, whole, err := s.from.List(f, nft.Pools)
		if err != nil {
			return err
		}
		if s.read += len(pools); whole { // those that are missing may still be there
			maps.DeleteFunc(s.pools, func(p poolOfFamily, _ nft.Element) bool { return p.family == f })
		}
		s.takePools(f, pools)
		for _, set := range nft.FrontendSets() {
			listed, whole, err := s.from.List(f, set)
			if err != nil {
				return err
			}
			s.read += len(listed)
			at := s.now()
			for i := range listed {
				s.take(f, &listed[i], at)
			}
			if !whole { // those that are missing may still be there
				for _, m := range s.frontends {
					if m.family == f && m.element.Set == set {
						m.seen = s.round
					}
				}
			}
		}
	}
	s.ports = map[string]*portMeter{}
	s.order = s.order[:0]
	for key, m := range s.frontends {
		if m.seen != s.round {
			delete(s.frontends, key)
			continue
		}
		s.order = append(s.order, m)
		name := portName(&m.element)
		if s.ports[name] == nil {
			s.ports[name] = cmp.Or(m.port, &portMeter{name: name})
			s.ports[name].frontends = s.ports[name].frontends[:0]
		}
		m.port = s.ports[name]
		m.port.frontends = append(m.port.frontends, m)
	}
	return nil
}

// portName gives the name that the comment tells; of a frontend without a comment, its address.
func portName(e *nft.Element) string {
	if e.Comment != "" {
		return e.Comment
	}
	return e.FrontendKey().String()
}

func meterKey(f ipfamily.Family, e *nft.Element) string {
	return f.NFT() + string(rune(e.Set)) + string(e.Key())
}

// take takes a reading of a frontend.
func (s *sampler) take(f ipfamily.Family, l *nft.Listed, at time.Time) {
	if name := portName(&l.Element); s.only != "" && name != s.only && !strings.HasPrefix(name, s.only+":") {
		return
	}
	key := meterKey(f, &l.Element)
	m := s.frontends[key]
	if m == nil || m.element.Comment != l.Comment {
		m = &frontendMeter{family: f}
		s.frontends[key] = m
	}
	m.element, m.seen, m.pool = l.Element, s.round, s.pools[poolOfFamily{f, l.PoolID()}]
	m.count, _ = l.FrontendCount(&m.pool)
	m.meter.read(l.Packets, at)
}

// slice reads some of the frontends by their keys: those of visible ports, and then as many others as are left.
func (s *sampler) slice(visible []string, most int) error {
	wanted, pools := map[*frontendMeter]bool{}, map[poolOfFamily]bool{}
	want := func(m *frontendMeter) {
		wanted[m], pools[poolOfFamily{m.family, m.element.PoolID()}] = true, true
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
	type set struct {
		family ipfamily.Family
		id     nft.SetID
	}
	keys := map[set][]nft.Element{}
	for m := range wanted {
		k := set{m.family, m.element.Set}
		keys[k] = append(keys[k], m.element)
	}
	for k, elements := range keys {
		got, err := s.from.Get(k.family, k.id, elements)
		if err != nil {
			return err
		}
		s.read += len(elements)
		at := s.now()
		if err := s.getPools(k.family, got); err != nil {
			return err
		}
		for i := range got {
			m := s.frontends[meterKey(k.family, &got[i].Element)]
			if m != nil && m.element.Comment == got[i].Comment { // others are seen when all are listed again
				s.take(k.family, &got[i], at)
			}
		}
	}
	return nil
}

func (s *sampler) takePools(f ipfamily.Family, pools []nft.Listed) {
	for i := range pools {
		s.pools[poolOfFamily{f, pools[i].ID()}] = pools[i].Element
	}
}

// getPools reads the pools that some frontends lead to.
func (s *sampler) getPools(f ipfamily.Family, frontends []nft.Listed) error {
	var keys []nft.Element
	asked := map[uint32]bool{}
	for i := range frontends {
		if id := frontends[i].PoolID(); !asked[id] {
			asked[id] = true
			keys = append(keys, nft.PoolKey(id))
		}
	}
	if len(keys) == 0 {
		return nil
	}
	pools, err := s.from.Get(f, nft.Pools, keys)
	s.read += len(keys)
	if err == nil {
		s.takePools(f, pools)
	}
	return err
}

// maxEndpointKeys bounds how many counters of one port's endpoints are read at a time.
const maxEndpointKeys = 4096

// endpoints reads the counters of a port's endpoints. Those of a port with session affinity count in sticky-endpoints, where every
// connection does, and not only that which was balanced.
func (s *sampler) endpoints(p *portMeter) error {
	found := map[netip.AddrPort]*endpointMeter{}
	at := func(ep netip.AddrPort) *endpointMeter {
		if found[ep] == nil {
			found[ep] = &endpointMeter{addr: ep, elements: map[string]*meter{}}
		}
		return found[ep]
	}
	count := func(f ipfamily.Family, ep netip.AddrPort, l *nft.Listed) {
		key := meterKey(f, &l.Element)
		m := &meter{}
		if before := p.endpoints[ep]; before != nil && before.elements[key] != nil {
			m = before.elements[key]
		}
		m.read(l.Packets, s.now())
		at(ep).elements[key] = m
	}
	done := map[poolOfFamily]bool{} // frontends of a port share a pool
	keys := 0
	p.ipvs = nil
	for _, m := range p.frontends {
		if m.count.Scheduled {
			if err := s.scheduled(p, m, at); err != nil {
				return err
			}
		}
		pool := poolOfFamily{m.family, m.count.Pool}
		if keys += m.count.Endpoints; m.count.Endpoints == 0 || keys > maxEndpointKeys || done[pool] {
			continue
		}
		done[pool] = true
		ask := m.pool.SlotKeys(m.element.FrontendKey().Protocol)
		slots, err := s.from.Get(m.family, ask[0].Set, ask)
		if err != nil {
			return err
		}
		s.read += len(ask)
		if !m.count.Sticky {
			for i := range slots {
				count(m.family, slots[i].Target(), &slots[i])
			}
			continue
		}
		keys := make([]nft.Element, len(slots))
		for i := range slots {
			keys[i] = nft.MemberKey(m.count.Pool, slots[i].Target())
		}
		members, err := s.from.Get(m.family, nft.StickyEndpoints, keys)
		if err != nil {
			return err
		}
		s.read += len(keys)
		for i := range members {
			count(m.family, members[i].Member(), &members[i])
		}
	}
	p.endpoints = found
	return nil
}

// topSample is what top shows. Its JSON is documented in docs/ANSWERS.md.
type topSample struct {
	Interval float64   `json:"intervalSeconds"`
	Rate     float64   `json:"rate"`
	Ports    []topPort `json:"ports"`
	// Counted is one of dataplane.Counted...; empty if that is not known.
	Counted string `json:"counted,omitempty"`
	read    int
}

// notice says what cannot be seen because it is not counted.
func (s *topSample) notice() string {
	if n := notCounted(s.Counted); n != "" || !slices.ContainsFunc(s.Ports, func(p topPort) bool { return p.NotCounted }) {
		return n
	}
	return notByWishMany
}

type topPort struct {
	// Name is "namespace/name:port"; Service and Port are its parts.
	Name    string  `json:"-"`
	Service string  `json:"service"`
	Port    string  `json:"port,omitempty"`
	Rate    float64 `json:"rate"`
	Total   uint64  `json:"total"`
	// NotCounted says that nothing is counted at its addresses.
	NotCounted bool          `json:"notCounted,omitempty"`
	Choices    int           `json:"endpointCount"`
	Scheduled  bool          `json:"scheduled,omitempty"`
	IPVS       *topIPVS      `json:"ipvs,omitempty"`
	Frontends  []topFrontend `json:"frontends"`
	Endpoints  []topEndpoint `json:"endpoints,omitempty"`
}

type topFrontend struct {
	Address  string `json:"address"`
	Port     uint16 `json:"port"`
	Protocol string `json:"protocol"`
	// Outside says that it counts those clients from outside who get other endpoints than pods do.
	Outside bool    `json:"outside,omitempty"`
	Rate    float64 `json:"rate"`
	Total   uint64  `json:"total"`
}

type topEndpoint struct {
	Address string   `json:"address"`
	Port    uint16   `json:"port"`
	Rate    float64  `json:"rate"`
	Total   uint64   `json:"total"`
	IPVS    *topIPVS `json:"ipvs,omitempty"`
}

// The orders in which ports are shown.
const (
	byRate  = "rate"
	byTotal = "total"
	byName  = "name"
)

var topOrders = []string{byRate, byTotal, byName}

// result gives what is known now, in an order, without frontends and endpoints.
func (s *sampler) result(order string, interval time.Duration) *topSample {
	out := &topSample{Interval: interval.Seconds(), read: s.read, Counted: s.revisions[0].Counted,
		Ports: make([]topPort, 0, len(s.ports))}
	for _, p := range s.ports {
		rate, total := p.sum()
		service, port, _ := strings.Cut(p.name, ":")
		if strings.Contains(p.name, "/tcp") || strings.HasPrefix(p.name, "[") {
			service, port = p.name, ""
		}
		t := topPort{Name: p.name, Service: service, Port: port, Rate: rounded(rate), Total: total, Choices: p.choices(),
			Scheduled: p.scheduled(), NotCounted: p.notCounted()}
		out.Rate += rate
		out.Ports = append(out.Ports, t)
	}
	out.Rate = rounded(out.Rate)
	slices.SortFunc(out.Ports, func(a, b topPort) int { return compareTop(order, a.Rate, b.Rate, a.Total, b.Total, a.Name, b.Name) })
	return out
}

// rounded leaves three digits after the point: a rate is no more exact than that.
func rounded(r float64) float64 { return math.Round(r*1000) / 1000 }

func compareTop(order string, rateA, rateB float64, totalA, totalB uint64, nameA, nameB string) int {
	byNames := strings.Compare(nameA, nameB)
	switch order {
	case byName:
		return byNames
	case byTotal:
		return cmp.Or(cmp.Compare(totalB, totalA), byNames)
	}
	return cmp.Or(cmp.Compare(rateB, rateA), cmp.Compare(totalB, totalA), byNames)
}

// details fills in a port's frontends and endpoints, as far as somebody looks at them.
func (s *sampler) details(t *topPort, order string) {
	p := s.ports[t.Name]
	t.IPVS = p.ipvs
	for _, f := range p.frontends {
		k := f.element.FrontendKey()
		t.Frontends = append(t.Frontends, topFrontend{k.Addr.String(), k.Port, k.Protocol.String(), f.count.Outside,
			rounded(f.rate), f.packets})
	}
	slices.SortFunc(t.Frontends, func(a, b topFrontend) int {
		return cmp.Or(keyOf(a).Compare(keyOf(b)), cmp.Compare(b2i(a.Outside), b2i(b.Outside)))
	})
	for _, e := range p.endpoints {
		rate, total := e.sum()
		t.Endpoints = append(t.Endpoints, topEndpoint{e.addr.Addr().String(), e.addr.Port(), rounded(rate), total, e.ipvs})
	}
	slices.SortFunc(t.Endpoints, func(a, b topEndpoint) int {
		if order == byName {
			return endpointAddr(a).Compare(endpointAddr(b))
		}
		return cmp.Or(compareTop(order, a.Rate, b.Rate, a.Total, b.Total, "", ""), endpointAddr(a).Compare(endpointAddr(b)))
	})
}

func keyOf(f topFrontend) dataplane.Key {
	i := slices.IndexFunc(protocolNames, func(p nft.Protocol) bool { return p.String() == f.Protocol })
	return dataplane.Key{Addr: netip.MustParseAddr(f.Address), Protocol: protocolNames[max(i, 0)], Port: f.Port}
}

func endpointAddr(e topEndpoint) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(e.Address), e.Port)
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

var _ counters = (*kernel.Reader)(nil)
