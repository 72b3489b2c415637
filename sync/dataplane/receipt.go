package dataplane

import (
	"cmp"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// What has counters. They take memory for each processor, so there is a budget for them.
const (
	CountedEndpoints     = "endpoints"      // and frontends
	CountedMostEndpoints = "most-endpoints" // not those of Services beyond their share of the budget
	CountedFrontends     = "frontends"
	CountedMostFrontends = "most-frontends"
	CountedNothing       = "nothing" // but what rules refuse
)

// Receipt says what one transaction, or several one after the other, wrote. The zero Receipt says that there was
// nothing to write.
type Receipt struct {
	// Full says that everything was written anew.
	Full bool
	// Adopted says that the tables that were found are exactly what is asked for: nothing was written.
	Adopted bool
	// Added, Replaced and Removed count elements, or what a backend has instead of them.
	Added, Replaced, Removed int
	// Counted says what has counters from now on: one of Counted...; empty if the backend does not say.
	Counted string
	// Left are Services that are not, or not wholly, written yet: the backend goes on with them when it is called again.
	Left []snapshot.Name
	// Messages and Bytes are what was sent to the kernel.
	Messages, Bytes int
	// Plan, Encode and Commit are the time spent on compiling and comparing, on writing the bytes, and in the kernel.
	Plan, Encode, Commit time.Duration
}

// Then gives what two transactions wrote together, the second after the first.
func (r Receipt) Then(o Receipt) Receipt {
	r.Full, r.Adopted, r.Left = r.Full || o.Full, r.Adopted && o.Adopted, o.Left
	r.Counted = cmp.Or(o.Counted, r.Counted)
	r.Added += o.Added
	r.Replaced += o.Replaced
	r.Removed += o.Removed
	r.Messages += o.Messages
	r.Bytes += o.Bytes
	r.Plan += o.Plan
	r.Encode += o.Encode
	r.Commit += o.Commit
	return r
}
