// Package ipvsplugin makes IPVS choose the endpoints of Services that ask for it. It only schedules: the backend that
// it wraps decides who is served, masquerades, rejects and drops, and leaves packets to such frontends alone.
// docs/decisions/0011-ipvs.md describes how both work together.
//
// The plugin marks everything that it makes in the kernel, so that a new process finds it: virtual services by bits in
// their flags, routes by their protocol, tables by their name. It changes nothing else.
package ipvsplugin

import (
	"net/netip"
	"time"

	"github.com/moby/ipvs"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// The flags of a virtual service that are of use here: include/uapi/linux/ip_vs.h.
const (
	// Persistent keeps clients at their destination.
	Persistent uint32 = 0x1
	// SchedFallback is sh-fallback and mh-fallback; SchedPort is sh-port and mh-port.
	SchedFallback uint32 = 0x8
	SchedPort     uint32 = 0x10

	// flagMask has the bits that we decide about; the kernel has one of its own, 0x2, for services that are in its table.
	flagMask = 0x1 | 0x4 | SchedFallback | SchedPort | 0x20 | ownMask
	// A virtual service of ours carries ownFlag. The kernel keeps bits that it has no meaning for, and lists them.
	ownFlag uint32 = 0x5644_0000
	ownMask uint32 = 0xffff_0000
)

// VirtualService is a frontend that IPVS schedules.
type VirtualService struct {
	Key dataplane.Key
	// Kind is the frontend's. Of a virtual service that was read from the kernel it is unknown, and 0.
	Kind dataplane.Kind
	// Service is the port that asks for it; zero if it was read from the kernel.
	Service dataplane.PortName
	Config
	// Destinations are sorted by address and unique.
	Destinations []Destination
}

// Config is how a virtual service schedules.
type Config struct {
	// Scheduler is the kernel's name, such as "lc".
	Scheduler string
	// Flags are Persistent, SchedFallback and SchedPort.
	Flags uint32
	// Timeout is how long a client stays with its destination after its last connection, in seconds, if Flags has
	// Persistent.
	Timeout uint32
}

// Destination is an endpoint of a virtual service.
type Destination struct {
	netip.AddrPort
	// Weight is 0 while the destination drains: it gets no new connections, and keeps those it has.
	Weight uint32
	// Until is when a destination that drains is given up, in seconds since 1970; 0 for one that is in use. It is stored
	// as the destination's upper threshold, a number of connections that is never reached, so that the next process
	// knows it.
	Until uint32
}

// Options are the operator's settings. The zero value is valid.
type Options struct {
	// DrainLimit is how long a destination may drain; 0 means DefaultDrainLimit. Whole seconds count.
	DrainLimit time.Duration
	// NodeAddrs returns the node's addresses, best first. Connections of the node itself to a Service come from the
	// first that is on this host. If it is nil or returns none on this host, the host's first global address of the
	// family is used.
	NodeAddrs func() []netip.Addr
	// Adopt is called with a virtual service of somebody else at a key that a Service needs. If it returns true, the
	// virtual service becomes ours with its connections, for example when Verdict takes over from kube-proxy. If it
	// returns false or is nil, the Service is rejected and the virtual service stays untouched.
	Adopt func(VirtualService) bool
	// Yield is called with the key of a virtual service of ours whose mark somebody else has removed. If it returns true,
	// the virtual service is that program's from now on, with its connections, for example when a kube-proxy takes over
	// from Verdict. If it returns false or is nil, a virtual service with the same destinations gets the mark again.
	// Remove calls it with those of others: if it returns true for one, the kernel's parameters stay as they are.
	Yield func(dataplane.Key) bool
	// Timeouts replace those of the kernel that are not 0 here.
	Timeouts Timeouts
}

// DefaultDrainLimit is how long a removed endpoint may keep its connections.
const DefaultDrainLimit = time.Hour

// Timeouts are how long IPVS remembers connections without packets, in whole seconds; 0 keeps the kernel's value.
type Timeouts = ipvs.Config
