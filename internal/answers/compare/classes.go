package compare

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Kind says what a destination is.
type Kind string

// The kinds of destinations.
const (
	ClusterIP       Kind = "cluster IP"
	LoadBalancerIP  Kind = "load balancer IP"
	ExternalIP      Kind = "external IP"
	NodePort        Kind = "node port"
	HealthCheckPort Kind = "health check node port"
	// UnusedPort is a port of a Service's address that no Service has, and Unallocated an address of a ServiceCIDR.
	UnusedPort  Kind = "unused port"
	Unallocated Kind = "unallocated address"
	// These are addresses that no Service has, at ports that none has: this node's own, and one beside it, where another
	// node may be; pods', and the API server's. Nobody may refuse them, in whatever range they are.
	OwnAddress       Kind = "own address"
	NeighbourAddress Kind = "address beside the node's"
	PodAddress       Kind = "pod's address"
	APIServerAddress Kind = "API server's address"
	// Unknown is a destination that rules name, and the objects do not.
	Unknown Kind = "destination of rules alone"
)

// destination is where the packets of some classes are sent to.
type destination struct {
	key  packets.Key
	kind Kind
	// service names the Service, if one has the destination.
	service string
}

// Sender says who sends a packet.
type Sender string

// The kinds of senders.
const (
	FromPod      Sender = "pod"
	FromOtherPod Sender = "pod of another node"
	FromNode     Sender = "node"
	// FromBridge is the node, from an address among the pods', as a bridge has it that pods are plugged into.
	FromBridge   Sender = "node, by an address among the pods'"
	FromOutside  Sender = "outside"
	FromEdge     Sender = "edge of a source range"
	FromEndpoint Sender = "endpoint itself"
	// FromNeighbour is somebody outside whose packet another node has forwarded untranslated.
	FromNeighbour Sender = "outside, by another node"
)

// sender is somebody who sends packets.
type sender struct {
	kind  Sender
	addr  netip.Addr
	iface string
	mac   snapshot.MAC
}

// sourcePort is that of all packets: no rule of a Service proxy asks for it, and one that did would be unknown.
const sourcePort = 40000

// node is what classes must know of the node.
type node struct {
	addrs []netip.Addr
	pods  ipfamily.Per[dataplane.Pods]
	own   map[netip.Addr]bool
	// podInterface is the name of an interface by which packets from pods come in, and device that of the one to the
	// outside. What other nodes send has the link-layer address mac; the zero MAC if none is known.
	podInterface, device string
	mac                  snapshot.MAC
	senders              ipfamily.Per[[]sender]
}

// outsideInterface is the device to the outside where no rules are at the ingress of any.
const outsideInterface = "eth0"

// link says by which device packets come in from outside, and what other nodes' frames look like: as the State says,
// or else the rules.
func link(s *dataplane.State, sides []Side) (device string, mac snapshot.MAC) {
	var devices []string
	var macs []snapshot.MAC
	if s != nil {
		macs = slices.Clone(s.NodeMACs)
		if s.Device != "" && s.Device != snapshot.AnyDevice {
			devices = append(devices, s.Device)
		}
	}
	for _, side := range sides {
		if m := side.Mentioned; m != nil {
			devices = append(devices, m.Devices...)
			for _, a := range m.Senders {
				macs = append(macs, a)
			}
		}
	}
	if s != nil && s.Device != "" {
		devices = append(devices, s.Device)
	}
	return append(devices, outsideInterface)[0], append(macs, snapshot.MAC{})[0]
}

// newNode makes up the senders of a node, whose link is that of the function link.
func newNode(host []netip.Addr, known ipfamily.Per[dataplane.Pods], ranges []netip.Prefix, device string,
	mac snapshot.MAC) *node {
	n := &node{addrs: host, pods: known, own: map[netip.Addr]bool{}, podInterface: "pod0", device: device, mac: mac}
	for _, p := range known {
		if p.ByInterface() {
			n.podInterface = cmp.Or(p.Interface, p.InterfacePrefix+"0")
		}
	}
	for _, f := range ipfamily.All {
		cidr := known[f].CIDR
		for _, r := range podRanges[f] {
			if !cidr.IsValid() {
				cidr = r
			}
		}
		inside := ipfamily.Last(cidr).Prev()
		far := outside(f, append(slices.Clone(ranges), cidr))
		n.senders[f] = []sender{
			{FromPod, inside, n.podInterface, snapshot.MAC{}}, {FromOtherPod, inside.Prev(), device, mac},
			{kind: FromNode}, {kind: FromBridge, addr: n.bridge(f)}, {kind: FromOutside, addr: far, iface: device},
		}
		if mac != (snapshot.MAC{}) {
			n.senders[f] = append(n.senders[f], sender{FromNeighbour, far, device, mac})
		}
	}
	return n
}

