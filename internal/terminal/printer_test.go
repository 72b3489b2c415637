package terminal

import (
	"os"
	"testing"
)

func TestPrinter(t *testing.T) {
	p := &Printer{colour: true}
	painted := p.Paint(Cyan, "██") + " 1"
	if want := "\x1b[36m██\x1b[0m 1"; painted != want {
		t.Errorf("painted is %q, want %q", painted, want)
	}
	if got, want := (Columns{6, 2}).Row(painted, "long", "x"), painted+"  long x"; got != want {
		t.Errorf("a row is %q, want %q", got, want)
	}
	t.Setenv("NO_COLOR", "1")
	if NewPrinter(os.Stdout).colour {
		t.Error("NO_COLOR is not obeyed")
	}
}
