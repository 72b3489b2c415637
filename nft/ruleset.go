// Package nft holds, as plain values, what nf_tables should hold for a dataplane.State: tables, chains, rules, sets,
// maps and their elements. It compiles states, computes the difference between two of them, and prints nft text. It
// does no I/O; package nft/kernel carries these values to and from the kernel.
package nft

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// TableName is the name of our table, the same in both families.
const TableName = "verdict"

// Table is the structure of one family's table, without elements. Its size does not depend on the number of Services.
type Table struct {
	Family  ipfamily.Family
	Comment string
	Sets    []Set
	Chains  []Chain
}

// Set is a set, or a map if Data or Verdicts is set.
type Set struct {
	ID   SetID
	Key  []Field
	Data []Field
	// Verdicts makes it a verdict map.
	Verdicts bool
	// Interval lets the last field of the key be a range.
	Interval bool
	// Dynamic lets rules add elements, which time out.
	Dynamic bool
	// Counter counts the packets that reach it in the rule. Packets and Bytes are set if Counted is.
	Counter bool
	// Limit gives each element a limit of its own; a rule matches an element only over that.
	Limit bool
	// Size is the maximum number of elements; 0 means no limit. The kernel sizes the set's hash table by it once.
	Size    uint32
	Comment string
}

// Name is the set's name in the ruleset.
func (s *Set) Name() string { return s.ID.String() }

// IsMap says whether the set has data.
func (s *Set) IsMap() bool { return s.Verdicts || len(s.Data) > 0 }

// Chain is a chain with its rules.
type Chain struct {
	ID ChainID
	// Device is the interface of a Hook at ingress.
	Device string
	// Hook is nil for chains that only rules and verdicts lead to.
	Hook    *Hook
	Comment string
	Rules   []Rule
}

// Hook is where the kernel enters a base chain.
type Hook struct {
	// Type is "nat" or "filter".
	Type string
	// Name is "prerouting", "input", "output" or "postrouting".
	Name     string
	Priority int32
}

// DNATPriority is that of the chains that translate destinations: one before dstnat. The first chain that translates a
// connection decides, and of those with one priority that is the one made last. So Services come before host ports and
// kube-proxy, which use dstnat, whoever was there first.
const DNATPriority = -101

// The standard priorities used here, from linux/netfilter_ipv4.h.
const (
	priorityRaw    = -300
	prioritySrcNAT = 100
)

// Rule is a list of statements that are evaluated in order until one does not match.
type Rule []Statement

// Statement is one of the types below.
type Statement interface {
	text(f ipfamily.Family) string
}

// Field is a field of a packet, or of its connection, that can be part of a key.
type Field uint8

// The fields, in the order of their texts in fieldText.
const (
	SourceAddr Field = iota
	DestAddr
	L4Proto
	DestPort
	// RandomSlot is a random number below a modulus; in a set's key the modulus is MaxSlots.
	RandomSlot
	// Priority is the packet's queueing priority, used as a scratch register between rules.
	Priority
	OriginalDestAddr
	OriginalDestPort
	// Mark is the packet's mark. No rule looks at it: it only lends its type to a set's key.
	Mark
	// SourceBucket is a hash of the sender's address below a modulus. In a set's key a RandomSlot lends it its type, since
	// nft 1.0.6 crashes when it lists one of type hash.
	SourceBucket
	SourcePort
	// SourcePortBucket is a hash of the sender's address and port, as SourceBucket.
	SourcePortBucket
	// The fields below are those of the connection: its client, and the endpoint that it was translated to.
	OriginalSourceAddr
	OriginalSourcePort
	ReplySourceAddr
	ReplySourcePort
	// EtherSource is the sender's link-layer address.
	EtherSource
	// FlowHash is a hash of the packet's addresses and ports. FlowHash2 has the protocol in place of the client's address.
	// QuotedHash and QuotedHash2 are those of the other direction of the packet that an ICMP error quotes.
	FlowHash
	FlowHash2
	QuotedHash
	QuotedHash2
	// SenderHash is a hash of what is known of the packet's sender but for the port: addresses, also that of the link
	// layer, and protocol. FrontendHash is one of the destination's address and port.
	SenderHash
	FrontendHash
	// DatagramID is IPv4's identification of a datagram, which its fragments have in common.
	DatagramID
	// FragmentHash is a hash of a fragment's addresses and identification.
	FragmentHash
	// PoolNumber and PoolClass are the two parts of a priority that came from Pools.
	PoolNumber
	PoolClass
)

