package dataplane

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// IPVS says which Services are scheduled by IPVS. The zero value says none.
type IPVS struct {
	// Mode says who is.
	Mode IPVSMode
	// Default is how a Service is scheduled that says nothing itself.
	Default Scheduling
	// Addresses are ranges of load balancer addresses of which IPVS may take each as a whole. The zero value is none.
	Addresses []netip.Prefix
	// MaxPerService and MaxPerNamespace bound what IPVS is asked for; 0 stands for the constants of these names.
	MaxPerService, MaxPerNamespace int
}

func (i *IPVS) equal(o *IPVS) bool {
	return i.Mode == o.Mode && i.Default == o.Default && slices.Equal(i.Addresses, o.Addresses) &&
		i.MaxPerService == o.MaxPerService && i.MaxPerNamespace == o.MaxPerNamespace
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

// NotScheduled says why IPVS does not choose the endpoint at a frontend though its Service asks for that.
type NotScheduled uint8

// IPVS gets only packets that the host takes in, and a host takes in an address as a whole: whoever had it, a gateway,
// another node, the API server, cannot be reached any more. So that is done only with addresses that are Services'
// alone.
const (
	// Schedulable: nothing speaks against it.
	Schedulable NotScheduled = iota
	// AtExternalIP: whoever writes a Service says any address.
	AtExternalIP
	// AtLoadBalancerIP: the operator's IPVS.Addresses do not have it.
	AtLoadBalancerIP
	// OutsideServiceCIDRs: a cluster IP that is in none of them, though they are known.
	OutsideServiceCIDRs
	// ServiceTooLarge: it asks for more than MaxPerService. All its frontends have this reason.
	ServiceTooLarge
	// NamespaceFull: with it, the Services of its namespace ask for more than MaxPerNamespace. All its frontends have
	// this reason.
	NamespaceFull
	// WithAffinity: IPVS remembers every client of a Service with session affinity by its address, without a bound. So
	// that is for the operator to ask for, by IPVSAlways. All its frontends have this reason.
	WithAffinity
)

var notScheduledTexts = [...]string{
	"",
	"at an external IP, IPVS would take the whole address from whoever else has it",
	"at a load balancer address outside of ipvsAddresses, IPVS would take the whole address from whoever else has it",
	"at a cluster IP outside of the ServiceCIDRs, IPVS would take the whole address from whoever else has it",
	"it asks IPVS for too many virtual services and destinations",
	"with the older Services of its namespace, it asks IPVS for too many virtual services and destinations",
	"it has session affinity, for which IPVS would remember every client, without a bound",
}

// WholeService says whether the reason is one for all of a Service.
func (n NotScheduled) WholeService() bool { return n >= ServiceTooLarge }

// String says it in a sentence, for messages; empty for Schedulable.
func (n NotScheduled) String() string { return notScheduledTexts[n] }

// canTakeAddress says whether the address of a frontend may be taken in as a whole. That of a node port is the host's own.
func (h *host) canTakeAddress(k Kind, a netip.Addr) NotScheduled {
	switch {
	case k == NodePort || k != ExternalIP && contain(h.ipvs.Addresses, a):
		return Schedulable
	case k == ExternalIP:
		return AtExternalIP
	case k == LoadBalancerIP:
		return AtLoadBalancerIP
	case len(h.serviceCIDRs) > 0 && !contain(h.serviceCIDRs, a):
		return OutsideServiceCIDRs
	}
	return Schedulable
}

// notScheduled says why IPVS does not choose at an address of the Service that is being built; Schedulable if it does
// not ask for IPVS.
func (b *builder) notScheduled(k Kind, a netip.Addr) NotScheduled {
	if b.scheduling == nil {
		return Schedulable
	}
	return b.host.canTakeAddress(k, a)
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

// Scheduled gives the pool of a frontend from which IPVS chooses; nil means that it does not. A virtual service has one
// list of endpoints, so it is the pool of clients from outside: where pods and this node get another one, which is so
// with externalTrafficPolicy Local, they are left to the backend. So is 127.0.0.1, at which the kernel's IPVS cannot
// answer, and what is NotScheduled.
func (sp *ServicePort) Scheduled(f *Frontend) *Pool {
	if sp.Scheduling == nil || f.NotScheduled != Schedulable || f.Key.Addr.IsLoopback() {
		return nil
	}
	if pool := f.Route(Anyone).Pool; len(pool.Endpoints) > 0 {
		return pool
	}
	return nil
}

// Unscheduled gives the Service as it is when nobody schedules it, so that every backend can carry it. The Service is
// not changed; if it has no Scheduling, it is itself what is given.
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
