package nft

import (
	"net/netip"
	"slices"
	"testing"
)

// TestJhash compares with values of Bob Jenkins' lookup3 for the bytes 1, 2, 3 and so on, on a little-endian machine.
// Another implementation gave them, which also gives his own for "Four score and seven years ago".
func TestJhash(t *testing.T) {
	for _, c := range []struct {
		length int
		seed   uint32
		want   uint32
	}{
		{4, 0, 0x043fcddd}, {4, 7, 0x162a259c}, {8, 0, 0x5143bb19}, {8, 7, 0xe976a356}, {12, 0, 0x2471b813},
		{12, 7, 0x6268adb9}, {16, 7, 0xb7837390}, {20, 0, 0x500af16b}, {24, 7, 0xe555b2c2}, {28, 0, 0x30a11db0},
	} {
		key := make([]byte, c.length)
		for i := range key {
			key[i] = byte(i + 1)
		}
		if got := jhash(key, c.seed); got != c.want {
			t.Errorf("%d bytes with seed %d: %#08x; want %#08x", c.length, c.seed, got, c.want)
		}
	}
}

// TestBucketsAreAllUsed: clients spread over all buckets.
func TestBucketsAreAllUsed(t *testing.T) {
	const buckets = 16
	var used [buckets]bool
	for i := range 1000 {
		used[bucketOf(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), buckets)] = true
	}
	if slices.Contains(used[:], false) {
		t.Errorf("buckets used: %v", used)
	}
}
