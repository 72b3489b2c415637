package nft

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math/bits"
)

// Digest stands for what a table is to hold. It is the sum of its elements' hashes and of its structure's, so that a change
// costs no more than the elements that change. It leaves out which endpoint of a pool has which slot: that follows from the
// order of past changes, and every order is as good.
type Digest [2]uint64

// String gives 32 hexadecimal digits.
func (d Digest) String() string {
	b := binary.BigEndian.AppendUint64(nil, d[0])
	return hex.EncodeToString(binary.BigEndian.AppendUint64(b, d[1]))
}

// parseDigest is String's inverse.
func parseDigest(s string) (d Digest, ok bool) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 16 {
		return d, false
	}
	return Digest{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}, true
}

func (d *Digest) add(o Digest) {
	var carry uint64
	d[1], carry = bits.Add64(d[1], o[1], 0)
	d[0], _ = bits.Add64(d[0], o[0], carry)
}

func (d *Digest) sub(o Digest) {
	var borrow uint64
	d[1], borrow = bits.Sub64(d[1], o[1], 0)
	d[0], _ = bits.Sub64(d[0], o[0], borrow)
}

func digestOf(b []byte) Digest {
	h := sha256.Sum256(b)
	return Digest{binary.BigEndian.Uint64(h[:]), binary.BigEndian.Uint64(h[8:])}
}

// digest hashes an element. Words in the host's byte order are hashed as they are: a table never meets another host.
func (e *Element) digest() Digest {
	key := e.Key()
	if e.Set == Endpoints || e.Set == OutsideEndpoints {
		key = key[:len(key)-slotLen]
	}
	var room [maxKey + len(e.data) + 16 + maxComment]byte
	b := append(room[:0], byte(e.Set), byte(len(key)), e.Bits, e.DataLen, byte(e.Chain.Kind))
	b = binary.BigEndian.AppendUint32(b, e.Chain.N)
	b = append(append(b, key...), e.Data()...)
	return digestOf(append(b, e.Comment...))
}

// formatVersion is part of every digest. It is to be raised when the same text goes to the kernel as other bytes than before, so
// that a table written by an older version is replaced.
const formatVersion = 1

// digest hashes a structure: the text of everything that could be in its table besides elements. Sizes are left out, which
// follow from how many elements there once were.
func (s Structure) digest(f Family) Digest {
	var b bytes.Buffer
	b.WriteByte(formatVersion)
	l := Listing{Table: Everything(f, s)}
	if err := l.Print(&b); err != nil {
		panic(err) // a bytes.Buffer takes everything
	}
	return digestOf(b.Bytes())
}

// Revision says which content a table has: it is kept in the table itself, as the only element of the set of that name, and
// written in the same transaction as what it describes. The zero Revision stands for none.
type Revision struct {
	// Number counts the transactions that wrote to the table.
	Number uint32
	Digest Digest
}

func (r Revision) element() Element {
	e := Element{Set: RevisionSet, Comment: r.Digest.String()}
	e.addKeyWord(r.Number)
	return e
}

// RevisionOf reads the elements of a RevisionSet. Anything but one element as Verdict writes it gives the zero Revision.
func RevisionOf(elements []Element) Revision {
	if len(elements) != 1 || elements[0].KeyLen != 4 {
		return Revision{}
	}
	d, ok := parseDigest(elements[0].Comment)
	if !ok {
		return Revision{}
	}
	return Revision{binary.NativeEndian.Uint32(elements[0].Key()), d}
}
