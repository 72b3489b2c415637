package blackbox

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// end is one end of a connection: an address in 16 bytes, and a port. It has no pointers, so that rings of it cost the
// garbage collector nothing.
type end struct {
	addr [16]byte
	port uint16
}

func endOf(a netip.AddrPort) end { return end{a.Addr().As16(), a.Port()} }

func (e end) ip() netip.Addr                         { return netip.AddrFrom16(e.addr).Unmap() }
func (e end) to() netip.AddrPort                     { return netip.AddrPortFrom(e.ip(), e.port) }
func (e end) String() string                         { return e.to().String() }
func (t tuple) String() string                       { return fmt.Sprintf("%v > %v", t.from, t.to) }
func (t tuple) reversed() tuple                      { return tuple{t.protocol, t.to, t.from} }
func addrOf(b []byte) netip.Addr                     { a, _ := netip.AddrFromSlice(b); return a.Unmap() }
func instant(nano int64) string                      { return time.Unix(0, nano).Format("15:04:05.000000") }
func tupleOf(p uint8, from, to netip.AddrPort) tuple { return tuple{p, endOf(from), endOf(to)} }

// tuple is a direction of a connection.
type tuple struct {
	protocol uint8
	from, to end
}

// packet is the header of a packet, or of the packet that an ICMP error is about.
type packet struct {
	at int64 // nanoseconds since 1970
	tuple
	seq, ack uint32
	link     int32
	// length is how many bytes of payload TCP or UDP has.
	length uint16
	flags  uint8 // of TCP
	out    bool
	// icmp is the type and the code of an ICMP error, which came from via. tuple is that of the packet it is about.
	icmp uint16
	via  [16]byte
}

// The flags of TCP.
const (
	fin = 1 << iota
	syn
	rst
	push
	ack
)

func (p *packet) is(flags uint8) bool {
	return p.icmp == 0 && p.protocol == unix.IPPROTO_TCP && p.flags&flags == flags
}
func (p *packet) opens() bool   { return p.is(syn) && p.flags&ack == 0 }
func (p *packet) accepts() bool { return p.is(syn | ack) }

// asks says whether the packet asks for an answer: a SYN, or the first datagram.
func (p *packet) asks() bool { return p.opens() || p.icmp == 0 && p.protocol != unix.IPPROTO_TCP }

// same says whether two packets are one that was translated, or forwarded: translation leaves numbers as they are.
func (p *packet) same(o *packet) bool {
	return p.seq == o.seq && p.ack == o.ack && p.flags == o.flags && p.length == o.length && p.icmp == 0 && o.icmp == 0
}

func (p *packet) String() string {
	var what string
	switch {
	case p.icmp != 0:
		return fmt.Sprintf("ICMP %s from %v about %v", icmpName(p.icmp, p.from.ip().Is4()), addrOf(p.via[:]), p.tuple)
	case p.protocol == unix.IPPROTO_TCP:
		for i, name := range []string{"FIN", "SYN", "RST", "PSH", "ACK"} {
			if p.flags&(1<<i) != 0 {
				what += " " + name
			}
		}
		return fmt.Sprintf("%v%s seq %d ack %d, %d bytes", p.tuple, what, p.seq, p.ack, p.length)
	}
	return fmt.Sprintf("%v protocol %d, %d bytes", p.tuple, p.protocol, p.length)
}

// icmpName names an ICMP error by its type and code.
func icmpName(n uint16, v4 bool) string {
	names := map[uint16]string{0x300: "network unreachable", 0x301: "host unreachable", 0x303: "port unreachable",
		0x304: "fragmentation needed", 0x309: "prohibited", 0x30a: "prohibited", 0x30d: "prohibited",
		0xb00: "time exceeded"}
	if !v4 {
		names = map[uint16]string{0x100: "no route", 0x101: "prohibited", 0x103: "address unreachable",
			0x104: "port unreachable", 0x106: "rejected route", 0x200: "packet too big", 0x300: "time exceeded"}
	}
	if name, known := names[n]; known {
		return name
	}
	return fmt.Sprintf("type %d code %d", n>>8, n&0xff)
}

// unreachable says whether an ICMP error says that there is no way, rather than that nobody listens.
func (p *packet) unreachable() bool {
	switch icmpName(p.icmp, p.from.ip().Is4()) {
	case "network unreachable", "host unreachable", "no route", "address unreachable":
		return true
	}
	return false
}

// decode reads a packet from its IP header on; b may be cut off. It returns false for what is of no interest.
func (p *packet) decode(b []byte) bool {
	body, length, ok := p.decodeIP(b)
	if !ok {
		return false
	}
	switch p.protocol {
	case unix.IPPROTO_TCP:
		return p.decodeTCP(body, length)
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return p.decodeICMP(body)
	}
	if !p.decodePorts(body) {
		return false
	}
	p.length = uint16(max(0, length-8))
	return true
}

// decodeIP returns what follows the header, and how long that was before it was cut off.
func (p *packet) decodeIP(b []byte) (body []byte, length int, ok bool) {
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		header := int(b[0]&0xf) * 4
		length = int(binary.BigEndian.Uint16(b[2:])) - header
		if header < 20 || len(b) < header || binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			return nil, 0, false
		}
		p.from.addr, p.to.addr = netip.AddrFrom4([4]byte(b[12:])).As16(), netip.AddrFrom4([4]byte(b[16:])).As16()
		p.protocol, body = b[9], b[header:]
	case len(b) >= 40 && b[0]>>4 == 6:
		length = int(binary.BigEndian.Uint16(b[4:]))
		p.from.addr, p.to.addr = [16]byte(b[8:]), [16]byte(b[24:])
		p.protocol, body = b[6], b[40:]
	default:
		return nil, 0, false
	}
	return body, length, true
}

func (p *packet) decodePorts(b []byte) bool {
	if len(b) < 4 {
		return false
	}
	p.from.port, p.to.port = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	return true
}

func (p *packet) decodeTCP(b []byte, length int) bool {
	if len(b) < 14 || !p.decodePorts(b) {
		return false
	}
	p.seq, p.ack, p.flags = binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:]), b[13]&0x1f
	p.length = uint16(max(0, length-int(b[12]>>4)*4))
	return true
}

// decodeICMP reads the packet that an error is about.
func (p *packet) decodeICMP(b []byte) bool {
	if len(b) < 8 {
		return false
	}
	var about packet
	body, _, ok := about.decodeIP(b[8:])
	if !ok || !about.decodePorts(body) {
		return false
	}
	if len(body) >= 8 && about.protocol == unix.IPPROTO_TCP {
		p.seq = binary.BigEndian.Uint32(body[4:])
	}
	p.icmp, p.via, p.tuple = uint16(b[0])<<8|uint16(b[1]), p.from.addr, about.tuple
	return true
}
