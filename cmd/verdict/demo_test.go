package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/units"
)

// stageWriter keeps what is shown, and does something once a text has come.
type stageWriter struct {
	bytes.Buffer
	at string
	do func()
}

func (w *stageWriter) Write(p []byte) (int, error) {
	n, err := w.Buffer.Write(p)
	if do := w.do; do != nil && strings.Contains(w.String(), w.at) {
		w.do = nil
		do()
	}
	return n, err
}

// perform runs the demo in this process. do is called when a text is shown.
func perform(t *testing.T, at string, do func(d *demo, cancel func())) (shown string, d *demo, err error) {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w := &stageWriter{at: at}
	d = &demo{show: newShow(w), warnings: t.Output(), ruleset: true}
	if do != nil {
		w.do = func() { do(d, cancel) }
	}
	t.Cleanup(func() { nothingLeft(t) })
	defer func() { shown = w.String() }()
	err = d.run(ctx)
	return shown, d, err
}

// nothingLeft looks for directories, and for threads and descriptors of this process in other network namespaces. Threads
// end on their own time.
func nothingLeft(t *testing.T) {
	t.Helper()
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "verdict-demo-*")); left != nil {
		t.Errorf("the demo left %v", left)
	}
	labtest.NoNamespacesLeft(t)
}

func TestDemo(t *testing.T) {
	shown, d, err := perform(t, "", nil)
	if err != nil || len(d.failed) > 0 || d.met < 10 {
		t.Fatalf("the demo ended with %v; %d expectations were met, and failed %q. It showed:\n%s", err, d.met, d.failed, shown)
	}
	story, ruleset, _ := strings.Cut(shown, "\ntable ip verdict {")
	for _, want := range []string{
		"web answers whoever asks", "written: ", "pod-2 drains", "refused after", "silence",
	} {
		if !strings.Contains(story, want) {
			t.Errorf("the demo does not show %q", want)
		}
	}
	for _, line := range strings.Split(story, "\n") {
		if n := len([]rune(line)); n > 110 && !strings.Contains(line, d.dir) {
			t.Errorf("a line of %d columns: %s", n, line)
		}
	}
	for _, want := range []string{"\ntable ip6 verdict {", "goto pick-2", "counter packets 200 ", "All "} {
		if !strings.Contains(ruleset, want) {
			t.Errorf("after the story, the demo does not show %q", want)
		}
	}
	if strings.Contains(shown, "\x1b") {
		t.Error("the demo writes colours into what is no terminal")
	}
	// The first transaction fills the kernel; what follows is as large as the change, and no larger.
	written := regexp.MustCompile(`written: (\d+) elements? added, (\d+) replaced, (\d+) removed in .* \(kernel .*\)`)
	if n := len(written.FindAllString(story, -1)); n != 5 {
		t.Errorf("%d transactions were shown; want the first and one for each of 4 edits", n)
	}
}

// One expectation that is not met makes the demo fail, and does not keep it from going on.
func TestDemoFailure(t *testing.T) {
	shown, d, err := perform(t, "dns answers", func(d *demo, _ func()) { d.dns.number = d.empty.number })
	var status exitStatus
	if !errors.As(err, &status) || status != exitError {
		t.Errorf("the demo ended with %v; want exit status %d", err, exitError)
	}
	if len(d.failed) != 1 || !strings.Contains(shown, "   ✗ ") || !strings.Contains(shown, "1 of ") {
		t.Errorf("one expectation should have failed, not %q:\n%s", d.failed, shown)
	}
	if !strings.Contains(shown, "pod-2 drains") {
		t.Error("it did not go on")
	}
}

func TestDemoInterrupted(t *testing.T) {
	for _, at := range []string{"A cluster", "Who answers", "1 endpoint "} {
		shown, _, err := perform(t, at, func(_ *demo, cancel func()) { cancel() })
		var status exitStatus
		if !errors.As(err, &status) || status != exitError {
			t.Errorf("interrupted at %q, the demo ended with %v; want exit status %d", at, err, exitError)
		}
		if !strings.HasSuffix(shown, "Interrupted. Nothing is left behind.\n") || strings.Contains(shown, "✗") {
			t.Errorf("interrupted at %q, the demo showed at last %q", at, shown[max(0, len(shown)-300):])
		}
	}
}

func TestDemoPanic(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("the demo took no notice of a panic")
		}
	}()
	_, _, _ = perform(t, "1 endpoint ", func(*demo, func()) { panic("on stage") })
}

