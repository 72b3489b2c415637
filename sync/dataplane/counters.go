package dataplane

import (
	"net/netip"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
)

// What a kernel counts. These are plain values, for whoever shows them; a backend reads them.

// Counted is a frontend as far as one count goes.
type Counted struct {
	Key Key
	// Outside says that only clients from outside are counted: some frontends have an answer of their own for them.
	Outside bool
}

// FrontendCount is what was counted at a frontend.
type FrontendCount struct {
	Counted
	// Endpoints is of how many endpoints one was chosen. If it is 0 and not Scheduled, nobody answered, and Empty is what
	// happened to the packet.
	Endpoints int
	Empty     Verdict
	// Scheduled says that the packet was left to IPVS.
	Scheduled bool
	// Sticky says that clients are remembered.
	Sticky bool
	// Pool is the id of the pool that it leads to, which other frontends may share.
	Pool uint32
	// Uncounted says that nothing is counted here, since counters would take too much memory. Packets is 0 then.
	Uncounted bool
	// Packets counts new connections or, where nobody answers, every packet. It begins at 0 whenever the backend writes
	// the frontend anew, as it does if another Pool or nobody answers now, or nobody did; for the latter, ports with more
	// than MaxResetFrontends frontends are not written.
	Packets uint64
}

// MaxResetFrontends is how many frontends a port may have whose counts begin anew when its first endpoint comes, or its
// last one goes. With more, what was counted since the last reading is taken for what it would be now: so many elements
// are not worth it.
const MaxResetFrontends = 64

// EndpointCount is what was counted at one endpoint.
type EndpointCount struct {
	// Counted is the frontend that was asked for.
	Counted
	Endpoint netip.AddrPort
	// Place tells this count from others of the same endpoint.
	Place Place
	// Packets counts new connections, at all frontends of the pool. It begins at 0 whenever the backend writes the place
	// anew.
	Packets uint64
}

// Place is where an endpoint is counted: a slot of a pool or, if it is Sticky, as a member of one that remembers its
// clients.
type Place struct {
	Pool, Slot uint32
	Sticky     bool
}

// RefusedCount is what was counted of packets that got no endpoint, whatever they were sent to.
type RefusedCount struct {
	Family  ipfamily.Family
	Refusal Refusal
	Packets uint64
}

// Refusal is why a packet got no endpoint.
type Refusal uint8

// The refusals.
const (
	// RefusedNoEndpoints: a Service without endpoints. The packet is rejected.
	RefusedNoEndpoints Refusal = iota
	// RefusedNoLocalEndpoints: a traffic policy Local without an endpoint on this node, but on others. It is dropped.
	RefusedNoLocalEndpoints
	// RefusedSourceRanges: the client is in none of loadBalancerSourceRanges. It is dropped.
	RefusedSourceRanges
	// RefusedUnusedPort: a port of a cluster IP that no Service has. It is rejected.
	RefusedUnusedPort
	// RefusedUnallocated: an address in a service range that no Service has. It is dropped.
	RefusedUnallocated
	// NumRefusals is how many there are.
	NumRefusals
)

var refusalNames = [NumRefusals]string{"no-endpoints", "no-local-endpoints", "source-ranges", "unused-port", "unallocated"}

func (r Refusal) String() string { return refusalNames[r] }

// Verdict says what happens to the packet.
func (r Refusal) Verdict() Verdict {
	if r == RefusedNoEndpoints || r == RefusedUnusedPort {
		return Reject
	}
	return Drop
}
