package plan

import (
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// TextOptions say how much of a plan is printed.
type TextOptions struct {
	// All prints whole lists, and Verbose what is written, line by line.
	All, Verbose bool
}

const (
	// width is how many columns a line has at most, unless a name is longer.
	width = 100
	// shortList is how many entries of a list are printed.
	shortList = 10
)

// printer prints a plan.
type printer struct {
	*terminal.Printer
	TextOptions
}

// Print prints a plan for people.
func (p *Plan) Print(to *terminal.Printer, o TextOptions) {
	t := printer{to, o}
	t.head(p)
	t.list("", len(p.Globals), 0, func(i int) string { return "for all Services: " + p.Globals[i] })
	t.list("", len(p.Conflicts), 0, func(i int) string { return t.Paint(terminal.Red, "! "+p.Conflicts[i]) })
	for i, s := range p.Services {
		if i == 2*shortList && !o.All {
			t.Line("and %s (--all)", terminal.Plural(len(p.Services)-i+p.MoreServices, "more Service"))
			break
		}
		t.service(s)
	}
	if o.All && p.MoreServices > 0 {
		t.Line("and %s", terminal.Plural(p.MoreServices, "more Service"))
	}
	t.writes(&p.Writes)
	for _, n := range p.Notes {
		t.wrap("# ", "# ", n)
	}
}

// head says what was planned, and what it comes to.
func (t *printer) head(p *Plan) {
	names := make([]string, 0, shortList)
	for i, o := range p.Objects {
		if i == shortList && !t.All {
			names = append(names, fmt.Sprintf("and %d more", len(p.Objects)-i))
			break
		}
		names = append(names, o.Object+" "+o.Verb)
	}
	text := fmt.Sprintf("%s: %s", p.Node, terminal.Plural(len(p.Objects), "object"))
	if p.Same > 0 {
		text += fmt.Sprintf(" (and %d as they are)", p.Same)
	}
	if len(names) > 0 {
		text += ": " + strings.Join(names, ", ")
	}
	t.wrap("", "  ", text)
	if !p.Changes {
		t.Line("nothing changes for packets")
	}
	if line := p.Effects.text(); line != "" {
		t.wrap("", "  ", line)
	}
	if p.FlowsRead {
		t.Line("%s looked at", terminal.Plural(p.Flows, "open connection"))
	}
}

// text sums up.
func (e *Effects) text() string {
	var parts []string
	for _, p := range []struct {
		n            int
		before, noun string
	}{{e.Opens, "opens", "address"}, {e.Closes, "closes", "address"}, {e.Answers, "other answers at", "address"},
		{e.LetsIn, "lets in", "range"}, {e.ShutsOut, "shuts out", "range"}, {e.Chances, "other chances of", "endpoint"},
		{e.Settings, "changes", "setting"}, {e.Cuts, "cuts", "connection"}, {e.Moves, "moves", "connection"},
		{e.Drains, "drains", "connection"}, {e.Forgets, "forgets the endpoint of", "client"}} {
		if p.n > 0 {
			parts = append(parts, p.before+" "+strings.Replace(terminal.Plural(p.n, p.noun), "addresss", "addresses", 1))
		}
	}
	if e.Stays > 0 {
		parts = append(parts, terminal.Plural(e.Stays, "connection")+" to endpoints that leave")
	}
	if e.Refuses > 0 {
		parts = append(parts, terminal.Plural(e.Refuses, "connection")+" of clients that get no new ones")
	}
	return strings.Join(parts, ", ")
}

// list prints the entries of a list, and how many there are beyond those.
func (t *printer) list(indent string, n, more int, entry func(int) string) {
	t.first(shortList, indent, n, more, func(i int) { t.wrap(indent, indent+"  ", entry(i)) })
}

// first prints the first n entries of a list, at most so many unless all are asked for, and how many there are beyond
// those.
func (t *printer) first(most int, indent string, n, more int, entry func(int)) {
	for i := range n {
		if i == most && !t.All {
			t.Line("%sand %d more (--all)", indent, n-i+more)
			return
		}
		entry(i)
	}
	if more > 0 {
		t.Line("%sand %d more", indent, more)
	}
}

// wrap prints a text in lines of at most width columns.
func (t *printer) wrap(first, next, text string) {
	line, empty := first, true
	for word := range strings.FieldsSeq(text) {
		if !empty && utf8.RuneCountInString(terminal.Plain(line))+1+utf8.RuneCountInString(word) > width {
			t.Line("%s", line)
			line, empty = next, true
		}
		if !empty {
			line += " "
		}
		line, empty = line+word, false
	}
	t.Line("%s", line)
}

// service prints what changes of a Service.
func (t *printer) service(s *Service) {
	t.Line("")
	t.Line("%s (%s)", t.Paint(terminal.Bold, records.Named(s.Name, s.For)), s.Verb)
	t.list("  ", len(s.Settings), 0, func(i int) string { return s.Settings[i] })
	t.list("  ", len(s.Addresses), s.MoreAddresses, func(i int) string { return s.Addresses[i].text() })
	for i := range s.Sources {
		t.sources(&s.Sources[i])
	}
	t.list("  ", len(s.Flows), 0, func(i int) string { return s.Flows[i].text() })
	for i := range s.Chances {
		if i == shortList && !t.All {
			t.Line("  and chances of %d more (--all)", len(s.Chances)-i)
			break
		}
		t.chances(&s.Chances[i])
	}
}

// text is a line of an address.
func (a *Address) text() string {
	name := fmt.Sprintf("%s (%s)", a.Key, a.Kind)
	switch {
	case a.Other != "" && a.After == "":
		return name + ": goes to " + a.Other
	case a.Other != "":
		return name + ": comes from " + a.Other + ", " + a.After
	case a.Before == "":
		return "opens " + name + ": " + a.After
	case a.After == "":
		return "closes " + name
	}
	from := ""
	if len(a.From) > 0 {
		from = " from " + strings.Join(a.From, ", ")
	}
	return fmt.Sprintf("%s%s: %s, now %s", name, from, a.Before, a.After)
}

// sources prints who is let in and shut out.
func (t *printer) sources(s *Sources) {
	name := "load balancer addresses, " + s.Family + ": "
	switch {
	case s.Everyone:
		t.Line("  %slet everyone in", name)
	case s.Only:
		t.Line("  %slet only these in", name)
	default:
		t.Line("  %sother source ranges", name)
		t.list("    shut out ", len(s.Out), 0, func(i int) string { return s.Out[i] })
	}
	t.list("    let in ", len(s.In), 0, func(i int) string { return s.In[i] })
}

// text is a line of a group of connections.
func (g *FlowGroup) text() string {
	what := terminal.Plural(g.Connections, "open connection") + " of "
	if g.AtLeast {
		what += "at least "
	}
	what += terminal.Plural(g.Clients, "client") + " to " + g.Port
	with := ""
	if len(g.Endpoints) > 0 {
		with = ", with " + strings.Join(g.Endpoints, ", ")
		if g.MoreEndpoints > 0 {
			with += fmt.Sprintf(" and %d more", g.MoreEndpoints)
		}
	}
	switch g.Fate {
	case refuses:
		return fmt.Sprintf("keeps %s, and refuses these clients new ones (%s)", what, g.Reason)
	case stays:
		return fmt.Sprintf("keeps %s as long as they are answered%s (%s)", what, with, g.Reason)
	case returns:
		return fmt.Sprintf("keeps %s%s (%s)", what, with, g.Reason)
	}
	return fmt.Sprintf("%s %s%s (%s)", g.Fate, what, with, g.Reason)
}

// chances prints the endpoints whose chance changes.
func (t *printer) chances(c *Chances) {
	t.wrap("  ", "    ", fmt.Sprintf("chances at %s, %s, %s: %s, now %d", c.Port, c.Family,
		strings.Join(c.To, " and "), terminal.Plural(c.Before, "endpoint"), c.After))
	columns := terminal.Columns{46, 8, 8}
	t.first(shortList, "    ", len(c.Endpoints), c.MoreEndpoints, func(i int) {
		e, sign := &c.Endpoints[i], " "
		switch {
		case e.Before == 0:
			sign = "+"
		case e.After == 0:
			sign = "-"
		}
		t.Line("   %s %s", sign, columns.Row(e.Endpoint, percent(e.Before), percent(e.After)))
	})
}

func percent(p float64) string {
	if p == 0 {
		return "-"
	}
	if p >= 0.1 {
		return fmt.Sprintf("%.1f%%", math.Round(p*1000)/10)
	}
	return fmt.Sprintf("%.2g%%", p*100)
}

// writes prints what is written.
func (t *printer) writes(w *Writes) {
	t.Line("")
	t.Line("writes %s: %s added, %d replaced, %d removed; %s", terminal.Plural(w.Transactions, "transaction"),
		terminal.Plural(w.Added, "element"), w.Replaced, w.Removed, terminal.Plural(w.Chains, "chain"))
	t.list("  ", len(w.Services), 0, func(i int) string {
		s := w.Services[i]
		if s.Service == "" {
			s.Service = "(shared)"
		}
		return fmt.Sprintf("%s: +%d -%d", s.Service, s.Added, s.Removed)
	})
	if t.Verbose {
		t.first(10*shortList, "", len(w.Lines), w.MoreLines, func(i int) { t.Line("%s", w.Lines[i]) })
	}
}
