package cluster

import (
	"context"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/answers/servicemap"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
)

// ServiceMap is who sent how much to which Service, as all nodes recorded it.
type ServiceMap struct {
	// Nodes is how many were asked, and Recording how many of them keep records.
	Nodes     int                `json:"nodes"`
	Recording int                `json:"recording"`
	Arrows    []servicemap.Arrow `json:"arrows"`
	// Losses is what the nodes lost since they record, and Lossy how many of them have Events or Refusals.
	Losses flows.Losses `json:"losses"`
	Lossy  int          `json:"lossy"`
	// Started is when the last of the nodes began to record.
	Started time.Time `json:"started,omitzero"`
	// Left are the oldest sums that did not fit the nodes' answers.
	Left uint64 `json:"left,omitempty"`
	Unanswered
}

// ServiceMap asks every node for its part of the map, which is bounded there, and adds up as many arrows as most.
func (c *Cluster) ServiceMap(ctx context.Context, since time.Duration, most int) (*ServiceMap, error) {
	targets, _, err := c.Targets(ctx)
	if err != nil {
		return nil, err
	}
	out, sum := &ServiceMap{Nodes: len(targets)}, servicemap.New(most)
	for _, r := range c.Each(ctx, targets, func(t Target) []string {
		return slices.Concat([]string{"flows", "--map", "--since=" + since.String()}, t.Flags)
	}) {
		var part servicemap.Answer
		if err := r.read(&part, codeSame); err != nil {
			out.add(r.Node, err)
			continue
		}
		if !part.Off {
			out.Recording++
		}
		if part.Losses.Events+part.Losses.Refusals > 0 {
			out.Lossy++
		}
		out.Losses.Events += part.Losses.Events
		out.Losses.Refusals += part.Losses.Refusals
		out.Losses.Sampled += part.Losses.Sampled
		if out.Left += part.Left; part.Started.After(out.Started) {
			out.Started = part.Started
		}
		for i := range part.Arrows {
			sum.Add(&part.Arrows[i])
		}
	}
	out.Arrows = sum.Arrows()
	return out, nil
}

// Records asks every node, and returns the newest records that match, at most so many, the newest first.
func (c *Cluster) Records(ctx context.Context, q *records.Question, most int, match func(*flows.Record) bool) (
	found []NodeRecord, failed []NodeAnswer, err error) {
	all, err := c.gather(ctx, q)
	if err != nil {
		return nil, nil, err
	}
	found = slices.DeleteFunc(all.records, func(r NodeRecord) bool { return !match(&r.Record) })
	slices.SortStableFunc(found, func(a, b NodeRecord) int { return b.Time.Compare(a.Time) })
	return found[:min(len(found), most)], all.Failed, nil
}
