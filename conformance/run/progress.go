package run

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/report"
)

// Progress tells on a terminal how far a run is.
type Progress struct {
	mu       sync.Mutex
	out      io.Writer
	terminal bool
	name     string
	total    int
	counts   map[report.Outcome]int
	began    time.Time
	shown    time.Time
	open     bool // a line without its end is on the terminal
}

// NewProgress writes to a file; on a terminal, one line follows what happens.
func NewProgress(out *os.File) *Progress { return &Progress{out: out, terminal: IsTerminal(out)} }

// IsTerminal says whether a file is a terminal that understands more than lines.
func IsTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil && os.Getenv("TERM") != "dumb"
}

func (p *Progress) begin(name string, total int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.name, p.total, p.counts, p.began = name, total, make(map[report.Outcome]int), time.Now()
}

// say prints a line.
func (p *Progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.line(fmt.Sprintf(format, args...))
}

func (p *Progress) line(text string) {
	p.clear()
	fmt.Fprintf(p.out, "%s  %5.1fs  %s\n", p.name, time.Since(p.began).Seconds(), text)
}

func (p *Progress) clear() {
	if p.open {
		fmt.Fprint(p.out, "\r\x1b[K")
		p.open = false
	}
}

// done counts a result. Without a terminal, every tenth of the way is a line.
func (p *Progress) done(name string, r *report.Result, verbose bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.counts[r.Outcome]++
	n := 0
	for _, c := range p.counts {
		n += c
	}
	bad := r.Outcome == report.Fail || r.Outcome == report.Broken
	if bad && (verbose || p.counts[report.Fail]+p.counts[report.Broken] <= 20) {
		p.line(failure(name, r))
	}
	last := n == p.total
	switch {
	case p.terminal && (last || time.Since(p.shown) > 100*time.Millisecond):
		p.clear()
		fmt.Fprintf(p.out, "%s  %5.1fs  %s", p.name, time.Since(p.began).Seconds(), p.words(n))
		p.open, p.shown = true, time.Now()
		if last {
			fmt.Fprintln(p.out)
			p.open = false
		}
	case !p.terminal && (last || n*10/p.total > (n-1)*10/p.total):
		p.line(p.words(n))
	}
}

func (p *Progress) words(n int) string {
	text := fmt.Sprintf("%d of %d cases", n, p.total)
	for _, o := range []report.Outcome{report.Fail, report.Broken, report.Differs, report.Skipped} {
		if c := p.counts[o]; c > 0 {
			text += fmt.Sprintf(", %d %s", c, map[report.Outcome]string{
				report.Fail: "failed", report.Broken: "broken", report.Differs: "differ for a reason",
				report.Skipped: "skipped"}[o])
		}
	}
	return text
}

// failure tells of a case that failed, with the looks that are to blame.
func failure(name string, r *report.Result) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", strings.ToUpper(string(r.Outcome)), name)
	if r.Outcome == report.Broken {
		fmt.Fprintf(&b, "\n    %s", r.Why)
	}
	for _, l := range r.Looks {
		if !l.OK {
			step := ""
			if l.Step != "" {
				step = l.Step + ": "
			}
			fmt.Fprintf(&b, "\n    %s%s to %s: want %s; got %s", step, l.From, l.To, l.Want, l.Got)
		}
	}
	return b.String()
}

// hostWords says on what this runs.
func hostWords() string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	words := fmt.Sprintf("Linux %s, %d cores", unix.ByteSliceToString(u.Release[:]), runtime.NumCPU())
	if out, err := exec.Command("nft", "--version").Output(); err == nil {
		if fields := strings.Fields(string(out)); len(fields) > 1 {
			words += ", nft " + strings.TrimPrefix(fields[1], "v")
		}
	}
	return words
}
