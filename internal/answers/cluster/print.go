package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// Exit statuses: all nodes are in order, one is not, one could not be asked.
const (
	codeSame = iota
	codeDiffers
	codeTrouble
)

// maxLines is how many lines of a node, or of a list, are printed unless all are asked for.
const maxLines = 20

// Code returns the exit status.
func (r *Report) Code() int {
	if r.Failed() > 0 {
		return codeTrouble
	}
	for _, reasons := range r.Look() {
		if LevelOf(reasons) == Wrong {
			return codeDiffers
		}
	}
	if r.Differ > 0 {
		return codeDiffers
	}
	return codeSame
}

// Print prints a line for each node, then what is wrong.
func (r *Report) Print(p *terminal.Printer) {
	table := [][]string{{"NODE", "VERSION", "BACKEND", "SERVICES", "LAG", "QUARANTINED", "EJECTED", "DRIFT"}}
	var wrong []string
	for _, n := range r.Nodes {
		s := n.Status
		if s == nil {
			table = append(table, []string{n.Node, p.Paint(terminal.Red, n.Error)})
			continue
		}
		table = append(table, []string{n.Node, s.Version, s.Backend, fmt.Sprint(s.Services),
			fmt.Sprintf("%.1fs", s.Pending.LagSeconds), fmt.Sprint(s.Quarantined.Count), fmt.Sprint(s.Ejected.Count),
			driftOf(&s.Drift, s.Time)})
		for _, reason := range reasonsOf(s) {
			wrong = append(wrong, n.Node+": "+reason.Text)
		}
	}
	p.Table(table)
	for _, line := range wrong {
		p.Line("%s", p.Paint(terminal.Red, line))
	}
	r.printDifferences(p)
	for _, note := range r.Notes {
		p.Line("%s", p.Paint(terminal.Dim, note))
	}
}

func driftOf(d *status.Drift, now time.Time) string {
	switch {
	case d.Checked == nil:
		return "not checked yet"
	case d.Error != "":
		return "check failed"
	case d.Open():
		return "found, not repaired yet"
	case d.FoundAt != nil:
		return fmt.Sprintf("%d repaired, last %v ago", d.Found, now.Sub(*d.FoundAt).Round(time.Second))
	}
	return "none"
}

func timeOfDay(t time.Time) string { return t.Local().Format("15:04") }

func (r *Report) printDifferences(p *terminal.Printer) {
	answered := len(r.Nodes) - r.Failed()
	differing := map[string]bool{}
	for _, d := range r.Differences {
		for _, n := range d.Nodes {
			differing[n] = true
		}
	}
	switch {
	case answered == 0:
	case r.Differ == 0 && r.InFlight == 0:
		p.Line("%s programmed the same", have(answered))
	case r.Differ == 0:
		p.Line("%s programmed the same, but for %s that changed a moment ago", have(answered),
			terminal.Plural(r.InFlight, "Service"))
	case len(differing) == 1:
		p.Line("1 of %s differs:", terminal.Plural(answered, "node"))
	default:
		p.Line("%d of %s differ:", len(differing), terminal.Plural(answered, "node"))
	}
	for _, d := range r.Differences {
		why := ""
		if d.Behind {
			why = " (behind the others)"
		}
		p.Line("  %s, since %s: %s%s", d.Service, timeOfDay(d.Since), Named(d.Nodes), why)
	}
	if more := r.Differ - len(r.Differences); more > 0 {
		p.Line("  and %s more", terminal.Plural(more, "Service"))
	}
}

func have(nodes int) string {
	if nodes == 1 {
		return "1 node has"
	}
	return fmt.Sprintf("%d nodes have", nodes)
}

