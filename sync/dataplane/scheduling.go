package dataplane

import (
	"cmp"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// IPVS says which Services are scheduled by IPVS. The zero value says none.
type IPVS struct {
	// Mode says who is.
	Mode IPVSMode
	// Default is how a Service is scheduled that says nothing itself.
	Default Scheduling
}

// IPVSMode says which Services are scheduled by IPVS.
type IPVSMode uint8

// The modes. A Service's annotation goes before all but IPVSNever.
const (
	// IPVSNever: none, whatever they ask for.
	IPVSNever IPVSMode = iota
	// IPVSAuto: those that ask for it.
	IPVSAuto
	// IPVSAlways: all that do not ask for nftables.
	IPVSAlways
)

// scheduling gives how IPVS is to schedule a Service; nil means that it is not to. Services share what is given.
func (h *host) scheduling(svc *snapshot.Service) *Scheduling {
	asked := svc.Scheduling
	switch {
	case h.ipvs.Mode == IPVSNever:
		return nil
	case asked == nil || asked.Scheduler == "":
		if h.ipvs.Mode == IPVSAlways {
			return &h.ipvs.Default
		}
		return nil
	case asked.Scheduler == snapshot.NFTables:
		return nil
	}
	return &Scheduling{Scheduler: asked.Scheduler, Port: asked.Port, Fallback: asked.Fallback}
}

// schedule takes note of how the endpoints of a Service are to be weighed.
func (b *builder) schedule(svc *snapshot.Service) {
	b.scheduling, b.weights = b.host.scheduling(svc), nil
	if svc.Scheduling != nil {
		b.weights = svc.Scheduling.Weights
	}
}

// endpoint gives a candidate as it stands in pools. Its weight is its own, else that of its node, else 1.
func (b *builder) endpoint(c *candidate) Endpoint {
	ep := Endpoint{AddrPort: c.addr, Local: c.local}
	if b.scheduling != nil {
		ep.Weight = cmp.Or(c.Weight, b.weights[c.Node], 1)
	}
	return ep
}

// Scheduled gives the pool of a frontend from which IPVS chooses; nil means that it does not. A virtual service has one list of
// endpoints, so it is the pool of clients from outside: where pods and this node get another one, which is so with
// externalTrafficPolicy Local, they are left to the backend. So is 127.0.0.1, at which the kernel's IPVS cannot answer.
func (sp *ServicePort) Scheduled(f *Frontend) *Pool {
	if sp.Scheduling == nil || f.Key.Addr.IsLoopback() {
		return nil
	}
	if pool := f.Route(Anyone).Pool; len(pool.Endpoints) > 0 {
		return pool
	}
	return nil
}

// Unscheduled gives the Service as it is when nobody schedules it, so that every backend can carry it. The Service is not changed;
// if it has no Scheduling, it is itself what is given.
func (s *Service) Unscheduled() *Service {
	if s == nil || !slices.ContainsFunc(s.Ports, func(sp *ServicePort) bool { return sp.Scheduling != nil }) {
		return s
	}
	left := *s
	left.Ports = make([]*ServicePort, len(s.Ports))
	for i, sp := range s.Ports {
		plain := *sp
		plain.Scheduling = nil
		left.Ports[i] = &plain
	}
	return &left
}

// ScheduledAs says whether the ports of two Services, of which neither may be nil, are scheduled alike.
func (s *Service) ScheduledAs(o *Service) bool {
	return slices.EqualFunc(s.Ports, o.Ports, func(a, b *ServicePort) bool { return equalScheduling(a.Scheduling, b.Scheduling) })
}

// String gives the scheduler with its flags, as annotations have them: "mh,port".
func (s Scheduling) String() string {
	text := s.Scheduler
	if s.Port {
		text += ",port"
	}
	if s.Fallback {
		text += ",fallback"
	}
	return text
}
