package nft

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Protocol is a transport protocol.
type Protocol = snapshot.Protocol

// SetID identifies one of the sets and maps of our table.
type SetID uint8

// The sets and maps; docs/RULESET.md says what each is for. An uncounted map holds what its twin would hold if there
// were room for more counters.
const (
	Services SetID = iota
	UncountedServices
	OutsideServices
	UncountedOutsideServices
	Pools
	Endpoints
	UncountedEndpoints
	RestrictedServices
	SourceRanges
	ClusterIPs
	ServiceCIDRs
	ExternalServices
	Hairpin
	Remember
	StickyServices
	OutsideStickyServices
	StickyEndpoints
	UncountedStickyEndpoints
	Affinity
	Scheduled
	RevisionSet
	DigestSet
	RetryServices
	Unanswered
	Refused
	SilentClusterIPs
	PingableIPs
	LoadBalancerIPs
	// NumSets is how many there are.
	NumSets
)

var setNames = [NumSets]string{
	"services", "uncounted-services", "outside-services", "uncounted-outside-services", "pools", "endpoints",
	"uncounted-endpoints", "restricted-services", "source-ranges", "cluster-ips", "service-cidrs", "external-services",
	"hairpin", "remember", "sticky-services", "outside-sticky-services", "sticky-endpoints", "uncounted-sticky-endpoints",
	"affinity", "scheduled", "revision", "digests", "retry-services", "unanswered", "refused",
	"silent-cluster-ips", "pingable-ips", "load-balancer-ips",
}

func (s SetID) String() string { return setNames[s] }

// isBookkeeping reports whether a set holds no content, but only Verdict's records about the content, or what the
// kernel adds by itself.
func (s SetID) isBookkeeping() bool { return s == RevisionSet || s == DigestSet || s.IsDynamic() }

// IsDynamic reports whether rules write to a set, so that its elements come and go at any time.
func (s SetID) IsDynamic() bool { return s == Affinity || s == Unanswered || s == Refused }

// EvidenceSets are the sets of evidence, which a table has only while Structure.Evidence is set.
var EvidenceSets = [...]SetID{Unanswered, Refused}

// ComesLater reports whether a set can be added to a table that was written without it, by an earlier version or for
// another Structure.
func (s SetID) ComesLater() bool { return IsOptional(s) || slices.Contains(EvidenceSets[:], s) }

// IsContent reports whether a set's elements follow from the Services.
func (s SetID) IsContent() bool { return !s.isBookkeeping() }

// counted returns the map for a set's elements with counters, or its twin for those without.
func (s SetID) counted(yes bool) SetID {
	if yes {
		return s
	}
	return s + 1
}

// ChainID identifies a chain. N distinguishes chains of one kind: it is the number of endpoints, or a timeout in
// seconds.
type ChainID struct {
	Kind ChainKind
	N    uint32
}

// ChainKind says what a chain does.
type ChainKind uint8

// The chains. Those up to numFixedChains exist once; the others exist for each N that something leads to.
const (
	NoChain ChainKind = iota
	GuardLoopback
	Prerouting
	Output
	Input
	Postrouting
	Restrict
	Frontends
	LoadBalancers
	NoEndpoints
	NoLocalEndpoints
	AffinityLookup
	RememberAffinity
	NotRemembered
	TranslatedChain
	MasqueradeAll
	MasqueradeNode
	LeftToIPVS
	PassOn
	FirstEndpoint
	UncountedFirstEndpoint
	RefusedChain
	UnansweredChain
	Evidence
	EvidenceInput
	numFixedChains
	// Pick chains choose one of N endpoints; UncountedPick chains choose among endpoints without counters.
	Pick ChainKind = iota
	UncountedPick
	// StickyPick chains look into the affinity map before they choose.
	StickyPick
	// RememberFor chains write to the affinity map, with a timeout of N seconds.
	RememberFor
	// PickHash chains take the slot, of N, that a hash of the client's address gives; PickHashPort chains hash its port,
	// too. The others are as those for a random choice.
	PickHash
	UncountedHash
	PickHashPort
	UncountedHashPort
	StickyHash
)

// isSticky reports whether a chain looks into the affinity map before an endpoint is chosen.
func (k ChainKind) isSticky() bool { return k == StickyPick || k == StickyHash }

