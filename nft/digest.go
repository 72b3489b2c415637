package nft

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash/fnv"
	"math/bits"
	"strings"
	"sync"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// Digest identifies what a table should hold. It is the sum of the hashes of its elements and of its structure, so a
// change costs no more than the elements that change. It ignores which endpoint of a pool has which slot: with a random
// choice that depends on the order of past changes, and every order is as good; with a hash it follows from how many
// slots each endpoint has.
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

// digest hashes an element. Words in the host's byte order are hashed as they are, because a table never moves to
// another host. It ignores what has counters: the Revision says that.
func (e *Element) digest() Digest {
	key, set := e.Key(), e.Set
	switch set {
	case Endpoints, UncountedEndpoints:
		key, set = key[:len(key)-slotLen], Endpoints
	case UncountedServices, UncountedOutsideServices, UncountedInsideServices, UncountedStickyEndpoints:
		set--
	case Picks, SplitPicks, PoolPicks, Timeouts, ClientRates: // which follow from the chains in use
		return Digest{}
	}
	chain, data := e.Chain, e.Data()
	if set.hasClass() { // whether endpoints are counted does not matter
		pool := idElement(set, e.PoolID())
		chain, data = e.Leads(), pool.Key()
	}
	switch chain.Kind {
	case UncountedPick, UncountedHash, UncountedHashPort:
		chain.Kind--
	}
	var room [maxKey + len(e.data) + 16 + maxComment]byte
	b := append(room[:0], byte(set), byte(len(key)), e.Bits, e.DataLen, byte(chain.Kind))
	b = binary.BigEndian.AppendUint32(b, chain.N)
	b = append(append(b, key...), data...)
	return digestOf(append(b, e.Comment...))
}

// A table has a digest for each bucket of Services, by their names, so that a new process reads back only what differs.
// Another digest is for the structure and for what belongs to no Service alone.
const (
	numBuckets   = 256
	sharedBucket = numBuckets
)

func bucketFor(service string) int {
	h := fnv.New32a()
	h.Write([]byte(service))
	return int(h.Sum32() % numBuckets)
}

// Digests are those of all buckets of a table, the shared one last. A bucket without elements has the zero Digest.
type Digests [numBuckets + 1]Digest

func digestElement(bucket int, d Digest) Element {
	e := Element{Set: DigestSet, Comment: d.String()}
	e.addKeyWord(uint32(bucket))
	return e
}

// elements returns the elements of a DigestSet. The shared digest is in the revision.
func (d *Digests) elements() []Element {
	_, add := new(Digests).changed(d)
	return add
}

// changed returns the elements of a DigestSet to delete and to add.
func (d *Digests) changed(now *Digests) (del, add []Element) {
	for i := range numBuckets {
		if d[i] == now[i] {
			continue
		}
		if d[i] != (Digest{}) {
			del = append(del, digestElement(i, d[i]))
		}
		if now[i] != (Digest{}) {
			add = append(add, digestElement(i, now[i]))
		}
	}
	return del, add
}

// With returns the digests with the shared digest, which the kernel holds elsewhere.
func (d Digests) With(shared Digest) Digests {
	d[sharedBucket] = shared
	return d
}

// Total identifies all of them.
func (d *Digests) Total() (sum Digest) {
	for i := range d {
		sum.add(d[i])
	}
	return sum
}

// DigestsOf reads the elements of a DigestSet. It is not ok if Verdict does not write one of them.
func DigestsOf(elements []Element) (d Digests, ok bool) {
	for i := range elements {
		digest, ok := parseDigest(elements[i].Comment)
		if bucket := elements[i].ID(); ok && bucket < numBuckets {
			d[bucket] = digest
		} else {
			return d, false
		}
	}
	return d, true
}

// formatVersion is part of every digest. Raise it when the same text goes to the kernel as other bytes than before, so
// that tables written by older versions are replaced.
const formatVersion = 3

// digest hashes a structure: the text of everything that its table could hold besides elements, except chains
// that hash: chains in use are compared anyway. It includes sets that are not in use, because what is in use follows
// from the elements.
func (s Structure) digest(f ipfamily.Family) Digest {
	structureDigests.Lock()
	defer structureDigests.Unlock()
	known := structureDigests.last[f]
	if known == nil || known.structure != s {
		known = &structureDigest{s, s.newDigest(f)}
		structureDigests.last[f] = known
	}
	return known.digest
}

// structureDigests holds each family's last digest of a structure. That takes as long as a small change, and the same
// structure is asked for again and again.
var structureDigests struct {
	sync.Mutex
	last ipfamily.Per[*structureDigest]
}

type structureDigest struct {
	structure Structure
	digest    Digest
}

func (s Structure) newDigest(f ipfamily.Family) Digest {
	var b bytes.Buffer
	b.WriteByte(formatVersion)
	l := Listing{Table: probeTable(f, s, RememberFor)}
	if err := l.Print(&b); err != nil {
		panic(err) // a bytes.Buffer takes everything
	}
	return digestOf(b.Bytes())
}

// Revision identifies the content of a table. The table itself holds it, as the only element of a set, written in the
// same transaction as what it describes. The zero Revision means none.
type Revision struct {
	// Number counts the transactions that wrote to the table.
	Number uint32
	// Digest is that of the structure and of what belongs to no Service alone.
	Digest Digest
	// Counted is the name of the Counting, or "some" while that is being changed.
	Counted string
	// Asked identifies what is counted, or is not, because a Service asks for it; zero if there is no such Service.
	Asked Digest
}

// asksFor precedes Asked in a revision's text.
const asksFor = ", asked for "

func (r Revision) element() Element {
	e := Element{Set: RevisionSet, Comment: r.Digest.String() + " counts " + r.Counted}
	if r.Asked != (Digest{}) {
		e.Comment += asksFor + r.Asked.String()
	}
	e.addKeyWord(r.Number)
	return e
}

// RevisionOf reads the elements of a RevisionSet. It returns the zero Revision unless there is exactly one element, as
// Verdict writes it.
func RevisionOf(elements []Element) Revision {
	if len(elements) != 1 || elements[0].KeyLen != 4 {
		return Revision{}
	}
	digest, counted, ok := strings.Cut(elements[0].Comment, " counts ")
	d, valid := parseDigest(digest)
	if !ok || !valid {
		return Revision{}
	}
	r := Revision{Number: elements[0].ID(), Digest: d, Counted: counted}
	if level, asked, ok := strings.Cut(counted, asksFor); ok {
		r.Counted = level
		if r.Asked, ok = parseDigest(asked); !ok {
			return Revision{}
		}
	}
	return r
}
