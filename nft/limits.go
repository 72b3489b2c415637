package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Limit is a limit of packets: so many in a second, and as many at once as Burst says. The zero value is none.
type Limit struct {
	Rate, Burst uint32
	// Over matches the packets that are over it, instead of those within.
	Over bool
}

// NoLimit is the limit of a set of limits: that of an element without one of its own, of which there is none.
// nft 1.0.6 lists no burst of 5.
var NoLimit = Limit{Rate: 1, Burst: 1, Over: true}

// String writes it as nft does.
func (l Limit) String() string {
	over := ""
	if l.Over {
		over = "over "
	}
	return fmt.Sprintf("limit rate %s%d/second burst %d packets", over, l.Rate, l.Burst)
}

// ClientsSize is how many clients may have a limit of their own at a time, of all pools together. ClientBuckets is in
// how many buckets those of a pool are for which there is no room then. A client is forgotten after ClientMemory
// without a packet, when its limit has long recovered.
const (
	ClientsSize   = 65536
	ClientBuckets = 1024
	ClientMemory  = 20 * time.Second
)

// limitedSets are those of limits.
func limitedSets() []Set {
	return []Set{
		{ID: RateLimits, Key: []Field{Priority}, Limit: true, Comment: "pools that limit the rate of new connections"},
		{ID: LimitedPools, Key: []Field{Priority}, Counter: true, Comment: "pools with limits: what was over them"},
		{ID: DroppingPools, Key: []Field{Priority}, Comment: "pools with limits that drop what is over them"},
		numberSet(ClientLimits, "pools that limit each client : which limit, and the pool"),
		verdictSet(ClientRates, "limit : where clients have it"),
		{ID: LimitedClients, Key: []Field{Priority, SourceAddr}, Dynamic: true, Size: ClientsSize,
			Comment: "pool . client : each has its own limit"},
		{ID: LimitedBuckets, Key: []Field{Priority, RandomSlot}, Dynamic: true, Size: ClientsSize,
			Comment: "pool . bucket of clients for which there is no room : they share a limit"},
		{ID: FullPools, Key: []Field{Priority}, Comment: "pools with as many open connections as they may have"},
		{ID: FullClients, Key: []Field{Priority, SourceAddr},
			Comment: "pool . client : clients with as many open connections as they may have"},
	}
}

// overLimit refuses the connections that are over a limit, which it counts for each pool.
func overLimit() Chain {
	return Chain{ID: OverLimit.id(), Comment: "connections over the limits of their pool", Rules: append([]Rule{
		{StripClass{}}, // which is the limit of the client
		{SetLookup{Key: wholeKey, Set: LimitedPools}},
		{SetLookup{Key: wholeKey, Set: DroppingPools}, Counter{}, Drop{}},
	}, refuse(Counter{})...)}
}

// clientLimit limits each client of a pool, of which the priority has the number below that of the limit. Both are in
// the key, so that nobody keeps a limit that the pool has no longer. While there is no room for more clients, those
// that come share limits.
func clientLimit(n uint32) []Rule {
	rate := snapshot.ClientRates[n/uint32(len(snapshot.ClientBursts))]
	limit := Limit{Rate: rate, Burst: rate * snapshot.ClientBursts[n%uint32(len(snapshot.ClientBursts))], Over: true}
	client := Concat{Fields: []Field{Priority, SourceAddr}}
	bucket := Concat{Fields: []Field{Priority, SourceBucket}, Mod: ClientBuckets}
	return []Rule{
		{Update{Map: LimitedClients, Key: client, Timeout: ClientMemory, Limit: limit}, Goto{OverLimit.id()}},
		{SetLookup{Key: client, Not: true, Set: LimitedClients},
			Update{Map: LimitedBuckets, Key: bucket, Timeout: ClientMemory, Limit: limit}, Goto{OverLimit.id()}},
		{StripClass{}, Goto{RatedPool.id()}},
	}
}

// clientLimitOf is the number of a limit of clients.
func clientLimitOf(l snapshot.RateLimit) uint32 {
	return uint32(slices.Index(snapshot.ClientRates[:], l.Rate)*len(snapshot.ClientBursts) +
		slices.Index(snapshot.ClientBursts[:], l.Burst/l.Rate))
}

