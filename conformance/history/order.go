package history

import (
	"fmt"
	"slices"
)

// latest is far beyond any history, and far from an overflow.
const latest = int64(1e15)

// disorder finds what cannot have happened on one clock, or what nobody recorded. A history in disorder proves nothing.
func (k *checker) disorder() {
	h := k.h
	bad := func(text string, around ...string) { k.violate(Disorder, text, around) }
	newest := map[string]*Write{}
	last := int64(0)
	for i := range h.Writes {
		w := &h.Writes[i]
		if w.Sent < 0 || w.Acked < w.Sent || w.Acked > latest {
			bad("a write was acknowledged before it was sent, or at no time", w.String())
		} else if before := newest[w.Service]; before != nil && w.Sent < before.Acked {
			bad("a write was sent before the one before it was acknowledged", before.String(), w.String())
		}
		newest[w.Service] = w
		last = max(last, w.Acked)
	}
	for i := range h.Faults {
		f := &h.Faults[i]
		if f.From < 0 || f.To < f.From || f.To > latest {
			bad("a fault ended before it began, or at no time", f.String())
		}
		last = max(last, f.To)
	}
	if h.Rest != 0 && (h.Rest < last || h.Rest > latest) {
		bad(fmt.Sprintf("the rest began at %s, and a write or a fault ended after that, at %s", clock(h.Rest), clock(last)))
	}
	k.disorderOfServes(bad)
	for i := range h.Conns {
		k.disorderOfConn(&h.Conns[i], newest, bad)
	}
}

func (k *checker) disorderOfServes(bad func(string, ...string)) {
	at := map[string]int64{}
	for i := range k.h.Serves {
		s := &k.h.Serves[i]
		if _, twice := k.serves[s.Endpoint]; twice {
			bad("an endpoint has the name of another one", s.String())
		}
		if before, ok := at[s.Address]; ok && s.At < before || s.At < 0 || s.At > latest {
			bad("the servers of an address are in disorder", s.String())
		}
		at[s.Address], k.serves[s.Endpoint] = s.At, s
	}
}

func (k *checker) disorderOfConn(c *Conn, written map[string]*Write, bad func(string, ...string)) {
	if c.Begin < 0 || c.End < c.Begin || c.End > latest {
		bad("a connection ended before it began, or at no time", c.String())
	}
	if written[c.Service] == nil {
		bad("a connection to a Service that was never written", c.String())
	}
	if s := k.serves[c.Endpoint]; c.Outcome == Answered && s != nil {
		switch {
		case c.End < s.At:
			bad("an endpoint answered before it was there", s.String(), c.String())
		case c.At != s.Address:
			bad("an endpoint answered at an address that it does not have", s.String(), c.String())
		}
	}
}

// outages sums the times in which a node's proxy could hear nothing.
type outages struct{ from, to, sum []int64 }

// outagesOf gives those of a node, merged where they overlap.
func outagesOf(faults []Fault, node string) *outages {
	var all []Fault
	for _, f := range faults {
		if f.Node == "" || f.Node == node {
			all = append(all, f)
		}
	}
	slices.SortFunc(all, func(a, b Fault) int { return int(a.From - b.From) })
	o := &outages{}
	total := int64(0)
	for _, f := range all {
		if n := len(o.to); n > 0 && f.From <= o.to[n-1] {
			total += max(0, f.To-o.to[n-1])
			o.to[n-1], o.sum[n-1] = max(o.to[n-1], f.To), total
			continue
		}
		total += f.To - f.From
		o.from, o.to, o.sum = append(o.from, f.From), append(o.to, f.To), append(o.sum, total)
	}
	return o
}

// until gives how much of the time before a moment they cover.
func (o *outages) until(at int64) int64 {
	i, found := slices.BinarySearch(o.from, at)
	if !found {
		i-- // the last one that began before
	}
	if i < 0 {
		return 0
	}
	return o.sum[i] - max(0, o.to[i]-at)
}
