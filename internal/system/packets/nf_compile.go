package packets

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// nfKind is what an expression does.
type nfKind uint8

const (
	opUnknown nfKind = iota
	opNothing        // counts, or logs
	opMeta
	opSetMeta
	opPayload
	opCompare
	opRange
	opBitwise
	opByteorder
	opImmediate
	opVerdict
	opLookup
	opUpdate
	opLot
	opHash
	opNAT
	opMasquerade
	opReject
	opCT
	opAddressType
	opLocalAddress // iptables: an address is this host's
	opMark         // iptables: the mark has a value under a mask
	opSetMark      // iptables: some bits of the mark are set
	opState        // iptables: the state of a connection is one of some
	opNoTrack
	opForward
)

// Where the parts of a header lie.
const (
	baseLink, baseNetwork, baseTransport = 0, 1, 2
	tcpFlagsAt                           = 13
)

// nfOp is one expression. Registers are offsets into the machine's bytes.
type nfOp struct {
	kind            nfKind
	what            uint8 // a key, a base or an operator
	inverted        bool
	original, reply bool
	source, dest    int
	port            int // the register of a port; -1 if there is none
	n, offset       int
	modulus, seed   uint32
	data, high      []byte
	set             *nfSet
	code            int32
	chain           *nfChain
	// layout says of what parts a lookup's key consists: holdsSource and its like, and a question mark for four bytes of
	// anything else.
	layout string
	// isMap says that a lookup loads data; sourceAt is where in what it looks at a source address stands, or -1.
	isMap    bool
	sourceAt int
	bits     int // of the source address that are compared
	// timeout is that of the element that an update adds, in milliseconds.
	timeout uint64
	// isLot says that a hash chooses from a fixed map. One that finds a client again in a dynamic map does not.
	isLot bool
	// unknown says what the package does not know of the expression.
	unknown string
}

// register returns the place of a register.
func register(v netlink.Value) int {
	n := int(v.Big32())
	switch {
	case n >= unix.NFT_REG_1 && n <= unix.NFT_REG_4:
		return (n - unix.NFT_REG_1) * 16
	case n >= unix.NFT_REG32_00 && n <= unix.NFT_REG32_15:
		return (n - unix.NFT_REG32_00) * 4
	}
	return registerBytes // beyond the end: checked by compile
}

// registerBytes is the size of all registers.
const registerBytes = 64

// compile translates the expressions of a rule. What is not known becomes an opUnknown.
func (t *nfTable) compile(handle uint64, expressions []byte) nfRule {
	rule := nfRule{handle: handle}
	for _, e := range netlink.Each(expressions) {
		name := netlink.Find(e, unix.NFTA_EXPR_NAME).Text()
		a := netlink.Decode(netlink.Find(e, unix.NFTA_EXPR_DATA))
		if name == "match" {
			rule.ops = append(rule.ops, compileMatch(a[unix.NFTA_MATCH_NAME].Text(), a[unix.NFTA_MATCH_REV].Big32(),
				a[unix.NFTA_MATCH_INFO])...)
			continue
		}
		op := t.expression(name, a)
		if op.kind == opUnknown && op.unknown == "" {
			op.unknown = name
		}
		if op.unknown == "" && op.overruns() {
			op.unknown = name + " beyond the registers"
		}
		rule.ops = append(rule.ops, op)
	}
	rule.finish(t.family)
	return rule
}

// finish leaves out what does nothing, and notes what comparisons, lookups and hashes are about.
func (r *nfRule) finish(f ipfamily.Family) {
	for i := range r.ops {
		if r.ops[i].unknown != "" {
			r.ops[i].kind = opUnknown
		}
	}
	r.ops = slices.DeleteFunc(r.ops, func(op nfOp) bool { return op.kind == opNothing })
	for n := len(r.ops); n > 0 && r.ops[n-1].unknown == "limit"; n-- { // of what does nothing here, as a log
		r.ops = r.ops[:n-1]
	}
	findLayouts(f, r.ops)
	findHashLots(r.ops)
}

// overruns reports whether an expression asks for registers that there are not.
func (op *nfOp) overruns() bool {
	written := 4
	switch op.kind {
	case opPayload, opBitwise, opByteorder:
		written = op.n
	case opLookup, opUpdate:
		written = op.set.dataLen
		if !op.isMap && op.kind == opLookup || op.dest < 0 {
			written = 0
		}
	case opMeta, opCT:
		written = 16
	case opCompare, opRange, opSetMeta, opNAT, opVerdict, opMasquerade, opReject:
		written = 0
	case opImmediate:
		written = len(op.data)
	}
	return op.source+op.n > registerBytes || op.dest+written > registerBytes ||
		op.kind == opByteorder && op.offset != 2 && op.offset != 4 && op.offset != 8
}

