package cluster

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// Services is how Services fare on all nodes.
type Services struct {
	// Nodes counts all, with those that Failed names: they gave no answer.
	Nodes    int           `json:"nodes"`
	Services []ServiceOver `json:"services"`
	Unanswered
}

// ServiceOver is a Service on all nodes: as it is on the node where it fares worst.
type ServiceOver struct {
	status.Service
	// Node is that node, and Nodes counts those with the same state; empty if all have programmed it.
	Node  string `json:"node,omitempty"`
	Nodes int    `json:"nodes,omitempty"`
}

// Services asks all nodes for the Services that are not in order there, and unless only these are asked for, the first
// node that answers for all of them: what nodes send stays small.
func (c *Cluster) Services(ctx context.Context, asked inspect.ServicesAsked) (*Services, error) {
	targets, _, err := c.Targets(ctx)
	if err != nil {
		return nil, err
	}
	out := &Services{Nodes: len(targets), Services: []ServiceOver{}}
	places := map[string]int{}
	var answer []Target
	for i, r := range c.Each(ctx, targets, func(t Target) []string { return servicesArgs(t, asked, true) }) {
		found, err := servicesOf(&r)
		if err != nil {
			out.Unanswered.add(r.Node, err)
			continue
		}
		answer = append(answer, targets[i])
		out.add(places, r.Node, found)
	}
	if !asked.Trouble && len(answer) > 0 {
		one := func(t Target) []string { return servicesArgs(t, asked, false) }
		r := c.Each(ctx, answer[:1], one)[0]
		found, err := servicesOf(&r)
		if err != nil {
			return nil, fmt.Errorf("node %s: %w", r.Node, err)
		}
		out.add(places, "", found)
	}
	slices.SortFunc(out.Services, func(a, b ServiceOver) int {
		return cmp.Or(cmp.Compare(a.State.Rank(), b.State.Rank()), cmp.Compare(b.Nodes, a.Nodes),
			strings.Compare(a.Service.Service, b.Service.Service))
	})
	return out, nil
}

func servicesArgs(t Target, asked inspect.ServicesAsked, trouble bool) []string {
	argv := append([]string{"services", "-o", "json", "--namespace=" + asked.Namespace}, t.Flags...)
	if trouble {
		argv = append(argv, "--trouble")
	}
	if asked.Name != "" {
		argv = append(argv, "--", asked.Name)
	}
	return argv
}

func servicesOf(r *Result) (list []status.Service, err error) {
	var s status.Services
	err = r.read(&s, codeSame)
	return s.Services, err
}

// add adds what a node says; without a node, only Services that no node has named count.
func (s *Services) add(places map[string]int, node string, found []status.Service) {
	for _, svc := range found {
		i, there := places[svc.Service]
		switch {
		case !there:
			places[svc.Service] = len(s.Services)
			s.Services = append(s.Services, ServiceOver{Service: svc, Node: node})
			i = len(s.Services) - 1
		case node == "" || svc.State.Rank() > s.Services[i].State.Rank():
			continue
		case svc.State.Rank() < s.Services[i].State.Rank():
			s.Services[i] = ServiceOver{Service: svc, Node: node}
		}
		if node != "" {
			s.Services[i].Nodes++
		}
	}
}

// Print prints a row for each Service.
func (s *Services) Print(p *terminal.Printer, wide bool) {
	rows := [][]string{append(inspect.ServiceHeading(wide), "")}
	for i := range s.Services {
		svc, where := &s.Services[i], ""
		if svc.Nodes > 0 {
			where = fmt.Sprintf("on %s (%d of %d)", svc.Node, svc.Nodes, s.Nodes)
		}
		rows = append(rows, append(inspect.ServiceRow(&svc.Service, wide), where))
	}
	if len(s.Services) > 0 {
		p.Table(rows)
	} else {
		p.Line("no Service is as asked for")
	}
	s.Unanswered.print(p)
}
