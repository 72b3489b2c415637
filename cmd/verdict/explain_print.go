package main

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// podsText says in a word what tells pods from others.
func podsText(p dataplane.Pods) string {
	switch {
	case p.Interface != "":
		return "interface " + p.Interface
	case p.InterfacePrefix != "":
		return "an interface " + p.InterfacePrefix + "*"
	}
	return p.CIDR.String()
}

// originOf says what a sender is to the rows of policy, and why. By is where it is written what tells pods from others.
func originOf(s sender, pods dataplane.Pods, node bool, by string) (o originJSON) {
	addr := s.addr.String()
	if s.standsFor != "" {
		addr = fmt.Sprintf("%s, which stands for %s,", addr, s.standsFor)
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
		o.Why = addr + " is no address of this node; pods cannot be told from others (no --cluster-cidr): outside"
	case byInterface && s.iface == "":
		o.Why = fmt.Sprintf("%s is no address of this node, and its interface is not known, so not %s (%s): outside",
			addr, podsText(pods), by)
	case byInterface:
		o.Why = fmt.Sprintf("%s comes in by %s, not by %s (%s): outside", addr, s.iface, podsText(pods), by)
	default:
		o.Why = fmt.Sprintf("%s is no address of this node, and not in %s (%s): outside", addr, pods.CIDR, by)
	}
	return o
}

// why says in a sentence what the objects ask for.
func (a *answer) why(v *viewJSON) string {
	x, dst := a.explanation, a.explanation.Question.Key
	switch x.Cause {
	case dataplane.FrontendFound:
		return sentTo(v.Taken)
	case dataplane.FrontendScheduled:
		return scheduledTo(v)
	case dataplane.NoLocalEndpoints:
		policy := "internalTrafficPolicy"
		if x.Frontend.Kind != dataplane.ClusterIP {
			policy = "externalTrafficPolicy"
		}
		return "dropped: no endpoint on this node can be used, and " + policy + " is Local"
	case dataplane.UnusedPort:
		return fmt.Sprintf("rejected: %s is a cluster IP, and has no port %d/%s", dst.Addr, dst.Port, dst.Protocol)
	case dataplane.Unallocated:
		return fmt.Sprintf("dropped: no Service has %s, which lies in the ServiceCIDR %s", dst.Addr, x.CIDR)
	case dataplane.SourceRefused:
		return fmt.Sprintf("dropped: %s is in none of the Service's loadBalancerSourceRanges", a.sender.addr)
	case dataplane.NotService:
		if len(x.Unserved) > 0 {
			family := map[ipfamily.Family]string{ipfamily.IPv4: "IPv4", ipfamily.IPv6: "IPv6"}[a.family]
			return fmt.Sprintf("untouched: %s names that address, but has no %s cluster IP, or no port", x.Unserved[0], family)
		}
	}
	return plainWhy(x.Cause, dst.Addr)
}

// whyKernel says in a sentence what the kernel does.
func (a *answer) whyKernel(v *viewJSON, cause dataplane.Cause) string {
	switch {
	case v.Outcome == "several":
		whole := 0.0
		for _, e := range v.Taken {
			whole += e.Chance
		}
		return fmt.Sprintf("%s, but %s of the connections find an empty slot and are not translated", sentTo(v.Taken), percent(1-whole))
	case cause == dataplane.FrontendFound:
		return sentTo(v.Taken)
	case cause == dataplane.FrontendScheduled:
		return scheduledTo(v)
	}
	return plainWhy(cause, a.explanationAddr())
}

func (a *answer) explanationAddr() netip.Addr { return netip.MustParseAddr(a.Packet.Destination) }

// plainWhy says what can be said without the objects.
func plainWhy(c dataplane.Cause, dst netip.Addr) string {
	switch c {
	case dataplane.NoEndpoints:
		return "rejected: the Service has no endpoint that can be used"
	case dataplane.NoLocalEndpoints:
		return "dropped: no endpoint on this node can be used, and the traffic policy is Local"
	case dataplane.UnusedPort:
		return fmt.Sprintf("rejected: %s is a cluster IP, and has no such port", dst)
	case dataplane.Unallocated:
		return fmt.Sprintf("dropped: no Service has %s, which lies in a ServiceCIDR", dst)
	case dataplane.SourceRefused:
		return "dropped: the sender is in none of the Service's loadBalancerSourceRanges"
	case dataplane.FromOutsideToLoopback:
		return fmt.Sprintf("dropped: %s is this node's loopback, and the packet comes from elsewhere", dst)
	}
	return "untouched: no Service answers there, so Verdict lets the packet go on as it came"
}

