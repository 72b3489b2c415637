// Package benchmark measures the whole line from objects in memory to the kernel's acknowledgement, in network
// namespaces of its own, and beside it the floor: the kernel alone, given the same bytes. "verdict bench" and the Go
// benchmarks use it.
//
// The cluster is IPv4. Each Service has one cluster IP, one TCP port and one EndpointSlice. Percentiles are exact: of
// all samples sorted, the one that so many percent do not exceed.
package benchmark

import (
	"fmt"

	"github.com/verdict-proxy/verdict/nft/kernel"
)

// Options are what all measurements share.
type Options struct {
	// Services of the cluster, and Endpoints of each.
	Services, Endpoints int
	// Open opens a backend in the network namespace of the calling thread.
	Open func() (*kernel.Backend, error)
	// Progress, unless it is nil, is told of each step in a few words.
	Progress func(text string)
}

// MaxServices, and MaxEndpoints of all Services together, are what there are addresses for: Change adds as many again.
const (
	MaxServices  = 1 << 21
	MaxEndpoints = 1 << 22
)

// Check refuses clusters that cannot be made. An error begins with the field's name in lower case.
func (o Options) Check() error {
	switch {
	case o.Services < 1 || o.Services > MaxServices:
		return fmt.Errorf("services: %d is not between 1 and %d", o.Services, MaxServices)
	case o.Endpoints < 1 || o.Endpoints > MaxEndpoints/o.Services:
		return fmt.Errorf("endpoints: %d is not between 1 and %d, which is what there are addresses for",
			o.Endpoints, MaxEndpoints/o.Services)
	}
	return nil
}

func (o Options) show(format string, args ...any) {
	if o.Progress != nil {
		o.Progress(fmt.Sprintf(format, args...))
	}
}
