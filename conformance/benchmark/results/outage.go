package results

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// Outages are what clients of Services saw while endpoints were dead, refused or went.
type Outages struct {
	Series[OutageSettings, *Outage]
}

// OutageSettings say how it was measured. Times are in seconds.
type OutageSettings struct {
	// Rate is how many connections are opened a second, for Length. After Before, the harm is done.
	Rate   float64 `json:"rate"`
	Length float64 `json:"length_s"`
	Before float64 `json:"before_s"`
	// Timeout is when a client gives up.
	Timeout float64 `json:"timeout_s"`
	// Held is how many connections are held; Drain is when a graceful rollout ends.
	Held  int     `json:"held"`
	Drain float64 `json:"drain_s"`
	// Connections is how many are opened, at ManyRate a second, where wrong ejections are looked for in a proxy that
	// ejects; 0 means for Length, as with other proxies.
	Connections int     `json:"connections"`
	ManyRate    float64 `json:"many_rate"`
	// Explain says that a recorder explains failures, which takes processor time.
	Explain bool `json:"explain,omitempty"`
}

// Outage is one run of a scenario with one proxy.
type Outage struct {
	Run
	Explained
	Began time.Time `json:"began"`
	// Load is the machine's load average over a minute, as it was before.
	Load float64 `json:"load"`

	Opened int `json:"opened"`
	Failed int `json:"failed"`
	// Reasons counts the failures by what the client was told.
	Reasons map[string]int `json:"reasons,omitempty"`
	// P50, P99 and Longest are times in milliseconds until a client was connected or knew that it was not, of those that
	// began after the harm was done.
	P50     float64 `json:"p50_ms"`
	P99     float64 `json:"p99_ms"`
	Longest float64 `json:"longest_ms"`
	// Ejections is how many endpoints the proxy has left out by its own count; nil if it does not count, or if the
	// scenario ran beside others.
	Ejections *int `json:"ejections,omitempty"`
	// Held is what became of held connections; nil if there were none.
	Held     *OutageHeld   `json:"held,omitempty"`
	Timeline []OutagePoint `json:"timeline"`
}

// OutageHeld is what clients of held connections heard.
type OutageHeld struct {
	Connections int `json:"connections"`
	// Told is how many seconds after the harm each client was told that its connection is lost, up to Limit.
	Told  []float64 `json:"told_s"`
	Limit float64   `json:"limit_s"`
}

// OutagePoint is what began in half a second.
type OutagePoint struct {
	At      float64 `json:"at_s"`
	Longest float64 `json:"longest_ms"`
	Failed  int     `json:"failed,omitempty"`
}

// String gives a line about a cell.
func (o *Outage) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-28s %-20s opened %d, failed %d", o.Scenario, o.Proxy, o.Opened, o.Failed)
	for _, reason := range slices.Sorted(maps.Keys(o.Reasons)) {
		fmt.Fprintf(&b, " %s %d", reason, o.Reasons[reason])
	}
	fmt.Fprintf(&b, ", connect p50 %s, p99 %s, longest %s",
		Milliseconds(o.P50), Milliseconds(o.P99), Milliseconds(o.Longest))
	if o.Ejections != nil {
		fmt.Fprintf(&b, ", ejections %d", *o.Ejections)
	}
	if h := o.Held; h != nil {
		fmt.Fprintf(&b, ", held %d, told %d, the last %s", h.Connections, len(h.Told), h.last().text(Seconds))
	}
	b.WriteString(o.words())
	return b.String()
}

// last is when the last client was told.
func (h *OutageHeld) last() Spread {
	if len(h.Told) < h.Connections {
		return Spread{Median: h.Limit, N: 1, AtLeast: true}
	}
	return spreadOf([]float64{slices.Max(h.Told)}, 0)
}

// OpenOutages returns the results in a file, or none if there is no such file.
func OpenOutages(path string, settings OutageSettings, e Earlier) (*Outages, error) {
	r := &Outages{}
	return r, openSeries(path, &r.Series, settings, e)
}

// WriteTables writes what came out as Markdown, scenarios in the given order: the median of the repeats, and their
// range.
func (r *Outages) WriteTables(w io.Writer, scenarios []string) error {
	var b strings.Builder
	b.WriteString("| | proxy | opened | failed | connect p50 | p99 | longest | ejections |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|\n")
	for _, s := range scenarios {
		for _, proxy := range r.proxies() {
			if cells := r.of(s, proxy); len(cells) > 0 {
				fmt.Fprintf(&b, "| %s | %s | %s |\n", s, proxy, strings.Join(r.line(cells), " | "))
			}
		}
	}
	b.WriteString(r.heldTable(scenarios))
	fmt.Fprintf(&b, "\n%s\n", r.conditions())
	_, err := io.WriteString(w, b.String())
	return err
}

