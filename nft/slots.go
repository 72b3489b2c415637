package nft

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// A pool has a slot for each endpoint, unless it has weights or its choice is a hash. With weights, an endpoint has as
// many slots as its share asks for. With a hash, the slots are a Maglev table: a deterministic function of the pool's
// name and of its endpoints with their numbers of slots, the same on all nodes.

// maxServiceSlots bounds the slots of all ports of a Service in one family; the ports share it equally. It is as many
// as a Service may have endpoints. Tests make it smaller.
var maxServiceSlots = 1 << 17

const (
	// enoughSlots is how many slots a pool with weights may have in any case, and slotsPerEndpoint what it may have for
	// each endpoint beyond that.
	enoughSlots      = 1024
	slotsPerEndpoint = 4
	// maxError is the part of a share, as one of so many, by which rounding to slots may change it, if the pool may have
	// the slots for that.
	maxError = 100
)

// hashSizes are the sizes of Maglev tables: primes, so that every stride visits every slot.
var hashSizes = [...]int{61, 127, 251, 509, 1021, 2039, 4093, 16381}

const (
	// usualHashSize is the size of most Maglev tables: with another size, nearly all clients move. It is large enough that
	// hardly any client of other endpoints moves when one of ten goes.
	usualHashSize = 4093
	// hashSlotsPerEndpoint is how many slots of a Maglev table there are for each endpoint, if there is a table of that
	// size.
	hashSlotsPerEndpoint = 100
)

// hashSize returns the size of the Maglev table for n endpoints, within a limit; 0 if none is large enough.
func hashSize(n, limit int) int {
	want, size := max(hashSlotsPerEndpoint*n, usualHashSize), 0
	for _, s := range hashSizes {
		if s <= limit && s >= n && size < want {
			size = s
		}
	}
	return size
}

// reduced returns the weights of endpoints without their common divisor. equal says that they are all 1.
func reduced(endpoints []dataplane.Endpoint) (weights []int, equal bool) {
	weights = make([]int, len(endpoints))
	divisor := 0
	for i := range endpoints {
		weights[i] = max(int(endpoints[i].Weight), 1)
		for a, b := weights[i], divisor; ; a, b = b, a%b {
			if b == 0 {
				divisor = a
				break
			}
		}
	}
	equal = true
	for i := range weights {
		weights[i] /= divisor
		equal = equal && weights[i] == 1
	}
	return weights, equal
}

// slotCounts returns how many of the fewest slots that represent the weights well enough each endpoint gets. There are
// at most limit, or one for each endpoint.
func slotCounts(weights []int, limit int) []int {
	sum, n := 0, len(weights)
	for _, w := range weights {
		sum += w
	}
	limit = slotsFor(n, limit)
	for slots := n; slots < min(sum, limit); slots += max(slots/16, 1) {
		if counts := apportion(weights, sum, slots); closeTo(counts, weights, sum, slots) {
			return counts
		}
	}
	return apportion(weights, sum, min(sum, limit))
}

// closeTo reports whether no share of the slots differs from that of the weights by more than maxError.
func closeTo(counts, weights []int, sum, slots int) bool {
	for i, n := range counts {
		want := weights[i] * slots
		if off := n*sum - want; max(off, -off)*maxError > want {
			return false
		}
	}
	return true
}

// apportion divides slots, of which there are at least as many as weights, by the largest remainder. Everybody gets at
// least one.
func apportion(weights []int, sum, slots int) []int {
	counts, order, left := make([]int, len(weights)), make([]int, len(weights)), slots
	over := func(i int) int { return counts[i]*sum - weights[i]*slots } // how far it is above its share
	for i, w := range weights {
		order[i], counts[i] = i, max(w*slots/sum, 1)
		left -= counts[i]
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Or(cmp.Compare(over(a), over(b)), cmp.Compare(a, b)) })
	for i := 0; left > 0; i, left = i+1, left-1 { // fewer than there are weights
		counts[order[i]]++
	}
	for left < 0 { // as those who got one had a share of less
		most := 0
		for i := range counts {
			if counts[i] > 1 && (counts[most] == 1 || over(i) > over(most)) {
				most = i
			}
		}
		counts[most]--
		left++
	}
	return counts
}

// repeat returns each endpoint as often as it has slots.
func repeat(endpoints []dataplane.Endpoint, counts []int) []netip.AddrPort {
	var slots []netip.AddrPort
	for i := range endpoints {
		for range counts[i] {
			slots = append(slots, endpoints[i].AddrPort)
		}
	}
	return slots
}

// maglev returns a table in which each endpoint has its number of slots.
func maglev(name poolID, endpoints []dataplane.Endpoint, counts []int) []netip.AddrPort {
	seed, hashes := name.hash(), make([]uint64, len(endpoints))
	for i := range endpoints {
		hashes[i] = endpointHash(seed, endpoints[i].AddrPort)
	}
	places := maglevTable(hashes, counts)
	table := make([]netip.AddrPort, len(places))
	for slot, i := range places {
		table[slot] = endpoints[i].AddrPort
	}
	return table
}

