package nft

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// weighted gives endpoints with weights, sorted by address.
func weighted(weights ...int) []dataplane.Endpoint {
	out := make([]dataplane.Endpoint, len(weights))
	for i, w := range weights {
		a := netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)})
		out[i] = dataplane.Endpoint{AddrPort: netip.AddrPortFrom(a, 8080), Weight: uint16(w)}
	}
	return out
}

func times(n, w int) []int { return slices.Repeat([]int{w}, n) }

var somePool = poolID{port: portID{name: dataplane.PortName{Service: snapshot.Name{Namespace: "default", Name: "web"},
	Protocol: snapshot.TCP}, family: ipfamily.IPv4}}

// TestSlotsOfWeights: who has equal weights has one slot each, in order, and small weights are exact.
func TestSlotsOfWeights(t *testing.T) {
	for _, c := range []struct{ weights, counts []int }{
		{[]int{0, 0, 0}, []int{1, 1, 1}},
		{[]int{1, 1, 1}, []int{1, 1, 1}},
		{[]int{7, 7, 7}, []int{1, 1, 1}},
		{[]int{3, 1}, []int{3, 1}},
		{[]int{300, 100}, []int{3, 1}},
		{[]int{100, 1}, []int{100, 1}},
		{[]int{65535}, []int{1}},
		{[]int{65535, 1}, []int{1023, 1}},
	} {
		var p pool
		p.fill(somePool, weighted(c.weights...), dataplane.NoHash, 1<<17)
		counts := map[netip.AddrPort]int{}
		for _, ep := range p.slots {
			counts[ep]++
		}
		for i, ep := range weighted(c.weights...) {
			if counts[ep.AddrPort] != c.counts[i] {
				t.Errorf("weights %v: endpoint %d has %d slots of %d, want %d", c.weights, i, counts[ep.AddrPort],
					len(p.slots), c.counts[i])
			}
		}
		if !slices.IsSortedFunc(p.slots, netip.AddrPort.Compare) {
			t.Errorf("weights %v: slots %v", c.weights, p.slots)
		}
	}
}

// FuzzSlotCounts: the slots of a pool are as many as were divided; everybody has one; nobody is more than one slot away
// from its share, but for those that gave one to somebody who had a share of less; there are no more than allowed; and
// unless that is too few, no share is off by more than 1 %.
func FuzzSlotCounts(f *testing.F) {
	for seed := range uint64(300) {
		f.Add(seed, uint16(1<<(seed%14)), seed%3 == 0)
	}
	f.Fuzz(func(t *testing.T, seed uint64, limit uint16, extreme bool) {
		r := rand.New(rand.NewPCG(seed, 6))
		eps := weighted(times(1+r.IntN(40), 1)...)
		for i := range eps {
			if eps[i].Weight = uint16(1 + r.IntN(1+r.IntN(200))); extreme && r.IntN(4) == 0 {
				eps[i].Weight = uint16(1 + r.IntN(65535))
			}
		}
		weights, equal := reduced(eps)
		counts := slotCounts(weights, int(limit))
		sum, slots, small := 0, 0, 0
		for i, w := range weights {
			sum, slots = sum+w, slots+counts[i]
		}
		for i, w := range weights {
			if w*slots < sum {
				small++
			}
			if counts[i] < 1 {
				t.Fatalf("%v: %v", weights, counts)
			}
		}
		if most := max(min(int(limit), enoughSlots), len(eps)); slots > most || equal && slots != len(eps) {
			t.Fatalf("%v: %d slots, limit %d", weights, slots, limit)
		}
		for i, w := range weights {
			off := counts[i]*sum - w*slots
			if off >= sum || small == 0 && -off >= sum || -off >= sum*(1+small) {
				t.Fatalf("%v: %d slots of %d are not the share of %d in %d", weights, counts[i], slots, w, sum)
			}
		}
		if !closeTo(counts, weights, sum, slots) && slots < max(min(int(limit), enoughSlots), len(eps)) {
			t.Fatalf("%v: %v is off by more than 1 %%, and %d slots are allowed", weights, counts, limit)
		}
	})
}

// TestWeightMovesFewSlots: one changed weight of many moves few slots while the number of slots stays.
func TestWeightMovesFewSlots(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	weights := times(50, 0)
	for i := range weights {
		weights[i] = 1000 + r.IntN(60000)
	}
	var before, after pool
	before.fill(somePool, weighted(weights...), dataplane.NoHash, 1<<17)
	r.Shuffle(len(before.slots), func(i, j int) {
		before.slots[i], before.slots[j] = before.slots[j], before.slots[i]
	})
	weights[7] += 5000
	after.fill(somePool, weighted(weights...), dataplane.NoHash, 1<<17)
	after.slots = after.assigned(before.slots)
	if len(before.slots) != enoughSlots || len(after.slots) != enoughSlots {
		t.Fatalf("%d and %d slots", len(before.slots), len(after.slots))
	}
	if n := after.distance(&before); n == 0 || n > 10 {
		t.Errorf("%d of %d slots moved", n, len(after.slots))
	}
}

