package nft

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Protocol is a transport protocol.
type Protocol = snapshot.Protocol

// SetID names one of the sets and maps of our table.
type SetID uint8

// The sets and maps; docs/RULESET.md says what each is for.
const (
	Services SetID = iota
	Endpoints
	OutsideServices
	OutsideEndpoints
	RestrictedServices
	SourceRanges
	ClusterIPs
	ServiceCIDRs
	MasqueradeAlways
	MasqueradeNode
	Hairpin
	Sticky
	OutsideSticky
	Remember
	StickyEndpoints
	Affinity
	Scheduled
	RevisionSet
	// NumSets is how many there are.
	NumSets
)

var setNames = [NumSets]string{
	"services", "endpoints", "outside-services", "outside-endpoints", "restricted-services", "source-ranges", "cluster-ips",
	"service-cidrs", "masquerade-always", "masquerade-node", "hairpin", "sticky", "outside-sticky", "remember",
	"sticky-endpoints", "affinity", "scheduled", "revision",
}

func (s SetID) String() string { return setNames[s] }

// ChainID names a chain. N tells chains of one kind apart: the number of endpoints, or a timeout in seconds.
type ChainID struct {
	Kind ChainKind
	N    uint32
}

// ChainKind is what a chain does.
type ChainKind uint8

// The chains. Those up to numFixedChains exist once; the others by number, while something leads to them.
const (
	NoChain ChainKind = iota
	GuardLoopback
	Prerouting
	Output
	Input
	Postrouting
	Frontends
	NoEndpoints
	NoLocalEndpoints
	AffinityChain
	OutsideAffinity
	RememberAffinity
	AffinityID
	TranslatedChain
	LeftToIPVS
	numFixedChains
	// Pick chains choose one of N endpoints.
	Pick ChainKind = iota
	OutsidePick
	// StickyPick chains ask the affinity map before they pick.
	StickyPick
	OutsideStickyPick
	// RememberFor chains write the affinity map, with a timeout of N seconds.
	RememberFor
)

var chainNames = [...]string{
	"", "guard-loopback", "prerouting", "output", "input", "postrouting", "frontends", "no-endpoints", "no-local-endpoints",
	"affinity-lookup", "outside-affinity-lookup", "remember-affinity", "affinity-id", "translated", "left-to-ipvs", "",
	"pick", "outside-pick", "sticky", "outside-sticky", "remember",
}

// Name is the chain's name in the ruleset, such as "pick-3".
func (c ChainID) Name() string {
	if c.Kind < numFixedChains {
		return chainNames[c.Kind]
	}
	return chainNames[c.Kind] + "-" + strconv.FormatUint(uint64(c.N), 10)
}

// chainByName is Name's inverse.
func chainByName(name string) (ChainID, bool) {
	for k, n := range chainNames {
		kind := ChainKind(k)
		switch rest, ok := strings.CutPrefix(name, n+"-"); {
		case n == "":
		case kind < numFixedChains && name == n:
			return kind.id(), true
		case kind > numFixedChains && ok:
			if n, err := strconv.ParseUint(rest, 10, 32); err == nil {
				return ChainID{kind, uint32(n)}, true
			}
		}
	}
	return ChainID{}, false
}

func (k ChainKind) id() ChainID { return ChainID{Kind: k} }

// frontendKey tells which frontend a packet is sent to; tupleKey the same of a connection already translated.
var (
	frontendKey = []Field{DestAddr, L4Proto, DestPort}
	tupleKey    = Concat{Fields: []Field{OriginalDestAddr, L4Proto, OriginalDestPort}}
	affinityKey = Concat{Fields: []Field{SourceAddr, Priority}}
	target      = []Field{DestAddr, DestPort}
	protocols   = [...]Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}
)

func slotKey(mod uint32) Concat {
	return Concat{Fields: []Field{DestAddr, L4Proto, DestPort, RandomSlot}, Mod: mod}
}

// Structure is what the layout depends on besides the elements.
type Structure struct {
	Pods          dataplane.Pods
	MasqueradeAll bool
	// GuardLoopback drops loopback addresses that come from outside, as the kernel did before route_localnet was set.
	GuardLoopback bool
	// IPVS schedules some frontend. It follows from the elements, so that a table has nothing of it where nobody asks for it.
	IPVS bool
}

