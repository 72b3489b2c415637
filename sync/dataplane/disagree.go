package dataplane

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/units"
)

// Disagreement says in what the objects and the kernel differ about one packet. At most one of Endpoint
// and Affinity is set; if none is, the packet's fate is another one.
type Disagreement struct {
	// Endpoint is whom it is about; a node has port 0.
	Endpoint netip.AddrPort
	// Affinity says that the sender is remembered for another time.
	Affinity bool
	// Objects and Kernel say in words what each of them wants.
	Objects, Kernel string
}

func (d Disagreement) String() string {
	about := ""
	switch {
	case d.Endpoint.IsValid() && d.Endpoint.Port() == 0:
		about = d.Endpoint.Addr().String() + ": "
	case d.Endpoint.IsValid():
		about = d.Endpoint.String() + ": "
	}
	if d.Affinity {
		about = "session affinity: "
	}
	return about + "the objects say " + d.Objects + ", the kernel " + d.Kernel
}

// Disagreements compares what the objects ask for with the way of the same packet through the kernel.
func (t *Trace) Disagreements(x *Explanation) []Disagreement {
	if x.Port != nil && (t.Cause == OverLimit && x.Port.Limits.Open > 0 ||
		t.Cause == ClientOverLimit && x.Port.Limits.ClientOpen > 0) {
		return nil // how many connections are open, the objects do not know
	}
	if x.Onward != nil {
		return t.onwardDisagreements(x)
	}
	return t.disagreements(x)
}

// onwardDisagreements compares which nodes clients are forwarded to, and then what becomes of this node's share.
func (t *Trace) onwardDisagreements(x *Explanation) (out []Disagreement) {
	const there, not = "a node", "none of the nodes"
	rest := *t
	rest.Endings = nil
	chances := map[netip.Addr]float64{}
	own := 0.0
	for _, e := range t.Endings {
		if chance := float64(e.Share) / float64(e.Of); e.Outcome == Forwarded {
			chances[e.Endpoint.Addr()] += chance
		} else {
			rest.Endings, own = append(rest.Endings, e), own+chance
		}
	}
	off := func(is, want float64) bool { // slots are as many as there are
		return !x.Onward.ByAddr && math.Abs(is-want) > 1/float64(x.Onward.Slots())
	}
	for i, n := range x.Onward.Nodes {
		is, held := chances[n.Addr]
		delete(chances, n.Addr)
		at := netip.AddrPortFrom(n.Addr, 0)
		switch want := x.Onward.Share(i); {
		case n.Own:
			if off(own, want) {
				out = append(out, Disagreement{Objects: percentOf(want) + " stay here", Kernel: percentOf(own)})
			}
		case !held && !x.Onward.ByAddr && want > 0:
			out = append(out, Disagreement{Endpoint: at, Objects: there, Kernel: not})
		case held && off(is, want):
			out = append(out, Disagreement{Endpoint: at, Objects: percentOf(want), Kernel: percentOf(is)})
		}
	}
	for a := range chances {
		out = append(out, Disagreement{Endpoint: netip.AddrPortFrom(a, 0), Objects: not, Kernel: there})
	}
	switch {
	case len(rest.Endings) == 0: // which is the other nodes' alone, or said above
		return out
	case x.Cause == ForwardedToNode:
		return append(out, Disagreement{Objects: Forwarded.String(), Kernel: rest.Outcome()})
	}
	const whole = 1 << 20
	for i := range rest.Endings {
		e := &rest.Endings[i]
		e.Share, e.Of = int(math.Round(float64(e.Share)/float64(e.Of)/own*whole)), whole
	}
	return append(out, rest.disagreements(x)...)
}

func percentOf(share float64) string { return fmt.Sprintf("%.3g %% of clients", 100*share) }