// MaxSlots is the modulus that the type of a slot has in the keys of sets. A pool may have more endpoints.
const MaxSlots = 65536

// Concat is a key made of fields. Mod is the modulus of a RandomSlot or a bucket among them, 0 if there is none.
type Concat struct {
	Fields []Field
	Mod    uint32
}

func fieldText(f ipfamily.Family, field Field, mod uint32) string {
	switch field {
	case SourceAddr:
		return f.NFT() + " saddr"
	case DestAddr:
		return f.NFT() + " daddr"
	case L4Proto:
		return "meta l4proto"
	case DestPort:
		return "th dport"
	case RandomSlot:
		return "numgen random mod " + strconv.FormatUint(uint64(mod), 10)
	case Priority:
		return "meta priority"
	case OriginalDestAddr:
		return "ct original " + f.NFT() + " daddr"
	case OriginalDestPort:
		return "ct original proto-dst"
	case Mark:
		return "meta mark"
	case SourcePort:
		return "th sport"
	case SourceBucket:
		return fmt.Sprintf("jhash %s saddr mod %d seed %#x", f.NFT(), mod, BucketSeed)
	case SourcePortBucket:
		return fmt.Sprintf("jhash %s saddr . th sport mod %d seed %#x", f.NFT(), mod, BucketSeed)
	case OriginalSourceAddr:
		return "ct original " + f.NFT() + " saddr"
	case OriginalSourcePort:
		return "ct original proto-src"
	case ReplySourceAddr:
		return "ct reply " + f.NFT() + " saddr"
	case ReplySourcePort:
		return "ct reply proto-src"
	case EtherSource:
		return "ether saddr"
	case DatagramID:
		return "ip id"
	case FlowHash, FlowHash2, QuotedHash, QuotedHash2, SenderHash, FrontendHash, FragmentHash:
		return HashOf(f, field).text(f, mod)
	case PoolNumber:
		return "meta priority & " + classID(PoolMask)
	case PoolClass:
		return "meta priority & " + classID(^uint32(PoolMask))
	}
	panic("nft: unknown field")
}

func (c Concat) text(f ipfamily.Family) string {
	parts := make([]string, len(c.Fields))
	for i, field := range c.Fields {
		parts[i] = fieldText(f, field, c.Mod)
	}
	return strings.Join(parts, " . ")
}

// fieldsText is Concat.text for the fields of a set.
func fieldsText(f ipfamily.Family, fields []Field) string {
	return Concat{Fields: fields, Mod: MaxSlots}.text(f)
}

// Len is the length of the field's value in bytes, without padding.
func (field Field) Len(f ipfamily.Family) int {
	switch field {
	case SourceAddr, DestAddr, OriginalDestAddr, OriginalSourceAddr, ReplySourceAddr:
		return f.AddrLen()
	case L4Proto:
		return 1
	case EtherSource:
		return 6
	case DatagramID, DestPort, OriginalDestPort, SourcePort, OriginalSourcePort, ReplySourcePort:
		return 2
	}
	return 4
}

// SetLookup matches if the key is in the set; with Not, if it is not.
type SetLookup struct {
	Key Concat
	Not bool
	Set SetID
}

func (s SetLookup) text(f ipfamily.Family) string {
	return s.Key.text(f) + " " + notEqual(s.Not) + "@" + s.Set.String()
}

