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
	"strings"
	"syscall"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/tableowner"
)

// Node is a node of the cluster.
type Node struct {
	// Name is that of its Node object.
	Name string
	// IP4 and IP6 are its addresses.
	IP4, IP6 string

	index   int
	netns   string
	cluster *Cluster
}

func newNode(c *Cluster, index int) *Node {
	name := fmt.Sprintf("node-%d", index)
	return &Node{
		Name: name, IP4: fmt.Sprintf("192.168.98.1%d", index), IP6: fmt.Sprintf("fd00:98::1%d", index),
		index: index, netns: "verdict-" + name, cluster: c,
	}
}

func (n *Node) pods4() string { return fmt.Sprintf("10.244.%d.0/24", n.index) }
func (n *Node) pods6() string { return fmt.Sprintf("fd00:10:244:%d::/64", n.index) }

// Runs says whether a process is the node's, by /proc/PID/cgroup.
func (n *Node) Runs(groups string) bool { return strings.Contains(groups, ":/"+groupName(n.Name)+"/") }

// Netns is the node's network namespace, as "ip netns" names it.
func (n *Node) Netns() string { return n.netns }

// nodeConfig is what the node's first process has to know.
type nodeConfig struct {
	Name, Dir, Kubelet, Kubeconfig string
	Addresses                      string
	Pods4, Pods6                   string
	// Bridge says that a bridge on the node connects its pods.
	Bridge bool
}

// Start starts the node as a machine starts: with its disks as they were, and with nothing else. It returns when
// containerd works; the kubelet comes later.
func (n *Node) Start(ctx context.Context) error {
	kubelet, err := n.cluster.from.Peers(ctx, "kubelet")
	if err != nil {
		return err
	}
	neighbors, err := n.cluster.readNeighbors()
	if err != nil {
		return err
	}
	if err := errors.Join(n.attach(!neighbors.Network), n.makeGroups()); err != nil {
		return err
	}
	config, err := json.Marshal(nodeConfig{
		Name: n.Name, Dir: n.cluster.file(n.Name), Kubelet: kubelet[0], Kubeconfig: n.cluster.Kubeconfig(),
		Addresses: n.IP4 + "," + n.IP6, Pods4: n.pods4(), Pods6: n.pods6(),
		Bridge: !neighbors.Network,
	})
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command("nsenter", "--net="+netnsPath(n.netns), self, FirstProcess, string(config))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS |
		syscall.CLONE_NEWIPC}
	if err := n.cluster.start(n.Name, cmd); err != nil {
		return err
	}
	return Wait(ctx, time.Minute, "containerd works", func() error {
		if !n.cluster.running(n.Name) {
			return fmt.Errorf("%s has ended: see %s", n.Name, n.cluster.logFile(n.Name))
		}
		_, err := n.Exec(ctx, "ctr", "version")
		return err
	})
}

// Stop kills everything on the node at once, as if its power failed, and removes its network namespace with all tables.
// It succeeds if the node does not run.
func (n *Node) Stop() error {
	// All other processes die with the first one of their namespace.
	err := n.cluster.end(n.Name, syscall.SIGKILL)
	return errors.Join(err, removeNetns(n.netns), n.removeGroups())
}

// Exec runs a program on the node, in all of its namespaces.
func (n *Node) Exec(ctx context.Context, program string, args ...string) (string, error) {
	pid := n.cluster.pid(n.Name)
	if pid == 0 {
		return "", fmt.Errorf("%s does not run", n.Name)
	}
	enter := []string{fmt.Sprintf("--target=%d", pid), "--mount", "--net", "--pid", "--uts", "--ipc", program}
	return run(ctx, "nsenter", append(enter, args...)...)
}

// PodLogs is the directory with the logs of the node's containers: NAMESPACE_POD_UID/CONTAINER/N.log.
func (n *Node) PodLogs() string { return n.cluster.file(n.Name, "pod-logs") }

// WatchOwner looks whether Verdict's tables on the node have an owner, until stop is closed: see tableowner.Watch.
func (n *Node) WatchOwner(stop <-chan struct{}) (longest time.Duration, err error) {
	ns, err := os.Open(netnsPath(n.netns))
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	return tableowner.Watch(ns, stop)
}

// controllers are the hierarchies of control groups, version 1. The kubelet needs a group of the node's own in each.
func controllers() (dirs []string, err error) {
	all, err := filepath.Glob("/sys/fs/cgroup/*")
	for _, dir := range all {
		if name := filepath.Base(dir); name != "unified" && !strings.Contains(name, ",") {
			dirs = append(dirs, dir)
		}
	}
	return dirs, err
}

func groupName(node string) string { return "verdict-" + node }

func (n *Node) makeGroups() error {
	dirs, err := controllers()
	for _, dir := range dirs {
		err = errors.Join(err, os.MkdirAll(filepath.Join(dir, groupName(n.Name)), 0o755))
	}
	// A group without processors or memory takes no process.
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		const dir = "/sys/fs/cgroup/cpuset"
		value, e := os.ReadFile(filepath.Join(dir, file))
		err = errors.Join(err, e, os.WriteFile(filepath.Join(dir, groupName(n.Name), file), value, 0o644))
	}
	return err
}

// removeGroups removes the node's control groups, innermost first. Processes that were just killed may be in them
// still.
func (n *Node) removeGroups() error {
	dirs, err := controllers()
	for _, dir := range dirs {
		root := filepath.Join(dir, groupName(n.Name))
		remove := func() error { return removeTree(root) }
		err = errors.Join(err, Wait(context.Background(), 10*time.Second, "remove "+root, remove))
	}
	return err
}

func removeTree(root string) error {
	var all []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			all = append(all, path)
		}
		return err
	})
	for i := len(all) - 1; i >= 0; i-- {
		err = errors.Join(err, os.Remove(all[i]))
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
