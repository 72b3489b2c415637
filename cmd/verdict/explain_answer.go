package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// answer is what explain says. Its JSON is documented in docs/ANSWERS.md.
type answer struct {
	Packet  packetJSON `json:"packet"`
	Origin  originJSON `json:"origin"`
	Objects *viewJSON  `json:"objects,omitempty"`
	Kernel  *viewJSON  `json:"kernel,omitempty"`
	// Agree is set if both were asked.
	Agree         *bool    `json:"agree,omitempty"`
	Disagreements []string `json:"disagreements,omitempty"`
	Notes         []string `json:"notes,omitempty"`

	family      ipfamily.Family
	sender      sender
	here        []netip.Addr
	routes      *routes
	adopted     []string
	explanation *dataplane.Explanation
	walk        *nft.Walk
}

type packetJSON struct {
	Source      string `json:"source"`
	StandsFor   string `json:"standsFor,omitempty"`
	Destination string `json:"destination"`
	Port        uint16 `json:"port"`
	Protocol    string `json:"protocol"`
	Interface   string `json:"interface,omitempty"`
}

type originJSON struct {
	Pod  bool   `json:"pod"`
	Node bool   `json:"node"`
	Why  string `json:"why"`
}

// viewJSON is the answer of the objects, or of the kernel.
type viewJSON struct {
	From     string       `json:"from"`
	Revision uint32       `json:"revision,omitempty"`
	Outcome  string       `json:"outcome"`
	Cause    string       `json:"cause"`
	Why      string       `json:"why"`
	Service  *serviceJSON `json:"service,omitempty"`
	// Scheduler is IPVS's, if that chooses the endpoint.
	Scheduler string         `json:"scheduler,omitempty"`
	Ranges    *rangesJSON    `json:"sourceRanges,omitempty"`
	Rows      []rowJSON      `json:"rows,omitempty"`
	Taken     []endpointJSON `json:"endpoints,omitempty"`
	LeftOut   []leftOutJSON  `json:"leftOut,omitempty"`
	Affinity  *affinityJSON  `json:"affinity,omitempty"`
	Near      []nearJSON     `json:"near,omitempty"`
	Way       []string       `json:"way,omitempty"`
	Trace     []traceJSON    `json:"trace,omitempty"`
	Unclear   []string       `json:"unclear,omitempty"`
}

type serviceJSON struct {
	Name string `json:"name"`
	Port string `json:"port,omitempty"`
	Kind string `json:"kind,omitempty"`
	// Claims are others' that lost the address to this one.
	Claims []string `json:"alsoClaimedBy,omitempty"`
	// Connections are counted since the element was written.
	Connections *uint64 `json:"connections,omitempty"`
}

type rangesJSON struct {
	Ranges []string `json:"ranges,omitempty"`
	// Holds is the one that lets the sender in.
	Holds string `json:"holds,omitempty"`
}

type rowJSON struct {
	From       string `json:"from"`
	Endpoints  string `json:"endpoints"`
	Masquerade bool   `json:"masquerade"`
	Decides    bool   `json:"decides"`
}

type endpointJSON struct {
	Address string `json:"address"`
	Port    uint16 `json:"port"`
	Node    string `json:"node,omitempty"`
	// Chance is 0 where IPVS chooses, by its scheduler and the Weight.
	Chance float64 `json:"chance"`
	Weight int     `json:"weight,omitempty"`
	// Sees is client, node, node-hairpin or client-here, Source the address, if it is known; of what the kernel's IPVS chooses from
	// both are empty.
	Sees        string  `json:"sees,omitempty"`
	Source      string  `json:"source,omitempty"`
	Draining    bool    `json:"draining,omitempty"`
	Connections *uint64 `json:"connections,omitempty"`
}

type leftOutJSON struct {
	Address string `json:"address,omitempty"`
	Port    uint16 `json:"port,omitempty"`
	Node    string `json:"node,omitempty"`
	Slice   string `json:"slice,omitempty"`
	Reason  string `json:"reason"`
	Why     string `json:"why"`
}

type affinityJSON struct {
	Seconds int `json:"timeoutSeconds"`
	// Endpoint is where the sender is bound to go, for RemainingSeconds more.
	Endpoint  string `json:"endpoint,omitempty"`
	Remaining int    `json:"remainingSeconds,omitempty"`
}

type nearJSON struct {
	Address  string `json:"address"`
	Port     uint16 `json:"port"`
	Protocol string `json:"protocol"`
	Service  string `json:"service"`
	Kind     string `json:"kind,omitempty"`
}

