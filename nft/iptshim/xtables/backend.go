package xtables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Options configure a Backend.
type Options struct {
	// Model says how the rules are written.
	Model iptshim.Options
	Log   *slog.Logger
}

// Backend keeps the iptables rules of one network namespace in sync with a dataplane.State. It takes over rules with
// kube-proxy's names in place. It is not safe for concurrent use.
type Backend struct {
	options  Options
	programs *Programs
	watch    *watch
	ctx      context.Context
	cancel   context.CancelFunc

	model *iptshim.Model
	state syncState
	// pending is what past changes have not written, because a transaction failed.
	pending dataplane.Change
	// want is what the kernel holds while in sync. It belongs to the caller, and is valid until the next Apply. held are
	// the Services that the kernel held when it was last in sync; nil if it never was.
	want *dataplane.State
	held map[snapshot.Name]*dataplane.Service
	// seen is the watch's fingerprint after the last transaction or read. foreignWrites says that it changed while all
	// tables were read.
	seen          fingerprint
	foreignWrites bool
	drift         driftCheck
	// rested is when the rest after the last write ends.
	rested time.Time
	// affinityWarned says that the limit of remembered clients was logged.
	affinityWarned bool
}

// syncState is how far the model can be believed to be what the kernel holds.
type syncState uint8

const (
	// unknown: the tables have not been read. An earlier process or kube-proxy may have written to them.
	unknown syncState = iota
	// stale: others may have changed the tables, or a transaction may be half written. They are read back before the next
	// transaction.
	stale
	// inSync: the tables hold what the model says.
	inSync
)

