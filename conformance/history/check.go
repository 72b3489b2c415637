package history

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Kind is what a proxy, or whoever recorded, did wrong.
type Kind string

// The kinds of violations.
const (
	// Late: a connection saw what was replaced longer ago than the bound.
	Late Kind = "late"
	// Stranger: who answered never was an endpoint of the Service.
	Stranger Kind = "stranger"
	// Reused: the address was an endpoint of the Service, but another Service's endpoint had it by then.
	Reused Kind = "reused"
	// Lost: at rest, connections did not see what was written last.
	Lost Kind = "lost"
	// Affinity: a client was sent to another endpoint though its own was still there.
	Affinity Kind = "affinity"
	// Back: a connection saw an older version than one that had ended before it began, by the same node.
	Back Kind = "back"
	// Disorder: the history cannot have happened.
	Disorder Kind = "disorder"
)

// Kinds are all, in the order of reports.
var Kinds = []Kind{Disorder, Lost, Stranger, Reused, Affinity, Back, Late}

// Options say what is allowed.
type Options struct {
	// Bound is how stale a connection may be beyond faults; 0 means that staleness is only measured.
	Bound time.Duration
}

// Violation is one thing that was wrong.
type Violation struct {
	Kind Kind
	Text string
	// Around are the operations around it, in order of time.
	Around []string
}

// Staleness is how late connections saw changes.
type Staleness struct {
	// Most is the smallest e such that no connection that began later than the acknowledgement plus e saw what was there
	// before.
	Most time.Duration
	// Beyond is the same by clocks that stand still while a proxy can hear nothing (Fault).
	Beyond time.Duration
	// Conns is how many connections were stale at all.
	Conns int
	// Around are the operations around the connection that decided Most.
	Around []string

	around func() []string // gives them, in the end
}

// Report is what a history shows.
type Report struct {
	Conns, Writes int
	// Unjudged is how many attempts to connect could not be made.
	Unjudged int
	// Unanswered is how many connections had no answer in time. A server that waits for a processor gives none either, so
	// they do not say what the proxy did.
	Unanswered int
	// Removed is of connections that reached an endpoint that was removed, Added of those that were refused though there
	// was an endpoint.
	Removed, Added Staleness
	// Unused is of endpoints that were added and got none of so many connections that it was no chance.
	Unused Staleness
	// Counts are how many violations of each kind there are; Violations are the first few of each.
	Counts     map[Kind]int
	Violations []Violation
	// Unproven is how many endpoints were not seen at rest, with too few connections for a verdict.
	Unproven int
	// Rested says that the history has a rest, so that lost changes can be seen.
	Rested bool
}

// OK says that nothing was wrong.
func (r *Report) OK() bool { return len(r.Counts) == 0 }

// E is the staleness of the history: the largest of the three.
func (r *Report) E() time.Duration { return max(r.Removed.Most, r.Added.Most, r.Unused.Most) }

// Beyond is E beyond faults.
func (r *Report) Beyond() time.Duration {
	return max(r.Removed.Beyond, r.Added.Beyond, r.Unused.Beyond)
}

// shown is how many violations of each kind are reported in full.
const shown = 5

// group is the connections that one node decided about one Service.
type group struct {
	service *service
	node    string
	conns   []*Conn // by their beginnings
	faults  *outages
}

type checker struct {
	h      *History
	opts   Options
	out    *Report
	serves map[string]*Serve // by endpoint
	groups []*group
}

// Check says how stale the proxies were, and what they did wrong. It takes time in the order of n log n, n being the
// size of the history: connections, writes and the endpoints that these name.
func Check(h *History, opts Options) *Report {
	k := &checker{h: h, opts: opts, serves: make(map[string]*Serve), out: &Report{
		Conns: len(h.Conns), Writes: len(h.Writes), Counts: make(map[Kind]int), Rested: h.Rest != 0,
	}}
	if k.disorder(); !k.out.OK() {
		return k.out
	}
	k.group()
	for _, g := range k.groups {
		for i := range g.conns {
			k.staleness(g, i)
		}
		k.unused(g)
		k.affinity(g, k.back(g))
		k.rest(g)
	}
	for _, s := range []*Staleness{&k.out.Removed, &k.out.Added, &k.out.Unused} {
		if s.around != nil {
			s.Around, s.around = s.around(), nil
		}
	}
	return k.out
}

