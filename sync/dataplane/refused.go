package dataplane

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Refused is the error of a transaction in which the kernel rejected only what some Services need. Nothing of the
// transaction was written; without these Services it would succeed.
type Refused struct {
	// Services holds the error for each rejected Service; not empty.
	Services map[snapshot.Name]error
	// Scheduling says that only their Scheduling was rejected: without it (Service.Unscheduled) the Services would be
	// accepted.
	Scheduling bool
	// Instead says how the backend chooses for them, as ChosenBy does; a Service that is not here has a random choice.
	Instead map[snapshot.Name]string
}

// ChosenInstead returns how the backend chooses the endpoints of a Service whose Scheduling was rejected.
func (r *Refused) ChosenInstead(n snapshot.Name) string { return cmp.Or(r.Instead[n], AtRandom) }

// maxRefused bounds how many Services an error names: the kernel often rejects the same of all.
const maxRefused = 8

// Error names the first Services with their errors, and how many more there are.
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
