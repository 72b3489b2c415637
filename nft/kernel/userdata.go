package kernel

import (
	"encoding/binary"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
)

// The userdata of a set tells nft how to print its elements; the kernel only stores it. The numbers below are
// libnftnl's and libnftables' (include/libnftnl/udata.h, include/expression.h, include/proto.h): type, length and
// value in one byte each but for the value, numbers in the host's order. Tests compare it with what nft itself
// writes.
const (
	descEthernet     = 9
	fieldEtherSource = 2
	udataComment     = 0 // of a table, chain or element
	udataKeyOrder    = 0
	udataDataOrder   = 1
	udataKeyTypeof   = 3
	udataDataTypeof  = 4
	udataDataRanges  = 6
	udataSetComment  = 7
	typeofExpr       = 0
	typeofData       = 1
	exprVerdict      = 1
	exprPayload      = 7
	exprMeta         = 9
	exprConcat       = 13
	exprNumgen       = 23
	descTransport    = 11
	descIPv4         = 12
	descIPv6         = 13
	fieldSourcePort  = 1
	fieldDestPort    = 2
	fieldIPv4Source  = 11
	fieldIPv4Dest    = 12
	fieldIPv6Source  = 8
	fieldIPv6Dest    = 9
	metaL4Proto      = 16
	metaPriority     = 2
	metaMark         = 3
	orderUnspecified = 0
	orderHost        = 1
	orderBig         = 2
)

func udata(typ byte, value []byte) []byte {
	return append([]byte{typ, byte(len(value))}, value...)
}

func udataWord(typ byte, v uint32) []byte {
	return udata(typ, binary.NativeEndian.AppendUint32(nil, v))
}

// commentUserdata gives the userdata of a table, a chain or an element.
func commentUserdata(s string) []byte {
	return udata(udataComment, append([]byte(s), 0))
}

// setUserdata gives the userdata of a set: byte orders, the typeof of key and data, and the comment.
func setUserdata(f ipfamily.Family, s *nft.Set) []byte {
	u := udataWord(udataKeyOrder, byteOrder(s.Key))
	if s.IsMap() {
		u = append(u, udataWord(udataDataOrder, byteOrder(s.Data))...)
	}
	u = append(u, udata(udataKeyTypeof, typeofFields(f, s.Key))...)
	switch {
	case s.Verdicts:
		u = append(u, udata(udataDataTypeof, typeofExpression(exprVerdict, nil))...)
	case s.IsMap():
		u = append(u, udata(udataDataTypeof, typeofFields(f, s.Data))...)
	}
	if s.IsMap() {
		u = append(u, udataWord(udataDataRanges, 0)...)
	}
	if s.Comment != "" {
		u = append(u, udata(udataSetComment, append([]byte(s.Comment), 0))...)
	}
	return u
}

// byteOrder gives the order of a key: only a single field has one.
func byteOrder(fields []nft.Field) uint32 {
	if len(fields) != 1 {
		return orderUnspecified
	}
	if fields[0] == nft.Priority || fields[0] == nft.Mark {
		return orderHost
	}
	return orderBig
}

func typeofExpression(expr uint32, data []byte) []byte {
	return append(udataWord(typeofExpr, expr), udata(typeofData, data)...)
}

func typeofFields(f ipfamily.Family, fields []nft.Field) []byte {
	if len(fields) == 1 {
		return typeofField(f, fields[0])
	}
	var parts []byte
	for i, field := range fields {
		parts = append(parts, udata(byte(i), typeofField(f, field))...)
	}
	return typeofExpression(exprConcat, parts)
}

func typeofField(f ipfamily.Family, field nft.Field) []byte {
	payload := func(desc, field uint32) []byte {
		return typeofExpression(exprPayload, append(udataWord(0, desc), udataWord(1, field)...))
	}
	desc, source, dest := uint32(descIPv4), uint32(fieldIPv4Source), uint32(fieldIPv4Dest)
	if f == ipfamily.IPv6 {
		desc, source, dest = descIPv6, fieldIPv6Source, fieldIPv6Dest
	}
	switch field {
	case nft.SourceAddr:
		return payload(desc, source)
	case nft.DestAddr:
		return payload(desc, dest)
	case nft.DestPort:
		return payload(descTransport, fieldDestPort)
	case nft.SourcePort:
		return payload(descTransport, fieldSourcePort)
	case nft.EtherSource:
		return payload(descEthernet, fieldEtherSource)
	case nft.L4Proto:
		return typeofExpression(exprMeta, udataWord(0, metaL4Proto))
	case nft.Priority:
		return typeofExpression(exprMeta, udataWord(0, metaPriority))
	case nft.Mark:
		return typeofExpression(exprMeta, udataWord(0, metaMark))
	case nft.RandomSlot:
		const random, offset = 1, 0
		u := append(udataWord(0, random), udataWord(1, nft.MaxSlots)...)
		return typeofExpression(exprNumgen, append(u, udataWord(2, offset)...))
	}
	panic("kernel: a field that no set has as its key")
}

// The data types of libnftables (include/datatype.h) that nft shows without typeof; a concatenation packs six bits
// each.
const (
	typeInteger = 4
	typeIPv4    = 7
	typeIPv6    = 8
	typeEther   = 9
	typeProto   = 12
	typeService = 13
	typeMark    = 19
	typeClassID = 23
)

func dataType(f ipfamily.Family, fields []nft.Field) uint32 {
	var t uint32
	for _, field := range fields {
		t = t<<6 | fieldType(f, field)
	}
	return t
}

func fieldType(f ipfamily.Family, field nft.Field) uint32 {
	switch field {
	case nft.SourceAddr, nft.DestAddr, nft.OriginalDestAddr:
		if f == ipfamily.IPv6 {
			return typeIPv6
		}
		return typeIPv4
	case nft.EtherSource:
		return typeEther
	case nft.L4Proto:
		return typeProto
	case nft.DestPort, nft.OriginalDestPort, nft.SourcePort:
		return typeService
	case nft.Priority:
		return typeClassID
	case nft.Mark:
		return typeMark
	}
	return typeInteger
}
