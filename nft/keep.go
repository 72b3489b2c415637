package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Packets of clients that keep their address are forwarded at the ingress of Structure.Device, before connection
// tracking, in a table of the family netdev: only there can a packet be sent on untranslated (fwd). A family's sets and
// chains there belong to its Table as all others do; which table of the kernel they are in, IsIngress says.
//
// A flow is divided once: KeptFlows has its node until IngressTimeout after its last packet, so a change of the slots
// moves none. Where it is full, or a node has lost all endpoints, the slots say. KeptRecent spares most packets of a
// flow the look at who sent the frame, and the refresh of that timeout: it has the node for some seconds, of packets
// from one link-layer address.

// IsIngress reports whether a set is in the table of the family netdev.
func (s SetID) IsIngress() bool { return s >= KeptServices && s <= NodeMACs }

// IsIngress reports whether a chain is in the table of the family netdev.
func (k ChainKind) IsIngress() bool { return k >= KeepIngress && k <= KeepErrors }

// IngressTable is the name of a family's table among those of the family netdev.
func IngressTable(f ipfamily.Family) string {
	return ipfamily.Per[string]{TableName, TableName + "6"}[f]
}

// IngressComment is the comment of these tables.
const IngressComment = "Kubernetes Services that keep their clients' addresses, written by verdict"

const (
	// IngressTimeout is how long the node of a flow is remembered after its last packet.
	IngressTimeout = 5 * time.Minute
	// IngressSize is of how many flows the nodes are remembered. A flow takes about 100 bytes.
	IngressSize = 1 << 18
	// recentTimeout is how long the packets of a flow are forwarded without more, and recentSize of how many flows.
	recentTimeout = 10 * time.Second
	recentSize    = 1 << 16
	// fragmentTimeout and fragmentSize are the same for datagrams in fragments, of which only the first has ports.
	fragmentTimeout = 30 * time.Second
	fragmentSize    = 1 << 14
	// priorityIngress is before that of other programs, which know no node ports of other nodes.
	priorityIngress = -200
	// keptMark is in the data of KeptSlots, so that the priority that a forwarded packet is left with is the class of no
	// queueing discipline: few have major numbers from 4000 on, and in the last four bits is the usual band.
	keptMark = 0x4000_0000
	keptBits = 4
	// hashModulus is the largest there is.
	hashModulus = 1<<32 - 1
)

func ingressMap(id SetID, key []Field, data Field, comment string) Set {
	return Set{ID: id, Key: key, Data: []Field{data}, Comment: comment}
}

// keepSets are those of packets that are forwarded untranslated.
func keepSets() []Set {
	return []Set{
		ingressMap(KeptServices, frontendKey, Priority,
			"frontends that keep their clients' addresses : how to divide them, and the pool"),
		ingressMap(KeptSlots, []Field{Priority, RandomSlot}, Priority, "slot n of each pool: one node of it"),
		ingressMap(KeptNodes, []Field{Priority}, DestAddr, "other nodes, for each pool : address"),
		{ID: KeptOwn, Key: []Field{Priority}, Comment: "this node, for each pool"},
		{ID: KeptFlows, Key: []Field{RandomSlot, RandomSlot}, Data: []Field{Priority}, Dynamic: true, Size: IngressSize,
			Comment: "two hashes of client and frontend : node"},
		{ID: KeptRecent, Key: []Field{SourcePort, RandomSlot, RandomSlot}, Data: []Field{Priority}, Dynamic: true,
			Size: recentSize, Comment: "client's port, two hashes of the rest : node, for some seconds"},
		{ID: KeptFragments, Key: []Field{RandomSlot}, Data: []Field{Priority}, Dynamic: true, Size: fragmentSize,
			Comment: "hash of a datagram in fragments : node"},
		{ID: NodeMACs, Key: []Field{EtherSource}, Comment: "other nodes: what comes from them is not forwarded again"},
	}
}

// IngressSets and IngressChains are those in the table at the ingress of a device.
func IngressSets() []Set { return keepSets() }

// IngressChains is described there.
func IngressChains(device string) []Chain {
	return keepChains(Structure{Device: device})
}

