package netlink

import (
	"encoding/binary"
	"iter"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Value is what an attribute holds. A number that it is too short for reads as 0.
type Value []byte

// Uint8 returns the first byte.
func (v Value) Uint8() uint8 { return v.number(1)[0] }

// Native16, Native32 and Native64 return the number that the value begins with, in this machine's order.
func (v Value) Native16() uint16 { return binary.NativeEndian.Uint16(v.number(2)) }
func (v Value) Native32() uint32 { return binary.NativeEndian.Uint32(v.number(4)) }
func (v Value) Native64() uint64 { return binary.NativeEndian.Uint64(v.number(8)) }

// Big16, Big32 and Big64 return the number that the value begins with, in network order.
func (v Value) Big16() uint16 { return binary.BigEndian.Uint16(v.number(2)) }
func (v Value) Big32() uint32 { return binary.BigEndian.Uint32(v.number(4)) }
func (v Value) Big64() uint64 { return binary.BigEndian.Uint64(v.number(8)) }

// number returns the value, or a 0 of n bytes if it is shorter.
func (v Value) number(n int) []byte {
	if len(v) < n {
		return make([]byte, n)
	}
	return v
}

// Text returns the string up to the first zero.
func (v Value) Text() string { return unix.ByteSliceToString(v) }

// Attributes are the attributes of one level by their type without flags; of several with one type, the last. An
// attribute that is missing reads as an empty Value.
type Attributes map[uint16]Value

// Decode copies the attributes of one level. It stops at the first that is malformed. For what has many attributes,
// or several of one type, there is Each.
func Decode(b []byte) Attributes {
	a := Attributes{}
	d, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return a
	}
	for d.Next() {
		a[d.Type()] = d.Bytes()
	}
	return a
}

// Nested decodes the attributes that an attribute holds.
func (a Attributes) Nested(typ uint16) Attributes { return Decode(a[typ]) }

// Each walks the attributes of one level, with their types without flags. It copies nothing, and stops at the first
// that is malformed.
func Each(b []byte) iter.Seq2[uint16, Value] { return each(b, typeMask) }

// EachFlagged is Each with the flags that types have on the wire.
func EachFlagged(b []byte) iter.Seq2[uint16, Value] { return each(b, ^uint16(0)) }

func each(b []byte, mask uint16) iter.Seq2[uint16, Value] {
	return func(yield func(uint16, Value) bool) {
		for b := b; len(b) >= AttrLen; {
			n := int(binary.NativeEndian.Uint16(b))
			if n < AttrLen || n > len(b) || !yield(binary.NativeEndian.Uint16(b[2:])&mask, b[AttrLen:n]) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

// Find returns the value of the first attribute of a type; nil if there is none.
func Find(b []byte, typ uint16) Value {
	for t, v := range Each(b) {
		if t == typ {
			return v
		}
	}
	return nil
}

func align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }
