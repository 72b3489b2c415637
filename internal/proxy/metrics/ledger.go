package metrics

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// ledger turns the kernel's counters into counters that never decrease. The kernel counts in the elements of its maps,
// and begins again at 0 when it rewrites one: because a frontend gets another pool, a pool gets its first endpoint or
// loses its last, another endpoint gets the slot, or the table is rewritten. So the ledger adds up the differences
// between readings.
//
// What the kernel counts between the last reading and a replacement is lost. If a replacement cannot be detected,
// because the new element leads to the same and has counted more, the ledger assumes that it is the old one. So it may
// count too little, but not too much.
//
// It does no I/O, and is not safe for concurrent use.
type ledger struct {
	detail Detail
	// room limits how many Service ports, and how many endpoints, have their own series.
	room int

	// renewed is the moment when all of the kernel's counters last began at 0. Moments count transactions: a reading that
	// began before a transaction may be older than what it wrote.
	renewed uint64
	// opening is true until the first reading of adopted tables, which sets the starting values.
	opening bool

	ports     map[dataplane.PortName]*port
	frontends map[dataplane.Key]*frontend
	// line holds the frontends in the order of reading, if there are too many to read at once. next is the one whose turn
	// it is, and gone counts the removed ones.
	line       []*frontend
	next, gone int
	// due are the frontends whose endpoints must be read.
	due []*side

	// shown and shownAt count the Service ports and the endpoints with a series. others sums up the ports without one.
	shown, shownAt int
	others         totals
	rules          ipfamily.Per[[dataplane.NumRefusals]last]
	refused        ipfamily.Per[[dataplane.NumRefusals]uint64]
	limited        map[limitedPool]*overLimit
	// overRate, if not nil, is told of a port that refuses connections over a rate for the first time.
	overRate func(dataplane.PortName)
}

// limitedPool names a pool with limits, and overLimit is what was over them: the last reading, and how many of these
// packets no port has been told of yet.
type limitedPool struct {
	family ipfamily.Family
	pool   uint32
}

type overLimit struct {
	last
	left uint64
}

// totals are the counts that are shown.
type totals struct {
	connections uint64
	// refused are packets, by dataplane.Verdict.
	refused [2]uint64
}

func (t *totals) any() bool { return t.connections+t.refused[0]+t.refused[1] > 0 }

// take adds the other's totals, and resets them.
func (t *totals) take(o *totals) {
	t.connections += o.connections
	t.refused[0] += o.refused[0]
	t.refused[1] += o.refused[1]
	*o = totals{}
}

// port is a Service port, of both families.
type port struct {
	name dataplane.PortName
	totals
	// frontends counts the port's frontends. The port is removed with the last one.
	frontends int
	// now is what the kernel holds, IPv4 and IPv6, and changed when it last changed.
	now     ipfamily.Per[*dataplane.ServicePort]
	changed uint64
	// toldRate says that overRate was told of it.
	toldRate bool
	// shown is true if the port has a series, hidden if it would need one.
	shown, hidden bool
	endpoints     map[netip.AddrPort]*endpoint
	members       map[member]*last
}

type endpoint struct {
	connections uint64
	shown       bool
}

// member is an endpoint in its place in a pool; local says which of the port's pools that is.
type member struct {
	place    dataplane.Place
	local    bool
	endpoint netip.AddrPort
}

// frontend has one counter for all clients, or two: for clients inside and outside.
type frontend struct {
	key  dataplane.Key
	port *port
	born uint64
	gone bool
	// outside is true if clients from outside may get another answer.
	outside bool
	sides   [2]side
}

func (fe *frontend) side(outside bool) *side {
	if outside {
		return &fe.sides[1]
	}
	return &fe.sides[0]
}

type side struct {
	of *frontend
	// born is when the frontend was written.
	born uint64
	// leads is what the frontend leads to, and turned when that last changed.
	leads  leads
	turned uint64
	read   dataplane.FrontendCount
	last   last
	// readAt is when the reading began. If the frontend has changed since, the reading does not tell which endpoints to
	// read: then they are due after the next one.
	readAt uint64
	late   bool
	// due is true if its endpoints must be read.
	due bool
}

