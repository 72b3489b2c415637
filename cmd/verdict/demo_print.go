package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/units"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// show is what the audience sees, and the account of what was expected.
type show struct {
	w      io.Writer
	colour bool
	// broken is the first error of writing.
	broken error
	steps  int
	met    int
	failed []string
}

func newShow(w io.Writer) show { return show{w: w, colour: colourful(w)} }

// colourful says whether colours are welcome: on a terminal, unless no-color.org is asked for.
func colourful(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && isTerminal(f)
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// The ways to paint a text, as SGR parameters.
const (
	bold  = "1"
	dim   = "2"
	red   = "31"
	green = "32"
	cyan  = "36"
)

func (s *show) paint(sgr, text string) string {
	if !s.colour || text == "" {
		return text
	}
	return "\x1b[" + sgr + "m" + text + "\x1b[0m"
}

// line prints one line, or several.
func (s *show) line(format string, args ...any) {
	if s.broken == nil {
		_, s.broken = fmt.Fprintf(s.w, format+"\n", args...)
	}
}

// heading begins a step with what it is about.
func (s *show) heading(title string, about ...string) {
	s.steps++
	s.line("\n%s", s.paint(bold, fmt.Sprintf("%d  %s", s.steps, title)))
	for _, a := range about {
		s.line("   %s", s.paint(dim, a))
	}
	s.line("")
}

// header prints the names of columns.
func (s *show) header(c columns, names ...string) { s.line("     %s", s.paint(dim, c.row(names...))) }

// expect prints what was expected, whether it came so, and what came instead.
func (s *show) expect(ok bool, what string, instead ...string) {
	mark := s.paint(green, "✓")
	if ok {
		s.met++
	} else {
		mark = s.paint(red, "✗")
		s.failed = append(s.failed, strings.Join(strings.Fields(plain(what)), " "))
	}
	s.line("   %s %s", mark, what)
	for _, text := range instead {
		if !ok {
			s.line("       %s", s.paint(red, text))
		}
	}
}

// transaction prints what the proxy has written.
func (s *show) transaction(t reconcile.Transaction) {
	noun := "elements"
	if t.Added == 1 {
		noun = "element"
	}
	s.line("     %s", s.paint(cyan, fmt.Sprintf("written: %d %s added, %d replaced, %d removed in %s (kernel %s)",
		t.Added, noun, t.Replaced, t.Removed, units.Brief(t.Total), units.Brief(t.Commit))))
}

// summary says how it went, and gives the exit status as an error.
func (s *show) summary(took time.Duration) error {
	all := s.met + len(s.failed)
	if len(s.failed) == 0 {
		s.line("\n%s All %d expectations were met, in %s. Nothing is left behind.", s.paint(green, "✓"), all, units.Brief(took))
		s.line(`  Next: "verdict render" for the ruleset of your own cluster, "verdict run" to carry its Services.`)
		return s.status()
	}
	s.line("\n%s %d of %d expectations failed, in %s. Nothing is left behind.", s.paint(red, "✗"), len(s.failed), all, units.Brief(took))
	for _, f := range s.failed {
		s.line("    %s", f)
	}
	return s.status()
}

func (s *show) status() error {
	if s.broken != nil || len(s.failed) > 0 {
		return exitStatus(exitError)
	}
	return nil
}

// columns are the least widths of a table's columns; the last needs none.
type columns []int

func (c columns) row(cells ...string) string {
	var b strings.Builder
	for i, cell := range cells {
		b.WriteString(cell)
		if i < len(cells)-1 {
			b.WriteString(strings.Repeat(" ", max(c[i]-utf8.RuneCountInString(plain(cell)), 1)))
		}
	}
	return strings.TrimRight(b.String(), " ")
}

var sgrSequence = regexp.MustCompile("\x1b\\[[0-9;]*m")

// plain takes the paint off.
func plain(text string) string { return sgrSequence.ReplaceAllString(text, "") }

// bar draws a part of a whole that is width wide, with the number after it.
func (s *show) bar(part, whole, width int) string {
	if whole == 0 || part == 0 {
		return "0"
	}
	n := max((part*width+whole/2)/whole, 1)
	return fmt.Sprintf("%s %d", s.paint(cyan, strings.Repeat("█", n)), part)
}
