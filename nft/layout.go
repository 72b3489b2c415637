package nft

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
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
	InsideServices
	UncountedInsideServices
	Pools
	Picks
	SplitPicks
	PoolPicks
	Endpoints
	UncountedEndpoints
	Addresses
	Kinds
	SourceKinds
	Sources
	SourceRanges
	ServiceCIDRs
	ExternalServices
	Hairpin
	Remember
	Timeouts
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
	SharedRanges
	UnhealthyEndpoints
	SettingsSet
	AnsweredBy
	Accepted
	Forsaken
	Retrying
	Retried
	RefusedShares
	RateLimits
	LimitedPools
	DroppingPools
	ClientLimits
	ClientRates
	LimitedClients
	LimitedBuckets
	FullPools
	FullClients
	KeptServices
	KeptSlots
	KeptNodes
	KeptOwn
	KeptFlows
	KeptRecent
	KeptFragments
	NodeMACs
	// NumSets is how many there are.
	NumSets
)

var setNames = [...]string{
	"services", "uncounted-services", "outside-services", "uncounted-outside-services", "inside-services",
	"uncounted-inside-services", "pools", "picks", "split-picks", "pool-picks", "endpoints", "uncounted-endpoints",
	"addresses", "kinds", "source-kinds", "sources", "source-ranges", "service-cidrs", "external-services",
	"hairpin", "remember", "timeouts", "sticky-services", "outside-sticky-services", "sticky-endpoints",
	"uncounted-sticky-endpoints", "affinity", "scheduled", "revision", "digests", "retry-services",
	"unanswered-by", "refused-by", "shared-ranges", "unhealthy-endpoints", "settings", "answered-by",
	"accepted", "forsaken", "retrying", "retried", "refused-shares", "rate-limits", "limited-pools",
	"dropping-pools", "client-limits", "client-rates", "limited-clients", "limited-buckets",
	"full-pools", "full-clients",
	"kept", "kept-slots", "kept-nodes", "kept-own", "kept-flows", "kept-recent", "kept-fragments", "node-macs",
}

func (s SetID) String() string { return setNames[s] }

// isBookkeeping reports whether a set holds no content, but only Verdict's records about the content, or what the
// kernel adds by itself.
func (s SetID) isBookkeeping() bool { return s == RevisionSet || s == DigestSet || s.IsDynamic() }

// IsDynamic reports whether rules write to a set, so that its elements come and go at any time.
func (s SetID) IsDynamic() bool {
	return s == Affinity || s.ComesLater() || s >= KeptFlows && s <= KeptFragments
}

// EvidenceSets are the sets of evidence, which a table has only while Structure.Evidence is set.
var EvidenceSets = [...]SetID{Unanswered, Refused, AnsweredBy, Accepted, Forsaken, Retrying, Retried}

// clientSets hold the limits of clients, and a table has them only while there are some.
var clientSets = [...]SetID{LimitedClients, LimitedBuckets}

// ComesLater reports whether a set can be added to a table that was written without it, by an earlier version or for
// another Structure.
func (s SetID) ComesLater() bool {
	return slices.Contains(EvidenceSets[:], s) || slices.Contains(clientSets[:], s)
}

// IsContent reports whether a set's elements follow from the Services.
func (s SetID) IsContent() bool { return !s.isBookkeeping() }

// IsTree reports whether a set holds ranges of addresses alone, for which the kernel has a tree.
func (s SetID) IsTree() bool { return s == ServiceCIDRs || s == SharedRanges }