// leads describes what a frontend leads to, as far as a change replaces its element in the kernel.
type leads struct {
	// local is the port's local pool.
	local     bool
	scheduled bool
	// empty is what happens to packets if there are no endpoints.
	empty     bool
	otherwise dataplane.Verdict
}

func leadsTo(sp *dataplane.ServicePort, f *dataplane.Frontend, pool *dataplane.Pool) leads {
	l := leads{local: pool == sp.Local, scheduled: pool == sp.Scheduled(f), empty: len(pool.Endpoints) == 0}
	if l.empty {
		l.otherwise = pool.Empty
	}
	return l
}

func (s *side) lead(l leads, moment uint64) {
	if s.leads != l {
		s.leads, s.turned = l, moment
	}
}

// last is the last reading: its value, and when it began.
type last struct {
	packets, moment uint64
	known           bool
}

// advance stores a reading, and returns the increase. Same is true if it may be of the same element.
func (g *ledger) advance(l *last, packets uint64, same bool, began uint64) (more uint64) {
	switch {
	case !l.known && g.opening:
	case l.known && same && l.moment >= g.renewed:
		more = dataplane.Increase(l.packets, packets)
	default:
		more = packets
	}
	*l = last{packets, began, true}
	return more
}

func newLedger(detail Detail, room int) *ledger {
	return &ledger{
		detail:    detail,
		room:      room,
		ports:     map[dataplane.PortName]*port{},
		frontends: map[dataplane.Key]*frontend{},
	}
}

// replace applies a transaction: the Services before and after, in the same order, nil if there is none. Full is true
// if all counters began at 0.
func (g *ledger) replace(before, after []*dataplane.Service, full bool, moment uint64) {
	if full {
		g.renewed, g.opening = moment, false
	}
	if g.detail == Off {
		return
	}
	for i, svc := range before { // first, since a frontend may move from one Service to another
		g.removeOld(svc, after[i])
	}
	for _, svc := range after {
		g.addService(svc, moment)
	}
	for _, svc := range before { // last, since all of a port's frontends may be others now
		g.removeSeries(svc)
	}
	if 2*g.gone > len(g.line) {
		g.line = slices.DeleteFunc(g.line, func(fe *frontend) bool { return fe.gone })
		g.gone, g.next = 0, 0
	}
}

// removeOld removes the frontends that a Service does not keep.
func (g *ledger) removeOld(svc, after *dataplane.Service) {
	for sp := range svc.EachPort() {
		family := sp.Family()
		kept := portOf(after, sp.Name, family)
		for i := range sp.Frontends {
			if fe := g.frontends[sp.Frontends[i].Key]; fe != nil && fe.port.name == sp.Name && !kept.answers(fe.key) {
				g.removeFrontend(fe)
			}
		}
		if p := g.ports[sp.Name]; p != nil && kept.ServicePort == nil {
			g.updatePort(p, family, nil, 0)
		}
	}
}

// removeFrontend removes a frontend.
func (g *ledger) removeFrontend(fe *frontend) {
	fe.gone = true
	g.gone++
	delete(g.frontends, fe.key)
	fe.port.frontends--
}

// removeSeries removes the series of a Service's ports without frontends.
func (g *ledger) removeSeries(svc *dataplane.Service) {
	for sp := range svc.EachPort() {
		p := g.ports[sp.Name]
		if p == nil || p.frontends > 0 {
			continue
		}
		delete(g.ports, p.name)
		if p.shown {
			g.shown--
		}
	}
}

// servicePort is a port of a Service in one family, or none.
type servicePort struct{ *dataplane.ServicePort }

func portOf(svc *dataplane.Service, name dataplane.PortName, family ipfamily.Family) servicePort {
	for sp := range svc.EachPort() {
		if sp.Name == name && sp.Family() == family {
			return servicePort{sp}
		}
	}
	return servicePort{}
}