// disagreements is Disagreements of what this node translates itself.
func (t *Trace) disagreements(x *Explanation) []Disagreement {
	want := x.Cause.Outcome()
	sent := func(e Ending) bool { return e.Outcome == Sent }
	if fate := t.Outcome(); fate != want.String() && !(want == Sent && slices.ContainsFunc(t.Endings, sent)) {
		return []Disagreement{{Objects: want.String(), Kernel: fate}}
	}
	if want != Sent {
		return nil
	}
	var out []Disagreement
	remembered, taken := x.Port.Affinity, map[netip.AddrPort]bool{}
	for _, c := range x.Endpoints {
		taken[c.AddrPort] = taken[c.AddrPort] || c.Reason.Included()
	}
	refused := x.Refused()
	for _, e := range t.Endings {
		switch {
		case e.Outcome == Rejected && e.alike(refused, RefusedOf, refused > 0):
			refused = 0
		case e.Outcome != Sent:
			out = append(out, Disagreement{Objects: want.String(),
				Kernel: fmt.Sprintf("%s in %d of %d cases", e.Outcome, e.Share, e.Of)})
		case taken[e.Endpoint] && e.Remember != x.Port.Affinity:
			remembered = e.Remember
		}
	}
	if refused > 0 {
		out = append(out, Disagreement{Objects: fmt.Sprintf("%s in %d of %d cases", Rejected, refused, RefusedOf),
			Kernel: want.String()})
	}
	if remembered != x.Port.Affinity {
		out = append(out, Disagreement{Affinity: true, Objects: rememberText(x.Port.Affinity),
			Kernel: rememberText(remembered)})
	}
	return append(out, t.endpointDisagreements(x)...)
}

func rememberText(d time.Duration) string {
	if d == 0 {
		return "none"
	}
	return units.Span(d)
}

// endpointDisagreements compares the endpoints, their chances and what they see.
func (t *Trace) endpointDisagreements(x *Explanation) (out []Disagreement) {
	const there, not = "an endpoint", "none of the endpoints"
	_, stuck := t.Bound()
	stuck = stuck || x.Port.Hash == HashAddr // its address leads to one endpoint
	endings := map[netip.AddrPort]Ending{}
	for _, e := range t.Endings {
		if e.Outcome == Sent {
			endings[e.Endpoint] = e
		}
	}
	total := 0
	for _, c := range x.Endpoints {
		if c.Reason.Included() {
			total += c.Share()
		}
	}
	rounded := x.Refused() > 0 || x.Port.Hash != NoHash || x.Onward != nil
	total *= RefusedOf
	for _, c := range x.Endpoints {
		has, held := endings[c.AddrPort]
		if !c.Reason.Included() {
			continue
		}
		share := c.Share() * (RefusedOf - x.Refused())
		delete(endings, c.AddrPort)
		switch {
		case !held && !stuck:
			out = append(out, Disagreement{Endpoint: c.AddrPort, Objects: there, Kernel: not})
		case held && !stuck && !has.alike(share, total, c.Weight > 0 || rounded):
			out = append(out, Disagreement{Endpoint: c.AddrPort, Objects: shareText(share, total),
				Kernel: fmt.Sprintf("%d of %d", has.Share, has.Of)})
		case held && has.Masquerade != c.SourceSeen.Node():
			out = append(out, Disagreement{Endpoint: c.AddrPort, Objects: seesText(c.SourceSeen.Node()),
				Kernel: seesText(has.Masquerade)})
		}
	}
	for ep := range endings {
		out = append(out, Disagreement{Endpoint: ep, Objects: not, Kernel: there})
	}
	slices.SortStableFunc(out, func(a, b Disagreement) int { return a.Endpoint.Compare(b.Endpoint) })
	return out
}

// shareText says a share of connections in few figures.
func shareText(share, total int) string {
	if share%RefusedOf == 0 {
		return fmt.Sprintf("%d of %d connections", share/RefusedOf, total/RefusedOf)
	}
	return fmt.Sprintf("%.4g %% of connections", 100*float64(share)/float64(total))
}

// alike reports whether the chance is a share of a total. A rounded one may be off by less than one of the parts into
// which the kernel divides all connections, or by one per cent.
func (e *Ending) alike(share, total int, rounded bool) bool {
	want, all := float64(share)*float64(e.Of), float64(total) // whose products may not fit into an int
	off := math.Abs(float64(e.Share)*all - want)
	return off == 0 || rounded && (off < all || off*100 <= want)
}

func seesText(node bool) string {
	if node {
		return "it sees an address of this node"
	}
	return "it sees the sender's own address"
}