// IsUncounted reports whether a map of frontends is the twin of one with counters.
func (s SetID) IsUncounted() bool {
	return s == UncountedServices || s == UncountedInsideServices || s == UncountedOutsideServices
}

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
	Split
	SharedPool
	ClusterIP
	SilentClusterIP
	LoadBalancer
	SilentLoadBalancer
	PingableAddress
	OtherAddress
	Unallocated
	NoEndpoints
	NoLocalEndpoints
	AffinityLookup
	RememberAffinity
	StickyPool
	TranslatedChain
	FromClusterIP
	FromExternal
	FromBoth
	FromStickyClusterIP
	FromStickyExternal
	FromStickyBoth
	MasqueradeClusterIP
	MasqueradeAll
	MasqueradeNode
	LeftToIPVS
	PassOn
	FirstEndpoint
	UncountedFirstEndpoint
	RefusedChain
	Answers
	UnansweredChain
	Evidence
	EvidenceInput
	RecordResets
	RecordResetsInput
	OverLimit
	RatedPool
	KeepIngress
	KeepForward
	KeepSend
	KeepShare
	KeepShareAgain
	KeepKnown
	KeepFlow
	KeepNew
	KeepFind
	KeepFragments
	KeepErrors
	numFixedChains
	// Pick chains choose one of N endpoints; UncountedPick chains choose among endpoints without counters.
	Pick ChainKind = iota
	UncountedPick
	// StickyPick chains look into the affinity map before they choose.
	StickyPick
	// RememberFor chains write to the affinity map, with a timeout of N seconds.
	RememberFor
	// ClientLimit chains limit each client, by the pair of snapshot.ClientRates and snapshot.ClientBursts that N says.
	ClientLimit
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

// isHash reports whether a chain takes the slot that a hash of the client gives.
func (k ChainKind) isHash() bool { return k >= PickHash }

var chainNames = [...]string{
	"", "guard-loopback", "prerouting", "output", "input", "postrouting", "restrict", "split", "shared-pool",
	"cluster-ip", "silent-cluster-ip", "load-balancer", "silent-load-balancer", "pingable-address", "other-address",
	"unallocated",
	"no-endpoints", "no-local-endpoints", "affinity-lookup", "remember-affinity", "sticky-pool", "translated",
	"from-cluster-ip", "from-external", "from-both", "from-sticky-cluster-ip", "from-sticky-external",
	"from-sticky-both", "masquerade-cluster-ip", "masquerade-all", "masquerade-node", "left-to-ipvs", "pass-on",
	"first-endpoint", "uncounted-first-endpoint",
	"refused", "answers", "unanswered", "evidence", "evidence-input", "record-resets", "record-resets-input", "over-limit",
	"limited-pool",
	"keep-ingress", "keep-forward", "keep-send", "keep-share", "keep-share-again", "keep-known", "keep-flow",
	"keep-new", "keep-find", "keep-fragments", "keep-errors", "",
	"pick", "uncounted-pick", "sticky", "remember", "client-limit", "hash", "uncounted-hash", "hash-port",
	"uncounted-hash-port", "sticky-hash",
}

// Name is the chain's name in the ruleset, such as "pick-3".
func (c ChainID) Name() string {
	if c.Kind < numFixedChains {
		return chainNames[c.Kind]
	}
	return chainNames[c.Kind] + "-" + strconv.FormatUint(uint64(c.N), 10)
}

// IsNumbered reports whether the chain exists only for the elements that lead to it.
func (c ChainID) IsNumbered() bool { return c.Kind > numFixedChains }

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
	toAddress   = Concat{Fields: []Field{DestAddr}}
	// originalAddress is the original destination's address.
	originalAddress = Concat{Fields: []Field{OriginalDestAddr}}

	wholeKey    = Concat{Fields: []Field{Priority}}
	classKey    = Concat{Fields: []Field{PoolClass}}
	affinityKey = Concat{Fields: []Field{PoolNumber, SourceBucket}, Mod: AffinityBuckets}
	shareKey    = Concat{Fields: []Field{Priority, RandomSlot}, Mod: dataplane.RefusedOf}
	target      = []Field{DestAddr, DestPort}
	protocols   = [...]Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}
)

// slotKey is the key of one of some slots, chosen by RandomSlot, SourceBucket or SourcePortBucket.
func slotKey(by Field, mod uint32) Concat {
	return Concat{Fields: []Field{PoolNumber, L4Proto, by}, Mod: mod}
}

// Structure is what the layout depends on besides the elements.
type Structure struct {
	Pods          dataplane.Pods
	MasqueradeAll bool
	// PodsFirst takes a packet of this node with a pod's address for a pod's. Only Pods with a CIDR have it.
	PodsFirst bool
	// GuardLoopback drops packets from outside with loopback addresses, as the kernel did before route_localnet was set.
	GuardLoopback bool
	// Evidence gathers which endpoints do not answer or refuse.
	Evidence bool
	// Records logs resets, and packets that are rejected or dropped.
	Records bool
	// Device is where packets to frontends that keep their clients' addresses come in; empty if there are none.
	Device string
	// Ping is the node's address that answers a ping of a Service address; the zero Addr: none does.
	Ping netip.Addr
	// Uses says which of the optional sets have rules. It follows from the elements, so that packets pass no rule that
	// concerns no Service.
	Uses Uses
}

