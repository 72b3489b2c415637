package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// Report compares the nodes.
type Report struct {
	Nodes []NodeStatus `json:"nodes"`
	// Differences are Services that not all nodes have programmed alike, sorted by name, the first maxDifferences; Differ
	// counts all. InFlight counts those that changed a moment ago.
	Differences []Difference `json:"differences,omitempty"`
	Differ      int          `json:"differ"`
	InFlight    int          `json:"inFlight"`
	// Notes say what is not known.
	Notes []string `json:"notes,omitempty"`
}

// NodeStatus is one node's answer, or why there is none.
type NodeStatus struct {
	Node   string         `json:"node"`
	Error  string         `json:"error,omitempty"`
	Status *status.Status `json:"status,omitempty"`
}

// Difference is a Service that some nodes have programmed otherwise than most.
type Difference struct {
	Service string `json:"service"`
	// Nodes are those that differ, and Since is when the last node changed, by this host's clock.
	Nodes []string  `json:"nodes"`
	Since time.Time `json:"since"`
	// Behind says that these nodes have not reached the versions of the others; else they differ at the same versions.
	Behind bool `json:"behind"`
}

const (
	// settle is how old a difference must be: changes reach nodes at different times.
	settle = 2 * time.Second
	// maxGroups bounds how many groups of nodes with the same digest are compared Service by Service.
	maxGroups      = 8
	maxDifferences = 100
)

// Failed counts the nodes without an answer.
func (r *Report) Failed() (n int) {
	for _, s := range r.Nodes {
		if s.Status == nil {
			n++
		}
	}
	return n
}

// Unsynced says why not all nodes are synced and alike, of the first such node; empty if they are.
func (r *Report) Unsynced() (why string) {
	more := -1
	for _, n := range r.Nodes {
		left := n.Error
		if n.Status != nil {
			left = n.Status.Unsynced()
		}
		if left == "" {
			continue
		}
		if more++; more == 0 {
			why = n.Node + ": " + left
		}
	}
	switch {
	case more > 0:
		return fmt.Sprintf("%s (and %s more)", why, terminal.Plural(more, "node"))
	case why == "" && r.Differ+r.InFlight > 0:
		return "not all nodes have programmed " + terminal.Plural(r.Differ+r.InFlight, "Service") + " alike"
	}
	return why
}

// Steady returns a copy without what changes as time passes: see status.Status.Steady.
func (r *Report) Steady() *Report {
	c := *r
	c.Nodes, c.Differences = slices.Clone(r.Nodes), slices.Clone(r.Differences)
	for i := range c.Nodes {
		if s := c.Nodes[i].Status; s != nil {
			c.Nodes[i].Status = s.Steady()
		}
	}
	for i := range c.Differences { // reckoned from ages
		c.Differences[i].Since = time.Time{}
	}
	return &c
}

// Status asks all nodes and compares them.
func (c *Cluster) Status(ctx context.Context) (*Report, error) {
	targets, note, err := c.Targets(ctx)
	if err != nil {
		return nil, err
	}
	r := &Report{Nodes: c.statuses(ctx, targets)}
	if note != "" {
		r.Notes = append(r.Notes, note)
	}
	groups := groupsOf(r.Nodes)
	if len(groups) < 2 {
		return r, nil
	}
	if len(groups) > maxGroups {
		r.Notes = append(r.Notes, fmt.Sprintf("there are %d different states; only the %d most frequent are compared",
			len(groups), maxGroups))
		groups = groups[:maxGroups]
	}
	var asked []Target
	for _, g := range groups {
		asked = append(asked, targets[g.nodes[0]])
	}
	for i, s := range c.statuses(ctx, asked, "--digests") {
		groups[i].whole = s.Status
		if s.Status == nil {
			r.Notes = append(r.Notes, fmt.Sprintf("the digests of %s are not known: %s", s.Node, s.Error))
		}
	}
	r.compare(groups, c.now())
	return r, nil
}

// statuses asks nodes for their status.
func (c *Cluster) statuses(ctx context.Context, targets []Target, more ...string) []NodeStatus {
	out := make([]NodeStatus, len(targets))
	results := c.Each(ctx, targets, func(t Target) []string {
		return slices.Concat([]string{"status", "-o", "json"}, t.Flags, more)
	})
	for i, r := range results {
		out[i].Node = r.Node
		s := &status.Status{}
		err := r.read(s, codeSame)
		if err == nil && s.Schema != status.Schema {
			err = fmt.Errorf("its status has schema %d, and this program knows %d", s.Schema, status.Schema)
		}
		if err != nil {
			out[i].Error = err.Error()
			continue
		}
		out[i].Status = s
	}
	return out
}

// group are nodes with the same digest of all Services.
type group struct {
	digest status.Digest
	nodes  []int // places in Report.Nodes
	// whole is the status of one of them with the digests of all Services; nil if it is not known.
	whole *status.Status
}

// groupsOf groups the nodes that answered, the largest group first.
func groupsOf(nodes []NodeStatus) (groups []group) {
	for i, n := range nodes {
		if n.Status == nil {
			continue
		}
		at := slices.IndexFunc(groups, func(g group) bool { return g.digest == n.Status.Digest })
		if at < 0 {
			at = len(groups)
			groups = append(groups, group{digest: n.Status.Digest})
		}
		groups[at].nodes = append(groups[at].nodes, i)
	}
	slices.SortStableFunc(groups, func(a, b group) int { return len(b.nodes) - len(a.nodes) })
	return groups
}

// compare fills in the differences between groups.
func (r *Report) compare(groups []group, now time.Time) {
	groups = slices.DeleteFunc(groups, func(g group) bool { return g.whole == nil })
	digests, names := make([]map[string]status.ServiceDigest, len(groups)), map[string]bool{}
	for i, g := range groups {
		digests[i] = map[string]status.ServiceDigest{}
		for _, d := range g.whole.Digests {
			digests[i][d.Service] = d
			names[d.Service] = true
		}
	}
	for name := range names {
		r.compareOne(name, groups, digests, now)
	}
	slices.SortFunc(r.Differences, func(a, b Difference) int { return strings.Compare(a.Service, b.Service) })
	r.Differ = len(r.Differences)
	r.Differences = r.Differences[:min(len(r.Differences), maxDifferences)]
}

func (r *Report) compareOne(name string, groups []group, digests []map[string]status.ServiceDigest, now time.Time) {
	count, youngest := map[status.Digest]int{}, time.Duration(-1)
	for i, g := range groups {
		d, there := digests[i][name]
		count[d.Digest] += len(g.nodes)
		if age := g.whole.Time.Sub(d.Since); there && (youngest < 0 || age < youngest) {
			youngest = age
		}
	}
	if len(count) < 2 {
		return
	}
	if youngest < settle {
		r.InFlight++
		return
	}
	usual := digests[0][name].Digest
	for d, n := range count {
		if n > count[usual] {
			usual = d
		}
	}
	diff := Difference{Service: name, Since: now.Add(-youngest), Behind: true}
	for i, g := range groups {
		if digests[i][name].Digest == usual {
			continue
		}
		diff.Behind = diff.Behind && g.behind(groups)
		for _, n := range g.nodes {
			diff.Nodes = append(diff.Nodes, r.Nodes[n].Node)
		}
	}
	slices.Sort(diff.Nodes)
	r.Differences = append(r.Differences, diff)
}

// behind reports whether others have programmed newer versions.
func (g *group) behind(others []group) bool {
	return slices.ContainsFunc(others, func(o group) bool { return !g.whole.Programmed.Reached(o.whole.Programmed) })
}