// podRanges stand for the ranges of pods where nothing says which these are.
var podRanges = ipfamily.Per[[]netip.Prefix]{
	{netip.MustParsePrefix("10.254.254.0/24")}, {netip.MustParsePrefix("fd00:fefe::/64")},
}

var outsiders = ipfamily.Per[[]string]{
	{"198.18.77.1", "192.0.2.201", "100.127.3.4", "11.77.8.9"}, {"2001:db8:ffff::77", "fd77:77::1", "2a00:77::1"},
}

// outside returns an address that is in none of some ranges.
func outside(f ipfamily.Family, ranges []netip.Prefix) netip.Addr {
	for _, s := range outsiders[f] {
		a := netip.MustParseAddr(s)
		if !slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.IsValid() && r.Contains(a) }) {
			return a
		}
	}
	return ipfamily.Per[netip.Addr]{netip.MustParseAddr("9.9.9.9"), netip.MustParseAddr("2620:fe::9")}[f]
}

// packet is what a sender sends to a destination. It is not ok if the sender cannot send there.
func (n *node) packet(s sender, k packets.Key) (p packets.Packet, ok bool) {
	switch {
	case s.kind == FromNode:
		s.iface, s.addr = "", n.sourceTo(k.Addr)
	case s.kind == FromBridge && (k.Addr.IsLoopback() || s.addr == n.sourceTo(k.Addr)):
		return p, false
	case slices.Contains(n.addrs, s.addr):
		s.iface = ""
	}
	if !s.addr.IsValid() || s.iface != "" && k.Addr.IsLoopback() || s.addr.Is4() != k.Addr.Is4() {
		return p, false
	}
	return packets.Packet{Source: netip.AddrPortFrom(s.addr, sourcePort),
		Destination: netip.AddrPortFrom(k.Addr, k.Port), Protocol: k.Protocol, Interface: s.iface, MAC: s.mac}, true
}

// sourceTo returns the address from which this node sends to another: the same, if it is its own, and otherwise one
// that is not among the pods', if there is one.
func (n *node) sourceTo(to netip.Addr) netip.Addr {
	if to.IsLoopback() || slices.Contains(n.addrs, to) {
		return to
	}
	f := ipfamily.Of(to)
	if i := slices.IndexFunc(n.addrs, func(a netip.Addr) bool { return sends(f, a) && !n.amongPods(a) }); i >= 0 {
		return n.addrs[i]
	}
	return n.bridge(f)
}

// bridge returns the first address of this node that is among the pods'; the zero Addr if there is none.
func (n *node) bridge(f ipfamily.Family) netip.Addr {
	if i := slices.IndexFunc(n.addrs, func(a netip.Addr) bool { return sends(f, a) && n.amongPods(a) }); i >= 0 {
		return n.addrs[i]
	}
	return netip.Addr{}
}

// sends reports whether an address of this node may be that of a packet to elsewhere.
func sends(f ipfamily.Family, a netip.Addr) bool {
	return ipfamily.Of(a) == f && !a.IsLoopback() && !a.IsLinkLocalUnicast()
}

func (n *node) amongPods(a netip.Addr) bool {
	cidr := n.pods[ipfamily.Of(a)].CIDR
	return cidr.IsValid() && cidr.Contains(a)
}

// edges returns the senders at the edges of ranges: the first, the last, the one before and the one after. Single
// addresses among the endpoints are left out: they are senders anyway.
func (n *node) edges(asked *packets.Asked, endpoints map[netip.Addr]bool) (list []sender) {
	seen := map[netip.Addr]bool{}
	for _, i := range asked.Intervals {
		if i.First == i.Last && endpoints[i.First] {
			continue
		}
		for _, a := range []netip.Addr{i.First.Prev(), i.First, i.Last, i.Last.Next()} {
			if a.IsValid() && !seen[a] && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() {
				seen[a] = true
				list = append(list, sender{kind: FromEdge, addr: a, iface: n.device})
			}
		}
	}
	return list
}

