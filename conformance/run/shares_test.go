package run

import "testing"

// TestShared: shares pass if they are within what chance explains, and the shares of other weights do not.
func TestShared(t *testing.T) {
	threeToOne, drained := map[string]int{"a1": 3, "b1": 1}, map[string]int{"a1": 1, "b1": 0}
	for _, c := range []struct {
		name            string
		counts, weights map[string]int
		want            bool
	}{
		{"exact", map[string]int{"a1": 600, "b1": 200}, threeToOne, true},
		{"six standard deviations", map[string]int{"a1": 673, "b1": 127}, threeToOne, true},
		{"equal shares", map[string]int{"a1": 400, "b1": 400}, threeToOne, false},
		{"the other way round", map[string]int{"a1": 200, "b1": 600}, threeToOne, false},
		{"one gets all", map[string]int{"a1": 800}, threeToOne, false},
		{"drained", map[string]int{"a1": 800}, drained, true},
		{"drained, but for one", map[string]int{"a1": 799, "b1": 1}, drained, false},
		{"somebody else", map[string]int{"a1": 600, "b1": 199, "b2": 1}, threeToOne, false},
		{"nobody", nil, threeToOne, false},
	} {
		if got := shared(c.counts, c.weights); got != c.want {
			t.Errorf("%s: %v of %v: %v", c.name, c.counts, c.weights, got)
		}
	}
}
