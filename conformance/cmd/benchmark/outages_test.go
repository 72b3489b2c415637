package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

func TestOutageSettings(t *testing.T) {
	o := &outageOptions{source: "src"}
	s := o.settings()
	if s.Length != 60 || s.Before != 15 || s.Timeout != 15 || s.Drain != 50 || s.Connections != 1000000 ||
		o.repeat != fullRepeats || o.out != filepath.Join("src", "bin", "outages") {
		t.Errorf("%+v, %+v", o, s)
	}
	o = &outageOptions{quick: true, connections: 7, rate: 3, repeat: 2}
	s = o.settings()
	if s.Length != 20 || s.Held != quickOutage.Held || s.Connections != 7 || s.ManyRate != 3 || o.repeat != 2 ||
		filepath.Base(o.out) != "outages-quick" {
		t.Errorf("--quick: %+v, %+v", o, s)
	}
	// A graceful rollout ends before the clients do.
	if s.Drain >= s.Length {
		t.Errorf("%+v", s)
	}
}

// Results of other settings are never mixed, and --docs replaces what is in the document.
func TestOutageResults(t *testing.T) {
	root := t.TempDir()
	o := &outageOptions{source: root, docs: true}
	s := o.settings()
	found, err := o.results(s)
	if err != nil || found.Settings != s {
		t.Fatalf("%+v, %v", found, err)
	}
	run := results.Run{Scenario: "one-blackholed", Proxy: "verdict", Repeat: 1}
	found.Cells = []*results.Outage{{Run: run, Opened: 1234}}
	if err := found.WriteFile(o.file("outages.json")); err != nil {
		t.Fatal(err)
	}
	if again, err := o.results(s); err != nil || len(again.Cells) != 1 {
		t.Errorf("%+v, %v", again, err)
	}
	if _, err := o.results(quickOutage); err == nil || !strings.Contains(err.Error(), "other settings") {
		t.Errorf("other settings: %v", err)
	}
	document := filepath.Join(root, "docs", "evidence", "BENCHMARKS.md")
	if err := os.MkdirAll(filepath.Dir(document), 0o755); err != nil {
		t.Fatal(err)
	}
	text := []byte("<!-- bench: outages -->\nthe former\n<!-- bench: end -->\n")
	if err := os.WriteFile(document, text, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := o.show(&bytes.Buffer{}, found); err != nil {
		t.Fatal(err)
	}
	text, err = os.ReadFile(document)
	if err != nil || !strings.Contains(string(text), "| one-blackholed | verdict | 1,234 |") ||
		strings.Contains(string(text), "the former") {
		t.Errorf("%v: %s", err, text)
	}
}
