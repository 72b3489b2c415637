package nft

import (
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// poolIndex identifies a service port's pools: its endpoints everywhere or on this node, chosen by nftables or by IPVS.
type poolIndex uint8

const (
	clusterPool poolIndex = iota
	localPool
	// failoverPool has no endpoints: it stands for the local pool where clients from outside get another answer.
	failoverPool
	scheduledCluster
	scheduledLocal
	numPools
	// sourcesOf is no pool: it names a Service's source ranges.
	sourcesOf = numPools
	// keptPool is that of the nodes among which clients are divided that keep their address.
	keptPool = numPools + 1
)

// service is one Service, compiled for our tables.
type service struct {
	name snapshot.Name
	// counters is its claim on the budget for counters.
	counters snapshot.Counters
	// mixed says that a change is written in part, so that its ports are not all counted as they should be.
	mixed      bool
	clusterIPs []netip.Addr
	// silent are cluster IPs without an endpoint. Pingable and balanced are load balancer addresses that answer a ping
	// from outside, and of which unused ports are rejected.
	silent, pingable, balanced []netip.Addr
	ports                      []*port
	// sources are the source ranges that may use its load balancer addresses, per family.
	sources ipfamily.Per[sources]
	// slotsUnknown says that it is unknown which endpoint has which slot in the kernel.
	slotsUnknown bool
	// byID finds a port, if there are many; port fills it in.
	byID map[portID]*port
}

// fewPorts is how many ports are searched as fast as a map.
const fewPorts = 16

// sources are the source ranges of a Service in one family. The zero value is no restriction.
type sources struct {
	id     uint32
	ranges []netip.Prefix
}

// portID identifies a service port in one family.
type portID struct {
	name   dataplane.PortName
	family ipfamily.Family
}

// port is one service port, compiled for one table.
type port struct {
	id      portID
	comment string
	// counting says which of its elements have counters: CountEndpoints, CountFrontends or CountNothing.
	counting Counting
	// timeout is the session affinity's in seconds; 0 means none.
	timeout uint32
	// sourceID is the id of the Service's source ranges; 0 if there are none.
	sourceID uint32
	// limits are those of each of its pools.
	limits snapshot.Limits
	// full says that there are as many open connections as limits allow.
	full bool
	// fullClients are those that have as many as limits allow, sorted.
	fullClients []netip.Addr
	// crowded says that so many frontends lead to its pools that their classes are in Pools.
	crowded bool
	// kept is how it divides clients that keep their address.
	kept  kept
	pools [numPools]pool
	// local are the addresses of endpoints on this node, sorted.
	local     []netip.Addr
	frontends []frontend
}

// pool is a pool of a port. The zero value is a pool to which no frontend leads.
type pool struct {
	// id identifies it in the kernel; 0 while it has none.
	id   uint32
	used bool
	// verdict is the chain for a pool without a choice: NoEndpoints, NoLocalEndpoints, PassOn, LeftToIPVS; NoChain means
	// that nftables chooses an endpoint.
	verdict ChainKind
	// refused is how many of dataplane.RefusedOf connections are refused before an endpoint is chosen.
	refused uint16
	// hash says which hash of the client is its slot; NoHash means that the slot is random.
	hash dataplane.Hash
	// repeats says that endpoints may have several slots.
	repeats bool
	// slots are the endpoints: sorted when compiled, then each at the slot it has in the kernel. With a hash they are a
	// Maglev table from the start.
	slots []netip.AddrPort
	// unhealthy are endpoints that are ejected, and those that might be; sorted.
	unhealthy []unhealthy
}

// frontend is one address of a service port.
type frontend struct {
	key dataplane.Key
	// inside is the pool for pods and this node, outside that for all others. They differ only with externalTrafficPolicy
	// Local.
	inside, outside poolIndex
	masquerade      masquerade
	// restricted says that only the Service's source ranges are served.
	restricted bool
	// retry says that refused connections are tried again at another endpoint.
	retry bool
	// clusterIP says that it is at a cluster IP of its Service.
	clusterIP bool
	// kept says that its clients keep their address.
	kept bool
}

// indirect says that the frontend leads to split or restrict first.
func (f *frontend) indirect() bool { return f.outside != f.inside || f.restricted }

// masquerade says whose connections to a frontend are masqueraded. Cluster IPs have rules of their own. All but the
// first are values of ExternalServices. A verdict map would be shorter, but the kernel validates every verdict again
// whenever one changes, and a Service may have very many addresses.
type masquerade uint8

const (
	masqueradeNobody masquerade = iota
	masqueradeEverybody
	// masqueradeElsewhere is for this node, and for clients from outside that get an endpoint on another one.
	masqueradeElsewhere
	// masqueradeNode is for this node alone: clients from outside are left to others.
	masqueradeNode
)

// compileService compiles a Service for our tables. Nil gives an empty service.
func compileService(s *dataplane.Service, q quota) *service {
	if s == nil {
		return &service{}
	}
	out := &service{name: s.Name, counters: s.Counters, clusterIPs: s.ClusterIPs, silent: s.SilentClusterIPs,
		pingable: s.PingableIPs, balanced: s.LoadBalancerIPs, ports: make([]*port, 0, len(s.Ports))}
	limits := slotLimits(s)
	for _, sp := range s.Ports {
		p := compilePort(sp, limits[ipfamily.Of(sp.Frontends[0].Key.Addr)])
		out.ports = append(out.ports, p)
		for i := range sp.Frontends {
			if ranges := sp.Frontends[i].Sources; ranges != nil { // the same for all of a family
				out.sources[p.id.family].ranges = ranges
			}
		}
	}
	level := q.of(out)
	for _, p := range out.ports {
		p.counting = level
	}
	return out
}

// compilePort compiles a port, whose pools may have some slots.
func compilePort(sp *dataplane.ServicePort, limit int) *port {
	p := &port{
		id:          portID{sp.Name, ipfamily.Of(sp.Frontends[0].Key.Addr)},
		comment:     commentOf(sp.Name.String()),
		timeout:     uint32(sp.Affinity / time.Second),
		limits:      sp.Limits,
		full:        sp.Full,
		fullClients: sp.FullClients,
		frontends:   make([]frontend, len(sp.Frontends)),
	}
	for i := range sp.Frontends {
		p.frontends[i] = compileFrontend(sp, &sp.Frontends[i])
	}
	p.crowded = len(p.frontends) > directFrontends
	p.kept = compileKept(p.id, sp.Keep)
	p.markUsed()
	for i, from := range [numPools]*dataplane.Pool{sp.Cluster, sp.Local, failoverOf(sp), sp.Cluster, sp.Local} {
		pl := &p.pools[i]
		if from == nil {
			from = &dataplane.Pool{}
		}
		if pl.used {
			pl.unhealthy = unhealthyOf(from)
		}
		switch {
		case !pl.used:
			continue
		case i >= int(scheduledCluster):
			pl.verdict = LeftToIPVS
		case len(from.Endpoints) > 0:
			pl.fill(poolID{port: p.id, pool: poolIndex(i)}, from.Endpoints, sp.Hash, limit)
			pl.refused = from.Refused
		case from.Empty == dataplane.Drop:
			pl.verdict = NoLocalEndpoints
		case from.Empty == dataplane.Pass:
			pl.verdict = PassOn
		default:
			pl.verdict = NoEndpoints
		}
		for n := range from.Endpoints {
			if from.Endpoints[n].Local {
				p.local = append(p.local, from.Endpoints[n].Addr())
			}
		}
	}
	slices.SortFunc(p.local, netip.Addr.Compare)
	p.local = slices.Compact(p.local)
	return p
}

func compileFrontend(sp *dataplane.ServicePort, f *dataplane.Frontend) frontend {
	node, out := f.Route(dataplane.Node), f.Route(dataplane.Anyone)
	scheduled := sp.Scheduled(f)
	c := frontend{key: f.Key, clusterIP: f.Kind == dataplane.ClusterIP, restricted: f.Sources != nil,
		kept:   sp.Keep != nil && f.Keepable(),
		retry:  retries(sp, node.Pool, out.Pool, scheduled != nil),
		inside: poolOf(sp, node.Pool, scheduled), outside: poolOf(sp, out.Pool, scheduled)}
	switch {
	case f.Kind == dataplane.ClusterIP:
	case out.SNAT:
		c.masquerade = masqueradeEverybody
	case node.SNAT && out.Pool.Empty == dataplane.Pass && len(out.Pool.Endpoints) == 0:
		c.masquerade = masqueradeNode
	case node.SNAT:
		c.masquerade = masqueradeElsewhere
	}
	return c
}

// poolOf returns the index of a pool. All pools without endpoints may be the same dataplane.Pool, so an empty pool that
// is also the cluster pool counts as that.
func poolOf(sp *dataplane.ServicePort, p, scheduled *dataplane.Pool) poolIndex {
	i := clusterPool
	switch {
	case p == sp.Cluster:
	case p == sp.Local:
		i = localPool
	default:
		i = failoverPool
	}
	if p == scheduled {
		i += scheduledCluster
	}
	return i
}

// failoverOf returns the pool of a port's routes that is neither its cluster pool nor its local pool; nil if there is
// none.
func failoverOf(sp *dataplane.ServicePort) *dataplane.Pool {
	for i := range sp.Frontends {
		for _, r := range sp.Frontends[i].Routes {
			if r.Pool != sp.Cluster && r.Pool != sp.Local {
				return r.Pool
			}
		}
	}
	return nil
}

// markUsed records for each pool whether a frontend leads to it.
func (p *port) markUsed() {
	for i := range p.pools {
		p.pools[i].used = false
	}
	for i := range p.frontends {
		f := &p.frontends[i]
		p.pools[f.inside].used = true
		p.pools[f.outside].used = true
	}
}

// sticky reports whether a pool has session affinity.
func (p *port) sticky(i poolIndex) bool {
	return p.timeout > 0 && p.pools[i].used && p.pools[i].verdict == NoChain
}

// slotSet returns the map that holds a pool's slots. With session affinity, connections are counted at the pool's
// members instead.
func (p *port) slotSet(i poolIndex) SetID {
	return Endpoints.counted(p.counting.endpoints() && !p.sticky(i))
}

func (p *port) memberSet() SetID { return StickyEndpoints.counted(p.counting.endpoints()) }

// inPools reports whether a pool has an element of Pools.
func (p *port) inPools(i poolIndex) bool {
	return (p.crowded || p.pools[i].refused > 0 || p.limited(i)) && p.pools[i].used
}

// poolElement returns the pool's element of Pools.
func (p *port) poolElement(i poolIndex) Element {
	e := idElement(Pools, p.pools[i].id)
	e.Comment = p.comment
	e.setPool(p.chain(i), p.pools[i].id)
	return e
}

// chain returns the chain that does what is to be done for a pool.
func (p *port) chain(i poolIndex) ChainID {
	pl := &p.pools[i]
	if pl.verdict != NoChain {
		return pl.verdict.id()
	}
	c := ChainID{pickKinds[pl.hash].counted(p.slotSet(i) == Endpoints), uint32(len(pl.slots))}
	if p.timeout > 0 {
		c.Kind = StickyPick
		if pl.hash != dataplane.NoHash {
			c.Kind = StickyHash
		}
	}
	if pl.hash == dataplane.NoHash {
		c.N = roomFor(len(pl.slots))
	}
	return c
}

// frontendChain returns the chain to which the frontends of a pool lead.
func (p *port) frontendChain(i poolIndex) ChainID {
	if p.inPools(i) {
		return SharedPool.id()
	}
	return p.chain(i)
}

// eachShare calls do for the pools that refuse a share.
func (s *service) eachShare(do func(*port, poolIndex)) {
	for _, p := range s.ports {
		for i := range numPools {
			if p.pools[i].refused > 0 {
				do(p, i)
			}
		}
	}
}

// shareElement returns the element that has the share which a pool refuses.
func (p *port) shareElement(i poolIndex) Element {
	e := shareElement(p.pools[i].id, p.pools[i].refused)
	e.Comment = p.comment
	return e
}

// pickKinds are the chains that choose, by the pool's hash, among endpoints with counters.
var pickKinds = [...]ChainKind{
	dataplane.NoHash: Pick, dataplane.HashAddr: PickHash, dataplane.HashAddrPort: PickHashPort,
}

// counted returns a kind for endpoints with counters, or its twin for those without.
func (k ChainKind) counted(yes bool) ChainKind {
	if yes {
		return k
	}
	return k + 1
}

// rememberElement returns the element that says how long a pool with session affinity remembers its clients.
func (p *port) rememberElement(i poolIndex) Element {
	e := idElement(Remember, p.pools[i].id)
	e.Comment = p.comment
	e.setID(timeoutFor(p.timeout))
	return e
}

// slotElement returns the element of an endpoint in its slot.
func (p *port) slotElement(i poolIndex, slot int, ep netip.AddrPort) Element {
	e := slotElement(p.slotSet(i), p.pools[i].id, p.id.name.Protocol, slot, ep)
	e.Comment = p.comment
	return e
}

func (p *port) memberElement(i poolIndex, ep netip.AddrPort) Element {
	e := memberElement(p.memberSet(), p.pools[i].id, ep)
	e.Comment = p.comment
	return e
}

// perFrontend is how many elements a frontend has at most, one in each of as many sets.
const perFrontend = 9

// elements returns a frontend's elements, each in another set.
func (p *port) elements(f *frontend, out *[perFrontend]Element) []Element {
	list := out[:0]
	to := func(set SetID, id uint32) {
		e := frontendElement(set, f.key)
		e.setID(id)
		e.Comment = p.comment
		list = append(list, e)
	}
	lead := func(set SetID, c ChainID, id uint32) {
		to(set.counted(p.counting.frontends()), c.class()<<poolBits|id)
	}
	first, id := p.frontendChain(f.inside), p.pools[f.inside].id
	if f.indirect() {
		lead(InsideServices, first, id)
		first = Split.id()
	}
	if f.outside != f.inside {
		lead(OutsideServices, p.frontendChain(f.outside), p.pools[f.outside].id)
	}
	if f.restricted {
		first, id = Restrict.id(), p.sourceID
	}
	lead(Services, first, id)
	if f.masquerade != masqueradeNobody {
		to(ExternalServices, uint32(f.masquerade))
	}
	if p.timeout > 0 {
		to(StickyServices, p.pools[f.inside].id)
		if f.outside != f.inside {
			to(OutsideStickyServices, p.pools[f.outside].id)
		}
	}
	if f.inside >= scheduledCluster || f.outside >= scheduledCluster {
		e := frontendElement(Scheduled, f.key)
		e.Comment = p.comment
		list = append(list, e)
	}
	if f.kept && p.kept.used() {
		list = append(list, p.keptFrontend(f.key))
	}
	if f.retry {
		e := frontendElement(RetryServices, f.key)
		e.Comment = p.comment
		list = append(list, e)
	}
	return list
}

// sameElements reports whether a frontend that is equal in two versions of a port has the same elements in both.
func (p *port) sameElements(o *port) bool {
	for i := range p.pools {
		x, y := &p.pools[i], &o.pools[i]
		if x.id != y.id || x.verdict != y.verdict || p.frontendChain(poolIndex(i)) != o.frontendChain(poolIndex(i)) {
			return false
		}
	}
	return p.kept.id == o.kept.id && p.kept.class == o.kept.class &&
		p.counting.frontends() == o.counting.frontends() && p.sourceID == o.sourceID && p.timeout > 0 == (o.timeout > 0)
}

// eachAddress calls do for what a Service itself needs of each address; its frontends need more.
func (s *service) eachAddress(do func(need, netip.Addr)) {
	for _, in := range [...]struct {
		need  need
		addrs []netip.Addr
	}{{needClusterIP, s.clusterIPs}, {needSilence, s.silent}, {needPing, s.pingable}, {needRefusal, s.balanced}} {
		for _, a := range in.addrs {
			do(in.need, a)
		}
	}
}

// size estimates how many elements a Service has.
func (s *service) size() (n int) {
	for i := range s.sources {
		n += len(s.sources[i].ranges)
	}
	for _, p := range s.ports {
		n += 2*len(p.frontends) + len(p.kept.nodes) + len(p.kept.slots)
		for i := range p.pools {
			n += 1 + len(p.pools[i].slots) + len(p.pools[i].unhealthy) + len(p.fullClientsOf(poolIndex(i)))
		}
	}
	return n
}

// port returns the port with an id; nil if there is none. The ports must be complete.
func (s *service) port(id portID) *port {
	if len(s.ports) <= fewPorts {
		if n := slices.IndexFunc(s.ports, func(p *port) bool { return p.id == id }); n >= 0 {
			return s.ports[n]
		}
		return nil
	}
	if s.byID == nil {
		s.byID = make(map[portID]*port, len(s.ports))
		for _, p := range s.ports {
			s.byID[p.id] = p
		}
	}
	return s.byID[id]
}

// sortedNames returns the keys of a map of Services in order.
func sortedNames[V any](m map[snapshot.Name]V) []snapshot.Name {
	names := make([]snapshot.Name, 0, len(m))
	for n := range m {
		names = append(names, n)
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	return names
}
