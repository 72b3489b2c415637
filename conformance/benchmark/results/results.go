// Package results holds what a benchmark of Service proxies found, and shows it: as JSON, as tables in Markdown, and
// as pictures.
package results

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Results are all that was measured with the same settings on the same machine.
type Results struct {
	Machine  Machine  `json:"machine"`
	Settings Settings `json:"settings"`
	// Versions are those of the programs, by the proxies' names.
	Versions map[string]string `json:"versions"`
	// LeftOut says why a proxy was not measured, by its name.
	LeftOut map[string]string `json:"left_out,omitempty"`
	// Reasons say why a proxy has no figures in a table, by its name and the table's title.
	Reasons map[string]map[string]string `json:"reasons,omitempty"`
	// Spent is how long the measurements took, in seconds, those of a run that was broken off included.
	Spent float64 `json:"spent_s"`
	Cells []*Cell `json:"cells"`
	// Paths are the turns of each size and repeat.
	Paths []*Paths `json:"paths,omitempty"`
}

// Machine says where it was measured.
type Machine struct {
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	Memory uint64 `json:"memory_bytes"`
	Kernel string `json:"kernel"`
	// Tools are the versions of the programs that proxies use, as they print them: "nftables v1.1.3 ...".
	Tools []string `json:"tools,omitempty"`
	// Guest says that it is a machine emulated in software, whose figures compare with each other only.
	Guest bool `json:"guest,omitempty"`
}

// Settings say how it was measured. Cells of different settings are never mixed. All times are in seconds.
type Settings struct {
	// Method is the number of the way it was measured in.
	Method int `json:"method"`
	// StartLimit is how long a start or a restart may take.
	StartLimit float64 `json:"start_limit_s"`
	// Changes is how many single changes are tried, for at most ChangesLimit.
	Changes      int     `json:"changes"`
	ChangesLimit float64 `json:"changes_limit_s"`
	// Rates are changes a second, each for ChurnTime; what is behind then has DrainLimit to come.
	Rates      []float64 `json:"rates"`
	ChurnTime  float64   `json:"churn_s"`
	DrainLimit float64   `json:"drain_limit_s"`
	// Rounds is how many turns each node has where packets are measured, TurnTime how long connections are counted in a
	// turn, and then bytes.
	Rounds   int     `json:"rounds"`
	TurnTime float64 `json:"turn_s"`
	// GiantLimit is how long the giant may take to come, and to go; 0 in results that are older than it.
	GiantLimit float64 `json:"giant_limit_s,omitempty"`
}

// Method is the number of the way in which is measured now. It is counted up when figures would no longer compare
// with those before.
const Method = 5

// Size is how large a cluster is: so many Services with so many endpoints each.
type Size struct {
	Services  int `json:"services"`
	Endpoints int `json:"endpoints"`
}

// String gives "10000x10", as ParseSize reads it.
func (s Size) String() string { return fmt.Sprintf("%dx%d", s.Services, s.Endpoints) }

// ParseSize reads "10000x10".
func ParseSize(text string) (Size, error) {
	services, endpoints, ok := strings.Cut(text, "x")
	n, err1 := strconv.Atoi(services)
	m, err2 := strconv.Atoi(endpoints)
	if !ok || err1 != nil || err2 != nil || n < 1 || n > MaxServices || m < 1 || m > MaxEndpoints || n*m > MaxTotal {
		return Size{}, fmt.Errorf(
			"%q is no size: it takes SERVICESxENDPOINTS, as 10000x10, of at most %d, %d, and %d in all",
			text,
			MaxServices,
			MaxEndpoints,
			MaxTotal,
		)
	}
	return Size{n, m}, nil
}

// What there are addresses for, and how many endpoints a slice holds.
const (
	MaxServices  = 100000
	MaxEndpoints = 100
	MaxTotal     = 2000000
)

// Cell is one run of one proxy in one cluster, from its start to its end. What was not come to is nil.
type Cell struct {
	Size   Size      `json:"size"`
	Proxy  string    `json:"proxy"`
	Repeat int       `json:"repeat"` // counted from 1
	Began  time.Time `json:"began"`
	Took   float64   `json:"took_s"`
	// Load is the machine's load average over a minute, as it was before.
	Load float64 `json:"load"`
	// Error says why the run ended early; empty if it did not.
	Error string `json:"error,omitempty"`

	Start *Wait `json:"start,omitempty"`
	// Restart is one while nothing changed, until the processes are at rest; Away one with an endpoint changed while the
	// proxy was away, until connections end there.
	Restart *Wait   `json:"restart,omitempty"`
	Away    *Wait   `json:"away,omitempty"`
	Change  *Spans  `json:"change,omitempty"`
	Churn   []Churn `json:"churn,omitempty"`
	Memory  *Memory `json:"memory,omitempty"`
	Giant   *Giant  `json:"giant,omitempty"`
}

