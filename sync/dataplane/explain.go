package dataplane

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Question is the first packet of a connection.
type Question struct {
	// Source is the sender's address.
	Source netip.Addr
	// Interface is the incoming interface; empty if unknown.
	Interface string
	// Key is the packet's destination. A ping has no port.
	Key Key
}

// Origin says where a packet comes from, as far as policy asks. A packet of this node may also have a pod's address.
type Origin struct {
	Node, Pod bool
	// Pods says how pods are recognized in the packet's family.
	Pods Pods
	// Guess, if valid, is the range of this Node's pods that holds the sender. It stands in for an unknown interface.
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
	// Rejected: the sender gets an ICMP error.
	Rejected
	// Dropped: the sender gets no answer.
	Dropped
	// Scheduled: IPVS sends it to an endpoint.
	Scheduled
	// Answered: this node itself answers it, which is a ping.
	Answered
	// Forwarded: it goes to another node as it came.
	Forwarded
)

var outcomeNames = [...]string{"untouched", "endpoint", "reject", "drop", "ipvs", "answered", "forwarded"}

func (o Outcome) String() string { return outcomeNames[o] }

// Cause says why a packet has its outcome.
type Cause uint8

// The causes, each with the outcome it leads to.
const (
	// NotService: no Service answers at that address and port, and the address is not a cluster IP, or it is this host's,
	// or in State.SharedRanges. Untouched.
	NotService Cause = iota
	// FrontendFound: a Service answers with an endpoint. Sent.
	FrontendFound
	// NoEndpoints: the Service has no usable endpoint. Rejected.
	NoEndpoints
	// NoLocalEndpoints: the traffic policy is Local, and only other nodes have usable endpoints. Dropped.
	NoLocalEndpoints
	// UnusedPort: the address is a cluster IP that has no such port, or a load balancer address, and the packet comes from
	// outside. Rejected.
	UnusedPort
	// Unallocated: the address lies in a ServiceCIDR, and no Service has it. Dropped.
	Unallocated
	// SourceRefused: the sender is in none of loadBalancerSourceRanges. Dropped.
	SourceRefused
	// FromOutsideToLoopback: the packet comes from another host and has a loopback destination. Dropped while node ports
	// answer at 127.0.0.1; otherwise the kernel drops it itself.
	FromOutsideToLoopback
	// FrontendScheduled: a Service answers, and IPVS chooses the endpoint. Scheduled.
	FrontendScheduled
	// FailoverPassed: the externalTrafficPolicy is Local, this node has no usable endpoint, and the Service asks that
	// packets pass. Untouched.
	FailoverPassed
	// PingAnswered: a Service has a usable endpoint at the address, whose pings this node answers. Answered.
	PingAnswered
	// OverLimit: the Service has as many open connections as it may have. Rejected, or dropped if it asks for that. Only
	// the kernel's rules have this cause.
	OverLimit
	// ClientOverLimit: the client has as many as it may have. The same.
	ClientOverLimit
	// ForwardedToNode: clients of the Service keep their address, and none of them is this node's share. Forwarded.
	ForwardedToNode
)

var causeNames = [...]string{
	"not-a-service", "service", "no-endpoints", "no-local-endpoints", "unused-port", "unallocated", "source-ranges",
	"loopback", "scheduled", "failover-pass", "ping", "over-limit",
	"client-over-limit", "forwarded",
}

func (c Cause) String() string { return causeNames[c] }

// Outcome returns the outcome that the cause leads to.
func (c Cause) Outcome() Outcome {
	return [...]Outcome{Untouched, Sent, Rejected, Dropped, Rejected, Dropped, Dropped, Dropped, Scheduled,
		Untouched, Answered, Rejected, Rejected, Forwarded}[c]
}

