package conntrack

import (
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Flow is an entry of the kernel's table with what the kernel counts of it.
type Flow struct {
	// Frontend is the destination of the first packet, Client its source, and Endpoint the source of the replies.
	Frontend         dataplane.Key
	Client, Endpoint netip.AddrPort
	// Masquerade is where the replies go: to the Client, or to the address and port that took its place.
	Masquerade netip.AddrPort
	// ID and Zone tell the entry from others with the same tuples.
	ID   uint32
	Zone uint16
	// Answered says that the endpoint has sent a packet, other than a reset that ended the flow.
	Answered bool
	// Assured says that the kernel takes the flow for more than one question and its answer.
	Assured bool
	// State is TCP's or SCTP's, by the kernel's numbers; 0 for other protocols.
	State uint8
	// Left is how long the kernel would have kept the entry without another packet; 0 if its time was over.
	Left time.Duration
	// Counted says that the kernel counted what was sent each way.
	Counted        bool
	Sent, Received Count
	// Start and Stop are when the entry came and went; zero if the kernel does not tell.
	Start, Stop time.Time
	// By is the port of the socket whose message deleted the entry; 0 if there is none.
	By uint32
}

// Count is what was sent one way, IP headers included.
type Count struct{ Packets, Bytes uint64 }

// The states of TCP and SCTP, of linux/netfilter/nf_conntrack_tcp.h and nf_conntrack_sctp.h.
const (
	TCPSynReceived  = 2
	TCPEstablished  = tcpEstablished
	TCPFinWait      = 4
	TCPCloseWait    = 5
	TCPLastAck      = 6
	TCPTimeWait     = 7
	TCPClose        = 8
	SCTPEstablished = 4
)

// Attributes of linux/netfilter/nfnetlink_conntrack.h that only this file reads.
const (
	ctaCountersOrig  = 9
	ctaCountersReply = 10
	ctaTimestamp     = 20

	ctaCountersPackets = 1
	ctaCountersBytes   = 2
	ctaTimestampStart  = 1
	ctaTimestampStop   = 2
	ctaProtoInfoSCTP   = 3
	ctaProtoState      = 1

	messageNew = unix.NFNL_SUBSYS_CTNETLINK << 8

	// statusAssured and statusDstNAT are IPS_ASSURED and IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h.
	statusAssured = 1 << 2
	statusDstNAT  = 1 << 5
)

// eventBuffer is the receive buffer of Events: that of some 20,000 events, a second of a busy node.
const eventBuffer = 16 << 20

// Events receives the ends, and on demand the beginnings, of flows that are translated.
type Events struct {
	listener *netlink.Listener
	// all says that flows count that are not translated.
	all bool
}

// Listen subscribes to the ends of flows in the network namespace of a file descriptor; 0 is the caller's own. The
// kernel filters the events by the status bit for translated destinations.
func Listen(netns int) (*Events, error) {
	l, err := netlink.Listen(unix.NETLINK_NETFILTER, netns, eventBuffer, translatedOnly)
	if err == nil {
		err = l.Join(unix.NFNLGRP_CONNTRACK_DESTROY, true)
	}
	if err != nil {
		return nil, fmt.Errorf("conntrack events: %w", err)
	}
	return &Events{listener: l}, nil
}

// findAttribute is SKF_AD_OFF + SKF_AD_NLATTR of linux/filter.h: a load from there finds an attribute.
const findAttribute = 1<<32 - 0x1000 + 12

// translatedOnly lets a message pass whose attribute CTA_STATUS has the bit for translated destinations.
var translatedOnly = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_IMM, K: netlink.HeaderLen + netlink.NetfilterLen},
	{Code: unix.BPF_LDX | unix.BPF_IMM, K: ctaStatus},
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: findAttribute},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0, Jt: 4},
	{Code: unix.BPF_MISC | unix.BPF_TAX},
	{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_IND, K: netlink.AttrLen},
	{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: statusDstNAT, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 1<<32 - 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

// WithIPVS takes the kernel's filter away: connections of IPVS have no such status bit, and are told from others here.
func (e *Events) WithIPVS() error { return e.listener.PassAll() }

// All has Receive tell of flows that are not translated, too.
func (e *Events) All() error {
	e.all = true
	return e.listener.PassAll()
}

// Beginnings subscribes to beginnings, too, or no longer.
func (e *Events) Beginnings(on bool) error { return e.listener.Join(unix.NFNLGRP_CONNTRACK_NEW, on) }

// Receive calls do with each flow that ends, or begins, before the deadline, which it then returns
// [os.ErrDeadlineExceeded] for. After Close it returns another error. A flow is valid until do returns.
func (e *Events) Receive(deadline time.Time, do func(f *Flow, ended bool)) error {
	var f Flow
	return e.listener.Receive(deadline, func(m netlink.Message) {
		if len(m.Body) < netlink.NetfilterLen || m.Type != messageNew && m.Type != messageDelete {
			return
		}
		if f.parse(m.Body[netlink.NetfilterLen:]) || e.all && f.Client.IsValid() {
			f.By = m.Port
			do(&f, m.Type == messageDelete)
		}
	})
}

// Lost returns how many events there was no room for.
func (e *Events) Lost() uint64 { return e.listener.Lost() }

// Close ends Receive.
func (e *Events) Close() error { return e.listener.Close() }

// Port is the address of the socket that deletes flows, by which an event tells who did.
func (c *Conn) Port() (uint32, error) { return c.deletes.Wire.Port() }

// Translated says whether the flow leads to another destination than its client's.
func (f *Flow) Translated() bool {
	return f.Endpoint != netip.AddrPortFrom(f.Frontend.Addr, f.Frontend.Port)
}

// parse reads the attributes of an entry. It returns false if a required one is missing, and then leaves the flow
// empty, or if the flow is not translated.
func (f *Flow) parse(attrs []byte) bool {
	base, ok := parseFlow(attrs)
	if *f = (Flow{}); ok {
		f.take(&base)
	}
	return ok && base.translated()
}

// take reads an entry.
func (f *Flow) take(base *flow) {
	*f = Flow{Frontend: base.frontend, Client: base.client, Endpoint: base.endpoint, Masquerade: base.masquerade,
		Answered: base.answered, ID: netlink.Value(base.id).Big32(), Zone: netlink.Value(base.zone).Big16(),
		Left: time.Duration(base.tcp.left) * time.Second}
	for typ, v := range netlink.Each(base.attrs) {
		switch typ {
		case ctaStatus:
			f.Assured = v.Big32()&statusAssured != 0
		case ctaCountersOrig:
			f.Counted, f.Sent = true, parseCount(v)
		case ctaCountersReply:
			f.Received = parseCount(v)
		case ctaTimestamp:
			f.Start, f.Stop = nanoseconds(v, ctaTimestampStart), nanoseconds(v, ctaTimestampStop)
		case ctaProtoInfo:
			info := uint16(ctaProtoInfoTCP)
			if f.Frontend.Protocol == snapshot.SCTP {
				info = ctaProtoInfoSCTP
			}
			f.State = netlink.Find(netlink.Find(v, info), ctaProtoState).Uint8()
		}
	}
}

func parseCount(b []byte) Count {
	return Count{netlink.Find(b, ctaCountersPackets).Big64(), netlink.Find(b, ctaCountersBytes).Big64()}
}

func nanoseconds(b []byte, typ uint16) time.Time {
	if n := netlink.Find(b, typ).Big64(); n != 0 {
		return time.Unix(0, int64(n))
	}
	return time.Time{}
}