// limitSets are the sets of limits.
var limitSets = [...]SetID{LimitedPools, DroppingPools, RateLimits, ClientLimits, FullPools}

// limited reports whether a pool has limits.
func (p *port) limited(i poolIndex) bool {
	return p.limits != (snapshot.Limits{}) && p.pools[i].used && p.pools[i].verdict == NoChain
}

// limitElements returns the elements of a pool's limits, each in another set.
func (p *port) limitElements(i poolIndex) (list []Element) {
	if !p.limited(i) {
		return nil
	}
	id := p.pools[i].id
	list = append(list, idElement(LimitedPools, id))
	if p.limits.Drop {
		list = append(list, idElement(DroppingPools, id))
	}
	if r := p.limits.Rate; r.Rate > 0 {
		list = append(list, rateElement(id, Limit{Rate: r.Rate, Burst: r.Burst}))
	}
	if p.limits.Client.Rate > 0 {
		e := idElement(ClientLimits, id)
		e.setID(clientLimitOf(p.limits.Client)<<poolBits | id)
		list = append(list, e)
	}
	if p.full {
		list = append(list, idElement(FullPools, id))
	}
	for n := range list {
		list[n].Comment = p.comment
	}
	return list
}

// limitLen is the length of a limit as the data of an element: the rate, then the burst.
const limitLen = 8

// rateElement gives the element that limits the connections of a pool.
func rateElement(id uint32, l Limit) Element {
	e := idElement(RateLimits, id)
	e.DataLen = uint8(copy(e.data[:], l.Data()))
	return e
}

// Data gives a limit as the data of an element of RateLimits has it.
func (l Limit) Data() []byte {
	return binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, l.Rate), l.Burst)
}

// Limit gives the limit that an element of RateLimits has: a whole one in a second. The zero value means that it is
// known by its key alone.
func (e *Element) Limit() Limit {
	if e.DataLen != limitLen {
		return Limit{}
	}
	return Limit{Rate: binary.NativeEndian.Uint32(e.data[:4]), Burst: binary.NativeEndian.Uint32(e.data[4:]), Over: true}
}

// limits plans the change of the limits of a pool.
func (p *planner) limits(f ipfamily.Family, old, want *port, i poolIndex) {
	before, now := old.limitElements(i), want.limitElements(i)
	in := func(list []Element, set SetID) int {
		return slices.IndexFunc(list, func(e Element) bool { return e.Set == set })
	}
	for _, set := range limitSets {
		b, n := in(before, set), in(now, set)
		p.element(f, b >= 0, n >= 0, func() Element { return before[b] }, func() Element { return now[n] })
	}
	gone, come := old.fullClientsOf(i), want.fullClientsOf(i)
	for _, a := range without(gone, come) {
		p.del(f, old.clientElement(i, a))
	}
	for _, a := range without(come, gone) {
		p.add(f, want.clientElement(i, a))
	}
}

// fullClientsOf returns the clients that may open no more connections to a pool.
func (p *port) fullClientsOf(i poolIndex) []netip.Addr {
	if !p.limited(i) {
		return nil
	}
	return p.fullClients
}

// clientElement refuses a client of a pool.
func (p *port) clientElement(i poolIndex, client netip.Addr) Element {
	e := idElement(FullClients, p.pools[i].id)
	e.addKeyAddr(client)
	e.Comment = p.comment
	return e
}

// otherClients returns how many elements differ at most if two versions of a port have other clients that are full.
func (p *port) otherClients(o *port) int {
	return int(numPools) * (len(without(p.fullClients, o.fullClients)) + len(without(o.fullClients, p.fullClients)))
}

// without returns the addresses of a sorted list that another one does not have.
func without(list, other []netip.Addr) (out []netip.Addr) {
	for _, a := range list {
		if _, held := slices.BinarySearchFunc(other, a, netip.Addr.Compare); !held {
			out = append(out, a)
		}
	}
	return out
}
