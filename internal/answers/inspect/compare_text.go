package inspect

import (
	"fmt"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// MaxDiffLines is how many lines PrintDiff shows of all.
const MaxDiffLines = 100

// describe tells what was compared: "ip verdict revision 12, 143 elements; ip6 verdict revision 12, 96 elements".
func (c *Comparison) describe() string {
	var parts []string
	for _, t := range c.Tables {
		switch {
		case !t.There:
		case t.Revision != 0:
			parts = append(parts, fmt.Sprintf("%s revision %d, %s", t.Name, t.Revision, terminal.Plural(t.Elements, t.Unit)))
		default:
			parts = append(parts, t.Name+" "+terminal.Plural(t.Elements, t.Unit))
		}
	}
	text := strings.Join(parts, "; ")
	if parts == nil {
		text = "there are no tables of Verdict"
	}
	if c.Programs != "" {
		return c.Programs + ": " + text
	}
	return text
}

// bounded prints lines up to a limit, then how many more there are.
func bounded(s *terminal.Printer, lines []string, most int, all bool) {
	for i, l := range lines {
		if i == most && !all {
			s.Line("%s", s.Paint(terminal.Dim, fmt.Sprintf("  and %d more (--all)", len(lines)-i)))
			return
		}
		s.Line("%s", l)
	}
}

// wrongLines are what is wrong in words.
func (c *Comparison) wrongLines(s *terminal.Printer) (lines []string) {
	for _, w := range c.Wrong {
		lines = append(lines, s.Paint(terminal.Red, "! "+w))
	}
	return lines
}

// summary tells how many elements of each Service differ.
func (c *Comparison) summary(s *terminal.Printer) (lines []string) {
	width := 0
	for _, n := range c.Counts {
		width = max(width, len(n.Service))
	}
	for _, n := range c.Counts {
		name := n.Service
		if name == "" {
			name = "(shared)"
		}
		var parts []string
		for _, p := range []struct {
			n    int
			text string
		}{{n.Missing, "missing"}, {n.Extra, "too many"}, {n.Changed, "other"}} {
			if p.n > 0 {
				parts = append(parts, fmt.Sprintf("%d %s", p.n, p.text))
			}
		}
		lines = append(lines, "  "+terminal.Columns{max(width, 14) + 2, 1}.Row(name, strings.Join(parts, ", ")))
	}
	return lines
}

// PrintDiff shows the lines that differ.
func (c *Comparison) PrintDiff(s *terminal.Printer, all bool) {
	for _, n := range c.Notes {
		s.Line("%s", s.Paint(terminal.Dim, "# "+n))
	}
	if c.Same {
		s.Line("%s the kernel holds what %s asks for: %s (%s)", c.good(s, "same"), c.Objects,
			terminal.Plural(c.Services, "Service"), c.describe())
		return
	}
	bounded(s, c.wrongLines(s), MaxDiffLines, all)
	var lines []string
	for _, d := range c.Differences.Differences {
		colour := terminal.Red
		if d.Wanted {
			colour = terminal.Green
		}
		lines = append(lines, s.Paint(colour, diffLine(&d)))
	}
	bounded(s, lines, MaxDiffLines, all)
	if len(c.Counts) > 0 {
		s.Line("")
		s.Line("%s", s.Paint(terminal.Dim, fmt.Sprintf("By Service (kernel: %s)", c.describe())))
		bounded(s, c.summary(s), MaxShown, all)
	}
}

// PrintVerify shows what is wrong, if anything is.
func (c *Comparison) PrintVerify(s *terminal.Printer, all bool) {
	for _, n := range c.Notes {
		s.Line("%s", s.Paint(terminal.Dim, "# "+n))
	}
	s.Line("%s", c.describe())
	bounded(s, c.wrongLines(s), MaxShown, all)
	var lines []string
	for _, d := range c.Contradictions {
		lines = append(lines, s.Paint(terminal.Red, fmt.Sprintf("! %s %s", d.Family, d.Object)))
	}
	bounded(s, lines, MaxShown, all)
	if len(c.Differences.Differences) > 0 {
		s.Line("%s", s.Paint(terminal.Red, fmt.Sprintf("! %s other than %s asks for (verdict diff shows more):",
			terminal.Plural(len(c.Differences.Differences), "line"), c.Objects)))
		bounded(s, c.summary(s), MaxShown, all)
	}
	switch {
	case !c.Same:
		s.Line("%s the kernel does not hold what it should", s.Paint(terminal.Red, "wrong:"))
	case c.Objects != "":
		s.Line("%s the kernel holds what was written, and what %s asks for: %s", c.good(s, "right"),
			c.Objects, terminal.Plural(c.Services, "Service"))
	case c.Partial:
		s.Line("%s the kernel holds what was looked for", c.good(s, "right"))
	default:
		s.Line("%s the kernel holds what was written", s.Paint(terminal.Green, "right:"))
	}
	PrintPreflight(s, c.Preflight)
}

// good says that nothing differs, as far as everything was compared.
func (c *Comparison) good(s *terminal.Printer, word string) string {
	if c.Partial {
		return s.Paint(terminal.Dim, word+", as far as it was checked:")
	}
	return s.Paint(terminal.Green, word+":")
}
