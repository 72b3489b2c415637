package inspect

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/internal/system/units"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// podsText describes how pods are recognized.
func podsText(p dataplane.Pods) string {
	switch {
	case p.Interface != "":
		return "interface " + p.Interface
	case p.InterfacePrefix != "":
		return "an interface " + p.InterfacePrefix + "*"
	}
	return p.CIDR.String()
}

// originOf classifies a sender, and explains why. By names the setting that tells pods from others.
func originOf(s sender, pods knownPods, node bool, by string) (o Origin) {
	addr := s.addr.String()
	if s.standsFor != "" {
		addr = fmt.Sprintf("%s (example %s address)", addr, s.standsFor)
	}
	byInterface := pods.ByInterface()
	if o.Node = node; node {
		o.Why = addr + " is an address of this node"
	}
	switch {
	case byInterface && !node:
		o.Pod = pods.HasInterface(s.iface)
	case !byInterface:
		o.Pod = pods.CIDR.IsValid() && pods.CIDR.Contains(s.addr)
	}
	switch {
	case o.Pod && byInterface:
		o.Why = fmt.Sprintf("%s comes in by %s (%s): a pod", addr, s.iface, by)
	case o.Pod && node:
		o.Why += fmt.Sprintf(", and in %s (%s) like a pod's", pods.CIDR, by)
	case o.Pod:
		o.Why = fmt.Sprintf("%s is in %s (%s): a pod", addr, pods.CIDR, by)
	case node:
	case !pods.Known():
		o.Why = addr + " is no address of this node; pods cannot be told from others (" + pods.unknown + "): outside"
	case byInterface && s.iface == "":
		o.Why = fmt.Sprintf("%s is no address of this node, and its interface is not known, so not %s (%s): outside",
			addr, podsText(pods.Pods), by)
	case byInterface:
		o.Why = fmt.Sprintf("%s comes in by %s, not by %s (%s): outside", addr, s.iface, podsText(pods.Pods), by)
	default:
		o.Why = fmt.Sprintf("%s is no address of this node, and not in %s (%s): outside", addr, pods.CIDR, by)
	}
	return o
}

// why explains in a sentence what the objects ask for.
func (a *Answer) why(v *View) string {
	x, dst := a.explanation, a.explanation.Question.Key
	switch x.Cause {
	case dataplane.FrontendFound:
		return sentTo(v.Endpoints) + refusedText(a.refused()) + a.othersText(v.Nodes)
	case dataplane.ForwardedToNode:
		return a.forwardedTo(v.Nodes)
	case dataplane.FrontendScheduled:
		return scheduledTo(v)
	case dataplane.NoEndpoints:
		if x.Frontend != nil && x.Frontend.NotScheduled == dataplane.TooManyBackends {
			return "rejected: " + x.Frontend.NotScheduled.String()
		}
	case dataplane.NoLocalEndpoints:
		policy := "internalTrafficPolicy"
		if x.Frontend.Kind != dataplane.ClusterIP {
			policy = "externalTrafficPolicy"
		}
		return "dropped: no endpoint on this node can be used, and " + policy + " is Local"
	case dataplane.UnusedPort:
		switch {
		case dst.Protocol.IsPing() && !x.Pings:
			return "rejected: this node answers no pings of Services (--ping-services, backend, or no address of the family)"
		case dst.Protocol.IsPing():
			return fmt.Sprintf("rejected: %s has source ranges, or no endpoint for pings from outside", dst.Addr)
		}
		return fmt.Sprintf("rejected: %s is an address of a Service, and has no port %d/%s", dst.Addr, dst.Port, dst.Protocol)
	case dataplane.Unallocated:
		return fmt.Sprintf("dropped: no Service has %s, which lies in the ServiceCIDR %s", dst.Addr, x.CIDR)
	case dataplane.SourceRefused:
		return fmt.Sprintf("dropped: %s is in none of the Service's loadBalancerSourceRanges", a.sender.addr) +
			a.othersText(v.Nodes)
	case dataplane.NotService:
		if len(x.Unserved) > 0 {
			return fmt.Sprintf("untouched: %s names that address, but has no %s cluster IP, or no port", x.Unserved[0],
				ipfamily.Of(dst.Addr))
		}
	}
	return plainWhy(x.Cause, dst)
}

