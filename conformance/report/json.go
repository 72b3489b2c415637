package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Outcomes are all there are, the worst first.
var Outcomes = []Outcome{Broken, Fail, Differs, Skipped, Pass}

// WriteJSON writes a run, for ReadJSON and for other programs: the fields of Run under the names in its tags,
// durations in nanoseconds.
func WriteJSON(w io.Writer, r *Run) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("report: write JSON: %w", err)
	}
	return nil
}

// ReadJSON reads what WriteJSON wrote. A field it does not know is an error, and so is all that Check finds.
func ReadJSON(rd io.Reader) (*Run, error) {
	d := json.NewDecoder(rd)
	d.DisallowUnknownFields()
	r := &Run{}
	if err := d.Decode(r); err != nil {
		return nil, fmt.Errorf("report: read JSON: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("report: read JSON: something follows the run")
	}
	if err := r.Check(); err != nil {
		return nil, fmt.Errorf("report: read JSON: %w", err)
	}
	return r, nil
}

// Check says what of a run contradicts itself: names that are empty or occur twice, results of a proxy that is not
// among the Proxies, outcomes that do not exist.
func (r *Run) Check() error {
	var errs []error
	proxies, cases := map[string]bool{}, map[string]bool{}
	for i, p := range r.Proxies {
		if p.Name == "" || proxies[p.Name] {
			errs = append(errs, fmt.Errorf("proxies[%d].name: %q is empty or occurs twice", i, p.Name))
		}
		proxies[p.Name] = true
	}
	for i := range r.Cases {
		c := &r.Cases[i]
		if c.Name == "" || cases[c.Name] {
			errs = append(errs, fmt.Errorf("cases[%d].name: %q is empty or occurs twice", i, c.Name))
		}
		cases[c.Name] = true
		for name, result := range c.Results {
			switch {
			case !proxies[name]:
				errs = append(errs, fmt.Errorf("case %s: results: %q is none of the proxies", c.Name, name))
			case result == nil:
				errs = append(errs, fmt.Errorf("case %s: results: that of %s is null", c.Name, name))
			case !slices.Contains(Outcomes, result.Outcome):
				errs = append(
					errs,
					fmt.Errorf("case %s: results: %s: outcome: %q is none of %q", c.Name, name, result.Outcome, Outcomes),
				)
			}
		}
	}
	return errors.Join(errs...)
}
