package conntrack

import (
	"net/netip"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// flow is one entry of the kernel's table. Its byte slices are valid until the next datagram is read.
type flow struct {
	// frontend is the destination of the first packet.
	frontend dataplane.Key
	// endpoint is the source of the replies: where the packet was sent.
	endpoint netip.AddrPort
	// client is where the first packet came from, and masquerade where the replies go: to the client, or to what the
	// kernel put in its place.
	client, masquerade netip.AddrPort
	// answered says that the endpoint has sent a packet.
	answered bool
	// replies is how many packets the endpoint has sent, if counted says that the kernel counts them.
	replies uint64
	counted bool
	// tcp is only known for TCP.
	tcp tcpInfo
	// zoned says that at least one direction is not in the default zone.
	zoned bool
	// reply (the tuple of the replies), zone and id identify the flow, in the kernel's encoding. zone is nil in the
	// default zone.
	reply, zone, id []byte
	// attrs is all that the kernel sent.
	attrs []byte
}

// tcpInfo is what the kernel knows of a TCP connection.
type tcpInfo struct {
	// established says that both sides are connected and neither has begun to close.
	established bool
	// unacknowledged says that the client has sent data that the endpoint has not acknowledged.
	unacknowledged bool
	// unreceived says the same of the endpoint's data and the client.
	unreceived bool
	// left is in how many seconds the kernel forgets the flow, rounded down. Each packet of either side renews it.
	left uint32
}

// translated says whether the kernel sends the flow to another destination. The kernel's status has a bit for that, but
// it is not set if an endpoint has the same address and port as the frontend.
func (f *flow) translated() bool {
	return f.endpoint != netip.AddrPortFrom(f.frontend.Addr, f.frontend.Port)
}

// Attributes of linux/netfilter/nfnetlink_conntrack.h.
const (
	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaStatus     = 3
	ctaProtoInfo  = 4
	ctaTimeout    = 7
	ctaID         = 12
	ctaZone       = 18
	ctaFilter     = 25 // since 5.8
	ctaStatusMask = 26 // since 5.15

	ctaStatsEntries = 1

	ctaTupleIP    = 1
	ctaTupleProto = 2
	ctaTupleZone  = 3

	ctaIPv4Src = 1
	ctaIPv4Dst = 2
	ctaIPv6Src = 3
	ctaIPv6Dst = 4

	ctaProtoNum     = 1
	ctaProtoSrcPort = 2
	ctaProtoDstPort = 3

	ctaFilterOrigFlags  = 1
	ctaFilterReplyFlags = 2

	ctaProtoInfoTCP              = 1
	ctaProtoInfoTCPState         = 1
	ctaProtoInfoTCPFlagsOriginal = 4
	ctaProtoInfoTCPFlagsReply    = 5

	// tcpEstablished is TCP_CONNTRACK_ESTABLISHED of linux/netfilter/nf_conntrack_tcp.h, and tcpDataUnacknowledged is
	// IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED.
	tcpEstablished        = 3
	tcpDataUnacknowledged = 0x10

	// statusSeenReply is IPS_SEEN_REPLY of linux/netfilter/nf_conntrack_common.h.
	statusSeenReply = 1 << 1
)

// tuple is one direction of a flow. Fields that the kernel did not send are zero.
type tuple struct {
	src, dst         netip.Addr
	srcPort, dstPort uint16
	protocol         snapshot.Protocol
	zoned            bool
}

// parseFlow reads the attributes of an entry. It returns false if a required attribute is missing; such an entry is
// never deleted.
func parseFlow(attrs []byte) (flow, bool) {
	f := flow{answered: true, attrs: attrs} // one without a status is left alone
	var original, reply tuple
	for typ, v := range netlink.Each(attrs) {
		switch typ {
		case ctaTupleOrig:
			original = parseTuple(v)
		case ctaTupleReply:
			f.reply, reply = v, parseTuple(v)
		case ctaStatus:
			f.answered = len(v) != 4 || v.Big32()&statusSeenReply != 0
		case ctaProtoInfo:
			f.tcp.parse(v)
		case ctaTimeout:
			f.tcp.left = v.Big32()
		case ctaCountersReply:
			f.replies, f.counted = netlink.Find(v, ctaCountersPackets).Big64(), true
		case ctaZone:
			f.zone = v
		case ctaID:
			f.id = v
		}
	}
	f.frontend = dataplane.Key{Addr: original.dst, Protocol: original.protocol, Port: original.dstPort}
	f.client = netip.AddrPortFrom(original.src, original.srcPort)
	f.endpoint = netip.AddrPortFrom(reply.src, reply.srcPort)
	f.masquerade = netip.AddrPortFrom(reply.dst, reply.dstPort)
	f.zoned = f.zone != nil || original.zoned || reply.zoned
	complete := original.dst.IsValid() && original.dstPort != 0 && reply.src.IsValid() && reply.srcPort != 0 &&
		original.protocol == reply.protocol && len(f.id) == 4
	return f, complete
}

// parse reads what the kernel knows of the protocol. It has nothing that is TCP's for other protocols.
func (i *tcpInfo) parse(b []byte) {
	for typ, v := range netlink.Each(netlink.Find(b, ctaProtoInfoTCP)) {
		switch typ {
		case ctaProtoInfoTCPState:
			i.established = v.Uint8() == tcpEstablished
		case ctaProtoInfoTCPFlagsOriginal: // flags, then a mask
			i.unacknowledged = len(v) == 2 && v[0]&tcpDataUnacknowledged != 0
		case ctaProtoInfoTCPFlagsReply:
			i.unreceived = len(v) == 2 && v[0]&tcpDataUnacknowledged != 0
		}
	}
}

func parseTuple(b []byte) (t tuple) {
	for typ, v := range netlink.Each(b) {
		switch typ {
		case ctaTupleIP:
			t.addresses(v)
		case ctaTupleProto:
			t.ports(v)
		case ctaTupleZone:
			t.zoned = true
		}
	}
	return t
}

func (t *tuple) addresses(b []byte) {
	for typ, v := range netlink.Each(b) {
		a, _ := netip.AddrFromSlice(v)
		switch typ {
		case ctaIPv4Src, ctaIPv6Src:
			t.src = a
		case ctaIPv4Dst, ctaIPv6Dst:
			t.dst = a
		}
	}
}

func (t *tuple) ports(b []byte) {
	for typ, v := range netlink.Each(b) {
		switch typ {
		case ctaProtoNum:
			t.protocol = snapshot.Protocol(v.Uint8())
		case ctaProtoSrcPort:
			t.srcPort = v.Big16()
		case ctaProtoDstPort:
			t.dstPort = v.Big16()
		}
	}
}
