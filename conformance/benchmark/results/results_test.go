package results

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"gonum.org/v1/plot/vg"
)

var updateGoldens = flag.Bool("update", false, "write the goldens anew")

func TestPercentile(t *testing.T) {
	values := []float64{5, 1, 4, 2, 3}
	for _, c := range []struct{ p, want float64 }{{0, 1}, {0.2, 1}, {0.21, 2}, {0.5, 3}, {0.99, 5}, {1, 5}} {
		if got := Percentile(values, c.p); got != c.want {
			t.Errorf("Percentile(%v) = %v, want %v", c.p, got, c.want)
		}
	}
	if !slices.Equal(values, []float64{5, 1, 4, 2, 3}) {
		t.Error("the values were sorted in place")
	}
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	if got := Percentile(hundred, 0.99); got != 99 {
		t.Errorf("the 99th percentile of 1 to 100 is %v", got)
	}
	if !math.IsNaN(Percentile(nil, 0.5)) || !math.IsNaN(Median(nil)) {
		t.Error("of no values there is a percentile")
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{{[]float64{7}, 7}, {[]float64{1, 3}, 2}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 2, 100}, 3}} {
		if got := Median(c.values); got != c.want {
			t.Errorf("Median(%v) = %v, want %v", c.values, got, c.want)
		}
	}
}

// A median is a bound as soon as half of the values are limits that were hit, and so is a percentile that falls among
// them.
func TestLimits(t *testing.T) {
	for _, c := range []struct {
		waits   []Wait
		median  float64
		atLeast bool
	}{
		{[]Wait{{Seconds: 1}, {Seconds: 2}, {Seconds: 3}}, 2, false},
		{[]Wait{{Seconds: 1}, {Seconds: 2}, {Seconds: 9, Limit: true}}, 2, false},
		{[]Wait{{Seconds: 1}, {Seconds: 9, Limit: true}, {Seconds: 9, Limit: true}}, 9, true},
		{[]Wait{{Seconds: 1}, {Seconds: 9, Limit: true}}, 5, true},
		{[]Wait{{Seconds: 9, Limit: true}}, 9, true},
	} {
		got := waitSpread(c.waits)
		if got.Median != c.median || got.AtLeast != c.atLeast || got.N != len(c.waits) {
			t.Errorf("%v: %+v", c.waits, got)
		}
	}
	q := quantilesOf([]Spans{{Milliseconds: []float64{1, 2, 3}}, {Milliseconds: []float64{4, 50}, Open: 1}})
	if q.P50.Median != 3 || q.P50.AtLeast || q.P99.Median != 50 || !q.P99.AtLeast {
		t.Errorf("one of five open: %+v", q)
	}
	q = quantilesOf([]Spans{{Milliseconds: []float64{1, 50, 50}, Open: 2}})
	if !q.P50.AtLeast {
		t.Errorf("two of three open: %+v", q)
	}
	q = quantilesOf([]Spans{{Milliseconds: []float64{70, 80, 90, 60}, Open: 1}})
	if q.P50.Median != 70 || !q.P50.AtLeast || q.P99.Median != 90 || !q.P99.AtLeast {
		t.Errorf("one of four open, and for less time than the others took: %+v", q)
	}
	q = quantilesOf([]Spans{{Milliseconds: []float64{70, 80, 90, 85}, Open: 1}})
	if q.P50.Median != 80 || q.P50.AtLeast || !q.P99.AtLeast {
		t.Errorf("one of four open, for longer than half of the others took: %+v", q)
	}
	if q = quantilesOf(nil); q.P50.N != 0 || q.text() != none {
		t.Errorf("nothing: %+v", q)
	}
}

