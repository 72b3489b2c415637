package ipvsplugin

import (
	"fmt"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const (
	// spreadEndpoints is how many endpoints a Service has, and after how many connections a long one comes again.
	spreadEndpoints = 4
	spreadRounds    = 32
)

// spread is who got how many connections: all of them, and those that stay open.
type spread struct{ all, held map[string]int }

// chiSquare measures how uneven counts are, with spreadEndpoints-1 degrees of freedom: about 3 is what random choice
// gives, 0 is perfectly even.
func chiSquare(counts map[string]int) (x float64) {
	total := 0
	for _, n := range counts {
		total += n
	}
	want := float64(total) / spreadEndpoints
	for i := range spreadEndpoints {
		d := float64(counts[fmt.Sprintf("pod-%d", i+1)]) - want
		x += d * d / want
	}
	return x
}

func (s spread) String() string {
	return fmt.Sprintf("all %v, chi-square %.2f; long ones %v, chi-square %.2f", s.all, chiSquare(s.all), s.held,
		chiSquare(s.held))
}

// uneven opens connections of which every fourth stays, and the others end at once: whoever deals in turn gives all
// that stay to the same endpoint.
func (w *world) uneven(number int, f ipfamily.Family) spread {
	w.t.Helper()
	s := spread{map[string]int{}, map[string]int{}}
	client, to := w.Pods[spreadEndpoints], vip(number, f)
	for range spreadRounds {
		c, r := client.Open(snapshot.TCP, to, lab.Options{Timeout: patience})
		if c == nil {
			w.t.Fatal(r)
		}
		w.t.Cleanup(func() { labtest.Check(w.t, c.Close()) })
		s.held[r.Endpoint]++
		s.all[r.Endpoint]++
		for who, n := range w.count(client, snapshot.TCP, to, spreadEndpoints-1) {
			s.all[who] += n
		}
	}
	return s
}

// TestIPVSDistribution has connections of very different length dealt by rr, lc and nftables. rr deals exactly in
// turn, whatever comes of it; lc has the long ones even, as random choice has them in 3 of 100 cases only; nftables
// is random.
func TestIPVSDistribution(t *testing.T) {
	w := newWorld(t, spreadEndpoints+1, 0, dataplane.IPVSAuto)
	here := ready(0, 1, 2, 3)
	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), here: here}),
		w.delta(app{number: 2, scheduling: scheduler("lc"), here: here}), w.delta(app{number: 3, here: here}))
	for _, f := range lab.Families() {
		rr, lc, random := w.uneven(1, f), w.uneven(2, f), w.uneven(3, f)
		t.Logf("%v\nrr:       %v\nlc:       %v\nnftables: %v", f, rr, lc, random)
		if chiSquare(rr.all) != 0 || len(rr.held) != 1 {
			t.Errorf("rr does not deal in turn: %v", rr)
		}
		if chiSquare(lc.held) > 0.25 { // 9, 8, 8 and 7
			t.Errorf("lc is no more even than random choice: %v", lc)
		}
		if x := chiSquare(random.held); x > 21.1 || len(random.all) < spreadEndpoints { // one in ten thousand
			t.Errorf("nftables is not random: %v", random)
		}
	}
}
