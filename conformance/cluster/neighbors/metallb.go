package neighbors

import (
	"context"
	"errors"
	"slices"

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

// metalLBFRR is MetalLB in its FRR mode, with Debian's FRR. That lacks the script by which the image starts it.
var metalLBFRR = Neighbor{
	Name: "metallb-frr", Balancer: true, shared: "198.51.100.219", routed: true,
	module: "metallb", source: "go.universe.tf/metallb", manifest: "config/manifests/metallb-frr.yaml",
	programs: slices.Concat(metalLBPrograms, []program{
		{peer: "metallb-cp-tool", image: "metallb/speaker", at: "/cp-tool"},
		{peer: "metallb-cp-tool", image: "metallb/speaker", beside: "frr-reloader.sh", at: "/frr-reloader.sh"},
		{peer: "metallb-metrics", image: "metallb/speaker", at: "/frr-metrics"},
		{peer: "frr", image: "frrouting/frr", at: "/frr"},
		{peer: "frr", image: "frrouting/frr", beside: "frr/usr", at: "/usr"},
		{peer: "frr", image: "frrouting/frr", beside: "frr/bin", at: "/bin"},
		{peer: "frr", image: "frrouting/frr", beside: "frr/lib", at: "/lib"},
		{peer: "frr", image: "frrouting/frr", beside: "frr/lib64", at: "/lib64"},
		{peer: "frr", image: "frrouting/frr", beside: "frr/etc/passwd", at: "/etc/passwd"},
		{peer: "frr", image: "frrouting/frr", beside: "frr/etc/group", at: "/etc/group"},
		{peer: "frr", image: "frrouting/frr", beside: "frr/etc/pam.d", at: "/etc/pam.d"},
	}),
	settings: slices.Concat(numbersOfSystems, []string{"/sbin/tini -- /usr/lib/frr/docker-start &",
		`/usr/bin/tini -- bash -c '. /usr/lib/frr/frrcommon.sh; exec /usr/lib/frr/watchfrr $(daemon_list)' &`}),
	prepare: routed, workloads: metalLBWorkloads,
	objects: `apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: routed, namespace: metallb-system}
spec: {addresses: [198.51.100.200-198.51.100.219, "fd00:51::200-fd00:51::219"]}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: router, namespace: metallb-system}
spec: {myASN: 64512, peerASN: 64513, peerAddress: 192.168.98.2}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: router6, namespace: metallb-system}
spec: {myASN: 64512, peerASN: 64513, peerAddress: "fd00:98::2"}
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