// Named names the first few of many nodes.
func Named(nodes []string) string {
	const most = 5
	text := strings.Join(nodes[:min(len(nodes), most)], ", ")
	if more := len(nodes) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// PrintLed prints which Services lead to a pod, or the text if there is none.
func PrintLed(p *terminal.Printer, none string, led []Led) {
	if len(led) == 0 {
		p.Line("%s", none)
		return
	}
	table := [][]string{{"SERVICE", "ADDRESS", "PORTS", "STATE", "SLICE"}}
	for _, l := range led {
		table = append(table, []string{l.Service, l.Address, strings.Join(l.Ports, ","), l.State, l.Slice})
	}
	p.Table(table)
}

// TargetOn returns the target of one node.
func (c *Cluster) TargetOn(ctx context.Context, node string) (Target, error) {
	targets, _, err := c.Targets(ctx)
	if err != nil {
		return Target{}, err
	}
	i := slices.IndexFunc(targets, func(t Target) bool { return t.Node == node })
	switch {
	case i < 0:
		return Target{}, fmt.Errorf("node %s: no pod of Verdict is on this node", node)
	case targets[i].Missing != "":
		return Target{}, fmt.Errorf("node %s: %s", node, targets[i].Missing)
	}
	return targets[i], nil
}

// compared runs verify, diff or compare on every node.
func (c *Cluster) compared(ctx context.Context, command string, options ...string) ([]Result, string, error) {
	targets, note, err := c.Targets(ctx)
	if err != nil {
		return nil, "", err
	}
	return c.Each(ctx, targets, func(t Target) []string {
		argv := []string{command}
		if command != "verify" {
			argv = append(append(argv, "--in-cluster", "--hostname-override="+t.Node), t.Flags...)
		}
		return append(argv, options...)
	}), note, nil
}

// Answers are what all nodes answer to one command, in the node's own JSON.
type Answers struct {
	Nodes []NodeAnswer `json:"nodes"`
	// Notes say what is not known.
	Notes []string `json:"notes,omitempty"`
	code  int
}

// NodeAnswer is one of them, or why there is none.
type NodeAnswer struct {
	Node   string          `json:"node"`
	Error  string          `json:"error,omitempty"`
	Answer json.RawMessage `json:"answer,omitempty"`
}

// Code returns the exit status.
func (a *Answers) Code() int { return a.code }

// CompareJSON runs verify, diff or compare on every node, and returns their answers.
func (c *Cluster) CompareJSON(ctx context.Context, command string) (*Answers, error) {
	results, note, err := c.compared(ctx, command, "-o", "json")
	if err != nil {
		return nil, err
	}
	a := &Answers{}
	if note != "" {
		a.Notes = append(a.Notes, note)
	}
	for _, r := range results {
		n := NodeAnswer{Node: r.Node}
		err := r.failure(codeSame, codeDiffers)
		if err == nil && !json.Valid(r.Stdout) {
			err = errors.New("the answer is no JSON")
		}
		if err != nil {
			n.Error, a.code = err.Error(), codeTrouble
		} else {
			n.Answer, a.code = r.Stdout, max(a.code, r.Code)
		}
		a.Nodes = append(a.Nodes, n)
	}
	return a, nil
}

// Compare runs verify, diff or compare on every node, prints what they find, and returns the exit status.
func (c *Cluster) Compare(ctx context.Context, p *terminal.Printer, command string, all bool) (int, error) {
	var options []string
	if all && command != "compare" { // compare prints all there is
		options = append(options, "--all")
	}
	results, note, err := c.compared(ctx, command, options...)
	if err != nil {
		return codeTrouble, err
	}
	code, same := codeSame, 0
	for _, r := range results {
		err := r.failure(codeSame, codeDiffers)
		switch {
		case err != nil:
			code = codeTrouble
			p.Line("%s: %s", r.Node, p.Paint(terminal.Red, err.Error()))
		case r.Code == codeSame:
			same++
		default:
			code = max(code, codeDiffers)
			p.Line("%s differs:", r.Node)
			printLines(p, strings.Split(strings.TrimRight(string(r.Stdout), "\n"), "\n"), all)
		}
	}
	p.Line("%d of %s in sync", same, terminal.Plural(len(results), "node"))
	if note != "" {
		p.Line("%s", p.Paint(terminal.Dim, note))
	}
	return code, nil
}

func printLines(p *terminal.Printer, lines []string, all bool) {
	for i, line := range lines {
		if i == maxLines && !all {
			p.Line("  and %s (--all)", terminal.Plural(len(lines)-i, "more line"))
			return
		}
		p.Line("  %s", line)
	}
}

// Top is what all nodes count.
type Top struct {
	Nodes int `json:"nodes"`
	// Rate is the connections per second of all ports of all nodes, and PortCount how many ports a node has; Ports may
	// have fewer.
	Rate      float64   `json:"rate"`
	PortCount int       `json:"portCount"`
	Ports     []TopPort `json:"ports"`
	Unanswered
}

// TopPort is one service port.
type TopPort struct {
	Service string `json:"service"`
	Port    string `json:"port,omitempty"`
	// For names what asked for the Service's backends; empty if nobody said.
	For string `json:"for,omitempty"`
	// Rate is the connections per second of all nodes, and Nodes how many of them had any.
	Rate  float64 `json:"rate"`
	Nodes int     `json:"nodes"`
	// Endpoints are there if one Service was asked for.
	Endpoints []TopEndpoint `json:"endpoints,omitempty"`
}

// TopEndpoint is an endpoint of one port, likewise.
type TopEndpoint struct {
	Address string  `json:"address"`
	Port    uint16  `json:"port"`
	Rate    float64 `json:"rate"`
	Nodes   int     `json:"nodes"`
}

// Busiest is how many service ports a node tells of unless all are asked for. So what a node sends is bounded, by some
// 500 KiB. A port that is none of a node's busiest is counted as idle there.
const Busiest = 1000

// TopOptions say what Top samples.
type TopOptions struct {
	// Interval is the time between the two samples of a node.
	Interval time.Duration
	// Service is the only one, with its endpoints; empty means all, without.
	Service string
	// All has nodes tell of all service ports, and not only of the Busiest.
	All bool
}

// Top takes a sample on every node.
func (c *Cluster) Top(ctx context.Context, o TopOptions) (*Top, error) {
	targets, _, err := c.Targets(ctx)
	if err != nil {
		return nil, err
	}
	argv := []string{"top", "--json", "--interval=" + o.Interval.String()}
	if o.Service != "" {
		argv = append(argv, "--service="+o.Service)
	}
	if !o.All {
		argv = append(argv, "--limit="+strconv.Itoa(Busiest))
	}
	top := adding{Top: &Top{Nodes: len(targets)}, ports: map[[2]string]int{}, endpoints: map[endpointKey]int{}}
	for _, r := range c.Each(ctx, targets, func(Target) []string { return argv }) {
		var sample struct {
			Rate      float64
			PortCount int
			Ports     []TopPort
		}
		if err := r.read(&sample, codeSame); err != nil {
			top.Unanswered.add(r.Node, err)
		}
		top.Rate += sample.Rate
		top.PortCount = max(top.PortCount, sample.PortCount)
		for i := range sample.Ports {
			top.add(&sample.Ports[i])
		}
	}
	slices.SortFunc(top.Ports, func(a, b TopPort) int {
		return cmp.Or(cmp.Compare(b.Rate, a.Rate), strings.Compare(a.Service, b.Service), strings.Compare(a.Port, b.Port))
	})
	return top.Top, nil
}

// adding is a Top that nodes are added to, with the places of what it has.
type adding struct {
	*Top
	ports     map[[2]string]int
	endpoints map[endpointKey]int
}

type endpointKey struct {
	of      int
	address string
	port    uint16
}

// add adds what one more node counted for a port.
func (t *adding) add(s *TopPort) {
	key := [2]string{s.Service, s.Port}
	i, there := t.ports[key]
	if !there {
		i, t.ports[key] = len(t.Ports), len(t.Ports)
		t.Ports = append(t.Ports, TopPort{Service: s.Service, Port: s.Port})
	}
	p := &t.Ports[i]
	p.For = cmp.Or(p.For, s.For)
	if p.Rate += s.Rate; s.Rate > 0 {
		p.Nodes++
	}
	for _, e := range s.Endpoints {
		key := endpointKey{i, e.Address, e.Port}
		k, there := t.endpoints[key]
		if !there {
			k, t.endpoints[key] = len(p.Endpoints), len(p.Endpoints)
			p.Endpoints = append(p.Endpoints, TopEndpoint{Address: e.Address, Port: e.Port})
		}
		if p.Endpoints[k].Rate += e.Rate; e.Rate > 0 {
			p.Endpoints[k].Nodes++
		}
	}
}

// Print prints the busiest service ports.
func (t *Top) Print(p *terminal.Printer, all bool) {
	table := [][]string{{"SERVICE", "RATE", "NODES"}}
	for i, s := range t.Ports {
		if i == maxLines && !all {
			break
		}
		name := records.Named(strings.TrimSuffix(s.Service+":"+s.Port, ":"), s.For)
		table = append(table, []string{name, fmt.Sprintf("%.1f/s", s.Rate), fmt.Sprintf("%d of %d", s.Nodes, t.Nodes)})
	}
	p.Table(table)
	t.Unanswered.print(p)
}