func scheduledTo(v *viewJSON) string {
	return fmt.Sprintf("left to IPVS, which chooses from %s by %s", plural(len(v.Taken), "endpoint"), v.Scheduler)
}

func sentTo(taken []endpointJSON) string {
	text := fmt.Sprintf("sent to one of %d endpoints", len(taken))
	if len(taken) == 1 {
		text = "sent to the only endpoint"
	}
	if len(taken) > 0 && taken[0].Draining {
		text += "; none is ready, and it serves while it terminates"
	}
	return text
}

// percent writes a part of 1 with as many digits as it needs.
func percent(p float64) string {
	switch {
	case p >= 0.1 || p == 0:
		return fmt.Sprintf("%.0f%%", math.Round(p*100))
	case p >= 0.01:
		return fmt.Sprintf("%.1f%%", p*100)
	}
	return fmt.Sprintf("%.2g%%", p*100)
}

// spanText writes whole seconds as 30m, 1h5m or 12s.
func spanText(n int) string {
	text := (time.Duration(n) * time.Second).String()
	text = strings.TrimSuffix(text, "0s")
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	if text == "" {
		return "0s"
	}
	return text
}

// labels is the width of what stands before each line.
var labels = columns{11}

func (s *show) labelled(label, format string, args ...any) {
	s.line("%s", labels.row(s.paint(dim, label), fmt.Sprintf(format, args...)))
}

// maxShown is how many endpoints of each kind are shown without --all.
const maxShown = 20

// print shows an answer.
func (a *answer) print(s *show, o *explainOptions) {
	from := ""
	if a.Packet.Interface != "" {
		from = ", in by " + a.Packet.Interface
	}
	dst := netip.AddrPortFrom(a.explanationAddr(), a.Packet.Port)
	s.labelled("Packet", "%s -> %s/%s%s", a.Packet.Source, dst, a.Packet.Protocol, from)
	s.labelled("Sender", "%s", a.Origin.Why)
	if a.Objects != nil {
		a.printView(s, a.Objects, o)
		if a.Kernel != nil {
			a.printAgreement(s, o)
		}
	} else {
		a.printView(s, a.Kernel, o)
	}
	for i, n := range a.Notes {
		label := "Note"
		if i > 0 {
			label = ""
		}
		s.labelled(label, "%s", n)
	}
	if o.trace && a.Kernel != nil {
		a.printTrace(s)
	}
}

// kindText says what a frontend is.
var kindText = map[string]string{
	"ClusterIP": "its cluster IP", "LoadBalancerIP": "a load balancer IP", "ExternalIP": "an external IP", "NodePort": "its node port",
}

// printView shows the answer of the objects, or that of the kernel alone.
func (a *answer) printView(s *show, v *viewJSON, o *explainOptions) {
	if sv := v.Service; sv != nil {
		a.printService(s, v, sv)
	}
	for i, r := range v.Rows {
		label, mark := "", "  "
		if i == 0 {
			label = "Policy"
		}
		if r.Decides {
			mark = s.paint(green, "> ")
		}
		who := map[string]string{"anyone": "anyone", "pod": "pods", "node": "this node"}[r.From]
		where := map[string]string{"cluster": "endpoints anywhere", "local": "endpoints on this node"}[r.Endpoints]
		sees := "which see the sender's own address"
		if r.Masquerade {
			sees = "which see an address of this node"
		}
		s.labelled(label, "%s%s", mark, columns{11, 24, 1}.row(who, where, sees))
	}
	a.printAffinity(s, v)
	if len(v.Way) > 0 {
		s.labelled("Way", "%s", strings.Join(v.Way, " -> "))
	}
	s.labelled("Outcome", "%s", s.paint(bold, v.Why))
	for i, u := range v.Unclear {
		label := ""
		if i == 0 {
			label = "Unclear"
		}
		s.labelled(label, "%s", s.paint(red, u))
	}
	a.printNear(s, v)
	a.printEndpoints(s, v, o)
}