// StructureOf gives what a state asks of a family's table, but for what follows from its elements.
func StructureOf(s *dataplane.State, f Family) Structure {
	out := Structure{Pods: s.Pods4, MasqueradeAll: s.MasqueradeAll, GuardLoopback: s.LocalhostNodePorts}
	if f == IPv6 {
		out.Pods, out.GuardLoopback = s.Pods6, false
	}
	out.Pods.CIDR = out.Pods.CIDR.Masked() // as the rules have it
	return out
}

// sets gives the sets and maps of a table, without sizes.
func sets() []Set {
	slots := slotKey(0).Fields
	return []Set{
		{ID: Services, Key: frontendKey, Verdicts: true, Counter: true,
			Comment: "address . protocol . port of each Service: what to do"},
		{ID: Endpoints, Key: slots, Data: target, Counter: true,
			Comment: "slot n of each Service: one endpoint"},
		{ID: OutsideServices, Key: frontendKey, Verdicts: true, Counter: true,
			Comment: "externalTrafficPolicy Local: what clients from outside get"},
		{ID: OutsideEndpoints, Key: slots, Data: target, Counter: true,
			Comment: "externalTrafficPolicy Local: slot n, one endpoint on this node"},
		{ID: RestrictedServices, Key: frontendKey,
			Comment: "load balancer addresses with loadBalancerSourceRanges"},
		{ID: SourceRanges, Key: []Field{DestAddr, L4Proto, DestPort, SourceAddr}, Interval: true,
			Comment: "who may use them"},
		{ID: ClusterIPs, Key: []Field{DestAddr}, Comment: "all cluster IPs: unused ports are rejected"},
		{ID: ServiceCIDRs, Key: []Field{DestAddr}, Interval: true,
			Comment: "ranges of cluster IPs: unallocated addresses are dropped"},
		{ID: MasqueradeAlways, Key: frontendKey, Comment: "externalTrafficPolicy Cluster: masquerade everybody"},
		{ID: MasqueradeNode, Key: frontendKey, Comment: "externalTrafficPolicy Local: masquerade this node only"},
		{ID: Hairpin, Key: []Field{SourceAddr, DestAddr}, Comment: "endpoints on this node that may reach themselves"},
		{ID: Sticky, Key: frontendKey, Data: []Field{Priority}, Comment: "sessionAffinity: the id of each frontend's pool"},
		{ID: OutsideSticky, Key: frontendKey, Data: []Field{Priority},
			Comment: "sessionAffinity: the same for clients from outside"},
		{ID: Remember, Key: frontendKey, Verdicts: true, Comment: "sessionAffinity: how long each frontend remembers"},
		{ID: StickyEndpoints, Key: []Field{Priority, DestAddr, DestPort}, Counter: true,
			Comment: "sessionAffinity: the endpoints of each pool"},
		{ID: Affinity, Key: []Field{SourceAddr, Priority}, Data: target, Dynamic: true, Size: affinitySize,
			Comment: "sessionAffinity: client . pool : endpoint"},
		{ID: Scheduled, Key: frontendKey, Comment: "left to IPVS, which chooses the endpoint"},
		{ID: RevisionSet, Key: []Field{Mark}, Size: revisionSize,
			Comment: "number and digest of what this table holds, written with every change"},
	}
}

// revisionSize leaves room for the old revision beside the new one, which is there until the transaction is through.
const revisionSize = 4

// affinitySize bounds the clients remembered at one time; when it is full, new clients are balanced without affinity.
const affinitySize = 262144

