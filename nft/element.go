package nft

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// slotLen is the length of the slot that ends the key of an endpoint.
const slotLen = 4

// maxKey is the longest key: a frontend and an endpoint of IPv6.
const maxKey = 40

// Element is one element of a set or map. Its key and data are kept as the kernel has them: each field in network order
// (the kernel's own order for slots and ids), padded to four bytes. Which fields they are, the Set says.
type Element struct {
	Set SetID
	// KeyLen and DataLen are the bytes used of key and data.
	KeyLen, DataLen uint8
	// Bits is the prefix length of the key's last field in an Interval set, else unused.
	Bits uint8
	key  [maxKey]byte
	data [20]byte
	// Chain is where a verdict map's element goes to; the zero ChainID in other sets.
	Chain ChainID
	// Comment is shown by nft; empty means none.
	Comment string
}

// maxComment is what the kernel takes as an element's comment, its final zero byte included; a longer one would make it
// refuse the whole transaction.
const maxComment = 128

// Key gives the key's bytes.
func (e *Element) Key() []byte { return e.key[:e.KeyLen] }

// Data gives the data's bytes; empty in sets and verdict maps.
func (e *Element) Data() []byte { return e.data[:e.DataLen] }

// KeyEnd gives the last key of an Interval set's element.
func (e *Element) KeyEnd(f ipfamily.Family) []byte {
	end := e.key
	if e.Set == RefusedShares {
		copy(end[4:], e.data[:4])
		return end[:e.KeyLen]
	}
	last := end[int(e.KeyLen)-f.AddrLen() : e.KeyLen]
	for bit := int(e.Bits); bit < 8*len(last); bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	return end[:e.KeyLen]
}

// same says whether two elements with the same key need no change.
func (e *Element) same(o *Element) bool {
	return e.data == o.data && e.Chain == o.Chain && e.Comment == o.Comment && e.Bits == o.Bits
}

func (e *Element) addKeyAddr(a netip.Addr) {
	e.KeyLen += uint8(putAddr(e.key[e.KeyLen:], a))
}

func (e *Element) addKeyWord(v uint32) {
	binary.NativeEndian.PutUint32(e.key[e.KeyLen:], v)
	e.KeyLen += 4
}

func (e *Element) addKeyPort(p uint16) {
	binary.BigEndian.PutUint16(e.key[e.KeyLen:], p)
	e.KeyLen += 4
}

func (e *Element) addKeyFrontend(k dataplane.Key) {
	e.addKeyAddr(k.Addr)
	e.key[e.KeyLen] = byte(k.Protocol)
	e.KeyLen += 4
	e.addKeyPort(k.Port)
}

func (e *Element) setTarget(ep netip.AddrPort) {
	n := putAddr(e.data[:], ep.Addr())
	binary.BigEndian.PutUint16(e.data[n:], ep.Port())
	e.DataLen = uint8(n) + 4
}

func (e *Element) setID(id uint32) {
	binary.NativeEndian.PutUint32(e.data[:], id)
	e.DataLen = 4
}

func putAddr(b []byte, a netip.Addr) int {
	if a.Is4() {
		v := a.As4()
		return copy(b, v[:])
	}
	v := a.As16()
	return copy(b, v[:])
}

// frontendElement gives an element whose key is a frontend.
func frontendElement(set SetID, k dataplane.Key) Element {
	e := Element{Set: set}
	e.addKeyFrontend(k)
	return e
}

// idElement gives an element whose key begins with the id of a pool, or of a Service's source ranges.
func idElement(set SetID, id uint32) Element {
	e := Element{Set: set}
	e.addKeyWord(id)
	return e
}

// slotElement gives the element that puts an endpoint into a slot of a pool.
func slotElement(set SetID, id uint32, proto Protocol, slot int, ep netip.AddrPort) Element {
	e := idElement(set, id)
	e.key[e.KeyLen] = byte(proto)
	e.KeyLen += 4
	e.addKeyWord(uint32(slot))
	e.setTarget(ep)
	return e
}

// memberElement gives the element that makes an endpoint a member of a pool that remembers its clients.
func memberElement(set SetID, id uint32, ep netip.AddrPort) Element {
	e := idElement(set, id)
	e.addKeyAddr(ep.Addr())
	e.addKeyPort(ep.Port())
	return e
}

// addrElement gives an element of a set of addresses; n times the same address as key.
func addrElement(set SetID, a netip.Addr, n int) Element {
	e := Element{Set: set}
	for range n {
		e.addKeyAddr(a)
	}
	return e
}

