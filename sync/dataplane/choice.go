package dataplane

import "slices"

// Reason says why an endpoint is in a pool, or why not.
type Reason uint8

// The reasons. The first two mean that the endpoint is in the pool.
const (
	// IncludedReady: it is ready.
	IncludedReady Reason = iota
	// IncludedTerminating: it still serves while it terminates, and no endpoint is ready.
	IncludedTerminating
	// ExcludedNotReady: it is not ready.
	ExcludedNotReady
	// ExcludedNotServing: it terminates and no longer serves.
	ExcludedNotServing
	// ExcludedTerminating: it still serves while it terminates, but other endpoints are ready.
	ExcludedTerminating
	// ExcludedOtherNode: it is not on this node, and the traffic policy is Local.
	ExcludedOtherNode
	// ExcludedNodeHint: the topology hints give it to other nodes.
	ExcludedNodeHint
	// ExcludedZoneHint: the topology hints give it to other zones.
	ExcludedZoneHint
	// ExcludedDuplicate: the slices list the same address and port again, and the other entry is used.
	ExcludedDuplicate
	// ExcludedUnanswered: it does not answer this node, and is ejected.
	ExcludedUnanswered
	// ExcludedRefused: it refuses connections, and is ejected.
	ExcludedRefused
	// ExcludedDrained: its weight is 0.
	ExcludedDrained
	// ExcludedOtherZone: the Service prefers near endpoints, and other endpoints get all connections of this node.
	ExcludedOtherZone
)

var reasonNames = [...]string{
	"ready", "terminating", "not-ready", "not-serving", "terminating", "other-node", "node-hint", "zone-hint", "repeated",
	"unanswered", "refused", "weight-0", "other-zone",
}

// String returns a word for the reason. It does not say whether the endpoint is in the pool.
func (r Reason) String() string { return reasonNames[r] }

// Included reports whether the endpoint is in the pool.
func (r Reason) Included() bool { return r <= IncludedTerminating }

// endpointFilter selects which candidates are in a pool.
type endpointFilter struct {
	// local selects only endpoints on this node. terminating selects endpoints that serve while they terminate, because
	// none is ready.
	local, terminating bool
	// byNode and byZone select only endpoints whose hints name this node or this zone. At most one of them is set.
	byNode, byZone string
}

// decide returns whether a candidate is in the pool, and why.
func (ch *endpointFilter) decide(c *candidate) Reason {
	switch {
	case ch.local && !c.local:
		return ExcludedOtherNode
	case c.drains() && (c.ready() || ch.terminating && c.terminating()):
		return ExcludedDrained
	case ch.terminating && c.terminating():
		return IncludedTerminating
	case c.terminating() && !c.ready():
		return ExcludedTerminating
	case !c.ready() && c.Terminating:
		return ExcludedNotServing
	case !c.ready():
		return ExcludedNotReady
	case ch.byNode != "" && !slices.Contains(c.ForNodes, ch.byNode):
		return ExcludedNodeHint
	case ch.byZone != "" && !slices.Contains(c.ForZones, ch.byZone):
		return ExcludedZoneHint
	}
	return IncludedReady
}

// clusterFilters are the filters of the cluster pool. If no endpoint of a group is ready anywhere, its filter falls
// back to terminating endpoints and ignores hints: hints must never lead to an empty pool. Endpoints with the weight 0
// do not count.
func (b *builder) clusterFilters() filters {
	fs := make(filters, max(len(b.groups), 1))
	for g := range fs {
		ready := func(c candidate) bool { return int(c.group) == g && c.ready() && !c.drains() }
		if !slices.ContainsFunc(b.candidates, ready) {
			fs[g] = endpointFilter{terminating: true}
		} else {
			fs[g] = b.topologyFilter(g)
		}
	}
	return fs
}

// localFilters are the filters of the local pool.
func (b *builder) localFilters() filters {
	fs := make(filters, max(len(b.groups), 1))
	for g := range fs {
		ready := slices.ContainsFunc(b.candidates, func(c candidate) bool {
			return int(c.group) == g && c.local && c.ready() && !c.drains()
		})
		fs[g] = endpointFilter{local: true, terminating: !ready}
	}
	return fs
}

// topologyFilter returns the filter that the topology hints in a group ask for. A kind of hint counts only if every
// ready endpoint has one, because half-written hints would send too much traffic to a few endpoints. It must also name
// this node or zone. Node hints take precedence. A Service that prefers near endpoints ignores hints, as long as zones
// are known.
func (b *builder) topologyFilter(group int) endpointFilter {
	if b.nearAsked && b.zonesIgnored() == "" {
		return endpointFilter{}
	}
	node, zone := b.host.nodeName, b.host.zone
	allNodes, allZones, ourNode, ourZone := node != "", zone != "", false, false
	for i := range b.candidates {
		c := &b.candidates[i]
		if int(c.group) != group || !c.ready() || c.drains() {
			continue
		}
		allNodes, allZones = allNodes && len(c.ForNodes) > 0, allZones && len(c.ForZones) > 0
		ourNode, ourZone = ourNode || slices.Contains(c.ForNodes, node), ourZone || slices.Contains(c.ForZones, zone)
	}
	switch {
	case allNodes && ourNode:
		return endpointFilter{byNode: node}
	case allZones && ourZone:
		return endpointFilter{byZone: zone}
	}
	return endpointFilter{}
}
