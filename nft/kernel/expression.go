package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// register gives the number of the register at a place counted in words of four bytes: the four registers of 16 bytes
// where one begins, else the small ones, as nft does.
func register(word int) uint32 {
	if word%4 == 0 {
		return unix.NFT_REG_1 + uint32(word/4)
	}
	return unix.NFT_REG32_00 + uint32(word)
}

// place is the inverse of register; less than 0 for what is no register of data.
func place(register uint32) int {
	if register >= unix.NFT_REG32_00 {
		return int(register - unix.NFT_REG32_00)
	}
	return 4 * (int(register) - unix.NFT_REG_1)
}

// words is the room a key takes in registers.
func words(f ipfamily.Family, fields []nft.Field) int { return (nft.PaddedLen(f, fields) + 3) / 4 }

// ruleExprs gives the expressions of a rule, in the form nft itself gives them.
func ruleExprs(f ipfamily.Family, r nft.Rule) []expr.Any {
	var out []expr.Any
	if _, ok := r[0].(nft.Reset); ok { // as nft itself does
		out = matchExprs(f, nft.ProtocolIs{Protocol: snapshot.TCP})
	}
	for _, s := range r {
		out = append(out, statementExprs(f, s)...)
	}
	return out
}

func statementExprs(f ipfamily.Family, s nft.Statement) []expr.Any {
	switch s := s.(type) {
	case nft.SetLookup:
		return append(loadFor(f, s.Key, s.Set),
			&expr.Lookup{SourceRegister: register(0), SetName: s.Set.String(), Invert: s.Not})
	case nft.VerdictMap:
		return append(load(f, s.Key, 0), &expr.Lookup{SourceRegister: register(0), SetName: s.Map.String(),
			DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true})
	case nft.DNAT:
		return append(lookup(f, s.Key, s.Map), &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.NFProto()),
			RegAddrMin: register(0), RegProtoMin: register(f.AddrLen() / 4)})
	case nft.SetPriority:
		return append(lookup(f, s.Key, s.Map),
			&expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: register(0)})
	case nft.Forward:
		return append([]expr.Any{&expr.Meta{Key: expr.MetaKeyIIF, Register: register(0)}},
			append(load(f, s.Key, 4), &expr.Lookup{SourceRegister: register(4), SetName: s.Map.String(),
				DestRegister: register(4), IsDestRegSet: true}, &forward{device: register(0), addr: register(4), family: f})...)
	case nft.StripClass:
		return append(loadPool(nft.PoolNumber, register(0)),
			&expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: register(0)})
	case nft.ClearPriority:
		return []expr.Any{&expr.Immediate{Register: register(0), Data: make([]byte, 4)},
			&expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: register(0)}}
	case nft.Update:
		// The data begins at a register of 16 bytes: there nft 1.0.6 looks for it when it lists the rule.
		data := (words(f, s.Key.Fields) + 3) &^ 3
		update := &expr.Dynset{SrcRegKey: register(0), SetName: s.Map.String(), Operation: unix.NFT_DYNSET_OP_UPDATE,
			Timeout: s.Timeout}
		switch {
		case s.Once:
			update.Operation = unix.NFT_DYNSET_OP_ADD
		case s.Forget:
			update.Operation, update.Timeout = dynsetDelete, 0
		}
		if s.Limit.Rate > 0 {
			update.Exprs = []expr.Any{limitExpr(s.Limit)}
		}
		if len(s.Data.Fields) > 0 {
			update.SrcRegData = register(data)
		}
		if s.Counted { // Linux 5.10 takes no expression of the set for elements that rules add
			update.Exprs = []expr.Any{&expr.Counter{}}
		}
		return append(append(load(f, s.Key, 0), load(f, s.Data, data)...), update)
	}
	return matchExprs(f, s)
}

// dynsetDelete is NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h.
const dynsetDelete = 2

