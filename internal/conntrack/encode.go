package conntrack

import (
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/netlink"
)

// Message types of linux/netfilter/nfnetlink_conntrack.h.
const (
	messageGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	messageDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2
)

// What a filter compares: CTA_FILTER_F_* of net/netfilter/nf_internals.h, which are part of the kernel's interface
// all the same.
const (
	filterIPDst   = 1 << 1
	filterProto   = 1 << 3
	filterDstPort = 1 << 5
)

// writeList writes the message that asks for a list.
func writeList(w *netlink.Buffer, q query) {
	m := w.Netfilter(messageGet, unix.NLM_F_DUMP, q.family.NFProto())
	if q.protocol != 0 {
		writeFilter(w, q)
	}
	w.End(m)
}

// writeFilter writes what the kernel compares the flows' original direction with.
func writeFilter(w *netlink.Buffer, q query) {
	flags := uint32(filterProto)
	orig := w.Nest(ctaTupleOrig)
	if q.addr.IsValid() {
		flags |= filterIPDst
		ip := w.Nest(ctaTupleIP)
		w.Attr(ctaIPv4Dst, q.addr.AsSlice()...)
		w.Close(ip)
	}
	proto := w.Nest(ctaTupleProto)
	w.Attr(ctaProtoNum, byte(q.protocol))
	if q.port != 0 {
		flags |= filterDstPort
		w.Big16(ctaProtoDstPort, q.port)
	}
	w.Close(proto)
	w.Close(orig)
	filter := w.Nest(ctaFilter)
	w.Native32(ctaFilterOrigFlags, flags)
	w.Close(filter)
}

// writeDelete writes the message that deletes a flow. The kernel looks up who has these replies, in the zone, and
// lets him live if he does not have the id, which is made of the original tuple and of where the flow is in memory.
// Both tuples are the flow's, then. Looked up by the original one, a flow that began anew meanwhile, to another
// endpoint, would be found, and often has the old one's place and so its id. A message without a tuple would delete
// everything: parseFlow sees to it that there is one.
func writeDelete(w *netlink.Buffer, f *flow) {
	m := w.Netfilter(messageDelete, 0, ipfamily.Of(f.frontend.Addr).NFProto())
	w.Attr(ctaTupleReply|unix.NLA_F_NESTED, f.reply...)
	if f.zone != nil {
		w.Attr(ctaZone, f.zone...)
	}
	w.Attr(ctaID, f.id...)
	w.End(m)
}
