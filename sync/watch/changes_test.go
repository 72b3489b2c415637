package watch

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// watched is a file that is watched, and what was read of it.
type watched struct {
	t    *testing.T
	path string
	read chan string
}

func watchFile(t *testing.T, path string) *watched {
	w := &watched{t, path, make(chan string, 100)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Changes(ctx, path, func() {
			text, err := os.ReadFile(path)
			if err != nil {
				text = []byte("gone")
			}
			w.read <- string(text)
		}, func(err error) { t.Error(err) })
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

// expect waits until a text was read.
func (w *watched) expect(text string) {
	w.t.Helper()
	deadline := time.After(time.Minute)
	for {
		select {
		case got := <-w.read:
			if got == text {
				return
			}
		case <-deadline:
			w.t.Fatalf("%q is not noticed", text)
		}
	}
}

func (w *watched) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// TestChanges: whatever way a file changes by, it is read again.
func TestChanges(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.conf")
	w := watchFile(t, path)
	w.expect("gone")
	w.check(os.WriteFile(path, []byte("one"), 0o644))
	w.expect("one")
	w.check(os.WriteFile(path, []byte("two"), 0o644))
	w.expect("two")
	w.check(os.WriteFile(path+".tmp", []byte("three"), 0o644))
	w.check(os.Rename(path+".tmp", path))
	w.expect("three")
	w.check(os.Remove(path))
	w.expect("gone")
	w.check(os.WriteFile(path+".tmp", []byte("four"), 0o644))
	w.check(os.Symlink(path+".tmp", path))
	w.expect("four")
	w.check(os.WriteFile(path+".tmp", []byte("five"), 0o644))
	w.expect("five")
}

// TestChangesOfConfigMap: the kubelet writes a new directory and has the link to it replaced; the file itself is a link
// all the time.
func TestChangesOfConfigMap(t *testing.T) {
	dir := t.TempDir()
	w := &watched{t: t}
	swap := func(name, text string) {
		t.Helper()
		w.check(os.Mkdir(filepath.Join(dir, name), 0o755))
		w.check(os.WriteFile(filepath.Join(dir, name, "config.conf"), []byte(text), 0o644))
		w.check(os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		w.check(os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	swap("..1", "one")
	w.check(os.Symlink(filepath.Join("..data", "config.conf"), filepath.Join(dir, "config.conf")))
	w = watchFile(t, filepath.Join(dir, "config.conf"))
	w.expect("one")
	for i, text := range []string{"two", "three", "four"} {
		swap("..2"+text, text)
		w.expect(text)
		if i == 1 {
			w.check(os.RemoveAll(filepath.Join(dir, "..1")))
		}
	}
}

// TestChangesAreNotReadHalfway: who writes slowly is waited for.
func TestChangesAreNotReadHalfway(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.conf")
	w := watchFile(t, path)
	w.expect("gone")
	f, err := os.Create(path)
	w.check(err)
	for range 5 {
		_, err = f.WriteString("slow")
		w.check(err)
		time.Sleep(3 * debounce / 2)
	}
	select {
	case got := <-w.read:
		t.Errorf("%q is read while it is written", got)
	default:
	}
	w.check(f.Close())
	w.expect("slowslowslowslowslow")
}

// TestChangesByLooking: where inotify does not help, a change shows in what the file looks like.
func TestChangesByLooking(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.conf")
	seen := map[fileState]bool{statFile(path): true}
	for _, text := range []string{"a", "ab", "ba"} {
		if err := os.WriteFile(path+".tmp", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.Chtimes(path+".tmp", time.Time{}, time.Unix(1, int64(len(seen)))),
			os.Rename(path+".tmp", path)); err != nil {
			t.Fatal(err)
		}
		if now := statFile(path); seen[now] {
			t.Errorf("%q looks as before: %+v", text, now)
		} else {
			seen[now] = true
		}
	}
}
