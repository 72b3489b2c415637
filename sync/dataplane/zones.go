package dataplane

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"math"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// ZonePlan says how this node divides its connections to a port's cluster pool between zones. If all nodes do so, and
// each zone has the demand that the plan assumes, then every endpoint gets the share of its weight, and as many
// connections as possible stay in their zone: docs/decisions/0022-zones.md.
type ZonePlan struct {
	// Zone is this node's. Near is the part of its connections that stay there.
	Zone string
	Near float64
	// ByWeight says that the plan assumes no demand in this zone, so that its connections are divided by weight alone.
	ByWeight bool
	// Zones are sorted by name; the empty name stands for endpoints whose zone is unknown.
	Zones []ZoneShare
}

// ZoneShare is a zone in a ZonePlan. Each number is a part of that of all zones together.
type ZoneShare struct {
	Zone string
	// Capacity is the part of the weights of the endpoints, Demand the part of the connections that come from the zone,
	// and Share the part of this node's connections that go to the zone.
	Capacity, Demand, Share float64

	// parts and demand are the numbers that Capacity and Demand are parts of all of.
	parts, demand int64
}

// maxZoneSlots bounds the slots by which a pool is divided between zones: more do not fit into a weight.
const maxZoneSlots = math.MaxUint16

// preferNear sets the weights of a pool so that its connections stay in this node's zone as far as the endpoints there
// can carry their share. Endpoints that get none are removed. Nobody else may hold the pool yet. It does nothing unless
// the Service asks for it.
func (b *builder) preferNear(name PortName, p *Pool) {
	b.zonePlan = nil
	if len(p.Endpoints) == 0 || b.zonesIgnored() != "" {
		return
	}
	in := b.candidatesOf(p)
	plan := newZonePlan(b.host.zone, in, b.zoneDemand)
	b.zonePlan = plan
	parts := make([]uint32, len(in))
	for i := range in {
		parts[i] = in[i].parts
	}
	b.slowStart(p.Endpoints, parts) // which divides the share of a zone, and moves nothing to another
	counts := plan.divide(in, plan.shares(in, parts), b.zoneSlots(len(in)), nodeOffset(b.host.nodeName, name))
	kept, equal := p.Endpoints[:0], true
	for i, n := range counts {
		if n > 0 {
			ep := p.Endpoints[i]
			ep.Weight = uint16(n)
			kept = append(kept, ep)
			equal = equal && n == int(kept[0].Weight)
		}
	}
	p.Endpoints = kept
	if equal && b.scheduling == nil {
		for i := range p.Endpoints {
			p.Endpoints[i].Weight = 0
		}
	}
}

// zonesIgnored returns why this node does not prefer near endpoints of the port whose endpoints were collected; empty
// if it does.
func (b *builder) zonesIgnored() string {
	zoned := func(c candidate) bool { return c.Zone != "" && !c.drains() && (c.ready() || c.terminating()) }
	switch {
	case !b.nearAsked:
		return "it does not ask for it"
	case b.hashAsked:
		return "with a hash, all nodes choose from the same endpoints"
	case b.scheduling != nil && !slices.Contains(weightedSchedulers, b.scheduling.Scheduler):
		return "the scheduler " + b.scheduling.Scheduler + " does not choose by weight"
	case b.host.zone == "":
		return "this node's zone is unknown"
	case !slices.ContainsFunc(b.candidates, zoned):
		return "no endpoint's zone is known"
	}
	return ""
}

// candidatesOf returns the candidates that are in a pool, in its order.
func (b *builder) candidatesOf(p *Pool) []candidate {
	in := make([]candidate, 0, len(p.Endpoints))
	for i := range b.candidates { // both are sorted by address
		if len(in) < len(p.Endpoints) && b.candidates[i].addr == p.Endpoints[len(in)].AddrPort {
			in = append(in, b.candidates[i])
		}
	}
	return in
}

// zoneSlots returns how many slots a pool of n endpoints may be divided into: as many as nft grants to weights.
func (b *builder) zoneSlots(n int) int {
	return min(max(weightSlots, weightSlotsPerEndpoint*n), b.maxPerPort, maxZoneSlots)
}

// newZonePlan returns the plan of a node in a zone for the endpoints of a pool, none of which drains. A zone has the
// demand that is given, or 1 if there are endpoints in it; zones with neither, and the unknown zone, have none.
func newZonePlan(zone string, in []candidate, demand map[string]uint16) *ZonePlan {
	parts := map[string]int64{}
	for i := range in {
		parts[in[i].Zone] += int64(in[i].parts)
	}
	p := &ZonePlan{Zone: zone}
	for z, n := range parts {
		p.Zones = append(p.Zones, ZoneShare{Zone: z, parts: n})
	}
	for z := range demand {
		if parts[z] == 0 {
			p.Zones = append(p.Zones, ZoneShare{Zone: z})
		}
	}
	slices.SortFunc(p.Zones, func(a, b ZoneShare) int { return strings.Compare(a.Zone, b.Zone) })
	var capacity, all int64
	for i := range p.Zones {
		z := &p.Zones[i]
		n, named := demand[z.Zone]
		if z.demand = int64(n); !named && z.Zone != "" {
			z.demand = 1
		}
		capacity, all = capacity+z.parts, all+z.demand
	}
	p.share(capacity, all)
	return p
}

