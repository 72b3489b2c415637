package cluster

import (
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

// Probe is what "workload probe" tells of one target.
type Probe struct {
	// Target is a protocol and an address, such as udp://10.96.0.1:80.
	Target string
	// Asked is how many connections were opened, and Failed how many of them were not answered. Err is the last error.
	Asked, Failed int
	Err           string
	// Answers are how often servers answered what: their names, and the client's address as they saw it.
	Answers map[string]int
}

// Report is what a client of conformance/cmd/workload tells at /report.
// Report is what a client of conformance/cmd/workload tells at /report, or, without the first N failures, at
// /report?after=N.
type Report struct {
	// Started says which run of the client this is: one that starts again counts anew.
	Started time.Time
	// Connections is how many were opened and answered.
	Connections int
	// Failed is how many were not, and Broken how many of those that were held ended or fell silent.
	Failed, Broken int
	// Noted is how many errors there were, and Failures are the last ones.
	Noted    int
	Failures []blackbox.Failure
}