var (
	keptSlotKey = func(by Field, n int) Concat { return Concat{Fields: []Field{PoolNumber, by}, Mod: uint32(n)} }
	flowKey     = Concat{Fields: []Field{FlowHash, FlowHash2}, Mod: hashModulus}
	errorKey    = Concat{Fields: []Field{QuotedHash, QuotedHash2}, Mod: hashModulus}
	recentKey   = Concat{Fields: []Field{SourcePort, SenderHash, FrontendHash}, Mod: hashModulus}
	fragmentKey = Concat{Fields: []Field{FragmentHash}, Mod: hashModulus}
	toMember    = Forward{Key: wholeKey, Map: KeptNodes}
	here        = Rule{SetLookup{Key: wholeKey, Set: KeptOwn}, ClearPriority{}, Accept{}}
)

// What rules write of a flow, and of a datagram in fragments.
var (
	keptData   = Concat{Fields: []Field{Priority}}
	keptFlow   = Update{Map: KeptFlows, Key: flowKey, Timeout: IngressTimeout, Data: keptData}
	keptRecent = Update{Map: KeptRecent, Key: recentKey, Timeout: recentTimeout, Data: keptData}
	keptFirst  = Update{Map: KeptFragments, Key: fragmentKey, Timeout: fragmentTimeout, Data: keptData}
)

// keepChains are those of packets that are forwarded untranslated.
func keepChains(s Structure) []Chain {
	find := func(then ChainKind) Rule {
		return Rule{OfFamily{}, SetPriority{Key: toFrontend, Map: KeptServices}, Goto{then.id()}}
	}
	fromNode := Rule{Ethernet{}, SetLookup{Key: Concat{Fields: []Field{EtherSource}}, Set: NodeMACs}, ClearPriority{},
		Accept{}}
	follow := func(by Concat, in SetID, then ChainKind) Rule {
		return Rule{OfFamily{}, SetPriority{Key: by, Map: in}, Goto{then.id()}}
	}
	recent, flow := keptRecent, keptFlow
	recent.Forget, flow.Forget = true, true
	return append(sendChains(find),
		Chain{ID: KeepFind.id(), Comment: "flows whose node was not looked up for some seconds",
			Rules: []Rule{fromNode, follow(flowKey, KeptFlows, KeepKnown), {Goto{KeepShare.id()}}}},
		Chain{ID: KeepNew.id(), Comment: "a connection begins: it does not follow an earlier one with its ports",
			Rules: []Rule{{OfFamily{}, Ethernet{}, recent}, {OfFamily{}, flow}, {Goto{KeepFind.id()}}}},
		Chain{ID: KeepFlow.id(), Comment: "packets to frontends that keep their clients' addresses", Rules: []Rule{
			{OfFamily{}, FirstFragment{}, Goto{KeepFind.id()}},
			{TCPFlags{Of: FlagSYN | FlagACK, Are: FlagSYN}, Goto{KeepNew.id()}},
			{OfFamily{}, Ethernet{}, SetPriority{Key: recentKey, Map: KeptRecent}, toMember}, here, find(KeepFind)}},
		Chain{ID: KeepFragments.id(), Comment: "fragments without ports follow the first one",
			Rules: []Rule{fromNode, follow(fragmentKey, KeptFragments, KeepForward), {Accept{}}}},
		Chain{ID: KeepErrors.id(), Comment: "ICMP errors follow the flow that they quote",
			Rules: []Rule{fromNode, follow(errorKey, KeptFlows, KeepForward), {Accept{}}}},
		Chain{ID: KeepIngress.id(), Hook: &Hook{"filter", "ingress", priorityIngress}, Device: s.Device, Rules: []Rule{
			{NotForHere{}, Accept{}}, find(KeepFlow),
			{OfFamily{}, LaterFragment{}, Goto{KeepFragments.id()}},
			{OfFamily{}, TooBig{}, Goto{KeepErrors.id()}},
		}})
}

