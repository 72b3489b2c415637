package ledger

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// TimeLayout is how the time of a record is printed, in local time.
const TimeLayout = "2006-01-02 15:04:05.000"

// columnsFor returns the columns of a line. Causes get what a terminal leaves them, and continue below themselves.
func columnsFor(p *terminal.Printer) terminal.Columns {
	const rest = 14 + len("123.4 ms")
	cause := 48
	if p.Width() > 0 {
		cause = max(min(cause, p.Width()-len(TimeLayout)-1-rest), 20)
	}
	return terminal.Columns{len(TimeLayout) + 1, cause, 14}
}

// PrintHead prints the heads of the columns of Print.
func PrintHead(p *terminal.Printer) {
	p.Line("%s", p.Paint(terminal.Bold, columnsFor(p).Row("TIME", "CAUSE", "ELEMENTS", "TOOK")))
}

// Print prints a record as a line.
func (r *Record) Print(p *terminal.Printer) {
	cause, wrote, took := r.Cause(), r.wrote(), r.took()
	switch {
	case r.Kind == Failed:
		cause, wrote = p.Paint(terminal.Red, "failed: "+cause), ""
	case r.Kind == Lost || r.Kind == Found || r.Error != "":
		cause = p.Paint(terminal.Red, cause)
	case r.Kind != Change:
		cause = p.Paint(terminal.Dim, cause)
	}
	columns := columnsFor(p)
	first, below := cause, ""
	if p.Width() > 0 {
		first, below, _ = strings.Cut(terminal.Wrap(cause, columns[1]-1, 0), "\n")
	}
	p.Line("%s", columns.Row(r.At.Local().Format(TimeLayout), first, wrote, took))
	for line := range strings.Lines(below) {
		p.Line("%s", columns.Row("", strings.TrimSuffix(line, "\n"), ""))
	}
	for _, text := range r.Findings {
		p.Line("  %s", text)
	}
	if r.Error != "" {
		p.Line("  %s", r.Error)
	}
}

// Cause says in a few words why there is a record.
func (r *Record) Cause() string {
	switch r.Kind {
	case Start:
		text := "verdict " + r.Version + " started"
		if r.Continues {
			text += "; the kernel holds what it left"
		}
		return text
	case Stop:
		return "verdict stopped"
	case Checkpoint:
		return "checkpoint"
	case Lost:
		return terminal.Plural(int(r.Missing), "record") + " missing here"
	case Found:
		return terminal.Plural(len(r.Findings), "change") + " by another program"
	}
	for _, first := range [...]string{whyAdopted, whyFirst} {
		if slices.Contains(r.Why, first) {
			return fmt.Sprintf("%s: %s", first, terminal.Plural(len(r.Objects)+r.MoreObjects, "object"))
		}
	}
	words := slices.Clone(r.Why)
	for i := range r.Objects {
		if i == 2 && len(r.Objects)+r.MoreObjects > 3 {
			words = append(words, fmt.Sprintf("and %d more", len(r.Objects)+r.MoreObjects-i))
			break
		}
		words = append(words, r.Objects[i].String())
	}
	return strings.Join(words, ", ")
}

// String returns the kind and the name, with the version that the object has.
func (o *Object) String() string {
	text := o.Kind + " " + o.Name
	if o.Gone {
		text += " gone"
	}
	if o.Version != "" {
		text += " @" + o.Version
	}
	return text
}

// wrote says how many elements were written.
func (r *Record) wrote() string {
	var words []string
	for _, n := range []struct {
		sign  string
		count int
	}{{"+", r.Added}, {"~", r.Replaced}, {"-", r.Removed}} {
		if n.count > 0 {
			words = append(words, fmt.Sprint(n.sign, n.count))
		}
	}
	if r.Kind == Change && len(words) == 0 {
		return "none"
	}
	return strings.Join(words, " ")
}

// took says how long the transaction took, and how long the change waited for it.
func (r *Record) took() string {
	if r.Took == nil {
		return ""
	}
	text := milliseconds(r.Took.Plan + r.Took.Kernel)
	if r.Took.Wait >= 100 {
		text += ", waited " + milliseconds(r.Took.Wait)
	}
	return text
}

func milliseconds(us int64) string {
	d := time.Duration(us) * time.Microsecond
	if d >= time.Second {
		return d.Round(10 * time.Millisecond).String()
	}
	return fmt.Sprintf("%.1f ms", float64(us)/1000)
}