func (a *answer) printService(s *show, v *viewJSON, sv *serviceJSON) {
	name := sv.Name
	if sv.Port != "" {
		name += ":" + sv.Port
	}
	text := s.paint(bold, name)
	if k, ok := kindText[sv.Kind]; ok {
		text += ", " + k
	}
	if sv.Connections != nil {
		text += fmt.Sprintf(", %d connections so far", *sv.Connections)
	}
	s.labelled("Service", "%s", text)
	for i, c := range sv.Claims {
		label := ""
		if i == 0 {
			label = "Conflict"
		}
		s.labelled(label, "%s", s.paint(red, c+" claims that address too, and is left out there"))
	}
	if r := v.Ranges; r != nil {
		text := strings.Join(r.Ranges, ", ")
		if r.Holds != "" {
			text += "; the sender is in " + r.Holds
		}
		s.labelled("Ranges", "%s", text)
	}
}

// printAffinity shows how long a sender stays with an endpoint, and with which.
func (a *answer) printAffinity(s *show, v *viewJSON) {
	f := v.Affinity
	if f == nil {
		return
	}
	label := "Affinity"
	if f.Seconds > 0 {
		s.labelled(label, "a sender stays with its endpoint for %s after its last connection", spanText(f.Seconds))
		label = ""
	}
	if f.Endpoint != "" {
		s.labelled(label, "%s is bound to %s for %s more", a.Packet.Source, f.Endpoint, spanText(f.Remaining))
	}
}

// printNear shows what one may have meant.
func (a *answer) printNear(s *show, v *viewJSON) {
	if v.Service != nil {
		return
	}
	const most = 8
	for i, n := range v.Near {
		label := ""
		if i == 0 {
			label = "Near"
		}
		if i == most {
			s.labelled(label, "and %d more", len(v.Near)-i)
			break
		}
		text := fmt.Sprintf("%s/%s is %s", netip.AddrPortFrom(netip.MustParseAddr(n.Address), n.Port), n.Protocol, n.Service)
		if k, ok := kindText[n.Kind]; ok {
			text += ", " + k
		}
		s.labelled(label, "%s", text)
	}
}

// seen says which source address an endpoint sees.
func seen(e endpointJSON) string {
	who := "an address of this node"
	if e.Source != "" {
		who = e.Source + ", this node"
	}
	switch e.Sees {
	case "":
		return ""
	case dataplane.SeesNode.String():
		return who
	case dataplane.SeesNodeHairpin.String():
		return who + ", since it reaches itself"
	case dataplane.SeesClientHere.String():
		return e.Source + ", the sender: the endpoint is this node itself"
	}
	return e.Source + ", the sender"
}

// printEndpoints shows the endpoints, and those that are none.
func (a *answer) printEndpoints(s *show, v *viewJSON, o *explainOptions) {
	left := v.LeftOut
	if len(v.Taken) > 0 && !o.all { // of a Service of both families it goes without saying
		left = slices.DeleteFunc(slices.Clone(left), func(l leftOutJSON) bool { return l.Reason == otherFamily })
	}
	t := endpointTable{width: len("ENDPOINT"), limit: maxShown}
	if o.all {
		t.limit = max(len(v.Taken), len(left))
	}
	for _, e := range v.Taken {
		t.width, t.nodes = max(t.width, len(addrPortOf(e).String())), max(t.nodes, len(e.Node))
		t.counted = t.counted || e.Connections != nil
	}
	for _, l := range left {
		t.width, t.nodes = max(t.width, len(leftOutName(l))), max(t.nodes, len(l.Node))
	}
	t.taken(s, v)
	t.left(s, left)
}

// endpointTable lays out endpoints, and those that are none.
type endpointTable struct {
	// width and nodes are the widths of addresses and of nodes' names; nodes is 0 if none is known.
	width, nodes int
	// counted says that connections are known; limit is how many lines there are.
	counted bool
	limit   int
}

func (t *endpointTable) columns() (c columns, third string) {
	switch {
	case t.nodes > 0:
		third = "NODE"
	case t.counted:
		third = "CONNECTIONS"
	}
	return columns{8, t.width + 2, max(t.nodes, len(third)) + 2, 1}, third
}

