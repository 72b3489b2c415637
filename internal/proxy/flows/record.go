// Package flows records connections to Services: who connected, to which endpoint, how much was sent each way, and how
// the connection ended. The recorder reads ends from connection tracking; the book keeps the last records and sums.
package flows

import (
	"net/netip"
	"time"
)

// Record is one connection to a Service, or one that was rejected or dropped.
type Record struct {
	// Time is when the connection ended or was rejected; for an open one, when it was last looked at.
	Time time.Time `json:"time"`
	// Service is "namespace/name", and Port the name of its port; empty for an unnamed one.
	Service string `json:"service"`
	Port    string `json:"port,omitempty"`
	// For names what asked for the Service's backends, as "Gateway edge/db"; empty if nobody said.
	For string `json:"for,omitempty"`
	// Protocol is "TCP", "UDP" or "SCTP".
	Protocol string `json:"protocol"`
	// Frontend is what the client connected to.
	Frontend netip.AddrPort `json:"frontend"`
	Client   Peer           `json:"client"`
	// Endpoint is zero if the connection was rejected or dropped.
	Endpoint Peer `json:"endpoint,omitzero"`
	// Sent is what the client sent, Received what it received. Both are zero if the kernel counted nothing.
	Sent     Traffic `json:"sent"`
	Received Traffic `json:"received"`
	// Seconds is how long the connection lived, without the kernel's wait after its last packet. 0 if it is not known.
	Seconds float64 `json:"seconds,omitempty"`
	End     End     `json:"end"`
	// Reason says more of some ends: the chain that rejected or dropped, as "no-endpoints".
	Reason string `json:"reason,omitempty"`
	// Since, if set, says that the connection is older than the recorder, which saw it first at that time: Sent and
	// Received count from about then on.
	Since time.Time `json:"since,omitzero"`
	// Weight is how many records this one stands for: 1, or more if records were sampled.
	Weight uint32 `json:"weight"`
	// counted is what sums already have of Sent and Received.
	counted [2]Traffic
}

// Peer is one side of a connection. The names are empty if they are not known.
type Peer struct {
	// Addr is zero, and Prefix set, if the configuration cuts addresses of clients outside the cluster.
	Addr   netip.AddrPort `json:"address,omitzero"`
	Prefix netip.Prefix   `json:"prefix,omitzero"`
	// Pod is "namespace/name", and Workload "namespace/name" of what owns the pod, as a Deployment.
	Pod      string `json:"pod,omitempty"`
	Workload string `json:"workload,omitempty"`
	Node     string `json:"node,omitempty"`
	Zone     string `json:"zone,omitempty"`
}

// Traffic is what was sent one way. Bytes are those of IP packets, headers included.
type Traffic struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// End is how a connection ended.
type End string

// The ends. Record.Failure says which of them are failures.
const (
	Open            End = "open"
	Closed          End = "closed"
	ResetByClient   End = "reset by client"
	ResetByEndpoint End = "reset by endpoint"
	// Reset is a reset by a side that is not known.
	Reset End = "reset"
	// TimedOut is the end of an established connection of TCP that was silent for too long. Connections of UDP end as
	// Expired.
	TimedOut End = "timed out"
	Expired  End = "expired"
	// Unanswered means that the endpoint never sent a packet, Refused that it refused the connection.
	Unanswered End = "unanswered"
	Refused    End = "refused by endpoint"
	// Released means that the proxy ended a connection to an endpoint that was gone, Ejected one to an endpoint that it
	// had ejected.
	Released End = "released"
	Ejected  End = "ejected"
	// Rejected and Dropped are packets that no endpoint got: the rules rejected or dropped them.
	Rejected End = "rejected"
	Dropped  End = "dropped"
)

// Failure says whether the connection failed. An unanswered one of UDP did not: many protocols answer nothing. Nor did
// one that the proxy ended before its endpoint answered: the client's next packet began anew.
func (r *Record) Failure() bool {
	switch r.End {
	case Open, Closed, Expired, ResetByClient:
		return false
	case Unanswered:
		return r.Protocol != "UDP"
	case Released, Ejected:
		return r.Sent.Packets == 0 || r.Received.Packets > 0
	}
	return true
}

// Sum is what the connections of one minute with the same ends in common amount to.
type Sum struct {
	// Minute is the beginning of the minute.
	Minute time.Time `json:"minute"`
	// Client is the workload, or the prefix or address of a client that is no pod's; "others" for the clients that there
	// was no room for.
	Client     string `json:"client"`
	ClientZone string `json:"clientZone,omitempty"`
	Service    string `json:"service"`
	Port       string `json:"port,omitempty"`
	// Endpoint is the pod or address.
	Endpoint     string `json:"endpoint,omitempty"`
	EndpointZone string `json:"endpointZone,omitempty"`
	// Connections counts those that ended, Failures those of them that failed. Open counts those that were open at the
	// last look of the minute.
	Connections uint64  `json:"connections"`
	Failures    uint64  `json:"failures"`
	Open        uint64  `json:"open"`
	Sent        Traffic `json:"sent"`
	Received    Traffic `json:"received"`
}

// Losses says what records and sums miss since the recorder started.
type Losses struct {
	// Events are ends that the kernel had no room for.
	Events uint64 `json:"events"`
	// Refusals are rejected or dropped packets that it had no room for. Those beyond what a rule logs in a second
	// (nft.RecordsRate) are in the rules' counters alone.
	Refusals uint64 `json:"refusals"`
	// Sampled are records that were left out of the list, but not of the sums.
	Sampled uint64 `json:"sampled"`
	// Unread are records that a reader which follows did not take in time; other readers have 0.
	Unread uint64 `json:"unread,omitempty"`
}

// Answer is what a node says to the question for its records: the first line of its JSON lines. Records follow, one a
// line, in the order in which the node learned of them, or Sums, the oldest minute first.
type Answer struct {
	Node string `json:"node"`
	// Started is when the recorder started.
	Started time.Time `json:"started"`
	Losses  Losses    `json:"losses"`
	// Left are lines that were asked for and did not fit the answer: the oldest.
	Left uint64 `json:"left,omitempty"`
}
