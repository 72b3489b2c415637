package compare

import (
	"math"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Reason is why two proxies may differ in a class.
type Reason struct {
	Name, Text string
	holds      func(d *Difference) bool
}

// Reasons are all reasons that are known, in the order in which they are tried.
var Reasons = []Reason{
	{"localhost-node-port", "node ports answer at 127.0.0.1 or do not, by the mode and nodePortAddresses " +
		"(docs/decisions/0001-localhost-nodeports.md)",
		func(d *Difference) bool {
			return d.Kind == NodePort && d.key.Addr.IsLoopback() && d.aUntouched()
		}},
	{"node-port-addresses", "node ports answer at other addresses of this node: kube-proxy and Verdict read " +
		"nodePortAddresses differently, or read the node's addresses at different times (docs/decisions/0004-node-ports.md)",
		func(d *Difference) bool { return d.Kind == NodePort && d.host && d.aUntouched() }},
	{"shared-range", "something other than Services has addresses in this part of a ServiceCIDR, where Verdict refuses " +
		"nothing (docs/decisions/0032-shared-ranges.md)",
		func(d *Difference) bool {
			return d.shared && d.frontend == nil && (d.has(packets.Rejected) || d.has(packets.Dropped)) &&
				len(d.outcomes[0]) == 1 && d.outcomes[0][0].Verdict == packets.Untouched
		}},
	{"iptables-unused-port", "kube-proxy's iptables mode does not reject packets to unused ports of cluster IPs",
		func(d *Difference) bool {
			return d.Kind == UnusedPort && d.between(IPTables) && d.has(packets.Rejected) && d.aUntouched() && !d.balancer
		}},
	{"balancer-unused-port", "unused ports of load balancer addresses are rejected for senders from outside, which " +
		"kube-proxy passes on (docs/KUBE-PROXY.md)",
		func(d *Difference) bool {
			return d.Kind == UnusedPort && d.balancer && d.has(packets.Rejected) && d.aUntouched()
		}},
	{"iptables-unallocated", "kube-proxy's iptables mode does not drop packets to unallocated addresses of a ServiceCIDR",
		func(d *Difference) bool {
			return d.Kind == Unallocated && d.between(IPTables) && d.has(packets.Dropped) && d.aUntouched()
		}},
	{"iptables-node-no-endpoints", "kube-proxy's iptables mode does not reject what this node sends to an external " +
		"address without endpoints",
		func(d *Difference) bool {
			return d.between(IPTables) && d.has(packets.Rejected) && d.aUntouched() &&
				(d.Sender == FromNode || d.Sender == FromBridge) && (d.Kind == LoadBalancerIP || d.Kind == ExternalIP)
		}},
	{"iptables-ranges-no-endpoints", "kube-proxy's iptables mode does not look at source ranges of a Service without " +
		"endpoints",
		func(d *Difference) bool {
			return d.between(IPTables) && d.Kind == LoadBalancerIP && d.has(packets.Dropped) &&
				(d.has(packets.Rejected) || d.aUntouched())
		}},
	{"node-with-pod-address", "this node sends from an address among the pods' to an external address with policy " +
		"Local: kube-proxy takes it for a pod, and Verdict masquerades it, as all packets of the node (docs/KUBE-PROXY.md)",
		func(d *Difference) bool {
			return d.bridge && d.frontend != nil && d.Kind != ClusterIP && d.frontend.Route(dataplane.Node).SNAT &&
				!d.frontend.Route(dataplane.Pod).SNAT && d.sameButMasquerade()
		}},
	{"client-address", "clients of the Service keep their addresses: nodes forward them untranslated, or translate them " +
		"to endpoints of their own, and do not masquerade pods; kube-proxy cannot (docs/decisions/0042-client-address.md)",
		func(d *Difference) bool {
			outside := []Sender{FromOutside, FromEdge, FromNeighbour, FromOtherPod}
			return d.frontend != nil && d.frontend.Kept && (slices.Contains(outside, d.Sender) || d.sameButMasquerade())
		}},
	{"slots", "the Service has weights or a hash, or its clients are divided among nodes, and shares are rounded to " +
		"slots (docs/decisions/0019-chances.md)",
		func(d *Difference) bool {
			return d.frontend != nil && (d.weighted() || d.frontend.port.Keep != nil) && d.sameEndpoints() && d.nearChances()
		}},
	{"scheduling", "the Service has weights or a hash, by annotation, which kube-proxy does not read",
		func(d *Difference) bool { return d.frontend != nil && d.weighted() && d.sameEndpoints() }},
	{"ejected", "endpoints that do not answer this node are left out (docs/decisions/0017-second-chance.md)",
		func(d *Difference) bool {
			return d.frontend != nil && slices.ContainsFunc(d.frontend.Routes, func(r dataplane.Route) bool {
				return len(r.Pool.Ejected) > 0
			})
		}},
	{"external-failover", "the annotation verdict/external-failover decides about a Service without endpoints here",
		func(d *Difference) bool {
			return d.frontend != nil && d.Kind != ClusterIP && slices.ContainsFunc(d.frontend.Routes, failsOver)
		}},
}

// failsOver reports whether a route leads to a pool that stands in for an empty local one.
func failsOver(r dataplane.Route) bool {
	return r.From == dataplane.Anyone && len(r.Pool.Endpoints) == 0 && r.Pool.Empty == dataplane.Pass
}

// reasonOf returns the name of the first reason that holds; empty if none does.
func reasonOf(d *Difference) string {
	for _, r := range Reasons {
		if (d.betweenProxies() || r.Name == "slots") && r.holds(d) {
			return r.Name
		}
	}
	return ""
}

// betweenProxies reports whether kube-proxy is one of the sides. Verdict and the objects have no reason to differ, but
// for the rounding of shares.
func (d *Difference) betweenProxies() bool { return d.between(IPTables) || d.between(NFTables) }

func (d *Difference) between(side string) bool { return slices.Contains(d.Sides[:], side) }

// has reports whether a side has a verdict alone.
func (d *Difference) has(v packets.Verdict) bool {
	return slices.ContainsFunc(d.outcomes[:], func(list []packets.Outcome) bool {
		return len(list) == 1 && list[0].Verdict == v
	})
}

// aUntouched reports whether one side leaves the packet alone.
func (d *Difference) aUntouched() bool { return d.has(packets.Untouched) }

// weighted reports whether the endpoints of the Service have chances of their own.
func (d *Difference) weighted() bool {
	return d.frontend.port.Hash != dataplane.NoHash ||
		slices.ContainsFunc(d.frontend.port.Cluster.Endpoints, func(e dataplane.Endpoint) bool { return e.Weight > 0 }) ||
		slices.ContainsFunc(d.frontend.port.Local.Endpoints, func(e dataplane.Endpoint) bool { return e.Weight > 0 })
}

// sameEndpoints reports whether only the chances differ.
func (d *Difference) sameEndpoints() bool {
	return slices.EqualFunc(d.outcomes[0], d.outcomes[1], func(a, b packets.Outcome) bool { return a.Ending == b.Ending })
}

// sameButMasquerade reports whether only the source address differs that receivers see.
func (d *Difference) sameButMasquerade() bool {
	return slices.EqualFunc(d.outcomes[0], d.outcomes[1], func(a, b packets.Outcome) bool {
		a.Masqueraded = b.Masqueraded
		return a.Ending == b.Ending && a.Chance.Near(b.Chance)
	})
}

// nearChances reports whether no chance differs by more than rounding to slots explains: 2 % of it, or one slot of the
// fewest that weights get, or of those among which clients are divided.
func (d *Difference) nearChances() bool {
	slot := 1.0 / 1024
	if d.frontend.Keepable() && d.frontend.port.Keep != nil {
		slot = max(slot, 1/float64(d.frontend.port.Keep.Slots()))
	}
	return slices.EqualFunc(d.outcomes[0], d.outcomes[1], func(a, b packets.Outcome) bool {
		return math.Abs(a.Chance.Float()-b.Chance.Float()) <= max(a.Chance.Float()/50, slot)
	})
}