// notEqual is the operator that a text needs for not.
func notEqual(not bool) string {
	if not {
		return "!= "
	}
	return ""
}

// VerdictMap executes the verdict that a map holds for a key. Without one, it does nothing.
type VerdictMap struct {
	Key Concat
	Map SetID
}

func (s VerdictMap) text(f ipfamily.Family) string {
	return s.Key.text(f) + " vmap @" + s.Map.String()
}

// DNAT translates the destination to the address and port that a map holds for a key. Without them, it does nothing.
type DNAT struct {
	Key Concat
	Map SetID
	// Again is how many rules after this one do the same, with another random number.
	Again int
}

func (s DNAT) text(f ipfamily.Family) string {
	return "dnat " + f.NFT() + " to " + s.Key.text(f) + " map @" + s.Map.String()
}

// SetPriority sets the scratch field to the value that a map holds for a key. Without one, the rule does not match.
type SetPriority struct {
	Key Concat
	Map SetID
}

func (s SetPriority) text(f ipfamily.Family) string {
	return "meta priority set " + s.Key.text(f) + " map @" + s.Map.String()
}

// PriorityIs matches packets with a value in the scratch field, or those with another one.
type PriorityIs struct {
	Value uint32
	Not   bool
}

func (s PriorityIs) text(ipfamily.Family) string {
	return "meta priority " + notEqual(s.Not) + classID(s.Value)
}

// classID writes a priority as nft does.
func classID(v uint32) string {
	if v == 0 {
		return "none"
	}
	return fmt.Sprintf("%x:%x", v>>16, v&0xffff)
}

// Accept ends the base chain: the packet goes on to the next hook.
type Accept struct{}

func (Accept) text(ipfamily.Family) string { return "accept" }

// ClearPriority clears the scratch field.
type ClearPriority struct{}

func (ClearPriority) text(ipfamily.Family) string { return "meta priority set none" }

// StripClass leaves of a priority that came from Pools the number of the pool.
type StripClass struct{}

func (StripClass) text(ipfamily.Family) string {
	return "meta priority set meta priority & " + classID(PoolMask)
}

// Update adds an element to a dynamic set or map, or refreshes its timeout if the key is there.
type Update struct {
	Map     SetID
	Key     Concat
	Timeout time.Duration
	// Data is empty for a set.
	Data Concat
	// Counted gives each element a counter of the packets that updated it.
	Counted bool
	// Once leaves the timeout of an element that is there.
	Once bool
	// Limit, if any, gives each element a limit of the packets that match.
	Limit Limit
	// Forget takes the element out of the map instead.
	Forget bool
}

func (s Update) text(f ipfamily.Family) string {
	text := "update"
	switch {
	case s.Once:
		text = "add"
	case s.Forget:
		text = "delete"
	}
	if text += " @" + s.Map.String() + " { " + s.Key.text(f); !s.Forget {
		text += " timeout " + timeText(s.Timeout)
	}
	if s.Limit.Rate > 0 {
		text += " " + s.Limit.String()
	}
	if s.Counted {
		text += " counter"
	}
	if len(s.Data.Fields) > 0 {
		text += " : " + s.Data.text(f)
	}
	return text + " }"
}

// timeText writes a duration as nft does: 3h, 1m30s, 4s500ms.
func timeText(d time.Duration) string {
	ms := d.Milliseconds()
	var b strings.Builder
	for _, u := range [...]struct {
		name string
		n    int64
	}{{"d", 86400_000}, {"h", 3600_000}, {"m", 60_000}, {"s", 1000}, {"ms", 1}} {
		if ms >= u.n {
			b.WriteString(strconv.FormatInt(ms/u.n, 10) + u.name)
			ms %= u.n
		}
	}
	return b.String()
}

// ProtocolIs matches packets of one transport protocol; nft also needs it before it accepts a port of a connection's
// tuple.
type ProtocolIs struct{ Protocol Protocol }

func (s ProtocolIs) text(ipfamily.Family) string { return "meta l4proto " + s.Protocol.String() }

