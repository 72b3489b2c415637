package dataplane

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Question is the first packet of a connection.
type Question struct {
	// Source is the sender's address.
	Source netip.Addr
	// Interface is the one by which the packet comes in; empty if it is not known.
	Interface string
	Key       Key
}

// Origin is what a packet is to the rows of policy. One of this node may bear a pod's address too.
type Origin struct {
	Node, Pod bool
	// Pods is what tells pods from others in the packet's family.
	Pods Pods
	// Guess, if valid, is a range of this Node's pods that holds the sender, which stands in for the interface that would
	// tell.
	Guess netip.Prefix
}

// Outcome is what happens to a packet.
type Outcome uint8

// The outcomes.
const (
	// Untouched: it goes on as it came.
	Untouched Outcome = iota
	// Sent: it goes to an endpoint.
	Sent
	// Rejected: the sender is told that nobody is there.
	Rejected
	// Dropped: the sender is told nothing.
	Dropped
	// Scheduled: IPVS sends it to an endpoint.
	Scheduled
)

var outcomeNames = [...]string{"untouched", "endpoint", "reject", "drop", "ipvs"}

func (o Outcome) String() string { return outcomeNames[o] }

// Cause says why a packet has its outcome.
type Cause uint8

// The causes, each with the outcome it leads to.
const (
	// NotService: no Service answers at that address and port, and the address is no cluster IP. Untouched.
	NotService Cause = iota
	// FrontendFound: a Service answers, by an endpoint. Sent.
	FrontendFound
	// NoEndpoints: no endpoint can be used, anywhere. Rejected.
	NoEndpoints
	// NoLocalEndpoints: none on this node can be used, though others could, and the traffic policy is Local. Dropped.
	NoLocalEndpoints
	// UnusedPort: the address is a cluster IP that has no such port. Rejected.
	UnusedPort
	// Unallocated: the address lies in a ServiceCIDR, and no Service has it. Dropped.
	Unallocated
	// SourceRefused: the sender is in none of the source ranges. Dropped.
	SourceRefused
	// FromOutsideToLoopback: it claims to go to this host's loopback range, and comes in from elsewhere. Dropped, while
	// node ports answer at 127.0.0.1; at other times the kernel does that itself.
	FromOutsideToLoopback
	// FrontendScheduled: a Service answers, by an endpoint that IPVS chooses. Scheduled.
	FrontendScheduled
)

var causeNames = [...]string{
	"not-a-service", "service", "no-endpoints", "no-local-endpoints", "unused-port", "unallocated", "source-ranges",
	"loopback", "scheduled",
}

func (c Cause) String() string { return causeNames[c] }

// Outcome gives what the cause leads to.
func (c Cause) Outcome() Outcome {
	return [...]Outcome{Untouched, Sent, Rejected, Dropped, Rejected, Dropped, Dropped, Dropped, Scheduled}[c]
}

// Explanation is the answer to a Question, with all that led to it.
type Explanation struct {
	Question Question
	Origin   Origin
	Cause    Cause
	// Port and Frontend answer at the Question's Key; nil if no Service does.
	Port     *ServicePort
	Frontend *Frontend
	// Claims are all on that Key; the first one gets it.
	Claims []Claim
	// Source is the source range that lets the sender in, if the frontend has any.
	Source netip.Prefix
	// Row is the index of the Frontend's route that decides. Local says of each route whether it leads to the endpoints on
	// this node.
	Row   int
	Local []bool
	// Endpoints are all that the slices mention for the port in this family, sorted by address; Absent the slices that
	// lend none.
	Endpoints     []EndpointDecision
	SkippedSlices []SkippedSlice
	// Zone is the node's.
	Zone string
	// NearMisses are frontends that one may have meant, where none was found: those at the same address, and the node port of
	// that number at others. Unserved are Services that name the address though it is not theirs in this family.
	NearMisses []NearMiss
	Unserved   []snapshot.Name
	// CIDR is the ServiceCIDR that holds an Unallocated address.
	CIDR netip.Prefix
}