func (t *endpointTable) taken(s *show, v *viewJSON) {
	if len(v.Taken) == 0 {
		return
	}
	c, third := t.columns()
	part, sees := "CHANCE", "SEES"
	if v.Scheduler != "" {
		part = "WEIGHT"
	}
	if v.Taken[0].Sees == "" {
		sees = ""
	}
	s.line("")
	s.line("  %s", s.paint(dim, c.row(part, "ENDPOINT", third, sees)))
	for _, e := range v.Taken[:min(t.limit, len(v.Taken))] {
		part, middle := percent(e.Chance), e.Node
		if v.Scheduler != "" {
			part = fmt.Sprint(e.Weight)
		}
		if t.nodes == 0 && e.Connections != nil {
			middle = fmt.Sprint(*e.Connections)
		}
		s.line("  %s", c.row(part, addrPortOf(e).String(), middle, seen(e)))
	}
	t.more(s, len(v.Taken))
}

func (t *endpointTable) left(s *show, left []leftOutJSON) {
	if len(left) == 0 {
		return
	}
	c, third := t.columns()
	if third != "NODE" {
		third = ""
	}
	s.line("")
	s.line("  %s", s.paint(dim, c.row("NOT", "ENDPOINT", third, "WHY")))
	for _, l := range left[:min(t.limit, len(left))] {
		s.line("  %s", c.row("-", leftOutName(l), l.Node, l.Why))
	}
	t.more(s, len(left))
}

func (t *endpointTable) more(s *show, n int) {
	if n > t.limit {
		s.line("  and %d more (--all)", n-t.limit)
	}
}

// leftOutName gives an endpoint's address, or the slice that holds several.
func leftOutName(l leftOutJSON) string {
	if l.Address == "" {
		return "slice " + l.Slice
	}
	return netip.AddrPortFrom(netip.MustParseAddr(l.Address), l.Port).String()
}

// revision says which one of a table was asked; rules of iptables have none.
func (v *viewJSON) revision() string {
	if v.Revision == 0 {
		return ""
	}
	return fmt.Sprintf(" (revision %d)", v.Revision)
}

// printAgreement shows the kernel's answer beside that of the objects.
func (a *answer) printAgreement(s *show, o *explainOptions) {
	k := a.Kernel
	s.line("")
	if *a.Agree {
		s.labelled("Kernel", "%s, by %s%s", s.paint(green, "does the same"), strings.Join(k.Way, " -> "), k.revision())
		if k.Affinity != nil && k.Affinity.Endpoint != "" {
			bound := &viewJSON{Affinity: &affinityJSON{Endpoint: k.Affinity.Endpoint, Remaining: k.Affinity.Remaining}}
			a.printAffinity(s, bound)
		}
		if k.Service != nil && k.Service.Connections != nil {
			s.labelled("", "%d connections so far", *k.Service.Connections)
		}
		a.printUnclear(s, k)
		return
	}
	s.labelled("Kernel", "%s%s", s.paint(red, "does something else"), k.revision())
	for i, d := range a.Disagreements {
		if i == maxShown && !o.all {
			s.labelled("", "and %d more (--all)", len(a.Disagreements)-i)
			break
		}
		s.labelled("", "%s", d)
	}
	s.line("")
	s.line("%s", s.paint(dim, "What the kernel does:"))
	a.printView(s, k, o)
}

func (a *answer) printUnclear(s *show, v *viewJSON) {
	for _, u := range v.Unclear {
		s.labelled("Unclear", "%s", s.paint(red, u))
	}
}

// printTrace shows the rules that looked at the packet.
func (a *answer) printTrace(s *show) {
	s.line("")
	s.line("%s", s.paint(dim, "The rules that look at the packet; > marks those that match"))
	for _, t := range a.Kernel.Trace {
		mark := " "
		if t.Matched {
			mark = s.paint(green, ">")
		}
		s.line("%s %s", mark, columns{24, 1}.row(t.Chain, t.Rule))
		for i, f := range t.Found {
			if i == 4 {
				s.line("  %s", columns{28, 1}.row("", fmt.Sprintf("and %d more", len(t.Found)-i)))
				break
			}
			s.line("  %s", columns{28, 1}.row("", s.paint(cyan, "{ "+f+" }")))
		}
	}
}
