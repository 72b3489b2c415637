package benchmark

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/units"
)

// Result is what a measurement gives. Its fields are a JSON object.
type Result interface {
	// WriteText writes the result for people.
	WriteText(w io.Writer, style Style) error
}

// Style paints parts of a text; a nil function leaves them as they are.
type Style struct{ Bold, Dim func(text string) string }

// page gathers the lines of a text.
type page struct {
	style Style
	text  strings.Builder
}

func (p *page) line(format string, args ...any) { fmt.Fprintf(&p.text, format+"\n", args...) }

func painted(paint func(string) string, text string) string {
	if paint == nil {
		return text
	}
	return paint(text)
}

// title begins the text, note ends it.
func (p *page) title(format string, args ...any) {
	p.line("%s\n", painted(p.style.Bold, fmt.Sprintf(format, args...)))
}

func (p *page) note(text string) { p.line("\n%s", painted(p.style.Dim, "  "+text)) }

// columns are the widths of a table's columns.
type columns []int

func (c columns) row(cells ...string) string {
	var b strings.Builder
	for i, cell := range cells {
		fmt.Fprintf(&b, "%-*s", c[i], cell)
	}
	return strings.TrimRight(b.String(), " ")
}

func (p *page) header(c columns, names ...string) {
	p.line("  %s", painted(p.style.Dim, c.row(names...)))
}

func (p *page) row(c columns, cells ...string) { p.line("  %s", c.row(cells...)) }

func (p *page) writeTo(w io.Writer) error {
	_, err := io.WriteString(w, p.text.String())
	return err
}

func (p *page) fill(f *Fill) {
	p.line("  written     %s elements, %s in %s messages", units.Thousands(f.Elements), units.Bytes(int64(f.Bytes)),
		units.Thousands(f.Messages))
	p.line("  allocated   %s objects, %s", units.Thousands(int(f.Allocations)), units.Bytes(int64(f.AllocatedBytes)))
	p.line("  resident    %s, after a collection %s", units.Bytes(f.RSS), units.Bytes(f.Collected))
	p.line("  kernel      %s, %d bytes an element", units.Bytes(f.Kernel), f.Kernel/int64(f.Elements))
}

// The times of results, written with the digits that matter.
func inSeconds(s float64) string       { return units.Brief(time.Duration(s * float64(time.Second))) }
func inMilliseconds(ms float64) string { return units.Brief(time.Duration(ms * 1e6)) }
func inMicroseconds(us float64) string { return units.Brief(time.Duration(us * 1e3)) }

func flowTime(t FlowTime) string { return fmt.Sprintf("%.2f (%.2f)", t.Median, t.Minimum) }

// WriteText writes the steps of a cold start.
func (r *ColdResult) WriteText(w io.Writer, style Style) error {
	p := page{style: style}
	p.title("Cold: %s Services with %s endpoints each into an empty kernel, %d rounds",
		units.Thousands(r.Services), units.Thousands(r.Endpoints), r.Rounds)
	c := columns{12, 12, 12}
	p.header(c, "", "median", "slowest")
	for _, row := range []struct {
		name            string
		median, slowest float64
	}{
		{"policy", r.Seconds.Policy, r.Slowest.Policy},
		{"compile", r.Seconds.Compile, r.Slowest.Compile},
		{"encode", r.Seconds.Encode, r.Slowest.Encode},
		{"commit", r.Seconds.Commit, r.Slowest.Commit},
		{"total", r.Seconds.Total, r.Slowest.Total},
		{"floor", r.Floor, r.SlowestFloor},
	} {
		p.row(c, row.name, inSeconds(row.median), inSeconds(row.slowest))
	}
	p.line("")
	p.fill(&r.Fill)
	p.note("The floor is the kernel alone, given the same bytes in another empty namespace.")
	return p.writeTo(w)
}