// share sets the shares, given the sums of all parts and of all demand. The products fit: there are at most 2^17
// endpoints with 2^23 parts, and the demand of all zones is below 2^23.
func (p *ZonePlan) share(capacity, all int64) {
	spare := func(z *ZoneShare) int64 { return z.parts*all - z.demand*capacity }
	var own *ZoneShare
	var spareOfAll int64
	for i := range p.Zones {
		z := &p.Zones[i]
		z.Capacity = float64(z.parts) / float64(capacity)
		z.Demand = float64(z.demand) / float64(max(all, 1))
		spareOfAll += max(spare(z), 0)
		if z.Zone == p.Zone {
			own = z
		}
	}
	p.ByWeight = own == nil || own.demand == 0
	if !p.ByWeight {
		p.Near = min(1, float64(own.parts*all)/float64(own.demand*capacity))
	}
	for i := range p.Zones {
		z := &p.Zones[i]
		switch {
		case p.ByWeight:
			z.Share = z.Capacity
		case z == own:
			z.Share = p.Near
		case p.Near < 1:
			z.Share = (1 - p.Near) * float64(max(spare(z), 0)) / float64(spareOfAll)
		}
	}
	if p.ByWeight && own != nil {
		p.Near = own.Share
	}
}

// divide returns how many of at most limit slots each endpoint gets by its share; 0 for endpoints without one. If so
// many slots are too few to be within 1 % of every share, then an endpoint gets a slot more or less than its share, and
// perhaps none: which ones depends on the offset, from 0 to 1. Over all offsets, each endpoint has exactly its share.
func (p *ZonePlan) divide(in []candidate, shares []float64, limit int, offset float64) []int {
	order := make([]int, len(in))
	for i := range in {
		order[i] = i
	}
	if counts := fewestCounts(shares, limit); counts != nil {
		return counts
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(in[i].Zone, in[j].Zone) })
	counts, sum, before := make([]int, len(in)), 0.0, 0
	for _, i := range order { // a zone at a time, so that each gets its share but for one slot
		sum += shares[i]
		upTo := int(sum*float64(limit) + offset)
		counts[i], before = upTo-before, upTo
	}
	return counts
}

// shares returns the part of this node's connections that each endpoint gets, if the share of a zone is divided in
// proportion to parts, one for each endpoint.
func (p *ZonePlan) shares(in []candidate, parts []uint32) []float64 {
	sums, byZone := map[string]float64{}, map[string]float64{}
	for i := range in {
		sums[in[i].Zone] += float64(parts[i])
	}
	for _, z := range p.Zones {
		byZone[z.Zone] = z.Share
	}
	shares := make([]float64, len(in))
	for i := range in {
		shares[i] = byZone[in[i].Zone] * float64(parts[i]) / sums[in[i].Zone]
	}
	return shares
}

// fewestCounts returns the smallest numbers in proportion to the shares, each within 1 %; nil if their sum would be
// above a limit.
func fewestCounts(shares []float64, limit int) []int {
	counts, least := make([]int, len(shares)), 0
	for _, s := range shares {
		if s > 0 {
			least++
		}
	}
	for slots := least; slots <= limit; slots += max(slots/16, 1) {
		fits := true
		for i, s := range shares {
			exact := s * float64(slots)
			counts[i] = int(math.Round(exact))
			fits = fits && math.Abs(float64(counts[i])-exact) <= exact/100
		}
		if fits {
			return counts
		}
	}
	return nil
}

// nodeOffset returns a number from 0 to 1 that differs between nodes and ports.
func nodeOffset(node string, port PortName) float64 {
	h := fnv.New64a()
	for _, s := range []string{node, port.Service.Namespace, port.Service.Name, port.Port} {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(s))))
		h.Write([]byte(s))
	}
	x := h.Sum64() // whose last bytes have hardly reached the upper half
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	return float64(x>>11) / (1 << 53)
}

// askForZones records whether a Service asks for near endpoints.
func (b *builder) askForZones(svc *snapshot.Service) {
	b.zonePlan, b.zoneDemand, b.nearAsked = nil, nil, false
	if svc.Scheduling != nil && svc.Backends == nil { // which have shares of their own
		b.nearAsked, b.zoneDemand = svc.Scheduling.PreferNear, svc.Scheduling.ZoneDemand
		b.hashAsked = hashOf(svc) != NoHash
	}
}
