package outlier

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// services are the programmed Services. They hold pointers only; which Services have an endpoint is found by looking
// through all of them, and only for endpoints with new evidence.
type services struct {
	byName map[snapshot.Name]*dataplane.Service
	// watched counts ports whose endpoints are looked after.
	watched int
}

// watches says whether a port's endpoints are looked after.
func watches(sp *dataplane.ServicePort) bool {
	return sp.Name.Protocol == snapshot.TCP && sp.SecondChance != snapshot.SecondChanceOff &&
		sp.SecondChance != snapshot.SecondChanceDefault
}

// eachPort calls do for each port of a Service that is looked after. The Service may be nil.
func eachPort(svc *dataplane.Service, do func(*dataplane.ServicePort)) {
	if svc == nil {
		return
	}
	for _, sp := range svc.Ports {
		if watches(sp) {
			do(sp)
		}
	}
}

// eachEndpoint calls do for each endpoint of a port's pools, ejected ones included, perhaps twice.
func eachEndpoint(sp *dataplane.ServicePort, do func(netip.AddrPort)) {
	for _, p := range pools(sp) {
		for i := range p.Endpoints {
			do(p.Endpoints[i].AddrPort)
		}
		for i := range p.Ejected {
			do(p.Ejected[i].Endpoint)
		}
	}
}

func pools(sp *dataplane.ServicePort) [2]*dataplane.Pool {
	return [...]*dataplane.Pool{sp.Cluster, sp.Local}
}

// find returns the ports that have each of the given endpoints.
func (s *services) find(wanted map[netip.AddrPort]bool) map[netip.AddrPort][]*dataplane.ServicePort {
	found := map[netip.AddrPort][]*dataplane.ServicePort{}
	if len(wanted) == 0 {
		return found
	}
	for _, svc := range s.byName {
		eachPort(svc, func(sp *dataplane.ServicePort) {
			eachEndpoint(sp, func(e netip.AddrPort) {
				if wanted[e] && !slices.Contains(found[e], sp) {
					found[e] = append(found[e], sp)
				}
			})
		})
	}
	for _, ports := range found {
		sortPorts(ports)
	}
	return found
}

func sortPorts(ports []*dataplane.ServicePort) {
	slices.SortFunc(ports, func(a, b *dataplane.ServicePort) int { return a.Name.Compare(b.Name) })
}

// replace replaces a Service, by nil if it is gone, and keeps the tracks' ports right. A track without ports is
// forgotten.
func (d *Detector) replace(name snapshot.Name, now *dataplane.Service) {
	before := d.services.byName[name]
	touched := map[*track]bool{}
	eachPort(before, func(sp *dataplane.ServicePort) {
		d.services.watched--
		d.eachTrack(sp, func(t *track) {
			t.ports = slices.DeleteFunc(t.ports, func(o *dataplane.ServicePort) bool { return o == sp })
			touched[t] = true
		})
	})
	eachPort(now, func(sp *dataplane.ServicePort) {
		d.services.watched++
		d.eachTrack(sp, func(t *track) {
			if !slices.Contains(t.ports, sp) {
				t.ports = append(t.ports, sp)
			}
			touched[t] = true
		})
	})
	for t := range touched {
		if sortPorts(t.ports); len(t.ports) == 0 {
			d.machine.forget(t)
		}
	}
	if now == nil {
		delete(d.services.byName, name)
	} else {
		d.services.byName[name] = now
	}
}

func (d *Detector) eachTrack(sp *dataplane.ServicePort, do func(*track)) {
	if len(d.machine.tracks) == 0 {
		return
	}
	eachEndpoint(sp, func(e netip.AddrPort) {
		if t := d.machine.tracks[e]; t != nil {
			do(t)
		}
	})
}

// health returns what is known of a Service's endpoints, nil if none is unhealthy.
func (d *Detector) health(name snapshot.Name) *snapshot.Health {
	var h snapshot.Health
	eachPort(d.services.byName[name], func(sp *dataplane.ServicePort) {
		d.eachTrack(sp, func(t *track) {
			if t.state == unhealthy {
				h.Unhealthy = append(h.Unhealthy, snapshot.Unhealthy{Endpoint: t.endpoint, Cause: t.cause, Since: t.since})
			}
		})
	})
	if len(h.Unhealthy) == 0 {
		return nil
	}
	slices.SortFunc(h.Unhealthy, func(a, b snapshot.Unhealthy) int { return a.Endpoint.Compare(b.Endpoint) })
	h.Unhealthy = slices.CompactFunc(h.Unhealthy, func(a, b snapshot.Unhealthy) bool { return a.Endpoint == b.Endpoint })
	return &h
}

