package dataplane

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Refused is the error of a transaction of which the kernel does not take some Services' parts. Nothing of the transaction
// is in the kernel; without these Services it would be.
type Refused struct {
	// Services says of each what was refused; not empty.
	Services map[snapshot.Name]error
	// Scheduling says that only their Scheduling is refused: it takes them as they are without (Service.Unscheduled).
	Scheduling bool
}

// Error names every Service with what was refused of it.
func (r *Refused) Error() string {
	names := slices.SortedFunc(maps.Keys(r.Services), snapshot.Name.Compare)
	parts := make([]string, len(names))
	for i, n := range names {
		parts[i] = fmt.Sprintf("Service %s: %v", n, r.Services[n])
	}
	return strings.Join(parts, "; ")
}
