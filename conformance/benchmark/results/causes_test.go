package results

import (
	"strings"
	"testing"
)

// A failure without a cause makes a run fail, whatever else there is; others are in the line of their cell.
func TestUnexplained(t *testing.T) {
	cell := func(causes map[string]int) *Outage { return &Outage{Explained: Explained{causes}} }
	known := cell(map[string]int{"nothing listened": 2, "released": 1})
	if err := Unexplained([]*Outage{cell(nil), known}, "dir"); err != nil {
		t.Error(err)
	}
	if !strings.HasSuffix(known.String(), ", 2 nothing listened, 1 released") {
		t.Error(known)
	}
	err := Unexplained([]*Outage{known, cell(map[string]int{"unexplained": 3})}, "dir")
	if err == nil || err.Error() != "3 failures are unexplained: see dir" {
		t.Error(err)
	}
}