// matchExprs are the statements that compare something of a packet.
func matchExprs(f ipfamily.Family, s nft.Statement) []expr.Any {
	switch s := s.(type) {
	case nft.ProtocolIs:
		return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register(0)}, equal(false, []byte{byte(s.Protocol)})}
	case nft.PriorityIs:
		return []expr.Any{&expr.Meta{Key: expr.MetaKeyPRIORITY, Register: register(0)}, equal(s.Not, native(s.Value))}
	case nft.FromPods:
		return matchPods(f, s.Pods, s.Not)
	case nft.NoInput:
		return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIF, Register: register(0)}, equal(s.Not, make([]byte, 4))}
	case nft.Bridged:
		return matchBridged(s.Pods)
	case nft.OffLoopback:
		loopback := netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8)
		return append(inPrefix(f, s.Field, loopback, false), interfaceIs("lo", false, true)...)
	case nft.Translated:
		return append(loadMasked(&expr.Ct{Key: expr.CtKeySTATUS, Register: register(0)}, native(uint32(nft.StatusDNAT))),
			equal(true, native(0)))
	case nft.StatusIs:
		return append(loadMasked(&expr.Ct{Key: expr.CtKeySTATUS, Register: register(0)}, native(uint32(s.Of))),
			equal(false, native(uint32(s.Are))))
	case nft.NewConnection:
		const stateNew = 1 << 3 // NF_CT_STATE_BIT(IP_CT_NEW)
		return append(loadMasked(&expr.Ct{Key: expr.CtKeySTATE, Register: register(0)}, native(stateNew)),
			equal(true, native(0)))
	case nft.Reply:
		return []expr.Any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: register(0)}, equal(false, []byte{1})}
	case nft.OtherInterface:
		return interfaceIs(s.Than, false, true)
	case nft.TCPFlags:
		return slices.Concat(matchExprs(f, nft.ProtocolIs{Protocol: snapshot.TCP}),
			loadMasked(transportHeader(13, 1), []byte{byte(s.Of)}), []expr.Any{equal(s.Not, []byte{byte(s.Are)})})
	case nft.OfFamily, nft.Ethernet, nft.NotForHere, nft.PriorityClassIs, nft.FirstFragment, nft.LaterFragment, nft.TooBig:
		return matchAtIngress(f, s)
	case nft.TCPSequence:
		return []expr.Any{transportHeader(4, 4), equal(false, make([]byte, 4))}
	case nft.EchoRequest:
		protocol, kind := byte(unix.IPPROTO_ICMP), byte(8)
		if f == ipfamily.IPv6 {
			protocol, kind = unix.IPPROTO_ICMPV6, 128
		}
		return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register(0)}, equal(false, []byte{protocol}),
			transportHeader(0, 1), equal(false, []byte{kind})}
	case nft.NotLocal:
		return []expr.Any{&expr.Fib{Register: register(0), ResultADDRTYPE: true, FlagDADDR: true},
			equal(true, native(unix.RTN_LOCAL))}
	}
	return actionExprs(f, s)
}

// actionExprs are the statements that do something with a packet, and look nothing up.
func actionExprs(f ipfamily.Family, s nft.Statement) []expr.Any {
	switch s := s.(type) {
	case nft.DNATTo:
		return []expr.Any{&expr.Immediate{Register: register(0), Data: s.Addr.AsSlice()},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.NFProto()), RegAddrMin: register(0)}}
	case nft.Reset:
		return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}
	case nft.Counter:
		return []expr.Any{&expr.Counter{}}
	case nft.Log:
		return logExprs(s)
	case nft.Masquerade:
		return []expr.Any{&expr.Masq{FullyRandom: true}}
	case nft.Reject:
		code := uint8(3) // ICMP_PORT_UNREACH
		if f == ipfamily.IPv6 {
			code = 4 // ICMPV6_PORT_UNREACH
		}
		return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: code}}
	case nft.Accept:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}
	case nft.Drop:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}
	case nft.Jump:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: s.Chain.Name()}}
	case nft.Goto:
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: s.Chain.Name()}}
	}
	panic(fmt.Sprintf("kernel: no expressions for %T", s))
}

// logExprs sends the beginning of a packet to a group of nflog.
func logExprs(s nft.Log) []expr.Any {
	log := &expr.Log{Group: nft.RecordsGroup, Snaplen: nft.RecordsSnaplen, Data: []byte(s.Prefix),
		Key: 1<<unix.NFTA_LOG_GROUP | 1<<unix.NFTA_LOG_SNAPLEN | 1<<unix.NFTA_LOG_PREFIX}
	if !s.Bounded {
		return []expr.Any{log}
	}
	return []expr.Any{limitExpr(nft.Limit{Rate: nft.RecordsRate, Burst: nft.RecordsRate}), log}
}

