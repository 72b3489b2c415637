package inspect

import (
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// ComparisonJSON is a Comparison as JSON: docs/ANSWERS.md.
type ComparisonJSON struct {
	Same           bool               `json:"same"`
	Partial        bool               `json:"partial,omitempty"`
	Objects        string             `json:"objects,omitempty"`
	Tables         []TableJSON        `json:"tables"`
	IPTables       string             `json:"iptables,omitempty"`
	Wrong          []string           `json:"wrong,omitempty"`
	Contradictions []DifferenceJSON   `json:"contradictions,omitempty"`
	Differences    []DifferenceJSON   `json:"differences,omitempty"`
	Services       []ServiceCountJSON `json:"services,omitempty"`
	Preflight      []status.Finding   `json:"preflight,omitempty"`
	Notes          []string           `json:"notes,omitempty"`
}

// TableJSON is a dataplane.InspectedTable as JSON.
type TableJSON struct {
	Family   string `json:"family"`
	There    bool   `json:"there"`
	Owner    uint32 `json:"owner,omitempty"`
	Revision uint32 `json:"revision,omitempty"`
	Digest   string `json:"digest,omitempty"`
	Found    string `json:"found,omitempty"`
	Elements int    `json:"elements"`
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

// ServiceCountJSON is a ServiceCount as JSON.
type ServiceCountJSON struct {
	Service string `json:"service"`
	Missing int    `json:"missing"`
	Extra   int    `json:"extra"`
	Changed int    `json:"changed"`
}

// JSON gives the form that is printed, with the differences or only their counts.
func (c *Comparison) JSON(differences bool) *ComparisonJSON {
	out := &ComparisonJSON{Same: c.Same, Partial: c.Partial, Objects: c.Objects, IPTables: c.Programs, Wrong: c.Wrong,
		Preflight: c.Preflight, Notes: c.Notes, Contradictions: differencesJSON(c.Contradictions)}
	for _, t := range c.Tables {
		out.Tables = append(out.Tables, TableJSON{t.Family, t.There, t.Owner, t.Revision, t.Digest, t.Found, t.Elements})
	}
	if differences {
		out.Differences = differencesJSON(c.Differences.Differences)
	}
	for _, n := range c.Counts {
		out.Services = append(out.Services, ServiceCountJSON(n))
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
