// Package cluster runs a real cluster of three nodes on one machine: kubelet, containerd and runc in the namespaces of
// each node, and a control plane beside them, dual stack. It lasts longer than the process that starts it, so that
// others attach to it: what runs is recorded in a directory.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// Cluster is the one cluster of this machine. Call New.
type Cluster struct {
	// Nodes are its nodes.
	Nodes []*Node
	// Log gets a line for each step.
	Log func(format string, args ...any)

	dir  string
	from testbed.Programs
	// plugin says that the plugin of kubectl is built.
	plugin bool
}

// nodeCount is enough for a node that changes, one that does not, and one that is gone.
const nodeCount = 3

// New returns the cluster whose files are in dir, whether it runs or not. Programs come from the sources at root.
func New(dir, root string, log func(format string, args ...any)) *Cluster {
	c := &Cluster{Log: log, dir: dir, from: testbed.Programs{Root: root}}
	for i := range nodeCount {
		c.Nodes = append(c.Nodes, newNode(c, i+1))
	}
	return c
}

// Dir returns where a cluster's files are unless somebody says otherwise.
func Dir() (string, error) {
	if cache := os.Getenv("VERDICT_CACHE"); cache != "" {
		return filepath.Join(cache, "cluster"), nil
	}
	cache, err := os.UserCacheDir()
	return filepath.Join(cache, "verdict", "cluster"), err
}

// Records is the directory of the cluster's for the records of a run that begins at a time.
func (c *Cluster) Records(at time.Time) string {
	return c.file("records", at.Format("2006-01-02T15-04-05"))
}

func (c *Cluster) file(name ...string) string {
	return filepath.Join(append([]string{c.dir}, name...)...)
}

// Up starts the cluster with room for neighbors, which the caller installs, and waits until all nodes are Ready, unless
// a neighbor has to connect the pods first. What is left of a former cluster is removed first; a cluster that runs is
// an error, and so is another process that starts or ends one just now.
func (c *Cluster) Up(ctx context.Context, neighbors Neighbors) (err error) {
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	if c.running("etcd") {
		return fmt.Errorf("a cluster runs already, with its files in %s", c.dir)
	}
	if err := c.down(); err != nil {
		return err
	}
	programs, err := c.programs(ctx)
	if err != nil {
		return err
	}
	c.Log("starting the control plane")
	if err := errors.Join(neighbors.write(c), c.makeNetwork(), c.startPlane(ctx, programs)); err != nil {
		return errors.Join(err, c.down())
	}
	for _, n := range c.Nodes {
		c.Log("starting %s", n.Name)
		if err := n.Start(ctx); err != nil {
			return errors.Join(err, c.down())
		}
	}
	if err := c.loadWorkload(ctx); err != nil {
		return err
	}
	if neighbors.Network {
		return c.givePodRanges(ctx)
	}
	return c.WaitReady(ctx)
}

// Down ends everything that Up started, and removes its namespaces. It succeeds if there is nothing. Logs and built
// programs stay. Another process that starts or ends a cluster just now is an error.
func (c *Cluster) Down() error {
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	return errors.Join(c.down(), unlock())
}

func (c *Cluster) down() error {
	var errs []error
	for _, n := range c.Nodes {
		errs = append(errs, n.Stop())
	}
	for _, name := range []string{"kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"} {
		errs = append(errs, c.stop(name))
	}
	errs = append(errs, c.StopRouter(), c.removeNetwork())
	// A node that starts with what a former cluster left would run its pods.
	for _, n := range c.Nodes {
		errs = append(errs, os.RemoveAll(c.file(n.Name)))
	}
	return errors.Join(append(errs, os.RemoveAll(c.file("plane")))...)
}

// Config is a configuration of clients with all rights, which reach the API server where it is.
func (c *Cluster) Config() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return nil, err
	}
	config.Dial = DialFrom(outside)
	config.QPS, config.WarningHandler = -1, rest.NoWarnings{}
	return config, nil
}

// Client returns a client of that configuration.
func (c *Cluster) Client() (*kubernetes.Clientset, error) {
	config, err := c.Config()
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}

// Kubeconfig is the administrator's file. Its address answers in the namespace that Outside names.
func (c *Cluster) Kubeconfig() string { return c.file("plane", "admin.kubeconfig") }

// Outside is the network namespace of the control plane, and of clients that are on no node.
func (c *Cluster) Outside() string { return outside }

// Kubectl runs kubectl as the administrator. The error holds what it wrote to stderr.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	programs, err := c.from.Peers(ctx, "kubectl")
	if err != nil {
		return "", err
	}
	return run(ctx, "nsenter", append([]string{"--net=" + netnsPath(outside), programs[0], "--kubeconfig", c.Kubeconfig()},
		args...)...)
}

// Verdict runs "kubectl verdict" as the administrator, with the plugin built from the sources, and returns what it
// writes to stdout. The error holds what it writes to stderr, and wraps an *exec.ExitError if its exit status is not 0.
func (c *Cluster) Verdict(ctx context.Context, args ...string) (string, error) {
	programs, err := c.from.Peers(ctx, "kubectl")
	if err != nil {
		return "", err
	}
	dir := c.file("plugin")
	if err := c.buildPlugin(ctx, dir); err != nil {
		return "", err
	}
	return run(ctx, "nsenter", append([]string{"--net=" + netnsPath(outside), "env", "KUBECONFIG=" + c.Kubeconfig(),
		"PATH=" + dir + ":" + os.Getenv("PATH"), programs[0], "verdict"}, args...)...)
}

// buildPlugin builds the plugin once.
func (c *Cluster) buildPlugin(ctx context.Context, dir string) error {
	if c.plugin {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	err := build(ctx, c.from.Root, filepath.Join(dir, "kubectl-verdict"), "./cmd/verdict")
	c.plugin = err == nil
	return err
}

// WaitReady waits until all nodes are Ready.
func (c *Cluster) WaitReady(ctx context.Context) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	c.Log("waiting until all nodes are Ready")
	return Wait(ctx, 3*time.Minute, "all nodes are Ready", func() error {
		nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(nodes.Items) < nodeCount {
			return fmt.Errorf("%d nodes have registered", len(nodes.Items))
		}
		for i := range nodes.Items {
			if !ready(&nodes.Items[i]) {
				return fmt.Errorf("%s is not", nodes.Items[i].Name)
			}
		}
		return nil
	})
}

func ready(node *corev1.Node) bool {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// Wait calls done every 100 ms until it returns nil. After a time without that, it returns what and done's last error.
func Wait(ctx context.Context, limit time.Duration, what string, done func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: not after %s: %w", what, limit, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Ranges of the cluster.
var (
	services4 = netip.MustParsePrefix("10.96.0.0/16")
	services6 = netip.MustParsePrefix("fd00:10:96::/112")
)

// podRanges are the pods' addresses, as --cluster-cidr takes them.
const podRanges = "10.244.0.0/16,fd00:10:244::/48"

// Source is the directory of Verdict's sources.
func (c *Cluster) Source() string { return c.from.Root }