// Uses is a set of SetIDs.
type Uses uint64

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
	UncountedServices, Hairpin, Remember, OutsideStickyServices, Scheduled, RetryServices, RefusedShares, RateLimits,
	ClientLimits, FullPools, FullClients,
}

// StructureOf returns what a state asks of a family's table, except what follows from its elements.
func StructureOf(s *dataplane.State, f ipfamily.Family) Structure {
	out := Structure{Pods: s.Pods4, MasqueradeAll: s.MasqueradeAll, GuardLoopback: s.LocalhostNodePorts,
		Evidence: s.Evidence, Records: s.Records, Ping: s.PingAddrs[f], Device: s.Device}
	if f == ipfamily.IPv6 {
		out.Pods, out.GuardLoopback = s.Pods6, false
	}
	out.Pods.CIDR = out.Pods.CIDR.Masked() // as the rules have it
	out.PodsFirst = s.PodsFirst && out.Pods.CIDR.IsValid()
	return out
}

// sets returns the sets and maps of a table.
func (s Structure) sets() []Set {
	return slices.DeleteFunc(sets(), func(set Set) bool {
		return !s.Evidence && slices.Contains(EvidenceSets[:], set.ID) ||
			!s.Uses.Has(ClientLimits) && slices.Contains(clientSets[:], set.ID) || s.Device == "" && set.ID.IsIngress()
	})
}

// sets returns all sets and maps that a table may have, by their ids. Only sets that rules write to have a size: the
// kernel allocates buckets for the full size at once, and lets a set without a size grow with its elements.
func sets() []Set { return slices.Concat(serviceSets(), otherSets(), limitedSets(), keepSets()) }

// beyond is what the twins of maps with counters say.
const beyond = "the same, beyond the budget for counters"

func verdictSet(id SetID, comment string) Set {
	return Set{ID: id, Key: []Field{Priority}, Verdicts: true, Comment: comment}
}

func numberSet(id SetID, comment string) Set {
	return Set{ID: id, Key: []Field{Priority}, Data: []Field{Priority}, Comment: comment}
}

// serviceSets are those that lead packets to endpoints.
func serviceSets() []Set {
	frontends := func(id SetID, counter bool, comment string) Set {
		return Set{ID: id, Key: frontendKey, Data: []Field{Priority}, Counter: counter, Comment: comment}
	}
	slot := []Field{Priority, L4Proto, RandomSlot}
	return []Set{
		frontends(Services, true, "address . protocol . port of each Service : class and pool"),
		frontends(UncountedServices, false, beyond),
		frontends(OutsideServices, true, "externalTrafficPolicy Local: the same for clients from outside"),
		frontends(UncountedOutsideServices, false, beyond),
		frontends(InsideServices, true, "frontends that lead to split or restrict: the same for all others"),
		frontends(UncountedInsideServices, false, beyond),
		numberSet(Pools, "pools of many frontends : class and pool"),
		verdictSet(Picks, "class : what to do"),
		verdictSet(SplitPicks, "the same, for split, which leads to all but itself and restrict"),
		verdictSet(PoolPicks, "the same, for shared-pool, which leads to chains of pools"),
		{ID: Endpoints, Key: slot, Data: target, Counter: true, Comment: "slot n of each pool: one endpoint"},
		{ID: UncountedEndpoints, Key: slot, Data: target,
			Comment: "the same: counted in sticky-endpoints, or beyond the budget for counters"},
		{ID: Addresses, Key: []Field{DestAddr}, Data: []Field{Priority}, Comment: "all addresses of Services : kind"},
		verdictSet(Kinds, "kind of address : what to do with packets that no frontend takes"),
		{ID: SourceKinds, Key: []Field{DestAddr}, Data: []Field{Priority},
			Comment: "addresses that are more than a cluster IP, or have session affinity : kind"},
		verdictSet(Sources, "kind of address : whose connections are masqueraded, or remembered"),
		{ID: SourceRanges, Key: []Field{Priority, SourceAddr}, Interval: true,
			Comment: "loadBalancerSourceRanges: who may use the frontends that lead to restrict"},
	}
}

