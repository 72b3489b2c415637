package flows

import (
	"hash/maphash"
	"math"
	"math/bits"
	"net/netip"
	"time"
)

// Bounds of the list of records.
const (
	// horizon is how long the list should reach back: if it is full, and would hold less at the rate of the moment, some
	// records are left out.
	horizon = 10 * time.Minute
	// blocks is in how many parts the list is; the oldest is dropped when there is no room.
	blocks = 128
	// spare is room for the record that fills a block.
	spare = 1 << 10
	// tick is how often the rates are measured.
	tick = time.Second
)

// list holds the last records, packed, in at most a number of bytes. It is not safe for concurrent use.
type list struct {
	most int
	// sealed are the full blocks, the oldest first. Their bytes do not change any more.
	sealed []block
	bytes  int
	last   coder
	// records counts those of last, and all those of all blocks.
	records, all int

	// Seconds' rates, of records of failures and of others, and what was counted since the last measure.
	rates   [2]float64
	counts  [2]int
	counted time.Time
	// levels are the powers of 2 of which one record is kept, of failures and of others.
	levels [2]int
	seed   maphash.Seed
}

// block is a part of the list.
type block struct {
	data    []byte
	records int
}

func newList(most int) *list { return &list{most: most, seed: maphash.MakeSeed()} }

func (l *list) add(r *Record) {
	if l.last.words == nil {
		l.last = newPacker(l.most/blocks + spare)
	}
	l.last.record(r)
	l.records++
	l.all++
	if len(l.last.data) < l.most/blocks {
		return
	}
	l.sealed = append(l.sealed, block{l.last.data, l.records})
	l.bytes += cap(l.last.data)
	l.last, l.records = coder{}, 0
	for l.bytes+l.most/blocks+spare > l.most {
		l.bytes -= cap(l.sealed[0].data)
		l.all -= l.sealed[0].records
		l.sealed[0] = block{}
		l.sealed = l.sealed[1:]
	}
}

// snapshot returns all blocks, the oldest first. They stay as they are.
func (l *list) snapshot() []block {
	all := append([]block(nil), l.sealed...)
	return append(all, block{l.last.data[:len(l.last.data):len(l.last.data)], l.records})
}

// each is an iterator of the records of a block.
func (b block) each(yield func(*Record) bool) {
	c := newUnpacker(b.data)
	for range b.records {
		var r Record
		if c.record(&r); !yield(&r) {
			return
		}
	}
}

// full reports whether older records give way to new ones.
func (l *list) full() bool { return l.bytes+2*(l.most/blocks+spare) > l.most }

// weight returns how many records this one stands for in the list; 0 if it is left out. All records of a connection
// have the same chance, which the address of their client decides before it is cut.
func (l *list) weight(r *Record, client netip.AddrPort, now time.Time) uint32 {
	class := 0
	if !r.Failure() {
		class = 1
	}
	l.counts[class]++
	if elapsed := now.Sub(l.counted); elapsed >= tick || elapsed < 0 {
		l.measure(elapsed)
		l.counted = now
	}
	level := l.levels[class]
	if level == 0 {
		return 1
	}
	var h maphash.Hash
	h.SetSeed(l.seed)
	maphash.WriteComparable(&h, client)
	maphash.WriteComparable(&h, r.Frontend)
	_, _ = h.WriteString(r.Protocol)
	if h.Sum64()&(1<<level-1) != 0 {
		return 0
	}
	return 1 << level
}

// measure decides how many records are left out. Failures get half of the room, and others what these leave.
func (l *list) measure(elapsed time.Duration) {
	if l.counted.IsZero() || elapsed < 0 || elapsed > horizon { // the first, or the clock was set
		l.counts = [2]int{}
		return
	}
	for i := range l.rates {
		l.rates[i] += (float64(l.counts[i])/elapsed.Seconds() - l.rates[i]) * (1 - math.Exp(-elapsed.Seconds()/10))
	}
	l.counts, l.levels = [2]int{}, [2]int{}
	if !l.full() {
		return
	}
	room := float64(l.all) / horizon.Seconds()
	l.levels[0] = levelOf(l.rates[0], room/2)
	l.levels[1] = levelOf(l.rates[1], room-l.rates[0]/float64(uint64(1)<<l.levels[0]))
}

// levelOf returns the least power of 2 by which a rate must be divided to fit.
func levelOf(rate, room float64) int {
	if rate <= room {
		return 0
	}
	return min(bits.Len64(uint64(math.Ceil(rate/max(room, 1e-3))-1)), 20)
}