// prefixElement gives an element of a tree.
func prefixElement(set SetID, p netip.Prefix) Element {
	e := addrElement(set, p.Masked().Addr(), 1)
	e.Bits = uint8(p.Bits())
	return e
}

// sourceElement gives the element that lets a range of sources use the frontends of an id.
func sourceElement(id uint32, p netip.Prefix) Element {
	e := Element{Set: SourceRanges, KeyLen: 4}
	binary.BigEndian.PutUint32(e.key[:], id)
	e.addKeyAddr(p.Masked().Addr())
	e.Bits = uint8(p.Bits())
	return e
}

// shareElement gives the element that has a pool refuse some of dataplane.RefusedOf connections, at least one: those
// with the first numbers. The last of them is the element's data, and to the kernel the end of its key.
func shareElement(id uint32, refused uint16) Element {
	e := Element{Set: RefusedShares, KeyLen: 8, DataLen: 4}
	binary.BigEndian.PutUint32(e.key[:], id)
	binary.BigEndian.PutUint32(e.data[:], uint32(refused)-1)
	return e
}

// ElementFrom makes an element from what the kernel lists: keyEnd only where the key holds a range, data and chain only
// in maps, and data as Limit.Data has it in RateLimits. A verdict that leads to no chain of ours becomes NoChain. It is
// not ok if a key or data has not the length the set's fields have.
func ElementFrom(f ipfamily.Family, set SetID, key, keyEnd, data []byte, chain, comment string) (e Element, ok bool) {
	s := SetByID(set)
	limited := s.Limit && len(data) == limitLen
	if len(key) != PaddedLen(f, s.Key) || len(data) != PaddedLen(f, s.Data) && !limited {
		return e, false
	}
	e = Element{Set: set, KeyLen: uint8(copy(e.key[:], key)), DataLen: uint8(copy(e.data[:], data)), Comment: comment}
	copy(e.key[:], key)
	copy(e.data[:], data)
	switch {
	case set == RefusedShares:
		e.DataLen = uint8(copy(e.data[:], key[4:]))
		if len(keyEnd) == len(key) {
			copy(e.data[:], keyEnd[4:])
		}
	case s.Interval:
		e.Bits = uint8(8 * f.AddrLen())
		if len(keyEnd) == len(key) {
			e.Bits = sharedBits(key[len(key)-f.AddrLen():], keyEnd[len(key)-f.AddrLen():])
		}
	}
	if s.Verdicts {
		e.Chain, _ = chainByName(chain)
	}
	return e, true
}

// PaddedLen is the length of fields one after the other, each padded to four bytes; that of a single one that is a key
// by itself, as it is.
func PaddedLen(f ipfamily.Family, fields []Field) int {
	n := 0
	for _, field := range fields {
		if field == EtherSource && len(fields) == 1 {
			return field.Len(f)
		}
		n += (field.Len(f) + 3) &^ 3
	}
	return n
}

// sharedBits counts the bits at the beginning that are the same.
func sharedBits(a, b []byte) uint8 {
	n := 0
	for i := range a {
		same := bits.LeadingZeros8(a[i] ^ b[i])
		if n += same; same < 8 {
			break
		}
	}
	return uint8(n)
}

// ID gives the id that the key of an element begins with. In the sets of ranges it is in network order, as nft has all
// there.
func (e *Element) ID() uint32 {
	if e.Set == SourceRanges || e.Set == RefusedShares {
		return binary.BigEndian.Uint32(e.key[:4])
	}
	return binary.NativeEndian.Uint32(e.key[:4])
}

// Number gives the number that is the data of an element.
func (e *Element) Number() uint32 { return binary.NativeEndian.Uint32(e.data[:4]) }

// PoolID gives the id of the pool that is in the data of an element.
func (e *Element) PoolID() uint32 { return e.Number() & PoolMask }

// Target gives the endpoint that is the data of an element.
func (e *Element) Target() netip.AddrPort {
	addr, _ := netip.AddrFromSlice(e.data[:e.DataLen-4])
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(e.data[e.DataLen-4:]))
}

// Service gives "namespace/name" of the Service that an element's comment names.
func (e *Element) Service() string { return serviceOf(e.Comment) }

// Slot gives the number of the slot that a key ends with.
func (e *Element) Slot() uint32 { return binary.NativeEndian.Uint32(e.key[e.KeyLen-slotLen:]) }

// Member gives the endpoint in the key of an element that makes it a member of a pool.
func (e *Element) Member() netip.AddrPort {
	n := int(e.KeyLen) - 4
	addr, _ := netip.AddrFromSlice(e.key[4:n])
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(e.key[n:]))
}

