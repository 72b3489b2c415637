package ledger

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Moment is what the kernel held at a time, as far as a ledger knows.
type Moment struct {
	State State
	// Last is the last record up to that time, and Next the first one after it; nil if there is none.
	Last, Next *Record
}

// Unknown is the error of a time of which a ledger does not know what the kernel held.
type Unknown struct {
	At time.Time
	// Why says what is missing.
	Why string
	// Ranges are the times of which the ledger knows, the oldest first.
	Ranges []Range
}

// Range is a time from one moment to another.
type Range struct{ From, To time.Time }

// maxRanges bounds the ranges that an error names.
const maxRanges = 5

func (u *Unknown) Error() string {
	const layout = "2006-01-02 15:04:05"
	text := fmt.Sprintf("the ledger does not know what the kernel held at %s: %s", u.At.Local().Format(layout), u.Why)
	if len(u.Ranges) == 0 {
		return text
	}
	var known []string
	for _, r := range u.Ranges[max(0, len(u.Ranges)-maxRanges):] {
		known = append(known, r.From.Local().Format(layout)+" to "+r.To.Local().Format(layout))
	}
	return text + "; it knows " + strings.Join(known, ", and ")
}

// errNoBatches says that a backend's records do not say what was written.
var errNoBatches = errors.New("its records have no batches: only the backend nftables tells what it writes")

// At returns what the kernel held at a time. Make returns an empty State. The error is an *Unknown if the ledger does
// not know.
func At(dir string, at time.Time, make func() State) (*Moment, error) {
	// Each segment begins with a checkpoint, unless there was none to be had.
	m, _, err := replayTo(dir, at, at, make)
	if unknown := (*Unknown)(nil); errors.As(err, &unknown) {
		m, unknown.Ranges, err = replayTo(dir, time.Time{}, at, make)
	}
	return m, err
}

// replayTo replays the records from the segment that holds a time. It returns the ranges of which they know, up to the
// end if at is not known, or up to at.
func replayTo(dir string, since, at time.Time, make func() State) (*Moment, []Range, error) {
	r, err := Open(dir, since)
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	p, m := NewReplay(make), &Moment{}
	unknown := &Unknown{At: at}
	for {
		record, err := r.Next()
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, nil, err
		}
		// What was read from the kernel may stand before records that were waiting then, and are part of it.
		if record != nil && record.Kind == Checkpoint && record.At.After(at) && unknown.Why == "" {
			continue
		}
		if unknown.Why == "" && (record == nil || record.At.After(at)) {
			m.Next = record
			switch {
			case p.Known():
				m.State = p.State()
				return m, nil, nil
			case m.Last == nil:
				unknown.Why = "it begins later"
			default:
				unknown.Why = p.Why()
			}
		}
		if record == nil {
			break
		}
		if record.Kind == Start && record.Backend != "" && record.Backend != "nftables" {
			unknown.Why = errNoBatches.Error()
		}
		m.Last = record
		if len(r.Breaks()) > 0 {
			p.Forget("the chain is broken at " + r.Breaks()[len(r.Breaks())-1].String())
			r.breaks = nil
		}
		p.Add(record)
		unknown.extend(p, record.At)
	}
	return nil, unknown.Ranges, unknown
}

// extend adds the time of a record to the ranges, if its state is known.
func (u *Unknown) extend(p *Replay, at time.Time) {
	n := len(u.Ranges)
	switch {
	case !p.Known():
	case n > 0 && u.Ranges[n-1].From.Equal(p.Since()):
		u.Ranges[n-1].To = at
	default:
		u.Ranges = append(u.Ranges, Range{p.Since(), at})
	}
}

// Concerns reports whether a record is about a Service, NAMESPACE/NAME. Names says which Services the batch of a record
// names; it is asked if the record has left out some.
func (r *Record) Concerns(service string, names func(batch []byte) []string) bool {
	of := func(o Object) bool { return o.Service == service || o.Name == service && o.Kind != "EndpointSlice" }
	if slices.Contains(r.Services, service) || slices.ContainsFunc(r.Objects, of) {
		return true
	}
	if r.MoreServices == 0 || names == nil {
		return false
	}
	batch, err := r.Unpack()
	return err == nil && slices.Contains(names(batch), service)
}

// Around returns the last Change up to a record that wrote something of a Service, and the first one after it; nil
// where there is none. Names is that of Record.Concerns.
func Around(dir string, number uint64, service string, names func(batch []byte) []string) (before, after *Record,
	err error) {
	r, err := Open(dir, time.Time{})
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	for {
		record, err := r.Next()
		switch {
		case errors.Is(err, io.EOF):
			return before, nil, nil
		case err != nil:
			return nil, nil, err
		case record.Kind != Change, record.Added+record.Replaced+record.Removed == 0, !record.Concerns(service, names):
		case record.Number > number:
			return before, record, nil
		default:
			before = record
		}
	}
}
