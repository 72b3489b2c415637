// Package testbed is where proxies are held to the suite: two nodes with pods, a client outside and a router in front
// of the nodes, all of them network namespaces; a control plane; and the proxy under test on each node.
package testbed

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The ranges of the testbed, one of each family.
var (
	// PodRange holds all pods.
	PodRange = prefixes("10.244.0.0/16", "fd00:10:244::/48")
	// NodeRange holds the nodes, the router and the control plane.
	NodeRange = prefixes("192.0.2.0/24", "2001:db8:2::/64")
	// ClientRange holds the clients outside.
	ClientRange = prefixes("198.51.100.0/24", "2001:db8:64::/64")
	// ServiceRange holds cluster IPs, allocated by the API server. SecondServiceRange is for a ServiceCIDR that is added.
	ServiceRange       = prefixes("10.96.0.0/16", "fd00:10:96::/112")
	SecondServiceRange = prefixes("10.97.0.0/24", "fd00:10:97::/112")
	// BalancerRange holds load balancers' addresses, ExternalRange external IPs: the router sends them to a node.
	BalancerRange = prefixes("198.18.0.0/16", "2001:db8:18::/64")
	ExternalRange = prefixes("198.19.0.0/16", "2001:db8:19::/64")
	// ProxyRange holds addresses of the router itself: a load balancer that answers there by itself.
	ProxyRange = prefixes("203.0.113.250/32", "2001:db8:cb::fa/128")

	everywhere = prefixes("0.0.0.0/0", "::/0")
)

func prefixes(v4, v6 string) []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(v4), netip.MustParsePrefix(v6)}
}

// nodeNames are the nodes; a letter stands for each. Pods of node-a are a1, a2, ..., and pod-a, which only asks.
var nodeNames = []string{"node-a", "node-b"}

// Zones of the nodes.
var Zones = map[string]string{"node-a": "zone-a", "node-b": "zone-b"}

// podsOfNode is how many pods each node has that serve.
const podsOfNode = 3

// The ports that pods serve, with all protocols: the greeting says which one was reached.
var PodPorts = []uint16{8080, 8081, 8082}

// BalancerPort is served by the router at ProxyRange.
const BalancerPort = 80

// Numbers of hosts in NodeRange, and of pods in their node's range.
const (
	routerNumber, controlNumber = 1, 5
	nodeNumber                  = 10  // then 20
	secondNodeNumber            = 110 // then 120: another address of the node
	callerNumber, podNumber     = 9, 10
	clientNumber                = 7
)

// Topology is the hosts and the wires between them:
//
//	 pod-a a1 a2 a3            pod-b b1 b2 b3
//	    |  |  |  |                |  |  |  |
//	    node-a (routes)           node-b (cni0)        control
//	    192.0.2.10                192.0.2.20           192.0.2.5
//	      |                         |                     |
//	------+-------------------------+-----------+---------+----
//	                                            |
//	                                          router 192.0.2.1
//	                                           |   |
//	                           client-a 198.51.100.7   client-b 198.51.100.8
//
// The pods of node-a have routes; those of node-b are behind a bridge, which shows netfilter what it carries, where
// the kernel can.
//
// The router sends what client-a has for a load balancer's address, an external or a cluster IP to node-a, and what
// client-b has to node-b, as a load balancer without translation does. What nodes send to such addresses, since no
// proxy translated it, ends there without an answer.
type Topology struct {
	*lab.Net
	hosts map[string]*lab.Host
	added atomic.Int32 // by AddPod
}