func TestText(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{Milliseconds(0.4), "0.40 ms"}, {Milliseconds(3.21), "3.2 ms"},
		{Milliseconds(18.42), "18 ms"}, {Milliseconds(999), "999 ms"},
		{Milliseconds(1500), "1.5 s"}, {Milliseconds(18420), "18 s"}, {Milliseconds(math.NaN()), none},
		{WaitText(Wait{Seconds: 139}), "139 s"}, {WaitText(Wait{Seconds: 300, Limit: true}), "> 300 s"},
		{Spread{}.text(Seconds), none},
		{Spread{2, 1, 3, 3, false, false}.text(Seconds), "2.0 s (1.0 to 3.0 s)"},
		{Spread{250, 200, 300, 3, false, true}.text(Seconds), "250 s (200 to > 300 s)"},
		{Spread{2, 1.99999, 2.00001, 2, false, false}.text(Seconds), "2.0 s"},
		{Spread{300, 200, 300, 2, true, true}.text(Seconds), "> 300 s"},
		{Spread{2, 1, 3, 3, false, false}.short(Seconds), "2.0 s"},
		{grouped(999), "999"}, {grouped(30000), "30,000"}, {grouped(1002003), "1,002,003"},
		{duration(20), "1 min"}, {duration(299), "5 min"}, {duration(7500), "2 h 05 min"},
		{behind(0.0004), "0 s"}, {behind(0.6), "600 ms"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}

func TestShortened(t *testing.T) {
	for text, want := range map[string]string{
		"one line": "one line", "it has ended:\nfirst\n\tlast words\n >\n": "it has ended: last words", "a:\n>": "a: >",
	} {
		if got := Shortened(text); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
}

func TestParseSize(t *testing.T) {
	if s, err := ParseSize("10000x10"); err != nil || s != (Size{10000, 10}) || s.String() != "10000x10" {
		t.Errorf("%v, %v", s, err)
	}
	for _, bad := range []string{"", "10000", "x", "0x10", "10x0", "10x10x10", "-1x10", "100001x1",
		"1x101", "60000x100", "a x b"} {
		if s, err := ParseSize(bad); err == nil {
			t.Errorf("%q is %v", bad, s)
		}
	}
}

// example is a run whose figures follow simple laws, with a limit that was hit, an error, and a proxy that was left
// out.
func example() *Results {
	r := &Results{
		Machine: Machine{
			CPU: "Example", Cores: 2, Memory: 8 << 30, Kernel: "6.18.0", Tools: []string{"nftables v1.1.3", "iptables v1.8.11"},
		},
		Settings: Settings{
			StartLimit: 300, Changes: 3, ChangesLimit: 60, Rates: []float64{100, 1000}, ChurnTime: 60, DrainLimit: 60,
			GiantLimit: 60, Rounds: 8, TurnTime: 0.2,
		},
		Versions: map[string]string{
			"verdict-nftables":    "verdict v1",
			"kube-proxy-nftables": "Kubernetes v1.36.3",
			"kube-proxy-iptables": "Kubernetes v1.36.3",
			"cilium":              "Cilium 1.20.2",
		},
		Reasons: map[string]map[string]string{
			"cilium": {TitleGiant: "its map is full"},
		},
		LeftOut: map[string]string{"verdict-iptables": "left out: it has no --backend"},
		Spent:   7500,
	}
	for repeat := range 3 {
		for _, size := range []Size{{1000, 10}, {10000, 10}, {30000, 10}, {5000, 50}} {
			for i, proxy := range []string{"kube-proxy-iptables", "verdict-nftables", "kube-proxy-nftables", "cilium"} {
				r.Cells = append(r.Cells, exampleCell(size, proxy, repeat+1, i))
			}
			r.Paths = append(r.Paths, examplePaths(size, repeat+1))
		}
	}
	return r
}

func exampleCell(size Size, proxy string, repeat, i int) *Cell {
	c := &Cell{
		Size:   size,
		Proxy:  proxy,
		Repeat: repeat,
		Began:  time.Date(2026, 1, 2, 3, 4, repeat, 0, time.UTC),
		Took:   60,
		Load:   0.25 * float64(i),
	}
	slow := map[string]float64{
		"verdict-nftables": 1, "kube-proxy-nftables": 40, "kube-proxy-iptables": 20, "cilium": 3,
	}[proxy]
	n := float64(size.Services) / 1000 * slow * (1 + 0.1*float64(repeat))
	if proxy == "kube-proxy-nftables" && size.Services == 30000 {
		c.Start = &Wait{Seconds: 300, Limit: true, Processor: 250}
		return c
	}
	c.Start = &Wait{Seconds: n / 20, Processor: n / 30}
	c.Memory = &Memory{Resident: uint64(n+40) << 20, Peak: uint64(2*n+50) << 20, Kernel: uint64(n) << 18}
	if proxy == "kube-proxy-iptables" && size.Endpoints == 50 {
		c.Error = "the proxy has ended:\nlast words"
		return c
	}
	c.Restart = &Wait{Seconds: n / 10, Processor: n / 15}
	c.Away = &Wait{Seconds: n / 8}
	c.Change = &Spans{Milliseconds: []float64{n, 2 * n, 3 * n}, Write: 2}
	for _, rate := range exampleRates {
		c.Churn = append(
			c.Churn,
			Churn{
				Rate:    rate,
				Written: rate - 1,
				Spans:   Spans{Milliseconds: []float64{n, 3 * n}, Write: 2},
				Cores:   rate / 2000,
				Behind:  Wait{Seconds: n / 1000},
			},
		)
	}
	if size.Services == 1000 && proxy != "cilium" {
		c.Giant = exampleGiant(n, repeat)
	}
	return c
}

// exampleGiant has a change in its second repeat that was not seen in time.
func exampleGiant(n float64, repeat int) *Giant {
	const mebibyte = 1 << 20
	g := &Giant{
		Created: GiantStep{
			Wait:     Wait{Seconds: n / 4, Processor: n / 8},
			Others:   Spans{Milliseconds: []float64{3 * n, 2 * n}, Write: 2},
			Resident: int64(n) * mebibyte, Peak: int64(2*n) * mebibyte, Kernel: 5 * mebibyte,
		},
		Deleted: GiantStep{
			Wait:     Wait{Seconds: 10, Limit: n > 40, Processor: n / 10},
			Others:   Spans{Milliseconds: []float64{n, 9000}, Write: 2},
			Resident: -2 * mebibyte, Peak: 1000, Kernel: -1000,
		},
	}
	if repeat > 1 {
		g.Deleted.Others.Open = 1
	}
	return g
}

var exampleRates = []float64{100, 1000}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *updateGoldens {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs; -update writes it anew. Got:\n%s", path, got)
	}
}

func TestTables(t *testing.T) {
	var b strings.Builder
	if err := example().WriteTables(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "tables.md", b.String())
	golden(t, "readme.md", example().ReadmeTable())
}

// structure gives what a picture is made of: words and how lines are drawn, without their places.
func structure(t *testing.T, svg []byte) string {
	t.Helper()
	var b strings.Builder
	d := xml.NewDecoder(bytes.NewReader(svg))
	places := regexp.MustCompile(`-?[0-9]+(\.[0-9]+)?`)
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return b.String()
		}
		if err != nil {
			t.Fatal(err)
		}
		switch e := token.(type) {
		case xml.StartElement:
			b.WriteString(e.Name.Local)
			for _, a := range e.Attr {
				switch a.Name.Local {
				case "style":
					b.WriteString(" " + a.Value)
				case "d":
					b.WriteString(" " + places.ReplaceAllString(a.Value, "n"))
				}
			}
			b.WriteByte('\n')
		case xml.CharData:
			if text := strings.TrimSpace(string(e)); text != "" {
				b.WriteString("  " + text + "\n")
			}
		}
	}
}

