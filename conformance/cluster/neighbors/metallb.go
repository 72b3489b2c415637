package neighbors

import (
	"context"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// metalLB is MetalLB in layer 2 mode. Its addresses are of the nodes' own network.
var metalLB = Neighbor{
	Name: "metallb", Balancer: true,
	module: "metallb", source: "go.universe.tf/metallb", manifest: "config/manifests/metallb-native.yaml",
	programs: []program{
		{peer: "metallb-speaker", image: "metallb/speaker", at: "/speaker"},
		{peer: "metallb-controller", image: "metallb/controller", at: "/controller"},
	},
	// The API server asks MetalLB's webhook at a cluster IP.
	prepare:   func(_ context.Context, c *cluster.Cluster) error { return c.RouteServices() },
	workloads: [][2]string{{"metallb-system", "deployment/controller"}, {"metallb-system", "daemonset/speaker"}},
	objects: `apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: nodes, namespace: metallb-system}
spec: {addresses: [192.168.98.200-192.168.98.219, "fd00:98::200-fd00:98::219"]}
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: nodes, namespace: metallb-system}
`,
}
