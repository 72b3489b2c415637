package sysctl_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// TestNotes: another process finds in the kernel what parameters were before, however often they were set since.
func TestNotes(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	root := t.TempDir()
	file := func(name, value string) string {
		path := filepath.Join(root, "proc/sys/net", name)
		labtest.Check(t, os.MkdirAll(filepath.Dir(path), 0o755))
		labtest.Check(t, os.WriteFile(path, []byte(value), 0o644))
		return path
	}
	first, second := file("first", "0\n"), file("second", "7\n")
	settings := []sysctl.Setting{{Path: "proc/sys/net/first", Value: 1},
		{Path: "proc/sys/net/second", Value: 1, AtLeast: true}}
	held := func(name, want string) {
		t.Helper()
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v; want %q", name, got, err, want)
		}
	}
	labtest.Check(t, h.Do(func() error {
		for range 2 {
			if _, errs := (sysctl.Notes{Table: "notes", Host: sysctl.Host{Root: root}}).Set(settings); len(errs) > 0 {
				t.Error(errs)
			}
			held(first, "1")
		}
		for _, want := range []int{1, 0} {
			changed, err := sysctl.Notes{Table: "notes", Host: sysctl.Host{Root: root}}.Restore()
			if err != nil || len(changed) != want {
				t.Errorf("restored %+v, %v", changed, err)
			}
		}
		return nil
	}))
	held(first, "0")
	held(second, "7\n")
	if out := labtest.Run(t, h, "", "nft", "list", "tables"); out != "" {
		t.Errorf("there is still %s", out)
	}
}