// expression translates one expression.
func (t *nfTable) expression(name string, a netlink.Attributes) nfOp {
	switch name {
	case "counter", "log", "last":
		return nfOp{kind: opNothing}
	case "notrack":
		return nfOp{kind: opNoTrack}
	case "meta":
		return compileMeta(a)
	case "payload":
		return t.compilePayload(a)
	case "cmp":
		data := netlink.Find(a[unix.NFTA_CMP_DATA], unix.NFTA_DATA_VALUE)
		return nfOp{kind: opCompare, source: register(a[unix.NFTA_CMP_SREG]), what: uint8(a[unix.NFTA_CMP_OP].Big32()),
			data: clone(data), n: len(data)}
	case "range":
		low := netlink.Find(a[unix.NFTA_RANGE_FROM_DATA], unix.NFTA_DATA_VALUE)
		return nfOp{kind: opRange, source: register(a[unix.NFTA_RANGE_SREG]), n: len(low), data: clone(low),
			high:     clone(netlink.Find(a[unix.NFTA_RANGE_TO_DATA], unix.NFTA_DATA_VALUE)),
			inverted: a[unix.NFTA_RANGE_OP].Big32() == unix.NFT_RANGE_NEQ}
	case "bitwise":
		return compileBitwise(a)
	case "byteorder":
		return nfOp{kind: opByteorder, source: register(a[unix.NFTA_BYTEORDER_SREG]),
			dest: register(a[unix.NFTA_BYTEORDER_DREG]), n: int(a[unix.NFTA_BYTEORDER_LEN].Big32()),
			offset: int(a[unix.NFTA_BYTEORDER_SIZE].Big32())}
	case "immediate":
		return t.compileImmediate(a)
	case "lookup":
		return t.compileLookup(a)
	case "dynset":
		return t.compileUpdate(a)
	case "exthdr":
		return compileExtension(a)
	}
	return t.compileTarget(name, a)
}

// compileTarget translates what chooses, and what ends a packet's way.
func (t *nfTable) compileTarget(name string, a netlink.Attributes) nfOp {
	switch name {
	case "numgen":
		return nfOp{kind: opLot, dest: register(a[unix.NFTA_NG_DREG]), modulus: a[unix.NFTA_NG_MODULUS].Big32(),
			offset: int(a[unix.NFTA_NG_OFFSET].Big32())}
	case "hash":
		return compileHash(a)
	case "nat":
		return t.compileNAT(a)
	case "masq":
		return nfOp{kind: opMasquerade}
	case "fwd":
		const addr, proto = 2, 3 // NFTA_FWD_SREG_ADDR, NFTA_FWD_NFPROTO
		if a[proto].Big32() != uint32(t.family.NFProto()) {
			return nfOp{unknown: "fwd to no address of this family"}
		}
		return nfOp{kind: opForward, source: register(a[addr]), n: t.family.AddrLen()}
	case "reject":
		return nfOp{kind: opReject, what: uint8(a[unix.NFTA_REJECT_TYPE].Big32()),
			n: int(a[unix.NFTA_REJECT_ICMP_CODE].Uint8())}
	case "ct":
		return t.compileCT(a)
	case "fib":
		op := nfOp{kind: opAddressType, dest: register(a[unix.NFTA_FIB_DREG])}
		flags := a[unix.NFTA_FIB_FLAGS].Big32()
		op.inverted = flags == unix.NFTA_FIB_F_SADDR
		if a[unix.NFTA_FIB_RESULT].Big32() != unix.NFT_FIB_RESULT_ADDRTYPE || flags != unix.NFTA_FIB_F_DADDR && !op.inverted {
			op.unknown = "fib with another result than the type of an address"
		}
		return op
	case "target":
		return compileXTarget(a[unix.NFTA_TARGET_NAME].Text(), a[unix.NFTA_TARGET_INFO])
	case "objref":
		const counter = 1
		if a[unix.NFTA_OBJREF_IMM_TYPE].Big32() == counter {
			return nfOp{kind: opNothing}
		}
	}
	return nfOp{unknown: name}
}

// compileExtension translates what reads an extension header of IPv6: first packets have none, and such a rule does not
// match.
func compileExtension(a netlink.Attributes) nfOp {
	const flags, op, sreg = 5, 6, 7 // NFTA_EXTHDR_*
	if _, sets := a[sreg]; sets || a[op].Big32() != 0 || a[flags].Big32() != 0 {
		return nfOp{unknown: "exthdr"}
	}
	return nfOp{kind: opVerdict, code: codeBreak}
}

