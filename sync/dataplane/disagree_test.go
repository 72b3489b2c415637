package dataplane

import "testing"

// TestChances: shares of many different numbers of cases add up, however large the common denominator is.
func TestChances(t *testing.T) {
	var c chance
	for range 4 {
		c = c.plus(1, 8*1_000_003).plus(1, 8*999_983).plus(1_000_002, 8*1_000_003).plus(999_982, 8*999_983)
	}
	for _, of := range []int{999_979, 1_000_033, 999_961} {
		c = c.plus(1, of)
	}
	if c.alike(1, 1, false) || !c.alike(1_000_003, 1_000_000, true) || c.alike(1, 2, true) {
		t.Errorf("%d of %d", c.share, c.of)
	}
	third := chance{}.plus(1, 6).plus(1, 12).plus(1, 12)
	if !third.alike(1, 3, false) || third.alike(1, 4, true) {
		t.Errorf("%d of %d is not a third", third.share, third.of)
	}
}
