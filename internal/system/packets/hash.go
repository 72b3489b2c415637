package packets

import (
	"encoding/binary"
	"math/bits"
)

// hashSlot is the kernel's jhash of bytes, scaled to 0 up to modulus-1.
func hashSlot(key []byte, seed, modulus uint32) uint32 {
	return uint32(uint64(jhash(key, seed)) * uint64(modulus) >> 32)
}

// jhash is Bob Jenkins' lookup3, as the kernel has it: of bytes, in this machine's order.
func jhash(key []byte, seed uint32) uint32 {
	start := 0xdeadbeef + uint32(len(key)) + seed
	a, b, c := start, start, start
	rot := bits.RotateLeft32
	for ; len(key) > 12; key = key[12:] {
		a += binary.NativeEndian.Uint32(key)
		b += binary.NativeEndian.Uint32(key[4:])
		c += binary.NativeEndian.Uint32(key[8:])
		a, c = (a-c)^rot(c, 4), c+b
		b, a = (b-a)^rot(a, 6), a+c
		c, b = (c-b)^rot(b, 8), b+a
		a, c = (a-c)^rot(c, 16), c+b
		b, a = (b-a)^rot(a, 19), a+c
		c, b = (c-b)^rot(b, 4), b+a
	}
	if len(key) == 0 {
		return c
	}
	var tail [12]byte
	copy(tail[:], key)
	a += binary.LittleEndian.Uint32(tail[0:])
	b += binary.LittleEndian.Uint32(tail[4:])
	c += binary.LittleEndian.Uint32(tail[8:])
	c = (c ^ b) - rot(b, 14)
	a = (a ^ c) - rot(c, 11)
	b = (b ^ a) - rot(a, 25)
	c = (c ^ b) - rot(b, 16)
	a = (a ^ c) - rot(c, 4)
	b = (b ^ a) - rot(a, 14)
	return (c ^ b) - rot(b, 24)
}
