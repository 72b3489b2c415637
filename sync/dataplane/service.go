package dataplane

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// builder computes what one Service asks for, as if it were the only one. It reuses its buffers between Services.
type builder struct {
	host     host
	reserved reserved
	// slices are the Service's; those before own are its Local's.
	slices     []*snapshot.Slice
	own        int
	candidates []candidate
	// parts are the shares of the endpoints of the pool that is being built.
	parts []uint32
	// index, if not nil, holds the slices that have each port.
	index map[portKey][]slicePort
	// maxPerPort is how many endpoints a port may have; overCapacity says that the Service has more.
	maxPerPort   int
	overCapacity bool
	// in is the snapshot, and backends are the Service's: nil if its own slices serve it. backings are those that were
	// asked for since refer. groups are the backends of the port whose endpoints were collected.
	in       *snapshot.Snapshot
	backends *snapshot.Backends
	backings map[snapshot.Name]*backing
	groups   []group
	// referred records to how many endpoints all Services refer. tooFar says that the Service refers to too many: it has
	// none then.
	referred budget
	tooFar   bool
	// health is what this node found out about the Service's endpoints; nil if none is unhealthy.
	health *snapshot.Health
	// resort says that the Service has no usable endpoint anywhere, and is to use its last resort.
	resort bool
	// full are its ports and clients with as many open connections as they may have; nil if there are none.
	full *snapshot.Full
	// starting are the Service's endpoints that start slowly; nil if there are none.
	starting *snapshot.Starting
	// scheduling is the Service's; weights are the weights it gives to nodes.
	scheduling *Scheduling
	weights    map[string]uint16
	// nearAsked says that the Service asks for near endpoints, hashAsked that it also asks for a hash, and zoneDemand
	// what it says of the demand. zonePlan is how the cluster pool that was built last is divided; nil if it is not.
	nearAsked, hashAsked bool
	zoneDemand           map[string]uint16
	zonePlan             *ZonePlan
	// budget records what all Services ask of IPVS.
	budget budget
	// slots records what all Services ask of the slots of their namespaces.
	slots budget
	// others are the ports of other Services with many, for the Service that is being built.
	others map[*snapshot.Service]map[portNumber]struct{}
}

// portNumber is a port at an address.
type portNumber struct {
	protocol snapshot.Protocol
	number   uint16
}

// service returns what a Service of the snapshot asks for; nil if it is gone or has no port.
func (b *builder) service(s *snapshot.Snapshot, n snapshot.Name) *Service {
	svc := s.Services[n]
	if svc == nil {
		b.forget(n)
		return nil
	}
	b.prepare(s, svc)
	b.others = nil
	b.full = s.Full[n]
	out := &Service{Name: n, Age: svc.Age, ClusterIPs: svc.ClusterIPs, HealthCheckNodePort: svc.HealthCheckNodePort,
		Counters: svc.Counters,
		Ports:    make([]*ServicePort, 0, len(svc.ClusterIPs)*len(svc.Ports))}
	ports := unique(svc.Ports)
	for _, f := range ipfamily.All {
		clusterIP := slices.IndexFunc(svc.ClusterIPs, f.Has)
		if clusterIP < 0 {
			continue
		}
		sources := b.sources(svc, f)
		for i := range ports {
			out.Ports = append(out.Ports, b.port(svc, &ports[i], f, svc.ClusterIPs[clusterIP], sources))
		}
	}
	if len(out.Ports) == 0 {
		b.forget(n)
		return nil
	}
	out.OverCapacity = b.overCapacity || b.tooFar
	b.edge(out)
	b.applyBudget(out, svc)
	b.applySlotBudget(out, svc)
	return out
}

// prepare makes the builder ready for the ports of a Service.
func (b *builder) prepare(s *snapshot.Snapshot, svc *snapshot.Service) {
	b.load(s, svc)
	b.health, b.resort = s.Health[svc.Name], b.resorts(s, svc)
	b.schedule(svc)
	b.starting = b.startingOf(s, svc)
}

