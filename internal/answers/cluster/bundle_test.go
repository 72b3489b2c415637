package cluster

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/answers/bundle"
)

// filesOf reads an archive.
func filesOf(t *testing.T, packed []byte) map[string]string {
	t.Helper()
	zip, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		text, rerr := io.ReadAll(r)
		if err = errors.Join(err, rerr); err != nil {
			t.Fatal(err)
		}
		files[h.Name] = string(text)
	}
}

// TestBundle: an archive has what each node sends and its log, by few nodes at a time, and names those without an
// answer.
func TestBundle(t *testing.T) {
	f := &fake{forbidden: []string{"get pods/log"}}
	f.answer = func(_ context.Context, node string, argv []string) (string, int, error) {
		if node == "c" {
			return "", 0, errors.New("no answer within 1m0s")
		}
		if argv[1] == "status" {
			return "", 1, nil
		}
		var b bytes.Buffer
		a := bundle.New(&b, false)
		if err := errors.Join(a.Add("config.json", []byte("10.0.0."+node)), a.Close()); err != nil {
			return "", 0, err
		}
		return b.String(), 0, nil
	}
	f.add("a", "b", "c", "d")
	c := f.cluster()
	c.Parallel = 2
	pack := func(o Bundled) (map[string]string, []NodeAnswer) {
		var b bytes.Buffer
		a := bundle.New(&b, false)
		failed, err := c.Bundle(t.Context(), a, o)
		if err = errors.Join(err, a.Close()); err != nil {
			t.Fatal(err)
		}
		return filesOf(t, b.Bytes()), failed
	}
	files, failed := pack(Bundled{Lines: 7})
	want := []string{"a/config.json", "b/config.json", "d/config.json", "missing.txt", "status.json"}
	if got := slices.Sorted(maps.Keys(files)); !slices.Equal(got, want) || files["b/config.json"] != "10.0.0.b" {
		t.Errorf("it has %q", files)
	}
	for _, want := range []string{"c: no answer within 1m0s\n",
		"a/log.txt: you lack the right to get pods/log in namespace kube-system"} {
		if !strings.Contains(files["missing.txt"], want) {
			t.Errorf("missing.txt says\n%s; want %q", files["missing.txt"], want)
		}
	}
	if len(failed) != 1 || failed[0].Node != "c" || f.peak > 2 {
		t.Errorf("failed: %+v; %d at a time", failed, f.peak)
	}
	f.forbidden = nil
	files, failed = pack(Bundled{Nodes: []string{"c", "x"}, Lines: 7})
	if got := slices.Sorted(maps.Keys(files)); !slices.Equal(got, []string{"c/log.txt", "missing.txt", "status.json"}) ||
		files["c/log.txt"] != "the last 7 lines of verdict-c\n" || len(failed) != 2 || failed[1].Node != "x" {
		t.Errorf("it has %q; failed: %+v", files, failed)
	}
}
