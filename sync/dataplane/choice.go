package dataplane

import "slices"

// Reason says why an endpoint is in a pool, or why not.
type Reason uint8

// The reasons. The first two are of endpoints that are in the pool.
const (
	// TakenReady: it is ready.
	TakenReady Reason = iota
	// TakenDraining: it serves while it terminates, and none is ready.
	TakenDraining
	// LeftNotReady: it is not ready.
	LeftNotReady
	// LeftGone: it terminates, and serves no longer.
	LeftGone
	// LeftDraining: it serves while it terminates, but others are ready.
	LeftDraining
	// LeftOtherNode: it is not on this node, and the traffic policy is Local.
	LeftOtherNode
	// LeftNodeHint: the topology hints give it to other nodes.
	LeftNodeHint
	// LeftZoneHint: the topology hints give it to other zones.
	LeftZoneHint
	// LeftRepeated: the same address and port is mentioned again, and that mention counts.
	LeftRepeated
)

var reasonNames = [...]string{
	"ready", "terminating", "not-ready", "not-serving", "terminating", "other-node", "node-hint", "zone-hint", "repeated",
}

// String gives a word for it. Whether the endpoint is in the pool is not part of it.
func (r Reason) String() string { return reasonNames[r] }

// Taken says whether the endpoint is in the pool.
func (r Reason) Taken() bool { return r <= TakenDraining }

// choice says which candidates a pool takes.
type choice struct {
	// local takes only those on this node; draining takes those that serve while they terminate, since none is ready.
	local, draining bool
	// byNode and byZone take only those whose hints name this node, or this zone. At most one of them is set.
	byNode, byZone string
}

// reason says what becomes of a candidate, and why.
func (ch *choice) reason(c *candidate) Reason {
	switch {
	case ch.local && !c.local:
		return LeftOtherNode
	case ch.draining && c.draining():
		return TakenDraining
	case c.draining() && !c.ready():
		return LeftDraining
	case !c.ready() && c.Terminating:
		return LeftGone
	case !c.ready():
		return LeftNotReady
	case ch.byNode != "" && !slices.Contains(c.ForNodes, ch.byNode):
		return LeftNodeHint
	case ch.byZone != "" && !slices.Contains(c.ForZones, ch.byZone):
		return LeftZoneHint
	}
	return TakenReady
}

// clusterChoice is that of the cluster set. Falling back to endpoints that terminate knows no topology, and hints are
// never followed to an empty set: it happens only when no endpoint is ready anywhere.
func (b *builder) clusterChoice() choice {
	if !slices.ContainsFunc(b.candidates, func(c candidate) bool { return c.ready() }) {
		return choice{draining: true}
	}
	return b.hints()
}

// localChoice is that of the local set.
func (b *builder) localChoice() choice {
	ready := slices.ContainsFunc(b.candidates, func(c candidate) bool { return c.local && c.ready() })
	return choice{local: true, draining: !ready}
}

// hints gives the choice the topology hints ask for. A kind of hint counts only if every ready endpoint has one, since
// a half-written set would send too much to a few, and only if one of them names this node or zone. Node hints come
// first.
func (b *builder) hints() choice {
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
		return choice{byNode: node}
	case allZones && ourZone:
		return choice{byZone: zone}
	}
	return choice{}
}
