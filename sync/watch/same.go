package watch

import (
	"maps"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// What a proxy does not read changes all the time: annotations, resource versions, conditions of other controllers.
// Only objects that differ after conversion are passed on.

// sameService ignores Version: that alone changes nothing.
func sameService(a, b *snapshot.Service) bool {
	return a == b || a.Name == b.Name && a.Age == b.Age &&
		a.InternalLocal == b.InternalLocal && a.ExternalLocal == b.ExternalLocal &&
		a.Affinity == b.Affinity && a.HealthCheckNodePort == b.HealthCheckNodePort &&
		slices.Equal(a.ClusterIPs, b.ClusterIPs) && slices.Equal(a.ExternalIPs, b.ExternalIPs) &&
		slices.Equal(a.LoadBalancerIPs, b.LoadBalancerIPs) && slices.Equal(a.SourceRanges, b.SourceRanges) &&
		slices.Equal(a.Ports, b.Ports) && a.Counters == b.Counters && a.NoRecords == b.NoRecords &&
		a.SecondChance == b.SecondChance && a.LastResort == b.LastResort && a.Probe == b.Probe &&
		a.Drain == b.Drain && a.Rebalance == b.Rebalance && a.SlowStart == b.SlowStart &&
		a.ExternalFailover == b.ExternalFailover && a.Local == b.Local && a.Limits == b.Limits &&
		a.ClientAddress == b.ClientAddress &&
		sameScheduling(a.Scheduling, b.Scheduling) && sameBackends(a.Backends, b.Backends)
}

func sameBackends(a, b *snapshot.Backends) bool {
	return a == b || a != nil && b != nil && a.For == b.For &&
		slices.EqualFunc(a.Ports, b.Ports, func(x, y snapshot.PortBackends) bool {
			return x.Port == y.Port && x.Listener == y.Listener && x.Route == y.Route && slices.Equal(x.To, y.To)
		})
}

func sameScheduling(a, b *snapshot.Scheduling) bool {
	return a == b || a != nil && b != nil && a.Scheduler == b.Scheduler && a.Port == b.Port && a.Fallback == b.Fallback &&
		maps.Equal(a.Weights, b.Weights) && a.PreferNear == b.PreferNear && maps.Equal(a.ZoneDemand, b.ZoneDemand)
}

// sameSlice ignores Triggered and Version: they alone change nothing.
func sameSlice(a, b *snapshot.Slice) bool {
	return a == b || a.Name == b.Name && a.Service == b.Service && slices.Equal(a.Ports, b.Ports) &&
		slices.EqualFunc(a.Endpoints, b.Endpoints, sameEndpoint)
}

func sameEndpoint(a, b snapshot.Endpoint) bool {
	return a.Addr == b.Addr && a.Node == b.Node && a.Zone == b.Zone && a.Pod == b.Pod && a.Ready == b.Ready &&
		a.Serving == b.Serving && a.Weight == b.Weight && a.Terminating == b.Terminating &&
		slices.Equal(a.ForZones, b.ForZones) && slices.Equal(a.ForNodes, b.ForNodes)
}

func sameNode(a, b *snapshot.Node) bool {
	return a == b || a.Name == b.Name && a.Zone == b.Zone && a.Leaving == b.Leaving &&
		slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.PodCIDRs, b.PodCIDRs)
}