// unique returns the ports without those of which an earlier one has the same name and protocol. The API server rejects
// that, but a manifest file may have it. The first port counts, because a port's name must distinguish its claims.
func unique(ports []snapshot.Port) []snapshot.Port {
	if len(ports) < 2 {
		return ports
	}
	seen := make(map[portKey]struct{}, len(ports))
	for i := range ports {
		seen[portKey{ports[i].Name, ports[i].Protocol}] = struct{}{}
	}
	if len(seen) == len(ports) {
		return ports
	}
	return slices.DeleteFunc(slices.Clone(ports), func(p snapshot.Port) bool {
		k := portKey{p.Name, p.Protocol}
		_, first := seen[k]
		delete(seen, k)
		return !first
	})
}

// port computes one port of a Service in one family.
func (b *builder) port(
	svc *snapshot.Service, p *snapshot.Port, f ipfamily.Family, clusterIP netip.Addr, sources []netip.Prefix,
) *ServicePort {
	sp := &ServicePort{
		Name:       PortName{Service: svc.Name, Port: p.Name, Protocol: p.Protocol},
		Affinity:   svc.Affinity,
		Scheduling: b.scheduling,
		Hash:       hashOf(svc),
		Frontends:  b.frontends(svc, p, f, clusterIP, sources),

		SecondChance: b.host.secondChanceOf(svc, p),
		Limits:       svc.Limits,
	}
	if sp.SecondChance != snapshot.SecondChanceOff {
		sp.Probe = svc.Probe
	}
	if p.Protocol == snapshot.TCP {
		sp.Drain, sp.Rebalance = svc.Drain, svc.Rebalance
	}
	full := snapshot.FullPort{Port: p.Name, Protocol: p.Protocol, Family: f}
	sp.Full = svc.Limits.Open > 0 && b.full.Has(full)
	if svc.Limits.ClientOpen > 0 {
		sp.FullClients = b.full.ClientsOf(full)
	}
	b.collectEndpoints(p, f)
	sp.Resort = b.toProbe(sp.Name)
	internal := b.rows(svc, f, false)
	var external []row
	if len(sp.Frontends) > 1 { // all but the cluster IP
		external = b.rows(svc, f, true)
	}
	kept := b.keptRows(svc, sp, f, external)
	leads := func(to poolName) bool {
		return anyLeadsTo(internal, to) || anyLeadsTo(external, to) || anyLeadsTo(kept, to)
	}
	b.fillPools(sp, leads(clusterPool), leads(localPool))
	b.serving(sp)
	sp.lead(internal, external, kept)
	return sp
}

// lead gives the port's frontends their routes.
func (sp *ServicePort) lead(internal, external, kept []row) {
	internalRoutes, externalRoutes, keptRoutes := sp.routes(internal), sp.routes(external), sp.routes(kept)
	for i := range sp.Frontends {
		switch fe := &sp.Frontends[i]; {
		case fe.Kind == ClusterIP:
			fe.Routes = internalRoutes
		case fe.Kept:
			fe.Routes = keptRoutes
		default:
			fe.Routes = externalRoutes
		}
	}
}

// rows returns the policy for cluster IPs, or for external addresses and node ports, of the port whose endpoints were
// collected.
func (b *builder) rows(svc *snapshot.Service, f ipfamily.Family, external bool) []row {
	local, failover := svc.InternalLocal, noFailover
	if external {
		local, failover = svc.ExternalLocal, b.failover(svc)
	}
	return b.policy(f, external, local, failover)
}

// policy returns the rows of the policy table.
func (b *builder) policy(f ipfamily.Family, external, local bool, in failover) []row {
	rows := rowsFor(external, local, b.host.pods[f].Known(), b.host.masqueradeAll, in)
	if b.host.podsFirst {
		rows = podsFirst(rows)
	}
	return rows
}

