package dataplane

import (
	"math"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// IPVS configures which Services IPVS schedules. The zero value means none.
type IPVS struct {
	// Mode says which Services.
	Mode IPVSMode
	// Default is how a Service without an annotation of its own is scheduled.
	Default Scheduling
	// Addresses are ranges of load balancer addresses that IPVS may take over completely. The zero value means none.
	Addresses []netip.Prefix
	// MaxPerService and MaxPerNamespace bound what Services may ask of IPVS; 0 stands for the constants of these names.
	MaxPerService, MaxPerNamespace int
}

func (i *IPVS) equal(o *IPVS) bool {
	return i.Mode == o.Mode && i.Default == o.Default && slices.Equal(i.Addresses, o.Addresses) &&
		i.MaxPerService == o.MaxPerService && i.MaxPerNamespace == o.MaxPerNamespace
}

// IPVSMode says which Services are scheduled by IPVS.
type IPVSMode uint8

// The modes. A Service's annotation takes precedence over all modes but IPVSNever.
const (
	// IPVSNever: no Service, whatever it asks for.
	IPVSNever IPVSMode = iota
	// IPVSAuto: Services that ask for it.
	IPVSAuto
	// IPVSAlways: all Services that do not ask for nftables.
	IPVSAlways
)

// scheduling returns how IPVS schedules a Service of these slices; nil if it does not. Services may share the result.
func (h *host) scheduling(svc *snapshot.Service, of []*snapshot.Slice) *Scheduling {
	asked := svc.Scheduling
	switch {
	case h.ipvs.Mode == IPVSNever:
		return nil
	case asked == nil || asked.Scheduler == "":
		if h.ipvs.Mode != IPVSAlways {
			return nil
		}
		if weighted := weightedTwins[h.ipvs.Default.Scheduler]; weighted != "" && asksForShares(svc, of) {
			return &Scheduling{Scheduler: weighted}
		}
		return &h.ipvs.Default
	case !svc.AsksForIPVS():
		return nil
	}
	return &Scheduling{Scheduler: asked.Scheduler, Port: asked.Port, Fallback: asked.Fallback}
}

// weightedTwins are the schedulers that choose in proportion to the weights, and with equal weights as those they stand
// for. A Service that names no scheduler gets one in place of the node's default if it asks for shares of the
// connections, which need no scheduler with nftables either.
var weightedTwins = map[string]string{"rr": "wrr", "lc": "wlc"}

// asksForShares reports whether a Service of these slices gives some endpoints more connections than others: by
// weights, by zones or by a slow start.
func asksForShares(svc *snapshot.Service, of []*snapshot.Slice) bool {
	if svc.SlowStart > 0 || svc.Scheduling != nil && (len(svc.Scheduling.Weights) > 0 || svc.Scheduling.PreferNear) {
		return true
	}
	return slices.ContainsFunc(of, func(s *snapshot.Slice) bool {
		return slices.ContainsFunc(s.Endpoints, func(ep snapshot.Endpoint) bool { return ep.Weight.Given })
	})
}

// hashOf returns how the backend chooses an endpoint for a Service where IPVS does not: schedulers of IPVS that hash
// the client have a hash in their place.
func hashOf(svc *snapshot.Service) Hash {
	asked := svc.Scheduling
	if asked == nil || asked.Scheduler != snapshot.Hash && asked.Scheduler != "sh" && asked.Scheduler != "mh" {
		return NoHash
	}
	if asked.Port && svc.Affinity == 0 {
		return HashAddrPort
	}
	return HashAddr
}

// NotScheduled says why IPVS does not choose the endpoint at a frontend although the Service asks for it.
type NotScheduled uint8

// IPVS only gets packets for the host itself, and a host takes an address as a whole: a gateway, another node or the
// API server that has the same address becomes unreachable. So IPVS only takes addresses that belong to Services alone.
const (
	// Schedulable: IPVS may choose.
	Schedulable NotScheduled = iota
	// AtExternalIP: the author of a Service may write any address.
	AtExternalIP
	// AtLoadBalancerIP: the operator's IPVS.Addresses do not hold the address.
	AtLoadBalancerIP
	// OutsideServiceCIDRs: the ServiceCIDRs are known, and none holds the cluster IP.
	OutsideServiceCIDRs
	// InSharedRange: something other than Services has addresses around the cluster IP, and perhaps that one.
	InSharedRange
	// ServiceTooLarge: the Service asks for more than MaxPerService. All its frontends have this reason.
	ServiceTooLarge
	// NamespaceFull: with this Service, the Services of its namespace ask for more than MaxPerNamespace. All its frontends
	// have this reason.
	NamespaceFull
	// WithAffinity: IPVS remembers every client of a Service with session affinity, without a bound. Only the operator can
	// ask for that, with IPVSAlways. All frontends of the Service have this reason.
	WithAffinity
	// WithBackends: the endpoints of other Services serve it, by shares that IPVS cannot keep, of which it cannot refuse
	// one. All frontends of the Service have this reason.
	WithBackends
	// TooManyBackends: with this Service, the Services of its namespace refer to more endpoints of others than one Service
	// may have. It has no endpoints. All its frontends have this reason.
	TooManyBackends
	// SlotsFull: with this Service, the Services of its namespace ask for more than MaxSlotsPerNamespace slots. All its
	// frontends have this reason.
	SlotsFull
)

var notScheduledTexts = [...]string{
	"",
	"at an external IP, IPVS would take the whole address from whoever else has it",
	"at a load balancer address outside of ipvsAddresses, IPVS would take the whole address from whoever else has it",
	"at a cluster IP outside of the ServiceCIDRs, IPVS would take the whole address from whoever else has it",
	"at a cluster IP in a range that others use, too, IPVS would take the whole address from whoever else has it",
	"it asks IPVS for too many virtual services and destinations",
	"with the older Services of its namespace, it asks IPVS for too many virtual services and destinations",
	"it has session affinity, for which IPVS would remember every client, without a bound",
	"the shares of its backends are not for IPVS",
	"with the older Services of its namespace, it refers to too many endpoints of other Services; it gets none of them",
	"with the older Services of its namespace, it asks for too many slots by weights, hashes and slow starts; " +
		"its endpoints have equal chances",
}

// WholeService reports whether the reason applies to all of a Service.
func (n NotScheduled) WholeService() bool { return n >= ServiceTooLarge }

// String returns the reason as a sentence for messages; empty for Schedulable.
func (n NotScheduled) String() string { return notScheduledTexts[n] }

// canTakeAddress returns whether IPVS may take a frontend's address as a whole, and why not. The address of a node port
// is the host's own.
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
	case contain(h.shared, a):
		return InSharedRange
	}
	return Schedulable
}

