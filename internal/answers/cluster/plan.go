package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// PlanReport is what a change would do on all nodes.
type PlanReport struct {
	Nodes []NodePlan `json:"nodes"`
	// Notes say what is not known.
	Notes []string `json:"notes,omitempty"`
	code  int
}

// NodePlan is one node's plan (docs/PLAN.md), or why there is none.
type NodePlan struct {
	Node  string          `json:"node"`
	Error string          `json:"error,omitempty"`
	Plan  json.RawMessage `json:"plan,omitempty"`
	// sums is what is added up of the plan.
	sums struct {
		Effects  map[string]int
		Writes   struct{ Added, Replaced, Removed int }
		Services []struct {
			Service string
			Flows   []struct {
				Fate        string
				Connections int
			}
		}
	}
}

// maxGone bounds how many objects to delete are named to a node: they are part of an address.
const maxGone = 500

// planCommand returns the input of "verdict plan" for a change, and its arguments.
func planCommand(ctx context.Context, files watch.ChangeFiles, more []string) (input string,
	argv func(Target) []string, err error) {
	if input, err = watch.ChangeText(ctx, files.Apply); err != nil {
		return "", nil, err
	}
	gone, err := watch.GoneObjects(ctx, files.Delete)
	if err != nil {
		return "", nil, err
	}
	if gone = append(gone, files.Gone...); len(gone) > maxGone {
		return "", nil, fmt.Errorf("%d objects to delete are too many: %d at most", len(gone), maxGone)
	}
	if input != "" {
		more = append(slices.Clone(more), "-f", "-")
	}
	for _, object := range gone {
		more = append(more, "--delete-object="+object)
	}
	return input, func(t Target) []string {
		return slices.Concat([]string{"plan", "--in-cluster", "--hostname-override=" + t.Node}, t.Flags, more)
	}, nil
}

// Plan asks all nodes what a change would do. Options are further arguments of "verdict plan".
func (c *Cluster) Plan(ctx context.Context, files watch.ChangeFiles, options []string) (*PlanReport, error) {
	input, argv, err := planCommand(ctx, files, append(slices.Clone(options), "-o", "json"))
	if err != nil {
		return nil, err
	}
	targets, note, err := c.Targets(ctx)
	if err != nil {
		return nil, err
	}
	r := &PlanReport{}
	if note != "" {
		r.Notes = append(r.Notes, note)
	}
	for _, result := range c.EachWith(ctx, targets, input, argv) {
		n := NodePlan{Node: result.Node}
		if err := result.read(&n.sums, codeSame, codeDiffers); err != nil {
			n.Error, r.code = err.Error(), codeTrouble
		} else {
			n.Plan, r.code = result.Stdout, max(r.code, result.Code)
		}
		r.Nodes = append(r.Nodes, n)
	}
	return r, nil
}

// PlanOn has one node plan a change, and prints what it says. It returns the exit status.
func (c *Cluster) PlanOn(ctx context.Context, p *terminal.Printer, node string, files watch.ChangeFiles,
	options []string) (int, error) {
	input, argv, err := planCommand(ctx, files, options)
	if err != nil {
		return codeTrouble, err
	}
	t, err := c.TargetOn(ctx, node)
	if err != nil {
		return codeTrouble, err
	}
	r := c.EachWith(ctx, []Target{t}, input, argv)[0]
	if err := r.failure(codeSame, codeDiffers); err != nil {
		return codeTrouble, fmt.Errorf("node %s: %w", node, err)
	}
	p.Line("%s", strings.TrimRight(string(r.Stdout), "\n"))
	return r.Code, nil
}

// Code returns the exit status.
func (r *PlanReport) Code() int { return r.code }

// connectionFates are the effects on open connections, in their order in a table.
var connectionFates = []string{"cuts", "moves", "drains", "stays", "refuses"}

// Print prints a line for each node, then the connections of each Service on all nodes together.
func (r *PlanReport) Print(p *terminal.Printer, all bool) {
	head := []string{"NODE", "SERVICES", "ELEMENTS", "OPENS", "CLOSES"}
	for _, fate := range connectionFates {
		head = append(head, strings.ToUpper(fate))
	}
	table := [][]string{head}
	for i := range r.Nodes {
		n := &r.Nodes[i]
		if n.Error != "" {
			table = append(table, []string{n.Node, p.Paint(terminal.Red, n.Error)})
			continue
		}
		row := []string{n.Node, fmt.Sprint(len(n.sums.Services)),
			fmt.Sprintf("+%d ~%d -%d", n.sums.Writes.Added, n.sums.Writes.Replaced, n.sums.Writes.Removed),
			fmt.Sprint(n.sums.Effects["opens"]), fmt.Sprint(n.sums.Effects["closes"])}
		for _, fate := range connectionFates {
			row = append(row, fmt.Sprint(n.sums.Effects[fate]))
		}
		table = append(table, row)
	}
	p.Table(table)
	if lines := r.connections(); len(lines) > 0 {
		p.Line("open connections:")
		printLines(p, lines, all)
	}
	for _, note := range r.Notes {
		p.Line("%s", p.Paint(terminal.Dim, note))
	}
}

// connections adds up what becomes of connections, by Service.
func (r *PlanReport) connections() (lines []string) {
	sums := map[string]map[string]int{}
	for i := range r.Nodes {
		for _, s := range r.Nodes[i].sums.Services {
			for _, f := range s.Flows {
				if sums[s.Service] == nil {
					sums[s.Service] = map[string]int{}
				}
				sums[s.Service][f.Fate] += f.Connections
			}
		}
	}
	for _, service := range slices.Sorted(maps.Keys(sums)) {
		var parts []string
		for _, fate := range connectionFates {
			if n := sums[service][fate]; n > 0 {
				parts = append(parts, fmt.Sprintf("%s %d", fate, n))
			}
		}
		if len(parts) > 0 {
			lines = append(lines, service+": "+strings.Join(parts, ", "))
		}
	}
	return lines
}