// NearMiss is a Claim with what it is for.
type NearMiss struct {
	Key   Key
	Claim Claim
}

// EndpointDecision is an endpoint, with what became of it.
type EndpointDecision struct {
	Endpoint
	// Object is the mention in the slice.
	Object     *snapshot.Endpoint
	Slice      string
	Reason     Reason
	SourceSeen SourceSeen
}

// SourceSeen says which source address an endpoint sees.
type SourceSeen uint8

// The source addresses an endpoint may see.
const (
	// SourceSeenClient is the sender's own.
	SourceSeenClient SourceSeen = iota
	// SourceSeenNode is one of this node's, as the row of policy asks.
	SourceSeenNode
	// SourceSeenHairpin is one of this node's, since the endpoint reaches itself.
	SourceSeenHairpin
	// SourceSeenClientLocal is the sender's own though the row asks for this node's: the endpoint's address is this node's own,
	// and packets are masqueraded only on their way out.
	SourceSeenClientLocal
)

var sourceSeenNames = [...]string{"client", "node", "node-hairpin", "client-here"}

func (s SourceSeen) String() string { return sourceSeenNames[s] }

// Node says whether it is an address of this node.
func (s SourceSeen) Node() bool { return s == SourceSeenNode || s == SourceSeenHairpin }

// SkippedSlices is a slice of the Service that has no endpoint for the port in this family.
type SkippedSlice struct {
	Slice string
	// Endpoints is how many it has.
	Endpoints int
	// Ports are those it has, if the port's name and protocol are not among them; else the endpoints are of the other
	// family.
	Ports []snapshot.SlicePort
	// OtherFamily says so.
	OtherFamily bool
}

// Explain says what happens to a packet, and why. It agrees with Compute's State, and costs a small part of it.
func Explain(cfg Config, s *snapshot.Snapshot, q Question) *Explanation {
	b := builder{host: newHost(cfg, s), reserved: reservedIn(s)}
	e := explainer{builder: b, s: s, x: &Explanation{Question: q, Zone: s.Node.Zone}}
	e.x.Origin = e.origin()
	e.fillBudget()
	e.claimants()
	if e.x.Frontend != nil {
		e.x.Row = e.x.Frontend.row(e.x.Origin)
	}
	e.x.Cause = e.cause()
	if e.x.Frontend != nil {
		e.endpoints()
	}
	return e.x
}

// PodsOf says how pods are told from others, in IPv4 and in IPv6.
func PodsOf(cfg Config, s *snapshot.Snapshot) ipfamily.Per[Pods] { return newHost(cfg, s).pods }

// explainer gathers an Explanation.
type explainer struct {
	builder
	s *snapshot.Snapshot
	x *Explanation
	// allocated says that a Service has the address as its cluster IP.
	allocated bool
}

// origin tells where the packet comes from. Of a packet from elsewhere it may not be known by which interface it comes
// in: then the Node's pod ranges stand in for it.
func (e *explainer) origin() Origin {
	q := &e.x.Question
	o := Origin{Pods: e.host.pods[ipfamily.Of(q.Key.Addr)]}
	o.Node = q.Source.IsLoopback() || slices.Contains(e.s.HostAddrs, q.Source)
	byInterface := o.Pods.Interface != "" || o.Pods.InterfacePrefix != ""
	switch {
	case !byInterface:
		o.Pod = o.Pods.CIDR.IsValid() && o.Pods.CIDR.Contains(q.Source)
	case o.Node:
	case q.Interface != "":
		o.Pod = o.Pods.HasInterface(q.Interface)
	default:
		if i := slices.IndexFunc(e.s.Node.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(q.Source) }); i >= 0 {
			o.Pod, o.Guess = true, e.s.Node.PodCIDRs[i]
		}
	}
	return o
}

