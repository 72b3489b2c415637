package results

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// examplePaths has nodes whose pace changes from round to round, for all alike. kube-proxy-nftables is ahead in one
// path, and kube-proxy-iptables did not start in the largest cluster.
func examplePaths(size Size, repeat int) *Paths {
	p := &Paths{
		Size: size, Repeat: repeat, Began: time.Date(2026, 1, 2, 4, 4, repeat, 0, time.UTC), Took: 90, Load: 0.5,
		Turns: map[string]map[Path][]float64{},
	}
	names := []string{Baseline, Tracking, "verdict-nftables", "kube-proxy-nftables", "kube-proxy-iptables", "cilium"}
	if size.Services == 30000 {
		names = slices.DeleteFunc(names, func(name string) bool { return name == "kube-proxy-iptables" })
		p.Missing = map[string]string{"kube-proxy-iptables": "not programmed and at rest within 5m0s"}
	}
	for i, name := range names {
		p.Turns[name] = map[Path][]float64{}
		for j, path := range AllPaths {
			if i < 2 && path.direct() != path {
				continue
			}
			for round := range 8 {
				pace := float64((round * 5) % 7) // seen by all
				figure := 10 + pace + 0.5*float64(i) + 0.01*float64(round)
				switch {
				case path.rate():
					figure = 1000 * (10 + pace) * (1 - 0.02*float64(i))
				case name == "kube-proxy-nftables" && path == NodePacket:
					figure -= 0.8
				case name == "verdict-nftables" && path == ForwardedPacket:
					figure = 10 + float64((round*j)%7) // what others do not see
				}
				p.Turns[name][path] = append(p.Turns[name][path], figure)
			}
		}
	}
	return p
}

// TestMedianRank: as many values as a table of the sign test has may be left out at either end.
func TestMedianRank(t *testing.T) {
	for n, want := range map[int]int{0: 0, 1: 0, 5: 0, 6: 0, 8: 0, 9: 1, 12: 2, 16: 3, 20: 5, 24: 6, 30: 9, 100: 39} {
		if got := medianRank(n); got != want {
			t.Errorf("of %d values %d are outside; want %d", n, got, want)
		}
	}
}

// TestDifference: what is smaller than its spread, or came of too few turns, is noise; what is larger is shown with it.
func TestDifference(t *testing.T) {
	for _, c := range []struct {
		name    string
		repeats [][]float64
		want    string
	}{
		{"nothing", nil, none},
		{"too few", [][]float64{{2, 2, 2, 2, 2}}, noise},
		{"all alike", [][]float64{{2, 2, 2, 2, 2, 2}}, "+2.00 (+2.00 to +2.00)"},
		{"on both sides", [][]float64{{-3, 2, -1, 1, 3, -2}}, noise},
		{"smaller than its spread", [][]float64{{1, 2, 3, 4, 5, 6}}, noise},
		{"larger than its spread", [][]float64{{8, 9, 10, 10, 11, 12}}, "+10.00 (+8.00 to +12.00)"},
		{"less", [][]float64{{-8, -9, -10, -10, -11, -12}}, "-10.00 (-12.00 to -8.00)"},
		{"one far away", [][]float64{{2, 2, 2, 2, 2, 2, 2, 2, 900}}, "+2.00 (+2.00 to +2.00)"},
		{"repeats apart", [][]float64{{1, 1, 1, 1, 1, 1}, {5, 5, 5, 5, 5, 5}}, noise},
		{"repeats near", [][]float64{{4, 4, 4, 4, 4, 4}, {5, 5, 5, 5, 5, 5}}, "+4.50 (+4.00 to +5.00)"},
		{"a repeat without turns", [][]float64{{}, {5, 5, 5, 5, 5, 5}}, "+5.00 (+5.00 to +5.00)"},
	} {
		if got := differenceOf(c.repeats).text(aboveHundredths); got != c.want {
			t.Errorf("%s: %q; want %q", c.name, got, c.want)
		}
	}
}

