package outlier

import (
	"net/netip"
	"slices"

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

// eachPort calls do for each port of a Service that is looked after, or has a last resort. The Service may be nil.
func eachPort(svc *dataplane.Service, do func(*dataplane.ServicePort)) {
	for sp := range svc.EachPort() {
		if watches(sp) || len(sp.Resort) > 0 {
			do(sp)
		}
	}
}

// eachEndpoint calls do for each endpoint of a port's pools, ejected ones and those of the last resort included,
// perhaps twice.
func eachEndpoint(sp *dataplane.ServicePort, do func(netip.AddrPort)) {
	for _, p := range pools(sp) {
		for i := range p.Endpoints {
			do(p.Endpoints[i].AddrPort)
		}
		for i := range p.Ejected {
			do(p.Ejected[i].Endpoint)
		}
	}
	for _, e := range sp.Resort {
		do(e)
	}
}

func pools(sp *dataplane.ServicePort) [2]*dataplane.Pool {
	return [...]*dataplane.Pool{sp.Cluster, sp.Local}
}

// hasFrontend says whether a port of a Service that is looked after has a frontend.
func (s *services) hasFrontend(name snapshot.Name, k dataplane.Key) bool {
	svc := s.byName[name]
	return svc != nil && slices.ContainsFunc(svc.Ports, func(sp *dataplane.ServicePort) bool {
		return watches(sp) && sp.Frontend(k) != nil
	})
}

// has says whether a port has an endpoint.
func has(sp *dataplane.ServicePort, endpoint netip.AddrPort) (yes bool) {
	eachEndpoint(sp, func(e netip.AddrPort) { yes = yes || e == endpoint })
	return yes
}

// find notes which Services have some frontends.
func (s *services) find(wanted map[dataplane.Key]bool, owners map[dataplane.Key]snapshot.Name) {
	if len(wanted) == 0 {
		return
	}
	for name, svc := range s.byName {
		eachPort(svc, func(sp *dataplane.ServicePort) {
			for i := range sp.Frontends {
				if k := sp.Frontends[i].Key; wanted[k] {
					owners[k] = name
				}
			}
		})
	}
}

// with returns the ports of a Service that have some endpoints.
func (s *services) with(name snapshot.Name, endpoints map[netip.AddrPort]snapshot.Cause) (
	found map[netip.AddrPort][]*dataplane.ServicePort) {
	found = map[netip.AddrPort][]*dataplane.ServicePort{}
	eachPort(s.byName[name], func(sp *dataplane.ServicePort) {
		eachEndpoint(sp, func(e netip.AddrPort) {
			if _, wanted := endpoints[e]; wanted && !endsWith(found[e], sp) {
				found[e] = append(found[e], sp)
			}
		})
	})
	return found
}

// endsWith reports whether a port was added last: ports come one after the other, and each names an endpoint of both
// its pools twice.
func endsWith(ports []*dataplane.ServicePort, sp *dataplane.ServicePort) bool {
	return len(ports) > 0 && ports[len(ports)-1] == sp
}

// replace replaces a Service, by nil if it is gone, and keeps the tracks' ports right. A track without ports is
// forgotten.
func (d *Detector) replace(name snapshot.Name, now *dataplane.Service) {
	touched := map[*track]bool{}
	eachPort(d.services.byName[name], func(sp *dataplane.ServicePort) {
		d.services.count(sp, -1)
		d.eachTrack(name, sp, func(t *track) {
			t.ports = nil
			touched[t] = true
		})
	})
	eachPort(now, func(sp *dataplane.ServicePort) {
		d.services.count(sp, +1)
		d.eachTrack(name, sp, func(t *track) {
			if !endsWith(t.ports, sp) {
				t.ports = append(t.ports, sp)
			}
		})
	})
	d.askFor(name, now, touched)
	for t := range touched {
		if len(t.ports) == 0 && d.machine.tracks[t.trackKey] == t {
			d.machine.forget(t)
		}
	}
	if now == nil {
		delete(d.services.byName, name)
	} else {
		d.services.byName[name] = now
	}
}

func (d *Detector) eachTrack(name snapshot.Name, sp *dataplane.ServicePort, do func(*track)) {
	if len(d.machine.tracks) == 0 {
		return
	}
	eachEndpoint(sp, func(e netip.AddrPort) {
		if t := d.machine.tracks[trackKey{name, e}]; t != nil {
			do(t)
		}
	})
}

// count counts a port that comes or goes, if its endpoints are looked after.
func (s *services) count(sp *dataplane.ServicePort, by int) {
	if watches(sp) {
		s.watched += by
	}
}

// health returns what is known of a Service's endpoints, nil if nothing.
func (d *Detector) health(name snapshot.Name) *snapshot.Health {
	var h snapshot.Health
	eachPort(d.services.byName[name], func(sp *dataplane.ServicePort) {
		d.eachTrack(name, sp, func(t *track) {
			switch {
			case t.asks == asResort && t.state == cleared:
				h.Unhealthy = append(h.Unhealthy, snapshot.Unhealthy{Endpoint: t.endpoint, Cause: snapshot.Resort,
					Since: t.recovered})
			case t.asks == asResort:
			case t.state == unhealthy || t.doubtful():
				h.Unhealthy = append(h.Unhealthy, snapshot.Unhealthy{Endpoint: t.endpoint, Cause: t.cause, Since: t.since,
					Doubtful: t.state != unhealthy})
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

// ejected says whether the endpoint is ejected from a pool of the Service.
func (t *track) ejected() bool {
	return slices.ContainsFunc(t.ports, func(sp *dataplane.ServicePort) bool {
		return sp.Cluster.Ejects(t.endpoint) || sp.Local.Ejects(t.endpoint)
	})
}

// flushable returns the ports at whose frontends unanswered flows to an endpoint are deleted: those that have ejected
// it, or have another one.
func (d *Detector) flushable(t *track) (ports []*dataplane.ServicePort) {
	for _, sp := range t.ports {
		if sp.SecondChance == snapshot.SecondChanceOn && (d.flushablePool(sp.Cluster, t) || d.flushablePool(sp.Local, t)) {
			ports = append(ports, sp)
		}
	}
	return ports
}

func (d *Detector) flushablePool(p *dataplane.Pool, t *track) bool {
	if p.Ejects(t.endpoint) {
		return true
	}
	has, healthy := false, false
	for i := range p.Endpoints {
		e := p.Endpoints[i].AddrPort
		if e == t.endpoint {
			has = true
		} else if o := d.machine.tracks[trackKey{t.service, e}]; o == nil || o.state != unhealthy {
			healthy = true
		}
	}
	return has && healthy
}

// hasFrontend says whether a frontend is one of these ports'.
func hasFrontend(ports []*dataplane.ServicePort, k dataplane.Key) bool {
	return slices.ContainsFunc(ports, func(sp *dataplane.ServicePort) bool { return sp.Frontend(k) != nil })
}
