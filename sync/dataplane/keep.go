package dataplane

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Keep says to which nodes packets of clients from outside are forwarded untranslated, by a hash of the client. All
// nodes that know the same endpoints and reach the same nodes give a client the same node.
//
// Connections live on when clients begin to be divided, or cease to be: so it is also there while all endpoints are on
// this node, and while clients are masqueraded for a time. Then only this node has a Weight.
type Keep struct {
	// Nodes are this node and those that have endpoints, sorted by Name; one has a Weight. Failed neighbours are not among
	// them.
	Nodes []KeepNode
	// ByAddr hashes the client's address alone, else its port, too.
	ByAddr bool
}

// KeepNode is a node that has connections of clients.
type KeepNode struct {
	Name string
	// Addr is its address on the link of State.Device; the zero Addr for Own.
	Addr netip.Addr
	// Weight is the sum of the weights of its endpoints that get new connections. With 0, a node gets only packets of
	// those that its endpoints have, which end, drain, or are not ready.
	Weight uint32
	// Own says that it is this node, which translates to its own endpoints, or to all if it has none.
	Own bool
}

// NotKept says why a port does not keep its clients' addresses.
type NotKept uint8

// The reasons.
const (
	// KeptOrNotAsked: it does, or nobody asks for it, or externalTrafficPolicy is Local.
	KeptOrNotAsked NotKept = iota
	// NotKeptBackend: the node's backend or kernel cannot (Config.CannotKeep), or not at this device (Link.Refused).
	NotKeptBackend
	// NotKeptDevice: no device of Ethernet has this node's address.
	NotKeptDevice
	// NotKeptOffLink: a node that has endpoints is behind a router, or an endpoint's node is unknown.
	NotKeptOffLink
	// NotKeptScheduled: IPVS chooses the Service's endpoints, or other Services serve it.
	NotKeptScheduled
	// NotKeptSlots: the Services of the namespace ask for too many slots (MaxSlotsPerNamespace).
	NotKeptSlots
	// NotKeptNowhere: it has no frontend from outside, or no endpoint. There is nothing to keep.
	NotKeptNowhere
	// NotKeptOff: the node's setting allows it to no Service.
	NotKeptOff
	// NotKeptFailed: none of the nodes that have endpoints answers.
	NotKeptFailed
)

var notKeptNames = [...]string{"", "backend", "device", "off-link", "scheduled", "slots", "nowhere", "off", "failed"}

// String returns a word for the reason; empty for KeptOrNotAsked.
func (n NotKept) String() string { return notKeptNames[n] }

var notKeptTexts = [...]string{"", "this node's backend, kernel or device cannot forward packets untranslated",
	"this node's address is on no Ethernet device",
	"a node with endpoints is not on this node's link, or is unknown",
	"IPVS chooses its endpoints, or other Services serve it",
	"the Services of its namespace ask for too many slots",
	"it has no load balancer address or external IP of this family, or no endpoint",
	"clientAddress is off on this node", "no node with endpoints answers on this node's link"}

// Text returns the reason as a clause; empty for KeptOrNotAsked.
func (n NotKept) Text() string { return notKeptTexts[n] }

// NotKept returns why some clients of a Service that is to keep their addresses are masqueraded, of the first of its
// ports of which they are; KeptOrNotAsked if none is, or if there is nothing to keep. The Service may be nil.
func (s *Service) NotKept() NotKept {
	for sp := range s.EachPort() {
		if sp.NotKept != NotKeptNowhere && sp.NotKept != KeptOrNotAsked {
			return sp.NotKept
		}
	}
	return KeptOrNotAsked
}

// Keeps reports whether a Service has frontends that keep their clients' addresses. It may be nil.
func (s *Service) Keeps() bool {
	for _, f := range s.EachFrontend() {
		if f.Kept {
			return true
		}
	}
	return false
}