func TestPlots(t *testing.T) {
	dir := t.TempDir()
	names, err := example().WritePlots(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"start", "restart", "change", "memory", "new-flow", "churn-100", "churn-1000"}
	for i := range want {
		want[i] = "bench-" + want[i] + ".svg"
	}
	if !slices.Equal(names, want) {
		t.Errorf("pictures are %q", names)
	}
	for _, name := range names {
		svg, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		s := structure(t, svg)
		for _, proxy := range []string{"verdict-nftables", "kube-proxy-nftables", "kube-proxy-iptables", "cilium"} {
			if !strings.Contains(s, proxy) {
				t.Errorf("%s does not name %s", name, proxy)
			}
		}
		if name == "bench-start.svg" {
			golden(t, "start.txt", s)
		}
	}
}

// A picture says where a limit was hit, and one without values is none.
func TestPlotLimits(t *testing.T) {
	r := example()
	svg, err := r.draw(r.pictures()[0])
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(svg, []byte("kube-proxy-nftables (limit)")) {
		t.Error("the limit is not told")
	}
	if svg, err := (&Results{}).draw(r.pictures()[0]); svg != nil || err != nil {
		t.Errorf("of nothing there is a picture: %v, %v", svg, err)
	}
}

func TestApart(t *testing.T) {
	for _, c := range []struct{ in, want []vg.Length }{
		{[]vg.Length{10, 50}, []vg.Length{10, 50}},
		{[]vg.Length{10, 12, 14}, []vg.Length{10, 20, 30}},
		{[]vg.Length{95, 96, 97}, []vg.Length{80, 90, 100}},
		{[]vg.Length{-5, 100}, []vg.Length{0, 100}},
	} {
		if got := apart(c.in, 10, 0, 100); !slices.Equal(got, c.want) {
			t.Errorf("apart(%v) = %v, want %v", c.in, got, c.want)
		}
	}
}