// Explanation is the answer to a Question, with everything that led to it.
type Explanation struct {
	Question Question
	Origin   Origin
	Cause    Cause
	// Port and Frontend answer at the Question's Key; nil if no Service answers.
	Port     *ServicePort
	Frontend *Frontend
	// Object is the Service that answers; nil if none does.
	Object *snapshot.Service
	// Claims are all claims on that Key; the first one wins.
	Claims []Claim
	// Source is the source range that lets the sender in, if the frontend has any.
	Source netip.Prefix
	// Row is the index of the Frontend's route that the packet takes. Local says for each route whether it asks for
	// endpoints on this node.
	Row   int
	Local []bool
	// Onward are the nodes among which the packet's client is divided, if it keeps its address and comes to this node
	// first; nil if this node translates whatever the client is.
	Onward *Keep
	// Resort says that the Service has no usable endpoint, and is to use its last resort.
	Resort bool
	// LocalCounts says that the Object's Local counts.
	LocalCounts bool
	// Endpoints are all entries in the slices for the port in this family, sorted by address. SkippedSlices are the slices
	// that contribute none.
	Endpoints     []EndpointDecision
	SkippedSlices []SkippedSlice
	// Backends are those of the port, in their order, if the Service has some, and what becomes of their shares on the
	// route that the packet takes.
	Backends []BackendShare
	// Zone is the node's.
	Zone string
	// Zones is how connections are divided between zones, if the Service asks for near endpoints and the route leads to
	// the cluster pool; otherwise nil. ZonesIgnored says why they are not divided although the Service asks for it.
	Zones        *ZonePlan
	ZonesIgnored string
	// NearMisses are frontends that the caller may have meant, if none was found: frontends at the same address, and the
	// same node port at other addresses. Unserved are Services that name the address but do not answer at it in this
	// family.
	NearMisses []NearMiss
	Unserved   []snapshot.Name
	// CIDR is the ServiceCIDR that holds an Unallocated address.
	CIDR netip.Prefix
	// Pings says that this node answers pings of addresses of Services, in the Question's family.
	Pings bool
}

// NearMiss is another frontend's Key with its Claim.
type NearMiss struct {
	Key   Key
	Claim Claim
}

// EndpointDecision is an endpoint in the slices, and whether and why it is in the pool.
type EndpointDecision struct {
	Endpoint
	// Object is the entry in the slice.
	Object *snapshot.Endpoint
	Slice  string
	// Backend is the one of the port's that the endpoint is of; nil if the Service has none. An endpoint of several is
	// Included once, with all that it gets.
	Backend    *snapshot.Backend
	Reason     Reason
	SourceSeen SourceSeen
	// Unhealthy is what this node found out about the endpoint, if its pool would have it and the Port's SecondChance is
	// not off, or if it is the last resort; otherwise nil. An endpoint that is Included nevertheless is kept:
	// SecondChance only observes, or as many as allowed are ejected already.
	Unhealthy *snapshot.Unhealthy
	// Nowhere says that the endpoint is Included although its address is one of Services. Nobody answers there: a
	// connection is translated once. Owner is the Service that has it as its cluster IP; the zero Name if none has.
	Nowhere bool
	Owner   snapshot.Name
	// Starting says how the endpoint starts, if it is Included and gets less than its share for that reason.
	Starting *snapshot.StartingEndpoint
}

// SourceSeen says which source address an endpoint sees.
type SourceSeen uint8

// The source addresses an endpoint may see.
const (
	// SourceSeenClient is the sender's own.
	SourceSeenClient SourceSeen = iota
	// SourceSeenNode is an address of this node, because the route masquerades.
	SourceSeenNode
	// SourceSeenHairpin is an address of this node, because the endpoint connects to itself.
	SourceSeenHairpin
	// SourceSeenClientLocal is the sender's own although the route masquerades: the endpoint's address is this node's own,
	// and packets are masqueraded only when they leave.
	SourceSeenClientLocal
)

var sourceSeenNames = [...]string{"client", "node", "node-hairpin", "client-here"}

func (s SourceSeen) String() string { return sourceSeenNames[s] }

// Node reports whether the endpoint sees an address of this node.
func (s SourceSeen) Node() bool { return s == SourceSeenNode || s == SourceSeenHairpin }

// SkippedSlices is a slice of the Service that has no endpoint for the port in this family.
type SkippedSlice struct {
	Slice string
	// Endpoints is how many it has.
	Endpoints int
	// Ports are the slice's ports, if the port's name and protocol are not among them; nil if the endpoints are of the
	// other family.
	Ports []snapshot.SlicePort
	// OtherFamily says that the endpoints are of the other family.
	OtherFamily bool
}

// Explain returns what happens to a packet, and why. It agrees with the State that Compute returns, at a small part of
// the cost.
func Explain(cfg Config, s *snapshot.Snapshot, q Question) *Explanation {
	found := Overlaps(cfg, s)
	b := builder{host: newHost(cfg, s, found), reserved: reservedIn(s)}
	e := explainer{builder: b, s: s, shared: sharedRanges(found), x: &Explanation{Question: q, Zone: s.Node.Zone}}
	e.x.Origin = e.origin()
	e.fillBudget()
	e.claimants()
	if e.x.Frontend != nil {
		e.x.Row = e.x.Frontend.row(e.x.Origin)
	}
	e.x.Cause = e.cause()
	if e.x.Frontend != nil {
		e.endpoints()
		e.nowhere()
	}
	return e.x
}

