package watch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"
	"weak"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// silentFileSystem mounts a file system that answers nothing until the test calls end; then it answers with an error.
func silentFileSystem(t *testing.T) (dir string, end func()) {
	t.Helper()
	dir = t.TempDir()
	if os.Geteuid() != 0 {
		t.Skip("only root mounts a file system")
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		t.Skip("the kernel has no FUSE: ", err)
	}
	must(t, err)
	must(t, unix.Mount("silent", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)))
	open := true
	end = func() {
		if open {
			open = false
			must(t, unix.Close(fd))
		}
	}
	t.Cleanup(func() {
		end()
		must(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
	return dir, end
}

// hasty are Files that wait shortly.
func hasty(t *testing.T, path string) (*Files, *view) {
	f := &Files{Path: path, NodeName: "n1", patience: 400 * time.Millisecond}
	v := start(t, func(report func(error)) source {
		f.Report = report
		return f
	})
	v.await("first list", func() bool { return v.synced == 1 })
	return f, v
}

// wantUnread waits until exactly these files are unread, each "name: why".
func wantUnread(t *testing.T, f *Files, want ...string) {
	t.Helper()
	got := ""
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		var all []string
		for _, u := range f.Unread() {
			all = append(all, filepath.Base(u.File)+": "+u.Err.Error())
		}
		if got = strings.Join(all, ", "); got == strings.Join(want, ", ") {
			return
		}
	}
	t.Fatalf("unread is %q; want %q", got, want)
}

// TestFilesHang: a file whose file system does not answer holds up neither the others nor the end, keeps its last good
// objects, and is said to be unread; it counts again when it can be read.
func TestFilesHang(t *testing.T) {
	silent, end := silentFileSystem(t)
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	write(t, in("a.yaml"), service("web", "10.96.0.1"))
	write(t, in("b.yaml"), service("api", "10.96.0.2"))
	f, v := hasty(t, dir)
	relink := func(target string) {
		must(t, os.Symlink(target, in("next")))
		must(t, os.Rename(in("next"), in("a.yaml")))
	}
	relink(filepath.Join(silent, "web.yaml"))
	v.wantProblems(in("a.yaml") + ": cannot read it: no answer within 400ms")
	wantUnread(t, f, "a.yaml: no answer within 400ms")
	for i := range 3 { // of which none waits for the other one
		write(t, in("b.yaml"), service("api", fmt.Sprintf("10.96.1.%d", i)))
		v.awaitServices(fmt.Sprintf("default/api 10.96.1.%d", i), "default/web 10.96.0.1")
	}
	write(t, in("good"), service("web", "10.96.0.3"))
	relink("good") // although the question is still open
	v.awaitServices("default/api 10.96.1.2", "default/web 10.96.0.3")
	wantUnread(t, f)

	relink(filepath.Join(silent, "web.yaml"))
	wantUnread(t, f, "a.yaml: no answer within 400ms")
	end() // what comes late is heard, too
	wantUnread(t, f, "a.yaml: transport endpoint is not connected")
	v.awaitServices("default/api 10.96.1.2", "default/web 10.96.0.3")
}

// TestPathHangs: so it is with the path itself, and a source whose files all hang at its start ends with an error, at
// once if it is told to.
func TestPathHangs(t *testing.T) {
	silent, end := silentFileSystem(t)
	dir := t.TempDir()
	link := filepath.Join(dir, "manifests")
	for _, path := range []string{silent, filepath.Join(silent, "web.yaml")} {
		d := newManifestDir(path, "", nil)
		d.patience = 200 * time.Millisecond
		if err := d.refresh(t.Context()); !errors.As(err, new(slow)) || !strings.Contains(err.Error(), path) {
			t.Errorf("%v", err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(20*time.Millisecond, func() { cancel(errors.New("the end")) })
		began := time.Now()
		if _, _, err := Load(ctx, path, ""); err == nil || !strings.HasSuffix(err.Error(), "the end") {
			t.Errorf("%v", err)
		}
		if took := time.Since(began); took > patience/2 {
			t.Errorf("it ends only after %v", took)
		}
		if err := (&Files{Path: path}).Run(ctx, &view{}); err != nil {
			t.Errorf("a source that was ended says %v", err)
		}
	}
	must(t, os.Mkdir(filepath.Join(dir, "some"), 0o755))
	write(t, filepath.Join(dir, "some/a.yaml"), service("web", "10.96.0.1"))
	must(t, os.Symlink("some", link))
	f, v := hasty(t, link)
	must(t, os.Symlink(silent, filepath.Join(dir, "next")))
	must(t, os.Rename(filepath.Join(dir, "next"), link))
	v.wantProblems("manifests: " + link + ": no answer within 400ms; the last good version stays in force")
	wantUnread(t, f, "manifests: no answer within 400ms")
	end()
	wantUnread(t, f, "manifests: transport endpoint is not connected")
	must(t, os.Symlink("some", filepath.Join(dir, "next")))
	must(t, os.Rename(filepath.Join(dir, "next"), link))
	wantUnread(t, f)
	v.awaitServices("default/web 10.96.0.1")
}

// TestKernelLog: a regular file that waits for more bytes.
func TestKernelLog(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root reads /proc/kmsg")
	}
	log, err := os.Open("/proc/kmsg")
	must(t, err)
	must(t, log.Close())
	dir := t.TempDir()
	write(t, filepath.Join(dir, "b.yaml"), service("web", "10.96.0.1"))
	must(t, os.Symlink("/proc/kmsg", filepath.Join(dir, "a.yaml")))
	f, v := hasty(t, dir)
	v.awaitServices("default/web 10.96.0.1")
	wantUnread(t, f, "a.yaml: no answer within 400ms")
	write(t, filepath.Join(dir, "b.yaml"), service("web", "10.96.0.2"))
	v.awaitServices("default/web 10.96.0.2")
}

// TestLargeFile: a file that is too large is named, costs no memory, and does not take the others away.
func TestLargeFile(t *testing.T) {
	dir := t.TempDir()
	large := filepath.Join(dir, "a.yaml")
	write(t, large, service("web", "10.96.0.1"))
	write(t, filepath.Join(dir, "b.yaml"), service("api", "10.96.0.2"))
	f, v := hasty(t, dir)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	must(t, os.Truncate(large, 2<<30))
	const why = "it has more than 128 MiB: split it into several files"
	must(t, os.Chmod(large, 0o600)) // a change of the size alone makes no event
	v.wantProblems(large + ": cannot read it: " + why)
	wantUnread(t, f, "a.yaml: "+why)
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; used > 64<<20 {
		t.Errorf("it costs %d bytes", used)
	}
	write(t, filepath.Join(dir, "b.yaml"), service("api", "10.96.0.3"))
	v.awaitServices("default/api 10.96.0.3", "default/web 10.96.0.1")
	if _, problems, err := Load(t.Context(), dir, ""); err != nil || len(problems) != 1 ||
		problems[0].Error() != large+": cannot read it: "+why {
		t.Errorf("%v, %v", problems, err)
	}
	change := ChangeFiles{Apply: []string{large}}
	if _, err := LoadChange(t.Context(), change, snapshot.New()); err == nil ||
		err.Error() != large+": cannot read it: "+why {
		t.Errorf("a change: %v", err)
	}
	write(t, large, service("web", "10.96.0.4"))
	v.awaitServices("default/api 10.96.0.3", "default/web 10.96.0.4")
	wantUnread(t, f)
}

// TestPipes: a pipe may take its time, but not say nothing for ever.
func TestPipes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	must(t, unix.Mkfifo(path, 0o600))
	if _, _, err := Load(t.Context(), path, ""); err == nil ||
		err.Error() != "manifests: "+path+": cannot read it: nothing comes out of this pipe" {
		t.Errorf("without a writer: %v", err)
	}
	writer, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer writer.Close()
	if _, err := readText(path, time.Millisecond, false); err == nil || err.Error() != "not a regular file" {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(20*time.Millisecond, func() { cancel(errors.New("the end")) })
	if _, _, err := Load(ctx, path, ""); err == nil || !strings.HasSuffix(err.Error(), "the end") {
		t.Errorf("%v", err)
	}
	if _, err := io.Copy(io.Discard, impatient{writer, 20 * time.Millisecond}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a pipe that says nothing: %v", err)
	}
}

// TestFolders: that directories are not read is said once.
func TestFolders(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"..data", "a", "b", "c", "d.yaml", "e"} {
		must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	notices := make(chan string, 8)
	v := start(t, func(report func(error)) source {
		return &Files{Path: dir, Report: report, Notice: func(text string) { notices <- text }}
	})
	if got, want := <-notices, dir+": directories in it are not read: a, b, c, d.yaml and 1 more"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
	write(t, filepath.Join(dir, "x.yaml"), service("web", "10.96.0.1"))
	v.awaitServices("default/web 10.96.0.1")
	if got := <-notices; !strings.HasPrefix(got, "applying") {
		t.Errorf("%q", got)
	}
}

// What is known of a file does not keep its text in memory.
func TestTextIsNotKept(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cluster.yaml")
	if err := os.WriteFile(file, []byte(strings.Repeat("# a long text\n", 1000)), 0o644); err != nil {
		t.Fatal(err)
	}
	d := newManifestDir(file, "node-1", func(err error) { t.Error(err) })
	if _, err := d.list(t.Context()); err != nil {
		t.Fatal(err)
	}
	text, err := d.text(t.Context(), "cluster.yaml", true)
	if err != nil || text == "" {
		t.Fatal(text, err)
	}
	kept := weak.Make(unsafe.StringData(text))
	text = ""
	runtime.GC()
	if kept.Value() != nil {
		t.Error("the text is still in memory")
	}
	runtime.KeepAlive(d)
}