// otherSets are those behind serviceSets.
func otherSets() []Set {
	frontends := func(id SetID, comment string) Set {
		return Set{ID: id, Key: frontendKey, Data: []Field{Priority}, Comment: comment}
	}
	members := []Field{Priority, DestAddr, DestPort}
	return []Set{
		{ID: ServiceCIDRs, Key: []Field{DestAddr}, Interval: true,
			Comment: "ranges of cluster IPs: unallocated addresses are dropped"},
		frontends(ExternalServices,
			"all but cluster IPs : who is masqueraded: all (0:1), this node and who gets an endpoint elsewhere (0:2), "+
				"this node (0:3)"),
		{ID: Hairpin, Key: []Field{SourceAddr, DestAddr}, Comment: "endpoints on this node that may reach themselves"},
		numberSet(Remember, "sessionAffinity: pool : for how many seconds clients are remembered"),
		verdictSet(Timeouts, "seconds : where they are remembered for so long"),
		frontends(StickyServices, "sessionAffinity: the pool of each frontend, which is not counted again"),
		frontends(OutsideStickyServices, "sessionAffinity: the same for clients from outside"),
		{ID: StickyEndpoints, Key: members, Counter: true, Comment: "sessionAffinity: the endpoints of each pool"},
		{ID: UncountedStickyEndpoints, Key: members, Comment: beyond},
		{ID: Affinity, Key: []Field{Priority, RandomSlot}, Data: target, Dynamic: true, Size: AffinitySize,
			Comment: "sessionAffinity: pool . bucket of clients : endpoint"},
		{ID: Scheduled, Key: frontendKey, Comment: "left to IPVS, which chooses the endpoint"},
		{ID: RevisionSet, Key: []Field{Mark},
			Comment: "number and digest of what this table holds, written with every change"},
		{ID: DigestSet, Key: []Field{Mark}, Comment: "digests of what the Services have here, by bucket"},
		{ID: RetryServices, Key: frontendKey, Comment: "refused connections are tried again at another endpoint"},
		evidenceSet(Unanswered, evidenceKey, EvidenceSize,
			"frontend . endpoint to which a client sent its first packet again"),
		evidenceSet(Refused, evidenceKey, EvidenceSize, "frontend . endpoint that refused a connection"),
		{ID: SharedRanges, Key: []Field{DestAddr}, Interval: true,
			Comment: "parts of service-cidrs that nodes, pods or others use, too: nothing is refused there"},
		{ID: UnhealthyEndpoints, Key: members,
			Comment: "pool . endpoint that does not answer or refuses; no rule looks here"},
		{ID: SettingsSet, Key: []Field{Mark}, Comment: "settings in force; no rule looks here"},
		evidenceSet(AnsweredBy, senderKey, EvidenceSize, "endpoints that accepted a connection within the last minutes"),
		evidenceSet(Accepted, pairKey, AcceptedSize,
			"client . endpoint that accepted its connection within the last minutes"),
		evidenceSet(Forsaken, pairKey, EvidenceSize, "client . endpoint that accepted it before, and does not now"),
		evidenceSet(Retrying, senderKey, EvidenceSize, "clients whose refused connection is tried again"),
		evidenceSet(Retried, senderKey, EvidenceSize, "the same, and for whom the time for that is over"),
		{ID: RefusedShares, Key: shareKey.Fields, Interval: true,
			Comment: "pools that refuse a share of connections . which of 10,000 draws those are"},
	}
}

