package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// WriteTable writes a summary for a terminal: for each theme and each proxy how many cases passed and how many did
// not, then every case that failed, with its packets. It has no colour; WriteColourTable has.
func WriteTable(w io.Writer, r *Run) error { return writeTable(w, r, false) }

// WriteColourTable writes what WriteTable does, with ANSI colours. The words are the same: no colour says anything
// alone.
func WriteColourTable(w io.Writer, r *Run) error { return writeTable(w, r, true) }

func writeTable(w io.Writer, r *Run, colour bool) error {
	t := table{run: r, colour: colour}
	t.head()
	t.themes()
	t.failures()
	if _, err := io.WriteString(w, t.out.String()); err != nil {
		return fmt.Errorf("report: write table: %w", err)
	}
	return nil
}

// table gathers the text.
type table struct {
	run    *Run
	colour bool
	out    strings.Builder
}

// paints are ANSI colours that are legible on dark and on light ground.
var paints = map[Outcome]string{Pass: "32", Fail: "1;31", Broken: "1;31", Differs: "33", Skipped: "2"}

func (t *table) paint(o Outcome, text string) string {
	if !t.colour || o == "" || text == "" {
		return text
	}
	return "\x1b[" + paints[o] + "m" + text + "\x1b[0m"
}

func (t *table) head() {
	r := t.run
	fmt.Fprintf(
		&t.out,
		"%s cases, %s, begun %s, took %s\n",
		thousands(len(r.Cases)),
		r.Host,
		r.Begun.Format(time.DateTime+" MST"),
		span(r.Took),
	)
	width := 0
	for _, p := range r.Proxies {
		width = max(width, len(p.Name))
	}
	for _, p := range r.Proxies {
		fmt.Fprintf(&t.out, "  %-*s  %s, took %s\n", width, p.Name, p.Version, span(p.Took))
		if p.Witness != nil {
			t.witness(width, p.Witness)
		}
	}
	t.out.WriteByte('\n')
}

// witness writes what came of asking the listings, under a proxy's line whose name has a width.
func (t *table) witness(width int, w *Witness) {
	fmt.Fprintf(&t.out, "  %-*s  witness: %s\n", width, "", w)
	for _, not := range w.NotAsked {
		fmt.Fprintf(&t.out, "  %-*s    not asked, %s: %s\n", width, "", thousands(not.Count), not.Why)
		if not.Example != "" {
			fmt.Fprintf(&t.out, "  %-*s      such as %s\n", width, "", not.Example)
		}
	}
}

// cell is a text that may be painted; its width is that of the text alone.
type cell struct {
	text    string
	outcome Outcome
}

// themes writes a line for each theme, and the total: for each proxy a number under each outcome that occurs in the
// run.
func (t *table) themes() {
	r := t.run
	var outcomes []Outcome
	for _, o := range []Outcome{Pass, Fail, Broken, Differs, Skipped} {
		occurs := func(p Proxy) bool { return r.Count(p.Name).of(o) > 0 }
		if o == Pass || o == Fail || slices.ContainsFunc(r.Proxies, occurs) {
			outcomes = append(outcomes, o)
		}
	}
	rows := [][]cell{{{text: "theme"}}}
	for range r.Proxies {
		for _, o := range outcomes {
			rows[0] = append(rows[0], cell{text: string(o)})
		}
	}
	for _, g := range r.themes() {
		rows = append(rows, t.line(g.name, outcomes, func(proxy string) Counts { return count(g.cases, proxy) }))
	}
	rows = append(rows, t.line("total", outcomes, r.Count))
	t.grid(rows, len(outcomes))
}

func (t *table) line(name string, outcomes []Outcome, counts func(proxy string) Counts) []cell {
	row := []cell{{text: name}}
	for _, p := range t.run.Proxies {
		c := counts(p.Name)
		for _, o := range outcomes {
			n := cell{text: "-"}
			if c.of(o) > 0 {
				n = cell{thousands(c.of(o)), o}
			}
			row = append(row, n)
		}
	}
	return row
}