// fillBudget fills the budget with what is asked of IPVS in the namespaces of the Services that name the address or the node
// port.
func (e *explainer) fillBudget() {
	if e.host.ipvs.Mode != IPVSAuto {
		return
	}
	asking := map[string]bool{}
	for n, svc := range e.s.Services {
		if names, nodePort := referencesKey(svc, e.x.Question.Key); (names || nodePort) && svc.AsksForIPVS() {
			asking[n.Namespace] = true
		}
	}
	if len(asking) == 0 {
		return
	}
	for n, svc := range e.s.Services {
		if asking[n.Namespace] && svc.AsksForIPVS() {
			e.service(e.s, n)
		}
	}
	e.budget.balance(&e.host.ipvs)
}

// claimants looks for the Services that name the address or the node port, and for the frontend among theirs.
func (e *explainer) claimants() {
	q, x := &e.x.Question, e.x
	type found struct {
		sp *ServicePort
		fe *Frontend
	}
	answers := map[Claim]found{}
	for n, svc := range e.s.Services {
		names, nodePort := referencesKey(svc, q.Key)
		if !names && !nodePort {
			continue
		}
		here := false
		for _, sp := range e.service(e.s, n).ports() {
			for i := range sp.Frontends {
				fe := &sp.Frontends[i]
				c := Claim{sp.Name, fe.Kind, svc.Age}
				here = here || fe.Key.Addr == q.Key.Addr
				e.allocated = e.allocated || fe.Key.Addr == q.Key.Addr && fe.Kind == ClusterIP
				sameNodePort := fe.Kind == NodePort && fe.Key.Port == q.Key.Port && fe.Key.Protocol == q.Key.Protocol &&
					fe.Key.Addr.Is4() == q.Key.Addr.Is4()
				switch {
				case fe.Key == q.Key:
					answers[c] = found{sp, fe}
					x.Claims = append(x.Claims, c)
				case fe.Key.Addr == q.Key.Addr || sameNodePort:
					x.NearMisses = append(x.NearMisses, NearMiss{fe.Key, c})
				}
			}
		}
		if names && !here {
			x.Unserved = append(x.Unserved, n)
		}
	}
	slices.SortFunc(x.Claims, Claim.Compare)
	slices.SortFunc(x.NearMisses, func(a, b NearMiss) int { return cmp.Or(a.Key.Compare(b.Key), a.Claim.Compare(b.Claim)) })
	slices.SortFunc(x.Unserved, snapshot.Name.Compare)
	if len(x.Claims) > 0 {
		f := answers[x.Claims[0]]
		x.Port, x.Frontend = f.sp, f.fe
	}
}

// referencesKey says whether a Service names an address, and whether it has a node port of that number.
func referencesKey(svc *snapshot.Service, k Key) (address, nodePort bool) {
	address = slices.Contains(svc.ClusterIPs, k.Addr) || slices.Contains(svc.LoadBalancerIPs, k.Addr) ||
		slices.Contains(svc.ExternalIPs, k.Addr)
	nodePort = slices.ContainsFunc(svc.Ports, func(p snapshot.Port) bool { return p.NodePort == k.Port && p.Protocol == k.Protocol })
	return address, nodePort
}

// ports gives a Service's ports; none if it is nil.
func (s *Service) ports() []*ServicePort {
	if s == nil {
		return nil
	}
	return s.Ports
}

// cause decides.
func (e *explainer) cause() Cause {
	x, addr := e.x, e.x.Question.Key.Addr
	f := x.Frontend
	if e.host.loopback && addr.Is4() && addr.IsLoopback() && !x.Origin.Node {
		return FromOutsideToLoopback
	}
	if f == nil {
		i := slices.IndexFunc(e.s.ServiceCIDRs, func(p netip.Prefix) bool { return p.Contains(addr) })
		switch {
		case e.allocated:
			return UnusedPort
		case i >= 0:
			x.CIDR = e.s.ServiceCIDRs[i]
			return Unallocated
		}
		return NotService
	}
	if i := slices.IndexFunc(f.Sources, func(p netip.Prefix) bool { return p.Contains(x.Question.Source) }); i >= 0 {
		x.Source = f.Sources[i]
	} else if f.Sources != nil {
		return SourceRefused
	}
	switch pool := f.Routes[x.Row].Pool; {
	case pool == x.Port.Scheduled(f):
		return FrontendScheduled
	case len(pool.Endpoints) > 0:
		return FrontendFound
	case pool.Empty == Drop:
		return NoLocalEndpoints
	}
	return NoEndpoints
}

