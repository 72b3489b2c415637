package demo

import (
	"fmt"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/internal/system/units"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// show is what the audience sees, and the account of what was expected.
type show struct {
	*terminal.Printer
	steps  int
	met    int
	failed []string
}

// heading begins a step with what it is about.
func (s *show) heading(title string, about ...string) {
	s.steps++
	s.Line("\n%s", s.Paint(terminal.Bold, fmt.Sprintf("%d  %s", s.steps, title)))
	for _, a := range about {
		s.Line("   %s", s.Paint(terminal.Dim, a))
	}
	s.Line("")
}

// header prints the names of columns.
func (s *show) header(c terminal.Columns, names ...string) {
	s.Line("     %s", s.Paint(terminal.Dim, c.Row(names...)))
}

// expect prints what was expected, whether it came so, and what came instead.
func (s *show) expect(ok bool, what string, instead ...string) {
	mark := s.Paint(terminal.Green, "✓")
	if ok {
		s.met++
	} else {
		mark = s.Paint(terminal.Red, "✗")
		s.failed = append(s.failed, strings.Join(strings.Fields(terminal.Plain(what)), " "))
	}
	s.Line("   %s %s", mark, what)
	for _, text := range instead {
		if !ok {
			s.Line("       %s", s.Paint(terminal.Red, text))
		}
	}
}

// transaction prints what the proxy has written.
func (s *show) transaction(t reconcile.Transaction) {
	s.Line("     %s", s.Paint(terminal.Cyan, fmt.Sprintf("elements: %d added, %d replaced, %d removed in %s (kernel %s)",
		t.Added, t.Replaced, t.Removed, units.Brief(t.Total), units.Brief(t.Commit))))
}

// summary says how it went.
func (s *show) summary(took time.Duration) error {
	all := s.met + len(s.failed)
	if len(s.failed) == 0 {
		s.Line("\n%s All %d expectations were met, in %s. Nothing is left behind.", s.Paint(terminal.Green, "✓"), all,
			units.Brief(took))
		s.Line(`  Next: "verdict render" prints the ruleset of your own cluster,`)
		s.Line(`  and "verdict run" programs its Services.`)
		return s.status()
	}
	s.Line("\n%s %d of %d expectations failed, in %s. Nothing is left behind.", s.Paint(terminal.Red, "✗"),
		len(s.failed), all, units.Brief(took))
	for _, f := range s.failed {
		s.Line("    %s", f)
	}
	return s.status()
}

func (s *show) status() error {
	if s.Err() != nil || len(s.failed) > 0 {
		return ErrFailed
	}
	return nil
}

// bar draws a part of a whole that is width wide, with the number after it.
func (s *show) bar(part, whole, width int) string {
	if whole == 0 || part == 0 {
		return "0"
	}
	n := max((part*width+whole/2)/whole, 1)
	return fmt.Sprintf("%s %d", s.Paint(terminal.Cyan, strings.Repeat("█", n)), part)
}
