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

	"github.com/verdict-proxy/verdict/internal/status"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// goal is what a node has to reach: what the API had for one Service.
type goal struct {
	service string
	// versions are those of the Service, and of the list of its slices: also that a slice is gone has one.
	versions status.Versions
	// digest is the one of a node that has programmed exactly this.
	digest status.Digest
}

// goalOf converts what the API has.
func goalOf(svc *corev1.Service, list *discoveryv1.EndpointSliceList) (goal, error) {
	g := goal{service: svc.Namespace + "/" + svc.Name, versions: status.Versions{
		Services: snapshot.Version(svc.ResourceVersion), EndpointSlices: snapshot.Version(list.ResourceVersion)}}
	converted, of := watch.Objects(svc, list.Items)
	if converted == nil {
		return g, fmt.Errorf("%s is headless, an ExternalName, or another proxy's: no node programs it", g.service)
	}
	g.digest = status.Of(converted, of)
	return g, nil
}

// reached reports whether a node has programmed the goal, or something newer. A node at rest learns of the list's
// version only by a bookmark, within about a minute; its digest says so at once.
func (g *goal) reached(s *status.Status) bool {
	return s.Programmed.Reached(g.versions) && !g.rejected(s) || slices.ContainsFunc(s.Digests,
		func(d status.ServiceDigest) bool { return d.Service == g.service && d.Digest == g.digest })
}

// rejected reports whether the node's kernel rejects the Service.
func (g *goal) rejected(s *status.Status) bool {
	return slices.ContainsFunc(s.Quarantined.Services, func(q status.QuarantinedService) bool {
		return q.Service == g.service
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
	g, err := goalOf(svc, list)
	if err != nil {
		return 0, nil, err
	}
	targets, _, err := c.Targets(ctx)
	if err != nil {
		return 0, nil, err
	}
	nodes = len(targets)
	for {
		asked := c.statuses(ctx, targets, "--service", g.service)
		if ctx.Err() == nil || left == nil {
			targets, left = g.missing(targets, asked)
		}
		if len(left) == 0 {
			return nodes, nil, nil
		}
		select {
		case <-ctx.Done():
			return nodes, left, ErrBehind
		case <-time.After(every):
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
		{"services", s.Programmed.Services, g.versions.Services},
		{"endpointslices", s.Programmed.EndpointSlices, g.versions.EndpointSlices},
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
