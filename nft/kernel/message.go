// Package kernel carries package nft's values to and from the kernel's nf_tables by netlink. Every transaction is one batch in
// one datagram, so that it happens as a whole or not at all. It is the only package that speaks google/nftables.
package kernel

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
)

// buffer builds netlink messages one after the other. Its memory is kept from one transaction to the next.
type buffer struct {
	b []byte
	// seq is the sequence number of the next message; the first has number 1.
	seq uint32
}

const (
	headerLen    = unix.NLMSG_HDRLEN + 4 // struct nlmsghdr, struct nfgenmsg
	attrLen      = unix.NLA_HDRLEN
	maxAttr      = 1<<16 - 1
	nestedAttr   = unix.NLA_F_NESTED
	subsystem    = unix.NFNL_SUBSYS_NFTABLES << 8
	flagsCreate  = unix.NLM_F_REQUEST | unix.NLM_F_CREATE
	flagsRequest = unix.NLM_F_REQUEST
)

func (w *buffer) reset() {
	w.b, w.seq = w.b[:0], 1
}

// message starts a message and gives its place, for end.
func (w *buffer) message(typ uint16, flags uint16, family ipfamily.Family) int {
	start := len(w.b)
	w.b = append(w.b, 0, 0, 0, 0)
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
	w.b = binary.NativeEndian.AppendUint16(w.b, flags)
	w.b = binary.NativeEndian.AppendUint32(w.b, w.seq)
	w.b = append(w.b, 0, 0, 0, 0, byte(family.NFProto()), unix.NFNETLINK_V0, 0, 0)
	w.seq++
	return start
}

// end closes the message that starts at the given place.
func (w *buffer) end(start int) {
	binary.NativeEndian.PutUint32(w.b[start:], uint32(len(w.b)-start))
}

// batch writes a message that opens or closes a batch.
func (w *buffer) batch(typ uint16) {
	m := w.message(typ, flagsRequest, 0)
	binary.BigEndian.PutUint16(w.b[m+headerLen-2:], unix.NFNL_SUBSYS_NFTABLES)
	w.end(m)
}

// attr appends one attribute, padded to four bytes.
func (w *buffer) attr(typ uint16, value []byte) {
	w.attrHeader(typ, len(value))
	w.b = append(w.b, value...)
	w.pad()
}

// text appends an attribute that holds a zero-terminated string.
func (w *buffer) text(typ uint16, s string) {
	w.attrHeader(typ, len(s)+1)
	w.b = append(w.b, s...)
	w.b = append(w.b, 0)
	w.pad()
}

func (w *buffer) attrHeader(typ uint16, n int) {
	w.b = binary.NativeEndian.AppendUint16(w.b, uint16(attrLen+n))
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
}

func (w *buffer) pad() {
	for len(w.b)%4 != 0 {
		w.b = append(w.b, 0)
	}
}

// u32 appends a number in network order, as nf_tables has all its numbers.
func (w *buffer) u32(typ uint16, v uint32) {
	w.attrHeader(typ, 4)
	w.b = binary.BigEndian.AppendUint32(w.b, v)
}

// u64 is u32 for longer numbers.
func (w *buffer) u64(typ uint16, v uint64) {
	w.attrHeader(typ, 8)
	w.b = binary.BigEndian.AppendUint64(w.b, v)
}

// nest starts a nested attribute and gives its place, for close.
func (w *buffer) nest(typ uint16) int {
	start := len(w.b)
	w.attrHeader(typ|nestedAttr, 0)
	return start
}

// close ends the nested attribute that starts at the given place.
func (w *buffer) close(start int) {
	binary.NativeEndian.PutUint16(w.b[start:], uint16(len(w.b)-start))
}

func native16(b []byte) uint16 { return binary.NativeEndian.Uint16(b) }
