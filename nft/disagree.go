package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Disagreement says in what the objects and a table differ about one packet. Exactly one of Outcome, Endpoint and
// Affinity is set.
type Disagreement struct {
	// Outcome says that the packet's fate is another one.
	Outcome bool
	// Endpoint is whom it is about.
	Endpoint netip.AddrPort
	// Affinity says that the sender is remembered for another time.
	Affinity bool
	// Objects and Table say in words what each of them wants.
	Objects, Table string
}

func (d Disagreement) String() string {
	about := ""
	if d.Endpoint.IsValid() {
		about = d.Endpoint.String() + ": "
	}
	if d.Affinity {
		about = "session affinity: "
	}
	return about + "the objects say " + d.Objects + ", the kernel " + d.Table
}

// Disagreements compares what the objects ask for with the way of the same packet through a table.
func Disagreements(x *dataplane.Explanation, w *Walk) []Disagreement {
	want := x.Cause.Outcome()
	sent := func(e Ending) bool { return e.Outcome == dataplane.Sent }
	if fate := w.Outcome(); fate != want.String() && !(want == dataplane.Sent && slices.ContainsFunc(w.Endings, sent)) {
		return []Disagreement{{Outcome: true, Objects: want.String(), Table: fate}}
	}
	if want != dataplane.Sent {
		return nil
	}
	var out []Disagreement
	remembered, taken := x.Port.Affinity, map[netip.AddrPort]bool{}
	for _, c := range x.Endpoints {
		taken[c.AddrPort] = taken[c.AddrPort] || c.Reason.Taken()
	}
	for _, e := range w.Endings {
		switch {
		case e.Outcome != dataplane.Sent:
			out = append(out, Disagreement{Outcome: true, Objects: want.String(),
				Table: fmt.Sprintf("%s in %d of %d cases", e.Outcome, e.Share, e.Of)})
		case taken[e.Endpoint] && e.Remember != x.Port.Affinity:
			remembered = e.Remember
		}
	}
	if remembered != x.Port.Affinity {
		out = append(out, Disagreement{Affinity: true, Objects: affinityText(x.Port.Affinity), Table: affinityText(remembered)})
	}
	return append(out, endpointDisagreements(x, w)...)
}

func affinityText(d time.Duration) string {
	if d == 0 {
		return "none"
	}
	return secondsText(d)
}

// Stuck gives the ending of a sender who is remembered: the only one there is then.
func (w *Walk) Stuck() (e Ending, ok bool) {
	if len(w.Endings) == 1 && w.Endings[0].Outcome == dataplane.Sent && w.Endings[0].Element.Set == Affinity {
		return w.Endings[0], true
	}
	return e, false
}

// endpointDisagreements compares the endpoints, their chances and what they see.
func endpointDisagreements(x *dataplane.Explanation, w *Walk) (out []Disagreement) {
	const there, not = "an endpoint", "none of the endpoints"
	_, stuck := w.Stuck()
	chances, of := map[netip.AddrPort]int{}, 1
	masquerade := map[netip.AddrPort]bool{}
	for _, e := range w.Endings {
		if e.Outcome == dataplane.Sent {
			chances[e.Endpoint] += e.Share
			of, masquerade[e.Endpoint] = e.Of, e.Masquerade
		}
	}
	n := 0
	for _, c := range x.Endpoints {
		if c.Reason.Taken() {
			n++
		}
	}
	for _, c := range x.Endpoints {
		chance, held := chances[c.AddrPort]
		if !c.Reason.Taken() {
			continue
		}
		delete(chances, c.AddrPort)
		switch {
		case !held && !stuck:
			out = append(out, Disagreement{Endpoint: c.AddrPort, Objects: there, Table: not})
		case held && !stuck && chance*n != of:
			out = append(out, Disagreement{Endpoint: c.AddrPort, Objects: fmt.Sprintf("1 of %d connections", n),
				Table: fmt.Sprintf("%d of %d", chance, of)})
		case held && masquerade[c.AddrPort] != c.Sees.Node():
			out = append(out, Disagreement{Endpoint: c.AddrPort, Objects: seesText(c.Sees.Node()), Table: seesText(masquerade[c.AddrPort])})
		}
	}
	for ep := range chances {
		out = append(out, Disagreement{Endpoint: ep, Objects: not, Table: there})
	}
	slices.SortStableFunc(out, func(a, b Disagreement) int { return a.Endpoint.Compare(b.Endpoint) })
	return out
}

func seesText(node bool) string {
	if node {
		return "it sees an address of this node"
	}
	return "it sees the sender's own address"
}
