package ipvsplugin

import (
	"encoding/binary"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"
)

// buffer builds netlink messages one after the other. Its memory is kept.
type buffer struct {
	b []byte
	// first is the sequence number of the first message, seq that of the last.
	first, seq uint32
	last       int // where the last message starts
}

// begin forgets the messages.
func (w *buffer) begin() { w.b, w.first = w.b[:0], w.seq+1 }

// message writes one: its type, flags, the header of its protocol, and attributes.
func (w *buffer) message(typ, flags uint16, header []byte, attrs func()) {
	w.last = len(w.b)
	w.seq++
	w.b = append(w.b, 0, 0, 0, 0)
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
	w.b = binary.NativeEndian.AppendUint16(w.b, flags|unix.NLM_F_REQUEST)
	w.b = binary.NativeEndian.AppendUint32(w.b, w.seq)
	w.b = append(w.b, 0, 0, 0, 0)
	w.b = append(w.b, header...)
	if attrs != nil {
		attrs()
	}
	binary.NativeEndian.PutUint32(w.b[w.last:], uint32(len(w.b)-w.last))
}

// flag adds flags to the last message.
func (w *buffer) flag(flags uint16) {
	at := w.b[w.last+6:]
	binary.NativeEndian.PutUint16(at, binary.NativeEndian.Uint16(at)|flags)
}

// attr writes one attribute, padded to four bytes.
func (w *buffer) attr(typ uint16, value ...byte) {
	w.b = binary.NativeEndian.AppendUint16(w.b, uint16(unix.NLA_HDRLEN+len(value)))
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
	w.b = append(w.b, value...)
	for len(w.b)%4 != 0 {
		w.b = append(w.b, 0)
	}
}

func (w *buffer) native16(typ, v uint16) { w.attr(typ, binary.NativeEndian.AppendUint16(nil, v)...) }

func (w *buffer) native32(typ uint16, v uint32) {
	w.attr(typ, binary.NativeEndian.AppendUint32(nil, v)...)
}

func (w *buffer) big16(typ, v uint16) { w.attr(typ, binary.BigEndian.AppendUint16(nil, v)...) }

func (w *buffer) big32(typ uint16, v uint32) {
	w.attr(typ, binary.BigEndian.AppendUint32(nil, v)...)
}

// text writes a string with its zero.
func (w *buffer) text(typ uint16, s string) { w.attr(typ, append([]byte(s), 0)...) }

// nest writes an attribute that holds others.
func (w *buffer) nest(typ uint16, inside func()) {
	start := len(w.b)
	w.attr(typ | unix.NLA_F_NESTED)
	inside()
	binary.NativeEndian.PutUint16(w.b[start:], uint16(len(w.b)-start))
}

// answer is one message from the kernel.
type answer struct {
	typ, flags uint16
	seq        uint32
	body       []byte
}

// errno gives what an answer says went wrong; 0 if nothing did, or if it is no such answer.
func (a *answer) errno() unix.Errno {
	if (a.typ == unix.NLMSG_ERROR || a.typ == unix.NLMSG_DONE) && len(a.body) >= 4 {
		return unix.Errno(-int32(binary.NativeEndian.Uint32(a.body)))
	}
	return 0
}

// ends says whether nothing more follows to the request.
func (a *answer) ends() bool { return a.typ == unix.NLMSG_ERROR || a.typ == unix.NLMSG_DONE }

// answers goes through a datagram. It stops at what is no message.
func answers(b []byte) iter.Seq[answer] {
	return func(yield func(answer) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			n := int(binary.NativeEndian.Uint32(b))
			if n < unix.NLMSG_HDRLEN || n > len(b) {
				return
			}
			a := answer{
				typ: binary.NativeEndian.Uint16(b[4:]), flags: binary.NativeEndian.Uint16(b[6:]),
				seq: binary.NativeEndian.Uint32(b[8:]), body: b[unix.NLMSG_HDRLEN:n],
			}
			if !yield(a) {
				return
			}
			b = b[min((n+3)&^3, len(b)):]
		}
	}
}

// attributes goes through those of one level; types come without flags. It stops at what is no attribute.
func attributes(b []byte) iter.Seq2[uint16, value] {
	return func(yield func(uint16, value) bool) {
		for len(b) >= unix.NLA_HDRLEN {
			n := int(binary.NativeEndian.Uint16(b))
			if n < unix.NLA_HDRLEN || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), value(b[unix.NLA_HDRLEN:n])) {
				return
			}
			b = b[min((n+3)&^3, len(b)):]
		}
	}
}

// value is what an attribute holds. What is too short to hold a number is 0.
type value []byte

func (v value) native16() uint16 {
	if len(v) < 2 {
		return 0
	}
	return binary.NativeEndian.Uint16(v)
}

func (v value) native32() uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(v)
}

func (v value) native64() uint64 {
	if len(v) < 8 {
		return 0
	}
	return binary.NativeEndian.Uint64(v)
}

func (v value) big16() uint16 {
	if len(v) < 2 {
		return 0
	}
	return binary.BigEndian.Uint16(v)
}

func (v value) text() string { return unix.ByteSliceToString(v) }

// addr gives an address of a family; invalid if there is none. IPVS has 16 bytes for every address.
func (v value) addr(family uint16) netip.Addr {
	n := map[uint16]int{unix.AF_INET: 4, unix.AF_INET6: 16}[family]
	if n == 0 || len(v) < n {
		return netip.Addr{}
	}
	a, _ := netip.AddrFromSlice(v[:n])
	return a
}

func familyOf(a netip.Addr) uint16 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