// sendChains are those for packets whose flow has a node, or gets one. Find looks up the frontend.
func sendChains(find func(then ChainKind) Rule) []Chain {
	onward := []Rule{{ClearPriority{}}, {Accept{}}}
	fragments := Rule{OfFamily{}, FirstFragment{}, keptFirst}
	share := Chain{ID: KeepShare.id(), Comment: "which node has a client's slot"}
	for i, n := range dataplane.KeepSizes {
		for _, byAddr := range []bool{false, true} {
			key := keptSlotKey(SourcePortBucket, n)
			if byAddr {
				key = keptSlotKey(SourceBucket, n)
			}
			share.Rules = append(share.Rules, Rule{OfFamily{}, PriorityClassIs{keepClass(i, byAddr)},
				SetPriority{Key: key, Map: KeptSlots}, Goto{KeepSend.id()}})
		}
	}
	share.Rules = append(share.Rules, onward...)
	return []Chain{
		{ID: KeepForward.id(), Comment: "to the node, or on here if it is this one",
			Rules: append([]Rule{{toMember}}, onward...)},
		{ID: KeepSend.id(), Comment: "flows that get a node",
			Rules: []Rule{{OfFamily{}, keptFlow}, fragments, {Goto{KeepForward.id()}}}},
		share,
		{ID: KeepShareAgain.id(), Comment: "the node of the flow has no endpoint any more",
			Rules: append([]Rule{find(KeepShare)}, onward...)},
		{ID: KeepKnown.id(), Comment: "flows that were here before", Rules: []Rule{{OfFamily{}, keptFlow},
			{OfFamily{}, Ethernet{}, keptRecent}, fragments, {toMember},
			here, {Goto{KeepShareAgain.id()}}}},
	}
}

// keepClass numbers the ways to divide clients: by the place of the number of slots in dataplane.KeepSizes, and by
// address alone or not.
func keepClass(size int, byAddr bool) uint32 {
	n := uint32(2*size + 1)
	if byAddr {
		n++
	}
	return n << poolBits
}

// kept is how a port divides its clients among nodes. The zero value is a port that forwards nothing.
type kept struct {
	// id is the pool's; 0 while it has none.
	id    uint32
	class uint32
	nodes []keptNode
	// slots are places in nodes, for each slot.
	slots []int
}

// keptNode is a node in a port's kept.
type keptNode struct {
	name string
	addr netip.Addr
	own  bool
	// id is that of the node in the pool; 0 while it has none.
	id uint32
}

func (k *kept) used() bool { return len(k.slots) > 0 }

// compileKept compiles how a port divides its clients.
func compileKept(id portID, from *dataplane.Keep) (k kept) {
	if from == nil {
		return k
	}
	size := from.Slots()
	k.class = keepClass(slices.Index(dataplane.KeepSizes[:], size), from.ByAddr)
	var weights, places []int
	var hashes []uint64
	sum, seed := 0, keptID(id, "").hash()
	for i, n := range from.Nodes {
		k.nodes = append(k.nodes, keptNode{name: n.Name, addr: n.Addr, own: n.Own})
		if n.Weight > 0 {
			weights, hashes, places = append(weights, int(n.Weight)), append(hashes, nodeHash(seed, n.Name)), append(places, i)
			sum += int(n.Weight)
		}
	}
	for _, at := range maglevTable(hashes, apportion(weights, sum, max(size, len(weights)))) {
		k.slots = append(k.slots, places[at])
	}
	return k
}

// nodeHash returns a hash of a node that does not depend on who asks.
func nodeHash(seed uint64, name string) uint64 { return mixedHash(seed, []byte(name)) }

// keptID names the pool of a port's nodes, or a node in it.
func keptID(id portID, node string) poolID { return poolID{id, keptPool, node} }

// member is a node's number in the data of KeptSlots.
func (n *keptNode) member() uint32 { return keptMark | n.id<<keptBits }

// frontendElement gives the element that has a frontend's clients divided.
func (p *port) keptFrontend(k dataplane.Key) Element {
	e := frontendElement(KeptServices, k)
	e.setID(p.kept.class | p.kept.id)
	e.Comment = p.comment
	return e
}

func (p *port) keptSlot(slot int) Element {
	e := idElement(KeptSlots, p.kept.id)
	e.addKeyWord(uint32(slot))
	e.setID(p.kept.nodes[p.kept.slots[slot]].member())
	e.Comment = p.comment
	return e
}

func (p *port) keptMember(n *keptNode) Element {
	e := idElement(KeptOwn, n.member())
	if !n.own {
		e.Set = KeptNodes
		e.DataLen = uint8(putAddr(e.data[:], n.addr))
	}
	e.Comment = p.comment
	return e
}

// keptIDs assigns ids to the pool of a port's nodes, and to each of them, and frees those no longer used.
func (p *planner) keptIDs(old, want *port) {
	want.kept.id = p.m.updateID(old.kept.id, want.kept.used(), keptID(want.id, ""))
	had := make(map[string]uint32, len(old.kept.nodes))
	for _, n := range old.kept.nodes {
		had[n.name] = n.id
	}
	want.kept.nodes = slices.Clone(want.kept.nodes)
	for i := range want.kept.nodes {
		n := &want.kept.nodes[i]
		n.id = p.m.updateID(had[n.name], true, keptID(want.id, n.name))
		delete(had, n.name)
	}
	for name, id := range had {
		p.m.updateID(id, false, keptID(want.id, name))
	}
}

