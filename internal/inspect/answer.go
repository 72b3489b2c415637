package inspect

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Answer is what explain says.
type Answer struct {
	Packet AskedPacket
	Origin Origin
	// Objects and Kernel are the answers of each; nil for who was not asked.
	Objects, Kernel *View
	// Disagreements say in what they differ, if both were asked.
	Disagreements []string
	// Notes say what else one should know.
	Notes []string

	sender      sender
	routes      *routes
	adopted     []string
	explanation *dataplane.Explanation
	trace       *dataplane.Trace
}

// AskedPacket is the packet that was asked about.
type AskedPacket struct {
	dataplane.Packet
	// StandsFor is the word in place of the Source, if one was given.
	StandsFor string
}

// Key is where the packet goes.
func (p *AskedPacket) Key() dataplane.Key {
	return dataplane.Key{Addr: p.Destination, Protocol: p.Protocol, Port: p.Port}
}

// Origin says what the sender is to the rows of policy, and why.
type Origin struct {
	Pod, Node bool
	Why       string
}

// View is the answer of the objects, or of the kernel.
type View struct {
	// From says who answers, and Revision which one of its tables; 0 if those have none.
	From     string
	Revision uint32
	// Outcome is a dataplane.Outcome's word or "several", and Why says in a sentence what Cause says in a word.
	Outcome string
	Cause   dataplane.Cause
	Why     string
	// Service is the one that answers; nil if none does.
	Service *Service
	// Scheduler is IPVS's, if that chooses the endpoint.
	Scheduler string
	// Ranges are the source ranges; nil if everybody may come.
	Ranges    *Ranges
	Rows      []Row
	Endpoints []Endpoint
	LeftOut   []LeftOut
	Affinity  *Affinity
	Near      []Near
	// Way are the chains that decided, and Steps the rules that looked at the packet.
	Way     []string
	Steps   []dataplane.TraceStep
	Unclear []string
}

// Service is a service port that answers.
type Service struct {
	Port dataplane.PortName
	// Kind is what its frontend is, as dataplane calls it; empty if it is not known.
	Kind string
	// Claims are others' that lost the address to this one.
	Claims []string
	// Connections are counted since the frontend was written; nil if they are not.
	Connections *uint64
}

// Ranges are who may come to a Service.
type Ranges struct {
	Ranges []netip.Prefix
	// Holds is the one that lets the sender in; invalid if none does.
	Holds netip.Prefix
}

// Row is a row of policy.
type Row struct {
	From                       dataplane.From
	Local, Masquerade, Decides bool
}

// Endpoint is one that the packet may go to.
type Endpoint struct {
	netip.AddrPort
	Node string
	// Chance is 0 where IPVS chooses, by its scheduler and the Weight.
	Chance float64
	Weight int
	// Sees says which source address it sees, and Source the address, if it is known; of what the kernel's IPVS
	// chooses from, neither is.
	Sees   *dataplane.SourceSeen
	Source netip.Addr
	// Draining says that it terminates.
	Draining    bool
	Connections *uint64
}

// LeftOut is an endpoint that the packet cannot go to or, with an invalid address, a slice of such.
type LeftOut struct {
	netip.AddrPort
	Node, Slice string
	// Reason is a word and Why a sentence.
	Reason, Why string
}

// Affinity is how long a sender stays with an endpoint.
type Affinity struct {
	Timeout time.Duration
	// Endpoint is where the sender is bound to go, for Left more; invalid if it is not bound.
	Endpoint netip.AddrPort
	Left     time.Duration
}

// NearMisses is a frontend that one may have meant.
type Near struct {
	Key  dataplane.Key
	Port dataplane.PortName
	// Kind is as in Service.
	Kind string
}

// explain fills in what the objects say.
func (a *Answer) explain(x *dataplane.Explanation, o *Objects, policy *Policy) {
	a.explanation, a.adopted = x, o.Adopted
	a.Origin = a.originBy(x, o, policy)
	v := &View{From: o.Source, Outcome: x.Cause.Outcome().String(), Cause: x.Cause}
	a.Objects = v
	if x.Frontend != nil {
		a.frontend(v, o)
	}
	for _, n := range x.NearMisses {
		v.Near = append(v.Near, Near{n.Key, n.Claim.Port, n.Claim.Kind.String()})
	}
	v.Why = a.why(v)
	if x.Cause == dataplane.FrontendFound && x.Frontend.NotScheduled != dataplane.Schedulable {
		a.Notes = append(a.Notes,
			"the Service asks for IPVS, and nftables chooses the endpoint: "+x.Frontend.NotScheduled.String())
	}
}

