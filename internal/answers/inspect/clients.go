package inspect

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// NodeShare is another node, to which packets of some clients are forwarded as they come.
type NodeShare struct {
	// Node is empty if the name is not known.
	Node    string     `json:"node,omitempty"`
	Address netip.Addr `json:"address"`
	Chance  float64    `json:"chance"`
}

func (n *NodeShare) name() string {
	if n.Node == "" {
		return n.Address.String()
	}
	return n.Node
}

// nodesOf returns the nodes that get packets of clients, by the objects.
func nodesOf(x *dataplane.Explanation) (list []NodeShare) {
	if x.Onward == nil {
		return nil
	}
	for i, n := range x.Onward.Nodes {
		if !n.Own && n.Weight > 0 {
			list = append(list, NodeShare{n.Name, n.Addr, x.Onward.Share(i)})
		}
	}
	return list
}

// nodeOf returns the node at which an ending of the kernel's leads.
func (a *Answer) nodeOf(end dataplane.Ending) NodeShare {
	n := NodeShare{Address: end.Endpoint.Addr(), Chance: float64(end.Share) / float64(end.Of)}
	if x := a.explanation; x != nil && x.Onward != nil {
		for _, of := range x.Onward.Nodes {
			if of.Addr == n.Address {
				n.Node = of.Name
			}
		}
	}
	return n
}

// own is the part of the clients that this node translates.
func (a *Answer) own() float64 {
	if x := a.explanation; x.Onward != nil {
		return x.Onward.OwnShare()
	}
	return 1
}

// forwardedTo explains what becomes of a packet that this node does not translate.
func (a *Answer) forwardedTo(nodes []NodeShare) string {
	then := "answers the client directly"
	if x := a.explanation; x != nil && x.Frontend != nil && x.Frontend.Sources != nil && !x.Source.IsValid() {
		then = "drops it"
	}
	if len(nodes) == 1 {
		return "forwarded untranslated to " + nodes[0].name() + ", which " + then
	}
	return fmt.Sprintf("forwarded untranslated to one of %d nodes, which %s", len(nodes), then)
}

// othersText says what becomes of clients that are not this node's share.
func (a *Answer) othersText(nodes []NodeShare) string {
	others := 0.0
	for _, n := range nodes {
		others += n.Chance
	}
	if others == 0 {
		return ""
	}
	return fmt.Sprintf("; %s of the clients are %s", percent(others), a.forwardedTo(nodes))
}

func printNodes(s *terminal.Printer, nodes []NodeShare) {
	for i := range nodes {
		n := &nodes[i]
		text := percent(n.Chance) + " to " + n.name()
		if n.Node != "" {
			text += " (" + n.Address.String() + ")"
		}
		labelled(s, first(i, "Onward"), "%s", text)
	}
}

// noteClients says what else there is to know of clients that keep their addresses, or should.
func (a *Answer) noteClients(x *dataplane.Explanation) {
	if x.Frontend == nil || x.Origin.Node || x.Origin.Pod {
		return
	}
	note := func(text string) { a.Notes = append(a.Notes, text) }
	unasked := x.Object.ClientAddress == snapshot.ClientAddressDefault
	if outer(x) && !x.Frontend.Kept && x.Port.Keep != nil {
		note("connections that other nodes have go on to them")
	}
	switch why := x.Port.NotKept; {
	case x.Onward != nil && x.Frontend.Sources != nil && !x.Source.IsValid():
		note("the sender is in none of the Service's loadBalancerSourceRanges, which the node checks that translates: " +
			"refused packets are counted there")
	case x.Onward != nil && x.Onward.OwnShare() > 0:
		note("what another node has forwarded to this one is all translated here")
	case x.Onward == nil && x.Frontend.Kept && x.Port.Keep.Divides():
		note("it comes from another node, or by another device: it is not forwarded again")
	case unasked && outer(x) && why != dataplane.KeptOrNotAsked && why != dataplane.NotKeptNowhere:
		note("clients of this Service do not keep their addresses on this node: " + why.Text())
	}
}

// outer reports whether clients may keep their addresses at a frontend.
func outer(x *dataplane.Explanation) bool {
	return x.Frontend.Kind == dataplane.LoadBalancerIP || x.Frontend.Kind == dataplane.ExternalIP
}

// unkept says why the annotation client-address changes nothing; empty if it does.
func unkept(x *dataplane.Explanation) string {
	if !outer(x) {
		return "only at load balancer addresses and external IPs"
	}
	return x.Port.NotKept.Text()
}

// asksNodes reports whether clients may keep their addresses, so that other Nodes matter.
func (o *Objects) asksNodes() bool {
	return o.Config.ClientAddress != dataplane.KeepNone && !o.Config.CannotKeep
}

// addLink adds what is known of the other nodes as neighbours. Here says that this host is the node: then the kernel's
// neighbours say who is on the link. Otherwise all Nodes are taken for neighbours. Settings are those of the kernel's
// rules, or nil: the proxy remembers link-layer addresses that the kernel has forgotten.
func (o *Objects) addLink(nodes map[string][]netip.Addr, here bool, settings *dataplane.Settings) error {
	if !o.asksNodes() || len(nodes) == 0 {
		return nil
	}
	link := AllNeighbours(snapshot.AnyDevice, nodes)
	if here {
		own := slices.Clone(o.Snap.Node.Addresses)
		if o.Config.NodeIP.IsValid() {
			own = slices.Insert(own, 0, o.Config.NodeIP)
		}
		var err error
		if link, err = watch.NewLink(func() []netip.Addr { return own }, nil).Look(nodes); err != nil {
			return fmt.Errorf("neighbours: %w", err)
		}
	}
	if settings != nil && link.Device != "" && len(settings.NodeMACs) > 0 {
		for name, n := range link.Nodes {
			n.MACs = nil
			link.Nodes[name] = n
		}
		link.Nodes[""] = snapshot.Neighbour{MACs: settings.NodeMACs}
	}
	o.Snap.Apply(snapshot.Delta{Link: &link})
	return nil
}

// AllNeighbours takes all other nodes, whose addresses are in order of preference, for neighbours on the link of a
// device.
func AllNeighbours(device string, nodes map[string][]netip.Addr) snapshot.Link {
	link := snapshot.Link{Device: device, Nodes: map[string]snapshot.Neighbour{}}
	for name, addrs := range nodes {
		n := snapshot.Neighbour{}
		for _, f := range ipfamily.All {
			if i := slices.IndexFunc(addrs, f.Has); i >= 0 {
				n.Addrs[f] = addrs[i]
			}
		}
		link.Nodes[name] = n
	}
	return link
}