func limitExpr(l nft.Limit) expr.Any {
	return &expr.Limit{Type: expr.LimitTypePkts, Rate: uint64(l.Rate), Burst: l.Burst, Unit: expr.LimitTimeSecond,
		Over: l.Over}
}

// loadMasked loads a value and clears all but some bits.
func loadMasked(value expr.Any, mask []byte) []expr.Any {
	return []expr.Any{value, &expr.Bitwise{SourceRegister: register(0), DestRegister: register(0),
		Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask))}}
}

// transportHeader loads some bytes of a TCP or ICMP header.
func transportHeader(offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: register(0), Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: length}
}

// lookup loads a key and replaces it by what a map gives.
func lookup(f ipfamily.Family, key nft.Concat, m nft.SetID) []expr.Any {
	return append(load(f, key, 0), &expr.Lookup{SourceRegister: register(0), SetName: m.String(),
		DestRegister: register(0), IsDestRegSet: true})
}

// loadFor loads a key for a set. Where that has ranges, the kernel's own numbers are in network order.
func loadFor(f ipfamily.Family, key nft.Concat, set nft.SetID) (out []expr.Any) {
	if !nft.SetByID(set).Interval {
		return load(f, key, 0)
	}
	word := 0
	for _, field := range key.Fields {
		out = append(out, load(f, nft.Concat{Fields: []nft.Field{field}, Mod: key.Mod}, word)...)
		if field == nft.Priority || field == nft.RandomSlot {
			out = append(out, &expr.Byteorder{Op: expr.ByteorderHton, SourceRegister: register(word),
				DestRegister: register(word), Len: 4, Size: 4})
		}
		word += words(f, []nft.Field{field})
	}
	return out
}

// load puts a key into the registers from a word on.
func load(f ipfamily.Family, key nft.Concat, word int) []expr.Any {
	out := make([]expr.Any, 0, len(key.Fields)+1)
	for _, field := range key.Fields {
		switch field {
		case nft.SourceBucket:
			out = append(out, loadBucket(f, key.Mod, word, nft.SourceAddr)...)
		case nft.SourcePortBucket:
			out = append(out, loadBucket(f, key.Mod, word, nft.SourceAddr, nft.SourcePort)...)
		case nft.PoolNumber, nft.PoolClass:
			out = append(out, loadPool(field, register(word))...)
		case nft.FlowHash, nft.FlowHash2, nft.QuotedHash, nft.QuotedHash2, nft.SenderHash, nft.FrontendHash,
			nft.FragmentHash:
			out = append(out, loadHash(f, nft.HashOf(f, field), key.Mod, word)...)
		default:
			out = append(out, loadField(f, field, key.Mod, register(word)))
		}
		word += words(f, []nft.Field{field})
	}
	return out
}

// loadPool loads a part of a priority that came from Pools.
func loadPool(field nft.Field, reg uint32) []expr.Any {
	mask := uint32(nft.PoolMask)
	if field == nft.PoolClass {
		mask = ^mask
	}
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyPRIORITY, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: native(mask), Xor: make([]byte, 4)}}
}

// loadBucket hashes fields of the sender, which it puts behind the rest of the key, where nft puts them.
func loadBucket(f ipfamily.Family, mod uint32, word int, fields ...nft.Field) []expr.Any {
	const behind = 4 // words
	out := load(f, nft.Concat{Fields: fields}, behind)
	return append(out, &expr.Hash{SourceRegister: register(behind), DestRegister: register(word),
		Length: uint32(nft.PaddedLen(f, fields)), Modulus: mod, Seed: nft.BucketSeed, Type: expr.HashTypeJenkins})
}

func loadField(f ipfamily.Family, field nft.Field, mod uint32, reg uint32) expr.Any {
	switch field {
	case nft.SourceAddr, nft.DestAddr:
		return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: addrOffset(f, field),
			Len: uint32(f.AddrLen())}
	case nft.EtherSource:
		return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6}
	case nft.L4Proto:
		return &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}
	case nft.DestPort:
		return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
	case nft.DatagramID:
		return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: 4, Len: 2}
	case nft.SourcePort:
		return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2}
	case nft.RandomSlot:
		return &expr.Numgen{Register: reg, Modulus: mod, Type: unix.NFT_NG_RANDOM}
	case nft.Priority:
		return &expr.Meta{Key: expr.MetaKeyPRIORITY, Register: reg}
	}
	return loadTuple(f, field, reg)
}