func TestLogTicks(t *testing.T) {
	var labels []string
	for _, tick := range logTicks(0.04, 130) {
		labels = append(labels, tick.Label)
	}
	if got := strings.Join(labels, " "); got != "0.1 1 10 100" {
		t.Errorf("over a long way: %s", got)
	}
	labels = nil
	for _, tick := range logTicks(90, 2500) {
		labels = append(labels, tick.Label)
	}
	if got := strings.Join(labels, " "); got != "100 200 500 1,000 2,000" {
		t.Errorf("over a short way: %s", got)
	}
}

func TestReadWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "deep", "results.json")
	if r, err := ReadFile(path); r != nil || err != nil {
		t.Errorf("what is not there: %v, %v", r, err)
	}
	want := example()
	if err := want.WriteFile(path); err != nil {
		t.Fatal(err)
	}
	got, err := ReadFile(path)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v; what was read differs", err)
	}
	left, _ := filepath.Glob(filepath.Dir(path) + "/*")
	if len(left) != 1 {
		t.Errorf("it left %q", left)
	}
}

func TestReadBad(t *testing.T) {
	const cell = `{"size":{"services":1,"endpoints":1},"proxy":"a","repeat":1}`
	for bad, want := range map[string]string{
		`{`:                                     "unexpected EOF",
		`{"colour":1}`:                          "colour",
		`{"cells":[null]}`:                      "cells[0]: it is null",
		`{"cells":[{}]}`:                        "cells[0]: size, proxy or repeat is missing",
		`{"cells":[` + cell + `,` + cell + `]}`: "cells[1]: 1x1, a, repeat 1 is there twice",
	} {
		_, err := Read(strings.NewReader(bad))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", bad, err, want)
		}
	}
}

// Results that are older than the giant are read, and their tables say that it was not measured.
func TestReadOld(t *testing.T) {
	r, err := Read(strings.NewReader(`{"settings":{"method":2,"start_limit_s":30},
		"cells":[{"size":{"services":1000,"endpoints":10},"proxy":"a","repeat":1,"start":{"s":1}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if text := r.Row(r.Cells[0].Size, "a").GiantCreated.text(); text != none {
		t.Errorf("the giant is %q", text)
	}
	var b strings.Builder
	if err := r.WriteTables(&b); err != nil || strings.Contains(b.String(), "The giant Service has") {
		t.Errorf("%v\n%s", err, b.String())
	}
}

func TestUpdate(t *testing.T) {
	const text = "a\n<!-- bench: x -->\nold\n<!-- bench: end -->\nb\n<!-- bench: y -->\nkept\n<!-- bench: end -->\n"
	got, err := update(text, "x", "\nnew\n\n")
	if want := strings.Replace(text, "old", "new", 1); err != nil || got != want {
		t.Errorf("%v\n%s", err, got)
	}
	if got, _ = update(text, "y", "other"); got != strings.Replace(text, "kept", "other", 1) {
		t.Error(got)
	}
	for _, bad := range []string{"nothing", "<!-- bench: x -->\nwithout an end"} {
		if _, err := update(bad, "x", "new"); err == nil {
			t.Errorf("%q was updated", bad)
		}
	}
}

// TestSpan: the repeats are those of the proxy that was measured least often, unless it never started in time.
func TestSpan(t *testing.T) {
	r := &Results{}
	for i := range 3 {
		r.Cells = append(r.Cells, &Cell{Size: Size{1000, 10}, Proxy: "often", Repeat: i + 1, Load: float64(i)})
	}
	r.Cells = append(r.Cells, &Cell{Size: Size{1000, 10}, Proxy: "late", Repeat: 1, Start: &Wait{Limit: true}})
	if repeats, low, high := r.span(); repeats != "3" || low != 0 || high != 2 {
		t.Errorf("without one that never started: %s repeats, load %v to %v", repeats, low, high)
	}
	r.Cells = append(r.Cells, &Cell{Size: Size{5000, 10}, Proxy: "often", Repeat: 1})
	if repeats, _, _ := r.span(); repeats != "1 to 3" {
		t.Errorf("one size was measured once: %s repeats", repeats)
	}
}
