package dataplane

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The pools without endpoints. All Services share them.
var (
	poolNoEndpoints      = &Pool{Empty: Reject}
	poolNoLocalEndpoints = &Pool{Empty: Drop}
	poolPassing          = &Pool{Empty: Pass}
)

// candidate is an endpoint that might serve a port.
type candidate struct {
	addr netip.AddrPort
	*snapshot.Endpoint
	local bool
	// group is the backend's among those of the port; 0 if it has none.
	group uint8
	// parts is its share of new connections; with 0 it drains.
	parts uint32
	// order is the position in the slices. It decides between two entries that differ in nothing else.
	order int32
}

// ready and terminating are the two ways of being usable. An endpoint that is neither is never used. With
// publishNotReadyAddresses an endpoint may be both: then it counts as ready.
func (c *candidate) ready() bool       { return c.Ready }
func (c *candidate) terminating() bool { return c.Serving && c.Terminating }

// usable reports whether it can be in some pool.
func (c *candidate) usable() bool { return !c.drains() && (c.ready() || c.terminating()) }

// drains reports whether the weight 0 keeps new connections from it.
func (c *candidate) drains() bool { return c.parts == 0 }

// preference orders entries for the same endpoint, best first. The entry that is not terminating is the newer pod on a
// reused address, even while it is not ready. kube-proxy decides the rest at random.
func (c *candidate) preference() int {
	p := 0
	for _, good := range [...]bool{!c.Terminating, c.Ready, c.Serving, c.local} {
		p <<= 1
		if !good {
			p |= 1
		}
	}
	return p
}

func compareCandidates(a, b candidate) int {
	if c := a.addr.Compare(b.addr); c != 0 {
		return c
	}
	return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.preference(), b.preference()),
		cmp.Compare(a.order, b.order))
}

// collectEndpoints fills b.candidates with the port's endpoints of one family, sorted by AddrPort and group, and
// unique.
func (b *builder) collectEndpoints(p *snapshot.Port, f ipfamily.Family) {
	b.collectCandidates(p, f)
	b.candidates = slices.CompactFunc(b.candidates, sameAddr)
}

func sameAddr(x, y candidate) bool { return x.addr == y.addr && x.group == y.group }

// collectCandidates fills b.candidates with every entry for the port's endpoints of one family, up to the limit of a
// port. Entries with the same AddrPort are adjacent, and the first one of a group counts.
func (b *builder) collectCandidates(p *snapshot.Port, f ipfamily.Family) {
	b.candidates = b.candidates[:0]
	switch {
	case b.backends != nil:
		b.addGroups(p, f)
	case b.index != nil:
		for _, at := range b.index[portKey{p.Name, p.Protocol}] {
			b.addCandidates(at.slice, at.port, f)
		}
	default:
		b.addNamed(b.slices, p.Name, p.Protocol, f)
	}
	slices.SortFunc(b.candidates, compareCandidates)
	if len(b.groups) > 1 {
		b.agreeOnNodes()
	}
}

// addNamed adds the endpoints of those slices that have a port.
func (b *builder) addNamed(of []*snapshot.Slice, name string, protocol snapshot.Protocol, f ipfamily.Family) {
	for _, sl := range of {
		for _, sp := range sl.Ports {
			if sp.Name == name && sp.Protocol == protocol {
				b.addCandidates(sl, sp.Port, f)
			}
		}
	}
}

// addCandidates adds the endpoints of a slice until the limit is reached.
func (b *builder) addCandidates(sl *snapshot.Slice, port uint16, f ipfamily.Family) {
	for i := range sl.Endpoints {
		ep := &sl.Endpoints[i]
		if !f.Has(ep.Addr) {
			continue
		}
		if len(b.candidates) == b.maxPerPort {
			b.overCapacity = true
			return
		}
		b.candidates = append(b.candidates, candidate{
			addr:     netip.AddrPortFrom(ep.Addr, port),
			Endpoint: ep,
			local:    ep.Node != "" && ep.Node == b.host.nodeName,
			parts:    b.partsOf(ep),
			order:    int32(len(b.candidates)),
		})
	}
}

// fillPools sets the cluster pool and local pool of the port whose endpoints were collected. A pool that no route leads
// to is not computed and has no endpoints. The two are different pools even if they hold the same endpoints: they may
// diverge later, and session affinity is kept for each. Each is limited separately in how many endpoints are ejected
// from it.
func (b *builder) fillPools(sp *ServicePort, wantCluster, wantLocal bool) {
	sp.Cluster, sp.Local = poolNoEndpoints, poolNoEndpoints
	if wantCluster {
		sp.Cluster = b.clusterSet()
	}
	if wantLocal {
		sp.Local = b.localSet()
	}
	pools := [...]*Pool{sp.Cluster, sp.Local}
	switch sp.SecondChance {
	case snapshot.SecondChanceOn: // at most half of a pool, and thus never the last endpoint
		for _, pool := range pools {
			b.eject(pool, len(pool.Endpoints)/2)
		}
	case snapshot.SecondChanceObserve:
		for _, pool := range pools {
			b.eject(pool, 0)
		}
	}
	b.preferNear(sp.Name, sp.Cluster)
	if sp.SecondChance == snapshot.SecondChanceOn {
		for _, pool := range pools {
			if len(pool.Endpoints) > 0 { // else others share it
				pool.RetryRefused = b.retryRefused(pool, sp.Affinity > 0 || sp.Hash != NoHash)
			}
		}
	}
}