func evidenceSet(id SetID, key []Field, size uint32, comment string) Set {
	return Set{ID: id, Key: key, Dynamic: true, Size: size, Comment: comment}
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
	t.Chains = append(t.Chains,
		Chain{ID: LeftToIPVS.id(), Comment: "the packet goes on to IPVS", Rules: []Rule{{Accept{}}}},
		Chain{ID: NoEndpoints.id(), Comment: "no endpoint anywhere", Rules: refuse()},
		Chain{ID: NoLocalEndpoints.id(), Comment: "traffic policy Local, endpoints on other nodes only",
			Rules: []Rule{resetOthers(), {Drop{}}}},
		Chain{ID: PassOn.id(), Comment: "left alone: verdict/external-failover: pass, or shared-ranges",
			Rules: []Rule{{Accept{}}}},
		firstEndpoint(FirstEndpoint, Endpoints),
		firstEndpoint(UncountedFirstEndpoint, UncountedEndpoints),
		affinityLookup(), stickyPool(s), rememberAffinity(),
		Chain{ID: MasqueradeAll.id(), Comment: "externalTrafficPolicy Cluster",
			Rules: []Rule{{ClearPriority{}}, {Masquerade{}}}},
		masqueradeFromNode(s),
		split(s), restrict(), overLimit(), sharedPool(s), unallocated())
	if s.Uses.Has(ClientLimits) {
		t.Chains = append(t.Chains, Chain{ID: RatedPool.id(), Rules: ratedPool(s)})
	}
	for _, k := range addressKinds {
		t.Chains = append(t.Chains, unusedPorts(s, k))
	}
	start := frontends(s)
	t.Chains = append(t.Chains,
		Chain{ID: Prerouting.id(), Hook: &Hook{"nat", "prerouting", DNATPriority}, Rules: start},
		Chain{ID: Output.id(), Hook: &Hook{"nat", "output", DNATPriority}, Rules: start},
		masqueradeClusterIP(), fromClusterIP(s), fromExternal(s), fromBoth(s))
	for _, pair := range stickySources {
		t.Chains = append(t.Chains, Chain{ID: pair[0].id(), Comment: "sessionAffinity",
			Rules: []Rule{{Jump{RememberAffinity.id()}}, {Goto{pair[1].id()}}}})
	}
	t.Chains = append(t.Chains,
		Chain{ID: TranslatedChain.id(), Rules: []Rule{
			{SetPriority{Key: originalAddress, Map: SourceKinds}, VerdictMap{Key: wholeKey, Map: Sources}},
			{Goto{FromClusterIP.id()}}}},
		Chain{ID: Input.id(), Hook: &Hook{"nat", "input", prioritySrcNAT}, Rules: input(s)},
		postrouting(s))
	t.Chains = append(t.Chains, optionalChains(&t, s, f)...)
	return t
}

