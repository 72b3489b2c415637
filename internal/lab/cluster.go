package lab

import (
	"errors"
	"fmt"
	"net/netip"
)

// Config says what a Cluster looks like.
type Config struct {
	// LocalPods and RemotePods are how many pods Node and Node2 run, at most 200 each.
	LocalPods, RemotePods int
	// PodLinkPrefix begins the name of the node's end of each local pod's link; the pod's number follows. Empty means
	// "veth".
	PodLinkPrefix string
	// PodBridge is the bridge of the node whose ports are the local pods' links. Empty means that there is none: each link
	// is routed.
	PodBridge string
	// PlainBridge makes that bridge a mere wire, as without br_netfilter. Otherwise it shows netfilter what it
	// carries, if the kernel can: then a packet between two of its pods that is translated stays on the bridge.
	PlainBridge bool
}

// Cluster is a net in which every packet of a Service can travel, in both families:
//
//	pod-1 10.244.1.10, fd00:10:244:1::a      remote-1 10.244.2.10, fd00:10:244:2::a
//	pod-2 10.244.1.11, fd00:10:244:1::b      remote-2 10.244.2.11, fd00:10:244:2::b
//	  |     |                                    |     |
//	veth1 veth2 10.244.1.1                       |     |
//	  |     |   fd00:10:244:1::1                 |     |
//	  node (routes) --------------- switch ------+-----+------------- outside 198.51.100.7
//	       192.0.2.10, 2001:db8:2::a   |                                      2001:db8:64::7
//	                                   +-- node2 192.0.2.20, 2001:db8:2::14
//
// The node is everybody's gateway to everywhere, in both directions: to any Service address, from outside to any pod
// and back, and even between node2 and its pods. So a proxy there may translate every packet, with or without a change
// of the source, and sees the answer. A packet it leaves alone, to an address nobody has, ends without an answer at
// outside, where the node's default route points. Pods of node2 are wired to the switch and not through node2, which
// would know short cuts.
type Cluster struct {
	*Net
	// Node is where the proxy runs; Node2 another node; Outside a client that is neither a pod nor a node.
	Node, Node2, Outside *Host
	// Pods run on Node, RemotePods on Node2. Their names are pod-1, pod-2, ... and remote-1, remote-2, ...
	Pods, RemotePods []*Host
}

// The ranges of a Cluster, one of each family. All but ServiceRange and ExternalRange have hosts in them.
var (
	// PodRange holds all pods.
	PodRange = ranges("10.244.0.0/16", "fd00:10:244::/48")
	// NodePodRange holds the pods of Node, with the node's own address in front of them at its first address.
	NodePodRange = ranges("10.244.1.0/24", "fd00:10:244:1::/64")
	// Node2PodRange holds the pods of Node2.
	Node2PodRange = ranges("10.244.2.0/24", "fd00:10:244:2::/64")
	// NodeRange holds the nodes.
	NodeRange = ranges("192.0.2.0/24", "2001:db8:2::/64")
	// OutsideRange holds Outside.
	OutsideRange = ranges("198.51.100.0/24", "2001:db8:64::/64")
	// ServiceRange is free for cluster IPs.
	ServiceRange = ranges("10.96.0.0/16", "fd00:10:96::/112")
	// ExternalRange is free for load balancer and external IPs.
	ExternalRange = ranges("203.0.113.0/24", "2001:db8:cb::/64")

	everywhere = ranges("0.0.0.0/0", "::/0")
)

// segmentBridge is the bridge in the host named switch.
const segmentBridge = "br0"

// The numbers of the hosts in their ranges.
const (
	gatewayNumber  = 1
	outsideNumber  = 7
	nodeNumber     = 10
	node2Number    = 20
	firstPodNumber = 10
)

func ranges(v4, v6 string) []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(v4), netip.MustParsePrefix(v6)}
}

// Nth gives an address of a range: Nth(ServiceRange[0], 10) is 10.96.0.10. n is less than 65536.
func Nth(p netip.Prefix, n int) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	n += int(b[len(b)-2])<<8 + int(b[len(b)-1])
	b[len(b)-2], b[len(b)-1] = byte(n>>8), byte(n)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// NewCluster builds a cluster. Whoever has it must Close it.
func NewCluster(c Config) (*Cluster, error) {
	cl := &Cluster{Net: New()}
	if err := cl.build(c); err != nil {
		return nil, errors.Join(err, cl.Close())
	}
	return cl, nil
}

