// Package dataplane decides what should happen to a packet that is sent to a Service. It turns a snapshot of the
// cluster into a State: frontends (address, protocol, port), each with an ordered table of routes to pools of
// endpoints. It knows nothing of nftables, IPVS or iptables; every backend prints the same rows.
package dataplane

import (
	"cmp"
	"net/netip"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// State is the answer for every packet: the one value all backends are told. Services are immutable once in the map. No
// two frontends in a State have the same Key.
type State struct {
	// Services holds every Service that has at least one frontend.
	Services map[snapshot.Name]*Service
	// Pods4 and Pods6 say which IPv4 and IPv6 packets come from a pod, as far as that is known.
	Pods4, Pods6 Pods
	// MasqueradeAll is the operator's wish that all traffic to cluster IPs be masqueraded.
	MasqueradeAll bool
	// ServiceCIDRs are the ranges in which an address without a Service is dropped; sorted, no range inside another, nil
	// means none is known.
	ServiceCIDRs []netip.Prefix
	// IPVSAddresses are the operator's IPVS.Addresses.
	IPVSAddresses []netip.Prefix
	// LocalhostNodePorts says that 127.0.0.1 is among the node port addresses, for which the host must route its loopback
	// range.
	LocalhostNodePorts bool
}

// Service is what one Kubernetes Service asks of the data plane.
type Service struct {
	Name snapshot.Name
	// Age decides who answers at an address that several Services claim; see Claim.
	Age snapshot.Age
	// ClusterIPs are the addresses that belong to the Service alone: ports of theirs that are no frontend are rejected.
	ClusterIPs []netip.Addr
	// HealthCheckNodePort is where load balancers ask by TCP whether this node has endpoints; 0 means nowhere.
	HealthCheckNodePort uint16
	// OverCapacity says that its slices mention more endpoints than a Service may have. Those in the last slices by name are
	// left out.
	OverCapacity bool
	// Counters is what the Service asks of the budget for counters. It changes nothing for a packet.
	Counters snapshot.Counters
	// Ports are sorted by family, then in the order of the Service.
	Ports []*ServicePort
}

// ServicePort is one port of a Service in one address family.
type ServicePort struct {
	Name PortName
	// Affinity makes a client, told apart by its address, stay with its endpoint over all frontends of the port for this
	// long after its last connection; whole seconds, 0 means no affinity.
	Affinity time.Duration
	// Cluster and Local are the pools the routes name. Neither is nil; one that no route names is without endpoints. Two
	// with endpoints are never the same Pool, even while the endpoints are the same.
	Cluster, Local *Pool
	// Serving are the endpoints that flows which began earlier may stay with: all that are ready or serving, whatever
	// policy, topology and draining say about new ones. Sorted by AddrPort and unique, it holds those of both pools. Nil
	// for TCP, whose connections nobody has to end.
	Serving []Endpoint
	// Scheduling has IPVS choose the endpoint of a connection; nil leaves that to chance, which every backend can do by
	// itself.
	Scheduling *Scheduling
	// Frontends are sorted by Key and non-empty.
	Frontends []Frontend
}

// Scheduling says how IPVS chooses an endpoint. It is comparable, and many ServicePorts share one.
type Scheduling struct {
	// Scheduler is the kernel's name: rr, wrr, lc, wlc, fo, ovf, lblc, lblcr, dh, sh, mh, sed, nq or twos.
	Scheduler string
	// Port and Fallback are flags of sh and mh; see snapshot.Scheduling.
	Port, Fallback bool
}

// PortName identifies a service port: kube-proxy's unit of everything.
type PortName struct {
	Service  snapshot.Name
	Port     string // empty for an unnamed port
	Protocol snapshot.Protocol
}

// String gives "namespace/name:port", or "namespace/name" for an unnamed port.
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

// Key is the identity of a frontend: where the packet is addressed to.
type Key struct {
	Addr     netip.Addr
	Protocol snapshot.Protocol
	Port     uint16
}

// Compare orders keys by address (IPv4 first), protocol and port.
func (k Key) Compare(o Key) int {
	return cmp.Or(k.Addr.Compare(o.Addr), cmp.Compare(k.Protocol, o.Protocol), cmp.Compare(k.Port, o.Port))
}

// String gives "10.96.0.1:80/tcp", "[fd00::1]:80/tcp".
func (k Key) String() string {
	return netip.AddrPortFrom(k.Addr, k.Port).String() + "/" + k.Protocol.String()
}

// Kind says what a frontend is. Of two frontends of one service port at the same key, the lower kind counts; for those
// of different ports see Claim.Compare.
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

// Frontend is one address a Service port answers at.
type Frontend struct {
	Key  Key
	Kind Kind
	// NotScheduled says why IPVS does not choose here though the Service asks for it; Schedulable if it does not ask.
	NotScheduled NotScheduled
	// Routes decide in order: the first whose From holds the packet's origin. The last one is always From Anyone.
	Routes []Route
	// Sources restrict who is served at all, before any route: sorted, no range inside another. Nil means everybody.
	Sources []netip.Prefix
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
	// Pool is the ServicePort's Cluster or Local pool.
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

// Pool is a set of endpoints of which one answers a connection, each with the same chance. Pools are immutable, and
// those without endpoints are shared by many Services.
type Pool struct {
	// Endpoints are sorted by AddrPort and unique.
	Endpoints []Endpoint
	// Empty says what happens to a packet when there are no Endpoints.
	Empty Verdict
}

// Endpoint is where a connection can end.
type Endpoint struct {
	netip.AddrPort
	// Local endpoints run on this node.
	Local bool
	// Weight is the endpoint's share where the ServicePort has a Scheduling, from 1 on; elsewhere it means nothing.
	Weight uint16
}

// Verdict is what happens to a packet nobody answers.
type Verdict uint8

// The verdicts of an empty pool.
const (
	// Reject answers with ICMP port unreachable: there is no endpoint anywhere.
	Reject Verdict = iota
	// Drop is silent: there are endpoints, but not on this node, and the policy is Local.
	Drop
)

var verdictNames = [...]string{"reject", "drop"}

func (v Verdict) String() string { return verdictNames[v] }

// Pods tells packets of pods from others, as kube-proxy's detectLocalMode does. The zero value means unknown: then no
// packet counts as a pod's. At most one field is set.
type Pods struct {
	// CIDR holds the pods' source addresses.
	CIDR netip.Prefix
	// Interface is the bridge all pods' packets come in by.
	Interface string
	// InterfacePrefix begins the names of all interfaces that pods' packets come in by.
	InterfacePrefix string
}

// Known says whether pods can be told apart at all.
func (p Pods) Known() bool {
	return p.CIDR.IsValid() || p.ByInterface()
}

// ByInterface says whether pods are told by the interface that their packets come in by.
func (p Pods) ByInterface() bool { return p.Interface != "" || p.InterfacePrefix != "" }
