package outlier

import (
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/health"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Stats counts what a Detector has done.
type Stats struct {
	// Unhealthy and Ejected are how many endpoints are so now, Ejections how often one was ejected; by cause. An endpoint
	// of two Services counts for each.
	Unhealthy, Ejected [2]int
	Ejections          [2]uint64
	// Probes counts probes by outcome.
	Probes [4]uint64
	// LastResort is how many endpoints are used though they are not ready, and LastResorts how often one came to be.
	LastResort   int
	LastResorts  uint64
	FlowsDeleted uint64
	ReadErrors   uint64
}

// Stats returns the counts. Safe for concurrent use.
func (d *Detector) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.stats
	for _, t := range d.machine.tracks {
		if t.used {
			s.LastResort++
		}
		if t.state != unhealthy || t.asks == asResort {
			continue
		}
		s.Unhealthy[t.cause]++
		if t.flush.ejected {
			s.Ejected[t.cause]++
		}
	}
	return s
}

// Report lists unhealthy endpoints by Service, sorted.
type Report struct {
	Services []ServiceReport `json:"services"`
	// Truncated says that there are more.
	Truncated bool `json:"truncated,omitempty"`
}

// ServiceReport lists those of a Service.
type ServiceReport struct {
	Service   string           `json:"service"`
	Endpoints []EndpointReport `json:"endpoints"`
}

// EndpointReport is one unhealthy endpoint.
type EndpointReport struct {
	Endpoint string    `json:"endpoint"`
	Cause    string    `json:"cause"`
	Since    time.Time `json:"since"`
	// Ejected says that new connections to the Service do not reach the endpoint from this node.
	Ejected   bool      `json:"ejected"`
	NextProbe time.Time `json:"nextProbe"`
}

// maxReported bounds the endpoints of a Report; one of several Services counts as often.
const maxReported = maxTracked

// Report returns the unhealthy endpoints. Safe for concurrent use.
func (d *Detector) Report() Report {
	d.mu.Lock()
	defer d.mu.Unlock()
	r, left := Report{Services: []ServiceReport{}}, maxReported
	for _, name := range slices.SortedFunc(maps.Keys(d.put), snapshot.Name.Compare) {
		s := ServiceReport{Service: name.String()}
		for _, u := range d.put[name].Unhealthy {
			t := d.machine.tracks[trackKey{name, u.Endpoint}]
			if t == nil || u.Doubtful {
				continue
			}
			if left--; left < 0 {
				r.Truncated = true
				break
			}
			s.Endpoints = append(s.Endpoints, EndpointReport{
				Endpoint: u.Endpoint.String(), Cause: u.Cause.String(), Since: u.Since.UTC(),
				Ejected: t.ejected(), NextProbe: t.due.UTC().Truncate(time.Second),
			})
		}
		if len(s.Endpoints) > 0 {
			r.Services = append(r.Services, s)
		}
	}
	return r
}

// ServeHTTP answers with the Report as JSON. The caller must see to it that only processes of this host may ask
// (health.OnlyHost).
func (d *Detector) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	health.AnswerJSON(w, http.StatusOK, d.Report())
}
