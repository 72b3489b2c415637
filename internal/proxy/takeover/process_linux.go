package takeover

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// proxyProcesses returns the processes called kube-proxy in this network namespace, as far as they are visible: a
// container sees those of others only with hostPID.
func proxyProcesses() []int {
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return nil
	}
	paths, _ := filepath.Glob("/proc/[0-9]*/comm")
	var pids []int
	for _, path := range paths {
		name, err := os.ReadFile(path)
		if err != nil || strings.TrimSpace(string(name)) != "kube-proxy" {
			continue
		}
		// If the network namespace is unknown, assume this one, as it usually is on a node.
		netns, err := os.Readlink(filepath.Join(filepath.Dir(path), "ns/net"))
		if pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path))); err != nil || netns == own {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids
}
