package conntrack

import (
	"net/netip"

	"github.com/verdict-proxy/verdict/internal/netlink"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// flow is one entry of the kernel's table. Its byte slices hold until the next datagram is read.
type flow struct {
	// frontend is where the first packet was sent to.
	frontend dataplane.Key
	// endpoint is where it went: the source of the replies.
	endpoint netip.AddrPort
	// zoned says that it is not in the default zone, in one direction at least.
	zoned bool
	// reply (the tuple of the replies), zone and id are what the kernel finds it by, as it wrote them. zone is nil in
	// the default one.
	reply, zone, id []byte
}

// translated says whether the flow goes elsewhere than it was sent to. The kernel's status has a bit for that, too,
// which is not set when an endpoint happens to be the frontend's own address and port.
func (f *flow) translated() bool {
	return f.endpoint != netip.AddrPortFrom(f.frontend.Addr, f.frontend.Port)
}

// Attributes of linux/netfilter/nfnetlink_conntrack.h.
const (
	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaID         = 12
	ctaZone       = 18
	ctaFilter     = 25 // since 5.8

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

	ctaFilterOrigFlags = 1
)

// tuple is one direction of a flow. What the kernel did not say is zero.
type tuple struct {
	src, dst         netip.Addr
	srcPort, dstPort uint16
	protocol         snapshot.Protocol
	zoned            bool
}

// parseFlow reads the attributes of an entry. One of which anything needed is missing is no flow: it is never judged.
func parseFlow(attrs []byte) (flow, bool) {
	var f flow
	var original, reply tuple
	for typ, v := range netlink.Each(attrs) {
		switch typ {
		case ctaTupleOrig:
			original = parseTuple(v)
		case ctaTupleReply:
			f.reply, reply = v, parseTuple(v)
		case ctaZone:
			f.zone = v
		case ctaID:
			f.id = v
		}
	}
	f.frontend = dataplane.Key{Addr: original.dst, Protocol: original.protocol, Port: original.dstPort}
	f.endpoint = netip.AddrPortFrom(reply.src, reply.srcPort)
	f.zoned = f.zone != nil || original.zoned || reply.zoned
	complete := original.dst.IsValid() && original.dstPort != 0 && reply.src.IsValid() && reply.srcPort != 0 &&
		original.protocol == reply.protocol && len(f.id) == 4
	return f, complete
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
