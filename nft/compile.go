package nft

import (
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// poolIndex tells a service port's two pools apart.
type poolIndex uint8

const (
	clusterPool poolIndex = iota
	localPool
	numPools
)

// service is what one Service means for our tables.
type service struct {
	clusterIPs []netip.Addr
	ports      []*port
	// unread says that nobody knows yet which endpoint has which slot in the kernel.
	unread bool
}

// portID identifies a service port in one family.
type portID struct {
	name   dataplane.PortName
	family Family
}

// port is what one service port means for one table.
type port struct {
	id      portID
	comment string
	// timeout is the session affinity's in seconds; 0 means none.
	timeout uint32
	// stickyIDs name the pools in the affinity map; 0 for pools that no frontend uses, or without affinity.
	stickyIDs [numPools]uint32
	// slots are the pools' endpoints: sorted when compiled, then each at the slot it has in the kernel.
	slots [numPools][]netip.AddrPort
	// local are the addresses of endpoints on this node, sorted.
	local     []netip.Addr
	frontends []frontend
}

// frontend is what one address of a service port means.
type frontend struct {
	key dataplane.Key
	// inside answers pods and this node, outside all others. They differ only with externalTrafficPolicy Local.
	inside, outside answer
	masquerade      masquerade
	sources         []netip.Prefix
}

// answer is a pool to choose from, or the verdict if it is empty.
type answer struct {
	pool    poolIndex
	verdict ChainKind // NoEndpoints, NoLocalEndpoints, LeftToIPVS, or NoChain for "choose"
}

// masquerade says whose connections to a frontend get this node's address. Cluster IPs have a rule of their own.
type masquerade uint8

const (
	masqueradeNobody masquerade = iota
	masqueradeNode
	masqueradeEverybody
)

// compileService turns a Service into what it means for our tables. Nil gives an empty service.
func compileService(s *dataplane.Service) *service {
	if s == nil {
		return &service{}
	}
	out := &service{clusterIPs: s.ClusterIPs, ports: make([]*port, 0, len(s.Ports))}
	for _, sp := range s.Ports {
		out.ports = append(out.ports, compilePort(sp))
	}
	return out
}

func compilePort(sp *dataplane.ServicePort) *port {
	p := &port{
		id:        portID{sp.Name, familyOf(sp.Frontends[0].Key.Addr)},
		comment:   commentOf(sp.Name.String()),
		timeout:   uint32(sp.Affinity / time.Second),
		frontends: make([]frontend, len(sp.Frontends)),
	}
	for i := range sp.Frontends {
		p.frontends[i] = compileFrontend(sp, &sp.Frontends[i])
	}
	for i, pool := range [numPools]*dataplane.Pool{sp.Cluster, sp.Local} {
		if p.uses(poolIndex(i), NoChain) {
			p.slots[i] = make([]netip.AddrPort, len(pool.Endpoints))
			for n, ep := range pool.Endpoints {
				p.slots[i][n] = ep.AddrPort
			}
		} else if !p.uses(poolIndex(i), LeftToIPVS) {
			continue
		}
		for _, ep := range pool.Endpoints {
			if ep.Local {
				p.local = append(p.local, ep.Addr())
			}
		}
	}
	slices.SortFunc(p.local, netip.Addr.Compare)
	p.local = slices.Compact(p.local)
	return p
}

func compileFrontend(sp *dataplane.ServicePort, f *dataplane.Frontend) frontend {
	node, out := f.Route(dataplane.Node), f.Route(dataplane.Anyone)
	c := frontend{key: f.Key, sources: f.Sources}
	scheduled := sp.Scheduled(f)
	c.inside, c.outside = answerOf(sp, node.Pool, scheduled), answerOf(sp, out.Pool, scheduled)
	switch {
	case f.Kind == dataplane.ClusterIP:
	case out.SNAT:
		c.masquerade = masqueradeEverybody
	case node.SNAT:
		c.masquerade = masqueradeNode
	}
	return c
}

func answerOf(sp *dataplane.ServicePort, pool, scheduled *dataplane.Pool) answer {
	switch {
	case pool == scheduled && pool == sp.Local:
		return answer{pool: localPool, verdict: LeftToIPVS}
	case pool == scheduled:
		return answer{verdict: LeftToIPVS}
	case len(pool.Endpoints) == 0 && pool.Empty == dataplane.Drop:
		return answer{verdict: NoLocalEndpoints}
	case len(pool.Endpoints) == 0:
		return answer{verdict: NoEndpoints}
	case pool == sp.Local:
		return answer{pool: localPool}
	}
	return answer{pool: clusterPool}
}

func familyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// uses says whether any frontend chooses from a pool, or with LeftToIPVS has IPVS do it.
func (p *port) uses(pool poolIndex, verdict ChainKind) bool {
	a := answer{pool, verdict}
	return slices.ContainsFunc(p.frontends, func(f frontend) bool { return f.inside == a || f.outside == a })
}

// slotsFor gives the slots a frontend's answer chooses from; nil if it is a verdict.
func (p *port) slotsFor(a answer) []netip.AddrPort {
	if a.verdict != NoChain {
		return nil
	}
	return p.slots[a.pool]
}

// insideSlots and outsideSlots are what a frontend has in Endpoints and OutsideEndpoints.
func (p *port) insideSlots(f *frontend) []netip.AddrPort {
	if f == nil {
		return nil
	}
	return p.slotsFor(f.inside)
}

func (p *port) outsideSlots(f *frontend) []netip.AddrPort {
	if f == nil || f.outside == f.inside {
		return nil
	}
	return p.slotsFor(f.outside)
}

// chainFor gives the chain that an answer leads to: pick and sticky are its kinds in Services or OutsideServices.
func (p *port) chainFor(a answer, pick, sticky ChainKind) ChainID {
	switch {
	case a.verdict != NoChain:
		return a.verdict.id()
	case p.timeout > 0:
		return ChainID{sticky, uint32(len(p.slots[a.pool]))}
	}
	return ChainID{pick, uint32(len(p.slots[a.pool]))}
}

// singles are the sets that hold at most one element for each frontend.
var singles = [...]SetID{
	Services, OutsideServices, RestrictedServices, MasqueradeAlways, MasqueradeNode, Sticky, OutsideSticky, Remember, Scheduled,
}

// single gives a frontend's element in one of the singles, if it has one there.
func (p *port) single(f *frontend, set SetID) (e Element, ok bool) {
	differs := f.outside != f.inside
	id := uint32(0)
	switch set {
	case Services:
		e = frontendElement(set, f.key)
		e.Chain, e.Comment = p.chainFor(f.inside, Pick, StickyPick), p.comment
		return e, true
	case OutsideServices:
		if !differs {
			return e, false
		}
		e = frontendElement(set, f.key)
		e.Chain, e.Comment = p.chainFor(f.outside, OutsidePick, OutsideStickyPick), p.comment
		return e, true
	case RestrictedServices:
		return frontendElement(set, f.key), f.sources != nil
	case MasqueradeAlways:
		return frontendElement(set, f.key), f.masquerade == masqueradeEverybody
	case MasqueradeNode:
		return frontendElement(set, f.key), f.masquerade == masqueradeNode
	case Scheduled:
		return frontendElement(set, f.key), f.inside.verdict == LeftToIPVS || f.outside.verdict == LeftToIPVS
	case Sticky:
		id = p.stickyIDFor(f.inside)
	case OutsideSticky:
		if differs {
			id = p.stickyIDFor(f.outside)
		}
	case Remember:
		e = frontendElement(set, f.key)
		e.Chain = ChainID{RememberFor, p.timeout}
		return e, p.stickyIDFor(f.inside) != 0 || p.stickyIDFor(f.outside) != 0
	}
	e = frontendElement(set, f.key)
	e.setID(id)
	return e, id != 0
}

// stickyIDFor gives the id under which an answer's pool is remembered; 0 means it is not.
func (p *port) stickyIDFor(a answer) uint32 {
	if a.verdict != NoChain {
		return 0
	}
	return p.stickyIDs[a.pool]
}

// sortedNames gives the keys of a map of Services in order.
func sortedNames[V any](m map[snapshot.Name]V) []snapshot.Name {
	names := make([]snapshot.Name, 0, len(m))
	for n := range m {
		names = append(names, n)
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	return names
}
