package results

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestSeriesFiles(t *testing.T) {
	dir := t.TempDir()
	o, h := outages(), histories()
	testSeriesFile(t, filepath.Join(dir, "outages.json"), &o.Series)
	testSeriesFile(t, filepath.Join(dir, "history.json"), &h.Series)
	if got, err := OpenOutages(filepath.Join(dir, "outages.json"), o.Settings, Earlier{}); err != nil ||
		!reflect.DeepEqual(got, o) {
		t.Errorf("%v; read %+v", err, got)
	}
	if got, err := OpenHistories(filepath.Join(dir, "history.json"), h.Settings, Earlier{}); err != nil ||
		!reflect.DeepEqual(got, h) {
		t.Errorf("%v; read %+v", err, got)
	}
}

// testSeriesFile writes a file and opens it in each way.
func testSeriesFile[S any, C runner](t *testing.T, path string, want *Series[S, C]) {
	t.Helper()
	open := func(settings S, e Earlier) (*Series[S, C], error) {
		got := &Series[S, C]{}
		return got, openSeries(path, got, settings, e)
	}
	var other S
	if _, err := open(want.Settings, Earlier{Render: true}); err == nil {
		t.Error("--render of nothing")
	}
	if got, err := open(want.Settings, Earlier{}); err != nil || len(got.Cells) > 0 || got.Versions == nil {
		t.Errorf("a file that is missing: %+v, %v", got, err)
	}
	if err := want.WriteFile(path); err != nil {
		t.Fatal(err)
	}
	if got, err := open(want.Settings, Earlier{}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v; read %+v", err, got)
	}
	if _, err := open(other, Earlier{}); err == nil || !strings.Contains(err.Error(), "other settings") {
		t.Errorf("other settings: %v", err)
	}
	if got, err := open(other, Earlier{Render: true}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("--render, other settings: %+v, %v", got, err)
	}
	if got, err := open(other, Earlier{Fresh: true}); err != nil || len(got.Cells) > 0 {
		t.Errorf("--fresh: %+v, %v", got, err)
	}
}

func TestSeriesRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "outages.json")
	for text, wanted := range map[string]string{
		`{"cels": []}`:                      `unknown field "cels"`,
		`{"cells": [{"scenario": "x"}]}`:    "cells[0]: scenario, proxy or repeat is missing",
		`{"cells": [null]}`:                 "cells[0]",
		`{"cells": [{"scenario": "x", "p":`: "unexpected EOF",
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenOutages(path, OutageSettings{}, Earlier{}); err == nil || !strings.Contains(err.Error(), wanted) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