type traceJSON struct {
	Chain   string   `json:"chain"`
	Rule    string   `json:"rule"`
	Matched bool     `json:"matched"`
	Found   []string `json:"found,omitempty"`
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// explain fills in what the objects say.
func (a *answer) explain(x *dataplane.Explanation, o *objects, policy *policyFlags) {
	a.explanation = x
	by := map[dataplane.DetectLocalMode]string{
		dataplane.DetectClusterCIDR: "--cluster-cidr", dataplane.DetectNodeCIDR: "the Node's podCIDRs",
		dataplane.DetectBridgeInterface: "--pod-bridge-interface", dataplane.DetectInterfaceNamePrefix: "--pod-interface-name-prefix",
	}[o.config.DetectLocal.Mode]
	if len(o.adopted) > 0 && o.config.DetectLocal.Mode == dataplane.DetectClusterCIDR && !policy.saysPods() {
		by = "the kernel's rules"
	}
	a.Origin = originOf(a.sender, x.Origin.Pods, x.Origin.Node, by)
	if g := x.Origin.Guess; g.IsValid() {
		a.Origin = originJSON{Pod: true, Why: fmt.Sprintf(
			"%s is in this Node's pod range %s, so it should come in by %s: taken for a pod (or give --interface)",
			a.sender.addr, g, podsText(x.Origin.Pods))}
	}
	v := &viewJSON{From: o.source, Outcome: x.Cause.Outcome().String(), Cause: x.Cause.String()}
	a.Objects = v
	if x.Frontend != nil {
		v.Service = &serviceJSON{Name: x.Port.Name.Service.String(), Port: x.Port.Name.Port, Kind: x.Frontend.Kind.String()}
		for _, c := range x.Claims[1:] {
			v.Service.Claims = append(v.Service.Claims, c.String())
		}
		if x.Frontend.Sources != nil {
			v.Ranges = &rangesJSON{}
			for _, p := range x.Frontend.Sources {
				v.Ranges.Ranges = append(v.Ranges.Ranges, p.String())
			}
			if x.Source.IsValid() {
				v.Ranges.Holds = x.Source.String()
			}
		}
		a.rows(v)
		if x.Cause == dataplane.FrontendScheduled {
			v.Scheduler = x.Port.Scheduling.String()
		}
		if x.Port.Affinity > 0 {
			v.Affinity = &affinityJSON{Seconds: int(x.Port.Affinity.Seconds())}
		}
		if x.Cause != dataplane.SourceRefused && x.Cause != dataplane.FromOutsideToLoopback { // else they make no difference
			a.endpoints(v, o)
		}
	}
	for _, n := range x.Near {
		v.Near = append(v.Near, nearJSON{n.Key.Addr.String(), n.Key.Port, n.Key.Protocol.String(), n.Claim.Port.String(),
			n.Claim.Kind.String()})
	}
	v.Why = a.why(v)
	if x.Cause == dataplane.FrontendFound && x.Frontend.NotScheduled != dataplane.Schedulable {
		a.Notes = append(a.Notes,
			"the Service asks for IPVS, and nftables chooses the endpoint: "+x.Frontend.NotScheduled.String())
	}
}

// saysPods says whether the flags or the configuration file tell pods from others.
func (p *policyFlags) saysPods() bool {
	d := p.said.DetectLocal
	return len(d.ClusterCIDRs) > 0 || d.Interface != "" || d.Mode == dataplane.DetectNodeCIDR
}

// rows fills in the rows of policy.
func (a *answer) rows(v *viewJSON) {
	x := a.explanation
	for i, r := range x.Frontend.Routes {
		row := rowJSON{From: r.From.String(), Endpoints: "cluster", Masquerade: r.SNAT, Decides: i == x.Row}
		if x.Local[i] {
			row.Endpoints = "local"
		}
		v.Rows = append(v.Rows, row)
	}
}

// endpoints fills in the endpoints, and those that are none.
func (a *answer) endpoints(v *viewJSON, o *objects) {
	x := a.explanation
	n := 0
	for _, c := range x.Endpoints {
		if c.Reason.Taken() {
			n++
		}
	}
	for _, c := range x.Endpoints {
		if !c.Reason.Taken() {
			v.LeftOut = append(v.LeftOut, leftOutJSON{Address: c.Addr().String(), Port: c.Port(), Node: c.Object.Node, Slice: c.Slice,
				Reason: c.Reason.String(), Why: a.leftOut(&c, o.config.NodeName)})
			continue
		}
		e := endpointJSON{Address: c.Addr().String(), Port: c.Port(), Node: c.Object.Node, Chance: 1 / float64(n), Sees: c.Sees.String(),
			Draining: c.Reason == dataplane.TakenDraining}
		if v.Scheduler != "" {
			e.Chance, e.Weight = 0, int(c.Weight)
		}
		e.Source = a.source(c.Sees, c.Addr())
		v.Taken = append(v.Taken, e)
	}
	for _, s := range x.Absent {
		l := leftOutJSON{Slice: s.Slice, Reason: otherFamily, Why: plural(s.Endpoints, "endpoint") + " of the other family"}
		if !s.OtherFamily {
			l.Reason, l.Why = "other-port", plural(s.Endpoints, "endpoint")+" without "+portText(x.Port.Name, s)
		}
		v.LeftOut = append(v.LeftOut, l)
	}
}

// otherFamily is the reason of slices that have only endpoints of the other family.
const otherFamily = "other-family"

func plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprint(n, " ", noun)
}

