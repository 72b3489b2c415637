package flows

import (
	"encoding/binary"
	"math"
	"net/netip"
	"time"
)

// coder packs records and sums into bytes, or unpacks them: one list of fields serves both. A word is written once, and
// then only its number, so that a record takes some 80 bytes.
type coder struct {
	// data is what was packed, or what is left to unpack.
	data   []byte
	unpack bool
	// words are the numbers of the words that were packed, and list the words that were unpacked.
	words map[string]uint64
	list  []string
	// last is the last time, in nanoseconds: the next is written as the difference.
	last int64
}

// newPacker returns a coder that packs into a buffer of this size.
func newPacker(size int) coder {
	return coder{data: make([]byte, 0, size), words: map[string]uint64{}}
}

func newUnpacker(data []byte) coder { return coder{data: data, unpack: true} }

func (c *coder) number(v *uint64) {
	if !c.unpack {
		c.data = binary.AppendUvarint(c.data, *v)
		return
	}
	n, size := binary.Uvarint(c.data)
	*v, c.data = n, c.data[size:]
}

// bytes packs bytes with their length, or returns those that were packed.
func (c *coder) bytes(b []byte) []byte {
	n := uint64(len(b))
	c.number(&n)
	if !c.unpack {
		c.data = append(c.data, b...)
		return b
	}
	b, c.data = c.data[:n], c.data[n:]
	return b
}

func (c *coder) word(s *string) {
	if c.unpack {
		var n uint64
		if c.number(&n); n > 0 {
			*s = c.list[n-1]
			return
		}
		*s = string(c.bytes(nil))
		c.list = append(c.list, *s)
		return
	}
	n, known := c.words[*s]
	if known {
		c.data = binary.AppendUvarint(c.data, n)
		return
	}
	c.words[*s] = uint64(len(c.words)) + 1
	c.data = binary.AppendUvarint(append(c.data, 0), uint64(len(*s)))
	c.data = append(c.data, *s...)
}

// time keeps the zero time, and loses the time zone.
func (c *coder) time(t *time.Time) {
	var n uint64 // 0 for the zero time, else 1 more than the difference in zigzag
	if !c.unpack && !t.IsZero() {
		diff := t.UnixNano() - c.last
		n = (uint64(diff)<<1 ^ uint64(diff>>63)) + 1
	}
	if c.number(&n); n == 0 {
		return
	}
	n--
	c.last += int64(n>>1) ^ -int64(n&1)
	if c.unpack {
		*t = time.Unix(0, c.last).UTC()
	}
}

func (c *coder) addr(a *netip.AddrPort) {
	var room [32]byte
	b := room[:0]
	if !c.unpack {
		b, _ = a.AppendBinary(b)
	}
	if b = c.bytes(b); c.unpack {
		_ = a.UnmarshalBinary(b)
	}
}

func (c *coder) prefix(p *netip.Prefix) {
	var room [32]byte
	b := room[:0]
	if !c.unpack && p.IsValid() {
		b, _ = p.AppendBinary(b)
	}
	if b = c.bytes(b); c.unpack && len(b) > 0 {
		_ = p.UnmarshalBinary(b)
	}
}

func (c *coder) peer(p *Peer) {
	c.addr(&p.Addr)
	c.prefix(&p.Prefix)
	c.word(&p.Pod)
	c.word(&p.Workload)
	c.word(&p.Node)
	c.word(&p.Zone)
}

func (c *coder) traffic(t *Traffic) {
	c.number(&t.Packets)
	c.number(&t.Bytes)
}

func (c *coder) record(r *Record) {
	c.time(&r.Time)
	c.word(&r.Service)
	c.word(&r.Port)
	c.word(&r.For)
	c.word(&r.Protocol)
	c.addr(&r.Frontend)
	c.peer(&r.Client)
	c.peer(&r.Endpoint)
	c.traffic(&r.Sent)
	c.traffic(&r.Received)
	seconds := uint64(math.Round(r.Seconds * 1e6))
	c.number(&seconds)
	r.Seconds = float64(seconds) / 1e6
	c.word((*string)(&r.End))
	c.word(&r.Reason)
	c.time(&r.Since)
	weight := uint64(r.Weight)
	c.number(&weight)
	r.Weight = uint32(weight)
}

// sum packs a sum without its minute, which all of a block have in common.
func (c *coder) sum(s *Sum) {
	for _, word := range [...]*string{&s.Client, &s.ClientZone, &s.Service, &s.Port, &s.Endpoint, &s.EndpointZone} {
		c.word(word)
	}
	c.number(&s.Connections)
	c.number(&s.Failures)
	c.number(&s.Open)
	c.traffic(&s.Sent)
	c.traffic(&s.Received)
}