func clone(v []byte) []byte { return append([]byte(nil), v...) }

func compileMeta(a netlink.Attributes) nfOp {
	key := a[unix.NFTA_META_KEY].Big32()
	op := nfOp{kind: opMeta, what: uint8(key)}
	if _, ok := a[unix.NFTA_META_SREG]; ok {
		op.kind, op.source = opSetMeta, register(a[unix.NFTA_META_SREG])
		if key != unix.NFT_META_MARK && key != unix.NFT_META_PRIORITY {
			op.unknown = fmt.Sprintf("meta key %d, which is set", key)
		}
		return op
	}
	op.dest = register(a[unix.NFTA_META_DREG])
	switch key {
	case unix.NFT_META_PROTOCOL, unix.NFT_META_NFPROTO, unix.NFT_META_L4PROTO, unix.NFT_META_PRIORITY, unix.NFT_META_MARK,
		unix.NFT_META_IIF, unix.NFT_META_IIFNAME, unix.NFT_META_OIF, unix.NFT_META_OIFNAME, unix.NFT_META_IIFTYPE,
		unix.NFT_META_PKTTYPE:
	default:
		op.unknown = fmt.Sprintf("meta key %d", key)
	}
	return op
}

// compilePayload accepts the parts of a packet that are known.
func (t *nfTable) compilePayload(a netlink.Attributes) nfOp {
	op := nfOp{kind: opPayload, what: uint8(a[unix.NFTA_PAYLOAD_BASE].Big32()),
		dest: register(a[unix.NFTA_PAYLOAD_DREG]), offset: int(a[unix.NFTA_PAYLOAD_OFFSET].Big32()),
		n: int(a[unix.NFTA_PAYLOAD_LEN].Big32())}
	if _, ok := a[unix.NFTA_PAYLOAD_SREG]; ok {
		op.unknown = "payload, which is set"
		return op
	}
	var known [][2]int
	switch {
	case op.what == baseLink:
		known = [][2]int{{6, 12}}
	case op.what == baseNetwork && t.family == ipfamily.IPv4:
		known = [][2]int{{6, 8}, {9, 10}, {12, 20}} // first packets are no fragments
	case op.what == baseNetwork:
		known = [][2]int{{6, 7}, {8, 40}}
	case op.what == baseTransport:
		known = [][2]int{{0, 8}, {tcpFlagsAt, tcpFlagsAt + 1}}
	}
	for _, k := range known {
		if op.n > 0 && op.offset >= k[0] && op.offset+op.n <= k[1] {
			return op
		}
	}
	op.unknown = fmt.Sprintf("payload %d bytes at %d of header %d", op.n, op.offset, op.what)
	return op
}

func compileBitwise(a netlink.Attributes) nfOp {
	op := nfOp{kind: opBitwise, source: register(a[unix.NFTA_BITWISE_SREG]), dest: register(a[unix.NFTA_BITWISE_DREG]),
		n: int(a[unix.NFTA_BITWISE_LEN].Big32()), data: clone(netlink.Find(a[unix.NFTA_BITWISE_MASK], unix.NFTA_DATA_VALUE)),
		high: clone(netlink.Find(a[unix.NFTA_BITWISE_XOR], unix.NFTA_DATA_VALUE))}
	const operator = 6 // NFTA_BITWISE_OP
	if v, ok := a[operator]; ok && v.Big32() != 0 || len(op.data) != op.n || len(op.high) != op.n {
		op.unknown = "bitwise with another operation than mask and xor"
	}
	return op
}

func (t *nfTable) compileImmediate(a netlink.Attributes) nfOp {
	if v := netlink.Find(a[unix.NFTA_IMMEDIATE_DATA], unix.NFTA_DATA_VERDICT); v != nil {
		op := nfOp{kind: opVerdict}
		op.code, op.chain, op.unknown = t.verdict(v)
		return op
	}
	data := clone(netlink.Find(a[unix.NFTA_IMMEDIATE_DATA], unix.NFTA_DATA_VALUE))
	op := nfOp{kind: opImmediate, dest: register(a[unix.NFTA_IMMEDIATE_DREG]), data: data}
	if op.dest+len(data) > registerBytes {
		op.unknown = "immediate beyond the registers"
	}
	return op
}