// routes turns rows of policy into routes to the port's pools. Frontends with the same policy share them.
func (sp *ServicePort) routes(rows []row) []Route {
	if len(rows) == 0 {
		return nil
	}
	pools := [...]*Pool{clusterPool: sp.Cluster, localPool: sp.Local, rejectingPool: poolNoEndpoints,
		passingPool: poolPassing}
	routes := make([]Route, len(rows))
	for i, r := range rows {
		routes[i] = Route{From: r.from, Pool: pools[r.pool], SNAT: r.snat}
	}
	return routes
}

// frontends returns the addresses at which a port answers in one family, without routes, sorted by Key. If the port
// names an address twice, the lowest Kind counts.
func (b *builder) frontends(
	svc *snapshot.Service, p *snapshot.Port, f ipfamily.Family, clusterIP netip.Addr, sources []netip.Prefix,
) []Frontend {
	n := 1 + len(svc.LoadBalancerIPs) + len(svc.ExternalIPs)
	if p.NodePort != 0 {
		n += len(b.host.nodePortAddrs[f])
	}
	fs := make([]Frontend, 0, n)
	add := func(kind Kind, a netip.Addr, port uint16, sources []netip.Prefix) {
		k := Key{Addr: a, Protocol: p.Protocol, Port: port}
		said := kind == LoadBalancerIP || kind == ExternalIP
		if f.Has(a) && !(said && b.reservedByOther(svc, f, k)) {
			fs = append(fs, Frontend{Key: k, Kind: kind, NotScheduled: b.notScheduled(kind, a), Sources: sources})
		}
	}
	add(ClusterIP, clusterIP, p.Port, nil)
	for _, a := range svc.LoadBalancerIPs {
		add(LoadBalancerIP, a, p.Port, sources)
	}
	for _, a := range svc.ExternalIPs {
		if !b.host.noExternalIPs {
			add(ExternalIP, a, p.Port, nil)
		}
	}
	if p.NodePort != 0 {
		for _, a := range b.host.nodePortAddrs[f] {
			add(NodePort, a, p.NodePort, nil)
		}
	}
	if len(fs) > 1 {
		slices.SortFunc(fs, func(x, y Frontend) int {
			return cmp.Or(x.Key.Compare(y.Key), cmp.Compare(x.Kind, y.Kind))
		})
		fs = slices.CompactFunc(fs, func(x, y Frontend) bool { return x.Key == y.Key })
	}
	return fs
}

// sources returns the source ranges that may use the load balancer addresses of one family; nil means everybody.
//
// If this node may use them, so may the load balancer addresses themselves: if one is bound to this node, the node's
// own connections to it have it as their source.
func (b *builder) sources(svc *snapshot.Service, f ipfamily.Family) []netip.Prefix {
	var ranges []netip.Prefix
	node := false
	for _, r := range svc.SourceRanges {
		if !f.Has(r.Addr()) {
			continue
		}
		if r.Bits() == 0 {
			return nil
		}
		ranges = append(ranges, r)
		node = node || slices.ContainsFunc(b.host.addresses, r.Contains)
	}
	if node {
		for _, a := range svc.LoadBalancerIPs {
			if f.Has(a) {
				ranges = append(ranges, netip.PrefixFrom(a, a.BitLen()))
			}
		}
	}
	return outermost(ranges)
}

// outermost sorts ranges and drops those inside another, because an nft interval set cannot hold overlapping ranges.
func outermost(ranges []netip.Prefix) []netip.Prefix {
	slices.SortFunc(ranges, netip.Prefix.Compare) // a range comes right before those it contains
	kept := ranges[:0]
	for _, r := range ranges {
		if len(kept) == 0 || !kept[len(kept)-1].Contains(r.Addr()) {
			kept = append(kept, r)
		}
	}
	return kept
}
