package records

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/internal/system/units"
)

// columns of the table, with and without nodes.
var columns = terminal.Columns{16, 34, 28, 34, 10, 10, 9}

// nodeColumn is how wide the names of nodes are.
const nodeColumn = 16

// Table prints records as they come. With Nodes, each line has its node.
type Table struct {
	Printer *terminal.Printer
	Nodes   bool
	begun   bool
}

func (t *Table) row(node string, cells ...string) {
	if !t.Nodes {
		t.Printer.Line("%s", columns.Row(cells...))
		return
	}
	with := append(terminal.Columns{columns[0], nodeColumn}, columns[1:]...)
	t.Printer.Line("%s", with.Row(append([]string{cells[0], node}, cells[1:]...)...))
}

// Print prints a record of a node.
func (t *Table) Print(node string, r *flows.Record) {
	if !t.begun {
		t.begun = true
		t.row("NODE", "TIME", "CLIENT", "SERVICE", "ENDPOINT", "SENT", "RECEIVED", "DURATION", "END")
	}
	duration := ""
	if r.Seconds > 0 {
		duration = units.Brief(time.Duration(r.Seconds * float64(time.Second)))
	}
	t.row(node, clock(r.Time), Peer(&r.Client), Named(serviceOf(r.Service, r.Port), r.For), Peer(&r.Endpoint),
		units.Bytes(int64(r.Sent.Bytes)), units.Bytes(int64(r.Received.Bytes)), duration, End(t.Printer, r))
}

// End says how a connection ended.
func End(p *terminal.Printer, r *flows.Record) string {
	text := string(r.End)
	if r.Failure() {
		text = p.Paint(terminal.Red, text)
	}
	var more []string
	if r.Reason != "" {
		more = append(more, r.Reason)
	}
	if r.Protocol != "TCP" {
		more = append(more, r.Protocol)
	}
	if !r.Since.IsZero() {
		more = append(more, "counted since "+clock(r.Since))
	}
	if r.Weight > 1 {
		more = append(more, fmt.Sprintf("stands for %d", r.Weight))
	}
	if len(more) > 0 {
		text += " (" + strings.Join(more, ", ") + ")"
	}
	return text
}

func clock(t time.Time) string { return t.Local().Format("01-02 15:04:05") }

// serviceOf names the port of a Service.
func serviceOf(service, port string) string { return strings.TrimSuffix(service+":"+port, ":") }

// maxBy is how much of what asked for a Service's backends stands beside its name.
const maxBy = 80

// Named adds to the name of a Service, or of its port, what asked for its backends; empty adds nothing.
func Named(name, by string) string {
	if by == "" {
		return name
	}
	return name + " (" + clip.Cut(by, maxBy) + ")"
}

// Peer names a side: its pod, or its address.
func Peer(p *flows.Peer) string {
	switch name := cmp.Or(p.Pod, p.Workload); {
	case name != "":
		return name
	case p.Prefix.IsValid():
		return p.Prefix.String()
	case p.Addr.IsValid():
		return p.Addr.String()
	}
	return "-"
}

// PrintLosses says what a node's answer misses.
func PrintLosses(p *terminal.Printer, a *flows.Answer) {
	var lost []string
	for _, l := range [...]struct {
		n    uint64
		what string
	}{
		{a.Losses.Events, "ends of connections that the kernel had no room for"},
		{a.Losses.Refusals, "rejected or dropped packets that it had no room for"},
		{a.Losses.Sampled, "records left out under load (not of the sums)"},
		{a.Losses.Unread, "records that this reader was too slow for"},
		{a.Left, "older ones left out (--limit)"},
	} {
		if l.n > 0 {
			lost = append(lost, units.Thousands(int(l.n))+" "+l.what)
		}
	}
	text := "nothing is lost"
	if len(lost) > 0 {
		text = "missing: " + strings.Join(lost, "; ")
	}
	p.Line("%s", p.Paint(terminal.Dim, fmt.Sprintf("%s, recorded since %s: %s", a.Node, clock(a.Started), text)))
}
