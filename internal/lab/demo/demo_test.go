package demo

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// stageWriter keeps what is shown, and does something once a text has come. It has no WriteString, which io.WriteString
// would call in place of Write.
type stageWriter struct {
	shown bytes.Buffer
	at    string
	do    func()
}

func (w *stageWriter) String() string { return w.shown.String() }

func (w *stageWriter) Write(p []byte) (int, error) {
	n, err := w.shown.Write(p)
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
	d = newDemo(Options{Out: w, Warnings: t.Output(), Ruleset: true})
	if do != nil {
		w.do = func() { do(d, cancel) }
	}
	t.Cleanup(func() { nothingLeft(t) })
	defer func() { shown = w.String() }()
	err = d.run(ctx)
	return shown, d, err
}

// nothingLeft looks for directories, and for threads and descriptors of this process in other network namespaces.
// Threads end on their own time.
func nothingLeft(t *testing.T) {
	t.Helper()
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "verdict-demo-*")); left != nil {
		t.Errorf("the demo left %v", left)
	}
	labtest.NoNamespacesLeft(t)
}

func TestMain(m *testing.M) { labtest.Main(m) }

func TestDemo(t *testing.T) {
	shown, d, err := perform(t, "", nil)
	if err != nil || len(d.failed) > 0 || d.met < 10 {
		t.Fatalf("the demo ended with %v; %d expectations were met, and failed %q. It showed:\n%s", err, d.met, d.failed,
			shown)
	}
	story, ruleset, _ := strings.Cut(shown, "\ntable ip verdict {")
	for _, want := range []string{"web answers whoever asks", "elements: ", "pod-2 drains", "refused, ", "silence"} {
		if !strings.Contains(story, want) {
			t.Errorf("the demo does not show %q", want)
		}
	}
	for line := range strings.SplitSeq(story, "\n") {
		if n := len([]rune(line)); n > 80 {
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
	written := regexp.MustCompile(`elements: (\d+) added, (\d+) replaced, (\d+) removed in .* \(kernel .*\)`)
	if n := len(written.FindAllString(story, -1)); n != 5 {
		t.Errorf("%d transactions were shown; want the first and one for each of 4 edits", n)
	}
}

// One expectation that is not met makes the demo fail, and does not keep it from going on.
func TestDemoFailure(t *testing.T) {
	shown, d, err := perform(t, "dns answers", func(d *demo, _ func()) { d.dns.number = d.empty.number })
	if !errors.Is(err, ErrFailed) {
		t.Errorf("the demo ended with %v; want %v", err, ErrFailed)
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
		if !errors.Is(err, ErrFailed) {
			t.Errorf("interrupted at %q, the demo ended with %v; want %v", at, err, ErrFailed)
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

func TestBar(t *testing.T) {
	s := show{Printer: terminal.NewPrinter(io.Discard)}
	if got, want := s.bar(1, 2, 4), "██ 1"; got != want {
		t.Errorf("a bar is %q, want %q", got, want)
	}
}

// A disk that is full is told of; a reader who has gone away is not.
func TestDemoCannotWrite(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	labtest.Check(t, err)
	defer full.Close()
	d := newDemo(Options{Out: full, Warnings: t.Output()})
	if err := d.run(t.Context()); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("the demo ended with %v", err)
	}
}
