package dataplane

import (
	"net/netip"
	"time"
)

// Evidence counts what the kernel saw of a TCP endpoint at a frontend since the count began. Counts start anew if
// nothing was seen for some seconds.
type Evidence struct {
	Frontend Key
	Endpoint netip.AddrPort
	// Unanswered counts packets that clients sent again because the endpoint had not answered their first ones.
	Unanswered uint64
	// Refused counts connections that the endpoint refused.
	Refused uint64
}

// Pair is a client, and a TCP endpoint that accepted its connections some time ago: last in that long.
type Pair struct {
	Client   netip.Addr
	Endpoint netip.AddrPort
	Ago      time.Duration
}

// Answer says when a TCP endpoint last accepted a connection of this node, whoever opened it, at whatever frontend.
type Answer struct {
	Endpoint netip.AddrPort
	Ago      time.Duration
}