// whyKernel explains in a sentence what the kernel does.
func (a *Answer) whyKernel(v *View) string {
	switch {
	case v.Outcome == "several" && a.trace.Cause == dataplane.SourceRefused:
		return plainWhy(a.trace.Cause, a.key) + a.othersText(v.Nodes)
	case v.Outcome == "several":
		whole, refused := 0.0, 0.0
		for _, e := range v.Endpoints {
			whole += e.Chance
		}
		for _, e := range a.trace.Endings {
			if e.Outcome == dataplane.Rejected {
				refused += float64(e.Share) / float64(e.Of)
			}
		}
		for _, n := range v.Nodes {
			whole += n.Chance
		}
		if whole+refused > 1-1e-6 {
			return sentTo(v.Endpoints) + refusedText(refused) + a.othersText(v.Nodes)
		}
		return fmt.Sprintf("%s, but %s of the connections find an empty slot and are not translated", sentTo(v.Endpoints),
			percent(1-whole))
	case a.trace.Cause == dataplane.FrontendFound:
		return sentTo(v.Endpoints)
	case a.trace.Cause == dataplane.ForwardedToNode:
		return a.forwardedTo(v.Nodes)
	case a.trace.Cause == dataplane.FrontendScheduled:
		return scheduledTo(v)
	}
	return plainWhy(a.trace.Cause, a.key)
}

// plainWhy explains what is known without the objects.
func plainWhy(c dataplane.Cause, to dataplane.Key) string {
	dst := to.Addr
	switch c {
	case dataplane.NoEndpoints:
		return "rejected: the Service has no endpoint that can be used"
	case dataplane.OverLimit:
		return "over a limit: the Service has as many open connections on this node as its limits allow"
	case dataplane.ClientOverLimit:
		return "over a limit: this client has as many open connections on this node as the Service's limits allow"
	case dataplane.NoLocalEndpoints:
		return "dropped: no endpoint on this node can be used, and the traffic policy is Local"
	case dataplane.UnusedPort:
		if to.Protocol.IsPing() {
			return fmt.Sprintf("rejected: %s is an address of a Service, and answers no ping", dst)
		}
		return fmt.Sprintf("rejected: %s is an address of a Service, and has no such port", dst)
	case dataplane.Unallocated:
		return fmt.Sprintf("dropped: no Service has %s, which lies in a ServiceCIDR", dst)
	case dataplane.PingAnswered:
		return fmt.Sprintf("answered: this node answers pings of %s while a Service has an endpoint there", dst)
	case dataplane.FailoverPassed:
		return "untouched: no endpoint on this node can be used, and verdict/external-failover is pass"
	case dataplane.SourceRefused:
		return "dropped: the sender is in none of the Service's loadBalancerSourceRanges"
	case dataplane.FromOutsideToLoopback:
		return fmt.Sprintf("dropped: %s is this node's loopback, and the packet comes from elsewhere", dst)
	}
	return "untouched: no Service answers there, so Verdict lets the packet go on as it came"
}

func scheduledTo(v *View) string {
	return fmt.Sprintf("left to IPVS, which chooses from %s by %s", terminal.Plural(len(v.Endpoints), "endpoint"),
		v.Scheduler)
}

func sentTo(taken []Endpoint) string {
	text := fmt.Sprintf("sent to one of %d endpoints", len(taken))
	if len(taken) == 1 {
		text = "sent to the only endpoint"
	}
	if len(taken) > 0 && taken[0].Draining {
		text += "; none is ready, and it serves while it terminates"
	}
	return text
}

// percent formats a fraction with as many digits as it needs.
func percent(p float64) string {
	switch {
	case p >= 0.1 || p == 0:
		return fmt.Sprintf("%.0f%%", math.Round(p*100))
	case p >= 0.01:
		return fmt.Sprintf("%.1f%%", p*100)
	}
	return fmt.Sprintf("%.2g%%", p*100)
}

// labels is the width of what stands before each line.
var labels = terminal.Columns{11}

func labelled(s *terminal.Printer, label, format string, args ...any) {
	s.Line("%s", labels.Row(s.Paint(terminal.Dim, label), fmt.Sprintf(format, args...)))
}

// first returns a label for the first of several rows, and none for the others.
func first(i int, label string) string {
	if i == 0 {
		return label
	}
	return ""
}

// MaxShown limits how many items of each kind are shown without --all.
const MaxShown = 20

