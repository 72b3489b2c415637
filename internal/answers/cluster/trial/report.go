package trial

import (
	"fmt"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// Report is what came of a trial.
type Report struct {
	Namespace string `json:"namespace"`
	// Nodes are those that took part, Skipped says what was not tried, and Errors what should have been and could not.
	Nodes   []string `json:"nodes"`
	Skipped []string `json:"skipped,omitempty"`
	Errors  []string `json:"errors,omitempty"`
	Results []Result `json:"results"`
	// Left says that the namespace was not removed, and why.
	Left string `json:"left,omitempty"`
}

// Result is what came of the connections from one pod to one address.
type Result struct {
	Case    string `json:"case"`
	Network string `json:"network"`
	Family  string `json:"family"`
	// From is pod, or node for a pod with its node's network, and Node the node.
	From  string `json:"from"`
	Node  string `json:"node"`
	To    string `json:"to"`
	Tries int    `json:"tries"`
	// Failed counts the connections that went wrong, Why says how, and Cause what explain says on the node.
	Failed int    `json:"failed"`
	Why    string `json:"why,omitempty"`
	Cause  string `json:"cause,omitempty"`
}

// Failed counts the connections that went wrong.
func (r *Report) Failed() (n int) {
	for i := range r.Results {
		n += r.Results[i].Failed
	}
	return n
}

// maxPrinted bounds how many failures are printed.
const maxPrinted = 20

// Print prints a row for each case, then the failures.
func (r *Report) Print(p *terminal.Printer) {
	type kind struct{ name, network, family, from string }
	tries, failed := map[kind]int{}, map[kind]int{}
	var order []kind
	for i := range r.Results {
		x := &r.Results[i]
		k := kind{x.Case, x.Network, x.Family, x.From}
		if tries[k] == 0 {
			order = append(order, k)
		}
		tries[k] += x.Tries
		failed[k] += x.Failed
	}
	rows := [][]string{{"CASE", "PROTOCOL", "FAMILY", "FROM", "CONNECTIONS", "RESULT"}}
	for _, k := range order {
		result := p.Paint(terminal.Green, "ok")
		if failed[k] > 0 {
			result = p.Paint(terminal.Red, fmt.Sprintf("%d failed", failed[k]))
		}
		rows = append(rows, []string{k.name, k.network, k.family, k.from, fmt.Sprint(tries[k]), result})
	}
	if len(order) > 0 {
		p.Table(rows)
	}
	r.printFailures(p)
	for _, e := range r.Errors {
		p.Line("%s", p.Paint(terminal.Red, e))
	}
	for _, s := range r.Skipped {
		p.Line("%s", p.Paint(terminal.Dim, "not tried: "+s))
	}
	if r.Left != "" {
		p.Line("%s", p.Paint(terminal.Red, fmt.Sprintf("the namespace %s is still there: %s", r.Namespace, r.Left)))
	}
}

func (r *Report) printFailures(p *terminal.Printer) {
	printed := 0
	for i := range r.Results {
		x := &r.Results[i]
		if x.Failed == 0 {
			continue
		}
		if printed++; printed > maxPrinted {
			continue
		}
		p.Line("%s", p.Paint(terminal.Red, fmt.Sprintf("%s, from %s %s to %s/%s: %d of %d: %s", x.Case, x.From,
			x.Node, x.To, x.Network, x.Failed, x.Tries, x.Why)))
		if x.Cause != "" {
			p.Line("  %s", x.Cause)
		}
	}
	if more := printed - maxPrinted; more > 0 {
		p.Line("and %d more (-o json)", more)
	}
}

// Code returns the exit status: 0 if all is as it should be, 1 if a connection is not, 2 if something was not tried.
func (r *Report) Code() int {
	switch {
	case len(r.Errors) > 0 || r.Left != "" && r.Left != kept:
		return 2
	case r.Failed() > 0:
		return 1
	}
	return 0
}
