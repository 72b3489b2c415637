package node

import (
	"log/slog"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/preflight"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestHostConflicts: each finding is told once, and again if it was gone meanwhile. That a kube-proxy's rules are there
// is no news for a proxy that is about to remove them, and is for one that is not.
func TestHostConflicts(t *testing.T) {
	for _, removes := range []bool{true, false} {
		c := labtest.NewCluster(t, lab.Config{LocalPods: 1})
		labtest.Run(t, c.Node, "table ip kube-proxy { chain c { type nat hook prerouting priority -100; }; }",
			labtest.Nfts(t)[0].Path, "-f", "-")
		var told []string
		checks := &hostChecks{log: slog.New(slog.DiscardHandler), removes: removes,
			policy: func() dataplane.Config {
				return dataplane.Config{DetectLocal: dataplane.DetectLocal{ClusterCIDRs: lab.PodRange[:1]}}
			},
			node:  func() *snapshot.Node { return nil },
			tell:  func(f status.Finding) { told = append(told, f.Check) },
			facts: preflight.Facts{NodePorts: map[preflight.NodePort]snapshot.Name{}}}
		for _, forward := range []string{"0", "0", "1", "0"} {
			labtest.Check(t, c.Node.Sysctl("net/ipv4/ip_forward", forward))
			labtest.Check(t, c.Node.Do(func() error { checks.look(); return nil }))
		}
		slices.Sort(told)
		want := []string{preflight.NoForwarding, preflight.NoForwarding, preflight.SecondProxy}
		if !slices.Equal(told, want) {
			t.Errorf("removes %v: told %q, want %q", removes, told, want)
		}
	}
}