// maxReferences is how many other endpoints are probed with one under suspicion.
const maxReferences = 2

// references returns other endpoints of a track's pools that nothing is known against. If the endpoint is not local,
// neither are they: policies rarely keep a node from its own pods.
func (d *Detector) references(t *track) (refs []netip.AddrPort) {
	seen := 0
	for _, sp := range t.ports {
		for _, p := range pools(sp) {
			in := slices.IndexFunc(p.Endpoints, func(e dataplane.Endpoint) bool { return e.AddrPort == t.endpoint })
			if in < 0 && !ejected(p, t.endpoint) {
				continue
			}
			if in >= 0 {
				t.local = p.Endpoints[in].Local
			}
			for _, e := range p.Endpoints {
				if e.AddrPort == t.endpoint || !mayProbe(e.Addr()) || e.Local && !t.local || slices.Contains(refs, e.AddrPort) {
					continue
				}
				if o := d.machine.tracks[e.AddrPort]; o != nil && o.state == unhealthy {
					continue
				}
				seen++ // each has the same chance
				if len(refs) < maxReferences {
					refs = append(refs, e.AddrPort)
				} else if i := rand.IntN(seen); i < maxReferences {
					refs[i] = e.AddrPort
				}
			}
		}
	}
	return refs
}

// ejected says whether a pool has an endpoint that it does not use.
func ejected(p *dataplane.Pool, e netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(p.Ejected, e, func(u snapshot.Unhealthy, e netip.AddrPort) int {
		return u.Endpoint.Compare(e)
	})
	return found
}

// ejectedFrom says whether an endpoint is ejected from a pool of a Service; the zero Name means any Service.
func (t *track) ejectedFrom(name snapshot.Name) bool {
	return slices.ContainsFunc(t.ports, func(sp *dataplane.ServicePort) bool {
		return (name == snapshot.Name{} || sp.Name.Service == name) &&
			(ejected(sp.Cluster, t.endpoint) || ejected(sp.Local, t.endpoint))
	})
}

// flush says when the endpoint's unanswered flows are deleted.
type flush struct {
	// wanted says that evidence came for an unhealthy endpoint.
	wanted bool
	// due is when to delete; zero if not at all. again says that this is not the last time.
	due   time.Time
	again bool
	last  time.Time
	// ejected is what ejectedFrom gave last.
	ejected bool
}

// flushAgain is how long after the first time flows are deleted a second time: packets may have been on their way that
// the old rules translated. While evidence goes on, flows are deleted as often.
const flushAgain = time.Second

// flushable returns the ports at whose frontends unanswered flows to an endpoint are deleted: those that have ejected
// it, or could not, and have a healthy one.
func (d *Detector) flushable(t *track) (ports []*dataplane.ServicePort) {
	for _, sp := range t.ports {
		if sp.SecondChance == snapshot.SecondChanceOn &&
			(d.flushablePool(sp.Cluster, t.endpoint) || d.flushablePool(sp.Local, t.endpoint)) {
			ports = append(ports, sp)
		}
	}
	return ports
}

func (d *Detector) flushablePool(p *dataplane.Pool, endpoint netip.AddrPort) bool {
	if ejected(p, endpoint) {
		return true
	}
	has, healthy := false, false
	for i := range p.Endpoints {
		e := p.Endpoints[i].AddrPort
		if e == endpoint {
			has = true
		} else if o := d.machine.tracks[e]; o == nil || o.state != unhealthy {
			healthy = true
		}
	}
	return has && healthy
}

// hasFrontend says whether a frontend is one of these ports'.
func hasFrontend(ports []*dataplane.ServicePort, k dataplane.Key) bool {
	for _, sp := range ports {
		_, found := slices.BinarySearchFunc(sp.Frontends, k, func(f dataplane.Frontend, k dataplane.Key) int {
			return f.Key.Compare(k)
		})
		if found {
			return true
		}
	}
	return false
}