// FrontendKey reads the frontend that is the key of an element.
func (e *Element) FrontendKey() dataplane.Key {
	n := int(e.KeyLen) - 8
	a, _ := netip.AddrFromSlice(e.key[:n])
	return dataplane.Key{Addr: a, Protocol: snapshot.Protocol(e.key[n]), Port: binary.BigEndian.Uint16(e.key[n+4:])}
}

// commentOf cuts a service port's name to what the kernel takes. Kubernetes' names are ASCII, so no rune is cut in two.
func commentOf(name string) string {
	return name[:min(len(name), maxComment-1)]
}

// Text gives the element as nft writes it.
func (e *Element) Text(f ipfamily.Family, s *Set) string { return e.text(f, s, "") }

// text puts what the kernel adds to an element in its place, between the key and the comment.
func (e *Element) text(f ipfamily.Family, s *Set, extra string) string {
	var b strings.Builder
	b.WriteString(fieldValues(f, s.Key, e.Key(), s.order()))
	switch last := e.data[:4]; {
	case s.ID == RefusedShares && !bytes.Equal(last, e.key[4:8]):
		fmt.Fprintf(&b, "-%d", binary.BigEndian.Uint32(last))
	case s.Interval && s.ID != RefusedShares && int(e.Bits) < 8*f.AddrLen():
		fmt.Fprintf(&b, "/%d", e.Bits)
	}
	if l := e.Limit(); s.Limit && l.Rate > 0 {
		b.WriteString(" " + l.String())
	}
	b.WriteString(extra)
	if e.Comment != "" {
		fmt.Fprintf(&b, " comment %q", e.Comment)
	}
	switch {
	case s.Verdicts:
		b.WriteString(" : goto " + e.Chain.Name())
	case len(s.Data) > 0:
		b.WriteString(" : " + fieldValues(f, s.Data, e.Data(), binary.NativeEndian))
	}
	return b.String()
}

// order is that in which the kernel keeps its own numbers in the keys of a set: where there are ranges, one that
// compares.
func (s *Set) order() binary.ByteOrder {
	if s.Interval {
		return binary.BigEndian
	}
	return binary.NativeEndian
}

// fieldValues prints concatenated values.
func fieldValues(f ipfamily.Family, fields []Field, b []byte, order binary.ByteOrder) string {
	parts := make([]string, len(fields))
	for i, field := range fields {
		n := field.Len(f)
		parts[i] = fieldValue(field, b[:n], order)
		b = b[min((n+3)&^3, len(b)):]
	}
	return strings.Join(parts, " . ")
}

func fieldValue(field Field, b []byte, order binary.ByteOrder) string {
	switch field {
	case SourceAddr, DestAddr:
		a, _ := netip.AddrFromSlice(b)
		return a.String()
	case EtherSource:
		return net.HardwareAddr(b).String()
	case L4Proto:
		return snapshot.Protocol(b[0]).String()
	case DestPort, SourcePort:
		return strconv.Itoa(int(binary.BigEndian.Uint16(b)))
	case Priority:
		return classID(order.Uint32(b))
	case Mark:
		return fmt.Sprintf("0x%08x", binary.NativeEndian.Uint32(b))
	}
	return strconv.FormatUint(uint64(order.Uint32(b)), 10)
}

// bigEndian gives a word in the host's byte order as bytes that compare by its value.
func bigEndian(b []byte) []byte {
	return binary.BigEndian.AppendUint32(nil, binary.NativeEndian.Uint32(b))
}

// holds says whether an element of a set of ranges holds a key.
func (e *Element) holds(key *Element, f ipfamily.Family) bool {
	if e.Set == RefusedShares {
		at := key.key[4:8]
		return e.ID() == key.ID() && bytes.Compare(e.key[4:8], at) <= 0 && bytes.Compare(at, e.data[:4]) <= 0
	}
	n := int(e.KeyLen) - f.AddrLen()
	if key.KeyLen != e.KeyLen || string(e.key[:n]) != string(key.key[:n]) {
		return false
	}
	from, _ := netip.AddrFromSlice(e.key[n:e.KeyLen])
	at, _ := netip.AddrFromSlice(key.key[n:key.KeyLen])
	return netip.PrefixFrom(from, int(e.Bits)).Contains(at)
}

// Holding gives the range of some that holds a key.
func Holding(f ipfamily.Family, ranges []Listed, key *Element) (Listed, bool) {
	i := slices.IndexFunc(ranges, func(l Listed) bool { return l.holds(key, f) })
	if i < 0 {
		return Listed{}, false
	}
	return ranges[i], true
}
