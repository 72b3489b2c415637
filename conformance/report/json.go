package report

import (
	"encoding/json"
	"fmt"
	"io"
)

// Outcomes are all there are, the worst first.
var Outcomes = []Outcome{Broken, Fail, Differs, Skipped, Pass}

// WriteJSON writes a run, for other programs: the fields of Run under the names in its tags, durations in
// nanoseconds.
func WriteJSON(w io.Writer, r *Run) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("report: write JSON: %w", err)
	}
	return nil
}