func (sp servicePort) answers(k dataplane.Key) bool {
	return sp.ServicePort != nil && sp.Frontend(k) != nil
}

// pool returns the endpoints of one of the port's pools.
func (sp servicePort) pool(local bool) []dataplane.Endpoint {
	switch {
	case sp.ServicePort == nil:
		return nil
	case local:
		return sp.Local.Endpoints
	}
	return sp.Cluster.Endpoints
}

func (sp servicePort) sticky() bool { return sp.ServicePort != nil && sp.Affinity > 0 }

// hasEndpoint reports whether an endpoint is in one of the port's pools.
func (sp servicePort) hasEndpoint(ep netip.AddrPort) bool {
	return dataplane.HasEndpoint(sp.pool(false), ep) || dataplane.HasEndpoint(sp.pool(true), ep)
}

// updatePort updates a port in one family. Endpoints that it no longer has lose their series.
func (g *ledger) updatePort(p *port, family ipfamily.Family, sp *dataplane.ServicePort, moment uint64) {
	was, now := servicePort{p.now[family]}, servicePort{sp}
	p.now[family], p.changed = sp, moment
	if g.detail != PerEndpoint {
		return
	}
	for _, local := range [...]bool{false, true} {
		for _, ep := range was.pool(local) {
			if old := p.endpoints[ep.AddrPort]; old != nil && !now.hasEndpoint(ep.AddrPort) {
				delete(p.endpoints, ep.AddrPort)
				if old.shown {
					g.shownAt--
				}
			}
		}
	}
	renewed := was.sticky() != now.sticky() // the endpoints are counted elsewhere now
	maps.DeleteFunc(p.members, func(m member, _ *last) bool {
		return ipfamily.Of(m.endpoint.Addr()) == family && (renewed || !dataplane.HasEndpoint(now.pool(m.local), m.endpoint))
	})
}

// addService adds a Service.
func (g *ledger) addService(svc *dataplane.Service, moment uint64) {
	for sp := range svc.EachPort() {
		var p *port
		for i := range sp.Frontends {
			p = g.addFrontend(sp, &sp.Frontends[i], moment)
		}
		g.updatePort(p, sp.Family(), sp, moment)
	}
}

func (g *ledger) addFrontend(sp *dataplane.ServicePort, f *dataplane.Frontend, moment uint64) *port {
	fe := g.frontends[f.Key]
	if fe != nil && fe.port.name != sp.Name { // the one it comes from is not wholly written yet
		g.removeFrontend(fe)
		fe = nil
	}
	if fe == nil {
		p := g.ports[sp.Name]
		if p == nil {
			p = &port{name: sp.Name}
			g.ports[sp.Name] = p
		}
		p.frontends++
		fe = &frontend{key: f.Key, port: p, born: moment}
		fe.sides[0].of, fe.sides[1].of = fe, fe
		g.frontends[f.Key] = fe
		g.line = append(g.line, fe)
	}
	inside, outside := f.Route(dataplane.Node).Pool, f.Route(dataplane.Anyone).Pool
	fe.sides[0].lead(leadsTo(sp, f, inside), moment)
	fe.sides[1].lead(leadsTo(sp, f, outside), moment)
	if fe.outside = poolsDiffer(inside, outside); !fe.outside {
		fe.sides[1] = side{of: fe, born: moment}
	}
	return fe.port
}

// poolsDiffer reports whether packets are treated differently by two pools of the same port.
func poolsDiffer(a, b *dataplane.Pool) bool {
	if len(a.Endpoints)+len(b.Endpoints) == 0 {
		return a.Empty != b.Empty
	}
	return a != b
}

// nextFrontends returns the next frontends to read, at most n: none twice before all others.
func (g *ledger) nextFrontends(n int) (at []dataplane.Counted) {
	for range min(n, len(g.line)) {
		fe := g.line[g.next]
		g.next = (g.next + 1) % len(g.line)
		if fe.gone {
			continue
		}
		at = append(at, dataplane.Counted{Key: fe.key})
		if fe.outside {
			at = append(at, dataplane.Counted{Key: fe.key, Outside: true})
		}
	}
	return at
}

