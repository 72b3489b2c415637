package dataplane

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// reserved is what belongs to one Service alone, even if other Services claim the address: a cluster IP with all its
// ports, also those that the Service does not have, and a health check node port at the addresses of node ports. A
// client that tries another port of a cluster IP, or a load balancer that checks health, must not reach another
// Service.
type reserved struct {
	// clusterIPs holds the Services that have each cluster IP: one, unless a manifest has mistakes. healthPorts counts the
	// Services that have each health check node port.
	clusterIPs  map[netip.Addr][]*snapshot.Service
	healthPorts map[uint16]int
}

func newReserved(services int) reserved {
	return reserved{clusterIPs: make(map[netip.Addr][]*snapshot.Service, services), healthPorts: map[uint16]int{}}
}

// reservedIn returns what the Services of a snapshot reserve.
func reservedIn(s *snapshot.Snapshot) reserved {
	r := newReserved(len(s.Services))
	for _, svc := range s.Services {
		r.add(svc)
	}
	return r
}

// add and remove count a Service. It may be nil.
func (r *reserved) add(svc *snapshot.Service) {
	if svc == nil {
		return
	}
	for _, a := range svc.ClusterIPs {
		r.clusterIPs[a] = append(r.clusterIPs[a], svc)
	}
	if p := svc.HealthCheckNodePort; p != 0 {
		r.healthPorts[p]++
	}
}

func (r *reserved) remove(svc *snapshot.Service) {
	if svc == nil {
		return
	}
	for _, a := range svc.ClusterIPs {
		r.clusterIPs[a] = slices.DeleteFunc(r.clusterIPs[a], func(o *snapshot.Service) bool { return o == svc })
		if len(r.clusterIPs[a]) == 0 {
			delete(r.clusterIPs, a)
		}
	}
	if p := svc.HealthCheckNodePort; p != 0 {
		if r.healthPorts[p]--; r.healthPorts[p] == 0 {
			delete(r.healthPorts, p)
		}
	}
}

// reservedByOther reports whether a Service must not answer at its own external IP or load balancer address, because
// another Service has reserved it. If the other Service answers there itself, this is a conflict instead, which it
// wins.
func (b *builder) reservedByOther(svc *snapshot.Service, f ipfamily.Family, k Key) bool {
	others := false
	for _, o := range b.reserved.clusterIPs[k.Addr] {
		if o.Name == svc.Name {
			continue
		}
		if b.has(o, k) {
			return false
		}
		others = true
	}
	if others {
		return true
	}
	health := b.reserved.healthPorts[k.Port]
	return health > 0 && svc.HealthCheckNodePort != k.Port && k.Protocol == snapshot.TCP &&
		slices.Contains(b.host.nodePortAddrs[f], k.Addr)
}

// has reports whether another Service has the port of a key. This one may ask for very many keys of one with very many
// ports.
func (b *builder) has(o *snapshot.Service, k Key) bool {
	if len(o.Ports) <= fewSlicePorts {
		return slices.ContainsFunc(o.Ports, func(p snapshot.Port) bool {
			return p.Port == k.Port && p.Protocol == k.Protocol
		})
	}
	ports := b.others[o]
	if ports == nil {
		ports = make(map[portNumber]struct{}, len(o.Ports))
		for i := range o.Ports {
			ports[portNumber{o.Ports[i].Protocol, o.Ports[i].Port}] = struct{}{}
		}
		if b.others == nil {
			b.others = map[*snapshot.Service]map[portNumber]struct{}{}
		}
		b.others[o] = ports
	}
	_, has := ports[portNumber{k.Protocol, k.Port}]
	return has
}

// reservations keep reserved in sync with the snapshot.
type reservations struct {
	// seen are the Services as they are counted in reserved.
	seen map[snapshot.Name]*snapshot.Service
	// external are the Services that name each external IP or load balancer address.
	external map[netip.Addr]map[snapshot.Name]struct{}
}

// started reports whether update was called before.
func (r *reservations) started() bool { return r.seen != nil }

// update applies some Services of a snapshot, and returns their names together with those of other Services that this
// affects.
func (b *builder) update(r *reservations, s *snapshot.Snapshot, names []snapshot.Name) []snapshot.Name {
	if !r.started() {
		r.seen = make(map[snapshot.Name]*snapshot.Service, len(s.Services))
		r.external = map[netip.Addr]map[snapshot.Name]struct{}{}
		b.reserved = newReserved(len(s.Services))
	}
	more := map[snapshot.Name]struct{}{}
	for _, n := range names {
		was, is := r.seen[n], s.Services[n]
		if was == is {
			continue
		}
		r.indexExternal(n, was, is)
		b.reserved.add(is)
		b.reserved.remove(was)
		b.addAffected(r, was, is, more)
		if is == nil {
			delete(r.seen, n)
		} else {
			r.seen[n] = is
		}
	}
	if len(more) == 0 {
		return names
	}
	names = slices.AppendSeq(slices.Clone(names), maps.Keys(more))
	slices.SortFunc(names, snapshot.Name.Compare)
	return slices.Compact(names)
}

// indexExternal keeps external in sync.
func (r *reservations) indexExternal(n snapshot.Name, was, is *snapshot.Service) {
	each := func(svc *snapshot.Service, do func(netip.Addr)) {
		if svc != nil {
			for _, list := range [][]netip.Addr{svc.LoadBalancerIPs, svc.ExternalIPs} {
				for _, a := range list {
					do(a)
				}
			}
		}
	}
	each(was, func(a netip.Addr) {
		if delete(r.external[a], n); len(r.external[a]) == 0 {
			delete(r.external, a)
		}
	})
	each(is, func(a netip.Addr) {
		if r.external[a] == nil {
			r.external[a] = map[snapshot.Name]struct{}{}
		}
		r.external[a][n] = struct{}{}
	})
}

// addAffected adds the Services that name an address which a Service reserves in only one of two versions.
func (b *builder) addAffected(r *reservations, was, is *snapshot.Service, more map[snapshot.Name]struct{}) {
	if was == nil {
		was = &snapshot.Service{}
	}
	if is == nil {
		is = &snapshot.Service{}
	}
	if !slices.Equal(was.ClusterIPs, is.ClusterIPs) || !slices.Equal(was.Ports, is.Ports) {
		for _, a := range slices.Concat(was.ClusterIPs, is.ClusterIPs) {
			for n := range r.external[a] {
				more[n] = struct{}{}
			}
		}
	}
	if was.HealthCheckNodePort != is.HealthCheckNodePort {
		for _, a := range slices.Concat(b.host.nodePortAddrs[:]...) {
			for n := range r.external[a] {
				more[n] = struct{}{}
			}
		}
	}
}
