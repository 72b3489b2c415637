package nft

import "testing"

// TestClasses: every chain that Picks may lead to has a class of its own, which fits beside a pool's number, and every
// pool a chain with as many numbers as it has slots, or up to a quarter more.
func TestClasses(t *testing.T) {
	seen := map[uint32]ChainID{}
	check := func(c ChainID) {
		t.Helper()
		class := c.class()
		if other, taken := seen[class]; class >= 1<<(32-poolBits) || taken && other != c {
			t.Fatalf("%s has the class %d, of %s", c.Name(), class, other.Name())
		}
		if got := chainOfClass(class); got != c {
			t.Fatalf("%s has the class %d, of which %s is", c.Name(), class, got.Name())
		}
		seen[class] = c
	}
	for _, k := range fixedClasses {
		check(k.id())
	}
	for n := 1; n <= maxServiceSlots; n++ {
		room := roomFor(n)
		if int(room) < n || n <= exactSizes && int(room) != n || 4*int(room) > 5*n+12 {
			t.Fatalf("%d slots have room for %d", n, room)
		}
		for _, k := range sizedKinds {
			check(ChainID{k, room})
		}
	}
	for _, k := range hashKinds {
		check(ChainID{k, 1})
		for _, n := range hashSizes {
			check(ChainID{k, uint32(n)})
		}
	}
	if got := chainOfClass(1<<(32-poolBits) - 1 + 0); len(seen) > 256 || got.Kind == NoChain && len(seen) == 256 {
		t.Errorf("%d classes", len(seen))
	}
	for _, c := range [][2]uint32{{1, 1}, {1200, 1200}, {1201, 1260}, {10800, 10800}, {86400, 86400}, {86399, 86400}} {
		if got := timeoutFor(c[0]); got != c[1] {
			t.Errorf("clients are remembered for %d instead of %d s", got, c[0])
		}
	}
}
