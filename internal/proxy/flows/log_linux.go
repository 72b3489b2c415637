package flows

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Messages and attributes of linux/netfilter/nfnetlink_log.h.
const (
	logPacket = unix.NFNL_SUBSYS_ULOG << 8
	logConfig = unix.NFNL_SUBSYS_ULOG<<8 | 1

	configCommand   = 1
	configMode      = 2
	configThreshold = 5
	commandBind     = 1
	copyPacket      = 2

	packetPayload = 9
	packetPrefix  = 10
)

// logBuffer is the receive buffer for logged packets.
const logBuffer = 4 << 20

// logged is a packet that a rule logged. An address has port 0 if the packet's protocol has no ports.
type logged struct {
	prefix   string
	protocol snapshot.Protocol
	from, to netip.AddrPort
	// bytes is the length that the IP header tells.
	bytes uint64
}

// packetLog receives what rules log to a group of nflog.
type packetLog struct{ *netlink.Listener }

// openLog receives the group in the network namespace of the calling thread. One socket at a time can.
func openLog(group uint16) (*packetLog, error) {
	l, err := netlink.Listen(unix.NETLINK_NETFILTER, 0, logBuffer, nil)
	if err != nil {
		return nil, fmt.Errorf("nflog: %w", err)
	}
	var w netlink.Buffer
	message := func(attr uint16, value ...byte) {
		m := w.Message(logConfig, 0, unix.AF_UNSPEC, unix.NFNETLINK_V0, byte(group>>8), byte(group))
		w.Attr(attr, value...)
		w.End(m)
	}
	message(configCommand, commandBind)
	message(configMode, append(binary.BigEndian.AppendUint32(nil, 0xffff), copyPacket, 0)...)
	message(configThreshold, 0, 0, 0, 1) // one packet a message, so that the messages lost are the packets lost
	if err := l.Register(w.Bytes()); err != nil {
		l.Close()
		return nil, fmt.Errorf("nflog group %d: %w", group, err)
	}
	return &packetLog{l}, nil
}

// receive calls do with each packet that comes before the deadline; see [netlink.Listener.Receive].
func (l *packetLog) receive(deadline time.Time, do func(*logged)) error {
	return l.Receive(deadline, func(m netlink.Message) {
		if m.Type != logPacket || len(m.Body) < netlink.NetfilterLen {
			return
		}
		var p logged
		for typ, v := range netlink.Each(m.Body[netlink.NetfilterLen:]) {
			switch typ {
			case packetPrefix:
				p.prefix = v.Text()
			case packetPayload:
				p.parse(v)
			}
		}
		if p.from.IsValid() {
			do(&p)
		}
	})
}

// parse reads the headers of a packet. If they are incomplete, from stays the zero AddrPort.
func (p *logged) parse(b []byte) {
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		p.bytes = uint64(binary.BigEndian.Uint16(b[2:]))
		p.transport(b[9], b[min(int(b[0]&15)*4, len(b)):], b[12:16], b[16:20])
	case len(b) >= 40 && b[0]>>4 == 6:
		p.bytes = 40 + uint64(binary.BigEndian.Uint16(b[4:]))
		p.transport(b[6], b[40:], b[8:24], b[24:40])
	}
}

// transport reads the ports. Behind extension headers of IPv6 it finds none.
func (p *logged) transport(protocol byte, b, from, to []byte) {
	p.protocol = snapshot.Protocol(protocol)
	var source, dest uint16
	switch p.protocol {
	case snapshot.TCP, snapshot.UDP, snapshot.SCTP:
		if len(b) < 4 {
			return
		}
		source, dest = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	}
	src, _ := netip.AddrFromSlice(from)
	dst, _ := netip.AddrFromSlice(to)
	p.from, p.to = netip.AddrPortFrom(src, source), netip.AddrPortFrom(dst, dest)
}
