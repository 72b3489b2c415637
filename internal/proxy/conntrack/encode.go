package conntrack

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Message types of linux/netfilter/nfnetlink_conntrack.h.
const (
	messageGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	messageDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2
	messageStats  = unix.NFNL_SUBSYS_CTNETLINK<<8 | 5
)

// The fields that a filter compares: CTA_FILTER_F_* of net/netfilter/nf_internals.h. They are part of the kernel's
// interface although the header is internal.
const (
	filterIPSrc   = 1 << 0
	filterIPDst   = 1 << 1
	filterProto   = 1 << 3
	filterSrcPort = 1 << 4
	filterDstPort = 1 << 5
)

// writeList writes the request for a list.
func writeList(w *netlink.Buffer, q query) {
	family := q.family.NFProto()
	if q.both {
		family = unix.AF_UNSPEC
	}
	m := w.Netfilter(messageGet, unix.NLM_F_DUMP, family)
	switch {
	case q.endpoint.IsValid():
		writeReplyFilter(w, q)
	case q.protocol != 0:
		writeFilter(w, q)
	}
	if q.unanswered {
		w.Big32(ctaStatus, 0)
		w.Big32(ctaStatusMask, statusSeenReply)
	}
	w.End(m)
}

// writeFilter writes the filter on the flows' original direction.
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

// writeReplyFilter writes the filter on the source of the flows' replies.
func writeReplyFilter(w *netlink.Buffer, q query) {
	flags := uint32(filterProto | filterSrcPort)
	reply := w.Nest(ctaTupleReply)
	if !q.anyAddr() {
		flags |= filterIPSrc
		ip := w.Nest(ctaTupleIP)
		w.Attr(ctaIPv4Src, q.endpoint.Addr().AsSlice()...)
		w.Close(ip)
	}
	proto := w.Nest(ctaTupleProto)
	w.Attr(ctaProtoNum, byte(q.protocol))
	w.Big16(ctaProtoSrcPort, q.endpoint.Port())
	w.Close(proto)
	w.Close(reply)
	filter := w.Nest(ctaFilter)
	w.Native32(ctaFilterReplyFlags, flags)
	w.Close(filter)
}

// writeDelete writes the request to delete one flow. The kernel looks the flow up by its reply tuple and zone, and
// deletes it only if the id matches. The id depends on the original tuple and on the flow's place in memory, so both
// tuples must match. A look-up by the original tuple would be wrong: it would find a flow that has begun again to
// another endpoint, and that flow often has the same place in memory and so the same id. A message without a tuple
// would delete every flow; parseFlow makes sure that there is one.
func writeDelete(w *netlink.Buffer, f *flow) {
	m := w.Netfilter(messageDelete, 0, ipfamily.Of(f.frontend.Addr).NFProto())
	w.Attr(ctaTupleReply|unix.NLA_F_NESTED, f.reply...)
	if f.zone != nil {
		w.Attr(ctaZone, f.zone...)
	}
	w.Attr(ctaID, f.id...)
	w.End(m)
}

// writeTuple writes one direction of a flow.
func writeTuple(w *netlink.Buffer, typ uint16, protocol snapshot.Protocol, src, dst netip.AddrPort) {
	from, to := uint16(ctaIPv6Src), uint16(ctaIPv6Dst)
	if src.Addr().Is4() {
		from, to = ctaIPv4Src, ctaIPv4Dst
	}
	t, ip := w.Nest(typ), w.Nest(ctaTupleIP)
	w.Attr(from, src.Addr().AsSlice()...)
	w.Attr(to, dst.Addr().AsSlice()...)
	w.Close(ip)
	proto := w.Nest(ctaTupleProto)
	w.Attr(ctaProtoNum, byte(protocol))
	w.Big16(ctaProtoSrcPort, src.Port())
	w.Big16(ctaProtoDstPort, dst.Port())
	w.Close(proto)
	w.Close(t)
}

// writeNAT writes what a flow's source or destination is translated to: CTA_NAT_SRC or CTA_NAT_DST of
// linux/netfilter/nfnetlink_conntrack.h.
func writeNAT(w *netlink.Buffer, typ uint16, to netip.AddrPort) {
	const v4MinIP, natProto, v6MinIP, portMin, portMax = 1, 3, 4, 1, 2
	addr := uint16(v6MinIP)
	if to.Addr().Is4() {
		addr = v4MinIP
	}
	nat := w.Nest(typ)
	w.Attr(addr, to.Addr().AsSlice()...)
	proto := w.Nest(natProto)
	w.Big16(portMin, to.Port())
	w.Big16(portMax, to.Port())
	w.Close(proto)
	w.Close(nat)
}
