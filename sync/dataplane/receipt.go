package dataplane

import (
	"cmp"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// What has counters. Counters take memory for each processor, so there is a budget for them.
const (
	CountedEndpoints     = "endpoints"      // and frontends
	CountedMostEndpoints = "most-endpoints" // not those of Services beyond their share of the budget
	CountedFrontends     = "frontends"
	CountedMostFrontends = "most-frontends"
	CountedNothing       = "nothing" // but what rules refuse
)

// DeviceRefused is a State's Device and DeviceIndex, and why the kernel takes no rules at its ingress.
type DeviceRefused struct {
	Device string
	Index  int
	Err    error
}

// Receipt says what one transaction wrote, or several in a row. The zero Receipt says that there was nothing to write.
type Receipt struct {
	// Full says that everything was rewritten.
	Full bool
	// Adopted says that the tables found in the kernel were already in sync, so nothing was written.
	Adopted bool
	// Repaired says that it corrected what others had changed, or may have: for a while the kernel held something else.
	Repaired bool
	// Added, Replaced and Removed count elements, or whatever the backend has instead.
	Added, Replaced, Removed int
	// Counted says what has counters from now on: one of Counted...; empty if the backend does not say.
	Counted string
	// Left are Services that are not yet completely written: the next call of the backend continues with them.
	Left []snapshot.Name
	// Messages and Bytes are what was sent to the kernel.
	Messages, Bytes int
	// Plan, Encode and Commit are the time for compiling and comparing, for encoding messages, and in the kernel.
	Plan, Encode, Commit time.Duration
	// Refused, if not nil, says that the kernel takes no rules at the ingress of the State's Device, so that nothing is
	// forwarded untranslated.
	Refused *DeviceRefused
	// Rest is how long the backend wants to be left alone, so that steady changes do not keep a processor busy.
	Rest time.Duration
}

// Then adds a later receipt to this one.
func (r Receipt) Then(o Receipt) Receipt {
	r.Full, r.Adopted, r.Left = r.Full || o.Full, r.Adopted && o.Adopted, o.Left
	r.Repaired, r.Refused = r.Repaired || o.Repaired, o.Refused
	r.Counted = cmp.Or(o.Counted, r.Counted)
	r.Added += o.Added
	r.Replaced += o.Replaced
	r.Removed += o.Removed
	r.Messages += o.Messages
	r.Bytes += o.Bytes
	r.Plan += o.Plan
	r.Encode += o.Encode
	r.Commit += o.Commit
	r.Rest = max(r.Rest, o.Rest)
	return r
}