// group sorts the connections by Service and node.
func (k *checker) group() {
	type key struct{ service, node string }
	services, groups := fold(k.h), make(map[key]*group)
	for i := range k.h.Conns {
		c := &k.h.Conns[i]
		switch c.Outcome {
		case Failed:
			k.out.Unjudged++
			continue
		case TimedOut:
			k.out.Unanswered++
			continue
		}
		g := groups[key{c.Service, c.Node}]
		if g == nil {
			g = &group{service: services[c.Service], node: c.Node, faults: outagesOf(k.h.Faults, c.Node)}
			groups[key{c.Service, c.Node}] = g
			k.groups = append(k.groups, g)
		}
		g.conns = append(g.conns, c)
	}
	for _, g := range k.groups {
		slices.SortStableFunc(g.conns, func(a, b *Conn) int { return cmp.Compare(a.Begin, b.Begin) })
	}
}

// saw gives what stands for the outcome among a Service's addresses.
func (c *Conn) saw() string {
	if c.Outcome == Answered {
		return c.At
	}
	return nobody
}

// staleness judges who answered a connection, and when.
func (k *checker) staleness(g *group, i int) {
	c := g.conns[i]
	v := g.service.last(c.saw(), c.End)
	if k.stranger(g, i, v) || v < 0 {
		return
	}
	replaced, ok := g.service.replaced(v)
	if !ok || c.Begin <= replaced {
		return
	}
	into := &k.out.Removed
	if c.Outcome != Answered {
		into = &k.out.Added
	}
	into.Conns++
	beyond := k.measure(into, g, replaced, c.Begin, func() []string { return k.around(g, i, v) })
	if k.opts.Bound > 0 && beyond > k.opts.Bound {
		k.violateAround(Late, g, i, v, "%s saw what was replaced %s earlier, %s beyond faults", c.Service,
			micros(c.Begin-replaced), beyond)
	}
}

// measure notes that the node saw at a time what had been replaced at another one, and gives the staleness beyond
// faults.
func (k *checker) measure(
	into *Staleness,
	g *group,
	replaced, at int64,
	around func() []string,
) (beyond time.Duration) {
	total := micros(at - replaced)
	beyond = total - micros(g.faults.until(at)-g.faults.until(replaced))
	if total > into.Most {
		into.Most, into.around = total, around
	}
	into.Beyond = max(into.Beyond, beyond)
	return beyond
}

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

// stranger looks whether who answered was ever meant to answer for the Service. v is the last version that allows its
// address.
func (k *checker) stranger(g *group, i, v int) bool {
	c := g.conns[i]
	if c.Outcome != Answered {
		return false
	}
	s := k.serves[c.Endpoint]
	switch {
	case s == nil:
		k.violateAround(Stranger, g, i, v, "%s was answered by %s, which nobody started", c.Service, c.Endpoint)
	case v < 0:
		k.violateAround(Stranger, g, i, v, "%s was answered by %s at %s, which was not written by then", c.Service,
			c.Endpoint, c.At)
	case s.Service != c.Service && c.Begin > s.At: // one that began before may have been for the one before
		k.violateAround(Reused, g, i, v, "%s was answered by %s, an endpoint of %s, which took over %s", c.Service,
			c.Endpoint, s.Service, c.At)
	default:
		return false
	}
	return v < 0 // of a reused address, the staleness counts, too
}

// back finds connections that saw an older version than another one of the same node, which had ended before. It gives
// for each connection the oldest version that its node can have had: that of no connection before it, or newer.
func (k *checker) back(g *group) (oldest []int) {
	ended := make([]int, len(g.conns)) // by their ends
	for i := range ended {
		ended[i] = i
	}
	slices.SortFunc(ended, func(a, b int) int { return cmp.Compare(g.conns[a].End, g.conns[b].End) })
	oldest = make([]int, len(g.conns))
	next, known, by := 0, 0, -1
	for i, c := range g.conns {
		for ; g.conns[ended[next]].End < c.Begin; next++ {
			if n := ended[next]; oldest[n] > known {
				known, by = oldest[n], n
			}
		}
		oldest[i] = known
		v := g.service.next(c.saw(), known)
		switch newest := g.service.last(c.saw(), c.End); {
		case newest < 0: // a stranger
		case v >= 0 && v <= newest:
			oldest[i] = v
		case by >= 0:
			k.violateAround(Back, g, i, newest, "%s of %s saw version %d at most, and one before it version %d at least: %s",
				c.Service, c.Node, newest, known, g.conns[by])
		}
	}
	return oldest
}