// TestNoise: of two nodes that cost the same, on a machine whose pace changes, a difference is rarely shown; of two
// that differ by less than that pace but more than their own noise, nearly always.
func TestNoise(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	shown := func(apart float64) (times int) {
		for range 200 {
			r := &Results{}
			for repeat := range 3 {
				p := &Paths{Size: readmeSize, Repeat: repeat + 1, Turns: map[string]map[Path][]float64{"a": {}, "b": {}}}
				for range 8 {
					pace := 10 + 5*random.Float64()
					for name, more := range map[string]float64{"a": apart, "b": 0} {
						of := p.Turns[name]
						of[NodeService] = append(of[NodeService], pace+more+0.3*random.NormFloat64())
					}
				}
				r.Paths = append(r.Paths, p)
			}
			if !r.difference(readmeSize, "a", "b", NodeService, NodeService).Noise() {
				times++
			}
		}
		return times
	}
	if n := shown(0); n > 2 {
		t.Errorf("where there is no difference, %d of 200 runs show one", n)
	}
	if n := shown(1.5); n < 195 {
		t.Errorf("of a difference of 1.5 µs, %d of 200 runs show one", n)
	}
}

// TestPathRows: nodes without a proxy stand for Services with what goes straight to endpoints, and what is compared are
// figures of the same round.
func TestPathRows(t *testing.T) {
	r := example()
	row := r.Row(readmeSize, "verdict-nftables")
	service := row.Paths[ForwardedService]
	if service.N != 24 || math.Abs(service.Above.Median-1) > 1e-9 || service.Above.Noise() {
		t.Errorf("a forwarded flow: %+v", service)
	}
	if !row.Paths[ForwardedPacket].Above.Noise() {
		t.Errorf("noise is shown: %+v", row.Paths[ForwardedPacket])
	}
	bytes := row.Paths[NodeGigabits].Above
	if math.Abs(bytes.Median+0.04) > 1e-9 || bytes.short(percentAbove) != "-4%" {
		t.Errorf("bytes: %+v", bytes)
	}
	bare := r.Row(readmeSize, Baseline).Paths
	if bare[NodeService].Spread != bare[NodeEndpoint].Spread || bare[NodeService].Above.N != 0 {
		t.Errorf("without a proxy: %+v", bare)
	}
	late := r.Row(Size{30000, 10}, "kube-proxy-iptables").Paths[NodeService]
	if late.N != 0 || late.Above.text(aboveHundredths) != none {
		t.Errorf("one that did not start: %+v", late)
	}
	ahead := r.ahead(readmeSize, "kube-proxy-nftables")
	want := "10,000 x 10: kube-proxy-nftables, a packet of an established flow, from the node: " +
		"-0.30 µs (-0.30 µs to -0.30 µs)"
	if !slices.Equal(ahead, []string{want}) {
		t.Errorf("ahead is %q", ahead)
	}
}

// Results of turns alone have tables, and are read as they were written.
func TestOnlyPaths(t *testing.T) {
	r := example()
	r.Cells = nil
	var b strings.Builder
	if err := r.WriteTables(&b); err != nil {
		t.Fatal(err)
	}
	if text := b.String(); strings.Contains(text, "### Start") || !strings.Contains(text, "### New flow, forwarded") {
		t.Errorf("tables are\n%s", text)
	}
	if repeats, low, _ := r.span(); repeats != "3" || low != 0.5 {
		t.Errorf("%s repeats, load from %v", repeats, low)
	}
	if names := r.Proxies(); !slices.Contains(names, "kube-proxy-iptables") || slices.Contains(names, Tracking) {
		t.Errorf("proxies are %q", names)
	}
	if got := PathsSummary(r.Paths[0]); !strings.Contains(got, "verdict-nftables") {
		t.Error(got)
	}
}
