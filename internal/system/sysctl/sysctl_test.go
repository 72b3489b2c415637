package sysctl

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// host is a root with these files.
func host(t *testing.T, files map[string]string) Host {
	t.Helper()
	root := t.TempDir()
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return Host{root}
}

func (h Host) text(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(h.Root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestApply: what differs is written, a limit is not lowered, and one that is missing keeps nothing else from being
// set.
func TestApply(t *testing.T) {
	h := host(t,
		map[string]string{"proc/sys/a/low": "1\n", "proc/sys/a/high": "9\n", "proc/sys/a/same": "5\n",
			"proc/sys/a/lower": "9\n",
			"proc/sys/a/word":  "many\n", "sys/module/m/parameters/p": "1\n"})
	changed, errs := h.Apply([]Setting{
		{"proc/sys/a/low", 5, true}, {"proc/sys/a/high", 5, true}, {"proc/sys/a/same", 5, false},
		{"proc/sys/a/missing", 5, false},
		{"proc/sys/a/word", 5, false}, {"proc/sys/a/lower", 5, false}, {"sys/module/m/parameters/p", 2, false},
	})
	var said []string
	for _, w := range changed {
		said = append(said, w.Name)
	}
	if got := strings.Join(said, " "); got != "a.low a.lower /sys/module/m/parameters/p" ||
		changed[0] != (Written{"a.low", 1, 5}) {
		t.Errorf("changed %+v", changed)
	}
	for path, want := range map[string]string{"proc/sys/a/low": "5", "proc/sys/a/high": "9\n", "proc/sys/a/same": "5\n",
		"proc/sys/a/lower": "5", "sys/module/m/parameters/p": "2"} {
		if got := h.text(t, path); got != want {
			t.Errorf("%s is %q; want %q", path, got, want)
		}
	}
	if len(errs) != 2 || !errors.Is(errs[0], fs.ErrNotExist) ||
		errs[0].Error() != "a.missing cannot be read: no such file or directory" ||
		!strings.HasPrefix(errs[1].Error(), "a.word cannot be read: ") {
		t.Errorf("errors %v", errs)
	}
	if _, err := os.Stat(filepath.Join(h.Root, "proc/sys/a/missing")); err == nil {
		t.Error("it makes a parameter of its own")
	}
}

// TestReadOnly: a parameter that cannot be written is told with what it is and what was wanted.
func TestReadOnly(t *testing.T) {
	h := host(t, nil)
	// A directory in the place of the file to write: root may write any file, but no directory.
	if err := os.MkdirAll(filepath.Join(h.Root, "proc/sys/a/dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, errs := h.Apply([]Setting{{"proc/sys/a/dir", 1, false}}); len(errs) != 1 || !errors.Is(errs[0], syscall.EISDIR) {
		t.Errorf("errors %v", errs)
	}
	// A real parameter that only says what is.
	if _, errs := (Host{}).Apply([]Setting{{"proc/sys/net/netfilter/nf_conntrack_count", 1 << 30,
		false}}); len(errs) != 1 ||
		!strings.Contains(errs[0].Error(), "net.netfilter.nf_conntrack_count stays ") && !errors.Is(errs[0], fs.ErrNotExist) {
		t.Errorf("errors %v", errs)
	}
}

func TestCPUs(t *testing.T) {
	for list, want := range map[string]int{"0\n": 1, "0-3\n": 4, "0-1,4,6-7\n": 5} {
		if got := host(t, map[string]string{"sys/devices/system/cpu/online": list}).CPUs(); got != want {
			t.Errorf("%q: %d; want %d", list, got, want)
		}
	}
	for _, list := range []string{"", "x", "3-1", "0-", "-1"} {
		if n := countList(list); n != 0 {
			t.Errorf("%q counts %d", list, n)
		}
	}
	if n := host(t, nil).CPUs(); n < 1 {
		t.Errorf("%d CPUs", n)
	}
}

// TestCheck: what is not there is told, what is right or could be set is not, and nothing is changed.
func TestCheck(t *testing.T) {
	h := host(t, map[string]string{"proc/sys/a/same": "5\n", "proc/sys/a/high": "9\n", "proc/sys/a/other": "1\n"})
	errs := h.Check([]Setting{{"proc/sys/a/same", 5, false}, {"proc/sys/a/high", 5, true}, {"proc/sys/a/other", 5, false},
		{"proc/sys/a/missing", 5, false}})
	if len(errs) != 1 || errs[0].Error() != "a.missing cannot be read: no such file or directory" {
		t.Errorf("errors %v", errs)
	}
	if got := h.text(t, "proc/sys/a/other"); got != "1\n" {
		t.Errorf("it was written: %q", got)
	}
}