// maglevTable returns a table in which each of those with these hashes has its number of slots, by its place. Each
// prefers the slots in an order of its own, and they take turns, in proportion to their numbers. So hardly any slot
// changes that belongs to one which stays.
func maglevTable(hashes []uint64, counts []int) []int {
	size, most := 0, 0
	for _, n := range counts {
		size, most = size+n, max(most, n)
	}
	table := make([]int, size)
	for i := range table {
		table[i] = -1
	}
	at, stride, taken := make([]int, len(counts)), make([]int, len(counts)), make([]int, len(counts))
	for i, h := range hashes {
		at[i], stride[i] = int(h>>32%uint64(size)), 1+int(h&0xffffffff%uint64(max(size-1, 1)))
	}
	for turn := 1; turn <= most; turn++ {
		for i := range counts {
			if taken[i] >= (counts[i]*turn+most-1)/most {
				continue
			}
			for table[at[i]] >= 0 {
				at[i] = (at[i] + stride[i]) % size
			}
			table[at[i]] = i
			taken[i]++
		}
	}
	return table
}

// fill gives a pool its slots, of which there are at most limit unless it has more endpoints.
func (pl *pool) fill(name poolID, endpoints []dataplane.Endpoint, hash dataplane.Hash, limit int) {
	weights, equal := reduced(endpoints)
	size := 0
	if hash != dataplane.NoHash && len(endpoints) > 1 {
		size = hashSize(len(endpoints), limit)
	}
	switch {
	case size > 0:
		sum := 0
		for _, w := range weights {
			sum += w
		}
		pl.hash, pl.repeats = hash, true
		pl.slots = maglev(name, endpoints, apportion(weights, sum, size))
	case !equal:
		pl.repeats, pl.slots = true, repeat(endpoints, slotCounts(weights, limit))
	default:
		pl.slots = make([]netip.AddrPort, len(endpoints))
		for i := range endpoints {
			pl.slots[i] = endpoints[i].AddrPort
		}
	}
}

// slotLimits returns how many slots each pool of a Service may have, by family.
func slotLimits(s *dataplane.Service) (limits ipfamily.Per[int]) {
	var ports ipfamily.Per[int]
	for _, sp := range s.Ports {
		ports[ipfamily.Of(sp.Frontends[0].Key.Addr)]++
	}
	for f, n := range ports {
		limits[f] = maxServiceSlots / max(n, 1)
	}
	return limits
}

// mostSlots returns how many slots fill gives a pool at most.
func mostSlots(p *dataplane.Pool, hash dataplane.Hash, limit int) int {
	n := len(p.Endpoints)
	if hash != dataplane.NoHash && n > 1 {
		if size := hashSize(n, limit); size > 0 {
			return size
		}
	}
	if !slices.ContainsFunc(p.Endpoints, func(e dataplane.Endpoint) bool { return e.Weight != p.Endpoints[0].Weight }) {
		return n
	}
	sum := 0
	weights, _ := reduced(p.Endpoints)
	for _, w := range weights {
		sum += w
	}
	return min(sum, slotsFor(n, limit))
}

// slotsFor returns how many slots n endpoints with weights may have, within a limit.
func slotsFor(n, limit int) int { return max(min(limit, max(enoughSlots, slotsPerEndpoint*n)), n) }

// members returns the endpoints of a pool, each once: sorted if they have several slots each.
func (pl *pool) members() []netip.AddrPort {
	if !pl.repeats {
		return pl.slots
	}
	members := slices.Clone(pl.slots)
	slices.SortFunc(members, netip.AddrPort.Compare)
	return slices.Compact(members)
}

// assigned returns the slots of a pool, given those that it had in the kernel.
func (pl *pool) assigned(before []netip.AddrPort) []netip.AddrPort {
	if pl.hash != dataplane.NoHash {
		return pl.slots
	}
	return assign(before, pl.slots)
}

// anySlot reports whether an endpoint may have any of several slots: with a hash, each has those of the Maglev table.
func (pl *pool) anySlot() bool { return len(pl.slots) > 1 && pl.hash == dataplane.NoHash }

// sortSlots sorts the slots of a pool in which an endpoint may have any, as they are compiled.
func (pl *pool) sortSlots() {
	if pl.anySlot() {
		slices.SortFunc(pl.slots, netip.AddrPort.Compare)
	}
}

// endpointHash returns a hash of an endpoint that does not depend on the node.
func endpointHash(seed uint64, ep netip.AddrPort) uint64 {
	return mixedHash(seed, binary.BigEndian.AppendUint16(ep.Addr().AsSlice(), ep.Port()))
}

func fnvOf(parts ...[]byte) uint64 {
	h := fnv.New64a()
	for _, b := range parts {
		h.Write(b)
	}
	return h.Sum64()
}