// affinity finds clients that were sent elsewhere though their endpoint was still there.
func (k *checker) affinity(g *group, oldest []int) {
	if g.service.affinity <= 0 {
		return
	}
	type past struct {
		last int
		open int64 // when those before it had ended
	}
	clients := make(map[string]*past)
	for i, c := range g.conns {
		if c.Outcome != Answered {
			continue
		}
		p := clients[c.Client]
		if p == nil {
			clients[c.Client] = &past{last: i}
			continue
		}
		from := p.last
		before := g.conns[from]
		sure := before.End <= c.Begin && p.open <= before.Begin
		p.last, p.open = i, max(p.open, before.End)
		if !sure || before.At == c.At || c.End-before.Begin >= g.service.affinity {
			continue
		}
		newest := g.service.last(c.At, c.End)
		if g.service.stayed(before.At, oldest[from], newest) {
			k.violateAround(Affinity, g, i, newest, "client %s of %s left %s, which stayed, for %s", c.Client, c.Service,
				before.At, c.At)
		}
	}
}

// violate notes a violation.
func (k *checker) violate(kind Kind, text string, around []string) {
	k.out.Counts[kind]++
	if k.out.Counts[kind] <= shown {
		k.out.Violations = append(k.out.Violations, Violation{kind, text, around})
	}
}

// violateAround notes one with the operations around a connection.
func (k *checker) violateAround(kind Kind, g *group, i, v int, format string, args ...any) {
	if k.out.Counts[kind] >= shown {
		k.out.Counts[kind]++
		return
	}
	k.violate(kind, fmt.Sprintf(format, args...), k.around(g, i, v))
}

// neighbours is how many connections before and after one are reported.
const neighbours = 2

// around gives the operations around a connection: what made the last version v that allows it, what replaced that, who
// answered, faults at the time, and the connections before and after.
func (k *checker) around(g *group, i, v int) []string {
	type op struct {
		at   int64
		text string
	}
	var all []op
	for n := max(v, 0); n <= v+1 && n < len(g.service.versions); n++ {
		if w := g.service.versions[n].write; w >= 0 {
			all = append(all, op{k.h.Writes[w].Sent, k.h.Writes[w].String()})
		}
	}
	if s := k.serves[g.conns[i].Endpoint]; s != nil {
		all = append(all, op{s.At, s.String()})
	}
	for _, f := range k.h.Faults {
		c := g.conns[i]
		if near := f.From <= c.End && f.To+5e6 >= c.Begin; near && (f.Node == "" || f.Node == c.Node) {
			all = append(all, op{f.From, f.String()})
		}
	}
	for n := max(0, i-neighbours); n <= min(i+neighbours, len(g.conns)-1); n++ {
		text := g.conns[n].String()
		if n == i {
			text += "  <--"
		}
		all = append(all, op{g.conns[n].Begin, text})
	}
	slices.SortStableFunc(all, func(a, b op) int { return cmp.Compare(a.at, b.at) })
	var lines []string
	for _, o := range all {
		lines = append(lines, shorten(o.text))
	}
	return lines
}

// mostText is how long a line of a report may be.
const mostText = 600

func shorten(text string) string {
	if len(text) > mostText {
		return text[:mostText] + "..."
	}
	return text
}

// String gives the violation with the operations around it, a line for each.
func (v Violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n", v.Kind, shorten(v.Text))
	for _, op := range v.Around {
		fmt.Fprintf(&b, "    %s\n", op)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// String gives all that a report says, some lines long.
func (r *Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d connections, %d could not be made, %d had no answer, %d writes; e %s, beyond faults %s\n",
		r.Conns, r.Unjudged, r.Unanswered, r.Writes, r.E(), r.Beyond())
	for _, s := range []struct {
		name string
		of   *Staleness
	}{{"removed", &r.Removed}, {"added", &r.Added}, {"unused", &r.Unused}} {
		fmt.Fprintf(&b, "%-8s %d connections, e %s, beyond faults %s\n", s.name, s.of.Conns, s.of.Most, s.of.Beyond)
		for _, op := range s.of.Around {
			fmt.Fprintf(&b, "    %s\n", op)
		}
	}
	switch {
	case !r.Rested:
		b.WriteString("there is no rest: lost changes were not looked for\n")
	case r.Unproven > 0:
		fmt.Fprintf(&b, "%d endpoints were not seen at rest, with too few connections for a verdict\n", r.Unproven)
	}
	for _, kind := range Kinds {
		if n := r.Counts[kind]; n > 0 {
			fmt.Fprintf(&b, "%d %s\n", n, kind)
		}
	}
	for _, v := range r.Violations {
		fmt.Fprintln(&b, v)
	}
	return b.String()
}