var chainNames = [...]string{
	"", "guard-loopback", "prerouting", "output", "input", "postrouting", "restrict", "frontends", "load-balancers",
	"no-endpoints", "no-local-endpoints", "affinity-lookup", "remember-affinity", "not-remembered", "translated",
	"masquerade-all", "masquerade-node", "left-to-ipvs", "pass-on", "first-endpoint", "uncounted-first-endpoint",
	"refused", "unanswered", "evidence", "evidence-input", "", "pick",
	"uncounted-pick", "sticky", "remember", "hash", "uncounted-hash", "hash-port", "uncounted-hash-port", "sticky-hash",
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

// frontendKey is the packet's destination; tupleKey is the original destination of a translated connection.
var (
	frontendKey = []Field{DestAddr, L4Proto, DestPort}
	toFrontend  = Concat{Fields: frontendKey}
	tupleKey    = Concat{Fields: []Field{OriginalDestAddr, L4Proto, OriginalDestPort}}
	poolKey     = Concat{Fields: []Field{Priority}}
	affinityKey = Concat{Fields: []Field{Priority, SourceBucket}, Mod: AffinityBuckets}
	target      = []Field{DestAddr, DestPort}
	protocols   = [...]Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}
)

// slotKey is the key of one of some slots, chosen by RandomSlot, SourceBucket or SourcePortBucket.
func slotKey(by Field, mod uint32) Concat {
	return Concat{Fields: []Field{Priority, L4Proto, by}, Mod: mod}
}

// Structure is what the layout depends on besides the elements.
type Structure struct {
	Pods          dataplane.Pods
	MasqueradeAll bool
	// GuardLoopback drops packets from outside with loopback addresses, as the kernel did before route_localnet was set.
	GuardLoopback bool
	// Evidence gathers which endpoints do not answer or refuse.
	Evidence bool
	// Ping is the node's address that answers a ping of a Service address; the zero Addr: none does.
	Ping netip.Addr
	// Uses says which of the optional sets have rules. It follows from the elements, so that packets pass no rule that
	// concerns no Service.
	Uses Uses
}

// Uses is a set of SetIDs.
type Uses uint32

// Has reports whether a set is among them.
func (u Uses) Has(s SetID) bool { return u&(1<<s) != 0 }

// With adds sets.
func (u Uses) With(sets ...SetID) Uses {
	for _, s := range sets {
		u |= 1 << s
	}
	return u
}

// optional are the sets that no rule looks up while they are empty.
var optional = [...]SetID{
	UncountedServices, UncountedOutsideServices, RestrictedServices, ExternalServices, Hairpin, Remember,
	OutsideStickyServices, UncountedStickyEndpoints, Scheduled, RetryServices, SilentClusterIPs, PingableIPs,
	LoadBalancerIPs,
}

// StructureOf returns what a state asks of a family's table, except what follows from its elements.
func StructureOf(s *dataplane.State, f ipfamily.Family) Structure {
	out := Structure{Pods: s.Pods4, MasqueradeAll: s.MasqueradeAll, GuardLoopback: s.LocalhostNodePorts,
		Evidence: s.Evidence, Ping: s.PingAddrs[f]}
	if f == ipfamily.IPv6 {
		out.Pods, out.GuardLoopback = s.Pods6, false
	}
	out.Pods.CIDR = out.Pods.CIDR.Masked() // as the rules have it
	return out
}

// sets returns the sets and maps of a table.
func (s Structure) sets() []Set {
	if s.Evidence {
		return sets()
	}
	return slices.DeleteFunc(sets(), func(set Set) bool {
		return slices.Contains(EvidenceSets[:], set.ID)
	})
}