// gathering collects destinations.
type gathering struct {
	node *node
	all  map[packets.Key]destination
	// ports are ports at every address of this host, with the Service's name if there is one, and addrs those of
	// Services.
	ports  ipfamily.Per[map[packets.Key]string]
	addrs  map[netip.Addr]bool
	ranges []packets.Interval
}

func (g *gathering) add(d destination) {
	if _, there := g.all[d.key]; !there {
		g.all[d.key] = d
	}
}

// destinations returns all destinations that the objects or one of the sides name, and of addresses that are nobody's,
// sorted.
func destinations(n *node, o *objects, sides []Side) []destination {
	g := gathering{node: n, all: map[packets.Key]destination{}, addrs: map[netip.Addr]bool{},
		ports: ipfamily.Per[map[packets.Key]string]{{}, {}}}
	if o != nil {
		g.addObjects(o)
	}
	for _, side := range sides {
		if side.Mentioned != nil {
			g.addMentioned(side.Mentioned)
		}
	}
	for f, keys := range g.ports {
		for k, service := range keys {
			for _, a := range n.addrs {
				if ipfamily.Of(a) == ipfamily.Family(f) && (!a.IsLoopback() || a.Is4()) {
					k.Addr = a
					g.add(destination{k, NodePort, service})
				}
			}
		}
	}
	g.addOtherProtocols()
	if o != nil {
		g.addEndpoints(o)
	}
	g.addHosts()
	g.addUnusedPorts()
	g.addUnallocated()
	return slices.SortedFunc(maps.Values(g.all), func(a, b destination) int { return a.key.Compare(b.key) })
}

// addObjects adds what the objects name.
func (g *gathering) addObjects(o *objects) {
	o.eachDestination(func(d destination) {
		if d.kind == NodePort || d.kind == HealthCheckPort {
			k := packets.Key{Protocol: d.key.Protocol, Port: d.key.Port}
			if d.kind == NodePort {
				g.ports[ipfamily.Of(d.key.Addr)][k] = d.service
			}
		} else {
			g.addrs[d.key.Addr] = true
		}
		g.add(d)
	})
	for _, r := range o.state.ServiceCIDRs {
		g.ranges = append(g.ranges, packets.Interval{First: r.Masked().Addr(), Last: ipfamily.Last(r)})
	}
	for _, r := range o.state.SharedRanges {
		g.ranges = append(g.ranges, packets.Interval{First: r.Masked().Addr(), Last: ipfamily.Last(r)})
	}
}

// addMentioned adds what the rules of a side name.
func (g *gathering) addMentioned(m *packets.Mentioned) {
	for f := range m.Keys {
		for _, k := range m.Keys[f] {
			if k.Addr.IsValid() {
				g.add(destination{key: k, kind: Unknown})
				g.addrs[k.Addr] = true
			} else if _, there := g.ports[f][k]; !there {
				g.ports[f][k] = ""
			}
		}
	}
	for _, a := range m.Addrs {
		g.addrs[a] = true
	}
	g.ranges = append(g.ranges, m.Ranges...)
}

// eachDestination calls do with all frontends and health check node ports of the objects.
func (o *objects) eachDestination(do func(destination)) {
	kinds := [...]Kind{dataplane.ClusterIP: ClusterIP, dataplane.LoadBalancerIP: LoadBalancerIP,
		dataplane.ExternalIP: ExternalIP, dataplane.NodePort: NodePort}
	for k, fe := range o.frontends {
		do(destination{k, kinds[fe.Kind], fe.port.Name.String()})
	}
	for name, svc := range o.state.Services {
		if svc.HealthCheckNodePort == 0 {
			continue
		}
		for _, a := range o.host {
			do(destination{packets.Key{Addr: a, Protocol: packets.TCP, Port: svc.HealthCheckNodePort}, HealthCheckPort,
				name.String()})
		}
	}
}

