package nfteval

import (
	"errors"
	"fmt"
	"net/netip"
)

// field gives the value of a field of the packet. A field that the packet does not have is no match.
func (w *evaluation) field(kind string, m map[string]any, p *packet) (value, error) {
	name := field(kind, m)
	t, known := fieldTypes[name]
	if !known {
		return "", fmt.Errorf("expression %s is not known", text(map[string]any{kind: m}))
	}
	switch {
	case name == linkSource:
		return w.linkSource(p)
	case kind == "payload":
		return w.payload(fmt.Sprint(m["protocol"]), fmt.Sprint(m["field"]), p)
	case kind == "meta":
		return w.meta(name, t, p)
	case kind == "ct":
		return w.ct(name, t, m["dir"], p)
	}
	a := p.dst.Addr()
	if name == "fib saddr type" {
		if a = p.src.Addr(); p.masqueraded {
			a = netip.IPv4Unspecified()
		}
	}
	return w.addressType(a)
}

// linkSource gives the hardware address of who sent the packet to this host: somebody's, or on the loopback interface
// zero. A packet of this host has no link-layer header before it has left postrouting.
func (w *evaluation) linkSource(p *packet) (value, error) {
	if p.iif == "lo" {
		return number(0, "ether_addr"), nil
	}
	if w.question.Iif == "" {
		return "", errNoMatch
	}
	return number(0x020000000001, "ether_addr"), nil
}

func (w *evaluation) payload(protocol, field string, p *packet) (value, error) {
	switch {
	case (protocol == "ip" || protocol == "ip6") && protocol != w.family:
		return "", errNoMatch
	case protocol == "tcp" || protocol == "udp" || protocol == "sctp":
		if protocol != w.question.Protocol {
			return "", errNoMatch
		}
	case protocol == "icmp" || protocol == "icmpv6": // nobody asks about a ping
		return "", errNoMatch
	}
	if (field == "saddr" || field == "sport") && p.masqueraded {
		return "", errMasqueraded
	}
	switch field {
	case "saddr":
		return address(p.src.Addr()), nil
	case "daddr":
		return address(p.dst.Addr()), nil
	case "sport":
		return number(uint64(p.src.Port()), "inet_service"), nil
	case "dport":
		return number(uint64(p.dst.Port()), "inet_service"), nil
	case "flags": // of TCP: the first packet has SYN only
		return number(2, "tcp_flag"), nil
	}
	return w.protocol(), nil // ip protocol, ip6 nexthdr
}

func (w *evaluation) protocol() value {
	return number(uint64(protocols[w.question.Protocol]), "inet_proto")
}

// nfproto gives the family as a number, that of ether_type or of nf_proto.
func (w *evaluation) nfproto(t datatype) value {
	words := map[string]string{"ip": "ipv4", "ip6": "ipv6"}
	if t == "ether_type" {
		words = map[string]string{"ip": "ip", "ip6": "ip6"}
	}
	return number(uint64(names[t][words[w.family]]), t)
}

func (w *evaluation) meta(name string, t datatype, p *packet) (value, error) {
	switch name {
	case "meta iif", "meta iifname":
		return interfaceName(p.iif), nil
	case "meta oif", "meta oifname":
		if p.oif == unknownInterface {
			return "", errors.New("the packet's outgoing interface is not known: give the question an Oif")
		}
		return interfaceName(p.oif), nil
	case "meta l4proto":
		return w.protocol(), nil
	case "meta nfproto", "meta protocol":
		return w.nfproto(t), nil
	case "meta mark":
		return number(uint64(p.mark), t), nil
	}
	return number(uint64(p.priority), t), nil // meta priority
}

// ct gives a field of the connection. Before it is tracked there is none, but for its state.
func (w *evaluation) ct(name string, t datatype, direction any, p *packet) (value, error) {
	if name == "ct state" {
		state := "new"
		switch {
		case p.untracked:
			state = "untracked"
		case !p.tracked:
			state = "invalid"
		}
		return number(uint64(names[t][state]), t), nil
	}
	if !p.tracked || p.untracked {
		return "", errNoMatch
	}
	if direction != nil && direction != "original" {
		return "", fmt.Errorf("%s of direction %v is not known", name, direction)
	}
	switch name {
	case "ct status":
		return number(uint64(p.status), t), nil
	case "ct direction":
		return number(0, t), nil
	case "ct mark":
		return number(uint64(p.ctMark), t), nil
	case "ct protocol":
		return w.protocol(), nil
	case "ct l3proto":
		return w.nfproto(t), nil
	case "ct proto-src":
		return number(uint64(p.origSrc.Port()), t), nil
	case "ct proto-dst":
		return number(uint64(p.origDst.Port()), t), nil
	}
	a := p.origSrc.Addr()
	if name == "ct ip daddr" || name == "ct ip6 daddr" {
		a = p.origDst.Addr()
	}
	if len(a.AsSlice()) != sizes[t] {
		return "", errNoMatch
	}
	return address(a), nil
}

// addressType tells local addresses from others. Which of those are broadcast, or have no route, is not known.
func (w *evaluation) addressType(a netip.Addr) (value, error) {
	word := "unicast"
	switch {
	case w.question.local(a):
		word = "local"
	case a.IsMulticast():
		word = "multicast"
	case a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		word = "broadcast"
	case a.IsUnspecified():
		return "", fmt.Errorf("what fib says of %s is not known", a)
	}
	return number(uint64(names["fib_addrtype"][word]), "fib_addrtype"), nil
}