// NewTopology builds it. Whoever has it must Close it.
func NewTopology() (*Topology, error) {
	t := &Topology{Net: lab.New(), hosts: make(map[string]*lab.Host)}
	if err := t.build(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// Host gives a host by its name: "node-a", "a1", "pod-b", "client-a", "router", "control"; nil if there is none.
func (t *Topology) Host(name string) *lab.Host { return t.hosts[name] }

// Nodes gives the nodes' names.
func (t *Topology) Nodes() []string { return nodeNames }

func (t *Topology) build() error {
	wire, err := t.add("switch")
	if err != nil {
		return err
	}
	if err := errors.Join(wire.PlainBridges(), wire.AddBridge("br0")); err != nil {
		return err
	}
	numbers := map[string]int{
		"router":  routerNumber,
		"control": controlNumber,
		"node-a":  nodeNumber,
		"node-b":  2 * nodeNumber,
	}
	for _, name := range []string{"router", "control", "node-a", "node-b"} {
		if err := t.addToSegment(wire, name, numbers[name]); err != nil {
			return err
		}
	}
	for i := range nodeNames {
		if err := t.buildNode(i); err != nil {
			return err
		}
	}
	if err := t.buildRouter(); err != nil {
		return err
	}
	for _, h := range t.Hosts() {
		if err := h.WaitReady(); err != nil {
			return err
		}
	}
	return t.serve()
}

func (t *Topology) add(name string) (*lab.Host, error) {
	h, err := t.NewHost(name)
	t.hosts[name] = h
	return h, err
}

func (t *Topology) addToSegment(wire *lab.Host, name string, number int) error {
	h, err := t.add(name)
	if err != nil {
		return err
	}
	if err := lab.Link(lab.End{Host: h, Link: "eth0"}, lab.End{Host: wire, Link: name}, lab.LinkOptions{}); err != nil {
		return err
	}
	if err := wire.AddPort("br0", name); err != nil {
		return err
	}
	for _, r := range NodeRange {
		if err := h.AddAddr("eth0", netip.PrefixFrom(lab.Nth(r, number), r.Bits())); err != nil {
			return err
		}
	}
	return nil
}

// podRange gives the pods of a node, by its place: 10.244.1.0/24 and 10.244.2.0/24.
func podRange(node int) []netip.Prefix {
	return prefixes(fmt.Sprintf("10.244.%d.0/24", node+1), fmt.Sprintf("fd00:10:244:%d::/64", node+1))
}

func letter(node int) string { return string(rune('a' + node)) }

func (t *Topology) buildNode(i int) error {
	node := t.hosts[nodeNames[i]]
	if err := node.Forward(); err != nil {
		return err
	}
	other := 1 - i
	for f := range NodeRange {
		err := errors.Join(
			node.AddAddr("eth0", netip.PrefixFrom(lab.Nth(NodeRange[f], secondNodeNumber+10*i), NodeRange[f].Addr().BitLen())),
			node.AddRoute(lab.Route{To: podRange(other)[f], Via: lab.Nth(NodeRange[f], nodeNumber*(other+1)), Link: "eth0"}),
			node.AddRoute(lab.Route{To: everywhere[f], Via: lab.Nth(NodeRange[f], routerNumber), Link: "eth0"}),
		)
		if err != nil {
			return err
		}
	}
	if bridges(i) {
		if err := t.addBridge(i); err != nil {
			return err
		}
	}
	if err := t.addPod(i, "pod-"+letter(i), callerNumber); err != nil {
		return err
	}
	for n := range podsOfNode {
		if err := t.addPod(i, fmt.Sprintf("%s%d", letter(i), n+1), podNumber+n); err != nil {
			return err
		}
	}
	return nil
}

// PodBridge is the bridge of node-b, behind which its pods are.
const PodBridge = "cni0"

// bridges says whether a node, by its place, has its pods behind a bridge.
func bridges(node int) bool { return node == 1 }

// addBridge makes the bridge of a node's pods, at which they have their gateway.
func (t *Topology) addBridge(node int) error {
	host := t.hosts[nodeNames[node]]
	if err := host.AddBridge(PodBridge); err != nil {
		return err
	}
	for _, r := range podRange(node) {
		if err := host.AddAddr(PodBridge, netip.PrefixFrom(lab.Nth(r, 1), r.Bits())); err != nil {
			return err
		}
	}
	return nil
}

// addPod makes a pod whose only neighbour is its node.
func (t *Topology) addPod(node int, name string, number int) error {
	pod, err := t.add(name)
	if err != nil {
		return err
	}
	a := lab.Attachment{Link: "veth-" + name}
	if bridges(node) {
		a.Bridge = PodBridge
	}
	for _, r := range podRange(node) {
		a.Addrs, a.Gateways = append(a.Addrs, lab.Nth(r, number)), append(a.Gateways, lab.Nth(r, 1))
	}
	return pod.Attach(t.hosts[nodeNames[node]], a)
}

// firstAddedPod is above the numbers of the pods that are there from the beginning.
const firstAddedPod = 50

// AddPod makes one more pod of a node. Nothing serves in it, and Host does not know it.
func (t *Topology) AddPod(node string) (*lab.Host, error) {
	n := int(t.added.Add(1))
	host, err := t.NewHost(fmt.Sprintf("x%d", n))
	if err != nil {
		return nil, err
	}
	i := slices.Index(nodeNames, node)
	a := lab.Attachment{Link: "veth-" + host.Name}
	if bridges(i) {
		a.Bridge = PodBridge
	}
	for _, r := range podRange(i) {
		a.Addrs, a.Gateways = append(a.Addrs, lab.Nth(r, firstAddedPod+n)), append(a.Gateways, lab.Nth(r, 1))
	}
	gateway := t.hosts[node]
	return host, errors.Join(host.Attach(gateway, a), host.WaitReady(), gateway.WaitReady())
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// firstTable is the routing table of the router for client-a; that for client-b follows.
const firstTable = 100

// RoutesOf returns the routing table of the router for a client; 0, which is that for nodes, for any other name.
func RoutesOf(client string) int {
	for i := range nodeNames {
		if client == "client-"+letter(i) {
			return firstTable + i
		}
	}
	return 0
}

func (t *Topology) buildRouter() error {
	router := t.hosts["router"]
	if err := router.Forward(); err != nil {
		return err
	}
	for f, r := range NodeRange {
		if err := router.AddAddr("lo", ProxyRange[f]); err != nil {
			return err
		}
		for i := range nodeNames {
			via := lab.Nth(r, nodeNumber*(i+1))
			if err := router.AddRoute(lab.Route{To: podRange(i)[f], Via: via, Link: "eth0"}); err != nil {
				return err
			}
		}
		for _, dead := range t.frontends(f) {
			route := &netlink.Route{Dst: ipNet(dead), Type: unix.RTN_BLACKHOLE}
			if err := router.Netlink().RouteAdd(route); err != nil {
				return fmt.Errorf("router: blackhole %s: %w", dead, err)
			}
		}
		// Routes to nobody: those hosts need no way to Services.
		if err := t.hosts["control"].AddRoute(lab.Route{To: everywhere[f], Via: lab.Nth(r, routerNumber),
			Link: "eth0"}); err != nil {
			return err
		}
	}
	for i := range nodeNames {
		if err := t.addClient(i); err != nil {
			return err
		}
	}
	return nil
}

// frontends gives the ranges of a family in which Services have addresses.
func (t *Topology) frontends(f int) []netip.Prefix {
	return []netip.Prefix{ServiceRange[f], SecondServiceRange[f], BalancerRange[f], ExternalRange[f]}
}

// addClient makes the client whose packets for Services go to one of the nodes.
func (t *Topology) addClient(i int) error {
	name := "client-" + letter(i)
	client, err := t.add(name)
	if err != nil {
		return err
	}
	router := t.hosts["router"]
	a := lab.Attachment{Link: name}
	for _, r := range ClientRange {
		a.Addrs, a.Gateways = append(a.Addrs, lab.Nth(r, clientNumber+i)), append(a.Gateways, lab.Nth(r, 1))
	}
	if err := client.Attach(router, a); err != nil {
		return err
	}
	for f := range ClientRange {
		var err error
		for _, to := range t.frontends(f) {
			via := lab.Nth(NodeRange[f], nodeNumber*(i+1))
			err = errors.Join(err, router.AddRoute(lab.Route{To: to, Via: via, Link: "eth0", Table: firstTable + i}))
		}
		rule := netlink.NewRule()
		rule.Family, rule.IifName, rule.Table, rule.Priority = family(f), name, firstTable+i, 1000+i
		if err := errors.Join(err, router.Netlink().RuleAdd(rule)); err != nil {
			return err
		}
	}
	return nil
}

func family(f int) int { return []int{unix.AF_INET, unix.AF_INET6}[f] }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// serve has every pod, the nodes (for endpoints in the host's network), the router (as a balancer) and the control
// plane (for the canary) answer.
func (t *Topology) serve() error {
	protocols := []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}
	for name, h := range t.hosts {
		ports := servedPorts(name)
		if ports == nil {
			continue
		}
		for _, p := range protocols {
			if _, err := h.Serve(p, ports...); err != nil {
				return err
			}
		}
	}
	_, err := t.hosts["control"].Serve(snapshot.TCP, canaryTargets()...)
	return err
}

// servedPorts gives the ports at which a host answers with every protocol; nil if there are none.
func servedPorts(name string) []uint16 {
	switch {
	case IsPod(name) && name != "pod-a" && name != "pod-b", IsNode(name):
		return PodPorts
	case name == "router":
		return []uint16{BalancerPort}
	}
	return nil
}

// Serves says whether a host answers at a port, with every protocol.
func Serves(host string, port uint16) bool { return slices.Contains(servedPorts(host), port) }

// IsNode says whether a host of this name is a node.
func IsNode(name string) bool { return name == "node-a" || name == "node-b" }

// IsPod says whether a host of this name is a pod.
func IsPod(name string) bool { return NodeOf(name) != "" && !IsNode(name) }

// NodeOf gives the node that a pod runs on, or a node itself; empty for others.
func NodeOf(name string) string {
	switch {
	case IsNode(name):
		return name
	case len(name) == 2 && (name[0] == 'a' || name[0] == 'b'):
		return "node-" + name[:1]
	case name == "pod-a", name == "pod-b":
		return "node-" + name[4:]
	}
	return ""
}

// SecondAddr gives the other address of a node.
func (t *Topology) SecondAddr(node string, f ipfamily.Family) netip.Addr {
	i := int(node[len(node)-1] - 'a')
	return lab.Nth(NodeRange[index(f)], secondNodeNumber+10*i)
}

// index gives a family's place in the ranges.
func index(f ipfamily.Family) int {
	if f == ipfamily.IPv4 {
		return 0
	}
	return 1
}

// RangeOf gives the addresses of a host as ranges of one address.
func RangeOf(host string) []netip.Prefix {
	var all []netip.Prefix
	for f := range NodeRange {
		var a netip.Addr
		switch {
		case IsNode(host):
			a = lab.Nth(NodeRange[f], nodeNumber*(1+int(host[5]-'a')))
		case len(host) == 2:
			a = lab.Nth(podRange(int(host[0] - 'a'))[f], podNumber+int(host[1]-'1'))
		case host == "pod-a", host == "pod-b":
			a = lab.Nth(podRange(int(host[4] - 'a'))[f], callerNumber)
		default:
			a = lab.Nth(ClientRange[f], clientNumber+int(host[len(host)-1]-'a'))
		}
		all = append(all, single(a))
	}
	return all
}

// Owns says whether an address is one of a host's own, as AddrsOf has them.
func (t *Topology) Owns(host string, a netip.Addr) bool { return slices.Contains(t.AddrsOf(host), a) }

// AddrsOf gives a host's own addresses but those of loopback: of a node also its other one, and the one that its pods
// have as their gateway; of the router those of the load balancer, and not those that clients have as their gateway.
func (t *Topology) AddrsOf(host string) []netip.Addr {
	h := t.hosts[host]
	all := []netip.Addr{h.IP4, h.IP6}
	switch {
	case host == "router":
		for _, r := range ProxyRange {
			all = append(all, r.Addr())
		}
	case IsNode(host):
		i := int(host[5] - 'a')
		for f := range NodeRange {
			all = append(all, lab.Nth(podRange(i)[f], 1), lab.Nth(NodeRange[f], secondNodeNumber+10*i))
		}
	}
	return all
}

// Owner gives the host that has an address, empty if there is none. The address of a pod's gateway belongs to a node.
func (t *Topology) Owner(a netip.Addr) string {
	for name := range t.hosts {
		if t.Owns(name, a) {
			return name
		}
	}
	return ""
}

// Bridged gives the addresses that are behind an interface of a node, if that is a bridge that shows netfilter what
// it carries.
func (t *Topology) Bridged(node, link string) []netip.Prefix {
	if link != PodBridge || !lab.BridgesCallNetfilter() {
		return nil
	}
	return podRange(slices.Index(nodeNames, node))
}

// Entry gives the node that is the first to see a packet, and the interface by which it comes in there, which is
// empty if the node sends it itself. The node is empty if no node sees the packet.
func (t *Topology) Entry(from string, to netip.Addr) (node, link string) {
	switch node := NodeOf(from); {
	case node == from:
		return node, ""
	case node != "" && bridges(slices.Index(nodeNames, node)):
		return node, PodBridge
	case node != "":
		return node, "veth-" + from
	}
	if owner := t.Owner(to); owner != "" {
		return NodeOf(owner), "eth0"
	}
	if letter, ok := strings.CutPrefix(from, "client-"); ok { // as the router's tables for clients have it
		return "node-" + letter, "eth0"
	}
	return "", ""
}