func (t *nfTable) compileLookup(a netlink.Attributes) nfOp {
	name := a[unix.NFTA_LOOKUP_SET].Text()
	op := nfOp{kind: opLookup, set: t.set(name), source: register(a[unix.NFTA_LOOKUP_SREG]), sourceAt: -1,
		inverted: a[unix.NFTA_LOOKUP_FLAGS].Big32()&1 != 0}
	if op.set == nil {
		op.unknown = "lookup in the unknown set " + name
		return op
	}
	op.unknown = op.set.odd
	op.n = op.set.keyLen
	if v, ok := a[unix.NFTA_LOOKUP_DREG]; ok {
		op.isMap = true
		if v.Big32() != unix.NFT_REG_VERDICT {
			op.dest = register(v)
		}
	}
	return op
}

// dynsetDelete is NFT_DYNSET_OP_DELETE.
const dynsetDelete = 2

func (t *nfTable) compileUpdate(a netlink.Attributes) nfOp {
	name := a[unix.NFTA_DYNSET_SET_NAME].Text()
	op := nfOp{kind: opUpdate, set: t.set(name), source: register(a[unix.NFTA_DYNSET_SREG_KEY]), dest: -1,
		what: uint8(a[unix.NFTA_DYNSET_OP].Big32())}
	const flagInvert = 1
	switch {
	case op.set == nil:
		op.unknown = "update of the unknown set " + name
	case a[unix.NFTA_DYNSET_FLAGS].Big32()&flagInvert != 0 || op.what > dynsetDelete:
		op.unknown = "dynset with another operation than add, update and delete"
	default:
		op.n, op.timeout = op.set.keyLen, op.set.timeout
	}
	if own := a[unix.NFTA_DYNSET_TIMEOUT].Big64(); own > 0 { // 0 means the set's
		op.timeout = own
	}
	if v, ok := a[unix.NFTA_DYNSET_SREG_DATA]; ok {
		op.dest = register(v)
	}
	for typ, v := range a {
		switch odd := oddExpression(v); {
		case typ != unix.NFTA_DYNSET_EXPR || odd == "":
		case odd == OverLimit:
			return nfOp{kind: opVerdict, code: codeBreak}
		default:
			op.unknown = "dynset with " + odd
		}
	}
	return op
}

func compileHash(a netlink.Attributes) nfOp {
	op := nfOp{kind: opHash, source: register(a[unix.NFTA_HASH_SREG]), dest: register(a[unix.NFTA_HASH_DREG]),
		n: int(a[unix.NFTA_HASH_LEN].Big32()), modulus: a[unix.NFTA_HASH_MODULUS].Big32(),
		seed: a[unix.NFTA_HASH_SEED].Big32(), offset: int(a[unix.NFTA_HASH_OFFSET].Big32())}
	const symmetric = 1
	if a[unix.NFTA_HASH_TYPE].Big32() == symmetric {
		op.kind, op.source, op.n = opLot, 0, 0 // of many clients, each value is as likely as another
	}
	return op
}

// compileNAT translates what gives a packet another address: from registers, and to all destinations alike.
func (t *nfTable) compileNAT(a netlink.Attributes) nfOp {
	op := nfOp{kind: opNAT, port: -1, source: -1, what: uint8(a[unix.NFTA_NAT_TYPE].Big32())}
	if v, ok := a[unix.NFTA_NAT_REG_ADDR_MIN]; ok {
		op.source = register(v)
	}
	if v, ok := a[unix.NFTA_NAT_REG_PROTO_MIN]; ok {
		op.port = register(v)
	}
	distinct := func(low, high uint16) bool {
		v, ok := a[high]
		return ok && v.Big32() != a[low].Big32()
	}
	switch {
	case op.what != unix.NFT_NAT_DNAT:
		op.unknown = "snat"
	case op.source < 0 || op.source+t.family.AddrLen() > registerBytes || op.port+2 > registerBytes:
		op.unknown = "dnat without an address"
	case distinct(unix.NFTA_NAT_REG_ADDR_MIN, unix.NFTA_NAT_REG_ADDR_MAX),
		distinct(unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX):
		op.unknown = "dnat to a range"
	}
	op.n = 0
	return op
}

func (t *nfTable) compileCT(a netlink.Attributes) nfOp {
	key := a[unix.NFTA_CT_KEY].Big32()
	op := nfOp{kind: opCT, what: uint8(key), dest: register(a[unix.NFTA_CT_DREG])}
	if _, ok := a[unix.NFTA_CT_SREG]; ok {
		op.unknown = "ct, which is set"
		return op
	}
	if v, ok := a[unix.NFTA_CT_DIRECTION]; ok {
		op.original, op.reply = v.Uint8() == 0, v.Uint8() != 0
	}
	switch key {
	case unix.NFT_CT_STATE, unix.NFT_CT_STATUS, unix.NFT_CT_DIRECTION:
	case unix.NFT_CT_DST, unix.NFT_CT_PROTO_DST, unix.NFT_CT_SRC, unix.NFT_CT_PROTO_SRC, unix.NFT_CT_DST_IP,
		unix.NFT_CT_DST_IP6, unix.NFT_CT_SRC_IP, unix.NFT_CT_SRC_IP6:
		if !op.original {
			op.unknown = "ct of the reply"
		}
	default:
		op.unknown = fmt.Sprintf("ct key %d", key)
	}
	return op
}