// FromPods matches packets that come from a pod; with Not, all others.
type FromPods struct {
	Pods dataplane.Pods
	Not  bool
}

func (s FromPods) text(f ipfamily.Family) string {
	op := notEqual(s.Not)
	switch {
	case s.Pods.Interface != "":
		return `iifname ` + op + `"` + s.Pods.Interface + `"`
	case s.Pods.InterfacePrefix != "":
		return `iifname ` + op + `"` + s.Pods.InterfacePrefix + `*"`
	}
	return f.NFT() + " saddr " + op + s.Pods.CIDR.String()
}

// NoInput matches packets without an incoming interface, as far as the kernel reports it; with Not, all others. In
// postrouting, where the kernel reports it since 5.7, these are packets of this node itself and packets that are
// Bridged.
type NoInput struct{ Not bool }

func (s NoInput) text(ipfamily.Family) string {
	if s.Not {
		return "iif != 0"
	}
	return "iif 0"
}

// Bridged matches packets in postrouting that stay on the bridge by which they came in and that netfilter sees
// (br_netfilter). For them, as for packets of this node, the kernel reports no incoming interface there. But they have
// a link-layer header, and bridges accept no frame from the address zero; packets of this node only get their header
// later.
type Bridged struct {
	// Pods, if recognized by interface, restricts the match to the pods' bridges: a bridged packet leaves by the bridge by
	// which it came in.
	Pods dataplane.Pods
}

func (s Bridged) text(ipfamily.Family) string {
	const bridged = "iif 0 @ll,48,48 != 0x0"
	switch {
	case s.Pods.Interface != "":
		return bridged + ` oifname "` + s.Pods.Interface + `"`
	case s.Pods.InterfacePrefix != "":
		return bridged + ` oifname "` + s.Pods.InterfacePrefix + `*"`
	}
	return bridged
}

// OffLoopback matches packets with a loopback address that came in by another interface than lo: martians, which the
// kernel would drop itself without route_localnet. Every packet passes it, so the cheaper comparison is the first.
type OffLoopback struct {
	// Field is SourceAddr or DestAddr.
	Field Field
}

func (s OffLoopback) text(f ipfamily.Family) string {
	return fieldText(f, s.Field, 0) + ` 127.0.0.0/8 iifname != "lo"`
}

// Translated matches connections whose destination was translated.
type Translated struct{}

func (Translated) text(ipfamily.Family) string { return "ct status dnat" }

// ConnectionStatus is a set of flags of a connection, as in linux/netfilter/nf_conntrack_common.h.
type ConnectionStatus uint32

// The flags used here.
const (
	StatusAssured   ConnectionStatus = 1 << 2
	StatusConfirmed ConnectionStatus = 1 << 3
	StatusDNAT      ConnectionStatus = 1 << 5
)

// StatusIs matches connections that have, of some flags, exactly those in Are.
type StatusIs struct{ Of, Are ConnectionStatus }

func (s StatusIs) text(ipfamily.Family) string {
	flags := func(set ConnectionStatus) string {
		return flagsText(uint32(set), []flagName{
			{uint32(StatusAssured), "assured"}, {uint32(StatusConfirmed), "confirmed"}, {uint32(StatusDNAT), "dnat"}})
	}
	return "ct status & " + flags(s.Of) + " == " + flags(s.Are)
}

type flagName struct {
	flag uint32
	name string
}

// flagsText lists flags as nft writes them, in parentheses unless there is only one.
func flagsText(set uint32, names []flagName) string {
	var list []string
	for _, n := range names {
		if set&n.flag != 0 {
			list = append(list, n.name)
		}
	}
	if len(list) == 1 {
		return list[0]
	}
	return "(" + strings.Join(list, " | ") + ")"
}

// NewConnection matches packets of connections that have no answer yet.
type NewConnection struct{}

func (NewConnection) text(ipfamily.Family) string { return "ct state new" }

