package dataplane

import "slices"

// Reason says why an endpoint is in a pool, or why not.
type Reason uint8

// The reasons. The first two are of endpoints that are in the pool.
const (
	// IncludedReady: it is ready.
	IncludedReady Reason = iota
	// IncludedTerminating: it serves while it terminates, and none is ready.
	IncludedTerminating
	// ExcludedNotReady: it is not ready.
	ExcludedNotReady
	// ExcludedNotServing: it terminates, and serves no longer.
	ExcludedNotServing
	// ExcludedTerminating: it serves while it terminates, but others are ready.
	ExcludedTerminating
	// ExcludedOtherNode: it is not on this node, and the traffic policy is Local.
	ExcludedOtherNode
	// ExcludedNodeHint: the topology hints give it to other nodes.
	ExcludedNodeHint
	// ExcludedZoneHint: the topology hints give it to other zones.
	ExcludedZoneHint
	// ExcludedDuplicate: the same address and port is mentioned again, and that mention counts.
	ExcludedDuplicate
)

var reasonNames = [...]string{
	"ready", "terminating", "not-ready", "not-serving", "terminating", "other-node", "node-hint", "zone-hint", "repeated",
}

// String gives a word for it. Whether the endpoint is in the pool is not part of it.
func (r Reason) String() string { return reasonNames[r] }

// Included says whether the endpoint is in the pool.
func (r Reason) Included() bool { return r <= IncludedTerminating }

// endpointFilter says which candidates a pool takes.
type endpointFilter struct {
	// local takes only those on this node; draining takes those that serve while they terminate, since none is ready.
	local, terminating bool
	// byNode and byZone take only those whose hints name this node, or this zone. At most one of them is set.
	byNode, byZone string
}

// decide says what becomes of a candidate, and why.
func (ch *endpointFilter) decide(c *candidate) Reason {
	switch {
	case ch.local && !c.local:
		return ExcludedOtherNode
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

// clusterFilter is that of the cluster set. Falling back to endpoints that terminate knows no topology, and hints are
// never followed to an empty set: it happens only when no endpoint is ready anywhere.
func (b *builder) clusterFilter() endpointFilter {
	if !slices.ContainsFunc(b.candidates, func(c candidate) bool { return c.ready() }) {
		return endpointFilter{terminating: true}
	}
	return b.topologyFilter()
}

// localFilter is that of the local set.
func (b *builder) localFilter() endpointFilter {
	ready := slices.ContainsFunc(b.candidates, func(c candidate) bool { return c.local && c.ready() })
	return endpointFilter{local: true, terminating: !ready}
}

// topologyFilter gives the choice the topology hints ask for. A kind of hint counts only if every ready endpoint has one, since
// a half-written set would send too much to a few, and only if one of them names this node or zone. Node hints come
// first.
func (b *builder) topologyFilter() endpointFilter {
	node, zone := b.host.nodeName, b.host.zone
	allNodes, allZones, ourNode, ourZone := node != "", zone != "", false, false
	for i := range b.candidates {
		c := &b.candidates[i]
		if !c.ready() {
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
