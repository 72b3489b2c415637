package inspect

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/proxy/preflight"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Answer is the result of explain; as JSON it is in docs/ANSWERS.md.
type Answer struct {
	Packet AskedPacket `json:"packet"`
	Origin Origin      `json:"origin"`
	// Objects and Kernel are the two answers; nil if that side was not asked.
	Objects *View `json:"objects,omitempty"`
	Kernel  *View `json:"kernel,omitempty"`
	// Same says whether both give the same answer; nil if only one was asked. Disagreements lists the differences.
	Same          *bool    `json:"agree,omitempty"`
	Disagreements []string `json:"disagreements,omitempty"`
	// Preflight is what on this host stops the packet, if the kernel was asked.
	Preflight []status.Finding `json:"preflight,omitempty"`
	// Failures are the last connections that failed, the newest first, if the kernel was asked and records are on.
	Failures []flows.Record `json:"lastFailures,omitempty"`
	// Notes holds further remarks for the user.
	Notes []string `json:"notes,omitempty"`

	key         dataplane.Key
	sender      sender
	routes      *preflight.Host
	adopted     []string
	explanation *dataplane.Explanation
	trace       *dataplane.Trace
}

// AskedPacket is the packet that was asked about.
type AskedPacket struct {
	Source netip.Addr `json:"source"`
	// StandsFor is the word that was given instead of the Source, if any.
	StandsFor   string     `json:"standsFor,omitempty"`
	Destination netip.Addr `json:"destination"`
	Port        uint16     `json:"port"`
	Protocol    string     `json:"protocol"`
	Interface   string     `json:"interface,omitempty"`
}

// Origin tells how the rows of policy classify the sender, and why.
type Origin struct {
	Pod  bool   `json:"pod"`
	Node bool   `json:"node"`
	Why  string `json:"why"`
}

// View is the answer of the objects, or of the kernel.
type View struct {
	// From names who answers. Revision is that of the table, 0 if it has none.
	From     string `json:"from"`
	Revision uint32 `json:"revision,omitempty"`
	// Outcome is a dataplane.Outcome's word, "several" or "unreachable". Why explains Cause, a dataplane.Cause's word, in
	// a sentence.
	Outcome string `json:"outcome"`
	Cause   string `json:"cause"`
	Why     string `json:"why"`
	// Service is the Service that answers; nil if there is none.
	Service *Service `json:"service,omitempty"`
	// Scheduler is IPVS's scheduler, if IPVS chooses the endpoint.
	Scheduler string `json:"scheduler,omitempty"`
	// Ranges are the source ranges; nil if every source is allowed.
	Ranges *Ranges `json:"sourceRanges,omitempty"`
	// Backends are those of the port, if the Service refers to others.
	Backends  []Backend  `json:"backends,omitempty"`
	Rows      []Row      `json:"rows,omitempty"`
	Endpoints []Endpoint `json:"endpoints,omitempty"`
	// Nodes are other nodes, to which packets of some clients are forwarded untranslated.
	Nodes      []NodeShare        `json:"nodes,omitempty"`
	Excluded   []ExcludedEndpoint `json:"leftOut,omitempty"`
	Affinity   *Affinity          `json:"affinity,omitempty"`
	NearMisses []NearMiss         `json:"near,omitempty"`
	// Chains are the chains that decided. Steps are the rules that saw the packet, if they were asked for.
	Chains  []string              `json:"way,omitempty"`
	Steps   []dataplane.TraceStep `json:"trace,omitempty"`
	Unclear []string              `json:"unclear,omitempty"`
}

// Service is a Service port that answers.
type Service struct {
	Name string `json:"name"`
	Port string `json:"port,omitempty"`
	// Kind is the frontend's kind, as dataplane names it; empty if unknown.
	Kind string `json:"kind,omitempty"`
	// Claims lists other Services that claim the address and lost it to this one.
	Claims []string `json:"alsoClaimedBy,omitempty"`
	// Settings are what the Service's annotations ask for, if the objects are known.
	Settings []Setting `json:"settings,omitempty"`
	// Connections is the count since the frontend was written; nil if it is not counted.
	Connections *uint64 `json:"connections,omitempty"`
}

// Setting is what an annotation of a Service asks for.
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	// Without says why it changes nothing here; empty if it does.
	Without string `json:"without,omitempty"`
}