// keep plans the change of how a port divides its clients, but for the elements of its frontends.
func (p *planner) keep(f ipfamily.Family, old, want *port) {
	has := make(map[uint32]*keptNode, len(want.kept.nodes))
	for i := range want.kept.nodes {
		has[want.kept.nodes[i].id] = &want.kept.nodes[i]
	}
	for i := range old.kept.nodes {
		before, now := &old.kept.nodes[i], has[old.kept.nodes[i].id]
		switch delete(has, before.id); {
		case now == nil:
			p.del(f, old.keptMember(before))
		case before.own != now.own || before.addr != now.addr || old.comment != want.comment:
			p.del(f, old.keptMember(before))
			p.add(f, want.keptMember(now))
		}
	}
	for i := range want.kept.nodes {
		if n := &want.kept.nodes[i]; has[n.id] != nil {
			p.add(f, want.keptMember(n))
		}
	}
	for n := range max(len(old.kept.slots), len(want.kept.slots)) {
		p.element(f, n < len(old.kept.slots), n < len(want.kept.slots),
			func() Element { return old.keptSlot(n) }, func() Element { return want.keptSlot(n) })
	}
}

// macs plans the change of the other nodes' link-layer addresses.
func (p *planner) macs(now []snapshot.MAC) {
	p.bucket = sharedBucket
	for _, f := range ipfamily.All {
		for _, m := range p.m.macs {
			if !slices.Contains(now, m) {
				p.del(f, macElement(m))
			}
		}
		for _, m := range now {
			if !slices.Contains(p.m.macs, m) {
				p.add(f, macElement(m))
			}
		}
	}
	p.m.macs = now
}

func macElement(m snapshot.MAC) Element {
	e := Element{Set: NodeMACs}
	e.KeyLen = uint8(copy(e.key[:], m[:]))
	return e
}

func macElements(macs []snapshot.MAC) (out []Element) {
	for _, m := range macs {
		out = append(out, macElement(m))
	}
	return out
}