// The numbers of slots among which clients are divided, by the number of nodes: at least ten for each, if there are
// that many.
const (
	fewKeepSlots  = 61
	someKeepSlots = 1021
	manyKeepSlots = 4093
	fewKeepNodes  = 6
	someKeepNodes = 102
)

// KeepSizes are what Keep.Slots returns.
var KeepSizes = [...]int{fewKeepSlots, someKeepSlots, manyKeepSlots}

// Slots returns among how many slots clients are divided; 0 for nil.
func (k *Keep) Slots() int {
	if k == nil {
		return 0
	}
	nodes := 0
	for i := range k.Nodes {
		if k.Nodes[i].Weight > 0 {
			nodes++
		}
	}
	switch {
	case nodes <= fewKeepNodes:
		return fewKeepSlots
	case nodes <= someKeepNodes:
		return someKeepSlots
	}
	return manyKeepSlots
}

// Divides reports whether other nodes get new connections. It may be nil.
func (k *Keep) Divides() bool {
	return k != nil && slices.ContainsFunc(k.Nodes, func(n KeepNode) bool { return !n.Own && n.Weight > 0 })
}

// OwnShare returns the share of this node among all: 0 without endpoints, and at most 1.
func (k *Keep) OwnShare() float64 {
	for i := range k.Nodes {
		if k.Nodes[i].Own {
			return k.Share(i)
		}
	}
	return 0
}

// Share returns the share of one of the Nodes.
func (k *Keep) Share(i int) float64 { return float64(k.Nodes[i].Weight) / float64(k.Weight()) }

// Weight returns the sum of the Nodes' weights.
func (k *Keep) Weight() (sum uint64) {
	for _, n := range k.Nodes {
		sum += uint64(n.Weight)
	}
	return sum
}

func (k *Keep) equal(o *Keep) bool {
	return k == o || k != nil && o != nil && k.ByAddr == o.ByAddr && slices.Equal(k.Nodes, o.Nodes)
}

// reachable is where another node is on the link; the zero Addr if it is not. failed is snapshot.Neighbour's.
type reachable struct {
	addrs  ipfamily.Per[netip.Addr]
	failed ipfamily.Per[bool]
}

// neighbours returns what matters to Services of a link: what the nodes' frames look like does not.
func neighbours(l snapshot.Link) map[string]reachable {
	if l.Device == "" {
		return nil
	}
	out := make(map[string]reachable, len(l.Nodes))
	for name, n := range l.Nodes {
		out[name] = reachable{n.Addrs, n.Failed}
	}
	return out
}

// macsOf returns the link-layer addresses of all nodes, sorted and unique; nil without a device.
func macsOf(l snapshot.Link) []snapshot.MAC {
	if l.Device == "" {
		return nil
	}
	var out []snapshot.MAC
	for n := range maps.Values(l.Nodes) {
		out = append(out, n.MACs...)
	}
	slices.SortFunc(out, func(a, b snapshot.MAC) int { return slices.Compare(a[:], b[:]) })
	return slices.Compact(out)
}

// asksToKeep reports whether a Service's clients from outside are to keep their address.
func (h *host) asksToKeep(svc *snapshot.Service) bool {
	return !svc.ExternalLocal && (svc.ClientAddress == snapshot.ClientAddressKeep ||
		svc.ClientAddress == snapshot.ClientAddressDefault && h.keep == KeepLoadBalancers && len(svc.LoadBalancerIPs) > 0)
}

// keptRows returns the policy for the frontends with Kept of the port whose endpoints were collected.
func (b *builder) keptRows(svc *snapshot.Service, sp *ServicePort, f ipfamily.Family, external []row) []row {
	if b.keep(svc, sp, f) {
		return b.policy(f, true, true, noFailover)
	}
	return external
}

