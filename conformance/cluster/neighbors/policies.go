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
	guard:     queue,
}

// queue stands in for the engine's own rules, which need the kernel's nft_queue. Where that is missing, rules of
// iptables hand the same packets to it as those do: of pods that policies choose, not of the node's root, those that
// begin connections. They do so after the destination is translated, and before the source is, as the engine's do.
func queue(ctx context.Context, c *cluster.Cluster, chosen map[string][]string) error {
	for _, n := range c.Nodes {
		rules, err := n.Exec(ctx, "nft", "list", "ruleset")
		if err != nil {
			return err
		}
		if strings.Contains(rules, "queue to 98") || strings.Contains(rules, "queue flags bypass to 98") {
			continue
		}
		c.Log("%s has no nft_queue: rules of iptables stand in for the engine's", n.Name)
		for i, restore := range []string{"iptables-restore", "ip6tables-restore"} {
			if _, err := n.Exec(ctx, "sh", "-c", `printf %s "$1" | `+restore+" --noflush --wait", "sh",
				queueRules(chosen[n.Name], i == 1)); err != nil {
				return fmt.Errorf("%s: %w", n.Name, err)
			}
		}
	}
	return nil
}

// queueRules are the rules of a family for a node's pods, for iptables-restore.
func queueRules(ips []string, six bool) string {
	var b strings.Builder
	b.WriteString("*mangle\n-F POSTROUTING\n")
	if six {
		b.WriteString("-A POSTROUTING -p icmpv6 -j ACCEPT\n")
	}
	b.WriteString("-A POSTROUTING -m owner --uid-owner 0 -j ACCEPT\n" +
		"-A POSTROUTING -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\n")
	for _, ip := range ips {
		if strings.Contains(ip, ":") == six {
			fmt.Fprintf(&b, "-A POSTROUTING -s %[1]s -j NFQUEUE --queue-num 98\n"+
				"-A POSTROUTING -d %[1]s -j NFQUEUE --queue-num 98\n", ip)
		}
	}
	return b.String() + "COMMIT\n"
}