// lookup returns what a reading is of; nil if that is unknown, or was written after the reading began.
func (g *ledger) lookup(c dataplane.Counted, began uint64) *side {
	fe := g.frontends[c.Key]
	if fe == nil || fe.born > began || fe.side(c.Outside).born > began {
		return nil
	}
	return fe.side(c.Outside)
}

// recordFrontends stores readings of frontends.
func (g *ledger) recordFrontends(counts []dataplane.FrontendCount, began uint64) {
	if began < g.renewed {
		return
	}
	var fresh []*port
	for i := range counts {
		c := &counts[i]
		s := g.lookup(c.Counted, began)
		if s == nil {
			continue
		}
		if s.turned > began && !g.opening { // its count may be older than what its pool is, or newer
			continue
		}
		more := g.advance(&s.last, c.Packets, s.sameElement(c), began)
		s.read, s.readAt = *c, began
		if g.detail == PerEndpoint && c.Endpoints > 0 && (more > 0 || g.opening || s.late) {
			s.late = false
			g.queueEndpoints(s)
		}
		if more == 0 {
			continue
		}
		p := s.of.port
		if !p.shown && !p.any() {
			fresh = append(fresh, p)
		}
		g.addToPort(p, c, more)
	}
	g.createSeries(fresh)
}

// sameElement reports whether a reading may be of the same element as the last one. The element stays while the pool
// stays, but is replaced when the pool gets its first endpoint or loses its last.
func (s *side) sameElement(c *dataplane.FrontendCount) bool {
	was := &s.read
	if c.Pool != was.Pool || c.Uncounted != was.Uncounted || c.Scheduled != was.Scheduled {
		return false
	}
	now := s.of.port.now[ipfamily.Of(c.Key.Addr)]
	return now != nil && len(now.Frontends) > dataplane.MaxResetFrontends ||
		(c.Endpoints == 0) == (was.Endpoints == 0) && c.Empty == was.Empty
}

// addToPort adds to a port's totals and, where nobody answered, to the refusals.
func (g *ledger) addToPort(p *port, c *dataplane.FrontendCount, more uint64) {
	if c.Endpoints > 0 || c.Scheduled {
		over := g.takeOver(p, c, more)
		p.connections += more - over
		return
	}
	if c.Empty == dataplane.Pass { // nobody refused them
		return
	}
	p.refused[c.Empty] += more
	refusal := dataplane.RefusedNoEndpoints
	if c.Empty == dataplane.Drop {
		refusal = dataplane.RefusedNoLocalEndpoints
	}
	g.refused[ipfamily.Of(c.Key.Addr)][refusal] += more
}

// takeOver tells a port how many more of its packets were over a limit, at most as many as one of its frontends counts
// more.
func (g *ledger) takeOver(p *port, c *dataplane.FrontendCount, most uint64) uint64 {
	family := ipfamily.Of(c.Key.Addr)
	of, sp := g.limited[limitedPool{family, c.Pool}], p.now[family]
	if of == nil || sp == nil {
		return 0
	}
	verdict, over := dataplane.Reject, min(of.left, most)
	if sp.Limits.Drop {
		verdict = dataplane.Drop
	}
	of.left -= over
	p.refused[verdict] += over
	if rated := sp.Limits.Rate.Rate+sp.Limits.Client.Rate > 0; rated && over > 0 && !p.toldRate && g.overRate != nil {
		p.toldRate = true
		g.overRate(p.name)
	}
	return over
}

// recordLimited stores readings of what was over limits, which are of all pools that have some.
func (g *ledger) recordLimited(counts []dataplane.LimitCount, began uint64) {
	if began < g.renewed || g.detail == Off {
		return
	}
	now := map[limitedPool]*overLimit{}
	for _, c := range counts {
		at := limitedPool{c.Family, c.Pool}
		of := g.limited[at]
		if of == nil {
			of = &overLimit{}
		}
		of.left += g.advance(&of.last, c.Packets, true, began)
		now[at] = of
	}
	g.limited = now
}

