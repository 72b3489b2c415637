package dataplane

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Refused is the error of a transaction of which the kernel does not take some Services' parts. Nothing of the
// transaction is in the kernel; without these Services it would be.
type Refused struct {
	// Services says of each what was refused; not empty.
	Services map[snapshot.Name]error
	// Scheduling says that only their Scheduling is refused: it takes them as they are without (Service.Unscheduled).
	Scheduling bool
}

// maxRefused is how many Services an error names: what the kernel refuses of one, it often refuses of all.
const maxRefused = 8

// Error names the first Services with what was refused of them, and says how many more there are.
func (r *Refused) Error() string {
	names := slices.SortedFunc(maps.Keys(r.Services), snapshot.Name.Compare)
	var parts []string
	for _, n := range names[:min(len(names), maxRefused)] {
		parts = append(parts, fmt.Sprintf("Service %s: %v", n, r.Services[n]))
	}
	if more := len(names) - len(parts); more > 0 {
		parts = append(parts, fmt.Sprintf("... and %d more Services", more))
	}
	return strings.Join(parts, "; ")
}
