package inspect

import (
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// TestPartial: what was not compared is not called right.
func TestPartial(t *testing.T) {
	for _, c := range []struct {
		of   Comparison
		says string
	}{
		{Comparison{Same: true}, "right: the kernel holds what was written\n"},
		{Comparison{Same: true, Differences: dataplane.Differences{Partial: true}},
			"right, as far as it was checked: the kernel holds what was looked for\n"},
		{Comparison{Same: true, Objects: "a.yaml", Differences: dataplane.Differences{Partial: true}},
			"right, as far as it was checked: the kernel holds what was written, and what a.yaml asks for: 0 Services\n"},
		{Comparison{Same: true, Objects: "a.yaml", Services: 1,
			Differences: dataplane.Differences{Tables: []dataplane.InspectedTable{
				{There: true, Name: "ip verdict", Revision: 3, Elements: 1, Unit: "element"}}}},
			"ip verdict revision 3, 1 element\n" +
				"right: the kernel holds what was written, and what a.yaml asks for: 1 Service\n"},
	} {
		var out strings.Builder
		c.of.PrintVerify(terminal.NewPrinter(&out), false)
		if !strings.HasSuffix(out.String(), c.says) {
			t.Errorf("it says %q; want %q", out.String(), c.says)
		}
		if got := c.of.JSON(false).Partial; got != c.of.Partial {
			t.Errorf("as JSON, partial is %v", got)
		}
	}
}