// grid writes rows in columns, the first to the left, the numbers to the right; above each group of them the proxy's
// name.
func (t *table) grid(rows [][]cell, group int) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, c := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(c.text))
		}
	}
	head := strings.Repeat(" ", widths[0])
	for i, p := range t.run.Proxies {
		at := 1 + i*group
		width := 2 * (group - 1)
		for _, w := range widths[at : at+group] {
			width += w
		}
		if n := utf8.RuneCountInString(p.Name) - width; n > 0 {
			widths[at] += n
			width += n
		}
		head += fmt.Sprintf("   | %-*s", width, p.Name)
	}
	fmt.Fprintln(&t.out, strings.TrimRight(head, " "))
	for k, row := range rows {
		if k == len(rows)-1 {
			fmt.Fprintln(&t.out)
		}
		fmt.Fprintf(&t.out, "%-*s", widths[0], row[0].text)
		for i, c := range row[1:] {
			if i%group == 0 {
				t.out.WriteString("   |")
			} else {
				t.out.WriteString(" ")
			}
			t.out.WriteString(strings.Repeat(" ", 1+widths[i+1]-utf8.RuneCountInString(c.text)) + t.paint(c.outcome, c.text))
		}
		t.out.WriteByte('\n')
	}
}

// Failed says whether a proxy failed a case, or one could not be judged.
func (r *Run) Failed() bool {
	for _, p := range r.Proxies {
		if c := r.Count(p.Name); c.Fail+c.Broken > 0 {
			return true
		}
	}
	return false
}

// failures writes every case that failed or broke, proxy by proxy.
func (t *table) failures() {
	for i := range t.run.Cases {
		c := &t.run.Cases[i]
		for _, p := range t.run.Proxies {
			result := c.Results[p.Name]
			if result == nil || result.Outcome != Fail && result.Outcome != Broken {
				continue
			}
			word := "FAIL  "
			if result.Outcome == Broken {
				word = "BROKEN"
			}
			fmt.Fprintf(&t.out, "\n%s  %s: %s\n", t.paint(result.Outcome, word), p.Name, c.Name)
			fmt.Fprintf(&t.out, "        %s\n", oneLine(c.Title))
			if result.Why != "" {
				fmt.Fprintf(&t.out, "        %s\n", strings.ReplaceAll(strings.TrimSpace(result.Why), "\n", "\n        "))
			}
			t.looks(result)
			t.logged(result)
		}
	}
}

// looks writes the packets of a result; of those that were as they should be only how many they were.
func (t *table) looks(result *Result) {
	right := 0
	var rows [][4]string
	var widths [4]int
	for _, l := range result.Looks {
		if l.OK {
			right++
			continue
		}
		row := [4]string{oneLine(l.packets()), "want " + oneLine(l.Want), "got " + oneLine(l.Got), oneLine(l.Step)}
		for i, text := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(text))
		}
		rows = append(rows, row)
	}
	for _, row := range rows {
		var line strings.Builder
		for i, text := range row {
			gap := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(text)+2)
			if i == 2 {
				text = t.paint(Fail, text)
			}
			line.WriteString(text + gap)
		}
		fmt.Fprintln(&t.out, "        "+strings.TrimRight(line.String(), " "))
	}
	if right > 0 {
		fmt.Fprintf(&t.out, "        as expected otherwise: %d of %d looks\n", right, len(result.Looks))
	}
}

// mostLogged bounds the lines of logs that are written of a case: the last ones.
const mostLogged = 30

func (t *table) logged(result *Result) {
	lines := strings.FieldsFunc(result.Logged, func(r rune) bool { return r == '\n' })
	for _, line := range lines[max(len(lines)-mostLogged, 0):] {
		fmt.Fprintln(&t.out, "        "+oneLine(line))
	}
}

// packets says who asked whom, and how often: "10 x pod a1 > 10.96.0.10:80/tcp".
func (l Look) packets() string {
	text := l.From + " > " + l.To
	if l.Count > 1 {
		text = fmt.Sprintf("%d x %s", l.Count, text)
	}
	return text
}

// theme is a theme with its cases, in the run's order.
type theme struct {
	name  string
	cases []*Case
}

// themes gives the themes in the order in which their first cases come.
func (r *Run) themes() []*theme {
	var list []*theme
	index := map[string]*theme{}
	for i := range r.Cases {
		c := &r.Cases[i]
		g := index[c.Theme]
		if g == nil {
			g = &theme{name: c.Theme}
			index[c.Theme] = g
			list = append(list, g)
		}
		g.cases = append(g.cases, c)
	}
	return list
}

func count(cases []*Case, proxy string) (c Counts) {
	for _, k := range cases {
		c.add(k.Results[proxy])
	}
	return c
}

// oneLine keeps a text to one line, so that columns stay columns.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// span writes a duration as a reader wants it: "340 ms", "12.3 s", "4 min 10 s".
func span(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < time.Minute:
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	d = d.Round(time.Second)
	return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
}

// thousands writes a number with a comma before each group of three digits.
func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
