package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// FuzzReader: whatever the files of a ledger hold, also with sums that are right, it ends no process, neither one that
// reads nor one that goes on writing. What a Writer adds can be read, behind what was there.
func FuzzReader(f *testing.F) {
	first, second := twoSegments(f)
	f.Add(first, second, false)
	f.Add(first, second[:len(second)-20], true)
	f.Add(second, first, true)
	f.Add([]byte(`{"n":1,"kind":"checkpoint","bytes":-1,"batch":"AAAA","prev":"","sum":""}`+"\n"), []byte("{}\n"), true)
	f.Add([]byte(`{"n":18446744073709551615,"kind":"change","bytes":9e18,"batch":"AAAA"}`+"\n"), []byte{}, true)
	f.Fuzz(func(t *testing.T, first, second []byte, valid bool) {
		dir := t.TempDir()
		for i, text := range [][]byte{first, second} {
			if valid {
				text = chained(text)
			}
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf(segmentFormat, i*4+1)), text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		before := readAnything(t, dir)
		if err := os.Chmod(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		w := New(Options{Dir: dir, MaxBytes: 1 << 20, Log: slog.New(slog.DiscardHandler), Source: Source{New: newFake}})
		w.start("1")
		w.take(&entry{Record: Record{At: time.Now(), Kind: Change}, batches: [][]byte{[]byte("a=1\n1>2")}})
		w.finish()
		if after := readAnything(t, dir); w.Stats().Missing > 0 || after != before+3 {
			t.Errorf("%d records were there, and %d are after 3 more, of which %d are missing", before, after,
				w.Stats().Missing)
		}
	})
}

// twoSegments returns two segments that a Writer has written.
func twoSegments(f *testing.F) (first, second []byte) {
	n := &node{dir: filepath.Join(f.TempDir(), "ledger"), kernel: fakeState{values: map[string]string{}}}
	w := New(Options{Dir: n.dir, MaxBytes: 16 << 10, Log: slog.New(slog.DiscardHandler), Source: Source{New: newFake}})
	n.Writer = w
	w.start("")
	for i := range 12 {
		n.commit(fmt.Sprint("s", i%3), fmt.Sprint(i), false)
		e := <-w.queue
		w.take(&e)
	}
	w.finish()
	list, err := segments(n.dir)
	if err != nil || len(list) < 2 {
		f.Fatal(list, err)
	}
	for i, to := range []*[]byte{&first, &second} {
		if *to, err = os.ReadFile(list[i]); err != nil {
			f.Fatal(err)
		}
	}
	return first, second
}

// chained gives each line that is a record the sum that it must have.
func chained(text []byte) []byte {
	var out []byte
	prev := ""
	for line := range bytes.Lines(text) {
		r, err := parseLine(bytes.TrimSuffix(line, []byte("\n")))
		if r == nil || err != nil && !errors.Is(err, errChanged) {
			out = append(out, line...)
			continue
		}
		r.Prev = prev
		if line, err = r.line(); err == nil {
			out, prev = append(out, line...), r.Sum
		}
	}
	return out
}

// readAnything reads a ledger as all commands do, and returns how many records it has.
func readAnything(t *testing.T, dir string) (n int) {
	r, err := Open(dir, time.Unix(1, 0))
	if err != nil {
		return 0
	}
	defer r.Close()
	p := terminal.NewPrinter(io.Discard)
	names := func([]byte) []string { return []string{"shop/s1"} }
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		n++
		record.Print(p)
		_ = record.Concerns("shop/s1", names)
		_, _ = record.Unpack()
	}
	for _, at := range []time.Time{{}, time.Unix(1, 0), time.Now()} {
		_, _ = At(dir, at, newFake)
	}
	_, _, _ = Around(dir, 3, "shop/s1", names)
	return n
}