// Refused returns how many of RefusedOf new connections are refused before an endpoint is chosen. A frontend answers.
func (x *Explanation) Refused() int { return int(x.Frontend.Routes[x.Row].Pool.Refused) }

// PodsOf returns how pods are recognized, in IPv4 and in IPv6.
func PodsOf(cfg Config, s *snapshot.Snapshot) ipfamily.Per[Pods] { return newHost(cfg, s, nil).pods }

// explainer builds an Explanation.
type explainer struct {
	builder
	s *snapshot.Snapshot
	x *Explanation
	// shared are the State's SharedRanges.
	shared []netip.Prefix
	// allocated says that a Service has the address as its cluster IP.
	allocated bool
	// balanced says that a Service has it as its load balancer address, of which unused ports are rejected.
	balanced bool
	// silent says that the cluster IP answers no ping, and pingable that the load balancer address does.
	silent, pingable bool
}

// origin returns where the packet comes from.
func (e *explainer) origin() Origin {
	q := &e.x.Question
	return OriginOf(e.host.pods[ipfamily.Of(q.Key.Addr)], e.s, q.Source, q.Interface)
}

// OriginOf returns where a packet from a source comes from, if pods are recognized so. If the incoming interface is
// unknown, the Node's pod ranges stand in for it.
func OriginOf(pods Pods, s *snapshot.Snapshot, source netip.Addr, iface string) Origin {
	o := Origin{Pods: pods, Node: source.IsLoopback() || slices.Contains(s.HostAddrs, source)}
	switch {
	case !pods.ByInterface():
		o.Pod = pods.CIDR.IsValid() && pods.CIDR.Contains(source)
	case o.Node:
	case iface != "":
		o.Pod = pods.HasInterface(iface)
	default:
		in := func(p netip.Prefix) bool { return p.Contains(source) }
		if i := slices.IndexFunc(s.Node.PodCIDRs, in); i >= 0 {
			o.Pod, o.Guess = true, s.Node.PodCIDRs[i]
		}
	}
	return o
}

// fillBudget records what Services ask of the budgets, in the namespaces of the Services that name the address or the
// node port.
func (e *explainer) fillBudget() {
	asking := map[string]bool{}
	for n, svc := range e.s.Services {
		if names, nodePort := referencesKey(svc, e.x.Question.Key); (names || nodePort) && e.asks(n, svc) {
			asking[n.Namespace] = true
		}
	}
	if len(asking) == 0 {
		return
	}
	var all []snapshot.Name
	for n, svc := range e.s.Services {
		if asking[n.Namespace] && e.asks(n, svc) {
			all = append(all, n)
		}
	}
	e.refer(e.s, all)
	for _, n := range all {
		e.service(e.s, n)
	}
	e.balance()
}

// asks reports whether a Service may ask something of the budgets.
func (e *explainer) asks(n snapshot.Name, svc *snapshot.Service) bool {
	if svc.Scheduling != nil || svc.Backends != nil || svc.Local != "" || e.s.Starting[n] != nil ||
		e.host.asksToKeep(svc) {
		return true
	}
	for _, sl := range e.s.Slices[n] {
		if slices.ContainsFunc(sl.Endpoints, func(ep snapshot.Endpoint) bool { return ep.Weight.Given }) {
			return true
		}
	}
	return false
}

// claimants finds the Services that name the address or the node port, and the frontend that wins.
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
		answer := e.service(e.s, n)
		if answer != nil {
			e.balanced = e.balanced || slices.Contains(answer.LoadBalancerIPs, q.Key.Addr)
			e.silent = e.silent || slices.Contains(answer.SilentClusterIPs, q.Key.Addr)
			e.pingable = e.pingable || slices.Contains(answer.PingableIPs, q.Key.Addr)
		}
		for sp := range answer.EachPort() {
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
	slices.SortFunc(x.NearMisses, func(a, b NearMiss) int {
		return cmp.Or(a.Key.Compare(b.Key), a.Claim.Compare(b.Claim))
	})
	slices.SortFunc(x.Unserved, snapshot.Name.Compare)
	if len(x.Claims) > 0 {
		f := answers[x.Claims[0]]
		x.Port, x.Frontend, x.Object = f.sp, f.fe, e.s.Services[f.sp.Name.Service]
	}
}

// referencesKey reports whether a Service names an address, and whether it has that node port.
func referencesKey(svc *snapshot.Service, k Key) (address, nodePort bool) {
	address = slices.Contains(svc.ClusterIPs, k.Addr) || slices.Contains(svc.LoadBalancerIPs, k.Addr) ||
		slices.Contains(svc.ExternalIPs, k.Addr)
	nodePort = slices.ContainsFunc(svc.Ports, func(p snapshot.Port) bool {
		return p.NodePort == k.Port && p.Protocol == k.Protocol
	})
	return address, nodePort
}