// TestHashTable: a table holds each endpoint as often as its share says; a second one is the same; and another pool's
// is not.
func TestHashTable(t *testing.T) {
	for _, c := range []struct {
		weights     []int
		limit, size int
		hash        bool
	}{
		{times(1, 1), 1 << 17, 1, false},
		{times(2, 1), 1 << 17, 4093, true},
		{times(40, 1), 1 << 17, 4093, true},
		{times(41, 1), 1 << 17, 16381, true},
		{times(3000, 1), 1 << 17, 16381, true},
		{times(20000, 1), 1 << 17, 20000, false},
		{times(10, 1), 131, 127, true},
		{times(130, 1), 131, 130, false},
		{[]int{3, 1, 1}, 1 << 17, 4093, true},
		{[]int{65535, 1}, 1 << 17, 4093, true},
	} {
		var p, again, other pool
		eps := weighted(c.weights...)
		p.fill(somePool, eps, dataplane.HashAddr, c.limit)
		again.fill(somePool, eps, dataplane.HashAddr, c.limit)
		otherPool := somePool
		otherPool.port.name.Service.Name = "other"
		other.fill(otherPool, eps, dataplane.HashAddr, c.limit)
		if len(p.slots) != c.size || (p.hash != dataplane.NoHash) != c.hash {
			t.Errorf("%d endpoints: %d slots, hash %v", len(eps), len(p.slots), p.hash)
		}
		if !slices.Equal(p.slots, again.slots) || c.hash && slices.Equal(p.slots, other.slots) {
			t.Errorf("%d endpoints: tables of the same pool differ, or of two pools do not", len(eps))
		}
		sum, counts := 0, map[netip.AddrPort]int{}
		for _, w := range c.weights {
			sum += w
		}
		for _, ep := range p.slots {
			counts[ep]++
		}
		for i, ep := range eps {
			if off := counts[ep.AddrPort]*sum - c.weights[i]*c.size; max(off, -off) >= sum || counts[ep.AddrPort] == 0 {
				t.Errorf("weights %v: endpoint %d has %d slots", c.weights[:min(len(eps), 5)], i, counts[ep.AddrPort])
			}
		}
	}
}

// TestHashMovesFew: of the clients of other endpoints, few move when one goes.
func TestHashMovesFew(t *testing.T) {
	for n, most := range map[int]float64{3: 0.02, 10: 0.02, 100: 0.02, 1000: 0.01} {
		eps := weighted(times(n, 1)...)
		var before pool
		before.fill(somePool, eps, dataplane.HashAddr, 1<<17)
		var moved, others, worst float64
		for round := range 10 {
			gone := round * n / 10
			var after pool
			after.fill(somePool, slices.Delete(slices.Clone(eps), gone, gone+1), dataplane.HashAddr, 1<<17)
			m, o := 0, 0
			for client := range 20000 {
				a := netip.AddrFrom4([4]byte{172, 16 + byte(client>>16), byte(client >> 8), byte(client)})
				was := before.slots[bucketOf(a, uint32(len(before.slots)))]
				if was == eps[gone].AddrPort {
					continue
				}
				if o++; after.slots[bucketOf(a, uint32(len(after.slots)))] != was {
					m++
				}
			}
			moved, others, worst = moved+float64(m), others+float64(o), max(worst, float64(m)/float64(o))
		}
		t.Logf("%d endpoints, %d slots: %.2f %% of other clients move when one goes, %.2f %% at most", n, len(before.slots),
			100*moved/others, 100*worst)
		if worst > most {
			t.Errorf("%d endpoints: %.2f %% moved, want at most %.2f %%", n, 100*worst, 100*most)
		}
	}
}

// TestHashTableWaitsForRoom: the table of a pool with a hash is written as a whole. Until there is room for it, a pool
// stays as it was, and one that is new starts with one slot.
func TestHashTableWaitsForRoom(t *testing.T) {
	var want pool
	want.fill(somePool, weighted(1, 1, 1), dataplane.HashAddr, 1<<17)
	for _, before := range [][]dataplane.Endpoint{nil, weighted(1), weighted(1, 1), weighted(2, 1)} {
		var old pool
		old.fill(somePool, before, dataplane.NoHash, 1<<17)
		inPart := pool{hash: old.hash, repeats: old.repeats, slots: old.slots}
		if len(before) == 0 {
			inPart = pool{hash: want.hash, repeats: want.repeats, slots: want.slots[:1]}
		}
		for _, c := range []struct {
			room int
			want pool
		}{{0, inPart}, {1, want}} {
			p, step := want, transition{room: c.room, grow: true, done: true}
			step.slots(&old, &p)
			if p.hash != c.want.hash || p.repeats != c.want.repeats || !slices.Equal(p.slots, c.want.slots) {
				t.Errorf("%d slots, room for %d: %d with hash %v, want %d with %v", len(old.slots), c.room, len(p.slots),
					p.hash, len(c.want.slots), c.want.hash)
			}
			if step.done != (c.room > 0) {
				t.Errorf("%d slots, room for %d: done is %v", len(old.slots), c.room, step.done)
			}
		}
	}
}