func serviceOf(p dataplane.PortName) *Service {
	return &Service{Name: p.Service.String(), Port: p.Port}
}

// Ranges holds the allowed source ranges of a Service.
type Ranges struct {
	Ranges []netip.Prefix `json:"ranges,omitempty"`
	// Holds is the range that contains the sender; invalid if none does.
	Holds netip.Prefix `json:"holds,omitzero"`
}

// Row is a row of policy. Endpoints are rowLocal or rowCluster.
type Row struct {
	From       string `json:"from"`
	Endpoints  string `json:"endpoints"`
	Masquerade bool   `json:"masquerade"`
	Decides    bool   `json:"decides"`
}

// The endpoints that a row may lead to, by whether only those on this node are meant.
var rowEndpoints = map[bool]string{false: "cluster", true: "local"}

// socket is an address with a port, which are two fields of JSON.
type socket struct {
	Address netip.Addr `json:"address"`
	Port    uint16     `json:"port"`
}

// AddrPort gives both in one.
func (s socket) AddrPort() netip.AddrPort { return netip.AddrPortFrom(s.Address, s.Port) }

func socketOf(a netip.AddrPort) socket { return socket{a.Addr(), a.Port()} }

// Endpoint is an endpoint that the packet may be sent to.
type Endpoint struct {
	socket
	Node string `json:"node,omitempty"`
	Zone string `json:"zone,omitempty"`
	// Chance is 0 if IPVS chooses, by its scheduler and the Weight.
	Chance float64 `json:"chance"`
	Weight int     `json:"weight,omitempty"`
	// SourceSeen is the dataplane.SourceSeen's word for the source address that the endpoint sees, and Source is that
	// address, if known. Both are unset for endpoints of the kernel's IPVS.
	SourceSeen string     `json:"sees,omitempty"`
	Source     netip.Addr `json:"source,omitzero"`
	// Draining is true if the endpoint terminates.
	Draining bool `json:"draining,omitempty"`
	// Kept explains why an endpoint is not ejected although it is unhealthy; empty for others.
	Kept string `json:"unhealthy,omitempty"`
	// Starting says how an endpoint starts that gets less than its share because of a slow start; empty for others.
	Starting string `json:"starting,omitempty"`
	// Trouble says why what is sent there reaches nobody; empty if nothing is known that stops it.
	Trouble     string  `json:"trouble,omitempty"`
	Connections *uint64 `json:"connections,omitempty"`

	sees dataplane.SourceSeen
}

// ExcludedEndpoint is an endpoint that the packet cannot be sent to or, with an invalid address, a slice of them.
type ExcludedEndpoint struct {
	Address netip.Addr `json:"address,omitzero"`
	Port    uint16     `json:"port,omitempty"`
	Node    string     `json:"node,omitempty"`
	Zone    string     `json:"zone,omitempty"`
	Slice   string     `json:"slice,omitempty"`
	// Reason is a word, and Why a sentence.
	Reason string `json:"reason"`
	Why    string `json:"why"`
}

// Affinity tells how long a sender stays with an endpoint, in seconds.
type Affinity struct {
	Timeout int `json:"timeoutSeconds"`
	// Endpoint is the one that the sender is bound to, for Left more; invalid if it is not bound.
	Endpoint netip.AddrPort `json:"endpoint,omitzero"`
	Left     int            `json:"remainingSeconds,omitempty"`
}

// NearMiss is a frontend that the user may have meant. Service names the service port, empty if it is not known.
type NearMiss struct {
	socket
	Protocol string `json:"protocol"`
	Service  string `json:"service"`
	// Kind is as in Service.
	Kind string `json:"kind,omitempty"`
}

func nearMiss(k dataplane.Key, of dataplane.PortName, kind string) NearMiss {
	n := NearMiss{socket: socket{k.Addr, k.Port}, Protocol: k.Protocol.String(), Kind: kind}
	if of != (dataplane.PortName{}) {
		n.Service = of.String()
	}
	return n
}

