package xtables

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// To find what others changed, all tables must be read, which takes a second or more with many rules. So they are read
// beside the loop: at once if the watch reports a possible change, otherwise periodically, and never for more than a
// part of the time.
const (
	// driftInterval is the time between two checks if the watch saw no change.
	driftInterval = time.Minute
	// driftPauseFactor is the pause after a check, as a multiple of its duration.
	driftPauseFactor = 10
	// driftPoll is when Check asks to be called again while a check runs.
	driftPoll = 20 * time.Millisecond
	// maxWastedChecks is how many checks in a row may be wasted because we wrote meanwhile. After that, a transaction
	// waits until all tables are read.
	maxWastedChecks = 10
)

// driftCheck is the reading of all tables beside the loop.
type driftCheck struct {
	// result receives what the running check found, and cancel stops it; nil if none runs.
	result chan driftResult
	cancel context.CancelFunc
	// outdated says that we wrote since the check began. wasted is how many checks in a row were lost to that.
	outdated bool
	wasted   int
	// suspect says that others have written, and the tables were not read since. suspectedBefore says that the running
	// check began because of that.
	suspect, suspectedBefore bool
	// lastDuration is how long it last took to read all tables. next is the earliest time of the next check, and due the
	// latest.
	lastDuration time.Duration
	next, due    time.Time
}

// driftResult is the result of a check: a model read from the tables.
type driftResult struct {
	model *iptshim.Model
	took  time.Duration
	err   error
}

// recordRead records that all tables were read, and how long it took.
func (i *driftCheck) recordRead(took time.Duration) {
	i.lastDuration, i.wasted = took, 0
	i.postpone()
	i.rest()
}

// rest lets the interval for which nothing calls for a check begin now.
func (i *driftCheck) rest() {
	i.due = time.Now().Add(max(driftInterval, driftPauseFactor*i.lastDuration))
}

// postpone delays the next check.
func (i *driftCheck) postpone() { i.next = time.Now().Add(driftPauseFactor * i.lastDuration) }

// invalidate stops a running check: its result would be neither the old nor the new state.
func (i *driftCheck) invalidate() {
	if i.outdated = true; i.cancel != nil {
		i.cancel()
	}
}

// wait waits for a running check.
func (i *driftCheck) wait() {
	if i.result != nil {
		<-i.result
	}
}

// Check reports in words what somebody else changed in our rules; the next Apply repairs it. It does not wait for slow
// reads, but asks to be called again.
func (b *Backend) Check() (found []string, again time.Duration, err error) {
	if b.state != inSync { // the next Apply will look
		return nil, 0, nil
	}
	i := &b.drift
	if i.result != nil {
		select {
		case r := <-i.result:
			i.cancel()
			i.result, i.cancel = nil, nil
			if found, err = b.evaluateDrift(&r); err != nil || len(found) > 0 {
				return found, 0, err
			}
		default:
			return nil, driftPoll, nil
		}
	}
	seen, err := b.watch.fingerprint(b.served())
	if err != nil {
		return nil, 0, err
	}
	i.suspect = i.suspect || seen != b.seen
	b.seen = seen
	if now := time.Now(); now.Before(i.next) || !i.suspect && now.Before(i.due) {
		return nil, 0, nil
	}
	b.startDriftCheck()
	return nil, driftPoll, nil
}

// startDriftCheck starts a check.
func (b *Backend) startDriftCheck() {
	i := &b.drift
	result := make(chan driftResult, 1)
	ctx, cancel := context.WithCancel(b.ctx)
	i.result, i.cancel, i.outdated, i.suspect, i.suspectedBefore = result, cancel, false, false, i.suspect
	go func() {
		start := time.Now()
		r := driftResult{model: iptshim.New(b.options.Model)}
		for _, f := range ipfamily.All {
			if r.err == nil && b.programs.Serves(f) {
				var saved *iptshim.Saved
				if saved, r.err = b.programs.SaveAll(ctx, f); r.err == nil && ctx.Err() == nil {
					r.model.Adopt(f, saved)
				}
			}
		}
		r.took = time.Since(start)
		result <- r
	}()
}

// evaluateDrift compares what a look found with what should be there.
func (b *Backend) evaluateDrift(r *driftResult) (found []string, err error) {
	i := &b.drift
	switch {
	case i.outdated: // nothing is known of what others did
		i.wasted++
		i.suspect = i.suspect || i.suspectedBefore || i.wasted > maxWastedChecks
		i.postpone()
		i.due = i.next
		return nil, nil
	case r.err != nil:
		i.suspect = true
		i.postpone()
		return nil, r.err
	}
	i.recordRead(r.took)
	if txn := r.model.Plan(b.want, dataplane.Change{}); !txn.Empty() {
		for _, f := range ipfamily.All {
			if b.programs.Serves(f) {
				found = append(found, driftMessages(f, txn.Text(f))...)
			}
		}
	}
	freeMemory(b.want)
	if len(found) > 0 {
		b.state = stale
	}
	return found, nil
}

// driftMessages says in words what a text would repair.
func driftMessages(f ipfamily.Family, text []byte) (found []string) {
	table := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		word, rest, _ := strings.Cut(line, " ")
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
		case strings.HasPrefix(line, ":"):
			found = append(found, fmt.Sprintf("%s %s: chain %s was changed", f, table, word[1:]))
		case word == "-I":
			found = append(found, fmt.Sprintf("%s %s: the rule %q is gone", f, table, rest))
		}
	}
	return found
}
