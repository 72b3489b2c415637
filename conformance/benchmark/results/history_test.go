package results

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func histories() *Histories {
	r := &Histories{}
	r.Settings = HistorySettings{Length: 20, Look: 4, Rate: 20, Seed: 1}
	r.Versions = map[string]string{"kube-proxy-nftables": "v1", "verdict": "v0"}
	for repeat := range 3 {
		r.Cells = append(r.Cells,
			&HistoryCell{Run: Run{"churn", "verdict", repeat + 1}, Load: 2, Conns: 1000, Removed: 12, Beyond: 12,
				Stale: 1, Unproven: repeat, Violations: map[string]int{}},
			&HistoryCell{Run: Run{Scenario: "churn", Proxy: "kube-proxy-nftables", Repeat: repeat + 1}, Load: float64(repeat),
				Conns: 1000, Removed: 1000 + float64(repeat)*100, Added: 5, Beyond: 900, Stale: 10,
				Violations: map[string]int{"reused": 2, "lost": repeat}})
	}
	return r
}

func TestHistoryTables(t *testing.T) {
	var b strings.Builder
	r := histories()
	if err := r.WriteTables(&b, []string{"never run", "churn"}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| churn | verdict | 3,000 | 0 | 3 | 12 ms | 0 ms | 0 ms | 12 ms | 0 | 0 | 0 | 0 | 0 (3 unproven) |",
		"| churn | kube-proxy-nftables | 3,000 | 0 | 30 | 1.1 s (1.0 to 1.2 s) | 5.0 ms | 0 ms | 900 ms | " +
			"6 | 0 | 0 | 0 | 3 |",
		"kube-proxy-nftables is v1;\nverdict is v0", "3 runs of each", "0.0 to 2.0, median 2.0",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	if !r.Wrong() {
		t.Error("violations are forgotten")
	}
	if text := r.Cells[1].String(); !strings.Contains(text, "reused 2") {
		t.Error(text)
	}
	for _, c := range r.Cells {
		c.Violations = map[string]int{}
	}
	if r.Wrong() {
		t.Error("nothing is wrong")
	}
}

// The picture is the same each time, and names proxies and scenarios.
func TestHistoryPlot(t *testing.T) {
	dir, r := t.TempDir(), histories()
	draw := func() string {
		name, err := r.WritePlot(dir, []string{"churn", "killed"})
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	first := draw()
	for _, want := range []string{"kube-proxy-nftables", "verdict", "churn", "killed"} {
		if !strings.Contains(first, want) {
			t.Errorf("the picture does not name %s", want)
		}
	}
	if draw() != first {
		t.Error("the picture differs the second time")
	}
	if name, err := (&Histories{}).WritePlot(dir, nil); name != "" || err != nil {
		t.Errorf("of nothing: %q, %v", name, err)
	}
}