// fillObjects fills in the objects' answer.
func (a *Answer) fillObjects(x *dataplane.Explanation, o *Objects, policy *Policy, unknown string) {
	a.explanation, a.adopted = x, o.Adopted
	a.Origin = a.originBy(x, o, policy, unknown)
	v := &View{From: o.Source, Outcome: x.Cause.Outcome().String(), Cause: x.Cause.String()}
	a.Objects = v
	if x.Frontend != nil {
		a.fillFrontend(v, o)
	}
	for _, n := range x.NearMisses {
		v.NearMisses = append(v.NearMisses, nearMiss(n.Key, n.Claim.Port, n.Claim.Kind.String()))
	}
	v.Why = a.why(v)
	if x.Cause == dataplane.FrontendFound || x.Cause == dataplane.FrontendScheduled && x.ZonesIgnored != "" {
		a.noteChoice(x)
	}
	a.noteClients(x)
	if x.Onward != nil && o.Snap.Link.Device == snapshot.AnyDevice {
		a.Notes = append(a.Notes, "this host is not the node: all Nodes are taken for its neighbours")
	}
}

// noteChoice says how the endpoint is chosen, if that is not as usual or not as the Service asks.
func (a *Answer) noteChoice(x *dataplane.Explanation) {
	how := x.Port.ChosenBy(x.Frontend.Routes[x.Row].Pool)
	switch {
	case x.Frontend.NotScheduled != dataplane.Schedulable:
		a.Notes = append(a.Notes, "the Service asks for IPVS, and nftables chooses the endpoint "+how+": "+
			x.Frontend.NotScheduled.String())
	case how != dataplane.AtRandom:
		a.Notes = append(a.Notes, "the endpoint is chosen "+how)
	}
	switch {
	case x.ZonesIgnored != "":
		a.Notes = append(a.Notes, "the Service prefers near endpoints, and this node does not: "+x.ZonesIgnored)
	case x.Zones != nil && x.Frontend.NotScheduled != dataplane.SlotsFull:
		a.Notes = append(a.Notes, zonesText(x.Zones))
	}
}

// originBy classifies the sender by the objects' flags.
func (a *Answer) originBy(x *dataplane.Explanation, o *Objects, policy *Policy, unknown string) Origin {
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
	if len(o.Adopted) > 0 && o.Config.DetectLocal.Mode == dataplane.DetectClusterCIDR && !policy.detectsPods() {
		by = "the kernel's rules"
	}
	return originOf(a.sender, knownPods{x.Origin.Pods, unknown}, x.Origin.Node, by)
}

// fillFrontend fills in the frontend.
func (a *Answer) fillFrontend(v *View, o *Objects) {
	x := a.explanation
	v.Service = serviceOf(x.Port.Name)
	v.Service.Kind, v.Service.Settings = x.Frontend.Kind.String(), settingsOf(x)
	for _, c := range x.Claims[1:] {
		v.Service.Claims = append(v.Service.Claims, c.String())
	}
	if x.Frontend.Sources != nil {
		v.Ranges = &Ranges{x.Frontend.Sources, x.Source}
	}
	for i, r := range x.Frontend.Routes {
		if x.Cause != dataplane.ForwardedToNode { // before any policy
			v.Rows = append(v.Rows, Row{r.From.String(), rowEndpoints[x.Local[i]], r.SNAT, i == x.Row})
		}
	}
	v.Backends, v.Nodes = backendsOf(x), nodesOf(x)
	if x.Cause == dataplane.FrontendScheduled {
		v.Scheduler = x.Port.Scheduling.String()
	}
	if x.Port.Affinity > 0 {
		v.Affinity = &Affinity{Timeout: int(x.Port.Affinity / time.Second)}
	}
	switch x.Cause {
	case dataplane.SourceRefused, dataplane.FromOutsideToLoopback, dataplane.ForwardedToNode: // they make no difference
	default:
		a.fillEndpoints(v, o)
	}
}

// refused is the part of the connections that is refused before an endpoint is chosen.
func (a *Answer) refused() float64 { return float64(a.explanation.Refused()) / dataplane.RefusedOf }

