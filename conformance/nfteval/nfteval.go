// Package nfteval answers what becomes of a packet from what `nft --json list ruleset` says alone. It is a second
// opinion: it shares no code with what writes the rules or explains them, and knows nothing of Services.
//
//	rules, err := nfteval.Parse(stdout) // of nft --json list ruleset
//	outcomes, err := rules.Ask(nfteval.Question{
//		Iif: "veth-a1", Src: netip.MustParseAddrPort("10.244.1.2:40000"),
//		Protocol: "tcp", Dst: netip.MustParseAddrPort("10.96.0.10:80"),
//		Local: []netip.Addr{netip.MustParseAddr("192.0.2.10")},
//	})
//	for _, o := range outcomes {
//		fmt.Println(o) // 1/2 delivered to 10.244.1.3:8080
//	}
//
// A Question is the first packet of a connection. It goes through the base chains of all tables of its family and of
// inet, in the order of the hooks and of their priorities, as the kernel would have it:
//
//   - from an interface: prerouting, then input if its destination is local by then, else forward and postrouting;
//     if it stays on a bridge that shows netfilter what it carries, postrouting is told no interface by which it came
//     in;
//   - from a process of this host: output, postrouting; and if the destination is local, by lo through prerouting and
//     input too.
//
// All nat chains of a hook run together, at the priority that conntrack's NAT has there (-100 for destinations, 100 for
// sources) whatever their own is, which only sorts them among themselves; and only once for each connection. Connection
// tracking begins at priority -200: before that, the state is invalid and other fields of ct match nothing.
//
// Where a rule draws lots (numgen, symhash, jhash without a seed), every lot is followed, and has its probability.
// symhash and numgen inc count as if each of their values was as likely as another: that is true of many clients, not
// of one. Where chains have the same priority in a hook, the listing does not say which runs first: if that makes a
// difference, it is an error.
//
// What the evaluator does not know is an error that names the rule, once a packet comes to it; a rule that no packet
// comes to may be anything. It knows no routes, no sysctls, and neither ingress nor egress hooks: where a packet would
// meet one, that is an error.
//
// The listings of nft 1.0.6, 1.1.3 and 1.1.7 are known. 1.0.6 has no JSON for the update of a map: it puts the
// statement's text instead, which is read, and warns on standard error. It leaves out that a set is dynamic, and names
// a set's types where later ones give expressions. It crashes, whatever the format, on an anonymous map of lots (numgen
// ... map { ... }) that a later nft wrote.
package nfteval

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
)

// Question is the first packet of a connection.
type Question struct {
	// Iif is the interface by which it comes in; empty if a process of this host sends it.
	Iif string
	// Oif is the interface by which it leaves, if rules ask for it; empty if that is not known.
	Oif string
	// Src and Dst have to be of one family, and not IPv4 in IPv6.
	Src, Dst netip.AddrPort
	// Protocol is tcp, udp or sctp.
	Protocol string
	// Mark is the packet's mark as it comes in.
	Mark uint32
	// Local are this host's addresses. Loopback addresses are local anyway.
	Local []netip.Addr
	// Bridged, if Iif is a bridge that shows netfilter what it carries (br_netfilter), are the addresses behind it: what
	// is translated from another address to one of them stays on the bridge.
	Bridged []netip.Prefix
	// State is what earlier packets left in sets: Updates of earlier Outcomes. It comes on top of what the listing holds.
	State []Update
}

// Verdict is what becomes of a packet in the end.
type Verdict string

// The verdicts.
const (
	// Delivered: it goes on to its destination, which may be this host.
	Delivered Verdict = "delivered"
	// Refused: the sender is told that nobody is there.
	Refused Verdict = "refused"
	// Dropped: the sender is told nothing.
	Dropped Verdict = "dropped"
)

