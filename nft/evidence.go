package nft

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// EvidenceSize is how many elements each set of evidence holds, AcceptedSize that of accepted clients. evidenceTimeout
// is how long since the last packet, AnswerMemory since the last answer.
const (
	EvidenceSize    = 16384
	AcceptedSize    = 32768
	evidenceTimeout = 10 * time.Second
	AnswerMemory    = 2 * time.Minute
)

// A refused connection is tried again for retryFor, and the next refusal is the client's: one that every endpoint
// refuses, as by a policy against its client, ends with its SYN after 5 s, or 7 s before Linux 6.5. An endpoint of few
// clients is ejected within 4 s. retryMemory is longer than the pauses that a client's SYNs have meanwhile.
const (
	retryFor    = 4500 * time.Millisecond
	retryMemory = 20 * time.Second
)

var (
	// evidenceKey is a TCP frontend and an endpoint: what clients of one Service see of an endpoint says nothing about it
	// in another.
	evidenceKey = []Field{DestAddr, DestPort, SourceAddr, SourcePort}
	senderKey   = []Field{SourceAddr, L4Proto, SourcePort}
	pairKey     = []Field{SourceAddr, DestAddr, DestPort}
	// The keys below are such keys, of the connection's tuples. A rule with a port of the packet itself would lose its
	// protocol when nft lists it, and not load again.
	toEndpoint = Concat{Fields: []Field{OriginalDestAddr, OriginalDestPort, ReplySourceAddr, ReplySourcePort}}
	fromClient = Concat{Fields: []Field{OriginalSourceAddr, L4Proto, OriginalSourcePort}}
	// pair is the key of a client's packet to an endpoint, pairOfReply that of the answer.
	pair        = Concat{Fields: pairKey}
	pairOfReply = Concat{Fields: []Field{DestAddr, SourceAddr, SourcePort}}
)

// evidence returns the chains that record which endpoints answer, do not answer, or refuse. Every packet that leaves
// the node, or ends on it, passes one base chain, whose first statement lets those of established connections pass, and
// those that open one.
// There the endpoint's answer still has the endpoint's address.
func evidence(s Structure) []Chain {
	// A first packet is confirmed after postrouting; one that is sent again, or answers it, is confirmed already.
	opening := StatusIs{Of: StatusAssured | StatusConfirmed | StatusDNAT, Are: StatusConfirmed | StatusDNAT}
	again := Rule{NewConnection{}, ProtocolIs{snapshot.TCP}}
	return []Chain{
		{ID: RefusedChain.id(), Comment: "an endpoint refuses a connection", Rules: refused(s)},
		{ID: Answers.id(), Comment: "what endpoints answer to a first packet", Rules: []Rule{
			{TCPFlags{Of: FlagSYN | FlagACK, Are: FlagSYN | FlagACK},
				Update{Map: AnsweredBy, Key: Concat{Fields: senderKey}, Timeout: AnswerMemory},
				Update{Map: Accepted, Key: pairOfReply, Timeout: AnswerMemory}},
			// A reset with sequence 0 answers a SYN.
			{TCPFlags{Of: FlagRST | FlagACK, Are: FlagRST | FlagACK}, TCPSequence{}, Goto{RefusedChain.id()}}}},
		{ID: UnansweredChain.id(), Comment: "a connection that is not established", Rules: []Rule{
			{Reply{}, Goto{Answers.id()}},
			append(slices.Clip(again), Update{Map: Unanswered, Key: toEndpoint, Timeout: evidenceTimeout, Counted: true}),
			append(slices.Clip(again), SetLookup{Key: pair, Set: Accepted},
				Update{Map: Forsaken, Key: pair, Timeout: evidenceTimeout})}},
		{ID: Evidence.id(), Hook: &Hook{"filter", "postrouting", prioritySrcNAT - 10},
			Rules: []Rule{{opening, Goto{UnansweredChain.id()}}}},
		// What comes by the loopback interface has passed postrouting, and has the Service's address again.
		{ID: EvidenceInput.id(), Hook: &Hook{"filter", "input", prioritySrcNAT - 10},
			Comment: "the same for clients on this node",
			Rules:   []Rule{{opening, Reply{}, OtherInterface{"lo"}, Goto{Answers.id()}}}},
	}
}

// refused counts a refusal. Where another endpoint may take the connection, it drops the reset: the client's next SYN
// chooses again. If there is no room to remember the client, or its time is over, the reset goes on.
func refused(s Structure) []Rule {
	rules := []Rule{{ProtocolIs{snapshot.TCP},
		Update{Map: Refused, Key: toEndpoint, Timeout: evidenceTimeout, Counted: true}},
		{SetLookup{Key: pairOfReply, Set: Accepted}, Update{Map: Forsaken, Key: pairOfReply, Timeout: evidenceTimeout}}}
	if s.Uses.Has(RetryServices) {
		rules = append(rules, Rule{ProtocolIs{snapshot.TCP}, SetLookup{Key: fromClient, Set: Retried},
			SetLookup{Key: fromClient, Not: true, Set: Retrying}, Accept{}},
			Rule{ProtocolIs{snapshot.TCP}, SetLookup{Key: tupleKey, Set: RetryServices},
				Update{Map: Retried, Key: fromClient, Timeout: retryMemory, Once: true},
				Update{Map: Retrying, Key: fromClient, Timeout: retryFor, Once: true}, Counter{}, Drop{}})
	}
	return rules
}

// Seen returns the frontend and the endpoint that are the key of an element of Unanswered or Refused.
func (e *Element) Seen() (dataplane.Key, netip.AddrPort) {
	half := int(e.KeyLen) / 2
	at := func(key []byte) netip.AddrPort {
		addr, _ := netip.AddrFromSlice(key[:half-4])
		return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(key[half-4:]))
	}
	frontend := at(e.key[:half])
	return dataplane.Key{Addr: frontend.Addr(), Protocol: snapshot.TCP, Port: frontend.Port()}, at(e.key[half:e.KeyLen])
}

// Pair returns the client and the endpoint that are the key of an element of Accepted or Forsaken.
func (e *Element) Pair() (client netip.Addr, endpoint netip.AddrPort) {
	n := int(e.KeyLen-4) / 2
	client, _ = netip.AddrFromSlice(e.key[:n])
	addr, _ := netip.AddrFromSlice(e.key[n : 2*n])
	return client, netip.AddrPortFrom(addr, binary.BigEndian.Uint16(e.key[2*n:]))
}

// Sender returns the endpoint that is the key of an element of AnsweredBy.
func (e *Element) Sender() netip.AddrPort {
	k := e.FrontendKey()
	return netip.AddrPortFrom(k.Addr, k.Port)
}

// retries reports whether refused connections to a frontend are tried again at another endpoint.
func retries(sp *dataplane.ServicePort, node, out *dataplane.Pool, scheduled bool) bool {
	return sp.SecondChance == snapshot.SecondChanceOn && !scheduled && node.RetryRefused && out.RetryRefused
}
