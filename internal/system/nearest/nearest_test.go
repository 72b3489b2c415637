package nearest

import (
	"strings"
	"testing"
)

func TestOf(t *testing.T) {
	names := []string{"counters", "drain", "external-failover", "second-chance", "slow-start", "weights", "zones"}
	for _, test := range []struct{ name, want string }{
		{"secondchance", "second-chance"},
		{"Second-Chance", "second-chance"},
		{"second-chnaec", "second-chance"}, // two pairs are swapped, which is two errors and not four
		{"dirna", ""},                      // two errors of five letters are too many
		{"drian", "drain"},
		{"slow_start", "slow-start"},
		{"weihgt", "weights"},
		{"zone", "zones"},
		{"x", ""},
		{"", ""},
		{"nothing-like-it", ""},
		{strings.Repeat("second-chance", 1000), ""},
	} {
		if got := Of(test.name, names); got != test.want {
			t.Errorf("%.20s: %q, want %q", test.name, got, test.want)
		}
	}
}
