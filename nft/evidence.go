package nft

import (
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// EvidenceSize is how many endpoints each set of evidence holds, and evidenceTimeout how long since the last packet.
const (
	EvidenceSize    = 16384
	evidenceTimeout = 10 * time.Second
)

var refusedKey = []Field{SourceAddr, L4Proto, SourcePort}

// evidence returns the chains that record which endpoints do not answer or refuse. Every packet that leaves the node,
// or ends on it, passes one base chain, whose first statement lets those of established connections pass. There the
// endpoint's answer still has the endpoint's address.
func evidence(s Structure) []Chain {
	unanswered := StatusIs{Of: StatusAssured | StatusDNAT, Are: StatusDNAT}
	// A reset with sequence 0 answers a SYN.
	refuses := Rule{TCPFlags{Of: FlagRST | FlagACK, Are: FlagRST | FlagACK}, TCPSequence{}, Reply{},
		Goto{RefusedChain.id()}}
	return []Chain{
		{ID: RefusedChain.id(), Comment: "an endpoint refuses a connection", Rules: refused(s)},
		{ID: UnansweredChain.id(), Comment: "a connection that is not established", Rules: []Rule{refuses,
			// A first packet is confirmed after postrouting; one that is sent again is confirmed already.
			{NewConnection{}, StatusIs{Of: StatusConfirmed | StatusDNAT, Are: StatusConfirmed | StatusDNAT},
				ProtocolIs{snapshot.TCP},
				Update{Map: Unanswered, Key: toFrontend, Timeout: evidenceTimeout, Counted: true}}}},
		{ID: Evidence.id(), Hook: &Hook{"filter", "postrouting", prioritySrcNAT - 10},
			Rules: []Rule{{unanswered, Goto{UnansweredChain.id()}}}},
		// What comes by the loopback interface has passed postrouting, and has the Service's address again.
		{ID: EvidenceInput.id(), Hook: &Hook{"filter", "input", prioritySrcNAT - 10},
			Comment: "the same for clients on this node",
			Rules:   []Rule{append(Rule{unanswered, OtherInterface{"lo"}}, refuses...)}},
	}
}

// refused counts a refusal. Where another endpoint may take the connection, it drops the reset: the client's
// next SYN chooses again.
func refused(s Structure) []Rule {
	rules := []Rule{{Update{Map: Refused, Key: Concat{Fields: refusedKey}, Timeout: evidenceTimeout, Counted: true}}}
	if s.Uses.Has(RetryServices) {
		rules = append(rules, Rule{ProtocolIs{snapshot.TCP}, SetLookup{Key: tupleKey, Set: RetryServices}, Counter{}, Drop{}})
	}
	return rules
}

// Endpoint returns the endpoint that is the key of an element of Unanswered or Refused.
func (e *Element) Endpoint() netip.AddrPort {
	k := e.FrontendKey()
	return netip.AddrPortFrom(k.Addr, k.Port)
}

// retries reports whether refused connections to a frontend are tried again at another endpoint.
func retries(sp *dataplane.ServicePort, node, out *dataplane.Pool, scheduled bool) bool {
	return sp.SecondChance == snapshot.SecondChanceOn && !scheduled && node.RetryRefused && out.RetryRefused
}
