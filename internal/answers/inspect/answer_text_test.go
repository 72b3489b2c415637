package inspect

import (
	"net/netip"
	"strings"
	"testing"
)

// TestRangesText: a list of whole countries does not bury the answer, and the range that counts is named.
func TestRangesText(t *testing.T) {
	r := &Ranges{}
	for i := range 16384 {
		r.Ranges = append(r.Ranges, netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 7), byte(i << 1), 0}), 24))
	}
	r.Holds = r.Ranges[13_000]
	text := r.text(false)
	if len(text) > 400 || !strings.HasPrefix(text, "20.0.0.0/24, 20.0.2.0/24, ") ||
		!strings.HasSuffix(text, " and 16364 more (--all); the sender is in "+r.Holds.String()) {
		t.Error(text)
	}
	if all := r.text(true); strings.Count(all, ", ") != 16383 || strings.Contains(all, "more") {
		t.Errorf("with --all: %d bytes", len(all))
	}
	r.Ranges = r.Ranges[:2]
	if text := r.text(false); text != "20.0.0.0/24, 20.0.2.0/24; the sender is in "+r.Holds.String() {
		t.Error(text)
	}
}
