package netlink

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"
)

// Buffer builds netlink messages one after the other, in memory that the next Reset reuses. Messages are numbered
// from 1 on. The zero value is ready to use.
//
// It writes in place, unlike the library's AttributeEncoder, which copies each value once for every level it is
// nested in: a transaction of nf_tables has hundreds of thousands of elements. Whoever nests keeps attributes within
// MaxAttr.
type Buffer struct {
	b     []byte
	count uint32
}

const (
	// HeaderLen is the length of a message's header.
	HeaderLen = unix.NLMSG_HDRLEN
	// AttrLen is the length of an attribute's header.
	AttrLen = unix.NLA_HDRLEN
	// MaxAttr is the longest attribute, with its header.
	MaxAttr = 1<<16 - 1

	typeMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
)

// Reset forgets all messages and keeps the memory.
func (w *Buffer) Reset() { w.b, w.count = w.b[:0], 0 }

// Bytes returns all messages. They are valid until the Buffer is used again.
func (w *Buffer) Bytes() []byte { return w.b }

// Len returns the length of all messages in bytes.
func (w *Buffer) Len() int { return len(w.b) }

// Count returns how many messages there are, which is the number of the last one.
func (w *Buffer) Count() int { return int(w.count) }

// Grow makes room for n more bytes.
func (w *Buffer) Grow(n int) { w.b = slices.Grow(w.b, n) }

// Message starts a message with the header of its protocol and returns its place, for End. It is always a request.
func (w *Buffer) Message(typ, flags uint16, header ...byte) int {
	start := len(w.b)
	w.count++
	w.b = append(w.b, 0, 0, 0, 0)
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
	w.b = binary.NativeEndian.AppendUint16(w.b, flags|unix.NLM_F_REQUEST)
	w.b = binary.NativeEndian.AppendUint32(w.b, w.count)
	w.b = append(w.b, 0, 0, 0, 0)
	w.b = append(w.b, header...)
	return start
}

// End closes the message that starts at a place.
func (w *Buffer) End(start int) {
	binary.NativeEndian.PutUint32(w.b[start:], uint32(len(w.b)-start))
}

// Nest starts an attribute that holds others and returns its place, for Close.
func (w *Buffer) Nest(typ uint16) int { return w.Open(typ | unix.NLA_F_NESTED) }

// Open starts an attribute whose value is appended in parts, and returns its place, for Close.
func (w *Buffer) Open(typ uint16) int {
	start := len(w.b)
	w.header(typ, 0)
	return start
}

// Close closes the attribute that starts at a place, and pads it to four bytes.
func (w *Buffer) Close(start int) {
	binary.NativeEndian.PutUint16(w.b[start:], uint16(len(w.b)-start))
	w.pad()
}

// Append appends bytes as they are: a part of an attribute's value, or whole attributes.
func (w *Buffer) Append(b ...byte) { w.b = append(w.b, b...) }

// AppendText appends a string with its zero to the value of an open attribute.
func (w *Buffer) AppendText(s string) {
	w.b = append(w.b, s...)
	w.b = append(w.b, 0)
}

// Attr writes an attribute.
func (w *Buffer) Attr(typ uint16, value ...byte) {
	w.header(typ, len(value))
	w.b = append(w.b, value...)
	w.pad()
}

// Text writes a string with its zero.
func (w *Buffer) Text(typ uint16, s string) {
	w.header(typ, len(s)+1)
	w.AppendText(s)
	w.pad()
}

// Native16 writes a number in this machine's order.
func (w *Buffer) Native16(typ, v uint16) {
	w.header(typ, 2)
	w.b = binary.NativeEndian.AppendUint16(w.b, v)
	w.pad()
}

// Native32 writes a number in this machine's order.
func (w *Buffer) Native32(typ uint16, v uint32) {
	w.header(typ, 4)
	w.b = binary.NativeEndian.AppendUint32(w.b, v)
}

// Big16 writes a number in network order.
func (w *Buffer) Big16(typ, v uint16) {
	w.header(typ, 2)
	w.b = binary.BigEndian.AppendUint16(w.b, v)
	w.pad()
}

// Big32 writes a number in network order.
func (w *Buffer) Big32(typ uint16, v uint32) {
	w.header(typ, 4)
	w.b = binary.BigEndian.AppendUint32(w.b, v)
}

// Big64 writes a number in network order.
func (w *Buffer) Big64(typ uint16, v uint64) {
	w.header(typ, 8)
	w.b = binary.BigEndian.AppendUint64(w.b, v)
}

func (w *Buffer) header(typ uint16, n int) {
	w.b = binary.NativeEndian.AppendUint16(w.b, uint16(AttrLen+n))
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
}

func (w *Buffer) pad() {
	for len(w.b)%unix.NLMSG_ALIGNTO != 0 {
		w.b = append(w.b, 0)
	}
}
