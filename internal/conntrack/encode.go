package conntrack

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Message types of linux/netfilter/nfnetlink_conntrack.h.
const (
	messageGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	messageDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2
)

// What a filter compares: CTA_FILTER_F_* of net/netfilter/nf_internals.h, which are part of the kernel's interface all the same.
const (
	filterIPDst   = 1 << 1
	filterProto   = 1 << 3
	filterDstPort = 1 << 5
)

// buffer builds netlink messages one after the other. Its memory is kept.
type buffer struct {
	b   []byte
	seq uint32 // of the message written last
}

// message starts a message and gives its place, for end.
func (w *buffer) message(typ, flags uint16, family byte) int {
	start := len(w.b)
	w.seq++
	w.b = append(w.b, 0, 0, 0, 0)
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
	w.b = binary.NativeEndian.AppendUint16(w.b, flags)
	w.b = binary.NativeEndian.AppendUint32(w.b, w.seq)
	w.b = append(w.b, 0, 0, 0, 0, family, unix.NFNETLINK_V0, 0, 0)
	return start
}

// end closes the message that starts at the given place.
func (w *buffer) end(start int) {
	binary.NativeEndian.PutUint32(w.b[start:], uint32(len(w.b)-start))
}

// attr appends one attribute, padded to four bytes.
func (w *buffer) attr(typ uint16, value ...byte) {
	w.b = binary.NativeEndian.AppendUint16(w.b, uint16(unix.NLA_HDRLEN+len(value)))
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
	w.b = append(w.b, value...)
	for len(w.b)%4 != 0 {
		w.b = append(w.b, 0)
	}
}

// nest writes an attribute that holds others.
func (w *buffer) nest(typ uint16, inside func()) {
	start := len(w.b)
	w.attr(typ | nestedAttr)
	inside()
	binary.NativeEndian.PutUint16(w.b[start:], uint16(len(w.b)-start))
}

// dump writes the message that asks for a list.
func (w *buffer) dump(q query) {
	m := w.message(messageGet, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, q.family)
	if q.protocol != 0 {
		w.filter(q)
	}
	w.end(m)
}

// filter writes what the kernel shall compare the flows' original direction with.
func (w *buffer) filter(q query) {
	flags := uint32(filterProto)
	w.nest(ctaTupleOrig, func() {
		if q.addr.IsValid() {
			flags |= filterIPDst
			w.nest(ctaTupleIP, func() { w.attr(ctaIPv4Dst, q.addr.AsSlice()...) })
		}
		w.nest(ctaTupleProto, func() {
			w.attr(ctaProtoNum, byte(q.protocol))
			if q.port != 0 {
				flags |= filterDstPort
				w.attr(ctaProtoDstPort, byte(q.port>>8), byte(q.port))
			}
		})
	})
	w.nest(ctaFilter, func() { w.attr(ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, flags)...) })
}

// remove writes the message that deletes a flow. The kernel looks up who has these replies, in the zone, and lets him live if he
// does not have the id, which is made of the original tuple and of where the flow is in memory. Both tuples are the flow's,
// then. Looked up by the original one, a flow that began anew meanwhile, to another endpoint, would be found, and often has the
// old one's place and so its id. A message without a tuple would delete everything: parseFlow sees to it that there is one.
func (w *buffer) remove(f *flow) {
	m := w.message(messageDelete, unix.NLM_F_REQUEST, queryFor(f.frontend).family)
	w.attr(ctaTupleReply|nestedAttr, f.reply...)
	if f.zone != nil {
		w.attr(ctaZone, f.zone...)
	}
	w.attr(ctaID, f.id...)
	w.end(m)
}
