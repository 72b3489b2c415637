package main

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

func cell(proxy string, repeat int) *results.Cell {
	return &results.Cell{
		Size:   results.Size{Services: 10, Endpoints: 2},
		Proxy:  proxy,
		Repeat: repeat,
		Start:  &results.Wait{Seconds: 1.5},
	}
}

// What a guest prints in pieces, among other lines, is what the machine around it has in the end.
func TestCells(t *testing.T) {
	inside := &results.Results{
		Settings: quickSettings,
		Versions: map[string]string{"a": "1"},
		Cells:    []*results.Cell{cell("a", 1)},
	}
	var out bytes.Buffer
	if err := printCells(&out, inside, 0); err != nil {
		t.Fatal(err)
	}
	out.WriteString("10x2 a 1 s\n")
	inside.Cells, inside.Spent = append(inside.Cells, cell("b", 1)), 60
	if err := printCells(&out, inside, 1); err != nil {
		t.Fatal(err)
	}
	o := &options{out: t.TempDir()}
	around := &results.Results{}
	if err := o.takeUp(&out, around); err != nil {
		t.Fatal(err)
	}
	if !around.Machine.Guest {
		t.Error("the results do not say that they are a guest's")
	}
	saved, err := results.ReadFile(o.file("results.json"))
	if err != nil || !reflect.DeepEqual(saved, around) {
		t.Errorf("%v; saved is %+v", err, saved)
	}
	around.Machine.Guest = false
	if !reflect.DeepEqual(around, inside) {
		t.Errorf("around %+v, inside %+v", around, inside)
	}
	if ours, err := readLine(cellWord+"{", around); !ours || err == nil {
		t.Error("a broken line was read")
	}
}

func TestDefaults(t *testing.T) {
	o := &options{source: "src"}
	o.defaults()
	if !slices.Equal(o.sizes, fullSizes) || o.repeat != fullRepeats || o.budget != fullBudget ||
		o.out != filepath.Join("src", "bin", "bench") {
		t.Errorf("%+v", o)
	}
	for _, s := range append(slices.Clone(fullSizes), quickSizes...) {
		if _, err := results.ParseSize(s); err != nil {
			t.Error(err)
		}
	}
	o = &options{quick: true, repeat: 7}
	o.defaults()
	if o.budget != quickBudget || o.repeat != 7 || !reflect.DeepEqual(o.settings, quickSettings) ||
		filepath.Base(o.out) != "bench-quick" {
		t.Errorf("--quick --repeat 7: %+v", o)
	}
	o = &options{quick: true, giant: true}
	o.defaults()
	if o.settings.Changes != 0 || o.settings.Rates != nil || o.settings.GiantLimit != quickSettings.GiantLimit {
		t.Errorf("--quick --giant: %+v", o.settings)
	}
	if quickSettings.Changes == 0 || quickSettings.Rates == nil {
		t.Error("--giant changed the settings of --quick")
	}
	o = &options{guest: "6.12"}
	o.defaults()
	if !slices.Contains(o.proxies, "kube-proxy-ipvs") || filepath.Base(o.out) != "bench-guest-6.12" {
		t.Errorf("--guest: %+v", o)
	}
}

// Results go on where they were, but not with other settings.
func TestResults(t *testing.T) {
	o := &options{out: t.TempDir(), settings: quickSettings}
	if r, err := o.results(); err != nil || len(r.Cells) != 0 {
		t.Fatalf("the first time: %+v, %v", r, err)
	}
	old := &results.Results{Settings: quickSettings, Cells: []*results.Cell{cell("a", 1)}}
	if err := old.WriteFile(o.file("results.json")); err != nil {
		t.Fatal(err)
	}
	if r, err := o.results(); err != nil || len(r.Cells) != 1 {
		t.Errorf("the second time: %+v, %v", r, err)
	}
	o.settings = fullSettings
	if _, err := o.results(); err == nil || !strings.Contains(err.Error(), "other settings") {
		t.Errorf("other settings: %v", err)
	}
	o.render = true
	if r, err := o.results(); err != nil || !reflect.DeepEqual(r.Settings, quickSettings) {
		t.Errorf("--render: %+v, %v", r, err)
	}
	o.render, o.fresh = false, true
	if r, err := o.results(); err != nil || len(r.Cells) != 0 {
		t.Errorf("--fresh: %+v, %v", r, err)
	}
	o = &options{out: t.TempDir(), render: true}
	if _, err := o.results(); err == nil {
		t.Error("--render of nothing")
	}
}

// The documents have the marks that --docs looks for, and what it writes there is what the results say.
func TestDocs(t *testing.T) {
	root := t.TempDir()
	for _, name := range []string{"README.md", filepath.Join("docs", "evidence", "BENCHMARKS.md")} {
		text, err := os.ReadFile(filepath.Join("..", "..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	o := &options{source: root}
	r := &results.Results{Settings: quickSettings, Cells: []*results.Cell{cell("verdict-nftables", 1)}}
	r.Cells[0].Size.Endpoints = 10
	if err := o.writeDocs(r, "the tables"); err != nil {
		t.Fatal(err)
	}
	r.Cells = append(r.Cells, cell("cilium", 1))
	r.Cells[1].Size.Endpoints = 10
	if err := o.writeDocs(r, "the tables beside Cilium"); err != nil {
		t.Fatal(err)
	}
	r.Machine.Guest = true
	if err := o.writeDocs(r, "the guest's tables"); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "docs", "evidence", "BENCHMARKS.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"\nthe tables\n", "\nthe guest's tables\n",
		"\nthe tables beside Cilium\n", "(../images/bench-start.svg)"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("docs/evidence/BENCHMARKS.md has no %q", want)
		}
	}
	if readme, err := os.ReadFile(filepath.Join(root, "README.md")); err != nil ||
		!strings.Contains(string(readme), " | verdict-nftables | cilium |\n") {
		t.Errorf("README.md: %v", err)
	}
}