// keep decides for the port whose endpoints were collected whether its clients from outside keep their address, and
// marks the frontends. It reports whether this node translates what is its share.
func (b *builder) keep(svc *snapshot.Service, sp *ServicePort, f ipfamily.Family) (here bool) {
	if !b.host.asksToKeep(svc) {
		return false
	}
	nodes, why := b.keepNodes(sp.Name.Protocol, f)
	switch {
	case b.host.keep == KeepNone:
		nodes, why = nil, NotKeptOff
	case b.host.cannotKeep:
		nodes, why = nil, NotKeptBackend
	case b.host.neighbours == nil:
		nodes, why = nil, NotKeptDevice
	case b.scheduling != nil || b.backends != nil || b.own > 0:
		nodes, why = nil, NotKeptScheduled
	}
	if !slices.ContainsFunc(sp.Frontends, Frontend.Keepable) {
		nodes, why = nil, NotKeptNowhere
	}
	if len(nodes) > 0 {
		sp.Keep = &Keep{Nodes: nodes, ByAddr: sp.Affinity > 0 || sp.Hash == HashAddr}
	}
	if sp.NotKept = why; why != KeptOrNotAsked {
		return false
	}
	for i := range sp.Frontends {
		sp.Frontends[i].Kept = sp.Frontends[i].Keepable()
	}
	return sp.Keep.OwnShare() > 0
}

// Keepable reports whether a frontend is the same on all nodes, and for clients from outside: their addresses may be
// kept there.
func (f Frontend) Keepable() bool { return f.Kind == LoadBalancerIP || f.Kind == ExternalIP }

// keepNodes returns this node and those that have endpoints of one family, without those that have failed. Each that
// gets new connections must be on the link; otherwise, or if there is none, this node gets all new ones, and the others
// those that they have. As elsewhere, flows of UDP do not stay with endpoints that do not serve.
func (b *builder) keepNodes(p snapshot.Protocol, f ipfamily.Family) (nodes []KeepNode, why NotKept) {
	ready := slices.ContainsFunc(b.candidates, func(c candidate) bool { return c.ready() && !c.drains() })
	weights := map[string]uint32{}
	for i := range b.candidates {
		switch c := &b.candidates[i]; {
		case c.ready() || !ready && c.terminating():
			weights[c.Node] += c.parts
		case p != snapshot.UDP || c.terminating():
			weights[c.Node] += 0
		}
	}
	own := KeepNode{Name: b.host.nodeName, Own: true, Weight: weights[b.host.nodeName]}
	found, used := false, own.Weight > 0
	for name, weight := range weights {
		n, here := b.host.neighbours[name], name != "" && name == own.Name
		found = found || weight > 0
		switch onLink := n.addrs[f].IsValid(); {
		case here:
		case !onLink && weight > 0:
			why = NotKeptOffLink
		case onLink && !n.failed[f]:
			nodes = append(nodes, KeepNode{Name: name, Addr: n.addrs[f], Weight: weight})
			used = used || weight > 0
		}
	}
	switch {
	case why != KeptOrNotAsked:
	case !found:
		why = NotKeptNowhere
	case !used:
		why = NotKeptFailed
	}
	if why != KeptOrNotAsked {
		if len(nodes) == 0 {
			return nil, why
		}
		own.Weight = 1
		for i := range nodes {
			nodes[i].Weight = 0
		}
	}
	nodes = append(nodes, own)
	slices.SortFunc(nodes, func(x, y KeepNode) int { return strings.Compare(x.Name, y.Name) })
	return nodes, why
}

// unkeep has the clients of a Service masqueraded that would be kept; it asks for too many slots.
func (b *builder) unkeep(svc *snapshot.Service, sp *ServicePort) {
	if !slices.ContainsFunc(sp.Frontends, func(fe Frontend) bool { return fe.Kept }) {
		return
	}
	routes := sp.routes(b.rows(svc, ipfamily.Of(sp.Frontends[0].Key.Addr), true))
	for i := range sp.Frontends {
		if fe := &sp.Frontends[i]; fe.Kept {
			fe.Kept, fe.Routes, sp.NotKept = false, routes, NotKeptSlots
		}
	}
	if sp.Keep = nil; !svc.InternalLocal {
		sp.Local = poolNoEndpoints
	}
}