// What a register may hold, of a packet.
const (
	holdsSource      = 's'
	holdsDestination = 'd'
	holdsProtocol    = 'p'
	holdsPort        = 'P'
	holdsSender      = 'e' // by its link-layer address
)

// held is what a register holds.
type held struct {
	what    byte
	n, bits int
}

// findLayouts notes what the comparisons and lookups of a rule are about.
func findLayouts(f ipfamily.Family, ops []nfOp) {
	registers := map[int]held{}
	for i := range ops {
		op := &ops[i]
		op.sourceAt = -1
		switch op.kind {
		case opPayload, opMeta:
			delete(registers, op.dest)
			if h := holds(f, op); h.what != 0 {
				registers[op.dest] = h
			}
		case opBitwise:
			if h, ok := registers[op.source]; ok && op.source == op.dest {
				h.bits = 0
				for _, b := range op.data {
					h.bits += bits.OnesCount8(b)
				}
				registers[op.dest] = h
			} else {
				delete(registers, op.dest)
			}
		case opCT, opAddressType, opImmediate, opLot, opHash, opByteorder:
			delete(registers, op.dest)
		case opCompare, opRange:
			if h := registers[op.source]; h.what == holdsSource {
				op.sourceAt, op.bits = 0, h.bits
			}
		case opLookup:
			op.findLayout(registers)
			if op.isMap {
				delete(registers, op.dest)
			}
		}
	}
}

// findLayout notes what a lookup's key consists of. The layout stays empty if a part is something else.
func (op *nfOp) findLayout(registers map[int]held) {
	for at := op.source; at < op.source+op.n; {
		h, ok := registers[at]
		if !ok {
			op.layout += "?"
			at += 4
			continue
		}
		if h.what == holdsSource {
			op.sourceAt = at - op.source
		}
		op.layout += string(h.what)
		at += (h.n + 3) &^ 3
	}
}

// holds says what an expression loads.
func holds(f ipfamily.Family, op *nfOp) held {
	sourceAt := ipfamily.Per[int]{12, 8}[f]
	h := held{n: op.n, bits: 8 * op.n}
	switch {
	case op.kind == opMeta && op.what == unix.NFT_META_L4PROTO:
		return held{what: holdsProtocol, n: 1}
	case op.kind != opPayload:
	case op.what == baseLink && op.offset == 6 && op.n == 6:
		h.what = holdsSender
	case op.what == baseNetwork && op.offset == sourceAt && op.n <= f.AddrLen():
		h.what = holdsSource
	case op.what == baseNetwork && op.offset == sourceAt+f.AddrLen() && op.n == f.AddrLen():
		h.what = holdsDestination
	case op.what == baseTransport && op.offset == 2 && op.n == 2:
		h.what = holdsPort
	}
	return h
}

// rejectName says with what a packet is answered.
func rejectName(f ipfamily.Family, kind uint8, code int) string {
	words := map[int]string{0: "net-unreachable", 1: "host-unreachable", 2: "proto-unreachable", 3: "port-unreachable",
		13: "admin-prohibited"}
	if f == ipfamily.IPv6 {
		words = map[int]string{0: "no-route", 1: "admin-prohibited", 3: "addr-unreachable", 4: "port-unreachable"}
	}
	switch kind {
	case unix.NFT_REJECT_TCP_RST:
		return "tcp reset"
	case unix.NFT_REJECT_ICMPX_UNREACH:
		words = map[int]string{0: "no-route", 1: "port-unreachable", 2: "host-unreachable", 3: "admin-prohibited"}
	}
	if word := words[code]; word != "" {
		return "icmp " + word
	}
	return fmt.Sprint("icmp code ", code)
}

// String describes the place of a rule, for errors.
func (c *nfChain) String() string { return c.table.family.NFT() + " " + c.table.name + " " + c.name }

// interfaceName pads a name as the kernel does.
func interfaceName(s string) []byte {
	return append([]byte(s), make([]byte, max(0, unix.IFNAMSIZ-len(s)))...)
}

func native32(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }
