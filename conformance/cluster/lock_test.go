package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Nobody starts or ends a cluster while somebody else does, wherever the files are, and the error says who that is.
func TestLock(t *testing.T) {
	lockFile = filepath.Join(t.TempDir(), "lock")
	first, second := New(t.TempDir(), ".", t.Logf), New(t.TempDir(), ".", t.Logf)
	unlock, err := first.lock()
	if err != nil {
		t.Fatal(err)
	}
	for what, do := range map[string]func() error{
		"up":   func() error { return second.Up(t.Context(), Neighbors{}) },
		"down": second.Down,
	} {
		want := fmt.Sprintf("process %d, with its files in %s, starts or ends a cluster", os.Getpid(), first.dir)
		if err := do(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", what, err, want)
		}
	}
	if err := unlock(); err != nil {
		t.Fatal(err)
	}
	if unlock, err = second.lock(); err != nil {
		t.Fatalf("after the first one is done: %v", err)
	}
	if err := unlock(); err != nil {
		t.Error(err)
	}
}
