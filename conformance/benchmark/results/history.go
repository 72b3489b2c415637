package results

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// Histories are how stale proxies were, and what they did wrong, by recorded histories.
type Histories struct {
	Series[HistorySettings, *HistoryCell]
}

// HistorySettings say how histories were made. Times are in seconds.
type HistorySettings struct {
	// Length is how long Services change; Look how long clients connect when all is at rest.
	Length float64 `json:"length_s"`
	Look   float64 `json:"look_s"`
	// Rate is how many connections a second each client opens to each Service.
	Rate float64 `json:"rate"`
	Seed uint64  `json:"seed"`
	// MinSync is the proxies' minSyncPeriod; at 0 each has its own, which is 1 s in kube-proxy.
	MinSync float64 `json:"min_sync_s"`
	// Bound is how stale a connection may be beyond faults; 0 means that it was only measured.
	Bound float64 `json:"bound_s,omitempty"`
	// Explain says that a recorder explains failures, which takes processor time.
	Explain bool `json:"explain,omitempty"`
}

// HistoryCell is one history. Times of staleness are in milliseconds.
type HistoryCell struct {
	Run
	Explained
	Seed  uint64    `json:"seed"`
	Began time.Time `json:"began"`
	// Load is the machine's load average over a minute, as it was before.
	Load float64 `json:"load"`

	Conns    int `json:"connections"`
	Writes   int `json:"writes"`
	Faults   int `json:"faults"`
	Unjudged int `json:"unjudged"`
	// Unanswered is how many connections had no answer in time.
	Unanswered int `json:"unanswered"`
	// Removed, Added and Unused are the staleness of removals, of additions by refused connections, and of additions by
	// endpoints that got no connection; Beyond is the largest of them without the times of faults.
	Removed float64 `json:"removed_ms"`
	Added   float64 `json:"added_ms"`
	Unused  float64 `json:"unused_ms"`
	Beyond  float64 `json:"beyond_ms"`
	// Stale is how many connections were stale at all.
	Stale      int            `json:"stale"`
	Unproven   int            `json:"unproven"`
	Violations map[string]int `json:"violations"`
}

// E is the staleness of the history.
func (c *HistoryCell) E() float64 { return max(c.Removed, c.Added, c.Unused) }

// String gives a line about a cell.
func (c *HistoryCell) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-16s %-20s load %4.1f, %d connections, %d writes: removed %s, added %s, unused %s, beyond faults %s",
		c.Scenario, c.Proxy, c.Load, c.Conns, c.Writes, staleText(c.Removed), staleText(c.Added), staleText(c.Unused),
		staleText(c.Beyond))
	for _, kind := range slices.Sorted(maps.Keys(c.Violations)) {
		fmt.Fprintf(&b, ", %s %d", kind, c.Violations[kind])
	}
	if c.Unproven > 0 {
		fmt.Fprintf(&b, ", unproven %d", c.Unproven)
	}
	b.WriteString(c.words())
	return b.String()
}

// Wrong says whether any history holds a violation.
func (r *Histories) Wrong() bool {
	return slices.ContainsFunc(r.Cells, func(c *HistoryCell) bool { return len(c.Violations) > 0 })
}

// OpenHistories returns the results in a file, or none if there is no such file.
func OpenHistories(path string, settings HistorySettings, e Earlier) (*Histories, error) {
	r := &Histories{}
	return r, openSeries(path, &r.Series, settings, e)
}

// historyColumns are the violations that have a column of their own.
var historyColumns = []string{"reused", "stranger", "affinity", "back", "lost"}

// WriteTables writes what came out as Markdown, scenarios in the given order: the median of the repeats, and their
// range; violations of all repeats together.
func (r *Histories) WriteTables(w io.Writer, scenarios []string) error {
	var b strings.Builder
	fmt.Fprintf(&b,
		"| | proxy | connections | unanswered | stale | e removed | e added | e unused | e beyond faults | %s |\n|%s\n",
		strings.Join(historyColumns, " | "), strings.Repeat("---|", 9+len(historyColumns)))
	for _, s := range scenarios {
		for _, proxy := range r.proxies() {
			if cells := r.of(s, proxy); len(cells) > 0 {
				fmt.Fprintf(&b, "| %s | %s | %s |\n", s, proxy, strings.Join(historyLine(cells), " | "))
			}
		}
	}
	fmt.Fprintf(&b, "\n%s\n", r.conditions())
	_, err := io.WriteString(w, b.String())
	return err
}

func historyLine(cells []*HistoryCell) []string {
	var conns, stale, unproven, unanswered int
	wrong := make(map[string]int)
	for _, c := range cells {
		conns, stale, unproven = conns+c.Conns, stale+c.Stale, unproven+c.Unproven
		unanswered += c.Unanswered
		for kind, n := range c.Violations {
			wrong[kind] += n
		}
	}
	e := func(value func(*HistoryCell) float64) string {
		var values []float64
		for _, c := range cells {
			values = append(values, value(c))
		}
		return spreadOf(values, 0).text(staleText)
	}
	columns := []string{
		grouped(conns), grouped(unanswered), grouped(stale),
		e(func(c *HistoryCell) float64 { return c.Removed }), e(func(c *HistoryCell) float64 { return c.Added }),
		e(func(c *HistoryCell) float64 { return c.Unused }), e(func(c *HistoryCell) float64 { return c.Beyond }),
	}
	for _, kind := range historyColumns {
		text := fmt.Sprint(wrong[kind])
		if kind == "lost" && unproven > 0 {
			text += fmt.Sprintf(" (%d unproven)", unproven)
		}
		columns = append(columns, text)
	}
	return columns
}

// staleText prints a staleness: no connection was stale, or how much.
func staleText(ms float64) string {
	if ms == 0 {
		return "0 ms"
	}
	return Milliseconds(ms)
}

// conditions says what was measured, where.
func (r *Histories) conditions() string {
	var runs, loads []float64
	for _, c := range r.Cells {
		runs, loads = append(runs, float64(len(r.of(c.Scenario, c.Proxy)))), append(loads, c.Load)
	}
	load, s := spreadOf(loads, 0), r.Settings
	return fmt.Sprintf("Services change for %v s; each client opens %v connections a second to each of them;\n%v s at "+
		"rest; minSyncPeriod %vs; seed %d; %s runs of each.\n%s.\nLinux %s, %d cores, %s; load average before each run "+
		"%.1f to %.1f, median %.1f.", s.Length, s.Rate, s.Look, s.MinSync, s.Seed, runsText(runs),
		strings.Join(r.versionTexts(), ";\n"), r.Machine.Kernel,
		r.Machine.Cores, r.Machine.CPU, load.Min, load.Max, load.Median)
}

// runsText prints how many runs there are of what was run least and most: "3", "2 to 3".
func runsText(runs []float64) string {
	least, most := count(slices.Min(runs)), count(slices.Max(runs))
	if least == most {
		return most
	}
	return least + " to " + most
}
