package dataplane

import (
	"math"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Services with Backends are served by the endpoints of other Services. Each backend is a group of candidates: the
// rules of the Service choose from each group alone, and what they choose becomes one pool.

// referLimits bound to how many endpoints all Services of a namespace refer, in the form of the other budgets: to as
// many as one Service may have. Each endpoint may be referred to many times, by a line of YAML, and all of it is
// computed again when it changes. Tests make them smaller.
var referLimits = IPVS{Mode: IPVSAuto, MaxPerService: maxEndpoints, MaxPerNamespace: maxEndpoints}

// group is a backend of the port whose endpoints were collected.
type group struct {
	*snapshot.Backend
	// port is the port's name in the slices.
	port   string
	slices []*snapshot.Slice
	// unknown says why there is no such port; empty if there is.
	unknown string
	// share is what the pool that was merged last does with the backend's share.
	share ShareState
}

// ShareState says what becomes of a backend's share of connections.
type ShareState uint8

const (
	// ShareServed: its endpoints get it. A backend with the weight 0 has nothing to be served.
	ShareServed ShareState = iota
	// ShareRefused: it is refused.
	ShareRefused
	// ShareElsewhere: the policy is Local, and only other nodes have usable endpoints of the backend. The others of this
	// node get it.
	ShareElsewhere
)

// backing is what Services refer to.
type backing struct {
	// slices are sorted by name.
	slices []*snapshot.Slice
	// size is how many endpoints they have. Slices with none, or with many ports, count for what it takes to read them.
	size int
}

// backingOf returns what Services refer to by a name. It is the same until the snapshot changes.
func (b *builder) backingOf(n snapshot.Name) *backing {
	at := b.backings[n]
	if at != nil {
		return at
	}
	at = &backing{slices: sortedSlices(nil, b.in.Slices[n])}
	for _, sl := range at.slices {
		at.size += max(len(sl.Endpoints)+len(sl.Ports)/fewSlicePorts, 1)
	}
	if b.backings == nil {
		b.backings = map[snapshot.Name]*backing{}
	}
	b.backings[n] = at
	return at
}

// refer records to how many endpoints some Services refer, before any of them is computed: all that refer to too many
// together would take long. It returns the Services that get another answer than before.
func (b *builder) refer(s *snapshot.Snapshot, names []snapshot.Name) (flipped []snapshot.Name) {
	b.in, b.backings = s, nil
	for _, n := range names {
		svc := s.Services[n]
		if svc == nil || svc.Backends == nil {
			b.referred.forget(n)
			continue
		}
		cost := 0
		for to := range svc.Backends.Each() {
			cost++ // to look it up
			if to.Refused == "" {
				cost += max(b.backingOf(to.Service).size-1, 0)
			}
		}
		b.referred.admit(&referLimits, request{n, svc.Age, cost}, true)
	}
	return b.referred.balance(&referLimits)
}

// load makes ready what serves a Service: its slices, or its backends. The latter were given to refer.
func (b *builder) load(s *snapshot.Snapshot, svc *snapshot.Service) {
	b.in, b.backends, b.groups, b.tooFar = s, svc.Backends, b.groups[:0], false
	if svc.Backends == nil {
		b.loadSlices(svc, s.Slices[svc.Name])
		return
	}
	b.slices, b.index, b.overCapacity, b.maxPerPort = b.slices[:0], nil, false, maxEndpoints
	b.tooFar = b.referred.rejects(svc.Name)
}

// sortedSlices appends slices to a list, ordered by name, so that no answer depends on the order of a Go map.
func sortedSlices(list []*snapshot.Slice, of map[string]*snapshot.Slice) []*snapshot.Slice {
	for _, sl := range of {
		list = append(list, sl)
	}
	if len(list) > 1 {
		slices.SortFunc(list, func(x, y *snapshot.Slice) int { return strings.Compare(x.Name.Name, y.Name.Name) })
	}
	return list
}

// addGroups fills b.groups, and b.candidates with the endpoints of each, unsorted.
func (b *builder) addGroups(p *snapshot.Port, f ipfamily.Family) {
	b.groups = b.groups[:0]
	of := b.backends.Of(p.Name)
	if of == nil || b.tooFar {
		return
	}
	for i := range of.To {
		g := group{Backend: &of.To[i]}
		if g.port, g.unknown = b.in.PortOf(g.Backend, p.Protocol); g.unknown == "" {
			g.slices = b.backingOf(g.Service).slices
		}
		before := len(b.candidates)
		b.addNamed(g.slices, g.port, p.Protocol, f)
		for j := before; j < len(b.candidates); j++ {
			c := &b.candidates[j]
			if c.group = uint8(i); g.Weight == 0 {
				c.parts = 0
			}
		}
		b.groups = append(b.groups, g)
	}
}

// agreeOnNodes makes all candidates with an address local if one is: backends may have the same pod. They are sorted.
func (b *builder) agreeOnNodes() {
	for i := 0; i < len(b.candidates); {
		end, local := i, false
		for ; end < len(b.candidates) && b.candidates[end].addr == b.candidates[i].addr; end++ {
			local = local || b.candidates[end].local
		}
		for ; i < end; i++ {
			b.candidates[i].local = local
		}
	}
}

// filters are the filters of a pool, by group. There is one if a Service has no groups.
type filters []endpointFilter

// decide returns whether a candidate is in the pool, and why.
func (fs filters) decide(c *candidate) Reason { return fs[c.group].decide(c) }

// merged returns the pool of a port with backends. Of the connections, each group gets the share of its weight, and
// each endpoint the share of its parts in that. An address in several groups gets the sum.
func (b *builder) merged(fs filters) *Pool {
	sums, common := make([]uint64, len(b.groups)), make([]uint64, len(b.groups))
	usable := make([]bool, len(b.groups))
	n := 0
	for i := range b.candidates {
		c := &b.candidates[i]
		usable[c.group] = usable[c.group] || c.usable()
		if fs.decide(c).Included() {
			sums[c.group] += uint64(c.parts)
			common[c.group] = gcd(common[c.group], uint64(c.parts))
			n++
		}
	}
	refused, all := b.judgeShares(fs, sums, usable)
	if n == 0 {
		return poolNoEndpoints
	}
	units := b.units(sums, common)
	endpoints, shares := make([]Endpoint, 0, n), make([]float64, 0, n)
	for i := range b.candidates {
		c := &b.candidates[i]
		if !fs.decide(c).Included() {
			continue
		}
		share := units[c.group] * float64(uint64(c.parts)/common[c.group])
		if last := len(endpoints) - 1; last >= 0 && endpoints[last].AddrPort == c.addr {
			shares[last] += share
			continue
		}
		endpoints, shares = append(endpoints, Endpoint{AddrPort: c.addr, Local: c.local}), append(shares, share)
	}
	weighShares(endpoints, shares)
	return &Pool{Endpoints: endpoints, Refused: refusedPart(refused, all)}
}

// judgeShares decides what becomes of each group's share, given the sums of its parts in the pool. It returns the sum
// of all weights, and of those that are refused.
func (b *builder) judgeShares(fs filters, sums []uint64, usable []bool) (refused, all int) {
	for i := range b.groups {
		g := &b.groups[i]
		switch {
		case g.Weight == 0 || sums[i] > 0:
			g.share = ShareServed
		case fs[i].local && usable[i]:
			g.share = ShareElsewhere
			continue
		default:
			g.share = ShareRefused
			refused += int(g.Weight)
		}
		all += int(g.Weight)
	}
	return refused, all
}

// refusedPart returns the part of RefusedOf that is refused. Some weight is not.
func refusedPart(refused, all int) uint16 {
	if refused == 0 {
		return 0
	}
	return uint16(min(max((refused*RefusedOf+all/2)/all, 1), RefusedOf-1))
}

// maxExact is up to where a float64 holds every integer.
const maxExact = 1 << 53

// units returns the share of the common divisor of the parts in each group, given their sums: integers, as long as they
// are small enough to be exact.
func (b *builder) units(sums, common []uint64) []float64 {
	whole := uint64(1)
	for i, sum := range sums {
		if sum == 0 {
			continue
		}
		n, w := sum/common[i], uint64(b.groups[i].Weight)
		n /= gcd(n, w)
		if n /= gcd(n, whole); n > math.MaxUint32/whole {
			whole = 1 // and the shares are fractions
			break
		}
		whole *= n
	}
	units := make([]float64, len(sums))
	for i, sum := range sums {
		if sum > 0 {
			units[i] = float64(b.groups[i].Weight) * float64(whole) / float64(sum/common[i])
		}
	}
	return units
}

// weighShares sets the weights of endpoints in proportion to their shares, exactly if a weight can hold that. Equal
// shares are no weights.
func weighShares(endpoints []Endpoint, shares []float64) {
	most := slices.Max(shares)
	by, exact := uint64(0), most < maxExact
	for _, s := range shares {
		exact = exact && s == math.Trunc(s)
		if exact {
			by = gcd(by, uint64(s))
		}
	}
	scale := math.MaxUint16 / most
	if exact && most/float64(by) <= math.MaxUint16 {
		scale = 1 / float64(by)
	}
	if slices.Min(shares) == most {
		return
	}
	for i, s := range shares {
		endpoints[i].Weight = uint16(max(math.Round(s*scale), 1))
	}
}

// gcd returns the greatest common divisor. That of 0 and n is n.
func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// BackendShare is what becomes of a backend of the port that answers.
type BackendShare struct {
	*snapshot.Backend
	State ShareState
	// Unknown says why a share is refused although nothing is known of endpoints; empty if that is why it is refused.
	Unknown string
}

// shares returns what the pool that was merged last does with each backend.
func (b *builder) shares() (list []BackendShare) {
	for i := range b.groups {
		list = append(list, BackendShare{b.groups[i].Backend, b.groups[i].share, b.groups[i].unknown})
	}
	return list
}