// Wait is how long something took, in seconds. Limit says that it was not done by then.
type Wait struct {
	Seconds float64 `json:"s"`
	Limit   bool    `json:"limit,omitempty"`
	// Processor is the time that the proxy and its children had a processor meanwhile, in seconds; 0 if it was not
	// measured.
	Processor float64 `json:"cpu_s,omitempty"`
}

// Spans are times of the same thing, in milliseconds. The last Open of them are of what was not done by then.
type Spans struct {
	Milliseconds []float64 `json:"ms"`
	Open         int       `json:"open,omitempty"`
	// Write is how long the API server took to acknowledge such a write, the median in milliseconds. It is part of each
	// span.
	Write float64 `json:"write_ms"`
}

// Churn is a steady rate of changes.
type Churn struct {
	// Rate is what was asked for, Written what the API server took, both a second.
	Rate    float64 `json:"rate"`
	Written float64 `json:"written"`
	Spans
	// Cores is the processor time of the proxy and its children by the time that passed, kernel mode included.
	Cores float64 `json:"cores"`
	// Behind is how long after the last change the kernel had it.
	Behind Wait `json:"behind"`
}

// Memory is in bytes. Zero means that it could not be measured.
type Memory struct {
	// Resident is that of the proxy and its children, shared pages by halves, after the start; Peak the most that was
	// seen.
	Resident uint64 `json:"resident"`
	Peak     uint64 `json:"peak"`
	// Kernel is what the kernel charged to the proxy's control group after the start.
	Kernel uint64 `json:"kernel"`
}

// Giant is what a Service costs with 300 externalIPs, 50 ports and 100 endpoints, in a proxy at rest: when it
// is created, and when it is deleted again.
type Giant struct {
	Created GiantStep `json:"created"`
	Deleted GiantStep `json:"deleted"`
}

// GiantStep lasts from the write until the last of some frontends answers, or answers no more.
type GiantStep struct {
	Wait
	// Others are the changes of other Services' endpoints meanwhile, one after the other.
	Others Spans `json:"others"`
	// Resident and Kernel are how much more memory there was than before the giant, in bytes, when the proxy was at rest;
	// Peak is how much the highest resident memory lay above that. Kernel is 0 if it could not be measured.
	Resident int64 `json:"resident"`
	Peak     int64 `json:"peak"`
	Kernel   int64 `json:"kernel"`
}

// Find gives a cell; nil if there is none.
func (r *Results) Find(size Size, proxy string, repeat int) *Cell {
	for _, c := range r.Cells {
		if c.Size == size && c.Proxy == proxy && c.Repeat == repeat {
			return c
		}
	}
	return nil
}

// Read reads what Write wrote. A field it does not know is an error.
func Read(rd io.Reader) (*Results, error) {
	d := json.NewDecoder(rd)
	d.DisallowUnknownFields()
	r := &Results{}
	if err := d.Decode(r); err != nil {
		return nil, fmt.Errorf("read results: %w", err)
	}
	for i, c := range r.Cells {
		switch {
		case c == nil:
			return nil, fmt.Errorf("read results: cells[%d]: it is null", i)
		case c.Proxy == "" || c.Repeat < 1 || c.Size.Services < 1 || c.Size.Endpoints < 1:
			return nil, fmt.Errorf("read results: cells[%d]: size, proxy or repeat is missing", i)
		case r.Find(c.Size, c.Proxy, c.Repeat) != c:
			return nil, fmt.Errorf("read results: cells[%d]: %s, %s, repeat %d is there twice", i, c.Size, c.Proxy, c.Repeat)
		}
	}
	for i, p := range r.Paths {
		if p == nil || p.Repeat < 1 || r.FindPaths(p.Size, p.Repeat) != p {
			return nil, fmt.Errorf("read results: paths[%d]: it is null, lacks a repeat, or is there twice", i)
		}
	}
	return r, nil
}

// ReadFile reads a file. One that does not exist gives nil.
func ReadFile(path string) (*Results, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}

// WriteFile puts the results in the place of a file, so that there is a whole one at any time.
func (r *Results) WriteFile(path string) error {
	b, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	return replaceFile(path, append(b, '\n'))
}

func replaceFile(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", content, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
