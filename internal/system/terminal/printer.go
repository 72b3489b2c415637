// Package terminal prints for people: lines with colours and columns, and a screen with keys.
package terminal

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/term"
)

// Printer prints lines, in colours where they are welcome. What it is given may come from anybody who writes objects:
// of all that would control a terminal, only its own paint is let through.
type Printer struct {
	w      io.Writer
	colour bool
	width  int
	err    error
}

// NewPrinter gives a printer that has colours if it writes to a terminal, unless no-color.org is asked for. On a
// terminal, it wraps lines that are wider.
func NewPrinter(w io.Writer) *Printer {
	f, ok := w.(*os.File)
	return &Printer{w: w, colour: os.Getenv("NO_COLOR") == "" && ok && Obeys(f), width: Width(w)}
}

// Is says whether a file is a terminal.
func Is(f *os.File) bool {
	return term.IsTerminal(int(f.Fd()))
}

// Obeys says whether a file is a terminal that obeys escape sequences.
func Obeys(f *os.File) bool { return os.Getenv("TERM") != "dumb" && Is(f) }

// DefaultWidth is how many columns a terminal has that does not tell.
const DefaultWidth = 80

// Width gives the columns of what is written to: what the environment's COLUMNS says, else those of the terminal. What
// is no terminal has no end: 0.
func Width(w io.Writer) int {
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		return n
	}
	f, ok := w.(*os.File)
	if !ok || !Is(f) {
		return 0
	}
	if n, _, err := term.GetSize(int(f.Fd())); err == nil && n > 0 {
		return n
	}
	return DefaultWidth
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

// Bytes that no UTF-8 text has. paint begins an SGR sequence of ours, and breaks stands for a line break of a format.
const (
	paint  = "\xff"
	breaks = "\xfe"
)

// Paint gives a text in a colour, for a Printer or a Screen.
func (p *Printer) Paint(sgr, text string) string {
	if !p.colour || text == "" {
		return text
	}
	return paint + "[" + sgr + "m" + text + paint + "[0m"
}

// Line prints one line, or several if the format has line breaks. After the first error it prints nothing.
func (p *Printer) Line(format string, args ...any) {
	if p.err != nil {
		return
	}
	text := fmt.Sprintf(strings.ReplaceAll(format, "\n", breaks), args...)
	lines := strings.Split(clean(text, "\t"+breaks), breaks)
	if p.width > 0 {
		for i, l := range lines {
			lines[i] = Wrap(l, p.width, lastColumn(l, p.width))
		}
	}
	_, p.err = io.WriteString(p.w, strings.Join(lines, "\n")+"\n")
}

// Lines prints the lines of a text, each as Line does.
func (p *Printer) Lines(text string) {
	for line := range strings.Lines(text) {
		p.Line("%s", strings.TrimSuffix(line, "\n"))
	}
}

// Width gives the columns at which lines are wrapped; 0 if they are not.
func (p *Printer) Width() int { return p.width }

// columnStart is where a cell of a table begins: behind the indentation, or behind two spaces.
var columnStart = regexp.MustCompile("^ +| {2,}")

// leastCell is how many columns the last cell of a line has at least, if it is wrapped below itself.
const leastCell = 24

// lastColumn is where the last cell of a line begins that is wide enough to be wrapped.
func lastColumn(line string, width int) (at int) {
	plain := Plain(line)
	for _, m := range columnStart.FindAllStringIndex(plain, -1) {
		if n := utf8.RuneCountInString(plain[:m[1]]); n <= width-leastCell {
			at = n
		}
	}
	return at
}

// Wrap breaks a line at spaces, so that none is wider than width if its words allow it. All but the first are indented
// by hang, and what stands before that column in the first is not broken.
func Wrap(line string, width, hang int) string {
	if utf8.RuneCountInString(Plain(line)) <= width {
		return line
	}
	var b strings.Builder
	at := 0
	for rest := line; rest != ""; {
		word := strings.TrimLeft(rest, " ")
		space, behind := len(rest)-len(word), ""
		if i := strings.IndexByte(word, ' '); i >= 0 {
			word, behind = word[:i], word[i:]
		}
		n := utf8.RuneCountInString(Plain(word))
		if at > hang && n > 0 && at+space+n > width {
			b.WriteString("\n")
			at, space = 0, hang
		}
		b.WriteString(strings.Repeat(" ", space) + word)
		at += space + n
		rest = behind
	}
	return b.String()
}

// Write prints a text that may have several lines, as long as they are.
func (p *Printer) Write(text []byte) (n int, err error) {
	if _, err := p.w.Write([]byte(clean(string(text), "\t\n"))); err != nil {
		return 0, err
	}
	return len(text), nil
}

// Warn prints values to standard error, as a line that says whose it is.
func Warn(values ...any) {
	fmt.Fprintln(NewPrinter(os.Stderr), append([]any{"verdict:"}, values...)...)
}

// clean replaces what controls a terminal, or cannot be seen, by the escapes of Go and JSON, but for paint and some
// other bytes.
func clean(text, but string) string {
	var b strings.Builder
	for text != "" {
		n := 0
		for n < len(text) && text[n] >= ' ' && text[n] <= '~' {
			n++
		}
		b.WriteString(text[:n])
		if text = text[n:]; text == "" {
			break
		}
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case strings.HasPrefix(text, paint+"["):
			b.WriteByte('\x1b')
		case strings.IndexByte(but, text[0]) >= 0:
			b.WriteByte(text[0])
		case r == '\n':
			b.WriteString(`\n`)
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, "\\x%02x", text[0])
		case unicode.IsPrint(r):
			b.WriteString(text[:size])
		default:
			for _, unit := range utf16.Encode([]rune{r}) {
				fmt.Fprintf(&b, "\\u%04x", unit)
			}
		}
		text = text[size:]
	}
	return b.String()
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

// Table prints rows in columns. A row with two cells has a text of its own after the first.
func (p *Printer) Table(rows [][]string) {
	columns := make(Columns, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			if len(row) == len(columns) || i == 0 {
				columns[i] = max(columns[i], utf8.RuneCountInString(Plain(cell))+2)
			}
		}
	}
	for _, row := range rows {
		p.Line("%s", columns.Row(row...))
	}
}

var sgrSequence = regexp.MustCompile("\x1b\\[[0-9;]*m")

// Plain takes the paint off.
func Plain(text string) string {
	return sgrSequence.ReplaceAllString(strings.ReplaceAll(text, paint, "\x1b"), "")
}

// Plural gives a number with its noun.
func Plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprint(n, " ", noun)
}