// Outcome is something that may become of a packet. Those of one question differ in more than their Trace, and their
// probabilities add up to 1.
type Outcome struct {
	Verdict Verdict
	// Refusal is, if it is Refused, with what: "icmp port-unreachable", "tcp reset".
	Refusal string
	// To is the destination in the end, of a packet that is Delivered.
	To netip.AddrPort
	// Translated says that To was set by a rule; it may be what it was before.
	Translated bool
	// Masqueraded says that the source is an address of this host's, as masquerade picks it. Source is what a snat rule
	// makes of it; the zero Addr if none did.
	Masqueraded bool
	Source      netip.Addr
	// Mark and Priority are the packet's in the end.
	Mark, Priority uint32
	// Probability is between 0, exclusive, and 1.
	Probability float64
	// Updates are what the packet leaves in sets, in order.
	Updates []Update
	// Trace are the rules that were carried out, for one of the ways that lead here.
	Trace []Step
}

// String says it in a line: "0.5 delivered to 10.244.1.3:8080, masqueraded".
func (o Outcome) String() string {
	text := fmt.Sprintf("%.4g %s", o.Probability, o.Verdict)
	switch {
	case o.Verdict == Refused:
		text += " by " + o.Refusal
	case o.Verdict == Delivered:
		text += " to " + o.To.String()
		if o.Masqueraded {
			text += ", masqueraded"
		}
		if o.Source.IsValid() {
			text += ", source " + o.Source.String()
		}
	}
	return text
}

// Step is a rule that was carried out.
type Step struct {
	Hook                 string
	Family, Table, Chain string
	Handle               int64
	// Rule is its text, as nft would write it; or "policy drop".
	Rule string
	// Found are the elements that it found in sets and maps.
	Found []string
}

// String gives the step in a line: "prerouting ip verdict frontends: ip daddr . ... vmap @services {10.96.0.10 . tcp .
// 80 : goto pick-2}".
func (s Step) String() string {
	text := fmt.Sprintf("%s %s %s %s: %s", s.Hook, s.Family, s.Table, s.Chain, s.Rule)
	for _, f := range s.Found {
		text += " {" + f + "}"
	}
	return text
}

// Update is an element that a rule adds to a set or map, or deletes from it.
type Update struct {
	Family, Table, Set string
	// Key and Data are as nft writes them: "10.244.1.2 . 5655:8476". Data is empty if it is a set.
	Key, Data string
	Delete    bool
}

// Ask gives all that may become of a packet, the likeliest first.
func (r *Ruleset) Ask(q Question) ([]Outcome, error) {
	if err := q.check(); err != nil {
		return nil, err
	}
	outcomes, err := r.ask(&q, false)
	if err != nil || !r.hasPriorityTies(&q) {
		return outcomes, err
	}
	others, err := r.ask(&q, true)
	if err != nil {
		return nil, err
	}
	if !slices.EqualFunc(outcomes, others, same) {
		return nil, fmt.Errorf("nfteval: chains of one hook have the same priority, and which of them runs first "+
			"makes a difference: %v or %v", outcomes, others)
	}
	return outcomes, nil
}

// same compares all but the traces.
func same(a, b Outcome) bool {
	return a.key() == b.key() && math.Abs(a.Probability-b.Probability) < 1e-9
}

func (q *Question) check() error {
	_, known := protocols[q.Protocol]
	switch src, dst := q.Src.Addr(), q.Dst.Addr(); {
	case !src.IsValid() || !dst.IsValid():
		return errors.New("nfteval: question: Src and Dst need an address and a port")
	case src.Is4() != dst.Is4() || src.Is4In6() || dst.Is4In6():
		return fmt.Errorf("nfteval: question: Src %s and Dst %s are not of one family", q.Src, q.Dst)
	case !known:
		return fmt.Errorf("nfteval: question: Protocol %q is none of tcp, udp and sctp", q.Protocol)
	case dst.IsMulticast():
		return fmt.Errorf("nfteval: question: Dst %s is multicast, which is not followed", q.Dst)
	}
	return nil
}