// fillEndpoints fills in the endpoints that can be chosen, and the excluded ones.
func (a *Answer) fillEndpoints(v *View, o *Objects) {
	x := a.explanation
	total := 0
	for _, c := range x.Endpoints {
		if c.Reason.Included() {
			total += c.Share()
		}
	}
	for _, c := range x.Endpoints {
		if !c.Reason.Included() {
			l := ExcludedEndpoint{Address: c.Addr(), Port: c.Port(), Node: c.Object.Node, Zone: c.Object.Zone, Slice: c.Slice,
				Reason: c.Reason.String(), Why: a.exclusionText(&c, o.Config.NodeName)}
			v.Excluded = append(v.Excluded, l)
			continue
		}
		e := Endpoint{socket: socketOf(c.AddrPort), Node: c.Object.Node, Zone: c.Object.Zone,
			Chance:   float64(c.Share()) / float64(total) * (1 - a.refused()) * a.own(),
			Draining: c.Reason == dataplane.IncludedTerminating}
		a.fillSource(&e, c.SourceSeen)
		if v.Scheduler != "" {
			e.Chance, e.Weight = 0, int(c.Weight)
		}
		if c.Unhealthy != nil {
			e.Kept = keptText(c.Unhealthy, x)
		}
		if c.Starting != nil {
			e.Starting = startingText(c.Starting)
		}
		v.Endpoints = append(v.Endpoints, e)
	}
	for _, s := range x.SkippedSlices {
		l := ExcludedEndpoint{Slice: s.Slice, Reason: otherFamily,
			Why: terminal.Plural(s.Endpoints, "endpoint") + " of the other family"}
		if !s.OtherFamily {
			l.Reason, l.Why = "other-port", terminal.Plural(s.Endpoints, "endpoint")+" without "+portText(x.Port.Name, s)
		}
		v.Excluded = append(v.Excluded, l)
	}
}

// unhealthyText says what is wrong with an endpoint, and since when.
func unhealthyText(u *snapshot.Unhealthy) string { return sinceText(u.Cause.String(), u.Since) }

func sinceText(cause string, since time.Time) string {
	return cause + " since " + since.UTC().Format(time.RFC3339)
}