// TextOptions select how much of an answer is shown.
type TextOptions struct {
	// All shows all endpoints, however many there are; Trace each rule that looked at the packet.
	All, Trace bool
}

// Print shows an answer.
func (a *Answer) Print(s *terminal.Printer, o TextOptions) {
	from := ""
	if a.Packet.Interface != "" {
		from = ", in by " + a.Packet.Interface
	}
	labelled(s, "Packet", "%s -> %s%s", a.Packet.Source, a.key, from)
	labelled(s, "Sender", "%s", a.Origin.Why)
	if a.Objects != nil {
		a.printView(s, a.Objects, o)
		if a.Kernel != nil {
			a.printAgreement(s, o)
		}
	} else {
		a.printView(s, a.Kernel, o)
	}
	a.printStops(s)
	a.printFailures(s)
	for i, n := range a.Notes {
		labelled(s, first(i, "Note"), "%s", n)
	}
	if o.Trace && a.Kernel != nil {
		a.printTrace(s)
	}
}

// printStops says what to do about what stops the packet, and names it where the outcome does not.
func (a *Answer) printStops(s *terminal.Printer) {
	for _, f := range a.Preflight {
		named := func(v *View) bool { return v == nil || v.Why == stoppedWhy(f) }
		if !named(a.Objects) || !named(a.Kernel) {
			labelled(s, "Stopped", "%s", s.Paint(terminal.Red, f.What))
		}
		labelled(s, "Advice", "%s", f.Advice)
	}
}

// kindText describes a kind of frontend.
var kindText = map[string]string{
	"ClusterIP": "its cluster IP", "LoadBalancerIP": "a load balancer IP",
	"ExternalIP": "an external IP", "NodePort": "its node port",
}

// printView shows the answer of the objects, or that of the kernel alone.
func (a *Answer) printView(s *terminal.Printer, v *View, o TextOptions) {
	if sv := v.Service; sv != nil {
		a.printService(s, v, sv, o)
	}
	for i, r := range v.Rows {
		mark := "  "
		if r.Decides {
			mark = s.Paint(terminal.Green, "> ")
		}
		who := map[string]string{"anyone": "anyone", "pod": "pods", "node": "this node"}[r.From]
		where := map[string]string{"cluster": "endpoints anywhere", "local": "endpoints on this node"}[r.Endpoints]
		sees := "which see the sender's own address"
		if r.Masquerade {
			sees = "which see an address of this node"
		}
		labelled(s, first(i, "Policy"), "%s%s", mark, terminal.Columns{11, 24, 1}.Row(who, where, sees))
	}
	printBackends(s, v.Backends)
	a.printAffinity(s, v)
	if len(v.Chains) > 0 {
		labelled(s, "Way", "%s", strings.Join(v.Chains, " -> "))
	}
	labelled(s, "Outcome", "%s", s.Paint(terminal.Bold, v.Why))
	for i, u := range v.Unclear {
		labelled(s, first(i, "Unclear"), "%s", s.Paint(terminal.Red, u))
	}
	printNodes(s, v.Nodes)
	a.printNear(s, v)
	a.printEndpoints(s, v, o)
}

func (a *Answer) printService(s *terminal.Printer, v *View, sv *Service, o TextOptions) {
	text := s.Paint(terminal.Bold, strings.TrimSuffix(sv.Name+":"+sv.Port, ":"))
	if k, ok := kindText[sv.Kind]; ok {
		text += ", " + k
	}
	if sv.Connections != nil {
		text += ", " + connectionsText(*sv.Connections)
	}
	labelled(s, "Service", "%s", text)
	for i, c := range sv.Claims {
		labelled(s, first(i, "Conflict"), "%s", s.Paint(terminal.Red, c+" claims that address too, and is left out there"))
	}
	printSettings(s, sv.Settings)
	if v.Ranges != nil {
		labelled(s, "Ranges", "%s", v.Ranges.text(o.All))
	}
}

// text lists the ranges, and says which holds the sender. A Service may have thousands.
func (r *Ranges) text(all bool) string {
	shown := r.Ranges
	if !all {
		shown = shown[:min(MaxShown, len(shown))]
	}
	var list []string
	for _, p := range shown {
		list = append(list, p.String())
	}
	text := strings.Join(list, ", ")
	if n := len(r.Ranges) - len(shown); n > 0 {
		text += fmt.Sprintf(" and %d more (--all)", n)
	}
	if r.Holds.IsValid() {
		text += "; the sender is in " + r.Holds.String()
	}
	return text
}

