package dataplane

import (
	"net/netip"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// What a backend's Inspector answers. These are plain values, for whoever shows them.

// Settings are what installed rules tell of what a proxy is told by flags. The zero value says that nothing is known.
type Settings struct {
	// Pods says how pods are told from others.
	Pods ipfamily.Per[Pods]
	// MasqueradeAll and LocalhostNodePorts are as in Config.
	MasqueradeAll, LocalhostNodePorts bool
	// Config holds all settings in force but the node's name; nil if the backend, or the version that wrote the rules,
	// writes none. Unhealthy are the endpoints that are ejected, and those that might be.
	Config    *Config
	Unhealthy []EndpointHealth
	// NodeMACs are the link-layer addresses whose packets are not forwarded again.
	NodeMACs []snapshot.MAC
	// Scheduler says that IPVS is in use here. If it is not, nothing can be left to it, whatever the objects ask for.
	Scheduler bool
}

// Packet is the first packet of a connection.
type Packet struct {
	Source, Destination netip.Addr
	Protocol            snapshot.Protocol
	// Port is the destination's.
	Port uint16
	// Interface is the one the packet comes in by; empty means that a process on this node sends it.
	Interface string
	// MAC is the link-layer address of another node, if one sends it by the Interface; else zero.
	MAC snapshot.MAC
}

// LocalNode is what a Trace has to know of the node.
type LocalNode struct {
	// Addrs are the node's own: a packet that comes in by an interface and goes there never leaves again. Loopback
	// addresses are in any case.
	Addrs []netip.Addr
	// Bridged says whether a packet that came in by an interface and goes to an address stays on a bridge, which shows
	// it to netfilter: then the kernel tells no incoming interface in postrouting. Nil: no packet does.
	Bridged func(iface string, to netip.Addr) bool
}

// Trace is the way of one packet through what the kernel holds.
type Trace struct {
	// Cause says why the packet has its outcome, as far as the rules tell.
	Cause Cause
	// Endings are what can become of the packet, each endpoint once; their chances add up to 1, but for rounding.
	Endings []Ending
	// Steps are the rules that looked at the packet, in their order.
	Steps []TraceStep
	// Port is the service port that answers; it has no name if none does, or the rules do not say which.
	Port PortName
	// Connections counts those to the frontend; nil if it is not counted. Counted is one of CountedEndpoints and its
	// like, or empty if it is not known what is counted.
	Connections *uint64
	Counted     string
	// Unhealthy are the endpoints of the pool that are ejected, and those that might be.
	Unhealthy []EndpointHealth
	// Scheduler is how IPVS chooses from the Destinations, if the packet is left to it.
	Scheduler    string
	Destinations []Destination
	// Near are frontends at the same address, if none answers; the backend may leave them out where they are many.
	Near []Neighbour
	// Revision numbers what was written; 0 if the backend numbers nothing.
	Revision uint32
	// Unclear says which rules, written by others, could not be read; they are taken for rules that do not match. Notes
	// say what else a reader should know, such as that nothing is installed.
	Unclear, Notes []string
}

// TraceStep is one rule that looked at a packet.
type TraceStep struct {
	// Chain, Rule and the elements of maps that were Found are as the backend's own tool writes them.
	Chain string `json:"chain"`
	Rule  string `json:"rule"`
	// Matched says that the whole rule was carried out.
	Matched bool     `json:"matched"`
	Found   []string `json:"found,omitempty"`
	// Translated says that the packet had its endpoint by then: the step is one of those to the first of the Endings.
	Translated bool `json:"-"`
}

// Ending is something that can become of a packet.
type Ending struct {
	Outcome Outcome
	// Share of Of is its chance; Of is less than 2^31.
	Share, Of int
	// Endpoint is where it is sent, if it is Sent; the node's address, with port 0, if it is Forwarded; else invalid.
	Endpoint netip.AddrPort
	// Masquerade says that the endpoint sees this node's address; Hairpin that it does since it reaches itself.
	Masquerade, Hairpin bool
	// Remember is for how long the sender will be sent to this endpoint again; 0 means that it will not.
	Remember time.Duration
	// Remembered says that the sender was remembered, and is sent there for that reason; it will be for Left more, if
	// that is known.
	Remembered bool
	Left       time.Duration
	// Connections counts those to this place; nil if it is not counted.
	Connections *uint64
}

// Destination is an endpoint from which IPVS chooses.
type Destination struct {
	netip.AddrPort
	// Weight is 0 if it drains.
	Weight      uint32
	Connections uint64
}

// Neighbour is a frontend beside the one that was asked for.
type Neighbour struct {
	Key  Key
	Port PortName
}

// Outcome says in a word what becomes of the packet: one of the Outcomes, or "several".
func (t *Trace) Outcome() string { return OutcomeOf(t.Endings) }

// OutcomeOf says in a word what becomes of a packet with some endings: one of the Outcomes, or "several".
func OutcomeOf(endings []Ending) string {
	text := ""
	for i, e := range endings {
		if word := e.Outcome.String(); i == 0 {
			text = word
		} else if word != text {
			return "several"
		}
	}
	return text
}

// Bound gives the ending of a sender who is remembered: the only one there is then, beside a refused share.
func (t *Trace) Bound() (e Ending, ok bool) { return bound(t.Endings) }

func bound(endings []Ending) (e Ending, ok bool) {
	for _, end := range endings {
		switch {
		case end.Outcome == Rejected: // of a refused share
		case ok || end.Outcome != Sent || !end.Remembered:
			return Ending{}, false
		default:
			e, ok = end, true
		}
	}
	return e, ok
}

// Chains gives the chains whose rules decided, in the packet's order.
func (t *Trace) Chains() (chains []string) {
	for _, s := range t.Steps {
		if s.Matched && !s.Translated && (len(chains) == 0 || chains[len(chains)-1] != s.Chain) {
			chains = append(chains, s.Chain)
		}
	}
	return chains
}

// ParsePortName reads what PortName.String writes. It is not ok if the text is no such name.
func ParsePortName(text string, protocol snapshot.Protocol) (n PortName, ok bool) {
	name, port, _ := strings.Cut(text, ":")
	namespace, service, ok := strings.Cut(name, "/")
	if !ok || namespace == "" || service == "" || strings.ContainsAny(service+port, "/ ") {
		return n, false
	}
	return PortName{Service: snapshot.Name{Namespace: namespace, Name: service}, Port: port, Protocol: protocol}, true
}

// Differences are what the kernel holds beside what it should hold.
type Differences struct {
	// Programs says by which programs the rules were read; empty if the kernel itself was asked.
	Programs string
	Tables   []InspectedTable
	// Wrong says in words what is not as it should be; Contradictions are elements that do not fit together.
	Wrong          []string
	Contradictions []Difference
	// Differences are from the State that was given; none if none was.
	Differences []Difference
	// Scheduled are the frontends that the rules leave to IPVS.
	Scheduled []Key
	// Notes say what could not be looked at.
	Notes []string
	// Partial says that Notes name something that was not compared, so that no difference does not mean that all is well.
	Partial bool
	// Quiet says that nobody wrote meanwhile; else what was found may never have been there at one moment.
	Quiet bool
}

// InspectedTable is what a backend holds for one family.
type InspectedTable struct {
	// Family is the backend's word for it, and Name how the table is called where people read it.
	Family string `json:"family"`
	Name   string `json:"-"`
	There  bool   `json:"there"`
	// Owner is the netlink port that may write it; 0 if everybody may. Revision numbers what was written; 0 if nothing
	// does.
	Owner    uint32 `json:"owner,omitempty"`
	Revision uint32 `json:"revision,omitempty"`
	// Digest is what the table says it should hold, Found what it was found to hold; empty if that is not known.
	Digest string `json:"digest,omitempty"`
	Found  string `json:"found,omitempty"`
	// Elements is how many there are, and Unit what one of them is: "element", "rule".
	Elements int    `json:"elements"`
	Unit     string `json:"-"`
}

// Difference is something that the kernel holds and should not, or should hold and does not.
type Difference struct {
	// Wanted says that it should be there; otherwise it is there.
	Wanted bool
	// Family and Object say what it is, as the backend's own tool writes it; Line is both in one line.
	Family, Object, Line string
	// Set is the map or set it is in; empty if it is in none.
	Set string
	// Port is the service port it belongs to; the zero PortName says nobody's, and one without a Port and a Protocol
	// may be any of the Service's.
	Port PortName
	// Place is the same for two differences, of which one is Wanted, if something is there that should be different;
	// empty if there is no such pair.
	Place string
}

// CountersAsked says which counters are to be read.
type CountersAsked struct {
	// All asks for every frontend; otherwise only those in Frontends are read, which are as they were read before.
	All       bool
	Frontends []FrontendCount
	// Endpoints are frontends, as they were read before, of whose endpoints the counters are read too; those that share
	// a pool are read once. If they have very many, only the first are read, unless Whole is set.
	Endpoints []FrontendCount
	Whole     bool
}

// Counters are what the kernel has counted.
type Counters struct {
	// Version changes whenever frontends may have come or gone; empty if nothing is installed.
	Version string
	// Counted is one of CountedEndpoints and its like; empty if that is not known.
	Counted string
	// Frontends are those that were asked for and are there. Whole says, if All were asked for, that none is missing:
	// it may be if somebody wrote meanwhile.
	Frontends []NamedCount
	Whole     bool
	// Endpoints have an empty Counted: they are counted over all frontends of their pool.
	Endpoints []EndpointCount
	// Scheduled are what IPVS says of frontends in Endpoints that are left to it, and of their endpoints.
	Scheduled []SchedulerCount
	// Unhealthy are the endpoints that are ejected, and those that might be.
	Unhealthy []EndpointHealth
	// Read is how many elements were read for it.
	Read int
}

// NamedCount is what was counted at a frontend, with the service port it belongs to.
type NamedCount struct {
	FrontendCount
	// Port is the zero PortName if the kernel does not say whose it is.
	Port PortName
	// OverLimit counts the packets to the Pool, at all of its frontends, that were over a limit of the Service. Packets
	// counts them, too.
	OverLimit uint64
}

// SchedulerCount is what IPVS counted at a frontend, or at one of its endpoints.
type SchedulerCount struct {
	Frontend Key `json:"-"`
	// Endpoint is invalid for the frontend itself, which has no Weight and no connections that are open.
	Endpoint netip.AddrPort `json:"-"`
	// Active and Inactive are connections now, and Weight is 0 for an endpoint that drains.
	Active   uint64 `json:"active"`
	Inactive uint64 `json:"inactive"`
	Weight   uint32 `json:"weight"`
	SchedulerStatistics
}

// SchedulerStatistics are what IPVS counted since the frontend or the endpoint was made. Rates are a second each, and
// follow some seconds behind.
type SchedulerStatistics struct {
	Connections    uint64 `json:"-"`
	PacketsIn      uint64 `json:"packetsIn"`
	PacketsOut     uint64 `json:"packetsOut"`
	BytesIn        uint64 `json:"bytesIn"`
	BytesOut       uint64 `json:"bytesOut"`
	PacketRateIn   uint64 `json:"packetRateIn"`
	PacketRateOut  uint64 `json:"packetRateOut"`
	ByteRateIn     uint64 `json:"byteRateIn"`
	ByteRateOut    uint64 `json:"byteRateOut"`
	ConnectionRate uint64 `json:"connectionRate"`
}

// Add adds what was counted elsewhere. The Weight becomes the other's.
func (c *SchedulerCount) Add(o *SchedulerCount) {
	c.Weight = o.Weight
	c.Active += o.Active
	c.Inactive += o.Inactive
	c.SchedulerStatistics.Add(&o.SchedulerStatistics)
}

// Add adds what was counted elsewhere.
func (c *SchedulerStatistics) Add(o *SchedulerStatistics) {
	c.Connections += o.Connections
	c.ConnectionRate += o.ConnectionRate
	c.PacketsIn += o.PacketsIn
	c.PacketsOut += o.PacketsOut
	c.BytesIn += o.BytesIn
	c.BytesOut += o.BytesOut
	c.PacketRateIn += o.PacketRateIn
	c.PacketRateOut += o.PacketRateOut
	c.ByteRateIn += o.ByteRateIn
	c.ByteRateOut += o.ByteRateOut
}