// sets returns all sets and maps that a table may have, by their ids. Only sets that rules write to have a size: the
// kernel allocates buckets for the full size at once, and lets a set without a size grow with its elements.
func sets() []Set {
	frontends := func(id SetID, counter bool, comment string) Set {
		return Set{ID: id, Key: frontendKey, Data: []Field{Priority}, Counter: counter, Comment: comment}
	}
	members := []Field{Priority, DestAddr, DestPort}
	return []Set{
		frontends(Services, true, "address . protocol . port of each Service : pool"),
		frontends(UncountedServices, false, "the same, beyond the budget for counters"),
		frontends(OutsideServices, true, "externalTrafficPolicy Local: the pool of clients from outside"),
		frontends(UncountedOutsideServices, false, "the same, beyond the budget for counters"),
		{ID: Pools, Key: []Field{Priority}, Verdicts: true, Comment: "what to do for each pool"},
		{ID: Endpoints, Key: slotKey(RandomSlot, 0).Fields, Data: target, Counter: true,
			Comment: "slot n of each pool: one endpoint"},
		{ID: UncountedEndpoints, Key: slotKey(RandomSlot, 0).Fields, Data: target,
			Comment: "the same: counted in sticky-endpoints, or beyond the budget for counters"},
		frontends(RestrictedServices, false, "load balancer addresses with loadBalancerSourceRanges : who may use them"),
		{ID: SourceRanges, Key: []Field{Priority, SourceAddr}, Interval: true, Comment: "who may use them"},
		{ID: ClusterIPs, Key: []Field{DestAddr}, Comment: "all cluster IPs: unused ports are rejected"},
		{ID: ServiceCIDRs, Key: []Field{DestAddr}, Interval: true,
			Comment: "ranges of cluster IPs: unallocated addresses are dropped"},
		frontends(ExternalServices, false,
			"node ports, load balancer and external addresses : 0:1 if everybody is masqueraded, "+
				"0:2 if this node is"),
		{ID: Hairpin, Key: []Field{SourceAddr, DestAddr}, Comment: "endpoints on this node that may reach themselves"},
		{ID: Remember, Key: []Field{Priority}, Verdicts: true, Comment: "sessionAffinity: how long each pool remembers"},
		frontends(StickyServices, false, "sessionAffinity: the pool of each frontend, which is not counted again"),
		frontends(OutsideStickyServices, false, "sessionAffinity: the same for clients from outside"),
		{ID: StickyEndpoints, Key: members, Counter: true, Comment: "sessionAffinity: the endpoints of each pool"},
		{ID: UncountedStickyEndpoints, Key: members, Comment: "the same, beyond the budget for counters"},
		{ID: Affinity, Key: []Field{Priority, RandomSlot}, Data: target, Dynamic: true, Size: AffinitySize,
			Comment: "sessionAffinity: pool . bucket of clients : endpoint"},
		{ID: Scheduled, Key: frontendKey, Comment: "left to IPVS, which chooses the endpoint"},
		{ID: RevisionSet, Key: []Field{Mark},
			Comment: "number and digest of what this table holds, written with every change"},
		{ID: DigestSet, Key: []Field{Mark}, Comment: "digests of what the Services have here, by bucket"},
		{ID: RetryServices, Key: frontendKey, Comment: "refused connections are tried again at another endpoint"},
		{ID: Unanswered, Key: frontendKey, Dynamic: true, Size: EvidenceSize,
			Comment: "endpoints to which clients sent a first packet again"},
		{ID: Refused, Key: refusedKey, Dynamic: true, Size: EvidenceSize,
			Comment: "endpoints that refused a connection"},
		{ID: SilentClusterIPs, Key: []Field{DestAddr}, Comment: "cluster IPs without endpoints, which answer no ping"},
		{ID: PingableIPs, Key: []Field{DestAddr}, Comment: "load balancer addresses that answer a ping from outside"},
		{ID: LoadBalancerIPs, Key: []Field{DestAddr},
			Comment: "load balancer addresses: unused ports are rejected, for packets from outside"},
	}
}

// AffinityBuckets is how many clients of a pool can be remembered separately: clients whose addresses have the same
// hash share an endpoint. So no pool has more entries than this, whatever its clients send, and AffinitySize has room
// for 256 pools with every bucket in use.
const (
	AffinityBuckets = 1024
	AffinitySize    = 256 * AffinityBuckets
)

// layout returns the structure of a family's table: every chain that exists once, and every set.
func layout(f ipfamily.Family, s Structure) Table {
	t := Table{Family: f, Comment: "Kubernetes Services, written by verdict", Sets: s.sets()}
	if s.GuardLoopback {
		t.Chains = append(t.Chains, guardLoopback())
	}
	if s.Uses.Has(Scheduled) {
		t.Chains = append(t.Chains, Chain{ID: LeftToIPVS.id(), Comment: "the packet goes on to IPVS",
			Rules: []Rule{{Accept{}}}})
	}
	t.Chains = append(t.Chains,
		Chain{ID: NoEndpoints.id(), Comment: "no endpoint anywhere", Rules: []Rule{resetOthers(), {Reject{}}}},
		Chain{ID: NoLocalEndpoints.id(), Comment: "traffic policy Local, endpoints on other nodes only",
			Rules: []Rule{resetOthers(), {Drop{}}}},
		Chain{ID: PassOn.id(), Comment: "verdict/external-failover: pass", Rules: []Rule{{Accept{}}}},
		firstEndpoint(FirstEndpoint, Endpoints),
		firstEndpoint(UncountedFirstEndpoint, UncountedEndpoints),
	)
	if s.Uses.Has(Remember) {
		t.Chains = append(t.Chains, affinityLookup(), rememberAffinity(s),
			Chain{ID: NotRemembered.id(), Comment: "nobody chose an endpoint"})
	}
	if s.Uses.Has(ExternalServices) {
		t.Chains = append(t.Chains,
			Chain{ID: MasqueradeAll.id(), Comment: "externalTrafficPolicy Cluster",
				Rules: []Rule{{ClearPriority{}}, {Masquerade{}}}},
			masqueradeFromNode(s))
	}
	start := []Rule{{Goto{Frontends.id()}}}
	if s.Uses.Has(RestrictedServices) {
		t.Chains = append(t.Chains, restrict())
		start = []Rule{{Jump{Restrict.id()}}, {Goto{Frontends.id()}}}
	}
	if s.Uses.Has(PingableIPs) || s.Uses.Has(LoadBalancerIPs) {
		t.Chains = append(t.Chains, loadBalancers(s))
	}
	t.Chains = append(t.Chains, frontends(s),
		Chain{ID: Prerouting.id(), Hook: &Hook{"nat", "prerouting", priorityDstNAT}, Rules: prerouting(s, start)},
		Chain{ID: Output.id(), Hook: &Hook{"nat", "output", priorityDstNAT}, Rules: start},
		Chain{ID: Input.id(), Hook: &Hook{"nat", "input", prioritySrcNAT}, Rules: input(s)},
		translated(s),
		postrouting(s),
	)
	if s.Evidence {
		t.Chains = append(t.Chains, evidence(s)...)
	}
	return t
}

// input handles connections that end on this node. The priority held the pool's id until here, so it is cleared for
// all.
func input(s Structure) []Rule {
	var rules []Rule
	if s.Uses.Has(Remember) {
		rules = []Rule{{Translated{}, Jump{RememberAffinity.id()}}}
	}
	return append(rules, Rule{Translated{}, ClearPriority{}})
}

// postrouting handles connections that leave. IPVS's connections are not marked as translated.
func postrouting(s Structure) Chain {
	rules := []Rule{{Translated{}, Goto{TranslatedChain.id()}}}
	if s.Uses.Has(Scheduled) {
		rules = append(rules, perProtocol(nil, SetLookup{Key: tupleKey, Set: Scheduled}, Goto{TranslatedChain.id()})...)
	}
	return Chain{ID: Postrouting.id(), Hook: &Hook{"nat", "postrouting", prioritySrcNAT}, Rules: rules}
}

// guardLoopback replaces the kernel's own martian check, which route_localnet turns off (CVE-2020-8558).
func guardLoopback() Chain {
	return Chain{ID: GuardLoopback.id(), Hook: &Hook{"filter", "prerouting", priorityRaw},
		Comment: "route_localnet is on for node ports at 127.0.0.1",
		Rules: []Rule{
			{OffLoopback{DestAddr}, Drop{}},
			{OffLoopback{SourceAddr}, Drop{}},
		}}
}

// restrict drops packets from outside the source ranges of a load balancer address, before anything else.
func restrict() Chain {
	return Chain{ID: Restrict.id(), Rules: []Rule{{
		SetPriority{Key: toFrontend, Map: RestrictedServices},
		SetLookup{Key: Concat{Fields: []Field{Priority, SourceAddr}}, Not: true, Set: SourceRanges},
		Counter{}, Drop{},
	}}}
}

// dispatch finds the pool of a frontend in a map and executes the pool's verdict.
func dispatch(m SetID) Rule {
	return Rule{SetPriority{Key: toFrontend, Map: m}, VerdictMap{Key: poolKey, Map: Pools}}
}

// withUncounted returns a map and, if it is used, its uncounted twin.
func (s Structure) withUncounted(m SetID) []SetID {
	if s.Uses.Has(m.counted(false)) {
		return []SetID{m, m.counted(false)}
	}
	return []SetID{m}
}

// prerouting handles packets from an interface. Clients from outside are looked up in their own map first.
func prerouting(s Structure, start []Rule) []Rule {
	var outside []Rule
	for _, m := range s.withUncounted(OutsideServices) {
		rule := dispatch(m)
		if s.Pods.Known() {
			rule = append(Rule{FromPods{Pods: s.Pods, Not: true}}, rule...)
		}
		outside = append(outside, rule)
	}
	rules := slices.Insert(slices.Clone(start), len(start)-1, outside...)
	if s.Uses.Has(PingableIPs) || s.Uses.Has(LoadBalancerIPs) { // they come after all frontends
		rules[len(rules)-1] = Rule{Jump{Frontends.id()}}
		rules = append(rules, Rule{FromPods{Pods: s.Pods, Not: true}, Goto{LoadBalancers.id()}})
	}
	return rules
}

// loadBalancers handles packets from outside that no frontend took. A balancer may put the addresses of other nodes
// into a Service's status, so what pods and this node send there is left alone, as are addresses of this host.
func loadBalancers(s Structure) Chain {
	c := Chain{ID: LoadBalancers.id(), Comment: "load balancer addresses, from outside"}
	to := func(set SetID) SetLookup { return SetLookup{Key: Concat{Fields: []Field{DestAddr}}, Set: set} }
	if s.Uses.Has(PingableIPs) && s.Ping.IsValid() {
		c.Rules = append(c.Rules, Rule{EchoRequest{}, to(PingableIPs), NotLocal{}, DNATTo{s.Ping}})
	}
	if s.Uses.Has(LoadBalancerIPs) {
		c.Rules = append(c.Rules, resetOthers(to(LoadBalancerIPs), NotLocal{}, Counter{}),
			Rule{to(LoadBalancerIPs), NotLocal{}, Counter{}, Reject{}})
	}
	return c
}

// again drops the packets of frontends that no rule before has led to a pool, although they are there. A transaction
// has come between two lookups: a frontend that was in the last map is in the first one now, or a pool whose id was
// read is gone, since its frontends have another one. The client sends the packet again. Only the scratch field tells
// who read an id, so that other packets look up nothing again.
//
// The rules do not look into pools: the kernel checks all of that map, for each way to it, whenever one pool changes.
func again(maps []SetID) []Rule {
	var rules []Rule
	for i, m := range maps {
		rule := Rule{SetPriority{Key: toFrontend, Map: m}, Counter{}, Drop{}}
		if i > 0 || len(maps) == 1 {
			rule = append(Rule{PriorityIs{Not: true}}, rule...)
		}
		rules = append(rules, rule)
	}
	return rules
}

func frontends(s Structure) Chain {
	c := Chain{ID: Frontends.id()}
	maps := s.withUncounted(Services)
	for _, m := range maps {
		c.Rules = append(c.Rules, dispatch(m))
	}
	c.Rules = append(c.Rules, again(maps)...)
	toAddress := Concat{Fields: []Field{DestAddr}}
	toClusterIP := SetLookup{Key: toAddress, Set: ClusterIPs}
	toServiceCIDR := SetLookup{Key: toAddress, Set: ServiceCIDRs}
	if s.Ping.IsValid() {
		ping := Rule{EchoRequest{}, toClusterIP}
		if s.Uses.Has(SilentClusterIPs) {
			ping = append(ping, SetLookup{Key: toAddress, Not: true, Set: SilentClusterIPs})
		}
		c.Rules = append(c.Rules, append(ping, DNATTo{s.Ping}))
	}
	c.Rules = append(c.Rules,
		resetOthers(toClusterIP, Counter{}),
		Rule{toClusterIP, Counter{}, Reject{}},
		resetOthers(toServiceCIDR, Counter{}),
		Rule{toServiceCIDR, Counter{}, Drop{}})
	return c
}

// resetOthers resets TCP connections whose first packet here does not open one: connection tracking has lost them, so
// they have no endpoint. An ICMP error, or silence, would not end them.
func resetOthers(and ...Statement) Rule {
	return append(append(Rule{TCPFlags{Of: FlagSYN | FlagACK, Not: true, Are: FlagSYN}}, and...), Reset{})
}