func connectionsText(n uint64) string { return terminal.Plural(int(n), "connection") + " so far" }

// printAffinity shows how long a sender stays with an endpoint, and with which.
func (a *Answer) printAffinity(s *terminal.Printer, v *View) {
	f := v.Affinity
	if f == nil {
		return
	}
	label := "Affinity"
	if f.Timeout > 0 {
		labelled(s, label, "a sender stays with its endpoint for %s after its last connection", spanText(f.Timeout))
		label = ""
	}
	if f.Endpoint.IsValid() {
		labelled(s, label, "%s is bound to %s for %s more", a.Packet.Source, f.Endpoint, spanText(f.Left))
	}
}

func spanText(seconds int) string { return units.Span(time.Duration(seconds) * time.Second) }

// printNear shows the frontends that the user may have meant.
func (a *Answer) printNear(s *terminal.Printer, v *View) {
	if v.Service != nil {
		return
	}
	const most = 8
	for i, n := range v.NearMisses {
		if i == most {
			labelled(s, "", "and %d more", len(v.NearMisses)-i)
			break
		}
		text := fmt.Sprintf("%s/%s is %s", n.AddrPort(), n.Protocol, n.Service)
		if k, ok := kindText[n.Kind]; ok {
			text += ", " + k
		}
		labelled(s, first(i, "Near"), "%s", text)
	}
}

// seen describes the source address that an endpoint sees.
func (e *Endpoint) seen() string {
	if e.SourceSeen == "" {
		return ""
	}
	who := "an address of this node"
	if e.Source.IsValid() {
		who = e.Source.String() + ", this node"
	}
	switch e.sees {
	case dataplane.SourceSeenNode:
		return who
	case dataplane.SourceSeenHairpin:
		return who + ", since it reaches itself"
	case dataplane.SourceSeenClientLocal:
		return e.Source.String() + ", the sender: the endpoint is this node itself"
	}
	return e.Source.String() + ", the sender"
}

// printEndpoints shows the endpoints that can be chosen, and the excluded ones.
func (a *Answer) printEndpoints(s *terminal.Printer, v *View, o TextOptions) {
	left := v.Excluded
	if len(v.Endpoints) > 0 && !o.All { // of a Service of both families it goes without saying
		left = slices.DeleteFunc(slices.Clone(left), func(l ExcludedEndpoint) bool { return l.Reason == otherFamily })
	}
	t := endpointTable{width: len("ENDPOINT"), limit: MaxShown}
	if o.All {
		t.limit = max(len(v.Endpoints), len(left))
	}
	for _, e := range v.Endpoints {
		t.width, t.nodes = max(t.width, len(e.AddrPort().String())), max(t.nodes, len(placeText(e.Node, e.Zone)))
		t.counted = t.counted || e.Connections != nil
	}
	for _, l := range left {
		t.width, t.nodes = max(t.width, len(leftOutName(l))), max(t.nodes, len(placeText(l.Node, l.Zone)))
	}
	t.taken(s, v)
	t.left(s, left)
}

// endpointTable formats endpoints, chosen and excluded.
type endpointTable struct {
	// width and nodes are the widths of addresses and of nodes' names; nodes is 0 if none is known.
	width, nodes int
	// counted says that connections are known; limit is how many lines there are.
	counted bool
	limit   int
}

func (t *endpointTable) columns() (c terminal.Columns, third string) {
	switch {
	case t.nodes > 0:
		third = "NODE"
	case t.counted:
		third = "CONNECTIONS"
	}
	return terminal.Columns{8, t.width + 2, max(t.nodes, len(third)) + 2, 1}, third
}