func (c *Cluster) build(conf Config) error {
	if max(conf.LocalPods, conf.RemotePods) > 200 {
		return errors.New("lab: more than 200 pods on a node")
	}
	if conf.PodLinkPrefix == "" {
		conf.PodLinkPrefix = "veth"
	}
	if err := c.buildSegment(conf.RemotePods); err != nil {
		return err
	}
	if conf.PlainBridge {
		if err := c.Node.PlainBridges(); err != nil {
			return err
		}
	}
	if conf.PodBridge != "" {
		if err := c.Node.AddBridge(conf.PodBridge); err != nil {
			return err
		}
		for _, r := range NodePodRange {
			if err := c.Node.addAddr(conf.PodBridge, netip.PrefixFrom(Nth(r, gatewayNumber), r.Bits())); err != nil {
				return err
			}
		}
	}
	for i := range conf.LocalPods {
		if err := c.addPod(i+1, conf); err != nil {
			return err
		}
	}
	for _, h := range c.Hosts() {
		if err := h.WaitReady(); err != nil {
			return err
		}
	}
	return nil
}

// buildSegment makes the hosts around the switch and the routes between them: all go by the node.
func (c *Cluster) buildSegment(remotePods int) (err error) {
	wire, err := c.NewHost("switch")
	if err != nil {
		return err
	}
	if err := errors.Join(wire.PlainBridges(), wire.AddBridge(segmentBridge)); err != nil {
		return err
	}
	if c.Node, err = c.addToSegment(wire, "node", NodeRange, nodeNumber); err != nil {
		return err
	}
	if c.Node2, err = c.addToSegment(wire, "node2", NodeRange, node2Number); err != nil {
		return err
	}
	if c.Outside, err = c.addToSegment(wire, "outside", OutsideRange, outsideNumber); err != nil {
		return err
	}
	for i := range remotePods {
		pod, err := c.addToSegment(wire, fmt.Sprintf("remote-%d", i+1), Node2PodRange, firstPodNumber+i)
		if err != nil {
			return err
		}
		c.RemotePods = append(c.RemotePods, pod)
	}
	for i := range NodeRange {
		err := errors.Join(c.Node.AddRoute(Route{To: OutsideRange[i], Link: "eth0"}),
			c.Node.AddRoute(Route{To: Node2PodRange[i], Link: "eth0"}),
			c.Node.AddRoute(Route{To: everywhere[i], Via: Nth(OutsideRange[i], outsideNumber), Link: "eth0"}))
		if err != nil {
			return err
		}
	}
	return c.Node.Forward()
}

// addToSegment makes a host with a link eth0 to the switch. All but the nodes, which are neighbours, know only the
// node.
func (c *Cluster) addToSegment(wire *Host, name string, rs []netip.Prefix, number int) (*Host, error) {
	h, err := c.NewHost(name)
	if err != nil {
		return nil, err
	}
	err = errors.Join(Link(End{h, "eth0"}, End{wire, name}, LinkOptions{}), wire.AddPort(segmentBridge, name))
	if err != nil {
		return nil, err
	}
	for i, r := range rs {
		a := Nth(r, number)
		own := hostRange(a)
		if r == NodeRange[i] {
			own = netip.PrefixFrom(a, r.Bits())
		}
		if err := h.addAddr("eth0", own); err != nil {
			return nil, err
		}
		if c.Node == nil { // h is the node
			continue
		}
		if err := h.AddRoute(Route{To: everywhere[i], Via: Nth(NodeRange[i], nodeNumber), Link: "eth0"}); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// addPod makes a pod whose only neighbour is the node: even pods behind one bridge talk through the node's routing,
// unless the bridge calls netfilter, and that translates.
func (c *Cluster) addPod(number int, conf Config) error {
	pod, err := c.NewHost(fmt.Sprintf("pod-%d", number))
	if err != nil {
		return err
	}
	c.Pods = append(c.Pods, pod)
	a := Attachment{Link: fmt.Sprintf("%s%d", conf.PodLinkPrefix, number), Bridge: conf.PodBridge}
	for _, r := range NodePodRange {
		a.Addrs, a.Gateways = append(a.Addrs, Nth(r, firstPodNumber+number-1)), append(a.Gateways, Nth(r, gatewayNumber))
	}
	return pod.Attach(c.Node, a)
}

// hostRange gives the range of just one address.
func hostRange(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