// WriteText writes a row for each size and kind of change.
func (r *ChangeResult) WriteText(w io.Writer, style Style) error {
	p := page{style: style}
	p.title("Change: in a kernel with Services of %s endpoints each, %s rounds", units.Thousands(r.Endpoints),
		units.Thousands(r.Rounds))
	c := columns{19, 10, 9, 9, 9, 12, 11, 10, 7, 11}
	p.header(c, "", "Services", "p50", "p99", "own p50", "kernel p50", "floor p50", "elements", "bytes", "allocations")
	var none ChangeKinds
	for i, kind := range none.each() {
		for n := range r.Sizes {
			k := r.Sizes[n].Kinds.each()[i]
			p.row(c, kind.name, units.Thousands(r.Sizes[n].Services), inMicroseconds(k.P50), inMicroseconds(k.P99),
				inMicroseconds(k.OwnP50), inMicroseconds(k.KernelP50), inMicroseconds(k.FloorP50), fmt.Sprint(k.Elements),
				fmt.Sprint(k.Bytes), fmt.Sprint(k.Allocations))
		}
	}
	p.note("Kernel is the commit, own is the rest. The floor is the kernel alone, given the same bytes in another " +
		"namespace.")
	return p.writeTo(w)
}

// WriteText writes how a steady rate of changes was kept up with.
func (r *ChurnResult) WriteText(w io.Writer, style Style) error {
	p := page{style: style}
	p.title("Churn: %v changes a second in a kernel with %s Services with %s endpoints each",
		r.Rate, units.Thousands(r.Services), units.Thousands(r.Endpoints))
	p.line("  put         %s changes in %s, at most %s late", units.Thousands(r.Changes), inSeconds(r.Seconds),
		inMilliseconds(r.Late))
	p.line("  to the acknowledgement: p50 %s, p99 %s, slowest %s", inMilliseconds(r.P50), inMilliseconds(r.P99),
		inMilliseconds(r.Max))
	p.line("  behind      %s when the time was up, at most %s", units.Thousands(r.Behind), units.Thousands(r.Backlog))
	p.line("  cores       %.2f", r.Cores)
	p.line("  written     %s elements, %s in %s transactions of %s messages", units.Thousands(r.TxnElements),
		units.Bytes(int64(r.TxnBytes)), units.Thousands(r.Transactions), units.Thousands(r.TxnMessages))
	p.line("\n  The first fill:")
	p.fill(&r.Fill)
	return p.writeTo(w)
}

// WriteText writes both kinds of restart.
func (r *RestartResult) WriteText(w io.Writer, style Style) error {
	p := page{style: style}
	p.title("Restart: %s Services with %s endpoints each in the kernel, %d rounds",
		units.Thousands(r.Services), units.Thousands(r.Endpoints), r.Rounds)
	c := columns{12, 12, 12, 12, 12}
	p.header(c, "", "median", "slowest", "messages", "elements")
	for _, row := range []struct {
		name string
		RestartKind
	}{{"adopted", r.Adopted}, {"corrected", r.Corrected}} {
		p.row(c, row.name, inSeconds(row.Seconds), inSeconds(row.Slowest), units.Thousands(row.Messages),
			units.Thousands(row.Elements))
	}
	p.line("")
	p.fill(&r.Fill)
	p.note(fmt.Sprintf("Corrected: %s Services changed while nobody was there.", units.Thousands(r.Changed)))
	return p.writeTo(w)
}

// WriteText writes a row for each variant.
func (r *FlowResult) WriteText(w io.Writer, style Style) error {
	p := page{style: style}
	p.title("Flow: a new UDP flow to Services with %s endpoints each, %s flows in each of %d rounds",
		units.Thousands(r.Endpoints), units.Thousands(r.Flows), r.Rounds)
	c := columns{32, 15, 15, 15, 15, 15, 9}
	p.header(c, "", "from the node", "", "forwarded", "", "established", "elements")
	p.header(c, "", "to a Service", "to an endpoint", "to a Service", "to an endpoint", "one packet")
	for i := range r.Variants {
		v := &r.Variants[i]
		cells := []string{v.Name()}
		for _, path := range flowPaths {
			cells = append(cells, flowTime(v.Paths[path]))
		}
		if v.Kind.ours() {
			cells = append(cells, units.Thousands(v.Elements))
		}
		p.row(c, cells...)
	}
	about := "Microseconds of processor time of the thread that sends, in the median and (at least)."
	if !slices.ContainsFunc(r.Variants, func(v FlowFigures) bool { return v.Kind == oneDNATRule }) {
		about += " nft, which writes the first two rows' rules, is not installed."
	}
	p.note(about)
	return p.writeTo(w)
}
