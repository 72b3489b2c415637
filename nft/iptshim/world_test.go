package iptshim

import (
	"math/rand/v2"
	"net/netip"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot/snapshottest"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

var configs = []dataplane.Config{
	{NodeName: "node-1", LocalhostNodePorts: true,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{prefix("10.244.0.0/16"), prefix("fd00:244::/32")}}},
	{NodeName: "node-1"},
	{NodeName: "node-1", MasqueradeAll: true,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{prefix("10.244.0.0/16")}}},
	{NodeName: "node-1", DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"}},
	{NodeName: "node-1", DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: "pod"}},
}

// world is a random cluster that keeps changing.
type world struct{ snapshottest.Cluster }

func newWorld(seed uint64, services int) world {
	return world{snapshottest.Cluster{Rand: rand.New(rand.NewPCG(seed, 7)),
		Options: snapshottest.Options{Services: services, Endpoints: 13, NodePorts: 40, Weights: true, Odd: true,
			Backends: true}}}
}