// Open returns a backend that writes with these programs, and closes them at the end. Call it in their network
// namespace. It writes nothing before the first Apply.
func Open(p *Programs, o Options) (*Backend, error) {
	w, err := openWatch(p.Variant)
	if err != nil {
		return nil, err
	}
	if p.Variant == NFT {
		o.Model.Step = iptshim.StepNFT
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Backend{options: o, programs: p, watch: w, ctx: ctx, cancel: cancel, model: iptshim.New(o.Model)}, nil
}

// Programs returns the programs with which it writes.
func (b *Backend) Programs() *Programs { return b.programs }

// Close stops what is in progress. What was written stays.
func (b *Backend) Close() error {
	b.cancel()
	b.drift.wait()
	return errors.Join(b.watch.close(), b.programs.Close())
}

// Apply programs a state, with one call of iptables-restore for each family that changes. It adopts what an earlier
// process left if that is in sync, and repairs it otherwise.
//
// A call is one transaction for each table. After an error the kernel may therefore hold some of the new rules; the
// next Apply reads back what it holds. The error is a *dataplane.Refused if the kernel rejects only what some Services
// need.
func (b *Backend) Apply(want *dataplane.State, change dataplane.Change) (r dataplane.Receipt, err error) {
	b.pending = b.pending.With(change)
	if err := b.refuseTooLarge(want); err != nil {
		return r, err
	}
	if err := b.checkForeignWrites(); err != nil {
		return r, err
	}
	for last := b.state != inSync; ; last = true {
		begin := b.state
		if begin != inSync {
			if err := b.readBack(); err != nil {
				return r, err
			}
		}
		start := time.Now()
		txn := b.model.Plan(want, b.pending)
		r.Plan += time.Since(start)
		tables, failed := 0, error(nil)
		if txn.Empty() {
			r.Adopted = begin == unknown
		} else {
			tables, failed = b.write(txn, &r)
			r.Repaired = begin == stale
		}
		if failed == nil {
			if begin != inSync {
				freeMemory(want)
			}
			r.Rest = b.rest(time.Now(), r.Commit)
			return r, b.markInSync(want, tables)
		}
		b.model.Revert(txn)
		b.state = stale
		var refused *RestoreError
		switch {
		case !errors.As(failed, &refused):
			return r, failed
		case last: // else it may be others' doing that the text did not fit
			return r, b.refusedServices(want, txn, refused)
		}
	}
}

// refuseTooLarge rejects Services that would have too many rules, before it compiles them.
func (b *Backend) refuseTooLarge(want *dataplane.State) error {
	refused := map[snapshot.Name]error{}
	check := func(n snapshot.Name, svc *dataplane.Service) {
		if err := iptshim.Check(svc); err != nil {
			refused[n] = err
		}
	}
	if b.state != inSync || b.pending.Globals {
		for n, svc := range want.Services {
			check(n, svc)
		}
	} else {
		for _, n := range b.pending.Services {
			check(n, want.Services[n])
		}
	}
	if len(refused) == 0 {
		return nil
	}
	return fmt.Errorf("iptables: %w", &dataplane.Refused{Services: refused})
}

// checkForeignWrites checks whether others have written since the last look. With many changes in a row there may be no
// time to read the tables beside the loop. They are then read back before the next transaction, which otherwise might
// fail or hide what others wrote.
func (b *Backend) checkForeignWrites() error {
	if b.state != inSync {
		return nil
	}
	seen, err := b.watch.fingerprint(b.served())
	if err != nil {
		return err
	}
	i := &b.drift
	i.suspect = i.suspect || seen != b.seen
	if b.seen = seen; i.suspect && time.Now().After(i.next) {
		b.state = stale
	}
	return nil
}

// markInSync records that the kernel holds a state, after this many tables were written.
func (b *Backend) markInSync(want *dataplane.State, tables int) error {
	i := &b.drift
	before := b.seen
	seen, err := b.watch.fingerprint(b.served())
	if err != nil {
		return err
	}
	if b.state != inSync { // all was read
		i.suspect = b.foreignWrites
		i.rest() // to write all may have taken longer than the interval, and a check takes much memory
	}
	if b.programs.Variant == NFT && seen.generation != before.generation+uint32(tables) {
		i.suspect = true // somebody else wrote in between
	}
	b.recordHeld(want)
	b.state, b.pending, b.want, b.seen = inSync, dataplane.Change{}, want, seen
	return nil
}

// A write costs about the same for one change as for a hundred: its price is the size of all tables. So the backend
// rests after it for paceFactor times as long as it took, up to maxPace, which is kube-proxy's minSyncPeriod. With
// the largest tables, where a write takes more than that, it rests for half as long as the write took.
const (
	paceFactor = 8
	maxPace    = time.Second
	// longestPace bounds the rest after a write that took very long, as the first one of many Services.
	longestPace = 3 * time.Second
)

// restAfter returns how long to rest after a write.
func restAfter(took time.Duration) time.Duration {
	return min(max(min(paceFactor*took, maxPace), took/2), longestPace)
}

// rest returns how long to rest from now on, after a write that took so long. A rest that passed unused before it
// counts for this one: after quiet a Service and its endpoints, which come one after the other, are both written at
// once.
func (b *Backend) rest(now time.Time, took time.Duration) time.Duration {
	if took == 0 {
		return 0
	}
	rest := restAfter(took)
	if quiet := now.Add(-took - rest); b.rested.Before(quiet) {
		b.rested = quiet
	}
	b.rested = b.rested.Add(took + rest)
	return max(b.rested.Sub(now), 0)
}

// manyServices is how many Services make texts and tables so large that their memory is freed at once.
const manyServices = 1000

// freeMemory returns memory to the system after all rules were read or written. With 10,000 Services some 250 MB are
// unused then, and the runtime would keep most of them for minutes.
func freeMemory(want *dataplane.State) {
	if len(want.Services) >= manyServices {
		go debug.FreeOSMemory()
	}
}

func (b *Backend) served() (served ipfamily.Per[bool]) {
	for _, f := range ipfamily.All {
		served[f] = b.programs.Serves(f)
	}
	return served
}

// recordHeld records the Services of a state. pending names those that may differ from the last state.
func (b *Backend) recordHeld(want *dataplane.State) {
	if b.held == nil || b.pending.Globals {
		b.held = maps.Clone(want.Services)
		return
	}
	for _, n := range b.pending.Services {
		if delete(b.held, n); want.Services[n] != nil {
			b.held[n] = want.Services[n]
		}
	}
}

// readBack reads the model from the kernel.
func (b *Backend) readBack() error {
	start := time.Now()
	model := iptshim.New(b.options.Model)
	seen, err := b.watch.fingerprint(b.served())
	if err != nil {
		return err
	}
	for _, f := range ipfamily.All {
		if !b.programs.Serves(f) {
			continue
		}
		saved, err := b.programs.SaveAll(b.ctx, f)
		if err != nil {
			return err
		}
		model.Adopt(f, saved)
	}
	after, err := b.watch.fingerprint(b.served())
	if err != nil {
		return err
	}
	b.model, b.seen, b.foreignWrites = model, seen, after != seen
	b.drift.recordRead(time.Since(start))
	return nil
}

// write writes a transaction, fills in the receipt, and returns the number of tables written.
func (b *Backend) write(txn *iptshim.Txn, r *dataplane.Receipt) (tables int, err error) {
	start := time.Now()
	chains, deleted, rules := txn.Counts()
	r.Full, r.Added, r.Replaced, r.Removed = b.state == unknown, rules, chains, deleted
	var texts ipfamily.Per[[]byte]
	for _, f := range ipfamily.All {
		if b.programs.Serves(f) {
			texts[f] = txn.Text(f)
			b.warnAffinityLimit(texts[f])
		}
	}
	r.Encode += time.Since(start)
	b.drift.invalidate()
	start = time.Now()
	defer func() { r.Commit += time.Since(start) }()
	for _, f := range ipfamily.All {
		if len(texts[f]) == 0 {
			continue
		}
		r.Messages, r.Bytes = r.Messages+1, r.Bytes+len(texts[f])
		tables += bytes.Count(texts[f], []byte("\nCOMMIT\n"))
		if err := b.programs.Restore(b.ctx, f, texts[f]); err != nil {
			return tables, err
		}
	}
	return tables, nil
}

// defaultRecentLimit is how many clients xt_recent remembers in each list by default.
const defaultRecentLimit = 100

// warnAffinityLimit logs once how many clients can be remembered, if that is the kernel's low default.
func (b *Backend) warnAffinityLimit(text []byte) {
	if b.affinityWarned || !bytes.Contains(text, []byte(" -m recent ")) {
		return
	}
	b.affinityWarned = true
	most := defaultRecentLimit
	if said, err := os.ReadFile("/sys/module/xt_recent/parameters/ip_list_tot"); err == nil {
		most, _ = strconv.Atoi(strings.TrimSpace(string(said)))
	}
	if most <= defaultRecentLimit {
		b.options.Log.Warn("session affinity: iptables remembers a limited number of clients for each endpoint "+
			"(docs/IPTABLES.md says how it remembers more)",
			"clients", most)
	}
}

// refusedServices finds the Services whose rules were rejected. If the lines do not tell, as when the legacy variant's
// kernel rejects a whole table, it writes the Services in parts until the rejected ones are alone.
func (b *Backend) refusedServices(want *dataplane.State, txn *iptshim.Txn, refused *RestoreError) error {
	names := map[snapshot.Name]error{}
	for _, line := range refused.Lines {
		for _, n := range txn.OwnersOfLine(refused.Family, line) {
			names[n] = refused
		}
	}
	if len(names) == 0 {
		var err error
		if names, err = b.bisect(want); err != nil {
			return errors.Join(refused, err)
		}
	}
	if len(names) == 0 {
		return refused
	}
	return fmt.Errorf("%s iptables: %w", refused.Family, &dataplane.Refused{Services: names})
}

// maxBisectSteps bounds how many transactions the search for rejected Services may take.
const maxBisectSteps = 64

// bisect writes a state with more and more Services, and returns those without which it succeeds. It begins with the
// Services that the kernel held. If these are unknown, because an earlier process wrote them, Services have no rules
// until their turn comes. It names no Service after an error, nor if all are rejected: then no Service is the cause.
func (b *Backend) bisect(want *dataplane.State) (map[snapshot.Name]error, error) {
	s := bisection{Backend: b, want: want, part: *want, refused: map[snapshot.Name]error{}}
	s.part.Services = map[snapshot.Name]*dataplane.Service{}
	var names []snapshot.Name
	for n, svc := range want.Services {
		if was := b.held[n]; was != nil {
			s.part.Services[n] = was
		}
		if svc != s.part.Services[n] {
			names = append(names, n)
		}
	}
	if err := b.readBack(); err != nil {
		return nil, err
	}
	if len(b.held) > 0 {
		if err := s.try(); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	if err := s.addServices(names); err != nil {
		return nil, err
	}
	if len(s.refused) == len(want.Services) {
		return nil, nil
	}
	return s.refused, nil
}

// bisection is the state of one bisect.
type bisection struct {
	*Backend
	want    *dataplane.State
	part    dataplane.State
	refused map[snapshot.Name]error
	steps   int
}

// try writes the part. After a failure it reads back the tables, since one of them may be written.
func (s *bisection) try() error {
	s.steps++
	txn := s.model.Plan(&s.part, dataplane.Change{Globals: true})
	var r dataplane.Receipt
	_, err := s.write(txn, &r)
	if err != nil {
		s.model.Revert(txn)
		err = errors.Join(err, s.readBack())
	}
	return err
}

// addServices adds Services, all at once or, if they are rejected, in halves.
func (s *bisection) addServices(names []snapshot.Name) error {
	if len(names) == 0 {
		return nil
	}
	for _, n := range names {
		s.part.Services[n] = s.want.Services[n]
	}
	err := s.try()
	var refused *RestoreError
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &refused):
		return err
	}
	for _, n := range names {
		if delete(s.part.Services, n); s.held[n] != nil {
			s.part.Services[n] = s.held[n]
		}
	}
	if len(names) == 1 || s.steps >= maxBisectSteps {
		for _, n := range names {
			s.refused[n] = refused
		}
		return nil
	}
	half := len(names) / 2
	if err := s.addServices(names[:half]); err != nil {
		return err
	}
	return s.addServices(names[half:])
}

// Remove deletes everything of ours from the kernel.
func (b *Backend) Remove() error {
	b.model, b.state, b.pending, b.want, b.held = iptshim.New(b.options.Model), unknown, dataplane.Change{}, nil, nil
	b.drift.invalidate()
	return b.programs.remove(b.ctx)
}
