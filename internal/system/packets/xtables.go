package packets

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// What iptables' matches and targets do is the same in both of its variants: in nf_tables they are expressions, with
// the same data.

// compileMatch translates a match with its revision and data.
func compileMatch(name string, revision uint32, data []byte) []nfOp {
	word := func(at int) uint32 { return binary.NativeEndian.Uint32(data[at:]) }
	switch {
	case name == "comment":
		return nil
	case name == "conntrack" && revision == 3 && len(data) >= 152:
		// struct xt_conntrack_mtinfo3: 8 addresses, 2 times and 5 ports lie before the flags.
		const flags, inverted, mask = 146, 148, 150
		const state = 1
		half := func(at int) uint16 { return binary.NativeEndian.Uint16(data[at:]) }
		if half(flags) == state {
			return []nfOp{{kind: opState, seed: uint32(half(mask)), inverted: half(inverted)&state != 0}}
		}
	case name == "addrtype" && revision == 1 && len(data) >= 8:
		// struct xt_addrtype_info_v1: a set of types for the source, one for the destination, and flags.
		const local, invertSource, invertDestination = 1 << unix.RTN_LOCAL, 1, 2
		source, dest := binary.NativeEndian.Uint16(data), binary.NativeEndian.Uint16(data[2:])
		flags := word(4)
		switch {
		case dest == local && source == 0 && flags&^invertDestination == 0:
			return []nfOp{{kind: opLocalAddress, inverted: flags != 0}}
		case source == local && dest == 0 && flags&^invertSource == 0:
			return []nfOp{{kind: opLocalAddress, inverted: flags != 0, what: 1}}
		}
	case name == "mark" && revision == 1 && len(data) >= 9:
		// struct xt_mark_mtinfo1: mark, mask, and whether the match is inverted.
		return []nfOp{{kind: opMark, seed: word(0), modulus: word(4), inverted: data[8] != 0}}
	case name == "tcp" && len(data) >= 12, name == "udp" && len(data) >= 9:
		return compilePorts(name, data)
	case name == "limit":
		return []nfOp{{unknown: name}}
	}
	return []nfOp{{unknown: "match " + name}}
}

// compilePorts translates the matches tcp and udp: struct xt_tcp and xt_udp begin with two ranges of ports.
func compilePorts(name string, data []byte) (ops []nfOp) {
	const invertSource, invertDestination, invertFlags, invertOption = 1, 2, 4, 8
	port := func(at int) uint16 { return binary.NativeEndian.Uint16(data[at:]) }
	inverted := data[8]
	if name == "tcp" {
		option, mask, flags := data[8], data[9], data[10]
		if inverted = data[11]; option != 0 || inverted&invertOption != 0 {
			return []nfOp{{unknown: "match tcp with an option"}}
		}
		ops = compareMasked(nfOp{kind: opPayload, what: baseTransport, offset: tcpFlagsAt, n: 1}, []byte{flags},
			[]byte{mask}, inverted&invertFlags != 0)
	}
	ops = append(ops, comparePort(0, port(0), port(2), inverted&invertSource != 0)...)
	return append(ops, comparePort(2, port(4), port(6), inverted&invertDestination != 0)...)
}

// comparePort compares a port of the transport header with a range; nothing if any port will do.
func comparePort(offset int, low, high uint16, inverted bool) []nfOp {
	const last = 0xffff
	if low == 0 && high == last && !inverted {
		return nil
	}
	return []nfOp{{kind: opPayload, what: baseTransport, offset: offset, n: 2}, {kind: opRange, n: 2, inverted: inverted,
		data: binary.BigEndian.AppendUint16(nil, low), high: binary.BigEndian.AppendUint16(nil, high)}}
}

// compileXTarget translates a target with its data.
func compileXTarget(name string, data []byte) nfOp {
	switch name {
	case "REJECT":
		return nfOp{kind: opReject, n: 3}
	case "LOG", "NFLOG", "TCPMSS", "CHECKSUM", "TOS", "DSCP":
		return nfOp{kind: opNothing}
	case "NOTRACK":
		return nfOp{kind: opNoTrack}
	case "MARK":
		// struct xt_mark_tginfo2: the bits that are set, and those that are cleared before.
		if len(data) >= 8 {
			return nfOp{kind: opSetMark, seed: binary.NativeEndian.Uint32(data), modulus: binary.NativeEndian.Uint32(data[4:])}
		}
	case "CT":
		// struct xt_ct_target_info begins with flags; alias says that iptables lists it as NOTRACK.
		const noTrack, alias = 1, 2
		if len(data) >= 2 && binary.NativeEndian.Uint16(data)&^alias == noTrack {
			return nfOp{kind: opNoTrack}
		}
	}
	return nfOp{unknown: "target " + name}
}
