package conntrack

import "testing"

// TestOpenPortIsFull: a port is full from its limit on, until there is some room again.
func TestOpenPortIsFull(t *testing.T) {
	for _, test := range []struct {
		most, from, n int
		full          bool
	}{
		{1, 0, 0, false}, {1, 0, 1, true}, {1, 1, 0, false}, {1, 1, 5, true},
		{8, 8, 7, false}, {8, 7, 7, false}, {8, 7, 8, true},
		{6400, 6400, 6399, true}, {6400, 6400, 6300, true}, {6400, 6400, 6299, false}, {6400, 6000, 6399, false},
	} {
		p := &openPort{most: test.most, isFull: test.from >= test.most}
		was := p.isFull
		if changed := p.judge([]openCount{{n: test.n}}); p.isFull != test.full || changed != (was != test.full) {
			t.Errorf("%+v: full %v, changed %v", test, p.isFull, changed)
		}
	}
	p := &openPort{most: 1, isFull: true}
	if !p.judge(nil) || p.isFull {
		t.Error("a port without connections stays full")
	}
}