// ask follows the packet once. Reverse turns the order of chains round that have the same priority.
func (r *Ruleset) ask(q *Question, reverse bool) ([]Outcome, error) {
	w := evaluation{rules: r, question: q, reverse: reverse, family: "ip"}
	if q.Dst.Addr().Is6() {
		w.family = "ip6"
	}
	p := packet{
		src: q.Src, dst: q.Dst, origSrc: q.Src, origDst: q.Dst, iif: q.Iif, mark: q.Mark, probability: 1,
		updates: slices.Clip(q.State),
	}
	path := []hookStep{{hook: "output"}, {hook: "postrouting"}, {hook: "prerouting", loopback: true},
		{hook: "input", loopback: true}}
	if q.Iif != "" {
		path = []hookStep{{hook: "prerouting"}, {hook: "input", local: yes}, {hook: "forward", local: no},
			{hook: "postrouting", local: no}}
	}
	if err := w.rejectUnsupportedHooks(); err != nil {
		return nil, err
	}
	live := []*packet{&p}
	for _, l := range path {
		var next []*packet
		for _, p := range live {
			list, err := w.runHook(l, p)
			if err != nil {
				return nil, fmt.Errorf("nfteval: %w", err)
			}
			next = append(next, list...)
		}
		live = next
	}
	for _, p := range live {
		w.addOutcome(p, Outcome{Verdict: Delivered, To: p.dst, Translated: p.translated, Masqueraded: p.masqueraded,
			Source: p.source})
	}
	return w.result(), nil
}

// hookStep is one hook on the way.
type hookStep struct {
	hook string
	// local says that only packets whose destination is this host, or is not, come this way.
	local tristate
	// loopback says that it is that of a packet that went out to this host itself.
	loopback bool
}

// tristate is yes, no, or either.
type tristate uint8

const (
	either tristate = iota
	yes
	no
)

func (w *evaluation) runHook(l hookStep, p *packet) ([]*packet, error) {
	local := w.question.local(p.dst.Addr())
	if l.loopback && !local || l.local == yes && !local || l.local == no && local {
		return []*packet{p}, nil
	}
	q := *p
	q.hook, q.oif = l.hook, w.question.Oif
	bridged := !local && w.question.bridged(p)
	switch {
	case l.loopback:
		q.iif, q.oif = "lo", ""
	case bridged && l.hook == "postrouting":
		q.iif, q.oif = "", p.iif
	case bridged && l.hook == "forward":
		q.oif = p.iif
	case l.hook == "prerouting" || l.hook == "input":
		q.oif = ""
	case local:
		q.oif = "lo"
	case q.oif == "":
		q.oif = unknownInterface
	}
	if l.hook == "forward" && w.family == "ip" && !bridged {
		q.priority = 0 // IPv4 forwarding sets it by the packet's type of service, which is 0 here; IPv6 leaves it
	}
	return w.runUnits(&q)
}

// unknownInterface stands for an interface that was not told. No interface can have that name.
const unknownInterface = "?/"

func (q *Question) local(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(q.Local, a) }

// bridged says that a packet stays on the bridge by which it came in.
func (q *Question) bridged(p *packet) bool {
	to := p.dst.Addr()
	behind := func(r netip.Prefix) bool { return r.Contains(to) }
	return p.translated && to != p.origDst.Addr() && slices.ContainsFunc(q.Bridged, behind)
}

// addOutcome notes an outcome.
func (w *evaluation) addOutcome(p *packet, o Outcome) {
	o.Probability, o.Mark, o.Priority, o.Trace = p.probability, p.mark, p.priority, p.trace
	o.Updates = p.updates[len(w.question.State):]
	w.outcomes = append(w.outcomes, o)
}

// key tells outcomes apart.
func (o Outcome) key() string {
	return fmt.Sprint(o.Verdict, o.Refusal, o.To, o.Translated, o.Masqueraded, o.Source, o.Mark, o.Priority, o.Updates)
}

// result adds up outcomes that are the same.
func (w *evaluation) result() []Outcome {
	index := map[string]int{}
	var list []Outcome
	for _, o := range w.outcomes {
		k := o.key()
		if i, ok := index[k]; ok {
			list[i].Probability += o.Probability
			continue
		}
		index[k] = len(list)
		list = append(list, o)
	}
	slices.SortStableFunc(list, func(a, b Outcome) int {
		if d := b.Probability - a.Probability; math.Abs(d) > 1e-9 {
			return cmp.Compare(d, 0)
		}
		return strings.Compare(a.key(), b.key())
	})
	return list
}
