package labtest

import (
	"testing"
	"time"
)

// TestStalls: moments at which nothing ran are known, and only those.
func TestStalls(t *testing.T) {
	begin := time.Now()
	at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
	s := &Stalls{last: begin}
	for _, ms := range []int{10, 25, 60, 500, 510, 520} {
		s.ran(at(ms))
	}
	for ms, want := range map[int]bool{0: true, 60: true, 400: true, 500: false, 515: false} {
		if got := s.Since(at(ms)); got != want {
			t.Errorf("since %d ms: %v", ms, got)
		}
	}
}
