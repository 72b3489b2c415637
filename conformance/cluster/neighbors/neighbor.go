// Package neighbors runs programs of others on the cluster beside a Service proxy, as users have them: CNI plugins,
// engines of network policies, load balancers and DNS. It sends the same connections to Services beside each proxy.
package neighbors

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// Neighbor is a program of others, built from its Go module and installed by a manifest of its own.
type Neighbor struct {
	// Name is what commands and tables call it.
	Name string
	// Network says that it connects the pods, in place of the cluster's own bridges and routes.
	Network bool
	// Policies says that it enforces NetworkPolicies.
	Policies bool
	// Balancer says that it gives Services of type LoadBalancer their addresses.
	Balancer bool
	// DNS says that it is the cluster's DNS.
	DNS bool
	// shared is an address that it can give two Services; empty if it gives none.
	shared string
	// routed says that it tells the cluster's router by which nodes to reach the addresses of IPv4.
	routed bool
	// oneFamily says that the addresses it gives are of IPv4 alone.
	oneFamily bool
	// ingress is the Service of a reverse proxy for HTTP, in the servers' namespace; empty if it is none.
	ingress string

	// module is the directory of conformance/peers whose go.mod has the version, and source the module's path.
	module, source string
	// manifest is a file in the source; own is a manifest in its place, where that needs more than runs here.
	manifest, own string
	programs      []program
	// settings are replaced in the manifest: what is there, and what replaces it, by turns.
	settings []string
	// workloads are what must be rolled out: a namespace and a resource.
	workloads [][2]string
	// objects are applied when the workloads are rolled out; empty for none.
	objects string
	// prepare is called before the manifest is applied, and finish after all; each may be nil.
	prepare, finish func(ctx context.Context, c *cluster.Cluster) error
	// guard, if not nil, is told the addresses of the pods that policies choose, by their nodes' names, before policies
	// are tried.
	guard func(ctx context.Context, c *cluster.Cluster, chosen map[string][]string) error
}

// All are the neighbors there are.
var All = []Neighbor{
	flannel("vxlan"), flannel("host-gw"), kubeRouter, cilium, kubeNetworkPolicies, metalLB, metalLBBGP,
	metalLBFRR, coreDNS, caddy,
}

// Names are those of All.
func Names() (names []string) {
	for i := range All {
		names = append(names, All[i].Name)
	}
	return names
}

// On is what the cluster has to know of the neighbors that are to run on it.
func On(all []*Neighbor) (on cluster.Neighbors) {
	for _, n := range all {
		on.Names, on.Network = append(on.Names, n.Name), on.Network || n.Network
	}
	return on
}

// Find returns the neighbors with these names.
func Find(names []string) ([]*Neighbor, error) {
	var found []*Neighbor
	for _, name := range names {
		i := slices.IndexFunc(All, func(n Neighbor) bool { return n.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("there is no neighbor %q; there are %s", name, strings.Join(Names(), ", "))
		}
		found = append(found, &All[i])
	}
	return found, nil
}

// Build builds the programs, and returns the version that they have.
func (n *Neighbor) Build(ctx context.Context, c *cluster.Cluster) (version string, err error) {
	paths, err := n.build(ctx, c)
	if err != nil {
		return "", err
	}
	return filepath.Base(filepath.Dir(paths[n.programs[0].peer])), nil
}

// build returns the programs' paths by the names that conformance/peers/build gives them.
func (n *Neighbor) build(ctx context.Context, c *cluster.Cluster) (map[string]string, error) {
	var names []string
	for i := range n.programs {
		if name := n.programs[i].peer; name != "" && n.programs[i].beside == "" {
			names = append(names, name)
		}
	}
	built, err := c.Peers(ctx, names...)
	if err != nil {
		return nil, err
	}
	paths := map[string]string{}
	for i, name := range names {
		paths[name] = built[i]
	}
	return paths, nil
}

// Install applies the neighbor's manifest, and waits until its pods are available.
func (n *Neighbor) Install(ctx context.Context, c *cluster.Cluster) error {
	c.Log("installing %s", n.Name)
	paths, err := n.build(ctx, c)
	if err != nil {
		return err
	}
	text, err := n.text(ctx, c, paths)
	if err != nil {
		return fmt.Errorf("%s of %s: %w", n.manifest, n.source, err)
	}
	if n.prepare != nil {
		if err := n.prepare(ctx, c); err != nil {
			return err
		}
	}
	if err := c.Apply(ctx, text); err != nil {
		return err
	}
	if err := n.rolledOut(ctx, c); err != nil {
		return err
	}
	if n.objects != "" {
		if err := c.Apply(ctx, n.objects); err != nil {
			return err
		}
	}
	if n.finish != nil {
		return n.finish(ctx, c)
	}
	return nil
}

// Restart replaces the neighbor's pods, and waits until the new ones are available.
func (n *Neighbor) Restart(ctx context.Context, c *cluster.Cluster) error {
	for _, w := range n.workloads {
		if _, err := c.Kubectl(ctx, "-n", w[0], "rollout", "restart", w[1]); err != nil {
			return err
		}
	}
	return n.rolledOut(ctx, c)
}

func (n *Neighbor) rolledOut(ctx context.Context, c *cluster.Cluster) error {
	for _, w := range n.workloads {
		if _, err := c.Kubectl(ctx, "-n", w[0], "rollout", "status", w[1], "--timeout=3m"); err != nil {
			return err
		}
	}
	return nil
}

// text returns the manifest with the settings, and with programs of this machine in place of images.
func (n *Neighbor) text(ctx context.Context, c *cluster.Cluster, paths map[string]string) (string, error) {
	if n.own != "" {
		return adapt(n.own, n.programs, paths)
	}
	dir, err := c.PeerSource(ctx, n.module, n.source)
	if err != nil {
		return "", err
	}
	content, err := os.ReadFile(filepath.Join(dir, n.manifest))
	if err != nil {
		return "", err
	}
	text := string(content)
	for i := 0; i < len(n.settings); i += 2 {
		if !strings.Contains(text, n.settings[i]) {
			return "", fmt.Errorf("it has no %q, which is to become %q", n.settings[i], n.settings[i+1])
		}
		text = strings.ReplaceAll(text, n.settings[i], n.settings[i+1])
	}
	return adapt(text, n.programs, paths)
}

// errNoImage says that a manifest needs an image that no program here replaces.
var errNoImage = errors.New("no program replaces the image")
