package neighbors

import (
	"context"
	"errors"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// metalLB is MetalLB in layer 2 mode. Its addresses are of the nodes' own network.
var metalLB = Neighbor{
	Name: "metallb", Balancer: true, shared: "192.168.98.219",
	module: "metallb", source: "go.universe.tf/metallb", manifest: "config/manifests/metallb-native.yaml",
	programs:  metalLBPrograms,
	prepare:   func(_ context.Context, c *cluster.Cluster) error { return c.RouteServices() },
	workloads: metalLBWorkloads,
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

// metalLBBGP is MetalLB in its native BGP mode, which knows no IPv6.
var metalLBBGP = Neighbor{
	Name: "metallb-bgp", Balancer: true, shared: "198.51.100.219", routed: true, oneFamily: true,
	module: "metallb", source: "go.universe.tf/metallb", manifest: "config/manifests/metallb-native.yaml",
	programs: metalLBPrograms, settings: numbersOfSystems, prepare: routed, workloads: metalLBWorkloads,
	objects: `apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: routed, namespace: metallb-system}
spec: {addresses: [198.51.100.200-198.51.100.219]}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: router, namespace: metallb-system}
spec: {myASN: 64512, peerASN: 64513, peerAddress: 192.168.98.2}
---
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: routed, namespace: metallb-system}
`,
}

// numbersOfSystems makes the numbers of autonomous systems 64 bits long, as MetalLB 0.16 has them. Kubernetes 1.37.1
// refuses each BGPPeer otherwise, since the largest number exceeds their format.
var numbersOfSystems = []string{"format: int32\n                maximum: 4294967295",
	"format: int64\n                maximum: 4294967295"}

var (
	metalLBPrograms = []program{
		{peer: "metallb-speaker", image: "metallb/speaker", at: "/speaker"},
		{peer: "metallb-controller", image: "metallb/controller", at: "/controller"},
	}
	metalLBWorkloads = [][2]string{{"metallb-system", "deployment/controller"}, {"metallb-system", "daemonset/speaker"}}
)

// routed starts the router to which MetalLB tells its routes. The API server asks MetalLB's webhook at a cluster IP.
func routed(ctx context.Context, c *cluster.Cluster) error {
	return errors.Join(c.RouteServices(), c.StartRouter(ctx))
}
