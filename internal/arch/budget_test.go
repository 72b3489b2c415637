package arch

import (
	"path/filepath"
	"strings"
	"testing"
)

// budget is how many lines of Go each wing of the product may have, without tests. To raise a number is a decision: say
// in the commit what the lines are for, and what they replace.
var budget = map[string]int{
	"cmd":              4_800,
	"nft":              19_600,
	"ipvsplugin":       3_270,
	"sync":             16_240,
	"internal/system":  8_640,
	"internal/proxy":   28_420,
	"internal/answers": 15_470,
	"internal/gateway": 3_850,
	"internal/lab":     10_750,
}

// slack is how far below its budget a wing may be before the budget has to follow.
const slack = 250

func TestBudget(t *testing.T) {
	lines := map[string]int{}
	eachText(t, func(path, text string) {
		if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			for wing := range budget {
				if under(filepath.ToSlash(path), wing) {
					lines[wing] += strings.Count(text, "\n")
				}
			}
		}
	})
	for wing, most := range budget {
		if n := lines[wing]; n > most || n < most-slack {
			t.Errorf("%s has %d lines of Go without tests; its budget is %d", wing, n, most)
		}
	}
}