// cause returns why the packet has its outcome.
func (e *explainer) cause() Cause {
	x, addr := e.x, e.x.Question.Key.Addr
	f := x.Frontend
	if e.host.loopback && addr.Is4() && addr.IsLoopback() && !x.Origin.Node {
		return FromOutsideToLoopback
	}
	if f == nil {
		return e.unserved(addr)
	}
	a := x.Port.Answer(f, x.Question.Source, x.Origin)
	x.Source = a.Source
	if e.comesFirstHere() {
		if x.Onward = x.Port.Keep; x.Onward.OwnShare() == 0 {
			return ForwardedToNode
		}
	}
	return a.Cause
}

// comesFirstHere reports whether the packet is of a client that is divided among nodes: it comes from outside, and not
// from another node, which has divided it already, or forwards it for its pods.
func (e *explainer) comesFirstHere() bool {
	x := e.x
	if !x.Frontend.Kept || !x.Port.Keep.Divides() || x.Origin.Node || x.Origin.Pod ||
		x.Question.Interface != "" && x.Question.Interface != e.host.device && e.host.device != snapshot.AnyDevice {
		return false
	}
	return !e.s.Link.HasAddr(x.Question.Source)
}

// unserved returns why a packet to an address has its outcome if no frontend answers.
func (e *explainer) unserved(addr netip.Addr) Cause {
	x := e.x
	ping, outside := x.Question.Key.Protocol.IsPing(), !x.Origin.Node && !x.Origin.Pod
	x.Pings = e.host.pingAddrs[ipfamily.Of(addr)].IsValid()
	if ping && x.Pings && e.allocated && !e.silent {
		return PingAnswered
	}
	if contain(e.shared, addr) || slices.Contains(e.s.HostAddrs, addr) {
		return NotService
	}
	i := slices.IndexFunc(e.s.ServiceCIDRs, func(p netip.Prefix) bool { return p.Contains(addr) })
	switch {
	case e.allocated && e.silent && ping:
		return NoEndpoints
	case e.allocated:
		return UnusedPort
	case i >= 0:
		x.CIDR = e.s.ServiceCIDRs[i]
		return Unallocated
	case ping && e.pingable && outside:
		return PingAnswered
	case e.balanced && outside:
		return UnusedPort
	}
	return NotService
}

// HasInterface reports whether packets from an interface come from a pod, if pods are recognized by interface.
func (p Pods) HasInterface(name string) bool {
	return p.Interface != "" && name == p.Interface ||
		p.InterfacePrefix != "" && strings.HasPrefix(name, p.InterfacePrefix)
}

// row returns the index of the first route whose From matches the packet.
func (f *Frontend) row(o Origin) int {
	return slices.IndexFunc(f.Routes, func(r Route) bool {
		return r.From == Anyone || r.From == Pod && o.Pod || r.From == Node && o.Node
	})
}

// endpoints decides for every entry in the Service's slices, as pools does, whether and why it is in the pool.
func (e *explainer) endpoints() {
	x := e.x
	name, f := x.Port.Name, ipfamily.Of(x.Frontend.Key.Addr)
	svc := e.s.Services[name.Service]
	p := &svc.Ports[slices.IndexFunc(svc.Ports, func(p snapshot.Port) bool {
		return p.Name == name.Port && p.Protocol == name.Protocol
	})]
	_, x.LocalCounts = e.s.LocalOf(svc)
	e.prepare(e.s, svc)
	x.Resort = e.resort
	e.collectEndpoints(p, f)
	rows := e.rows(svc, f, x.Frontend.Kind != ClusterIP)
	if x.Frontend.Kept && x.Port.Keep.OwnShare() > 0 {
		rows = e.policy(f, true, true, noFailover)
	}
	for _, r := range rows {
		x.Local = append(x.Local, r.pool != clusterPool)
	}
	route, ch := x.Frontend.Routes[x.Row], e.clusterFilters()
	if x.Local[x.Row] {
		ch = e.localFilters()
	} else if e.nearAsked {
		again := *x.Port
		e.fillPools(&again, true, false)
		x.Zones, x.ZonesIgnored = e.zonePlan, e.zonesIgnored()
	}
	if e.backends != nil {
		e.merged(ch)
		x.Backends = e.shares()
	}
	e.collectCandidates(p, f)
	groups := e.groups
	if e.backends == nil {
		groups = []group{{port: p.Name, slices: e.slices}}
	}
	e.decideAll(groups, ch, route)
	for i := range groups {
		e.skippedSlices(&groups[i], p.Protocol, f)
	}
}