// layout gives the structure of a family's table: every chain that exists once, and every set.
func layout(f Family, s Structure) Table {
	t := Table{Family: f, Comment: "Kubernetes Services, written by verdict", Sets: sets()}
	if s.GuardLoopback {
		t.Chains = append(t.Chains, guardLoopback())
	}
	if s.IPVS {
		t.Chains = append(t.Chains, Chain{ID: LeftToIPVS.id(), Comment: "the packet goes on to IPVS", Rules: []Rule{{LeavePacket{}}}})
	}
	t.Chains = append(t.Chains,
		Chain{ID: NoEndpoints.id(), Comment: "no endpoint anywhere", Rules: []Rule{{RejectPacket{}}}},
		Chain{ID: NoLocalEndpoints.id(), Comment: "traffic policy Local, endpoints on other nodes only",
			Rules: []Rule{{DropPacket{}}}},
		affinityLookup(AffinityChain, Sticky),
		affinityLookup(OutsideAffinity, OutsideSticky),
		affinityID(s),
		Chain{ID: RememberAffinity.id(), Rules: perProtocol(nil, LookupVerdict{Key: tupleKey, Map: Remember})},
		frontends(),
		prerouting(s),
		Chain{ID: Output.id(), Hook: &Hook{"nat", "output", priorityDstNAT}, Rules: []Rule{
			restrict(), {Goto{Frontends.id()}}}},
		Chain{ID: Input.id(), Hook: &Hook{"nat", "input", prioritySrcNAT}, Rules: []Rule{
			{Translated{}, Goto{RememberAffinity.id()}}}},
		translated(s),
		postrouting(s),
	)
	return t
}

// postrouting sees connections leave. Those that IPVS sent on are not marked as translated.
func postrouting(s Structure) Chain {
	rules := []Rule{{Translated{}, Goto{TranslatedChain.id()}}}
	if s.IPVS {
		rules = append(rules, perProtocol(nil, InSet{Key: tupleKey, Set: Scheduled}, Goto{TranslatedChain.id()})...)
	}
	return Chain{ID: Postrouting.id(), Hook: &Hook{"nat", "postrouting", prioritySrcNAT}, Rules: rules}
}

// guardLoopback stands in for the kernel's own martian check, which route_localnet turns off (CVE-2020-8558).
func guardLoopback() Chain {
	return Chain{ID: GuardLoopback.id(), Hook: &Hook{"filter", "prerouting", priorityRaw},
		Comment: "route_localnet is on for node ports at 127.0.0.1",
		Rules: []Rule{
			{OffLoopback{DestAddr}, DropPacket{}},
			{OffLoopback{SourceAddr}, DropPacket{}},
		}}
}

// restrict drops who is not in the source ranges of a load balancer address, before anything else.
func restrict() Rule {
	return Rule{
		InSet{Key: Concat{Fields: frontendKey}, Set: RestrictedServices},
		InSet{Key: Concat{Fields: []Field{DestAddr, L4Proto, DestPort, SourceAddr}}, Not: true, Set: SourceRanges},
		Counter{}, DropPacket{},
	}
}

// prerouting sees what comes in by an interface. Clients from outside look into their own map first.
func prerouting(s Structure) Chain {
	outside := Rule{LookupVerdict{Key: Concat{Fields: frontendKey}, Map: OutsideServices}}
	if s.Pods.Known() {
		outside = append(Rule{FromPods{Pods: s.Pods, Not: true}}, outside...)
	}
	return Chain{ID: Prerouting.id(), Hook: &Hook{"nat", "prerouting", priorityDstNAT}, Rules: []Rule{
		restrict(), outside, {Goto{Frontends.id()}}}}
}

func frontends() Chain {
	return Chain{ID: Frontends.id(), Rules: []Rule{
		{LookupVerdict{Key: Concat{Fields: frontendKey}, Map: Services}},
		{InSet{Key: Concat{Fields: []Field{DestAddr}}, Set: ClusterIPs}, Counter{}, RejectPacket{}},
		{InSet{Key: Concat{Fields: []Field{DestAddr}}, Set: ServiceCIDRs}, Counter{}, DropPacket{}},
	}}
}

// translated decides the source address of connections to Services, after it has been remembered where they went.
func translated(s Structure) Chain {
	rules := []Rule{
		{Jump{RememberAffinity.id()}},
		{InSet{Key: Concat{Fields: []Field{SourceAddr, DestAddr}}, Set: Hairpin}, Masquerade{}},
	}
	toClusterIP := InSet{Key: Concat{Fields: []Field{OriginalDestAddr}}, Set: ClusterIPs}
	switch {
	case s.MasqueradeAll:
		rules = append(rules, Rule{toClusterIP, Masquerade{}})
	case s.Pods.Known():
		rules = append(rules, Rule{FromPods{Pods: s.Pods, Not: true}, toClusterIP, Masquerade{}})
	}
	rules = append(rules, perProtocol(nil, InSet{Key: tupleKey, Set: MasqueradeAlways}, Masquerade{})...)
	rules = append(rules, perProtocol(Rule{FromNode{}}, InSet{Key: tupleKey, Set: MasqueradeNode}, Masquerade{})...)
	return Chain{ID: TranslatedChain.id(), Rules: rules}
}