// clusterSet is every ready endpoint that the topology hints assign to this node, or else every terminating endpoint
// that still serves.
func (b *builder) clusterSet() *Pool { return b.poolOf(b.clusterFilters()) }

// localSet is every ready endpoint on this node, or else every terminating endpoint on this node that still serves. It
// ignores hints.
func (b *builder) localSet() *Pool {
	pool := b.poolOf(b.localFilters())
	usable := func(c candidate) bool { return c.usable() }
	if len(pool.Endpoints) == 0 && slices.ContainsFunc(b.candidates, usable) {
		return poolNoLocalEndpoints
	}
	return pool
}

// poolOf returns the pool that filters select.
func (b *builder) poolOf(fs filters) *Pool {
	if b.backends != nil {
		return b.merged(fs)
	}
	endpoints := b.endpointsWhere(func(c *candidate) bool { return fs.decide(c).Included() })
	if len(endpoints) == 0 {
		return poolNoEndpoints
	}
	b.slowStart(endpoints, b.parts)
	b.weigh(endpoints, b.parts)
	return &Pool{Endpoints: endpoints}
}

// serving returns every endpoint that is ready or serving. If a pool holds them all, as is usual, it returns that
// pool's list.
func (b *builder) serving(pools ...*Pool) []Endpoint {
	serves := func(c *candidate) bool { return c.Ready || c.Serving }
	n := 0
	var last netip.AddrPort // of several in a row, since groups may have the same
	for i := range b.candidates {
		if c := &b.candidates[i]; serves(c) && c.addr != last {
			n, last = n+1, c.addr
		}
	}
	for _, p := range pools {
		if len(p.Endpoints) == n {
			return p.Endpoints
		}
	}
	same := func(x, y Endpoint) bool { return x.AddrPort == y.AddrPort }
	return slices.CompactFunc(b.endpointsWhere(serves), same)
}

// endpointsWhere returns the selected candidates without weights, and sets b.parts to their shares; nil if there are
// none.
func (b *builder) endpointsWhere(keep func(*candidate) bool) []Endpoint {
	b.parts = b.parts[:0]
	n := 0
	for i := range b.candidates {
		if keep(&b.candidates[i]) {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	endpoints := make([]Endpoint, 0, n)
	for i := range b.candidates {
		if c := &b.candidates[i]; keep(c) {
			endpoints = append(endpoints, Endpoint{AddrPort: c.addr, Local: c.local})
			b.parts = append(b.parts, c.parts)
		}
	}
	return endpoints
}

// These bound how much of a Service's slices is read. Otherwise a few slices whose endpoints have all ports of a
// Service with a thousand ports would become a million elements in the kernel of every node.
const (
	// maxEndpoints bounds all ports of a Service in one family; the ports share it equally.
	maxEndpoints = 1 << 17
	// maxSlicePorts bounds the ports of all slices; slices beyond it are skipped.
	maxSlicePorts = 1 << 17
	// fewSlicePorts is how many ports are searched linearly for each port; an index costs as much as that.
	fewSlicePorts = 64
)

type (
	portKey struct {
		name     string
		protocol snapshot.Protocol
	}
	slicePort struct {
		slice *snapshot.Slice
		port  uint16
	}
)

// loadSlices fills b.slices with a Service's slices, ordered by name.
func (b *builder) loadSlices(svc *snapshot.Service, of map[string]*snapshot.Slice) {
	b.slices, b.index, b.overCapacity = b.slices[:0], nil, false
	b.maxPerPort = max(maxEndpoints/max(len(svc.Ports), 1), 1)
	b.slices = sortedSlices(b.slices, of)
	ports := 0
	for i, sl := range b.slices {
		if ports += len(sl.Ports); ports > maxSlicePorts {
			b.slices, b.overCapacity = b.slices[:i], true
			break
		}
	}
	if ports > fewSlicePorts && len(svc.Ports) > 1 {
		b.indexPorts()
	}
}

// indexPorts fills b.index.
func (b *builder) indexPorts() {
	b.index = map[portKey][]slicePort{}
	for _, sl := range b.slices {
		for _, sp := range sl.Ports {
			k := portKey{sp.Name, sp.Protocol}
			b.index[k] = append(b.index[k], slicePort{sl, sp.Port})
		}
	}
}
