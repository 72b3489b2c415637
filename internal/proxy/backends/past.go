package backends

import (
	"fmt"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// Past is what a ledger knows of one moment.
type Past struct {
	// Inspector answers from what the kernel held.
	reconcile.Inspector
	// Last is the last record up to then, and Next the first one after it; nil if there is none.
	Last, Next *ledger.Record
	// Write writes what the kernel held into the network namespace of the calling thread, which must hold no tables.
	// Without is the device whose tables at the ingress are not written, since there is none of that name here.
	Write func() (without string, err error)
	// Held has a line for each table, with its digest.
	Held []string
}

// OpenPast opens what the kernel of a node held at a time. The error is a *ledger.Unknown if its ledger does not know.
func OpenPast(dir string, at time.Time) (*Past, error) {
	m, err := ledger.At(dir, at, func() ledger.State { return &kernel.Replay{} })
	if err != nil {
		return nil, err
	}
	held := m.State.(*kernel.Replay)
	lines, err := held.Summary()
	if err != nil {
		return nil, fmt.Errorf("record %d: %w", m.Last.Number, err)
	}
	return &Past{Inspector: kernel.Replayed{Replay: held}, Last: m.Last, Next: m.Next, Write: held.Write, Held: lines}, nil
}

// Written says what a record of a ledger has written, a line for each element.
func Written(r *ledger.Record) ([]string, error) {
	batch, err := r.Unpack()
	if err != nil {
		return nil, err
	}
	return kernel.Lines(batch)
}

// ServicesIn returns the Services, NAMESPACE/NAME, that a batch of a ledger names.
func ServicesIn(batch []byte) []string { return kernel.ServicesIn(batch) }
