package neighbors

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// flannel is flannel with a backend, dual stack.
func flannel(backend string) Neighbor {
	return Neighbor{
		Name: "flannel-" + backend, Network: true,
		module: "flannel", source: "github.com/flannel-io/flannel", manifest: "Documentation/kube-flannel.yml",
		programs: []program{
			{peer: "flanneld", image: "/flannel:", at: "/opt/bin/flanneld", tools: true},
			{peer: "flannel-install-conf", image: "/flannel:", at: "/opt/bin/install-conf"},
			{image: "/flannel-cni-plugin:"},
		},
		settings: []string{
			`"Network": "10.244.0.0/16",`,
			`"Network": "10.244.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:10:244::/48",`,
			`"Type": "vxlan"`, `"Type": "` + backend + `"`,
		},
		workloads: [][2]string{{"kube-flannel", "daemonset/kube-flannel-ds"}},
		finish:    delegate,
	}
}

// delegate stands in for flannel's CNI plugin, which does not build from its Go module. That plugin reads what flannel
// has written about the node's subnets, and has the bridge plugin do the rest, with this configuration.
func delegate(ctx context.Context, c *cluster.Cluster) error {
	for _, n := range c.Nodes {
		text, err := n.Exec(ctx, "cat", "/run/flannel/subnet.env")
		if err != nil {
			return err
		}
		subnets := map[string]string{}
		for line := range strings.Lines(text) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			subnets[name] = value
		}
		values := []any{subnets["FLANNEL_MTU"]}
		for _, name := range []string{"SUBNET", "IPV6_SUBNET", "NETWORK", "IPV6_NETWORK"} {
			prefix, err := netip.ParsePrefix(subnets["FLANNEL_"+name])
			if err != nil {
				return fmt.Errorf("%s: /run/flannel/subnet.env: FLANNEL_%s: %w", n.Name, name, err)
			}
			values = append(values, prefix.Masked()) // the subnet's has the bridge's address
		}
		config := fmt.Sprintf(delegated, values...)
		_, err = n.Exec(ctx, "sh", "-c", `printf %s "$1" > /etc/cni/net.d/10-flannel.conflist`, "sh", config)
		if err != nil {
			return err
		}
	}
	return nil
}

// delegated takes the MTU, the node's subnets, and the networks of all.
const delegated = `{"cniVersion": "0.4.0", "name": "cbr0", "plugins": [
{"type": "bridge", "bridge": "cni0", "mtu": %s, "isGateway": true, "isDefaultGateway": true, "hairpinMode": true,
 "ipMasq": false, "ipam": {"type": "host-local", "ranges": [[{"subnet": "%s"}], [{"subnet": "%s"}]],
  "routes": [{"dst": "%s"}, {"dst": "%s"}]}},
{"type": "portmap", "capabilities": {"portMappings": true}}]}`
