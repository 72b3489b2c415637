package dataplane

import "testing"

// TestAlike: a share that is not rounded is exact, and one that is may be off by less than one of the parts.
func TestAlike(t *testing.T) {
	for _, c := range []struct {
		share, of, want, total int
		rounded, alike         bool
	}{
		{1, 3, 2, 6, false, true}, {1, 3, 1, 4, false, false}, {4, 12, 1, 4, true, false}, {3, 10, 1, 3, true, true},
		{3, 10, 1, 3, false, false}, {1001, 100_000, 1, 100, true, true}, {1011, 100_000, 1, 100, true, false},
	} {
		e := Ending{Share: c.share, Of: c.of}
		if got := e.alike(c.want, c.total, c.rounded); got != c.alike {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