// keepers returns the Services that divide clients among nodes, sorted.
func keepers(s *dataplane.State) (names []snapshot.Name) {
	for name, svc := range s.Services {
		if slices.ContainsFunc(svc.Ports, func(sp *dataplane.ServicePort) bool { return sp.Keep != nil }) {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	return names
}

// leaveIngress takes all elements out of the tables of the family netdev, which go. Their Services' frontends stay.
func (p *planner) leaveIngress() {
	p.macs(nil)
	for _, name := range p.m.Names() {
		s := p.m.services[name]
		if !slices.ContainsFunc(s.ports, func(q *port) bool { return q.kept.used() }) {
			continue
		}
		next := s.shallowCopy()
		next.slotsUnknown = s.slotsUnknown
		for _, q := range next.ports {
			q.kept = kept{}
		}
		p.txn.undo.services = append(p.txn.undo.services, serviceBefore{name, s})
		for i, q := range next.ports {
			p.keptIDs(s.ports[i], q)
		}
		p.move(name, s, next)
	}
}

// OfFamily matches packets of the table's family. nft leaves it out where another statement implies it, as all do
// before which it stands here.
type OfFamily struct{}

func (OfFamily) text(ipfamily.Family) string { return "" }

// Ethernet matches packets that came in by a device of Ethernet. nft leaves it out, as OfFamily.
type Ethernet struct{}

func (Ethernet) text(ipfamily.Family) string { return "" }

// NotForHere matches frames that are for another host, which a link or a device that listens to all of them passes up,
// and frames for several hosts. IP forwards none of them either.
type NotForHere struct{}

func (NotForHere) text(ipfamily.Family) string { return "meta pkttype != host" }

// Forward sends the packet by the interface by which it came in, to the neighbour whose address a map holds for a key.
// Without one, it does nothing.
type Forward struct {
	Key Concat
	Map SetID
}

func (s Forward) text(f ipfamily.Family) string {
	return "fwd " + f.NFT() + " to " + s.Key.text(f) + " map @" + s.Map.String() + " device iif"
}

// PriorityClassIs compares the part of the scratch field above the number of a pool.
type PriorityClassIs struct{ Value uint32 }

func (s PriorityClassIs) text(f ipfamily.Family) string {
	return fieldText(f, PoolClass, 0) + " == " + classID(s.Value)
}

// FirstFragment matches first fragments, which have the header with the ports; LaterFragment matches all others. In
// IPv6 that is so if the fragment's header is the first after the packet's.
type (
	FirstFragment struct{}
	LaterFragment struct{}
)

func (FirstFragment) text(f ipfamily.Family) string {
	if f == ipfamily.IPv6 {
		return "ip6 nexthdr ipv6-frag frag more-fragments 1"
	}
	return "ip frag-off & 0x2000 != 0x0"
}

func (LaterFragment) text(f ipfamily.Family) string {
	if f == ipfamily.IPv6 {
		return "ip6 nexthdr ipv6-frag frag frag-off != 0"
	}
	return "ip frag-off & 0x1fff != 0x0"
}

// TooBig matches ICMP errors about packets that were too big, and in IPv4 all others about unreachable destinations.
type TooBig struct{}

func (TooBig) text(f ipfamily.Family) string {
	if f == ipfamily.IPv6 {
		return "icmpv6 type packet-too-big"
	}
	return "icmp type destination-unreachable"
}

// Hashed is what a hash is made of: fields, and bits at places of the network or transport header.
type Hashed struct {
	Fields []Field
	// Raw are pairs of offset and length in bits, of the network header with Network, else of the transport header.
	Raw     [][2]uint32
	Network bool
	Seed    uint32
}

// seeds of the two hashes that identify a flow.
const (
	seedFlow  = 0x6b656570
	seedFlow2 = 0x666c6f77
)

// HashOf returns what a field hashes; nil if it is no hash of KeptFlows or KeptFragments.
//
// An ICMP error quotes a packet of the endpoint's node to the client, as translated back: its source is the frontend.
// With a header of options, IPv4's quoted ports are not at this place; then the error goes on here as all others do.
func HashOf(f ipfamily.Family, field Field) *Hashed {
	quoted := ipfamily.Per[[][2]uint32]{{{192, 32}, {240, 16}, {160, 32}, {224, 16}},
		{{256, 128}, {400, 16}, {128, 128}, {384, 16}}}[f]
	protocol := ipfamily.Per[[2]uint32]{{136, 8}, {112, 8}}[f]
	switch field {
	case FlowHash:
		return &Hashed{Fields: []Field{SourceAddr, SourcePort, DestAddr, DestPort}, Seed: seedFlow}
	case FlowHash2: // not of all, which nft 1.0.6 has no registers for
		return &Hashed{Fields: []Field{L4Proto, SourcePort, DestAddr, DestPort}, Seed: seedFlow2}
	case QuotedHash:
		return &Hashed{Raw: quoted, Seed: seedFlow}
	case QuotedHash2:
		return &Hashed{Raw: append([][2]uint32{protocol}, quoted[1:]...), Seed: seedFlow2}
	case SenderHash:
		return &Hashed{Fields: []Field{EtherSource, L4Proto, SourceAddr}, Seed: seedFlow}
	case FrontendHash:
		return &Hashed{Fields: []Field{DestAddr, DestPort}, Seed: seedFlow}
	case FragmentHash: // addresses, and the datagram's identification
		fields := []Field{SourceAddr, DestAddr, DatagramID}
		if f == ipfamily.IPv6 { // whose identification is in the next header
			return &Hashed{Fields: fields[:2], Raw: [][2]uint32{{352, 32}}, Network: true, Seed: seedFlow}
		}
		return &Hashed{Fields: fields, Seed: seedFlow}
	}
	return nil
}

func (h *Hashed) text(f ipfamily.Family, mod uint32) string {
	var parts []string
	for _, field := range h.Fields {
		parts = append(parts, fieldText(f, field, 0))
	}
	base := "th"
	if h.Network {
		base = "nh"
	}
	for _, at := range h.Raw {
		parts = append(parts, fmt.Sprintf("@%s,%d,%d", base, at[0], at[1]))
	}
	return fmt.Sprintf("jhash %s mod %d seed %#x", strings.Join(parts, " . "), mod, h.Seed)
}

// mixedHash hashes bytes with a seed, so that all bits depend on all bytes.
func mixedHash(seed uint64, b []byte) uint64 {
	x := fnvOf(binary.BigEndian.AppendUint64(nil, seed), b) // whose last bytes have hardly reached the upper half
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