// originBy says what the sender is by the objects' flags.
func (a *Answer) originBy(x *dataplane.Explanation, o *Objects, policy *Policy) Origin {
	if g := x.Origin.Guess; g.IsValid() {
		return Origin{Pod: true, Why: fmt.Sprintf(
			"%s is in this Node's pod range %s, so it should come in by %s: taken for a pod (or give --interface)",
			a.sender.addr, g, podsText(x.Origin.Pods))}
	}
	by := map[dataplane.DetectLocalMode]string{
		dataplane.DetectClusterCIDR: "--cluster-cidr", dataplane.DetectNodeCIDR: "the Node's podCIDRs",
		dataplane.DetectBridgeInterface:     "--pod-bridge-interface",
		dataplane.DetectInterfaceNamePrefix: "--pod-interface-name-prefix",
	}[o.Config.DetectLocal.Mode]
	if len(o.Adopted) > 0 && o.Config.DetectLocal.Mode == dataplane.DetectClusterCIDR && !policy.saysPods() {
		by = "the kernel's rules"
	}
	return originOf(a.sender, x.Origin.Pods, x.Origin.Node, by)
}

// frontend fills in what there is to say of a frontend.
func (a *Answer) frontend(v *View, o *Objects) {
	x := a.explanation
	v.Service = &Service{Port: x.Port.Name, Kind: x.Frontend.Kind.String()}
	for _, c := range x.Claims[1:] {
		v.Service.Claims = append(v.Service.Claims, c.String())
	}
	if x.Frontend.Sources != nil {
		v.Ranges = &Ranges{x.Frontend.Sources, x.Source}
	}
	for i, r := range x.Frontend.Routes {
		v.Rows = append(v.Rows, Row{From: r.From, Local: x.Local[i], Masquerade: r.SNAT, Decides: i == x.Row})
	}
	if x.Cause == dataplane.FrontendScheduled {
		v.Scheduler = x.Port.Scheduling.String()
	}
	if x.Port.Affinity > 0 {
		v.Affinity = &Affinity{Timeout: x.Port.Affinity}
	}
	if x.Cause != dataplane.SourceRefused && x.Cause != dataplane.FromOutsideToLoopback { // else they make no difference
		a.endpoints(v, o)
	}
}

// endpoints fills in the endpoints, and those that are none.
func (a *Answer) endpoints(v *View, o *Objects) {
	x := a.explanation
	n := 0
	for _, c := range x.Endpoints {
		if c.Reason.Included() {
			n++
		}
	}
	for _, c := range x.Endpoints {
		if !c.Reason.Included() {
			v.LeftOut = append(v.LeftOut, LeftOut{AddrPort: c.AddrPort, Node: c.Object.Node, Slice: c.Slice,
				Reason: c.Reason.String(), Why: a.leftOut(&c, o.Config.NodeName)})
			continue
		}
		e := Endpoint{AddrPort: c.AddrPort, Node: c.Object.Node, Chance: 1 / float64(n), Sees: &c.SourceSeen,
			Source: a.source(c.SourceSeen, c.Addr()), Draining: c.Reason == dataplane.IncludedTerminating}
		if v.Scheduler != "" {
			e.Chance, e.Weight = 0, int(c.Weight)
		}
		v.Endpoints = append(v.Endpoints, e)
	}
	for _, s := range x.SkippedSlices {
		l := LeftOut{Slice: s.Slice, Reason: otherFamily,
			Why: terminal.Plural(s.Endpoints, "endpoint") + " of the other family"}
		if !s.OtherFamily {
			l.Reason, l.Why = "other-port", terminal.Plural(s.Endpoints, "endpoint")+" without "+portText(x.Port.Name, s)
		}
		v.LeftOut = append(v.LeftOut, l)
	}
}

// otherFamily is the reason of slices that have only endpoints of the other family.
const otherFamily = "other-family"

func portText(p dataplane.PortName, s dataplane.SkippedSlice) string {
	text := "an unnamed port"
	if p.Port != "" {
		text = fmt.Sprintf("a port named %q", p.Port)
	}
	text += " for " + p.Protocol.String()
	var has []string
	for _, sp := range s.Ports {
		has = append(has, fmt.Sprintf("%q %d/%s", sp.Name, sp.Port, sp.Protocol))
	}
	if has == nil {
		return text + "; it has no ports"
	}
	return text + "; it has " + strings.Join(has, ", ")
}