// notScheduled returns why IPVS does not choose at an address of the Service that is being built; Schedulable if the
// Service does not ask for IPVS.
func (b *builder) notScheduled(k Kind, a netip.Addr) NotScheduled {
	if b.scheduling == nil {
		return Schedulable
	}
	return b.host.canTakeAddress(k, a)
}

// schedule records how the endpoints of a Service are chosen.
func (b *builder) schedule(svc *snapshot.Service) {
	b.scheduling, b.weights = b.host.scheduling(svc, b.slices), nil
	if svc.Scheduling != nil {
		b.weights = svc.Scheduling.Weights
	}
	b.askForZones(svc)
}

// Share is the endpoint's part of the sum over its pool: its weight, or 1.
func (e *Endpoint) Share() int { return max(int(e.Weight), 1) }

// AtRandom is what ChosenBy says of a random choice with equal chances.
const AtRandom = "at random"

// ChosenBy returns how the backend chooses from one of the port's pools, to follow "chooses the endpoint".
func (sp *ServicePort) ChosenBy(p *Pool) string {
	weighted := slices.ContainsFunc(p.Endpoints, func(e Endpoint) bool { return e.Weight != p.Endpoints[0].Weight })
	hash := "by a hash of the client's address"
	how := [...]string{AtRandom, hash, hash + " and port"}[sp.Hash]
	if len(p.Endpoints) < 2 {
		return AtRandom
	}
	if weighted {
		how += ", by weight"
	}
	return how
}

// ChosenBy returns how the backend chooses from the first pool of a Service that has a choice. The Service may be nil.
func (s *Service) ChosenBy() string {
	for sp := range s.EachPort() {
		for _, p := range [...]*Pool{sp.Cluster, sp.Local} {
			if len(p.Endpoints) > 1 {
				return sp.ChosenBy(p)
			}
		}
	}
	return AtRandom
}

// partsOf returns an endpoint's share: its own weight, or that of its node, or the default.
func (b *builder) partsOf(ep *snapshot.Endpoint) uint32 {
	if ep.Weight.Given {
		return ep.Weight.Parts
	}
	if n, ok := b.weights[ep.Node]; ok {
		return snapshot.PartsOf(n)
	}
	return snapshot.DefaultParts
}

// weigh sets the weights of endpoints with some parts each, none of them 0. Equal parts are no weights, unless IPVS
// may choose. Parts that are all hundreds, as Verdict's own annotations give them, are divided by hundred; others are
// scaled down if they are too large for a weight.
func (b *builder) weigh(endpoints []Endpoint, parts []uint32) {
	if len(parts) == 0 || b.scheduling == nil && slices.Max(parts) == slices.Min(parts) {
		return
	}
	by := uint32(snapshot.DefaultParts)
	fitting := 1 + slices.Max(parts)/(math.MaxUint16+1)
	if by < fitting || slices.ContainsFunc(parts, func(n uint32) bool { return n%snapshot.DefaultParts != 0 }) {
		by = fitting
	}
	for i, n := range parts {
		endpoints[i].Weight = uint16(max(n/by, 1))
	}
}

// Scheduled returns the pool of a frontend from which IPVS chooses; nil if IPVS does not choose. A virtual service has
// one list of endpoints: that of clients from outside. If pods and this node use another pool, as with
// externalTrafficPolicy Local, the backend serves them. The backend also serves 127.0.0.1, where the kernel's IPVS
// cannot answer, and frontends with a NotScheduled reason.
func (sp *ServicePort) Scheduled(f *Frontend) *Pool {
	if sp.Scheduling == nil || f.NotScheduled != Schedulable || f.Key.Addr.IsLoopback() {
		return nil
	}
	if pool := f.Route(Anyone).Pool; len(pool.Endpoints) > 0 {
		return pool
	}
	return nil
}

// Unscheduled returns the Service without scheduling, so that every backend can program it. It does not change the
// Service; if the Service has no Scheduling, it returns the Service itself.
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

// ScheduledAs reports whether the ports of two Services are scheduled alike. Neither may be nil.
func (s *Service) ScheduledAs(o *Service) bool {
	return slices.EqualFunc(s.Ports, o.Ports, func(a, b *ServicePort) bool {
		return equalScheduling(a.Scheduling, b.Scheduling)
	})
}

// String returns the scheduler with its flags, as in annotations: "mh,port".
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
