package inspect

import (
	"encoding/json"
	"io"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Show prints an answer as JSON or as text.
func Show(w io.Writer, asJSON bool, v any, text func(*terminal.Printer)) error {
	p := terminal.NewPrinter(w)
	if !asJSON {
		text(p)
		return p.Err()
	}
	e := json.NewEncoder(p)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// ComparisonJSON is a Comparison as JSON: docs/ANSWERS.md.
type ComparisonJSON struct {
	Same           bool                       `json:"same"`
	Partial        bool                       `json:"partial,omitempty"`
	Objects        string                     `json:"objects,omitempty"`
	Tables         []dataplane.InspectedTable `json:"tables"`
	IPTables       string                     `json:"iptables,omitempty"`
	Wrong          []string                   `json:"wrong,omitempty"`
	Contradictions []DifferenceJSON           `json:"contradictions,omitempty"`
	Differences    []DifferenceJSON           `json:"differences,omitempty"`
	Services       []ServiceCount             `json:"services,omitempty"`
	Preflight      []status.Finding           `json:"preflight,omitempty"`
	Notes          []string                   `json:"notes,omitempty"`
}

// DifferenceJSON is a dataplane.Difference as JSON.
type DifferenceJSON struct {
	// Side is kernel for what only the kernel has, wanted for what only it should have.
	Side   string `json:"side"`
	Family string `json:"family"`
	Object string `json:"object"`
	Set    string `json:"set,omitempty"`
	Port   string `json:"port,omitempty"`
}

// JSON gives the form that is printed, with the differences or only their counts.
func (c *Comparison) JSON(differences bool) *ComparisonJSON {
	out := &ComparisonJSON{Same: c.Same, Partial: c.Partial, Objects: c.Objects, IPTables: c.Programs, Wrong: c.Wrong,
		Tables: c.Tables, Services: c.Counts, Preflight: c.Preflight, Notes: c.Notes,
		Contradictions: differencesJSON(c.Contradictions)}
	if differences {
		out.Differences = differencesJSON(c.Differences.Differences)
	}
	return out
}

func differencesJSON(list []dataplane.Difference) (out []DifferenceJSON) {
	for i := range list {
		d := &list[i]
		j := DifferenceJSON{Side: "kernel", Family: d.Family, Object: d.Object, Set: d.Set}
		if d.Wanted {
			j.Side = "wanted"
		}
		if d.Port != (dataplane.PortName{}) {
			j.Port = d.Port.String()
		}
		out = append(out, j)
	}
	return out
}
