package nft

import (
	"encoding/binary"
	"math/bits"
	"net/netip"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// BucketSeed begins the hash of a SourceBucket.
const BucketSeed = 0x76647274

// bucketOf gives the bucket of an address as the kernel's nft_jhash does: reciprocal_scale of jhash (linux/jhash.h).
func bucketOf(a netip.Addr, mod uint32) uint32 { return bucketOfKey(a.AsSlice(), mod) }

// ClientSlot returns the slot, of some, that a hash other than NoHash gives a client.
func ClientSlot(hash dataplane.Hash, client netip.AddrPort, slots uint32) uint32 {
	if hash != dataplane.HashAddrPort {
		return bucketOf(client.Addr(), slots)
	}
	key := binary.BigEndian.AppendUint16(client.Addr().AsSlice(), client.Port())
	return bucketOfKey(append(key, 0, 0), slots) // a port fills a register of four bytes
}

func bucketOfKey(key []byte, mod uint32) uint32 {
	return uint32(uint64(jhash(key, BucketSeed)) * uint64(mod) >> 32)
}

// jhash is Bob Jenkins' lookup3 hash as in linux/jhash.h, for keys of a multiple of four bytes, of which there is at
// least one.
func jhash(key []byte, seed uint32) uint32 {
	a := 0xdeadbeef + uint32(len(key)) + seed
	b, c := a, a
	word := binary.NativeEndian.Uint32
	for ; len(key) > 12; key = key[12:] {
		a, b, c = a+word(key), b+word(key[4:]), c+word(key[8:])
		a, b, c = jhashMix(a, b, c)
	}
	if len(key) == 12 {
		c += word(key[8:])
	}
	if len(key) >= 8 {
		b += word(key[4:])
	}
	a += word(key)
	for _, r := range [...][3]int{{14, 11, 25}, {16, 4, 14}} {
		c = (c ^ b) - bits.RotateLeft32(b, r[0])
		a = (a ^ c) - bits.RotateLeft32(c, r[1])
		b = (b ^ a) - bits.RotateLeft32(a, r[2])
	}
	return (c ^ b) - bits.RotateLeft32(b, 24)
}

func jhashMix(a, b, c uint32) (uint32, uint32, uint32) {
	for _, r := range [...][3]int{{4, 6, 8}, {16, 19, 4}} {
		a = (a - c) ^ bits.RotateLeft32(c, r[0])
		c += b
		b = (b - a) ^ bits.RotateLeft32(a, r[1])
		a += c
		c = (c - b) ^ bits.RotateLeft32(b, r[2])
		b += a
	}
	return a, b, c
}