// addOtherProtocols adds the lowest port in use of each address, for the protocols that do not have it.
func (g *gathering) addOtherProtocols() {
	lowest := map[netip.Addr]uint16{}
	for k := range g.all {
		if port, seen := lowest[k.Addr]; !seen || k.Port < port {
			lowest[k.Addr] = k.Port
		}
	}
	for a, port := range lowest {
		kind := UnusedPort
		if slices.Contains(g.node.addrs, a) {
			kind = OwnAddress
		}
		for _, p := range transports {
			g.add(destination{key: packets.Key{Addr: a, Protocol: p, Port: port}, kind: kind})
		}
	}
}

// addUnusedPorts adds an unused port of each address of a Service, for each protocol.
func (g *gathering) addUnusedPorts() {
	for a := range g.addrs {
		if !slices.Contains(g.node.addrs, a) { // those have been added
			g.addUnused(a, UnusedPort)
		}
	}
}

var transports = [...]packets.Protocol{packets.TCP, packets.UDP, packets.SCTP}

// addUnused adds the first port that nobody has at an address, for each protocol.
func (g *gathering) addUnused(a netip.Addr, kind Kind) {
	for _, p := range transports {
		k := packets.Key{Addr: a, Protocol: p, Port: 7}
		for _, used := g.all[k]; used; _, used = g.all[k] {
			k.Port++
		}
		g.add(destination{key: k, kind: kind})
	}
}

// addHosts adds what no Service may take from hosts and pods: this node's addresses, each with one beside it, and one
// of a pod. Beside it, a node port is asked for, too.
func (g *gathering) addHosts() {
	for _, a := range g.node.addrs {
		f := ipfamily.Of(a)
		if a.Is6() && (a.IsLoopback() || a.IsLinkLocalUnicast()) {
			continue
		}
		g.addUnused(a, OwnAddress)
		if a.IsLoopback() {
			continue
		}
		for _, beside := range []netip.Addr{a.Next(), a.Prev()} {
			if !beside.IsValid() || g.addrs[beside] || slices.Contains(g.node.addrs, beside) {
				continue
			}
			g.addUnused(beside, NeighbourAddress)
			if port := g.lowestPort(f); port.Port != 0 {
				port.Addr = beside
				g.add(destination{key: port, kind: NeighbourAddress})
			}
			break
		}
	}
	for f := range g.node.senders {
		for _, s := range g.node.senders[f] {
			if s.kind == FromOtherPod && !g.addrs[s.addr.Prev()] {
				g.addUnused(s.addr.Prev(), PodAddress)
			}
		}
	}
}

// lowestPort returns one of the ports at every address of this host; the zero Key if there is none.
func (g *gathering) lowestPort(f ipfamily.Family) (low packets.Key) {
	for k := range g.ports[f] {
		if low.Port == 0 || k.Port < low.Port || k.Port == low.Port && k.Protocol < low.Protocol {
			low = k
		}
	}
	return low
}

// addEndpoints adds the first endpoint of each family on this node and elsewhere, and the API server's.
func (g *gathering) addEndpoints(o *objects) {
	type place struct {
		family ipfamily.Family
		local  bool
	}
	first := map[place]netip.Addr{}
	for name, svc := range o.state.Services {
		for _, sp := range svc.Ports {
			for _, ep := range sp.Serving {
				a, at := ep.Addr(), place{ipfamily.Of(ep.Addr()), ep.Local}
				if name == dataplane.KubernetesService && !g.addrs[a] {
					g.addUnused(a, APIServerAddress)
				}
				if low, seen := first[at]; !seen || a.Less(low) {
					first[at] = a
				}
			}
		}
	}
	for _, a := range first {
		if !g.addrs[a] && !slices.Contains(g.node.addrs, a) {
			g.addUnused(a, PodAddress)
		}
	}
}

// addUnallocated adds unallocated addresses at the edges of ranges.
func (g *gathering) addUnallocated() {
	for _, r := range g.ranges {
		for _, a := range []netip.Addr{r.First.Prev(), r.First, r.First.Next(), r.Last.Prev(), r.Last, r.Last.Next()} {
			if a.IsValid() && !g.addrs[a] && !slices.Contains(g.node.addrs, a) && !a.IsLoopback() && !a.IsMulticast() {
				g.add(destination{key: packets.Key{Addr: a, Protocol: packets.TCP, Port: 7}, kind: Unallocated})
			}
		}
	}
}
