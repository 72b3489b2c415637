package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/verdict-proxy/verdict/internal/answers/bundle"
)

// maxLog bounds what is read of a log.
const maxLog = 8 << 20

// Bundled says which nodes a bundle is to have, all if none is named, and how many lines of their logs.
type Bundled struct {
	Nodes []string
	Lines int
}

// Bundle adds what nodes say of themselves to an archive, a directory for each, and what they say compared. It returns
// the nodes without an answer; their logs are there if the API server has them.
func (c *Cluster) Bundle(ctx context.Context, a *bundle.Archive, o Bundled) (failed []NodeAnswer, err error) {
	targets, note, err := c.Targets(ctx)
	if err != nil {
		return nil, err
	}
	if note != "" {
		a.Lacks("nodes", errors.New(note))
	}
	for _, n := range o.Nodes {
		if !slices.ContainsFunc(targets, func(t Target) bool { return t.Node == n }) {
			targets = append(targets, Target{Node: n, Missing: "there is no such node"})
		}
	}
	targets = slices.DeleteFunc(targets, func(t Target) bool {
		return o.Nodes != nil && !slices.Contains(o.Nodes, t.Node)
	})
	if r, err := c.Status(ctx); err != nil {
		a.Lacks("status.json", err)
	} else if text, err := json.MarshalIndent(r, "", "  "); err != nil {
		return nil, err
	} else if err := a.Add("status.json", text); err != nil {
		return nil, err
	}
	for part := range slices.Chunk(targets, max(c.Parallel, 1)) { // what nodes send is held until it is added
		for _, r := range c.Each(ctx, part, func(t Target) []string {
			return append([]string{"bundle", "-o", "-"}, t.Flags...)
		}) {
			err := r.failure(0)
			if err == nil {
				err = a.AddArchive(r.Node, r.Stdout)
			}
			if err != nil {
				failed = append(failed, NodeAnswer{Node: r.Node, Error: err.Error()})
				a.Lacks(r.Node, err)
			}
			if err := c.addLogs(ctx, a, r.Target, o.Lines); err != nil {
				return failed, err
			}
		}
	}
	return failed, ctx.Err()
}

// addLogs adds the logs of a node's pod. One that never started again has no previous log.
func (c *Cluster) addLogs(ctx context.Context, a *bundle.Archive, t Target, lines int) error {
	if t.Pod == "" || lines == 0 {
		return nil
	}
	for name, previous := range map[string]bool{"/log.txt": false, "/log-previous.txt": true} {
		text, err := c.API.Logs(ctx, c.Namespace, t.Pod, container, lines, previous)
		if err != nil && !previous {
			a.Lacks(t.Node+name, err)
		}
		if len(text) == 0 || err != nil {
			continue
		}
		if err := a.Add(t.Node+name, text); err != nil {
			return err
		}
	}
	return nil
}