func portText(p dataplane.PortName, s dataplane.Absent) string {
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

// source gives the source address that an endpoint sees; empty if it is not known which of this node's it is.
func (a *answer) source(s dataplane.Sees, endpoint netip.Addr) string {
	if !s.Node() {
		return a.sender.addr.String()
	}
	if from, _, ok := a.routes.to(endpoint); ok {
		return from.String()
	}
	return ""
}

// leftOut says why an endpoint is not in the pool.
func (a *answer) leftOut(c *dataplane.Considered, node string) string {
	x := a.explanation
	switch c.Reason {
	case dataplane.LeftNotReady:
		return "not ready"
	case dataplane.LeftGone:
		return "terminating, and serves no longer"
	case dataplane.LeftDraining:
		return "terminating, and others are ready"
	case dataplane.LeftOtherNode:
		policy := "internalTrafficPolicy"
		if x.Frontend.Kind != dataplane.ClusterIP {
			policy = "externalTrafficPolicy"
		}
		if c.Object.Node == "" {
			return "on no known node, and " + policy + " is Local"
		}
		return "not on this node (" + node + "), and " + policy + " is Local"
	case dataplane.LeftNodeHint:
		return fmt.Sprintf("topology hints: for %s, and this node is %s", orNone(c.Object.ForNodes), node)
	case dataplane.LeftZoneHint:
		return fmt.Sprintf("topology hints: for %s, and this node is in %s", orNone(c.Object.ForZones), x.Zone)
	case dataplane.LeftRepeated:
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

// walked fills in what the kernel does.
func (a *answer) walked(w *nft.Walk, table *kernel.TableFound, revision nft.Revision, e *explaining) error {
	a.walk = w
	cause := w.Cause()
	v := &viewJSON{From: "the kernel", Revision: revision.Number, Outcome: w.Trace(a.family).Outcome(), Cause: cause.String(), Way: way(w)}
	a.Kernel = v
	v.Unclear = slices.Concat(table.Wrong, w.Unclear)
	if !table.There {
		a.Notes = append(a.Notes, fmt.Sprintf("the table %s %s is not there: nobody carries Services on this node",
			a.family.NFT(), nft.TableName))
	} else if table.Dormant {
		a.Notes = append(a.Notes, fmt.Sprintf("the table %s %s is dormant: it does nothing", a.family.NFT(), nft.TableName))
	}
	if el, _, ok := w.Frontend(); ok {
		service, port, _ := strings.Cut(el.Comment, ":")
		v.Service = &serviceJSON{Name: service, Port: port}
		if packets := el.Packets; el.Counted {
			v.Service.Connections = &packets
		}
	}
	a.landed(v, w)
	if v.Service != nil {
		if why := e.uncountedNote(revision.Counted, v); why != "" {
			a.Notes = append(a.Notes, why)
		}
	}
	if cause == dataplane.FrontendScheduled {
		if err := a.scheduled(v, e.q.key); err != nil {
			return err
		}
	}
	if e.o.trace {
		v.Trace = trace(a.family, w)
	}
	if v.Service == nil {
		if err := a.nearby(v, e); err != nil {
			return err
		}
	}
	v.Why = a.whyKernel(v, cause)
	return nil
}

// landed fills in the endpoints the kernel would choose from, and what it remembers.
func (a *answer) landed(v *viewJSON, w *nft.Walk) {
	stuck, bound := w.Trace(a.family).Bound()
	for _, end := range w.Endings {
		if end.Outcome != dataplane.Sent {
			continue
		}
		sees := dataplane.SeesClient
		switch {
		case end.Hairpin:
			sees = dataplane.SeesNodeHairpin
		case end.Masquerade:
			sees = dataplane.SeesNode
		}
		j := endpointJSON{Address: end.Endpoint.Addr().String(), Port: end.Endpoint.Port(), Chance: float64(end.Share) / float64(end.Of),
			Sees: sees.String(), Source: a.source(sees, end.Endpoint.Addr())}
		if end.Element.Counted {
			packets := end.Element.Packets
			j.Connections = &packets
		}
		v.Taken = append(v.Taken, j)
		if end.Remember > 0 {
			v.Affinity = &affinityJSON{Seconds: int(end.Remember.Seconds())}
		}
	}
	slices.SortStableFunc(v.Taken, func(x, y endpointJSON) int { return addrPortOf(x).Compare(addrPortOf(y)) })
	if bound {
		if v.Affinity == nil {
			v.Affinity = &affinityJSON{}
		}
		v.Affinity.Endpoint, v.Affinity.Remaining = stuck.Endpoint.String(), int(stuck.Left.Seconds())
	}
}

// scheduled fills in the endpoints from which IPVS chooses, as the kernel has them.
func (a *answer) scheduled(v *viewJSON, k dataplane.Key) error {
	vs, ok, err := ipvsplugin.ReadService(k)
	if err != nil {
		return err
	}
	if !ok {
		v.Unclear = append(v.Unclear, "IPVS has no virtual service for it: the packet is rejected")
		return nil
	}
	v.Scheduler = vs.Config.String()
	for _, d := range vs.Destinations {
		connections := d.Connections
		v.Taken = append(v.Taken, endpointJSON{Address: d.Addr().String(), Port: d.Port(), Weight: int(d.Weight), Draining: d.Weight == 0,
			Connections: &connections})
	}
	return nil
}

func addrPortOf(e endpointJSON) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(e.Address), e.Port)
}

// way gives the chains whose rules decided.
func way(w *nft.Walk) (chains []string) {
	for _, s := range w.Steps {
		if name := s.Chain.Name(); s.Matched && (len(chains) == 0 || chains[len(chains)-1] != name) {
			chains = append(chains, name)
		}
	}
	return chains
}

// trace gives every rule that looked at the packet; after the translation those for the first endpoint.
func trace(f ipfamily.Family, w *nft.Walk) (out []traceJSON) {
	steps := slices.Clone(w.Steps)
	if len(w.Endings) > 0 {
		steps = append(steps, w.Endings[0].Steps...)
	}
	for _, s := range steps {
		t := traceJSON{Chain: s.Chain.Name(), Rule: s.Rule.Text(f), Matched: s.Matched}
		for i := range s.Found {
			set := nft.SetByID(s.Found[i].Set)
			t.Found = append(t.Found, s.Found[i].Text(f, &set))
		}
		out = append(out, t)
	}
	return out
}

// nearby looks for the Services that answer at the address at other ports, as long as that is cheap.
func (a *answer) nearby(v *viewJSON, e *explaining) error {
	sizes, known, err := e.reader.Sizes(a.family)
	if err != nil || !known || sizes[nft.Services] > kernel.ListMost {
		return err
	}
	listed, _, err := e.reader.List(a.family, nft.Services)
	if err != nil {
		return err
	}
	for i := range listed {
		k := listed[i].FrontendKey()
		if k.Addr == e.q.key.Addr {
			v.Near = append(v.Near, nearJSON{k.Addr.String(), k.Port, k.Protocol.String(), listed[i].Comment, ""})
		}
	}
	slices.SortFunc(v.Near, func(x, y nearJSON) int { return int(x.Port) - int(y.Port) })
	return nil
}

// compare says whether objects and kernel agree.
func (a *answer) compare() {
	if a.explanation == nil || a.walk == nil {
		return
	}
	for _, d := range a.walk.Trace(a.family).Disagreements(a.explanation) {
		a.Disagreements = append(a.Disagreements, d.String())
	}
	agree := len(a.Disagreements) == 0
	a.Agree = &agree
	for _, flag := range a.adopted {
		a.Notes = append(a.Notes, "taken from the kernel's rules: "+flag)
	}
}