// keptText says why an unhealthy endpoint is still in its pool.
func keptText(u *snapshot.Unhealthy, x *dataplane.Explanation) string {
	pool := x.Frontend.Routes[x.Row].Pool
	switch {
	case u.Doubtful || u.Cause == snapshot.Resort:
		return unhealthyText(u) + keptHere(u)
	case x.Port.SecondChance == snapshot.SecondChanceObserve:
		return unhealthyText(u) + ", observe only"
	case len(pool.Endpoints)+len(pool.Ejected) == 1:
		return unhealthyText(u) + ", kept: there is no other endpoint"
	}
	return unhealthyText(u) + ", kept: half of the pool is ejected already"
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

// fillSource fills in the source address that an endpoint sees; invalid if it is unknown which of this node's it is.
func (a *Answer) fillSource(e *Endpoint, s dataplane.SourceSeen) {
	e.sees, e.SourceSeen, e.Source = s, s.String(), a.sender.addr
	if s.Node() {
		e.Source, _, _ = a.routes.Route(e.Address)
	}
}

// exclusionText explains why an endpoint is not in the pool.
func (a *Answer) exclusionText(c *dataplane.EndpointDecision, node string) string {
	x := a.explanation
	switch c.Reason {
	case dataplane.ExcludedNotReady:
		if x.Resort {
			return "not ready, and not known to accept a probe of this node (last resort)"
		}
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
		if x.Frontend.Kept {
			return "not on this node (" + node + "): its share of the clients is forwarded to its node"
		}
		return "not on this node (" + node + "), and " + policy + " is Local"
	case dataplane.ExcludedNodeHint:
		return fmt.Sprintf("topology hints: for %s, and this node is %s", orNone(c.Object.ForNodes), node)
	case dataplane.ExcludedZoneHint:
		return fmt.Sprintf("topology hints: for %s, and this node is in %s", orNone(c.Object.ForZones), x.Zone)
	case dataplane.ExcludedDuplicate:
		return "mentioned twice: the other mention counts"
	case dataplane.ExcludedDrained:
		return "its weight is 0: no new connections"
	case dataplane.ExcludedOtherZone:
		return otherZoneText(x.Zones, c.Object.Zone)
	case dataplane.ExcludedBehind:
		return "the Service " + x.Object.Local + " has ready endpoints on this node, which come first"
	case dataplane.ExcludedUnanswered, dataplane.ExcludedRefused:
		return unhealthyText(c.Unhealthy) + ejectedHere
	}
	return c.Reason.String()
}

func orNone(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// fillKernel fills in the kernel's answer.
func (a *Answer) fillKernel(t *dataplane.Trace) {
	a.trace = t
	v := &View{From: "the kernel", Revision: t.Revision, Outcome: t.Outcome(), Cause: t.Cause.String(),
		Chains: t.Chains(), Steps: t.Steps, Unclear: t.Unclear, Scheduler: t.Scheduler}
	a.Kernel = v
	a.Notes = append(a.Notes, t.Notes...)
	if t.Port.Service != (snapshot.Name{}) {
		v.Service = serviceOf(t.Port)
		v.Service.Connections = t.Connections
	}
	a.fillDestinations(v)
	for _, d := range t.Destinations {
		v.Endpoints = append(v.Endpoints, Endpoint{socket: socketOf(d.AddrPort), Weight: int(d.Weight),
			Draining: d.Weight == 0, Connections: &d.Connections})
	}
	a.fillHealth(v, t.Unhealthy)
	for _, n := range t.Near {
		v.NearMisses = append(v.NearMisses, nearMiss(n.Key, n.Port, ""))
	}
	v.Why = a.whyKernel(v)
}

// fillHealth fills in what the kernel holds of the endpoints of the pool.
func (a *Answer) fillHealth(v *View, list []dataplane.EndpointHealth) {
	for i := range list {
		u := &list[i]
		if u.Ejected {
			reason := dataplane.ExcludedUnanswered
			if u.Cause == snapshot.Refused {
				reason = dataplane.ExcludedRefused
			}
			v.Excluded = append(v.Excluded, ExcludedEndpoint{Address: u.Endpoint.Addr(), Port: u.Endpoint.Port(),
				Reason: reason.String(), Why: unhealthyText(&u.Unhealthy) + ejectedHere})
			continue
		}
		for n := range v.Endpoints {
			if v.Endpoints[n].AddrPort() == u.Endpoint {
				v.Endpoints[n].Kept = unhealthyText(&u.Unhealthy) + keptHere(&u.Unhealthy)
			}
		}
	}
}

// keptHere follows what is wrong with an endpoint that is not ejected.
func keptHere(u *snapshot.Unhealthy) string {
	switch {
	case u.Cause == snapshot.Resort:
		return ": not ready, but it accepts probes of this node, and the Service has no other"
	case u.Doubtful:
		return " by some clients: it may accept others"
	}
	return ", kept"
}

// ejectedHere follows what is wrong with an endpoint that is ejected.
const ejectedHere = ", ejected on this node"

// fillDestinations fills in the endpoints that the kernel would choose from, and the affinity entry.
func (a *Answer) fillDestinations(v *View) {
	for _, end := range a.trace.Endings {
		if end.Outcome == dataplane.Forwarded {
			v.Nodes = append(v.Nodes, a.nodeOf(end))
		}
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
		e := Endpoint{socket: socketOf(end.Endpoint), Chance: float64(end.Share) / float64(end.Of),
			Connections: end.Connections}
		a.fillSource(&e, sees)
		v.Endpoints = append(v.Endpoints, e)
		if end.Remember > 0 {
			v.Affinity = &Affinity{Timeout: int(end.Remember / time.Second)}
		}
	}
	slices.SortStableFunc(v.Endpoints, func(x, y Endpoint) int { return x.AddrPort().Compare(y.AddrPort()) })
	if bound, ok := a.trace.Bound(); ok {
		if v.Affinity == nil {
			v.Affinity = &Affinity{}
		}
		v.Affinity.Endpoint, v.Affinity.Left = bound.Endpoint, int(bound.Left/time.Second)
	}
}

// compare records where objects and kernel disagree.
func (a *Answer) compare() {
	if a.explanation == nil || a.trace == nil {
		return
	}
	disagreements := a.trace.Disagreements(a.explanation)
	same := len(disagreements) == 0
	a.Same = &same
	for _, d := range disagreements {
		a.Disagreements = append(a.Disagreements, d.String())
	}
	for _, flag := range a.adopted {
		a.Notes = append(a.Notes, "taken from the kernel: "+flag)
	}
}

// Compared reports whether both were asked. If so, Agree reports whether they agree.
func (a *Answer) Compared() bool { return a.Objects != nil && a.Kernel != nil }

// Agree reports whether objects and kernel give the same answer.
func (a *Answer) Agree() bool { return len(a.Disagreements) == 0 }