// loadTuple loads a field of the connection.
func loadTuple(f ipfamily.Family, field nft.Field, reg uint32) expr.Any {
	ct := &expr.Ct{Register: reg, Direction: expr.CtDirOriginal, OptDirection: true}
	source, dest := expr.CtKeySRCIP, expr.CtKeyDSTIP
	if f == ipfamily.IPv6 {
		source, dest = expr.CtKeySRCIP6, expr.CtKeyDSTIP6
	}
	switch field {
	case nft.OriginalSourceAddr:
		ct.Key = source
	case nft.OriginalDestAddr:
		ct.Key = dest
	case nft.OriginalSourcePort:
		ct.Key = expr.CtKeyPROTOSRC
	case nft.OriginalDestPort:
		ct.Key = expr.CtKeyPROTODST
	case nft.ReplySourceAddr:
		ct.Key, ct.Direction = source, expr.CtDirReply
	case nft.ReplySourcePort:
		ct.Key, ct.Direction = expr.CtKeyPROTOSRC, expr.CtDirReply
	default:
		panic("kernel: a field that no rule loads")
	}
	return ct
}

// addrOffset is where an address stands in the IPv4 or IPv6 header.
func addrOffset(f ipfamily.Family, field nft.Field) uint32 {
	source := uint32(12)
	if f == ipfamily.IPv6 {
		source = 8
	}
	if field == nft.SourceAddr {
		return source
	}
	return source + uint32(f.AddrLen())
}

func matchPods(f ipfamily.Family, p dataplane.Pods, not bool) []expr.Any {
	switch {
	case p.Interface != "":
		return interfaceIs(p.Interface, false, not)
	case p.InterfacePrefix != "":
		return interfaceIs(p.InterfacePrefix, true, not)
	}
	return inPrefix(f, nft.SourceAddr, p.CIDR, not)
}

func matchBridged(p dataplane.Pods) []expr.Any {
	const addrLen = 6 // of a link-layer header, with the receiver's address before the sender's
	out := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIF, Register: register(0)}, equal(false, make([]byte, 4)),
		&expr.Payload{DestRegister: register(0), Base: expr.PayloadBaseLLHeader, Offset: addrLen, Len: addrLen},
		equal(true, make([]byte, addrLen)),
	}
	switch {
	case p.Interface != "":
		out = append(out, nameIs(expr.MetaKeyOIFNAME, p.Interface, false, false)...)
	case p.InterfacePrefix != "":
		out = append(out, nameIs(expr.MetaKeyOIFNAME, p.InterfacePrefix, true, false)...)
	}
	return out
}

// interfaceIs compares the name of the interface a packet came in by.
func interfaceIs(name string, prefix, not bool) []expr.Any {
	return nameIs(expr.MetaKeyIIFNAME, name, prefix, not)
}

// nameIs compares an interface's name: whole with its padding, or only its beginning.
func nameIs(which expr.MetaKey, name string, prefix, not bool) []expr.Any {
	value := []byte(name)
	if !prefix {
		value = make([]byte, unix.IFNAMSIZ)
		copy(value, name)
	}
	return []expr.Any{&expr.Meta{Key: which, Register: register(0)}, equal(not, value)}
}

// inPrefix compares an address with a range: only the bytes that count where the range ends at a byte, else under a
// mask.
func inPrefix(f ipfamily.Family, field nft.Field, p netip.Prefix, not bool) []expr.Any {
	addr := p.Masked().Addr().AsSlice()
	n := p.Bits() / 8
	if p.Bits()%8 == 0 && n > 0 {
		return []expr.Any{&expr.Payload{DestRegister: register(0), Base: expr.PayloadBaseNetworkHeader,
			Offset: addrOffset(f, field), Len: uint32(n)}, equal(not, addr[:n])}
	}
	mask := make([]byte, len(addr))
	for bit := range p.Bits() {
		mask[bit/8] |= 0x80 >> (bit % 8)
	}
	return []expr.Any{
		loadField(f, field, 0, register(0)),
		&expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: uint32(len(addr)), Mask: mask,
			Xor: make([]byte, len(addr))},
		equal(not, addr),
	}
}

// native gives a number in the order the kernel keeps its own numbers in registers.
func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func equal(not bool, value []byte) expr.Any {
	op := expr.CmpOpEq
	if not {
		op = expr.CmpOpNeq
	}
	return &expr.Cmp{Op: op, Register: register(0), Data: value}
}