// optionalChains are those of what only some operators ask for. Chains that are there already change for records.
func optionalChains(t *Table, s Structure, f ipfamily.Family) (out []Chain) {
	if s.Records {
		t.Chains = logRefusals(t.Chains)
		out = recordResets()
	}
	if s.Evidence {
		out = append(out, evidence(s)...)
	}
	if s.Device != "" {
		out = append(out, keepChains(s)...)
	}
	return out
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

// dispatch finds the class and pool of a frontend in a map, and does what is to be done for the class.
func dispatch(m, picks SetID) Rule {
	return Rule{SetPriority{Key: toFrontend, Map: m}, VerdictMap{Key: classKey, Map: picks}}
}

// withUncounted returns a map and, if it is used, its uncounted twin.
func (s Structure) withUncounted(m SetID) []SetID {
	if s.Uses.Has(m.counted(false)) {
		return []SetID{m, m.counted(false)}
	}
	return []SetID{m}
}

// frontends are the rules for every packet that opens a connection: frontends first, then what is left of the addresses
// of Services, and of the ranges that they are taken from.
func frontends(s Structure) (rules []Rule) {
	for _, m := range s.withUncounted(Services) {
		rules = append(rules, dispatch(m, Picks))
	}
	return append(rules,
		Rule{SetPriority{Key: toAddress, Map: Addresses}, VerdictMap{Key: wholeKey, Map: Kinds}},
		Rule{SetLookup{Key: toAddress, Set: ServiceCIDRs}, Goto{Unallocated.id()}})
}

// restrict drops packets from outside the source ranges of a load balancer address, which are named by the number of
// the pool.
func restrict() Chain {
	return Chain{ID: Restrict.id(), Comment: "loadBalancerSourceRanges", Rules: []Rule{
		{StripClass{}},
		{SetLookup{Key: Concat{Fields: []Field{Priority, SourceAddr}}, Not: true, Set: SourceRanges}, Counter{}, Drop{}},
		{Goto{Split.id()}},
	}}
}

// sharedPool finds the class of a pool that has many frontends, refuses a share of connections, or has limits, which it
// does before an endpoint is chosen. Without any class, it has been overtaken by a change: the client sends the packet
// again.
func sharedPool(s Structure) Chain {
	c := Chain{ID: SharedPool.id(), Comment: "pools of many frontends, or that do not serve every connection"}
	if s.Uses.Has(RefusedShares) {
		c.Rules = []Rule{{SetLookup{Key: shareKey, Set: RefusedShares}, Counter{}, Goto{NoEndpoints.id()}}}
	}
	if s.Uses.Has(ClientLimits) {
		c.Rules = append(c.Rules, Rule{SetPriority{Key: wholeKey, Map: ClientLimits},
			VerdictMap{Key: classKey, Map: ClientRates}})
	}
	c.Rules = append(c.Rules, ratedPool(s)...)
	return c
}

// ratedPool limits the connections of a pool, and finds its class.
func ratedPool(s Structure) (rules []Rule) {
	for _, set := range [...]SetID{FullClients, FullPools, RateLimits} {
		if s.Uses.Has(set) {
			rules = append(rules, Rule{SetLookup{Key: Concat{Fields: SetByID(set).Key}, Set: set}, Goto{OverLimit.id()}})
		}
	}
	return append(rules, Rule{SetPriority{Key: wholeKey, Map: Pools}, VerdictMap{Key: classKey, Map: PoolPicks}},
		Rule{Counter{}, Drop{}})
}

// split finds the pool of frontends that have one for clients from outside, and another for pods and this node. Without
// any, it has been overtaken by a change: the client sends the packet again.
func split(s Structure) Chain {
	c := Chain{ID: Split.id(), Comment: "not the same endpoints for clients from outside"}
	for _, m := range [...]SetID{OutsideServices, UncountedOutsideServices} {
		c.Rules = append(c.Rules, append(fromOutside(s), dispatch(m, SplitPicks)...))
	}
	c.Rules = append(c.Rules, dispatch(InsideServices, SplitPicks), dispatch(UncountedInsideServices, SplitPicks),
		Rule{Counter{}, Drop{}})
	return c
}

// unusedPorts handles packets to an address of a Service that no frontend took, by the kind of the address.
//
// The first rules drop the packets of frontends that are there after all. A transaction has come between two lookups: a
// frontend was not in the map yet, or a pool whose number was read is gone, since its frontends have another one. The
// client sends the packet again.
//
// An address of this host may lie in a ServiceCIDR, or even be a cluster IP. Only what is about to be refused is asked
// whether it is one. A balancer may put the addresses of other nodes into a Service's status, so what pods and this
// node send there is left alone.
func unusedPorts(s Structure, kind ChainKind) Chain {
	c := Chain{ID: kind.id(), Comment: "what no frontend takes"}
	if then := pinged[kind]; then != NoChain {
		ping := Rule{EchoRequest{}}
		if kind != ClusterIP {
			ping = append(ping, fromOutside(s)...)
			ping = append(ping, NotLocal{})
		}
		if s.Ping.IsValid() {
			c.Rules = []Rule{append(ping, DNATTo{s.Ping})}
		}
		c.Rules = append(c.Rules, Rule{Goto{then.id()}})
		return c
	}
	for _, m := range s.withUncounted(Services) {
		c.Rules = append(c.Rules, Rule{SetPriority{Key: toFrontend, Map: m}, Counter{}, Drop{}})
	}
	c.Rules = append(c.Rules, Rule{ClearPriority{}}) // which held the kind
	switch kind {
	case SilentClusterIP:
		c.Rules = append(c.Rules, Rule{SetLookup{Key: toAddress, Set: SharedRanges}, Goto{PassOn.id()}})
		c.Rules = append(c.Rules, refuse(NotLocal{}, Counter{})...)
	case SilentLoadBalancer:
		c.Rules = append(c.Rules, refuse(append(fromOutside(s), NotLocal{}, Counter{})...)...)
	}
	return c
}

// pinged are the kinds of addresses that answer a ping; with all else, they are as others.
var pinged = map[ChainKind]ChainKind{ClusterIP: SilentClusterIP, LoadBalancer: SilentLoadBalancer,
	PingableAddress: OtherAddress}

// fromOutside matches packets that came in by an interface, and not from a pod.
func fromOutside(s Structure) Rule {
	if s.Pods.Known() {
		return Rule{FromPods{Pods: s.Pods, Not: true}, NoInput{Not: true}}
	}
	return Rule{NoInput{Not: true}}
}

// unallocated handles packets to addresses in a ServiceCIDR that no Service has.
func unallocated() Chain {
	return Chain{ID: Unallocated.id(), Comment: "addresses of service-cidrs that no Service has", Rules: []Rule{
		{SetLookup{Key: toAddress, Set: SharedRanges}, Goto{PassOn.id()}},
		resetOthers(NotLocal{}, Counter{}),
		{NotLocal{}, Counter{}, Drop{}},
	}}
}

// refuse rejects packets, TCP by a reset: of ICMP errors the kernel sends one a second to each destination
// (icmp_ratelimit), and most clients would hang.
func refuse(which ...Statement) []Rule {
	reset := append(slices.Clone(which), Reset{})
	if len(which) > 0 { // alone, a reset implies TCP
		reset = append(Rule{ProtocolIs{snapshot.TCP}}, reset...)
	}
	return []Rule{reset, append(slices.Clone(which), Reject{})}
}

// resetOthers resets TCP connections whose first packet here does not open one: connection tracking has lost them, so
// they have no endpoint. An ICMP error, or silence, would not end them.
func resetOthers(and ...Statement) Rule {
	return append(append(Rule{TCPFlags{Of: FlagSYN | FlagACK, Not: true, Are: FlagSYN}}, and...), Reset{})
}

// fromClusterIP decides the source address of connections to cluster IPs. Most connections pass it, and few need more
// than to be compared: only those are asked whether it was Verdict that translated them.
func fromClusterIP(s Structure) Chain {
	rules := []Rule{{ClearPriority{}}}
	if !s.MasqueradeAll && s.Pods.ByInterface() {
		// Packets between pods on one bridge seem to have no incoming interface, and so none of the pods'.
		rules = append(rules, acceptBridged(s, s.Pods))
	}
	switch {
	case s.MasqueradeAll:
		rules = append(rules, Rule{Goto{MasqueradeClusterIP.id()}})
	case s.Pods.Known():
		rules = append(rules, Rule{FromPods{Pods: s.Pods, Not: true}, Goto{MasqueradeClusterIP.id()}})
	}
	return Chain{ID: FromClusterIP.id(), Rules: append(rules, hairpin(s, Goto{MasqueradeClusterIP.id()})...)}
}

// masqueradeClusterIP masquerades the connections to a Service's address: other programs translate some, too.
func masqueradeClusterIP() Chain {
	return Chain{ID: MasqueradeClusterIP.id(), Comment: "what other programs have translated stays as it is",
		Rules: []Rule{{SetPriority{Key: originalAddress, Map: Addresses}, ClearPriority{}, Masquerade{}}}}
}

// externalRules decide the source address of connections to node ports, load balancer and external addresses. With
// policy Local, clients from outside get endpoints on this node. If one has got another, since the policy or the
// endpoints changed between its packet's lookups, it is masqueraded: it would have no answer otherwise, as long as
// connection tracking remembers.
func externalRules(s Structure) []Rule {
	rules := []Rule{{ClearPriority{}}}
	rules = append(rules, perProtocol(nil, SetPriority{Key: tupleKey, Map: ExternalServices})...)
	elsewhere := append(Rule{PriorityIs{Value: uint32(masqueradeElsewhere)}}, fromOutside(s)...)
	if s.Uses.Has(Hairpin) {
		elsewhere = append(elsewhere, SetLookup{Key: Concat{Fields: []Field{DestAddr, DestAddr}}, Not: true, Set: Hairpin})
	}
	return append(rules, Rule{PriorityIs{Value: uint32(masqueradeEverybody)}, Goto{MasqueradeAll.id()}},
		append(elsewhere, Goto{MasqueradeAll.id()}),
		Rule{PriorityIs{Value: uint32(masqueradeElsewhere)}, Goto{MasqueradeNode.id()}},
		Rule{PriorityIs{Value: uint32(masqueradeNode)}, Goto{MasqueradeNode.id()}})
}

func fromExternal(s Structure) Chain {
	return Chain{ID: FromExternal.id(), Rules: append(externalRules(s), hairpin(s, Masquerade{})...)}
}

// fromBoth is for a cluster IP that others have as their external address.
func fromBoth(s Structure) Chain {
	return Chain{ID: FromBoth.id(), Comment: "cluster IPs that are external addresses, too",
		Rules: append(externalRules(s), Rule{Goto{FromClusterIP.id()}})}
}

// masqueradeFromNode masquerades packets of this node itself.
func masqueradeFromNode(s Structure) Chain {
	fromNode := Rule{NoInput{}}
	if s.PodsFirst {
		fromNode = append(fromNode, FromPods{Pods: s.Pods, Not: true})
	}
	rules := []Rule{{ClearPriority{}}, acceptBridged(s, dataplane.Pods{}), append(fromNode, Masquerade{})}
	return Chain{ID: MasqueradeNode.id(), Comment: "externalTrafficPolicy Local",
		Rules: append(rules, hairpin(s, Masquerade{})...)}
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
func hairpin(s Structure, then Statement) []Rule {
	if !s.Uses.Has(Hairpin) {
		return nil
	}
	return []Rule{{SetLookup{Key: Concat{Fields: []Field{SourceAddr, DestAddr}}, Set: Hairpin}, then}}
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

// stickyPool finds a connection's pool from its original destination. If there are two such pools, it is that of
// clients from outside for what came in by an interface, but not from a pod. Of what stays on its bridge, the kernel no
// longer tells here that it came in.
func stickyPool(s Structure) Chain {
	find := func(who Rule, m SetID) []Rule { return perProtocol(who, SetPriority{Key: tupleKey, Map: m}) }
	c := Chain{ID: StickyPool.id(), Rules: find(nil, StickyServices)}
	if !s.Uses.Has(OutsideStickyServices) {
		return c
	}
	bridged := Rule{Bridged{}}
	if s.Pods.Known() && !s.Pods.ByInterface() {
		bridged = append(bridged, FromPods{Pods: s.Pods, Not: true})
	}
	c.Rules = slices.Concat(c.Rules, find(fromOutside(s), OutsideStickyServices), find(bridged, OutsideStickyServices))
	if s.Pods.ByInterface() {
		c.Rules = append(c.Rules, find(Rule{Bridged{s.Pods}}, StickyServices)...)
	}
	return c
}

// rememberAffinity remembers the client of a connection. Only an endpoint that is still in the pool is remembered: the
// packet may have been translated before a commit that removed its endpoint.
func rememberAffinity() Chain {
	c := Chain{ID: RememberAffinity.id(), Rules: []Rule{{Jump{StickyPool.id()}}}}
	for _, members := range memberSets {
		c.Rules = append(c.Rules, Rule{
			SetLookup{Key: Concat{Fields: []Field{Priority, DestAddr, DestPort}}, Set: members},
			SetPriority{Key: wholeKey, Map: Remember}, VerdictMap{Key: wholeKey, Map: Timeouts}})
	}
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

// draws is how often a chain chooses that has more numbers than its pools have slots. At most one number in five
// belongs to nobody, so at most one packet in 400,000 finds none in all draws, and gets the first endpoint.
const draws = 8

// numbered returns a chain of a kind that exists once for each N in use.
func numbered(id ChainID) Chain {
	c := Chain{ID: id}
	pick := func(by Field, m SetID) []Rule {
		first, rules := FirstEndpoint, []Rule{}
		if m == UncountedEndpoints {
			first = UncountedFirstEndpoint
		}
		draw := DNAT{Key: slotKey(by, id.N), Map: m}
		if by == RandomSlot && id.N > exactSizes {
			for draw.Again = draws - 1; draw.Again > 0; draw.Again-- {
				rules = append(rules, Rule{draw})
			}
		}
		return append(rules, Rule{draw}, Rule{Goto{first.id()}})
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
	case ClientLimit:
		c.Rules = clientLimit(id.N)
	case RememberFor:
		key := Concat{Fields: []Field{Priority, SourceBucket}, Mod: AffinityBuckets}
		c.Rules = []Rule{{Jump{StickyPool.id()}}, {Update{Map: Affinity, Key: key, Timeout: time.Duration(id.N) * time.Second,
			Data: Concat{Fields: target}}}}
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
		t.Chains = append(t.Chains, numbered(id))
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
	return numbered(id), id.Kind > numFixedChains
}

// SetByID returns a set of the layout. It is called for each element that is read.
func SetByID(id SetID) Set { return setsByID[id] }

var setsByID = sets()

// IsOptional reports whether no rule looks up a set while it is empty.
func IsOptional(s SetID) bool { return slices.Contains(optional[:], s) }
