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

// evidence returns the chains that record which endpoints do not answer or refuse. Every packet of the node passes
// their base chains, so the first statements let packets of established connections pass.
func evidence(s Structure) []Chain {
	toConnection := Goto{RefusedConnection.id()}
	// A reset with sequence 0 answers a SYN. Connections that were answered are assured soon after.
	refuses := Rule{StatusIs{Of: StatusAssured | StatusDNAT, Are: StatusDNAT},
		TCPFlags{Of: FlagRST | FlagACK, Are: FlagRST | FlagACK}, TCPSequence{}, Reply{}}
	// What comes back by the loopback interface has passed output, and has the Service's address again.
	fromOthers := append(append(Rule{}, refuses...), OtherInterface{"lo"}, toConnection)
	fromHere := append(append(Rule{}, refuses...), toConnection)
	return []Chain{
		{ID: RefusedConnection.id(), Comment: "an endpoint refuses a connection", Rules: refusedConnection(s)},
		{ID: RefusedChain.id(), Hook: &Hook{"filter", "prerouting", priorityMangle}, Rules: []Rule{fromOthers}},
		{ID: RefusedOutput.id(), Hook: &Hook{"filter", "output", priorityMangle},
			Comment: "the same of endpoints on the node's network", Rules: []Rule{fromHere}},
		// A first packet is confirmed after postrouting; one that is sent again is confirmed already.
		{ID: UnansweredChain.id(), Hook: &Hook{"filter", "postrouting", prioritySrcNAT - 10},
			Comment: "an endpoint does not answer a connection",
			Rules: []Rule{{NewConnection{},
				StatusIs{Of: StatusConfirmed | StatusDNAT, Are: StatusConfirmed | StatusDNAT}, ProtocolIs{snapshot.TCP},
				Update{Map: Unanswered, Key: toFrontend, Timeout: evidenceTimeout, Counted: true}}}},
	}
}

// refusedConnection counts a refusal. Where another endpoint may take the connection, it drops the reset: the client's
// next SYN chooses again.
func refusedConnection(s Structure) []Rule {
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
