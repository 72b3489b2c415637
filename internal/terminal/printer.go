// Package terminal prints for people: lines with colours and columns, and a screen with keys.
package terminal

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"
)

// Printer prints lines, in colours where they are welcome.
type Printer struct {
	w      io.Writer
	colour bool
	err    error
}

// NewPrinter gives a printer that has colours if it writes to a terminal, unless no-color.org is asked for.
func NewPrinter(w io.Writer) *Printer {
	f, ok := w.(*os.File)
	return &Printer{w: w, colour: ok && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && Is(f)}
}

// Is says whether a file is a terminal.
func Is(f *os.File) bool {
	return term.IsTerminal(int(f.Fd()))
}

// The ways to paint a text, as SGR parameters.
const (
	Bold    = "1"
	Dim     = "2"
	Inverse = "7"
	Red     = "31"
	Green   = "32"
	Cyan    = "36"
)

// Paint gives a text in a colour.
func (p *Printer) Paint(sgr, text string) string {
	if !p.colour || text == "" {
		return text
	}
	return "\x1b[" + sgr + "m" + text + "\x1b[0m"
}

// Line prints one line, or several. After the first error it prints nothing.
func (p *Printer) Line(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", args...)
	}
}

// Err is the first error of writing.
func (p *Printer) Err() error { return p.err }

// Columns are the least widths of a table's columns; the last needs none.
type Columns []int

// Row gives a line of the table.
func (c Columns) Row(cells ...string) string {
	var b strings.Builder
	for i, cell := range cells {
		b.WriteString(cell)
		if i < len(cells)-1 {
			b.WriteString(strings.Repeat(" ", max(c[i]-utf8.RuneCountInString(Plain(cell)), 1)))
		}
	}
	return strings.TrimRight(b.String(), " ")
}

var sgrSequence = regexp.MustCompile("\x1b\\[[0-9;]*m")

// Plain takes the paint off.
func Plain(text string) string { return sgrSequence.ReplaceAllString(text, "") }

// Plural gives a number with its noun.
func Plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprint(n, " ", noun)
}
