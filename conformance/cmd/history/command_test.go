package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

// run runs the command line, which must need nothing of the machine.
func run(args ...string) (string, error) {
	var out bytes.Buffer
	cmd := newCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	err := cmd.Execute()
	return out.String(), err
}

func TestCheck(t *testing.T) {
	recorded := func(name string) string { return filepath.Join("..", "..", "history", "testdata", name+".jsonl.gz") }
	out, err := run("check", "--bound", "2s", recorded("correct"))
	if err != nil || !strings.Contains(out, "connections, 0 could not be made") {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err = run("check", "--bound", "2s", recorded("correct"), recorded("lossy")); !errors.Is(err, errWrong) ||
		!strings.Contains(out, "\nlost: ") {
		t.Errorf("%v\n%s", err, out)
	}
	if _, err = run("check", "missing"); err == nil || errors.Is(err, errWrong) {
		t.Errorf("a file that is missing: %v", err)
	}
}

// Results go on where they were, but not with other settings.
func TestResults(t *testing.T) {
	o := &options{out: t.TempDir(), length: time.Second, seed: 1}
	found, err := o.results()
	if err != nil || len(found.Cells) != 0 {
		t.Fatalf("the first time: %+v, %v", found, err)
	}
	found.Cells = []*results.HistoryCell{{Run: results.Run{Scenario: "churn", Proxy: "verdict", Repeat: 1}}}
	if err := found.WriteFile(o.file("history.json")); err != nil {
		t.Fatal(err)
	}
	if found, err = o.results(); err != nil || len(found.Cells) != 1 {
		t.Errorf("the second time: %+v, %v", found, err)
	}
	o.seed = 2
	if _, err = o.results(); err == nil || !strings.Contains(err.Error(), "other settings") {
		t.Errorf("another seed: %v", err)
	}
	o.fresh = true
	if found, err = o.results(); err != nil || len(found.Cells) != 0 {
		t.Errorf("--fresh: %+v, %v", found, err)
	}
	o = &options{out: t.TempDir(), render: true}
	if _, err = o.results(); err == nil {
		t.Error("--render of nothing")
	}
}

// The document has the mark that --docs looks for.
func TestDocs(t *testing.T) {
	root := t.TempDir()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "evidence", "HISTORY.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{"images", "evidence"} {
		if err := os.MkdirAll(filepath.Join(root, "docs", folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(root, "docs", "evidence", "HISTORY.md")
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}
	o := &options{source: root}
	cell := &results.HistoryCell{Run: results.Run{Scenario: "churn", Proxy: "verdict", Repeat: 1}, Removed: 3}
	found := &results.Histories{}
	found.Cells = append(found.Cells, cell)
	if err := o.writeDocs(found, "the tables"); err != nil {
		t.Fatal(err)
	}
	const want = "(../images/history.svg)\n\nthe tables\n"
	if text, err = os.ReadFile(path); err != nil || !strings.Contains(string(text), want) {
		t.Errorf("%v\n%s", err, text)
	}
}