// heldTable gives the table of held connections; empty if there were none.
func (r *Outages) heldTable(scenarios []string) string {
	var b strings.Builder
	for _, s := range scenarios {
		for _, proxy := range r.proxies() {
			if cells := r.of(s, proxy); len(cells) > 0 && cells[0].Held != nil {
				fmt.Fprintf(&b, "| %s | %s | %s |\n", s, proxy, strings.Join(heldLine(cells), " | "))
			}
		}
	}
	if b.Len() == 0 {
		return ""
	}
	return "\n| held connections | proxy | held | told that they are lost | half of them after | the last after |\n" +
		"|---|---|---|---|---|---|\n" + b.String()
}

func spreadBy(cells []*Outage, value func(*Outage) float64) Spread {
	var values []float64
	for _, c := range cells {
		values = append(values, value(c))
	}
	return spreadOf(values, 0)
}

// limited marks a time at which clients gave up.
func (r *Outages) limited(cells []*Outage, value func(*Outage) float64) string {
	s := spreadBy(cells, value)
	limit := r.Settings.Timeout * 1000
	s.AtLeast, s.MaxAtLeast = s.Median >= limit, s.Max >= limit
	if s.AtLeast {
		s.Median = limit
	}
	s.Max = min(s.Max, limit)
	return s.text(Milliseconds)
}

func count(v float64) string { return grouped(int(v)) }

// line gives the columns of the first table.
func (r *Outages) line(cells []*Outage) []string {
	failed := spreadBy(cells, func(c *Outage) float64 { return float64(c.Failed) }).text(count)
	if reasons := reasonsOf(cells); reasons != "" {
		failed += ": " + reasons
	}
	columns := []string{
		spreadBy(cells, func(c *Outage) float64 { return float64(c.Opened) }).short(count), failed,
		r.limited(cells, func(c *Outage) float64 { return c.P50 }),
		r.limited(cells, func(c *Outage) float64 { return c.P99 }),
		r.limited(cells, func(c *Outage) float64 { return c.Longest }),
	}
	counted := slices.DeleteFunc(slices.Clone(cells), func(c *Outage) bool { return c.Ejections == nil })
	return append(columns, spreadBy(counted, func(c *Outage) float64 { return float64(*c.Ejections) }).text(count))
}

// reasonsOf names why connections failed, of all repeats together, the most frequent first.
func reasonsOf(cells []*Outage) string {
	all := map[string]int{}
	for _, c := range cells {
		for reason, n := range c.Reasons {
			all[reason] += n
		}
	}
	names := slices.SortedFunc(maps.Keys(all), func(a, b string) int {
		if all[a] != all[b] {
			return all[b] - all[a]
		}
		return strings.Compare(a, b)
	})
	return strings.Join(names, ", ")
}

// heldLine gives the columns of the second table. A client that was not told counts as the limit.
func heldLine(cells []*Outage) []string {
	var held, told, half, last []float64
	halfLimits, lastLimits := 0, 0
	for _, c := range cells {
		h := c.Held
		times := slices.Clone(h.Told)
		for len(times) < h.Connections {
			times = append(times, h.Limit)
		}
		held, told = append(held, float64(h.Connections)), append(told, float64(len(h.Told)))
		half, last = append(half, Percentile(times, 0.5)), append(last, Percentile(times, 1))
		if len(h.Told) < h.Connections {
			lastLimits++
		}
		if 2*len(h.Told) < h.Connections {
			halfLimits++
		}
	}
	return []string{
		spreadOf(held, 0).short(count), spreadOf(told, 0).text(count),
		spreadOf(half, halfLimits).text(Seconds), spreadOf(last, lastLimits).text(Seconds),
	}
}

// conditions says what was measured, where.
func (r *Outages) conditions() string {
	repeats := 0
	loads := []float64{}
	for _, c := range r.Cells {
		repeats = max(repeats, c.Repeat)
		loads = append(loads, c.Load)
	}
	load := spreadOf(loads, 0)
	s := r.Settings
	return wrap(fmt.Sprintf("%v connections a second for %v s, the harm after %v s, clients give up after %v s; "+
		"%d repeats. %s. Linux %s, %d cores, %s; load average before each %.1f to %.1f.",
		s.Rate, s.Length, s.Before, s.Timeout, repeats, strings.Join(r.versionTexts(), "; "),
		r.Machine.Kernel, r.Machine.Cores, r.Machine.CPU, load.Min, load.Max))
}