// decideAll records the decision about each candidate.
func (e *explainer) decideAll(groups []group, ch filters, route Route) {
	x, sliceOf := e.x, map[*snapshot.Endpoint]string{}
	for g := range groups {
		for _, sl := range groups[g].slices {
			for i := range sl.Endpoints {
				sliceOf[&sl.Endpoints[i]] = sl.Name.Name
			}
		}
	}
	var included netip.AddrPort
	for i := range e.candidates {
		c := &e.candidates[i]
		con := EndpointDecision{Endpoint: e.endpointIn(route.Pool, c), Object: c.Endpoint, Slice: sliceOf[c.Endpoint],
			Reason: ch.decide(c)}
		if e.backends != nil {
			con.Backend = groups[c.group].Backend
		}
		switch {
		case i > 0 && sameAddr(*c, e.candidates[i-1]), con.Reason.Included() && c.addr == included:
			con.Reason = ExcludedDuplicate
		case con.Reason.Included():
			included = c.addr
		}
		e.judgeHealth(&con, route.Pool)
		if x.Zones != nil && con.Reason.Included() && !HasEndpoint(route.Pool.Endpoints, con.AddrPort) {
			con.Reason = ExcludedOtherZone
		}
		if con.Reason.Included() && con.Weight > 0 && x.Frontend.NotScheduled != SlotsFull {
			con.Starting = e.starting.Find(con.AddrPort)
		}
		con.SourceSeen = e.sourceSeen(con.Endpoint, route)
		x.Endpoints = append(x.Endpoints, con)
	}
}

// nowhere finds the endpoints whose addresses are of Services.
func (e *explainer) nowhere() {
	owners := map[netip.Addr]snapshot.Name{}
	for i := range e.x.Endpoints {
		c := &e.x.Endpoints[i]
		if c.Nowhere = c.Reason.Included() && inRanges(c.Addr(), e.s.ServiceCIDRs, e.shared); c.Nowhere {
			owners[c.Addr()] = snapshot.Name{}
		}
	}
	if len(owners) == 0 {
		return
	}
	for n, svc := range e.s.Services {
		for _, a := range svc.ClusterIPs {
			if _, asked := owners[a]; asked {
				owners[a] = n
			}
		}
	}
	for i := range e.x.Endpoints {
		e.x.Endpoints[i].Owner = owners[e.x.Endpoints[i].Addr()]
	}
}

// endpointIn returns a candidate with its weight in the pool, if it is there.
func (e *explainer) endpointIn(pool *Pool, c *candidate) Endpoint {
	if i, found := FindEndpoint(pool.Endpoints, c.addr); found {
		return pool.Endpoints[i]
	}
	return Endpoint{AddrPort: c.addr, Local: c.local}
}

// judgeHealth excludes an endpoint that was ejected from the pool.
func (e *explainer) judgeHealth(con *EndpointDecision, pool *Pool) {
	if con.Reason == IncludedResort {
		con.Unhealthy = e.unhealthy(con.AddrPort)
		return
	}
	if e.x.Port.SecondChance == snapshot.SecondChanceOff || !con.Reason.Included() {
		return
	}
	if con.Unhealthy = e.unhealthy(con.AddrPort); con.Unhealthy == nil || !pool.Ejects(con.AddrPort) {
		return
	}
	con.Reason = ExcludedUnanswered
	if con.Unhealthy.Cause == snapshot.Refused {
		con.Reason = ExcludedRefused
	}
}

// sourceSeen returns which source address an endpoint sees.
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

// skippedSlices records the slices of a group in which collectCandidates found no endpoint.
func (e *explainer) skippedSlices(g *group, protocol snapshot.Protocol, f ipfamily.Family) {
	for _, sl := range g.slices {
		if len(sl.Endpoints) == 0 {
			continue
		}
		a := SkippedSlice{Slice: sl.Name.Name, Endpoints: len(sl.Endpoints)}
		a.OtherFamily = !slices.ContainsFunc(sl.Endpoints, func(ep snapshot.Endpoint) bool { return f.Has(ep.Addr) })
		hasPort := slices.ContainsFunc(sl.Ports, func(sp snapshot.SlicePort) bool {
			return sp.Name == g.port && sp.Protocol == protocol
		})
		if !hasPort && !a.OtherFamily {
			a.Ports = sl.Ports
		}
		if !hasPort || a.OtherFamily {
			e.x.SkippedSlices = append(e.x.SkippedSlices, a)
		}
	}
}
