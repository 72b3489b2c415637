package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// GoalOf returns what a node has to reach to hold what the API has of a Service. It fails if no node programs it.
func GoalOf(svc *corev1.Service, list *discoveryv1.EndpointSliceList) (status.Goal, error) {
	g := status.Goal{Service: snapshot.Name{Namespace: svc.Namespace, Name: svc.Name}, Versions: status.Versions{
		Services: snapshot.Version(svc.ResourceVersion), EndpointSlices: snapshot.Version(list.ResourceVersion)}}
	converted, of := watch.Objects(svc, list.Items)
	if converted == nil {
		return g, fmt.Errorf("%v is headless, an ExternalName, or another proxy's: no node programs it", g.Service)
	}
	g.Digest = status.Of(converted, of)
	return g, nil
}

// goal is what the nodes have to reach.
type goal struct{ status.Goal }

// reached reports whether a node has programmed the goal, or something newer.
func (g *goal) reached(s *status.Status) bool {
	var digest status.Digest
	for _, d := range s.Digests {
		if d.Service == g.Service.String() {
			digest = d.Digest
		}
	}
	return g.Reached(s.Programmed, digest, g.rejected(s))
}

// rejected reports whether the node's kernel rejects the Service.
func (g *goal) rejected(s *status.Status) bool {
	return slices.ContainsFunc(s.Quarantined.Services, func(q status.QuarantinedService) bool {
		return q.Service == g.Service.String()
	})
}

// Waiting is a node that has not programmed what is waited for, and why.
type Waiting struct {
	Node string `json:"node"`
	Why  string `json:"why"`
}

// ErrBehind says that not all nodes got there in time.
var ErrBehind = errors.New("not all nodes have programmed it in time")

// Wait returns once all nodes have programmed what the API has of a Service now. When the context ends, it returns the
// nodes that have not, and ErrBehind.
func (c *Cluster) Wait(ctx context.Context, service snapshot.Name, every time.Duration) (nodes int, left []Waiting,
	err error) {
	svc, err := c.API.Service(ctx, service.Namespace, service.Name)
	if err != nil {
		return 0, nil, err
	}
	list, err := c.API.Slices(ctx, service.Namespace, service.Name)
	if err != nil {
		return 0, nil, err
	}
	wanted, err := GoalOf(svc, list)
	if err != nil {
		return 0, nil, err
	}
	g := goal{wanted}
	targets, _, err := c.Targets(ctx)
	if err != nil {
		return 0, nil, err
	}
	nodes = len(targets)
	for {
		asked := c.statuses(ctx, targets, "--service", g.Service.String())
		if ctx.Err() == nil || left == nil {
			targets, left = g.missing(targets, asked)
		}
		if len(left) == 0 {
			return nodes, nil, nil
		}
		if clock.Pause(ctx, every); ctx.Err() != nil {
			return nodes, left, ErrBehind
		}
	}
}

// missing returns the nodes that have not reached the goal.
func (g *goal) missing(targets []Target, asked []NodeStatus) (rest []Target, left []Waiting) {
	for i, s := range asked {
		why := s.Error
		if s.Status != nil {
			if g.reached(s.Status) {
				continue
			}
			why = g.why(s.Status)
		}
		rest, left = append(rest, targets[i]), append(left, Waiting{s.Node, why})
	}
	return rest, left
}

// why says what a node lacks.
func (g *goal) why(s *status.Status) string {
	if g.rejected(s) {
		return "its kernel rejects the Service"
	}
	if f := s.Failing; f != nil {
		return "its transactions fail: " + f.Error
	}
	var parts []string
	for _, v := range []struct {
		what      string
		has, want snapshot.Version
	}{
		{"services", s.Programmed.Services, g.Versions.Services},
		{"endpointslices", s.Programmed.EndpointSlices, g.Versions.EndpointSlices},
	} {
		if !v.has.Reached(v.want) {
			parts = append(parts, fmt.Sprintf("%s at version %s of %s", v.what, v.has, v.want))
		}
	}
	if parts == nil {
		return "it has another state of the Service at the same version"
	}
	return strings.Join(parts, ", ")
}
