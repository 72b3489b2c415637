package dataplane

import "net/netip"

// Evidence counts what the kernel saw of a TCP endpoint since the count began. Counts start anew if nothing was seen
// for some seconds.
type Evidence struct {
	Endpoint netip.AddrPort
	// Unanswered counts packets that clients sent again because the endpoint had not answered their first ones.
	Unanswered uint64
	// Refused counts connections that the endpoint refused.
	Refused uint64
}
