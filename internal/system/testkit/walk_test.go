package testkit

import (
	"strings"
	"testing"
)

// TestShrink: of a walk that fails, the fewest steps are found that still do, and told; each step chooses the same.
func TestShrink(t *testing.T) {
	ws := &Walks{test: "TestX", name: "x", length: 40}
	chosen := map[int]int{}
	take := func(t *testing.T, w *Walk) {
		met := 0
		for _, step := range w.Steps {
			w.Begin(step)
			n := w.IntN(1000)
			if was, ok := chosen[step]; ok && was != n {
				t.Errorf("step %d chooses %d, and chose %d", step, n, was)
			}
			if chosen[step] = n; step == 3 || step == 17 {
				w.Note("met %d", step)
				met++
			}
			if met == 2 {
				w.Fail("both were met")
				w.Stop()
			}
		}
	}
	w := ws.shrink(t, ws.take(t, 5, UpTo(40), take), take)
	const want = "seed 5, step 17: both were met\ntake it again with -run 'TestX$' -x.seed 5 -x.only 3,17\n"
	if got := w.Story(ws.flags(w)); !strings.HasPrefix(got, want) || !strings.HasSuffix(got, "\n    17  met 17") {
		t.Errorf("%s", got)
	}
}