// Reply matches packets against the direction of their connection.
type Reply struct{}

func (Reply) text(ipfamily.Family) string { return "ct direction reply" }

// OtherInterface matches packets that came in by another interface.
type OtherInterface struct{ Than string }

func (s OtherInterface) text(ipfamily.Family) string { return `iifname != "` + s.Than + `"` }

// TCPFlag is a set of flags of a TCP header.
type TCPFlag uint8

// The flags used here.
const (
	FlagSYN TCPFlag = 1 << 1
	FlagRST TCPFlag = 1 << 2
	FlagACK TCPFlag = 1 << 4
)

// TCPFlags matches TCP packets that have, of some flags, exactly those in Are; with Not, all other TCP packets.
type TCPFlags struct {
	Of, Are TCPFlag
	Not     bool
}

func (s TCPFlags) text(ipfamily.Family) string {
	flags := func(set TCPFlag) string {
		names := []flagName{{uint32(FlagSYN), "syn"}, {uint32(FlagRST), "rst"}, {uint32(FlagACK), "ack"}}
		return flagsText(uint32(set), names)
	}
	op := " == "
	if s.Not {
		op = " != "
	}
	return "tcp flags & " + flags(s.Of) + op + flags(s.Are)
}

// TCPSequence matches packets with sequence number 0. TCPFlags must stand before it.
type TCPSequence struct{}

func (TCPSequence) text(ipfamily.Family) string { return "tcp sequence 0" }

// Counter counts the packets that get so far in the rule. Packets and Bytes are set if Counted is.
type Counter struct {
	Counted        bool
	Packets, Bytes uint64
}

func (c Counter) text(ipfamily.Family) string {
	if c.Counted {
		return fmt.Sprintf("counter packets %d bytes %d", c.Packets, c.Bytes)
	}
	return "counter"
}

// Masquerade gives the connection the outgoing interface's address as its source, with a random port.
type Masquerade struct{}

func (Masquerade) text(ipfamily.Family) string { return "masquerade fully-random" }

// Reject answers with ICMP or ICMPv6 port unreachable.
type Reject struct{}

func (Reject) text(ipfamily.Family) string { return "reject" }

// Reset resets the TCP connection. ProtocolIs or TCPFlags must stand before it, unless it is the whole rule, which then
// matches TCP alone.
type Reset struct{}

func (Reset) text(ipfamily.Family) string { return "reject with tcp reset" }

// EchoRequest matches pings.
type EchoRequest struct{}

func (EchoRequest) text(f ipfamily.Family) string {
	if f == ipfamily.IPv6 {
		return "icmpv6 type echo-request"
	}
	return "icmp type echo-request"
}

// NotLocal matches packets to addresses that are not this host's.
type NotLocal struct{}

func (NotLocal) text(ipfamily.Family) string { return "fib daddr type != local" }

// DNATTo translates the destination to an address, which must be valid.
type DNATTo struct{ Addr netip.Addr }

func (s DNATTo) text(ipfamily.Family) string { return "dnat to " + s.Addr.String() }

// Drop drops the packet without an answer.
type Drop struct{}

func (Drop) text(ipfamily.Family) string { return "drop" }

// Jump continues in another chain and returns at its end.
type Jump struct{ Chain ChainID }

func (s Jump) text(ipfamily.Family) string { return "jump " + s.Chain.Name() }

// Goto continues in another chain and does not return.
type Goto struct{ Chain ChainID }

func (s Goto) text(ipfamily.Family) string { return "goto " + s.Chain.Name() }

// Foreign stands for a rule that Verdict did not write.
type Foreign struct{ What string }

func (s Foreign) text(ipfamily.Family) string { return s.What }

// Text returns the rule as nft writes it.
func (r Rule) Text(f ipfamily.Family) string {
	parts := make([]string, 0, len(r))
	for _, s := range r {
		if text := s.text(f); text != "" {
			parts = append(parts, text)
		}
	}
	return strings.Join(parts, " ")
}
