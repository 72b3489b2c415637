package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// Neighbors says what runs beside the Service proxy. The cluster keeps it on disk: nodes that start again need it.
type Neighbors struct {
	Names []string
	// Network says that one of them connects the pods, in place of bridges and routes of the cluster's own.
	Network bool
}

func (c *Cluster) neighborsFile() string { return c.file("plane", "neighbors.json") }

func (n *Neighbors) write(c *Cluster) error {
	text, err := json.Marshal(n)
	return errors.Join(err, os.MkdirAll(c.file("plane"), 0o700), os.WriteFile(c.neighborsFile(), text, 0o600))
}

func (c *Cluster) readNeighbors() (n Neighbors, err error) {
	text, err := os.ReadFile(c.neighborsFile())
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &n)
	}
	return n, err
}

// Neighbors returns the names of what runs beside the Service proxy.
func (c *Cluster) Neighbors() ([]string, error) {
	n, err := c.readNeighbors()
	return n.Names, err
}

// AddNeighbor records that something else, which connects no pods, runs on the cluster now.
func (c *Cluster) AddNeighbor(name string) error {
	n, err := c.readNeighbors()
	if err != nil || slices.Contains(n.Names, name) {
		return err
	}
	n.Names = append(n.Names, name)
	return n.write(c)
}

// givePodRanges gives each Node its ranges of pods' addresses, which a neighbor reads there, once it has registered.
func (c *Cluster) givePodRanges(ctx context.Context) error {
	for _, n := range c.Nodes {
		patch := fmt.Sprintf(`{"spec":{"podCIDR":%[1]q,"podCIDRs":[%[1]q,%[2]q]}}`, n.pods4(), n.pods6())
		if err := Wait(ctx, 3*time.Minute, n.Name+" has registered", func() error {
			_, err := c.Kubectl(ctx, "patch", "node", n.Name, "-p", patch)
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// Peers builds programs of others by conformance/peers/build, and returns their paths.
func (c *Cluster) Peers(ctx context.Context, names ...string) ([]string, error) {
	return c.from.Peers(ctx, names...)
}

// PeerSource returns the directory of a module's source, in the version that a module of conformance/peers names.
func (c *Cluster) PeerSource(ctx context.Context, peer, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module)
	cmd.Dir = filepath.Join(c.from.Root, "conformance", "peers", peer)
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go mod download %s in %s: %w: %s", module, cmd.Dir, err, out)
	}
	var found struct{ Dir string }
	return found.Dir, json.Unmarshal(out, &found)
}

// Gateway returns the addresses of the host outside.
func Gateway() (ip4, ip6 string) { return gateway4, gateway6 }

// AddOutside gives the host outside two more addresses. Connections begin there only if they ask for it.
func (c *Cluster) AddOutside(ip4, ip6 string) error {
	return inNet(outside, fmt.Sprintf("addr replace %s/24 dev nodes\n"+
		"-6 addr replace %s/64 dev nodes nodad preferred_lft 0", ip4, ip6))
}

// RouteServices routes cluster IPs from outside to the first node: the API server asks webhooks there.
func (c *Cluster) RouteServices() error {
	n := c.Nodes[0]
	return inNet(outside, fmt.Sprintf("route replace %s via %s\n-6 route replace %s via %s", services4, n.IP4, services6,
		n.IP6))
}

// Workload is the program of the tests' own, which every node sees at this path.
func (c *Cluster) Workload() string { return c.file("workload", "workload") }
