package results

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// Milliseconds prints a time that is given in milliseconds, to two digits or more: "3.2 ms", "18 s".
func Milliseconds(ms float64) string {
	switch {
	case math.IsNaN(ms):
		return none
	case ms < 1000:
		return digits(ms) + " ms"
	}
	return Seconds(ms / 1000)
}

// Seconds prints a time that is given in seconds: "0.42 s", "139 s".
func Seconds(s float64) string { return digits(s) + " s" }

// WaitText prints a wait, "> 300 s" if it hit its limit.
func WaitText(w Wait) string {
	if w.Limit {
		return "> " + Seconds(w.Seconds)
	}
	return Seconds(w.Seconds)
}

// none stands for what was not measured.
const none = "–"

// digits prints with two digits at least.
func digits(v float64) string {
	switch {
	case v >= 10:
		return fmt.Sprintf("%.0f", v)
	case v >= 1:
		return fmt.Sprintf("%.1f", v)
	case v >= 0.1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

// text prints a spread: the median, and how far the repeats lie apart if there is more than one.
func (s Spread) text(unit func(float64) string) string {
	switch {
	case s.N == 0:
		return none
	case s.AtLeast:
		return "> " + unit(s.Median)
	case s.Min != s.Max && unit(s.Min) != unit(s.Max) && s.Max > 0:
		over := ""
		if s.MaxAtLeast {
			over = "> "
		}
		low, name, _ := strings.Cut(unit(s.Min), " ")
		if name != "" && !strings.HasSuffix(unit(s.Max), " "+name) {
			low += " " + name
		}
		return fmt.Sprintf("%s (%s to %s%s)", unit(s.Median), low, over, unit(s.Max))
	}
	return unit(s.Median)
}

// short prints the median alone.
func (s Spread) short(unit func(float64) string) string {
	s.Min, s.Max = s.Median, s.Median
	return s.text(unit)
}

// behind prints how far behind a proxy is: less than a millisecond is nothing.
func behind(s float64) string {
	if s < 0.001 {
		return "0 s"
	}
	return Milliseconds(s * 1000)
}

func growth(b float64) string    { return fmt.Sprintf("%+.0f MiB", math.Round(b/(1<<20))+0) }
func mebibytes(b float64) string { return fmt.Sprintf("%.0f MiB", b/(1<<20)) }
func thousands(n float64) string { return fmt.Sprintf("%.1fk", n/1000) }
func gigabits(n float64) string  { return fmt.Sprintf("%.1f", n) }
func cores(n float64) string     { return fmt.Sprintf("%.2f", n) }
func perSecond(n float64) string { return fmt.Sprintf("%.0f", n) }

// table is one that is shown: what a proxy's row says in each size.
type table struct {
	title, about string
	cell         func(*Row) string
}

// tables gives all of them, in their order.
func (r *Results) tables() []table {
	all := []table{
		{"Start", "From the start of the process until every Service answers, median and range of the repeats.",
			func(row *Row) string { return row.Start.text(Seconds) }},
		{"Restart, nothing changed",
			"Stopped and started again, with all rules in the kernel, until the processes are at rest.",
			func(row *Row) string { return row.Restart.text(Seconds) }},
		{"Restart, one endpoint changed meanwhile", "Stopped and started again, until connections end at the new endpoint.",
			func(row *Row) string { return row.Away.text(Seconds) }},
		{"Processor time of a start and a restart", "What the process and its children used until then, kernel mode " +
			"included; of what hit its limit, until the limit. The restart is that without a change.",
			func(row *Row) string {
				if row.StartCPU.N == 0 {
					return none
				}
				return row.StartCPU.short(Seconds) + " / " + row.RestartCPU.short(Seconds)
			}},
		{"One endpoint changed", "From before the write to the API server until connections end at the new endpoint: " +
			"median / 99th percentile, which of fewer than 100 is the longest. Nothing else changes.",
			func(row *Row) string { return row.Change.text() }},
	}
	for _, rate := range r.Settings.Rates {
		all = append(all, table{fmt.Sprintf("%v changes a second", rate),
			"The same while endpoints of Services chosen by chance change at this rate: median / 99th percentile.",
			func(row *Row) string { return row.Churn[rate].Quantiles.text() }},
			table{fmt.Sprintf("%v changes a second: the load", rate),
				"Processor cores that the proxy and its children used / how long after the last change the kernel had it / " +
					"changes a second that the API server took / how long it took for one, a part of the times above.",
				func(row *Row) string { return row.Churn[rate].load() }})
	}
	return slices.Concat(all, restTables, giantTables)
}

// The titles of tables that not every proxy has figures in; see Results.Reasons.
const (
	TitleGiant        = "A giant Service"
	TitleGiantDeleted = "A giant Service deleted"
)

// restTables are of a proxy at rest.
var restTables = []table{
	{"Memory", "Resident memory of the process and its children after the start / at the peak / what the " +
		"kernel charged to it after the start.",
		func(row *Row) string {
			if row.Resident.N == 0 {
				return none
			}
			return row.Resident.short(mebibytes) + " / " + row.Peak.short(mebibytes) + " / " + row.Kernel.short(mebibytes)
		}},
}

var giantTables = []table{
	{TitleGiant, "One with 300 externalIPs, 50 ports and 100 endpoints, from before it is written until the " +
		"last of 64 frontends answers / the longest change of one endpoint of another Service " +
		"meanwhile / processor time of the proxy until then / growth of its resident memory, at the peak / at rest / " +
		"growth of what the kernel charged to it.",
		func(row *Row) string { return row.GiantCreated.text() }},
	{TitleGiantDeleted, "The same from before it is deleted until the last of 64 frontends answers no more. " +
		"Growth is still that since before it was written.",
		func(row *Row) string { return row.GiantDeleted.text() }},
}

func (g GiantRow) text() string {
	if g.Wait.N == 0 {
		return none
	}
	return strings.Join([]string{
		g.Wait.text(Seconds), g.Longest.text(Milliseconds), g.Processor.short(Seconds),
		g.Peak.short(growth), g.Resident.short(growth), g.Kernel.short(growth),
	}, " / ")
}

// text prints the median and the 99th percentile.
func (q Quantiles) text() string {
	if q.P50.N == 0 {
		return none
	}
	return q.P50.text(Milliseconds) + " / " + q.P99.text(Milliseconds)
}

func (c ChurnRow) load() string {
	if c.P50.N == 0 {
		return none
	}
	return strings.Join([]string{
		c.Cores.short(cores), c.Behind.short(behind), c.Written.short(perSecond), c.Write.short(Milliseconds),
	}, " / ")
}

// WriteTables writes all tables in Markdown.
func (r *Results) WriteTables(w io.Writer) error {
	var b strings.Builder
	if len(r.Cells) > 0 {
		for _, t := range r.tables() {
			r.writeTable(&b, t, r.Sizes(), r.Proxies())
		}
	}
	r.writePaths(&b)
	r.writeNotes(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

// writeTable writes a table with its title, and nothing if nothing of it was measured.
func (r *Results) writeTable(b *strings.Builder, t table, sizes []Size, proxies []string) {
	var lines strings.Builder
	for _, size := range sizes {
		texts, measured := make([]string, len(proxies)), false
		for i, proxy := range proxies {
			row := r.Row(size, proxy)
			texts[i] = t.cell(row)
			if texts[i] == none && len(row.Errors) > 0 {
				texts[i] = "failed"
			}
			measured = measured || texts[i] != none
		}
		if measured {
			fmt.Fprintf(&lines, "| %s x %d | %s |\n", grouped(size.Services), size.Endpoints, strings.Join(texts, " | "))
		}
	}
	if lines.Len() > 0 {
		fmt.Fprintf(b, "### %s\n\n%s\n\n", t.title, wrap(t.about))
		fmt.Fprintf(b, "| Services x endpoints | %s |\n", strings.Join(proxies, " | "))
		fmt.Fprintf(b, "|---|%s\n%s\n", strings.Repeat("---|", len(proxies)), lines.String())
	}
}

// grouped prints a number with a comma before each three digits.
func grouped(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", grouped(n/1000), n%1000)
}

// writeNotes says where and how it was measured, and what went wrong.
func (r *Results) writeNotes(b *strings.Builder) {
	m, s := r.Machine, r.Settings
	where := "in network namespaces of"
	if m.Guest {
		where = "in a guest, emulated without hardware support,"
	}
	repeats, low, high := r.span()
	text := fmt.Sprintf("Measured %s %s, %d cores, %.0f GiB, Linux %s, in %s. "+
		"Repeats: %s. Load average before each measurement: %.1f to %.1f. "+
		"Limits: %v s for a start or restart, after which nothing else of that proxy is measured, "+
		"%v s for single changes, and %v s after %v s of churn for what was behind.",
		where, m.CPU, m.Cores, float64(m.Memory)/(1<<30), m.Kernel, duration(r.Spent), repeats, low, high,
		s.StartLimit, s.ChangesLimit, s.DrainLimit, s.ChurnTime)
	if len(r.Paths) > 0 {
		text += fmt.Sprintf(" Where packets are measured, each node has %d turns in a repeat, with %v s of connections and "+
			"%v s of bytes.", s.Rounds, s.TurnTime, s.TurnTime)
	}
	if s.GiantLimit > 0 {
		text += fmt.Sprintf(" The giant Service has %v s to come, and to go.", s.GiantLimit)
	}
	if len(m.Tools) > 0 {
		text += fmt.Sprintf(" Programs of the machine: %s.", strings.Join(m.Tools, ", "))
	}
	fmt.Fprintf(b, "%s\n\n", wrap(text))
	item := func(format string, args ...any) {
		fmt.Fprintf(b, "%s\n", strings.ReplaceAll(wrap("- "+fmt.Sprintf(format, args...)), "\n", "\n  "))
	}
	for _, name := range r.Proxies() {
		item("%s: %s", name, r.Versions[name])
	}
	for _, name := range sortedKeys(r.LeftOut) {
		item("%s: %s", name, r.LeftOut[name])
	}
	for _, name := range r.Proxies() {
		for _, title := range sortedKeys(r.Reasons[name]) {
			item("%s has no figures in \"%s\": %s", name, title, r.Reasons[name][title])
		}
	}
	for _, c := range r.Cells {
		if c.Error != "" {
			item("%s, %s, repeat %d failed: %s", c.Size, c.Proxy, c.Repeat, Shortened(c.Error))
		}
	}
	r.notePaths(item)
}

// notePaths says who took no part in turns.
func (r *Results) notePaths(item func(format string, args ...any)) {
	for _, p := range r.Paths {
		for _, name := range sortedKeys(p.Missing) {
			item("%s, repeat %d, by turns, without %s: %s", p.Size, p.Repeat, name, Shortened(p.Missing[name]))
		}
		if p.Error != "" {
			item("%s, repeat %d, by turns, failed: %s", p.Size, p.Repeat, Shortened(p.Error))
		}
	}
}

// wrap breaks text at spaces into lines of at most 118 columns, so that they fit into 120 in a list, too. A longer word
// stays whole.
func wrap(text string) string {
	var b strings.Builder
	column := 0
	for word := range strings.FieldsSeq(text) {
		n := utf8.RuneCountInString(word)
		switch {
		case column == 0:
		case column+1+n > 118:
			b.WriteByte('\n')
			column = 0
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += n
	}
	return b.String()
}

// Shortened leaves of an error its first line, and of what a program said the last that says something.
func Shortened(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if len(lines) == 1 {
		return text
	}
	last := len(lines) - 1
	for last > 1 && len(strings.TrimSpace(lines[last])) < 3 {
		last--
	}
	return lines[0] + " " + strings.TrimSpace(lines[last])
}

func sortedKeys[V any](m map[string]V) (keys []string) {
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// span gives how many repeats there are of each proxy in each size, as "3" or "1 to 3", and the lowest and highest load
// average.
func (r *Results) span() (repeats string, low, high float64) {
	type measured struct {
		size  Size
		proxy string
	}
	times := map[measured]int{}
	for _, c := range r.Cells {
		if c.Start == nil || !c.Start.Limit { // else it is not repeated
			k := measured{c.Size, c.Proxy}
			times[k] = max(times[k], c.Repeat)
		}
	}
	low = math.Inf(1)
	for _, c := range r.Cells {
		low, high = min(low, c.Load), max(high, c.Load)
	}
	for _, p := range r.Paths {
		low, high = min(low, p.Load), max(high, p.Load)
		k := measured{p.Size, ""}
		times[k] = max(times[k], p.Repeat)
	}
	least, most := math.MaxInt, 0
	for _, n := range times {
		least, most = min(least, n), max(most, n)
	}
	switch {
	case len(r.Cells)+len(r.Paths) == 0:
		return "none", 0, 0
	case least >= most:
		return fmt.Sprint(max(most, 1)), low, high
	}
	return fmt.Sprintf("%d to %d", least, most), low, high
}

// duration prints seconds as "4 min" or "2 h 05 min".
func duration(s float64) string {
	minutes := int(math.Round(s / 60))
	if minutes < 60 {
		return fmt.Sprintf("%d min", max(minutes, 1))
	}
	return fmt.Sprintf("%d h %02d min", minutes/60, minutes%60)
}