// HasInterface says whether packets that come in by an interface are a pod's, if interfaces tell that.
func (p Pods) HasInterface(name string) bool {
	return p.Interface != "" && name == p.Interface || p.InterfacePrefix != "" && strings.HasPrefix(name, p.InterfacePrefix)
}

// row gives the index of the route that a packet takes: the first whose From holds it.
func (f *Frontend) row(o Origin) int {
	return slices.IndexFunc(f.Routes, func(r Route) bool {
		return r.From == Anyone || r.From == Pod && o.Pod || r.From == Node && o.Node
	})
}

// endpoints goes through all that the Service's slices mention, as pools does, and asks of each why it is in the pool
// or not.
func (e *explainer) endpoints() {
	x := e.x
	name, f := x.Port.Name, ipfamily.Of(x.Frontend.Key.Addr)
	svc := e.s.Services[name.Service]
	p := &svc.Ports[slices.IndexFunc(svc.Ports, func(p snapshot.Port) bool {
		return p.Name == name.Port && p.Protocol == name.Protocol
	})]
	e.loadSlices(svc, e.s.Slices[name.Service])
	e.schedule(svc)
	e.collectEndpoints(p, f)
	for _, r := range e.rows(svc, f, x.Frontend.Kind != ClusterIP) {
		x.Local = append(x.Local, r.pool == localPool)
	}
	route, ch := x.Frontend.Routes[x.Row], e.clusterFilter()
	if x.Local[x.Row] {
		ch = e.localFilter()
	}
	e.collectCandidates(p, f)
	sliceOf := map[*snapshot.Endpoint]string{}
	for _, sl := range e.slices {
		for i := range sl.Endpoints {
			sliceOf[&sl.Endpoints[i]] = sl.Name.Name
		}
	}
	for i := range e.candidates {
		c := &e.candidates[i]
		con := EndpointDecision{Endpoint: e.endpoint(c), Object: c.Endpoint, Slice: sliceOf[c.Endpoint], Reason: ch.decide(c)}
		if i > 0 && sameAddr(*c, e.candidates[i-1]) {
			con.Reason = ExcludedDuplicate
		}
		con.SourceSeen = e.sourceSeen(con.Endpoint, route)
		x.Endpoints = append(x.Endpoints, con)
	}
	e.skippedSlices(p, f)
}

// sourceSeen tells what source address an endpoint sees.
func (e *explainer) sourceSeen(ep Endpoint, r Route) SourceSeen {
	x := e.x
	switch {
	case !x.Origin.Node && slices.Contains(e.s.HostAddrs, ep.Addr()):
		if r.SNAT {
			return SourceSeenClientLocal
		}
		return SourceSeenClient
	case ep.Local && ep.Addr() == x.Question.Source:
		return SourceSeenHairpin
	case r.SNAT:
		return SourceSeenNode
	}
	return SourceSeenClient
}

// skippedSlices goes through the slices that mentions found nothing in.
func (e *explainer) skippedSlices(p *snapshot.Port, f ipfamily.Family) {
	for _, sl := range e.slices {
		if len(sl.Endpoints) == 0 {
			continue
		}
		a := SkippedSlice{Slice: sl.Name.Name, Endpoints: len(sl.Endpoints)}
		a.OtherFamily = !slices.ContainsFunc(sl.Endpoints, func(ep snapshot.Endpoint) bool { return f.Has(ep.Addr) })
		hasPort := slices.ContainsFunc(sl.Ports, func(sp snapshot.SlicePort) bool { return sp.Name == p.Name && sp.Protocol == p.Protocol })
		if !hasPort && !a.OtherFamily {
			a.Ports = sl.Ports
		}
		if !hasPort || a.OtherFamily {
			e.x.SkippedSlices = append(e.x.SkippedSlices, a)
		}
	}
}
