package results

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func outages() *Outages {
	r := &Outages{}
	r.Settings = OutageSettings{Rate: 10, Length: 3, Timeout: 6}
	r.Versions = map[string]string{"kube-proxy-nftables": "v1"}
	for repeat, failed := range []int{4, 6, 5} {
		r.Cells = append(r.Cells, &Outage{
			Run: Run{Scenario: plotted, Proxy: "kube-proxy-nftables", Repeat: repeat + 1}, Opened: 20, Failed: failed,
			Reasons: map[string]int{"refused": 1, "timed out": failed - 1},
			P50:     []float64{0.25, 0.5, 2500}[repeat], P99: 6001, Longest: 6100,
			Timeline: []OutagePoint{{At: 0, Longest: 0.5}, {At: 0.5, Longest: 6100, Failed: failed}},
		})
	}
	r.Cells = append(r.Cells,
		&Outage{
			Run: Run{Scenario: "held", Proxy: "verdict", Repeat: 1}, Opened: 7, P50: 1, P99: 2, Longest: 2100, Ejections: new(3),
			Held: &OutageHeld{Connections: 3, Told: []float64{1.5, 1.1, 2}, Limit: 45},
		},
		&Outage{
			Run: Run{Scenario: "held", Proxy: "kube-proxy-nftables", Repeat: 1}, Opened: 7, P50: 1, P99: 2, Longest: 2,
			Held: &OutageHeld{Connections: 3, Told: []float64{1.5}, Limit: 45},
		})
	return r
}

func TestOutageTables(t *testing.T) {
	var b strings.Builder
	if err := outages().WriteTables(&b, []string{"held", plotted, "never run"}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| held | verdict | 7 | 0 | 1.0 ms | 2.0 ms | 2.1 s | 3 |",
		// Whoever gave up waited at least as long as the limit. A range names both units if they differ.
		"| " + plotted + " | kube-proxy-nftables | 20 | 5 (4 to 6): timed out, refused | " +
			"0.50 ms (0.25 ms to 2.5 s) | > 6.0 s | > 6.0 s | – |",
		"| held | verdict | 3 | 3 | 1.5 s | 2.0 s |",
		"| held | kube-proxy-nftables | 3 | 1 | > 45 s | > 45 s |",
		"kube-proxy-nftables is v1",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	if strings.Index(b.String(), "| held |") > strings.Index(b.String(), "| "+plotted) {
		t.Error("the scenarios are in another order than asked for")
	}
}

func TestOutagePlot(t *testing.T) {
	dir := t.TempDir()
	r := outages()
	name, err := r.WritePlot(dir)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil || !strings.Contains(string(b), "kube-proxy-nftables") {
		t.Errorf("%v: the picture does not name the proxy", err)
	}
	if name, err := (&Outages{}).WritePlot(dir); name != "" || err != nil {
		t.Errorf("of nothing: %q, %v", name, err)
	}
}