// createSeries creates series for ports that count for the first time, in the order of their names, as long as there is
// room. Counts of the other ports are added to others.
func (g *ledger) createSeries(fresh []*port) {
	slices.SortFunc(fresh, func(a, b *port) int { return a.name.Compare(b.name) })
	for _, p := range fresh {
		p.shown = g.shown < g.room
		if p.hidden = !p.shown; p.hidden {
			g.others.take(&p.totals)
		} else {
			g.shown++
		}
	}
}

// queueEndpoints makes the endpoints of a frontend due.
func (g *ledger) queueEndpoints(s *side) {
	if !s.due {
		s.due = true
		g.due = append(g.due, s)
	}
}

// nextEndpoints returns the next frontends whose endpoints must be read, at most n, and the endpoints that affinity
// entries may name.
func (g *ledger) nextEndpoints(n int) (of []dataplane.FrontendCount, members map[dataplane.Counted][]netip.AddrPort) {
	n = min(n, len(g.due))
	members = map[dataplane.Counted][]netip.AddrPort{}
	for _, s := range g.due[:n] {
		s.due = false
		if s.of.gone || !s.of.port.shown && !g.opening {
			continue
		}
		if s.late = s.readAt < s.turned && !g.opening; s.late {
			continue
		}
		of = append(of, s.read)
		if s.read.Sticky {
			for _, ep := range (servicePort{s.of.port.now[ipfamily.Of(s.of.key.Addr)]}).pool(s.leads.local) {
				members[s.read.Counted] = append(members[s.read.Counted], ep.AddrPort)
			}
		}
	}
	if g.due = g.due[n:]; len(g.due) == 0 {
		g.due = nil
	}
	return of, members
}

// requeueEndpoints makes endpoints due again that could not be read.
func (g *ledger) requeueEndpoints(of []dataplane.FrontendCount) {
	for i := range of {
		if fe := g.frontends[of[i].Key]; fe != nil {
			g.queueEndpoints(fe.side(of[i].Outside))
		}
	}
}

// recordEndpoints stores readings of endpoints.
func (g *ledger) recordEndpoints(counts []dataplane.EndpointCount, began uint64) {
	for i := range counts {
		c := &counts[i]
		s := g.lookup(c.Counted, began)
		if s == nil || began < g.renewed {
			continue
		}
		p := s.of.port
		if p.changed > began { // it may name an endpoint that is gone
			if g.queueEndpoints(s); !g.opening {
				continue
			}
		}
		more := g.advance(p.member(member{c.Place, s.leads.local, c.Endpoint}), c.Packets, true, began)
		if more > 0 && (servicePort{p.now[ipfamily.Of(c.Endpoint.Addr())]}).hasEndpoint(c.Endpoint) {
			g.countEndpoint(p, c.Endpoint, more)
		}
	}
}

// member returns the last reading of an endpoint in its place.
func (p *port) member(m member) *last {
	if p.members == nil {
		p.members = map[member]*last{}
	}
	if p.members[m] == nil {
		p.members[m] = &last{}
	}
	return p.members[m]
}

func (g *ledger) countEndpoint(p *port, at netip.AddrPort, more uint64) {
	ep := p.endpoints[at]
	if ep == nil {
		if p.endpoints == nil {
			p.endpoints = map[netip.AddrPort]*endpoint{}
		}
		ep = &endpoint{}
		p.endpoints[at] = ep
	}
	if !ep.shown && g.shownAt < g.room {
		ep.shown = true
		g.shownAt++
	}
	if ep.shown {
		ep.connections += more
	}
}

// recordRules stores readings of rules.
func (g *ledger) recordRules(counts []dataplane.RefusedCount, began uint64) {
	if began < g.renewed {
		return
	}
	for _, c := range counts {
		g.refused[c.Family][c.Refusal] += g.advance(&g.rules[c.Family][c.Refusal], c.Packets, true, began)
	}
}
