package neighbors

import (
	"context"
	"fmt"
	"strings"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// kubeNetworkPolicies is the engine of Kubernetes' network group. It decides in user space, about packets that a rule
// of its own hands to it.
var kubeNetworkPolicies = Neighbor{
	Name: "kube-network-policies", Policies: true,
	module: "kube-network-policies", source: "sigs.k8s.io/kube-network-policies", manifest: "install.yaml",
	programs:  []program{{peer: "netpol", image: "kube-network-policies", at: "/bin/netpol"}},
	workloads: [][2]string{{"kube-system", "daemonset/kube-network-policies"}},
	finish:    queue,
}

// queue stands in for the engine's own rule, which needs the kernel's nft_queue. Where that is missing, rules of
// iptables hand the same packets to it: those that begin connections, after the destination is translated, and before
// the source is.
func queue(ctx context.Context, c *cluster.Cluster) error {
	for _, n := range c.Nodes {
		rules, err := n.Exec(ctx, "nft", "list", "ruleset")
		if err != nil {
			return err
		}
		if strings.Contains(rules, "queue to 98") || strings.Contains(rules, "queue flags bypass to 98") {
			continue
		}
		c.Log("%s has no nft_queue: rules of iptables stand in for the engine's", n.Name)
		for _, program := range []string{"iptables", "ip6tables"} {
			if _, err := n.Exec(ctx, program, "-w", "-t", "mangle", "-A", "POSTROUTING", "-m", "conntrack", "--ctstate", "NEW",
				"-j", "NFQUEUE", "--queue-num", "98", "--queue-bypass"); err != nil {
				return fmt.Errorf("%s: %w", n.Name, err)
			}
		}
	}
	return nil
}
