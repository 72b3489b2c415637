package history

import (
	"bytes"
	"compress/gzip"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// What is written is what is read, and the same verdict comes out.
func TestFile(t *testing.T) {
	want := newModel(3).history()
	want.Faults = []Fault{{From: 1, To: 2, Node: "node-a", What: "proxy killed"}}
	path := filepath.Join(t.TempDir(), "h.jsonl.gz")
	if err := want.WriteFile(path); err != nil {
		t.Fatal(err)
	}
	got, err := ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Error("the history has changed")
	}
	if a, b := Check(want, Options{}), Check(got, Options{}); !reflect.DeepEqual(a, b) {
		t.Errorf("%+v, %+v", a, b)
	}
}

func compressed(text string) *bytes.Buffer {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = z.Write([]byte(text))
	_ = z.Close()
	return &b
}

const (
	head = `{"header":{"format":"verdict-history/1","proxy":"","version":"","scenario":"","seed":0,` +
		`"began":"2026-11-23T00:00:00Z","load":0}}` + "\n"
	conn = `{"conn":{"begin":1,"end":2,"service":"s","client":"c","node":"n","outcome":"refused"}}` + "\n"
)

// A file that was cut, or that says what nobody wrote, is an error that names the line.
func TestBrokenFiles(t *testing.T) {
	for text, want := range map[string]string{
		"":                                     "line 0: the history was cut",
		head + conn:                            "line 2: the history was cut",
		head + conn + `{"complete":1}`:         "line 3: it says that 1 lines are before it",
		head + `{"complete":1}` + "\n" + conn:  "line 3: it follows the last one",
		conn:                                   "line 1: a header is the first line",
		head + head:                            "line 2: a header is the first line",
		head + "{}":                            "line 2: it says nothing",
		head + `{"cnon":{}}`:                   `line 2: json: unknown field "cnon"`,
		strings.Replace(head, "y/1", "y/9", 1): `line 1: format "verdict-history/9"`,
		head + strings.Replace(conn, "refused", "fine", 1):                      `line 2: unknown outcome "fine"`,
		head + strings.Replace(conn, "refused", "answered", 1):                  "line 2: a name or an address is missing",
		head + `{"write":{"service":"s","endpoints":[{"state":""}]}}`:           `line 2: unknown state ""`,
		head + `{"serve":{"address":"` + strings.Repeat("1", maxName+1) + `"}}`: "longer than 300 bytes",
		head + strings.Repeat(" ", maxLine+9):                                   "line 2: bufio.Scanner: token too long",
	} {
		if _, err := Read(compressed(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.200s\ngives %v, want %s", text, err, want)
		}
	}
	if _, err := Read(strings.NewReader("text")); err == nil {
		t.Error("a file without compression was read")
	}
	if _, err := Read(compressed(head + conn + `{"complete":2}` + "\n")); err != nil {
		t.Errorf("a good file: %v", err)
	}
}

// A history that nobody would read again is not written.
func TestTooLong(t *testing.T) {
	h := &History{Header: Header{Format: Format}, Writes: []Write{{Service: strings.Repeat("s", maxLine)}}}
	if err := h.WriteFile(filepath.Join(t.TempDir(), "h")); err == nil || !strings.Contains(err.Error(), "too long") {
		t.Errorf("%v", err)
	}
}

// Histories recorded of real proxies: Verdict, Verdict that hears of EndpointSlices 3 s late, and Verdict that loses
// some changes (conformance/testdata).
func TestRecorded(t *testing.T) {
	for name, wrong := range map[string][]Kind{"correct": nil, "late": {Late}, "lossy": {Late, Lost}} {
		h, err := ReadFile(filepath.Join("testdata", name+".jsonl.gz"))
		if err != nil {
			t.Fatal(err)
		}
		r := Check(h, Options{Bound: 2 * time.Second})
		if len(h.Conns) < 1000 || len(h.Writes) < 40 || len(r.Counts) != len(wrong) || !r.Rested {
			t.Errorf("%s: %d connections, %d writes\n%s", name, len(h.Conns), len(h.Writes), r)
		}
		for _, kind := range wrong {
			if r.Counts[kind] == 0 || !strings.Contains(r.String(), "\n"+string(kind)+": ") {
				t.Errorf("%s: no %s\n%s", name, kind, r)
			}
		}
	}
}

// FuzzRead: no file makes the reader or the checker fail, and what is read is written the same.
func FuzzRead(f *testing.F) {
	f.Add(head + conn + `{"complete":2}`)
	f.Add(head + `{"write":{"sent":1,"acked":2,"service":"s","slice":"x","endpoints":[{"address":"a","state":"ready"}]}}` +
		"\n" + `{"serve":{"at":0,"address":"a","endpoint":"A","service":"s"}}` + "\n" +
		`{"conn":{"begin":3,"end":4,"service":"s","client":"c","node":"n","outcome":"answered","endpoint":"A","at":"a"}}` +
		"\n" + `{"rest":3}` + "\n" + `{"complete":5}`)
	f.Fuzz(func(t *testing.T, text string) {
		h, err := Read(compressed(text))
		if err != nil {
			return
		}
		Check(h, Options{Bound: 1})
		var b bytes.Buffer
		if _, err := h.WriteTo(&b); err != nil {
			t.Fatal(err)
		}
		if again, err := Read(&b); err != nil || !reflect.DeepEqual(again, h) {
			t.Errorf("%v: %+v, %+v", err, again, h)
		}
	})
}