// translated decides the source address of connections to Services, after session affinity is recorded. It looks up the
// few ServiceCIDRs first, which is faster than all cluster IPs and matches most connections to cluster IPs.
func translated(s Structure) Chain {
	var rules []Rule
	if s.Uses.Has(Remember) {
		rules = []Rule{{Jump{RememberAffinity.id()}}}
	}
	rules = append(rules, Rule{ClearPriority{}})
	if s.Uses.Has(ExternalServices) {
		rules = append(rules, perProtocol(nil, SetPriority{Key: tupleKey, Map: ExternalServices})...)
		rules = append(rules, Rule{PriorityIs{Value: externalAll}, Goto{MasqueradeAll.id()}},
			Rule{PriorityIs{Value: externalNode}, Goto{MasqueradeNode.id()}})
	}
	if !s.MasqueradeAll && s.Pods.ByInterface() {
		// Packets between pods on one bridge seem to have no incoming interface, and so none of the pods'.
		rules = append(rules, acceptBridged(s, s.Pods))
	}
	for _, set := range [...]SetID{ServiceCIDRs, ClusterIPs} {
		toClusterIP := SetLookup{Key: Concat{Fields: []Field{OriginalDestAddr}}, Set: set}
		switch {
		case s.MasqueradeAll:
			rules = append(rules, Rule{toClusterIP, Masquerade{}})
		case s.Pods.Known():
			rules = append(rules, Rule{FromPods{Pods: s.Pods, Not: true}, toClusterIP, Masquerade{}})
		}
	}
	return Chain{ID: TranslatedChain.id(), Rules: append(rules, hairpin(s)...)}
}

// masqueradeFromNode masquerades packets of this node itself.
func masqueradeFromNode(s Structure) Chain {
	rules := []Rule{{ClearPriority{}}, acceptBridged(s, dataplane.Pods{}), {NoInput{}, Masquerade{}}}
	return Chain{ID: MasqueradeNode.id(), Comment: "externalTrafficPolicy Local", Rules: append(rules, hairpin(s)...)}
}

// acceptBridged excludes packets that stay on their bridge from masquerading as packets of this node. Those of an
// endpoint to itself must still be masqueraded.
func acceptBridged(s Structure, p dataplane.Pods) Rule {
	r := Rule{Bridged{p}}
	if s.Uses.Has(Hairpin) {
		r = append(r, SetLookup{Key: Concat{Fields: []Field{SourceAddr, DestAddr}}, Not: true, Set: Hairpin})
	}
	return append(r, Accept{})
}

// hairpin lets endpoints on this node connect to themselves.
func hairpin(s Structure) []Rule {
	if !s.Uses.Has(Hairpin) {
		return nil
	}
	return []Rule{{SetLookup{Key: Concat{Fields: []Field{SourceAddr, DestAddr}}, Set: Hairpin}, Masquerade{}}}
}

// firstEndpoint gets the packets that found nothing in their slot: they have read of their pool before a transaction,
// and look up its slots after it. The first endpoint takes them. If it is gone, too, they are dropped: the client sends
// them again, and finds the pool as it is then. If they were left alone, so would their connections be, until the
// client gives up.
//
// It is one chain for all, since the kernel goes through the whole map whenever a new rule looks it up.
func firstEndpoint(kind ChainKind, m SetID) Chain {
	return Chain{ID: kind.id(), Comment: "the endpoint that was chosen is gone",
		Rules: []Rule{{DNAT{Key: slotKey(RandomSlot, 1), Map: m}}, {Counter{}, Drop{}}}}
}

// affinityLookup sends a client to the endpoint it had before.
func affinityLookup() Chain {
	return Chain{ID: AffinityLookup.id(), Rules: perProtocol(nil, DNAT{Key: affinityKey, Map: Affinity})}
}

// The values of ExternalServices. A verdict map would be shorter, but the kernel validates every verdict again whenever
// one changes, and a Service may have very many addresses.
const (
	externalAll  = 1
	externalNode = 2
)

// rememberAffinity finds a connection's pool from its original destination. If there are two such pools and no
// interface tells where the packet came from, the priority does: it is still the pool's id, since no router has changed
// it.
func rememberAffinity(s Structure) Chain {
	find := func(m SetID) []Statement {
		return []Statement{SetPriority{Key: tupleKey, Map: m}, VerdictMap{Key: poolKey, Map: Remember}}
	}
	c := Chain{ID: RememberAffinity.id()}
	if s.Uses.Has(OutsideStickyServices) {
		outside := Rule{NoInput{Not: true}}
		if s.Pods.Known() {
			outside = append(outside, FromPods{Pods: s.Pods, Not: true})
		}
		c.Rules = append(perProtocol(outside, find(OutsideStickyServices)...),
			Rule{NoInput{}, VerdictMap{Key: poolKey, Map: Remember}})
	}
	c.Rules = append(c.Rules, perProtocol(nil, find(StickyServices)...)...)
	return c
}