// source gives the source address that an endpoint sees; invalid if it is not known which of this node's it is.
func (a *Answer) source(s dataplane.SourceSeen, endpoint netip.Addr) netip.Addr {
	if !s.Node() {
		return a.sender.addr
	}
	from, _, _ := a.routes.to(endpoint)
	return from
}

// leftOut says why an endpoint is not in the pool.
func (a *Answer) leftOut(c *dataplane.EndpointDecision, node string) string {
	x := a.explanation
	switch c.Reason {
	case dataplane.ExcludedNotReady:
		return "not ready"
	case dataplane.ExcludedNotServing:
		return "terminating, and serves no longer"
	case dataplane.ExcludedTerminating:
		return "terminating, and others are ready"
	case dataplane.ExcludedOtherNode:
		policy := "internalTrafficPolicy"
		if x.Frontend.Kind != dataplane.ClusterIP {
			policy = "externalTrafficPolicy"
		}
		if c.Object.Node == "" {
			return "on no known node, and " + policy + " is Local"
		}
		return "not on this node (" + node + "), and " + policy + " is Local"
	case dataplane.ExcludedNodeHint:
		return fmt.Sprintf("topology hints: for %s, and this node is %s", orNone(c.Object.ForNodes), node)
	case dataplane.ExcludedZoneHint:
		return fmt.Sprintf("topology hints: for %s, and this node is in %s", orNone(c.Object.ForZones), x.Zone)
	case dataplane.ExcludedDuplicate:
		return "mentioned twice: the other mention counts"
	}
	return c.Reason.String()
}

func orNone(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// traced fills in what the kernel does.
func (a *Answer) traced(t *dataplane.Trace) {
	a.trace = t
	v := &View{From: "the kernel", Revision: t.Revision, Outcome: t.Outcome(), Cause: t.Cause, Way: t.Chains(),
		Steps:   t.Steps,
		Unclear: t.Unclear, Scheduler: t.Scheduler}
	a.Kernel = v
	a.Notes = append(a.Notes, t.Notes...)
	if t.Port.Service != (snapshot.Name{}) {
		v.Service = &Service{Port: t.Port, Connections: t.Connections}
	}
	a.landed(v)
	for _, d := range t.Destinations {
		v.Endpoints = append(v.Endpoints, Endpoint{AddrPort: d.AddrPort, Weight: int(d.Weight), Draining: d.Weight == 0,
			Connections: &d.Connections})
	}
	for _, n := range t.Near {
		v.Near = append(v.Near, Near{Key: n.Key, Port: n.Port})
	}
	v.Why = a.whyKernel(v)
}

// landed fills in the endpoints the kernel would choose from, and what it remembers.
func (a *Answer) landed(v *View) {
	for _, end := range a.trace.Endings {
		if end.Outcome != dataplane.Sent {
			continue
		}
		sees := dataplane.SourceSeenClient
		switch {
		case end.Hairpin:
			sees = dataplane.SourceSeenHairpin
		case end.Masquerade:
			sees = dataplane.SourceSeenNode
		}
		v.Endpoints = append(v.Endpoints, Endpoint{AddrPort: end.Endpoint, Chance: float64(end.Share) / float64(end.Of),
			Sees:   &sees,
			Source: a.source(sees, end.Endpoint.Addr()), Connections: end.Connections})
		if end.Remember > 0 {
			v.Affinity = &Affinity{Timeout: end.Remember}
		}
	}
	slices.SortStableFunc(v.Endpoints, func(x, y Endpoint) int { return x.Compare(y.AddrPort) })
	if bound, ok := a.trace.Bound(); ok {
		if v.Affinity == nil {
			v.Affinity = &Affinity{}
		}
		v.Affinity.Endpoint, v.Affinity.Left = bound.Endpoint, bound.Left
	}
}

// compare says whether objects and kernel agree.
func (a *Answer) compare() {
	if a.explanation == nil || a.trace == nil {
		return
	}
	for _, d := range a.trace.Disagreements(a.explanation) {
		a.Disagreements = append(a.Disagreements, d.String())
	}
	for _, flag := range a.adopted {
		a.Notes = append(a.Notes, "taken from the kernel's rules: "+flag)
	}
}

// Compared says whether both were asked, and Agree whether they agree then.
func (a *Answer) Compared() bool { return a.Objects != nil && a.Kernel != nil }

// Agree says whether objects and kernel say the same.
func (a *Answer) Agree() bool { return len(a.Disagreements) == 0 }
