package node

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// everywhereOptions say how the node finds the collector.
type everywhereOptions struct {
	leader func(context.Context) (map[string]string, error)
	token  string
}

// newEverywhere returns how the node finds the collector; nil if it asks none.
func newEverywhere(s *config.Settings) (*everywhereOptions, error) {
	if s.Everywhere == (snapshot.Name{}) || s.Manifests != "" {
		return nil, nil
	}
	client, err := watch.Client(s.Client).Config()
	if err != nil {
		return nil, err
	}
	leader, err := watch.LeaseAnnotations(client, s.Everywhere)
	if err != nil {
		return nil, err
	}
	return &everywhereOptions{leader, s.EverywhereToken}, nil
}

// agent makes the agent of a node; nil if it has none.
func (o *everywhereOptions) agent(n *Node, t *status.Tracker) *everywhere.Agent {
	if o == nil {
		return nil
	}
	return everywhere.New(everywhere.Options{
		Node: n.Config.NodeName, Leader: o.leader, Holds: t.Holds, Log: n.Log,
		Token: func() (string, error) { return readToken(o.token) },
	})
}

// readToken reads the token anew each time: the kubelet replaces the file before the token expires.
func readToken(file string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("everywhereToken: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}
