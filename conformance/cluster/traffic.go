package cluster

import (
	"fmt"
	"net/netip"
	"time"
)

// Report is what a client of conformance/cmd/workload tells at /report.
type Report struct {
	// Started says which run of the client this is: one that starts again counts anew.
	Started time.Time
	// Connections is how many were opened and answered.
	Connections int
	// Failed is how many were not, and Broken how many of those that were held ended or fell silent.
	Failed, Broken int
	// Noted is how many errors there were, and Errors are the last ones.
	Noted  int
	Errors []Failure
}

// Failure is a connection that was not answered, or, if it was Held, one that broke.
type Failure struct {
	// Client is its own address and port; invalid if it was not connected. Target is where it connected to.
	Client netip.AddrPort
	Target string
	// Began is when it began to connect, At when it failed.
	Began, At time.Time
	Held      bool
	Err       string
}

func (f Failure) String() string {
	held := ""
	if f.Held {
		held = "held: "
	}
	return fmt.Sprintf("%s %s: %s%s", f.At.Format("15:04:05.000"), f.Target, held, f.Err)
}
