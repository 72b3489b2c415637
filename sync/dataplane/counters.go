package dataplane

import (
	"net/netip"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// What the kernel counts. Backends read these plain values; commands and metrics show them.

// Counted identifies a frontend, or the part of its traffic, that is counted on its own.
type Counted struct {
	Key Key
	// Outside says that only clients from outside are counted. Some frontends have a pool of their own for them.
	Outside bool
}

// FrontendCount is the count of one frontend.
type FrontendCount struct {
	Counted
	// Endpoints is the number of endpoints in the pool, or of their slots if they have weights or a hash chooses. If it
	// is 0 and Scheduled is false, nobody answers, and Empty says what happens to the packet.
	Endpoints int
	// AtMost says that Endpoints is a bound: the pool has up to a fifth less.
	AtMost bool
	Empty  Verdict
	// Scheduled says that IPVS chooses the endpoint.
	Scheduled bool
	// Sticky says that the pool has session affinity.
	Sticky bool
	// Pool is the id of the frontend's pool. Other frontends may share it.
	Pool uint32
	// Uncounted says that the frontend has no counter, because counters would take too much memory. Packets is then 0.
	Uncounted bool
	// Indirect says that the kernel finds the pool in two steps: clients from outside have another, or source ranges
	// restrict who may use the frontend.
	Indirect bool
	// Packets counts new connections or, where nobody answers, every packet. It restarts at 0 when the backend rewrites
	// the frontend: when its Pool changes, and when its first endpoint comes or its last one goes. Ports with more than
	// MaxResetFrontends frontends are not rewritten in the latter case.
	Packets uint64
}

// MaxResetFrontends is how many frontends a port may have for its counts to restart when its first endpoint comes or
// its last one goes. Larger ports are not rewritten: the packets counted since the last reading are attributed to the
// new state.
const MaxResetFrontends = 64

// EndpointCount is the count of one endpoint.
type EndpointCount struct {
	// Counted is the frontend that the caller asked for.
	Counted
	Endpoint netip.AddrPort
	// Place distinguishes this count from others of the same endpoint.
	Place Place
	// Packets counts new connections at all frontends of the pool. It restarts at 0 when the backend rewrites the place.
	Packets uint64
}

// Place is where an endpoint is counted: in a slot of a pool or, if Sticky, as a member of a pool with session
// affinity.
type Place struct {
	Pool, Slot uint32
	Sticky     bool
}

// RefusedCount counts packets that got no endpoint, for one reason, whatever their destination.
type RefusedCount struct {
	Family  ipfamily.Family
	Refusal Refusal
	Packets uint64
}

// LimitCount counts the packets of a pool that were over a limit. The frontends count them, too, as all that were to
// get an endpoint.
type LimitCount struct {
	Family  ipfamily.Family
	Pool    uint32
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
	// RefusedUnusedPort: a port of a cluster IP, or of a load balancer address, that no Service has. It is rejected.
	RefusedUnusedPort
	// RefusedUnallocated: an address in a service range that no Service has. It is dropped.
	RefusedUnallocated
	// RefusedOvertaken: the Service changed between two lookups for the packet. It is dropped, and the client sends it
	// again.
	RefusedOvertaken
	// RefusedOverLimit and DroppedOverLimit: the Service has limits, and the connection is over one. It is rejected, or
	// dropped if the Service asks for that.
	RefusedOverLimit
	DroppedOverLimit
	// NumRefusals is how many there are.
	NumRefusals
)

var refusalNames = [NumRefusals]string{"no-endpoints", "no-local-endpoints", "source-ranges", "unused-port",
	"unallocated", "overtaken", "over-limit", "over-limit"}

func (r Refusal) String() string { return refusalNames[r] }

// Verdict says what happens to the packet.
func (r Refusal) Verdict() Verdict {
	if r == RefusedNoEndpoints || r == RefusedUnusedPort || r == RefusedOverLimit {
		return Reject
	}
	return Drop
}

// Increase returns what a counter has counted since an earlier reading. A counter that went down restarted at 0.
func Increase(before, now uint64) uint64 {
	if now < before {
		return now
	}
	return now - before
}