// A proxy that ends by itself ends the demo.
func TestDemoWithoutProxy(t *testing.T) {
	shown, _, err := perform(t, "pod-3 is added", func(d *demo, _ func()) { d.proxy.cancel() })
	if err == nil || !strings.Contains(err.Error(), "the proxy has ended") {
		t.Errorf("the demo ended with %v:\n%s", err, shown)
	}
}

// demoProcess runs the real command until it has shown a text, sends it a signal, and gives its exit status. The user is one
// without rights if that is possible; else this test already is that user, in a user namespace.
func demoProcess(t *testing.T, nobody bool, at string, signal os.Signal) (shown string, status int) {
	t.Helper()
	dir, err := os.MkdirTemp("", "verdict-test-")
	labtest.Check(t, err)
	defer os.RemoveAll(dir)
	labtest.Check(t, os.Chmod(dir, 0o777))
	cmd := exec.Command("/proc/self/exe", "demo", "--no-ruleset")
	cmd.Env = append(os.Environ(), beVerdict+"=1", "TMPDIR="+dir)
	cmd.Stderr = t.Output()
	if nobody {
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	out, err := cmd.StdoutPipe()
	labtest.Check(t, err)
	labtest.Check(t, cmd.Start())
	buf := make([]byte, 4096)
	for err == nil {
		var n int
		n, err = out.Read(buf)
		shown += string(buf[:n])
		if at == "" || !strings.Contains(shown, at) {
			continue
		}
		at = ""
		if signal == syscall.SIGPIPE {
			labtest.Check(t, out.Close()) // the demo finds out by itself
		} else {
			labtest.Check(t, cmd.Process.Signal(signal))
		}
	}
	if err != io.EOF && signal != syscall.SIGPIPE {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("the demo left %v (%v)", left, err)
	}
	return shown, cmd.ProcessState.ExitCode()
}

// canBeNobody says whether this process may become a user without rights.
func canBeNobody(t *testing.T) bool {
	ids, err := os.ReadFile("/proc/self/uid_map")
	labtest.Check(t, err)
	return os.Geteuid() == 0 && slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"})
}

func TestDemoProcess(t *testing.T) {
	users := []bool{false}
	if canBeNobody(t) {
		users = append(users, true)
	}
	for _, nobody := range users {
		for _, s := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE} {
			if shown, status := demoProcess(t, nobody, "Who answers", s); status != exitError {
				t.Errorf("as nobody %v, after %v, the demo ended with status %d:\n%s", nobody, s, status, shown)
			}
		}
	}
	if shown, status := demoProcess(t, users[len(users)-1], "", nil); status != exitOK {
		t.Errorf("the demo ended with status %d:\n%s", status, shown)
	}
}

func TestFair(t *testing.T) {
	pods := []*lab.Host{{Name: "a"}, {Name: "b"}}
	for _, c := range []struct {
		a, b, other, failed int
		want                bool
	}{
		{100, 100, 0, 0, true},
		{50, 150, 0, 0, true},
		{49, 151, 0, 0, false},
		{200, 0, 0, 0, false},
		{100, 99, 1, 0, false},
		{100, 100, 0, 1, false},
		{0, 0, 0, 0, false},
	} {
		var got tally
		for name, n := range map[string]int{"a": c.a, "b": c.b, "c": c.other} {
			for range n {
				got.add(lab.Result{Outcome: lab.Answered, Endpoint: name}, "")
			}
		}
		for range c.failed {
			got.add(lab.Result{Outcome: lab.Refused}, "")
		}
		if fair := got.fair(pods); fair != c.want {
			t.Errorf("%+v: %v", c, fair)
		}
	}
}

func TestShow(t *testing.T) {
	s := show{colour: true}
	bar := s.bar(1, 2, 4)
	if want := "\x1b[36m██\x1b[0m 1"; bar != want {
		t.Errorf("a bar is %q, want %q", bar, want)
	}
	if got, want := (columns{6, 2}).row(bar, "long", "x"), bar+"  long x"; got != want {
		t.Errorf("a row is %q, want %q", got, want)
	}
	for d, want := range map[time.Duration]string{
		143 * time.Microsecond: "143 µs", 2449 * time.Microsecond: "2.4 ms", 6100 * time.Millisecond: "6.1 s",
	} {
		if got := units.Brief(d); got != want {
			t.Errorf("%v is shown as %q, want %q", d, got, want)
		}
	}
	t.Setenv("NO_COLOR", "1")
	if colourful(os.Stdout) {
		t.Error("NO_COLOR is not obeyed")
	}
}

// A disk that is full is told of; a reader who has gone away is not.
func TestDemoCannotWrite(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	labtest.Check(t, err)
	defer full.Close()
	d := demo{show: newShow(full), warnings: t.Output()}
	if err := d.run(t.Context()); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("the demo ended with %v", err)
	}
}