// perProtocol repeats a rule for each protocol: nft accepts the port of a connection's tuple only after the protocol is
// known.
func perProtocol(before Rule, after ...Statement) []Rule {
	rules := make([]Rule, 0, len(protocols))
	for _, p := range protocols {
		r := append(Rule{}, before...)
		rules = append(rules, append(append(r, ProtocolIs{p}), after...))
	}
	return rules
}

// numbered returns a chain of a kind that exists once for each N in use.
func numbered(id ChainID, s Structure) Chain {
	c := Chain{ID: id}
	pick := func(by Field, m SetID) []Rule {
		first := FirstEndpoint
		if m == UncountedEndpoints {
			first = UncountedFirstEndpoint
		}
		return []Rule{{DNAT{Key: slotKey(by, id.N), Map: m}}, {Goto{first.id()}}}
	}
	switch id.Kind {
	case Pick:
		c.Rules = pick(RandomSlot, Endpoints)
	case UncountedPick:
		c.Rules = pick(RandomSlot, UncountedEndpoints)
	case PickHash:
		c.Rules = pick(SourceBucket, Endpoints)
	case UncountedHash:
		c.Rules = pick(SourceBucket, UncountedEndpoints)
	case PickHashPort:
		c.Rules = pick(SourcePortBucket, Endpoints)
	case UncountedHashPort:
		c.Rules = pick(SourcePortBucket, UncountedEndpoints)
	case StickyPick, StickyHash:
		c.Rules = []Rule{{Jump{AffinityLookup.id()}}, {Goto{id.next()}}}
	case RememberFor:
		// Only an endpoint that is still in the pool is remembered: the packet may have been translated before a commit that
		// removed its endpoint.
		for _, members := range s.withUncounted(StickyEndpoints) {
			c.Rules = append(c.Rules, Rule{
				SetLookup{Key: Concat{Fields: []Field{Priority, DestAddr, DestPort}}, Set: members},
				Update{Map: Affinity, Key: affinityKey, Timeout: time.Duration(id.N) * time.Second, Data: Concat{Fields: target}}})
		}
	}
	return c
}

// next is the numbered chain to which a numbered chain leads, if any.
func (c ChainID) next() ChainID {
	switch c.Kind {
	case StickyPick:
		return ChainID{UncountedPick, c.N}
	case StickyHash:
		return ChainID{UncountedHash, c.N}
	}
	return ChainID{}
}

// ProbeTable returns a table with a chain of every kind: what a kernel must accept to be usable.
func ProbeTable(f ipfamily.Family, s Structure) Table {
	return probeTable(f, s, ChainKind(len(chainNames)-1))
}

// probeTable returns a table with a chain of every kind up to one.
func probeTable(f ipfamily.Family, s Structure, last ChainKind) Table {
	s.Uses = s.Uses.With(optional[:]...)
	var chains []ChainID
	for k := numFixedChains + 1; k <= last; k++ {
		chains = append(chains, ChainID{k, 1})
	}
	return TableOf(f, s, chains)
}

// TableOf returns the structure of a table with some numbered chains.
func TableOf(f ipfamily.Family, s Structure, chains []ChainID) Table {
	t := layout(f, s)
	for _, id := range chains {
		t.Chains = append(t.Chains, numbered(id, s))
	}
	return t
}

// ChainNamed returns the chain with a name: the table's chain, or the numbered chain as it should be.
func ChainNamed(t Table, s Structure, name string) (c Chain, ok bool) {
	id, ok := chainByName(name)
	if !ok || id.Name() != name {
		return c, false
	}
	if i := slices.IndexFunc(t.Chains, func(c Chain) bool { return c.ID == id }); i >= 0 {
		return t.Chains[i], true
	}
	return numbered(id, s), id.Kind > numFixedChains
}

// SetByID returns a set of the layout. It is called for each element that is read.
func SetByID(id SetID) Set { return setsByID[id] }

var setsByID = sets()

// IsOptional reports whether no rule looks up a set while it is empty.
func IsOptional(s SetID) bool { return slices.Contains(optional[:], s) }
