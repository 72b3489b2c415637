package terminal

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
)

func TestPrinter(t *testing.T) {
	var out strings.Builder
	p := &Printer{colour: true, w: &out}
	painted := p.Paint(Cyan, "██") + " 1"
	if p.Line("%s", painted); out.String() != "\x1b[36m██\x1b[0m 1\n" {
		t.Errorf("painted is %q", out.String())
	}
	if got, want := (Columns{6, 2}).Row(painted, "long", "x"), painted+"  long x"; got != want {
		t.Errorf("a row is %q, want %q", got, want)
	}
	t.Setenv("NO_COLOR", "1")
	if NewPrinter(os.Stdout).colour {
		t.Error("NO_COLOR is not obeyed")
	}
}

// TestHostileText: a name that somebody chose controls no terminal, makes no line of its own, and hides nothing.
func TestHostileText(t *testing.T) {
	const name = "zone\x1b[2J\x1b[31m\r\nOutcome\u009b1m\x7f \u202eabc\u2066 \U000e0041\xffm µ ✓"
	const want = `zone\u001b[2J\u001b[31m\u000d\nOutcome\u009b1m\u007f \u202eabc\u2066 \udb40\udc41\xffm µ ✓`
	var out bytes.Buffer
	p := &Printer{colour: true, w: &out}
	p.Line("%s\n%s", name, p.Paint(Red, name))
	if got := out.String(); got != want+"\n\x1b[31m"+want+"\x1b[0m\n" {
		t.Errorf("lines: %q", got)
	}
	out.Reset()
	valid := strings.ToValidUTF8(name, "?") // as it is in every object
	if err := json.NewEncoder(p).Encode([]string{valid}); err != nil {
		t.Fatal(err)
	}
	var read []string
	text := out.String()
	err := json.Unmarshal(out.Bytes(), &read)
	if err != nil || read[0] != valid || strings.ContainsAny(text, "\x1b\u009b\u202e") {
		t.Errorf("JSON: %q, %v: read as %q", text, err, read)
	}
	if got := clean(name, ""); got != want {
		t.Errorf("a line of a screen: %q", got)
	}
	out.Reset()
	if n, err := p.Write([]byte("\ta\nb\x1b")); n != 5 || err != nil || out.String() != "\ta\nb\\u001b" {
		t.Errorf("text: %q, %d, %v", out.String(), n, err)
	}
}

func TestWrap(t *testing.T) {
	var out strings.Builder
	p := &Printer{w: &out, width: 40, colour: true}
	p.Line("%s", "short")
	p.Line("%s", "Outcome   sent to one of two endpoints, "+p.Paint(Red, "as likely as")+" the other one")
	p.Line("%s", "a sentence without columns that is longer than a line")
	p.Line("%s", "  50%   10.244.1.7:8080      node-1   10.0.0.1, this node")
	p.Lines("-  " + strings.Repeat("x", 60) + " y\nlast\n")
	want := "short\n" +
		"Outcome   sent to one of two endpoints,\n          \x1b[31mas likely as\x1b[0m the other one\n" +
		"a sentence without columns that is\nlonger than a line\n" +
		"  50%   10.244.1.7:8080      node-1\n        10.0.0.1, this node\n" +
		"-  " + strings.Repeat("x", 60) + "\n   y\nlast\n"
	if out.String() != want {
		t.Errorf("it prints\n%s\nwant\n%s", out.String(), want)
	}
}

func TestWidth(t *testing.T) {
	t.Setenv("COLUMNS", "")
	if n := Width(&strings.Builder{}); n != 0 {
		t.Errorf("what is no terminal has %d columns", n)
	}
	t.Setenv("COLUMNS", "70")
	if n := Width(&strings.Builder{}); n != 70 {
		t.Errorf("COLUMNS is 70, and the width %d", n)
	}
}
