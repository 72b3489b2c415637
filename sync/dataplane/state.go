// Package dataplane decides what should happen to a packet that is sent to a Service. It turns a snapshot of the
// cluster into a State: frontends (address, protocol, port), each with an ordered table of routes to pools of
// endpoints. It knows nothing of nftables, IPVS or iptables; every backend prints the same rows.
package dataplane

import (
	"cmp"
	"net/netip"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// State says what happens to every packet: the one value that all backends are given. Services in the map are
// immutable. No two frontends in a State have the same Key.
type State struct {
	// Services holds every Service that has at least one frontend.
	Services map[snapshot.Name]*Service
	// Pods4 and Pods6 say how to recognize IPv4 and IPv6 packets that come from a pod, if that is known.
	Pods4, Pods6 Pods
	// PodsFirst says that a packet of this node with a pod's address is taken for a pod's, not for the node's: routes of
	// pods come before those of the node.
	PodsFirst bool
	// MasqueradeAll masquerades all traffic to cluster IPs.
	MasqueradeAll bool
	// ServiceCIDRs are the ranges in which packets to an address without a Service are dropped; sorted, no range inside
	// another, nil if none is known.
	ServiceCIDRs []netip.Prefix
	// SharedRanges are the parts of ServiceCIDRs in which something other than Services may have addresses, by Overlaps:
	// nothing that no frontend takes is dropped or rejected there. Sorted, no range inside another.
	SharedRanges []netip.Prefix
	// IPVSAddresses are the operator's IPVS.Addresses.
	IPVSAddresses []netip.Prefix
	// LocalhostNodePorts says that node ports answer at 127.0.0.1, for which the host must route its loopback range.
	LocalhostNodePorts bool
	// Evidence says that the backend must gather evidence about endpoints that do not answer or refuse. Otherwise every
	// ServicePort's SecondChance is off.
	Evidence bool
	// Records says that the backend must log resets, and packets that it rejects or drops.
	Records bool
	// PingAddrs are this node's addresses that answer a ping of a Service address, per family. The zero Addr: none does.
	PingAddrs ipfamily.Per[netip.Addr]
	// Device is where packets to Frontends that keep their clients' address come in, and by which they are forwarded to
	// other nodes; empty if no client's address can be kept here.
	Device string
	// DeviceIndex is that of the Device. If it changes, the kernel may have taken away the rules that belonged to the
	// other device of this name.
	DeviceIndex int
	// NodeMACs are those of the other nodes: what comes from them is never forwarded again. Sorted and unique; nil
	// without a Device.
	NodeMACs []snapshot.MAC
	// Settings are the Lines of the Config that this is computed with. They change nothing for a packet.
	Settings []string
}

// Service is what one Kubernetes Service asks of the data plane.
type Service struct {
	Name snapshot.Name
	// Age decides which Service wins an address that several claim; see Claim.
	Age snapshot.Age
	// ClusterIPs belong to the Service alone: packets to their other ports are rejected, but in State.SharedRanges.
	ClusterIPs []netip.Addr
	// SilentClusterIPs are those that answer no ping although State.PingAddrs has their family: no port has an endpoint.
	SilentClusterIPs []netip.Addr
	// PingableIPs are the load balancer addresses that answer a ping from outside. An address that several Services share
	// answers if one of them has it here.
	PingableIPs []netip.Addr
	// LoadBalancerIPs are the load balancer addresses of which unused ports are rejected. Like pings, that concerns
	// senders from outside that are not pods, and no address of this host.
	LoadBalancerIPs []netip.Addr
	// HealthCheckNodePort is the TCP port at which load balancers ask whether this node has endpoints; 0 means none.
	HealthCheckNodePort uint16
	// OverCapacity says that the Service has more endpoints than it may have. Those in the last slices by name are left
	// out, and all of them if others refer to too many: see TooManyBackends.
	OverCapacity bool
	// Counters is the Service's claim on the budget for counters. It changes nothing for a packet.
	Counters snapshot.Counters
	// Ports are sorted by family, then in the order of the Service.
	Ports []*ServicePort
}

// ServicePort is one port of a Service in one address family.
type ServicePort struct {
	Name PortName
	// Affinity keeps a client, identified by its address, with its endpoint at all frontends of the port, until this long
	// after its last connection. Whole seconds; 0 means no affinity.
	Affinity time.Duration
	// Cluster and Local are the pools that the routes name. Neither is nil; a pool that no route names has no endpoints.
	// Two pools with endpoints are never the same Pool, even if their endpoints are the same.
	Cluster, Local *Pool
	// Serving are the endpoints that earlier flows may keep: all that are ready or serving, whatever policy, topology,
	// termination and ejection mean for new flows, but for those of UDP if the Service has a Local. Sorted by AddrPort
	// and unique, it includes those of both pools.
	Serving []Endpoint
	// Finishing are endpoints that serve and are not in Serving, since a flow of UDP is to change to those: one that
	// waits for its first answer may wait for it. Sorted like Serving; nil for other protocols.
	Finishing []Endpoint
	// Scheduling makes IPVS choose the endpoint of a connection; nil means that the backend chooses.
	Scheduling *Scheduling
	// Hash is how the backend chooses wherever IPVS does not. A backend that cannot hash chooses at random.
	Hash Hash
	// SecondChance is what happens to endpoints that do not answer or refuse: SecondChanceOff, always for other protocols
	// than TCP, SecondChanceObserve or SecondChanceOn.
	SecondChance snapshot.SecondChance
	// Probe is how this node probes the endpoints of its pools; zero for other protocols than TCP, and while SecondChance
	// is off.
	Probe snapshot.Probe
	// Resort are endpoints that are not ready, and become the port's once they accept a probe of this node, since the
	// Service has no other; at most MaxResort. Sorted and unique; nil for other protocols than TCP.
	Resort []netip.AddrPort
	// Limits are those of new connections, for each pool by itself, where the backend chooses the endpoint. A backend that
	// cannot limit connections ignores them.
	Limits snapshot.Limits
	// Full says that there are as many open connections as Limits allow: new ones are refused.
	Full bool
	// FullClients are the clients that have as many as Limits allow: theirs are refused. Sorted.
	FullClients []netip.Addr
	// Drain is how long a TCP connection may last after its endpoint stopped serving; 0 means as long as it likes. Whole
	// seconds, always 0 for other protocols.
	Drain time.Duration
	// Rebalance is for how long a TCP connection must have been idle to be ended so that an endpoint that is added gets
	// its share; 0 means that none is. Whole seconds, always 0 for other protocols.
	Rebalance time.Duration
	// Keep are the nodes among which clients from outside are divided, untranslated, at Frontends that are Keepable; nil
	// if this node translates for all that come here.
	Keep *Keep
	// NotKept says why no client's address is kept although the Service, or the node's setting, asks for it.
	NotKept NotKept
	// Frontends are sorted by Key and non-empty.
	Frontends []Frontend
}

// RebalancePool returns the pool whose endpoints are to have even shares of the open connections. It is nil if the
// Service does not ask for that, if a client would come back to the same endpoint, or if the traffic policies lead to
// two pools.
func (sp *ServicePort) RebalancePool() *Pool {
	if sp.Rebalance == 0 || sp.Affinity > 0 || sp.Scheduling != nil || sp.Hash != NoHash ||
		len(sp.Cluster.Endpoints) > 0 && len(sp.Local.Endpoints) > 0 {
		return nil
	}
	if len(sp.Cluster.Endpoints) > 0 {
		return sp.Cluster
	}
	return sp.Local
}

// Scheduling says how IPVS chooses an endpoint. It is comparable, and many ServicePorts share one.
type Scheduling struct {
	// Scheduler is the kernel's name: rr, wrr, lc, wlc, fo, ovf, lblc, lblcr, dh, sh, mh, sed, nq or twos.
	Scheduler string
	// Port and Fallback are flags of sh and mh; see snapshot.Scheduling.
	Port, Fallback bool
}

// Hash says which of a client's properties decide which endpoint it gets.
type Hash uint8

// The hashes.
const (
	// NoHash: none, the choice is random.
	NoHash Hash = iota
	// HashAddr: its address.
	HashAddr
	// HashAddrPort: its address and port. A ServicePort with Affinity never has this.
	HashAddrPort
)

var hashNames = [...]string{"random", "hash", "hash,port"}

// String returns the scheduler's name in annotations.
func (h Hash) String() string { return hashNames[h] }

// PortName identifies a service port.
type PortName struct {
	Service  snapshot.Name
	Port     string // empty for an unnamed port
	Protocol snapshot.Protocol
}

// String returns "namespace/name:port", or "namespace/name" for an unnamed port.
func (n PortName) String() string {
	if n.Port == "" {
		return n.Service.String()
	}
	return n.Service.String() + ":" + n.Port
}

// Compare orders by Service, port name and protocol.
func (n PortName) Compare(o PortName) int {
	return cmp.Or(n.Service.Compare(o.Service), strings.Compare(n.Port, o.Port), cmp.Compare(n.Protocol, o.Protocol))
}

// Key identifies a frontend: the packet's destination.
type Key struct {
	Addr     netip.Addr
	Protocol snapshot.Protocol
	Port     uint16
}

// Compare orders keys by address (IPv4 first), protocol and port.
func (k Key) Compare(o Key) int {
	return cmp.Or(k.Addr.Compare(o.Addr), cmp.Compare(k.Protocol, o.Protocol), cmp.Compare(k.Port, o.Port))
}

// String gives "10.96.0.1:80/tcp", "[fd00::1]:80/tcp", and for a ping "10.96.0.1/icmp".
func (k Key) String() string {
	if k.Protocol.IsPing() {
		return k.Addr.String() + "/" + k.Protocol.String()
	}
	return netip.AddrPortFrom(k.Addr, k.Port).String() + "/" + k.Protocol.String()
}

// Kind is the kind of a frontend. If one service port has two frontends at the same key, the lower kind counts; for
// different ports see Claim.Compare.
type Kind uint8

// The kinds of frontend.
const (
	ClusterIP Kind = iota
	LoadBalancerIP
	ExternalIP
	NodePort
)

var kindNames = [...]string{"ClusterIP", "LoadBalancerIP", "ExternalIP", "NodePort"}

func (k Kind) String() string { return kindNames[k] }

// Frontend is one address at which a service port answers.
type Frontend struct {
	Key  Key
	Kind Kind
	// NotScheduled says why IPVS does not choose here although the Service asks for it; Schedulable if it does not ask.
	NotScheduled NotScheduled
	// Routes decide in order: the first whose From matches the packet's origin. The last one is always From Anyone.
	Routes []Route
	// Sources are the client ranges that are served at all, before any route: sorted, no range inside another. Nil means
	// everybody.
	Sources []netip.Prefix
	// Kept says that clients from outside keep their address: on a node of the port's Keep they are translated to its own
	// endpoints (the routes say so), and what other nodes' share is, the backend forwards to them.
	Kept bool
}

// Route returns the route a packet from the given origin takes; origin is Pod, Node, or Anyone for all others.
func (f *Frontend) Route(origin From) Route {
	for _, r := range f.Routes {
		if r.From == Anyone || r.From == origin {
			return r
		}
	}
	return Route{}
}

// Route is one row of policy.
type Route struct {
	From From
	// Pool is the ServicePort's Cluster or Local pool, or another one without endpoints, the same in all routes.
	Pool *Pool
	// SNAT makes the endpoint see an address of this node instead of the client's. Hairpin traffic, an endpoint that
	// reaches itself, is always masqueraded and has no row.
	SNAT bool
}

// From is where a packet comes from.
type From uint8

// The origins routes can ask for.
const (
	// Anyone holds every packet.
	Anyone From = iota
	// Pod holds what State.Pods4 or Pods6 matches.
	Pod
	// Node holds what a process on this node sent.
	Node
)

var fromNames = [...]string{"anyone", "pod", "node"}

func (f From) String() string { return fromNames[f] }

// Pool is a set of endpoints. Each endpoint's chance to get a connection is its part of the sum of all weights. Pools
// are immutable, and many Services share those without endpoints.
type Pool struct {
	// Endpoints are sorted by AddrPort and unique.
	Endpoints []Endpoint
	// Ejected are the endpoints that were taken out because they do not answer this node; sorted by Endpoint. Never more
	// than Endpoints has, unless the Service prefers near endpoints, and none if Endpoints is empty.
	Ejected []snapshot.Unhealthy
	// Kept are unhealthy endpoints that were not taken out, since half of the pool is, or since the Service's SecondChance
	// only observes, doubtful ones, and the last resort; sorted by Endpoint. A Service that prefers near endpoints may
	// have none of the first ones.
	Kept []snapshot.Unhealthy
	// RetryRefused says that a connection which an endpoint refuses may be tried again at another one: there are two with
	// the ejected ones, and not all that stay are known to refuse.
	RetryRefused bool
	// Refused is how many of RefusedOf new connections are refused before an endpoint is chosen: the share of backends
	// that have none. 0 if there are no Endpoints, since Empty says what happens then.
	Refused uint16
	// Empty says what happens to a packet when there are no Endpoints.
	Empty Verdict
}

// RefusedOf is the whole of which Pool.Refused is a part.
const RefusedOf = 10_000

// Endpoint is where a connection can end.
type Endpoint struct {
	netip.AddrPort
	// Local endpoints run on this node.
	Local bool
	// Weight is the endpoint's share relative to the others of its Pool. Either all in a Pool are at least 1, or all are
	// 0, which means equal shares.
	Weight uint16
}

// Verdict is what happens to a packet that nobody answers.
type Verdict uint8

// The verdicts of an empty pool.
const (
	// Reject sends ICMP port unreachable: the Service has no endpoint anywhere.
	Reject Verdict = iota
	// Drop sends nothing: the policy is Local, and only other nodes have endpoints.
	Drop
	// Pass leaves the packet alone: it goes on as it came.
	Pass
)

var verdictNames = [...]string{"reject", "drop", "pass"}

func (v Verdict) String() string { return verdictNames[v] }

// Pods says how to recognize packets from pods, like kube-proxy's detectLocalMode. The zero value means that it is
// unknown: then no packet counts as a pod's. At most one field is set.
type Pods struct {
	// CIDR holds the pods' source addresses.
	CIDR netip.Prefix
	// Interface is the bridge by which all packets from pods come in.
	Interface string
	// InterfacePrefix begins the names of all interfaces by which packets from pods come in.
	InterfacePrefix string
}

// Known reports whether packets from pods can be recognized.
func (p Pods) Known() bool {
	return p.CIDR.IsValid() || p.ByInterface()
}

// ByInterface reports whether packets from pods are recognized by their incoming interface.
func (p Pods) ByInterface() bool { return p.Interface != "" || p.InterfacePrefix != "" }
