package ledger

import (
	"fmt"
	"slices"
	"time"
)

// Replay computes what the kernel held from the records of a ledger. Make one with NewReplay.
type Replay struct {
	make  func() State
	state State
	known bool
	// why says why the state is not known.
	why string
	// since is since when the state is known.
	since time.Time
}

// NewReplay returns a Replay that knows nothing; make returns an empty State.
func NewReplay(make func() State) *Replay {
	return &Replay{make: make, state: make(), why: "the ledger holds no checkpoint before"}
}

// Known reports whether the state is known.
func (p *Replay) Known() bool { return p.known }

// Since returns since when the state has been known without a gap.
func (p *Replay) Since() time.Time { return p.since }

// Why says why the state is not known.
func (p *Replay) Why() string { return p.why }

// State returns the state after the last record. It means nothing unless it is Known.
func (p *Replay) State() State { return p.state }

// Forget says that records are missing here.
func (p *Replay) Forget(why string) { p.known, p.why = false, why }

// Add applies a record.
func (p *Replay) Add(r *Record) {
	switch r.Kind {
	case Lost:
		p.Forget(fmt.Sprintf("%d records are missing at %s", r.Missing, r.At.Format(time.RFC3339)))
		return
	case Start:
		if !r.Continues {
			p.Forget(fmt.Sprintf("the kernel held something else when Verdict started at %s", r.At.Format(time.RFC3339)))
		}
		return
	}
	batch, err := r.Unpack()
	switch {
	case err != nil:
		p.Forget(err.Error())
		return
	case len(batch) == 0 && r.Bytes > 0:
		p.Forget(fmt.Sprintf("record %d: %s", r.Number, r.Error))
		return
	case len(batch) == 0:
		return
	}
	if r.Kind == Checkpoint {
		p.state = p.make()
	}
	whole, err := p.state.Apply(batch)
	repair := slices.Contains(r.Why, whyRepair)
	switch {
	case whole:
		if !p.known {
			p.since = r.At
		}
		p.known = true
	case err != nil && !repair:
		p.Forget(fmt.Sprintf("record %d: %v", r.Number, err))
	case p.known && repair && !p.state.Consistent():
		p.Forget(fmt.Sprintf("record %d repaired what others had changed, which is in no record", r.Number))
	}
}