// affinityLookup sends a client to the endpoint it had before.
func affinityLookup(id ChainKind, pool SetID) Chain {
	rules := []Rule{{SetPriority{Key: Concat{Fields: frontendKey}, Map: pool}}}
	return Chain{ID: id.id(), Rules: append(rules, perProtocol(nil, DNAT{Key: affinityKey, Map: Affinity})...)}
}

// affinityID finds the pool a connection was balanced over, from the address it was first sent to.
func affinityID(s Structure) Chain {
	outside := Rule{FromNode{Not: true}}
	if s.Pods.Known() {
		outside = append(outside, FromPods{Pods: s.Pods, Not: true})
	}
	rules := perProtocol(nil, SetPriority{Key: tupleKey, Map: Sticky})
	return Chain{ID: AffinityID.id(), Rules: append(rules, perProtocol(outside, SetPriority{Key: tupleKey, Map: OutsideSticky})...)}
}

// perProtocol repeats a rule for each protocol: nft takes the port of a connection's tuple only after the protocol is known.
func perProtocol(before Rule, after ...Statement) []Rule {
	rules := make([]Rule, 0, len(protocols))
	for _, p := range protocols {
		r := append(Rule{}, before...)
		rules = append(rules, append(append(r, ProtocolIs{p}), after...))
	}
	return rules
}

// numbered gives a chain of which there is one for each N in use.
func numbered(id ChainID) Chain {
	pick := func(m SetID) []Rule { return []Rule{{DNAT{Key: slotKey(id.N), Map: m}}} }
	sticky := func(lookup, then ChainKind) []Rule {
		return []Rule{{Jump{lookup.id()}}, {Goto{ChainID{then, id.N}}}}
	}
	switch id.Kind {
	case Pick:
		return Chain{ID: id, Rules: pick(Endpoints)}
	case OutsidePick:
		return Chain{ID: id, Rules: pick(OutsideEndpoints)}
	case StickyPick:
		return Chain{ID: id, Rules: sticky(AffinityChain, Pick)}
	case OutsideStickyPick:
		return Chain{ID: id, Rules: sticky(OutsideAffinity, OutsidePick)}
	}
	return Chain{ID: id, Rules: []Rule{
		{Jump{AffinityID.id()}},
		// Only an endpoint that is still in the pool is remembered: the packet may have been translated before a commit
		// that took its endpoint away.
		{InSet{Key: Concat{Fields: []Field{Priority, DestAddr, DestPort}}, Set: StickyEndpoints},
			Update{Map: Affinity, Key: affinityKey, Timeout: time.Duration(id.N) * time.Second, Data: Concat{Fields: target}}},
		{ClearPriority{}},
	}}
}

// next is the numbered chain that a numbered chain leads to, if any.
func (c ChainID) next() ChainID {
	switch c.Kind {
	case StickyPick:
		return ChainID{Pick, c.N}
	case OutsideStickyPick:
		return ChainID{OutsidePick, c.N}
	}
	return ChainID{}
}

// Everything gives a table with a chain of every kind: what a kernel must take to be of use.
func Everything(f Family, s Structure) Table {
	t := layout(f, s)
	for _, kind := range []ChainKind{Pick, OutsidePick, StickyPick, OutsideStickyPick, RememberFor} {
		t.Chains = append(t.Chains, numbered(ChainID{kind, 1}))
	}
	return t
}

// ChainNamed gives the chain that a name stands for: as a table has it, or what a numbered one has to be.
func ChainNamed(t Table, name string) (c Chain, ok bool) {
	id, ok := chainByName(name)
	if !ok || id.Name() != name {
		return c, false
	}
	if i := slices.IndexFunc(t.Chains, func(c Chain) bool { return c.ID == id }); i >= 0 {
		return t.Chains[i], true
	}
	return numbered(id), id.Kind > numFixedChains
}

// SetByID gives a set of the layout, without its size. It is asked for each element that is read.
func SetByID(id SetID) Set { return setsByID[id] }

var setsByID = sets()