func (t *endpointTable) taken(s *terminal.Printer, v *View) {
	if len(v.Endpoints) == 0 {
		return
	}
	c, third := t.columns()
	part, sees := "CHANCE", "SEES"
	if v.Scheduler != "" {
		part = "WEIGHT"
	}
	if v.Endpoints[0].SourceSeen == "" {
		sees = ""
	}
	s.Line("")
	s.Line("  %s", s.Paint(terminal.Dim, c.Row(part, "ENDPOINT", third, sees)))
	for _, e := range v.Endpoints[:min(t.limit, len(v.Endpoints))] {
		part, middle := percent(e.Chance), placeText(e.Node, e.Zone)
		if v.Scheduler != "" {
			part = fmt.Sprint(e.Weight)
		}
		if t.nodes == 0 && e.Connections != nil {
			middle = fmt.Sprint(*e.Connections)
		}
		s.Line("  %s", c.Row(part, e.AddrPort().String(), middle, e.seen()))
		if e.Trouble != "" && !v.stopped() { // by the same for all endpoints
			s.Line("  %s", c.Row("", "", "", s.Paint(terminal.Red, e.Trouble)))
		}
		if e.Kept != "" {
			s.Line("  %s", c.Row("", "", "", s.Paint(terminal.Red, e.Kept)))
		}
		if e.Starting != "" {
			s.Line("  %s", c.Row("", "", "", e.Starting))
		}
	}
	t.more(s, len(v.Endpoints))
}

func (t *endpointTable) left(s *terminal.Printer, left []ExcludedEndpoint) {
	if len(left) == 0 {
		return
	}
	c, third := t.columns()
	if third != "NODE" {
		third = ""
	}
	s.Line("")
	s.Line("  %s", s.Paint(terminal.Dim, c.Row("NOT", "ENDPOINT", third, "WHY")))
	for _, l := range left[:min(t.limit, len(left))] {
		s.Line("  %s", c.Row("-", leftOutName(l), placeText(l.Node, l.Zone), l.Why))
	}
	t.more(s, len(left))
}

func (t *endpointTable) more(s *terminal.Printer, n int) {
	if n > t.limit {
		s.Line("  and %d more (--all)", n-t.limit)
	}
}

// leftOutName gives an endpoint's address, or the slice that holds several.
func leftOutName(l ExcludedEndpoint) string {
	if !l.Address.IsValid() {
		return "slice " + l.Slice
	}
	return netip.AddrPortFrom(l.Address, l.Port).String()
}

// revision says which one of a table was asked; rules of iptables have none.
func (v *View) revision() string {
	if v.Revision == 0 {
		return ""
	}
	return fmt.Sprintf(" (revision %d)", v.Revision)
}

// printAgreement shows the kernel's answer beside that of the objects.
func (a *Answer) printAgreement(s *terminal.Printer, o TextOptions) {
	k := a.Kernel
	s.Line("")
	if a.Agree() {
		labelled(s, "Kernel", "%s, by %s%s", s.Paint(terminal.Green, "does the same"), strings.Join(k.Chains, " -> "),
			k.revision())
		if k.Affinity != nil && k.Affinity.Endpoint.IsValid() {
			bound := &View{Affinity: &Affinity{Endpoint: k.Affinity.Endpoint, Left: k.Affinity.Left}}
			a.printAffinity(s, bound)
		}
		if k.Service != nil && k.Service.Connections != nil {
			labelled(s, "", "%s", connectionsText(*k.Service.Connections))
		}
		a.printUnclear(s, k)
		return
	}
	labelled(s, "Kernel", "%s%s", s.Paint(terminal.Red, "does something else"), k.revision())
	for i, d := range a.Disagreements {
		if i == MaxShown && !o.All {
			labelled(s, "", "and %d more (--all)", len(a.Disagreements)-i)
			break
		}
		labelled(s, "", "%s", d)
	}
	s.Line("")
	s.Line("%s", s.Paint(terminal.Dim, "What the kernel does:"))
	a.printView(s, k, o)
}

func (a *Answer) printUnclear(s *terminal.Printer, v *View) {
	for _, u := range v.Unclear {
		labelled(s, "Unclear", "%s", s.Paint(terminal.Red, u))
	}
}

// printTrace shows the rules that looked at the packet.
func (a *Answer) printTrace(s *terminal.Printer) {
	s.Line("")
	s.Line("%s", s.Paint(terminal.Dim, "The rules that look at the packet; > marks those that match"))
	for _, t := range a.Kernel.Steps {
		mark := " "
		if t.Matched {
			mark = s.Paint(terminal.Green, ">")
		}
		s.Line("%s %s", mark, terminal.Columns{24, 1}.Row(t.Chain, t.Rule))
		for i, f := range t.Found {
			if i == 4 {
				s.Line("  %s", terminal.Columns{28, 1}.Row("", fmt.Sprintf("and %d more", len(t.Found)-i)))
				break
			}
			s.Line("  %s", terminal.Columns{28, 1}.Row("", s.Paint(terminal.Cyan, "{ "+f+" }")))
		}
	}
}
