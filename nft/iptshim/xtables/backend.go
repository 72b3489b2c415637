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

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Options say how a Backend works.
type Options struct {
	// Model says what the rules are like.
	Model iptshim.Options
	Log   *slog.Logger
}

// Backend keeps the rules of iptables in one network namespace equal to a dataplane.State. Rules that have kube-proxy's
// names are taken over in place. It is not safe for concurrent use.
type Backend struct {
	options  Options
	programs *Programs
	watch    *watch
	ctx      context.Context
	cancel   context.CancelFunc

	model *iptshim.Model
	state syncState
	// pending is what of past changes is not in the kernel, since a transaction failed.
	pending dataplane.Change
	// want is what the kernel holds, if that is certain. It is the caller's, and holds until the next Apply. Held are the
	// Services that it was certain to hold last; nil if it never was.
	want *dataplane.State
	held map[snapshot.Name]*dataplane.Service
	// seen is what the watch saw after the last transaction, or look, and moved says that it saw others write while all
	// was read.
	seen          fingerprint
	foreignWrites bool
	drift         driftCheck
	// affinityWarned says that it was said how many clients can be remembered.
	affinityWarned bool
}

// state is how far the model can be believed to be what the kernel holds.
type syncState uint8

const (
	// unknown: nothing is known of the tables, which a former process or a kube-proxy may have left.
	unknown syncState = iota
	// stale: others may have changed them, or a transaction may be in by half. They are read back before the next one.
	stale
	// inSync: they are what the model says.
	inSync
)

// Open gives a backend that writes by some programs, which it closes in the end. It has to be called in their network
// namespace. Nothing is written before the first Apply.
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

// Programs gives the programs it writes by.
func (b *Backend) Programs() *Programs { return b.programs }

// Close ends what is under way. What was written stays.
func (b *Backend) Close() error {
	b.cancel()
	b.drift.wait()
	return errors.Join(b.watch.close(), b.programs.Close())
}

// Apply takes the kernel to a state, with one call of iptables-restore for each family that changes. What a former
// process left is adopted if it is the same, and corrected otherwise.
//
// A call is a transaction for each table in it. So after an error the kernel may hold some of the new rules; the next
// Apply reads back what it holds. The error is a *dataplane.Refused if the kernel takes everything but what some
// Services ask for.
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
		}
		if failed == nil {
			if begin != inSync {
				freeMemory(want)
			}
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

// refuseTooLarge refuses Services that would have too many rules, before anything is made of them.
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

// checkForeignWrites looks whether others have written since the last look. Changes right after one another may leave no time to
// inspect what they did beside the loop; then it is read back before the next transaction, which would else not fit or
// hide it.
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

// markInSync takes note that the kernel holds a state, after so many tables were written.
func (b *Backend) markInSync(want *dataplane.State, tables int) error {
	i := &b.drift
	before := b.seen
	seen, err := b.watch.fingerprint(b.served())
	if err != nil {
		return err
	}
	if b.state != inSync { // all was read
		i.suspect = b.foreignWrites
	}
	if b.programs.Variant == NFT && seen.generation != before.generation+uint32(tables) {
		i.suspect = true // somebody else wrote in between
	}
	b.recordHeld(want)
	b.state, b.pending, b.want, b.seen = inSync, dataplane.Change{}, want, seen
	return nil
}

// manyServices is how many Services make texts and tables so large that the memory which they took is given back at once.
const manyServices = 1000

// freeMemory is called when all rules were read or written: with 10,000 Services that leaves some 250 MB that nothing
// needs any more, and the runtime would keep most of it for minutes.
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

// recordHeld remembers the Services of a state. What is missed names those that may differ from the state before.
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

// readBack has the model believe what the kernel holds.
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

// write writes a transaction, says in a receipt what it does, and gives the number of tables it wrote to.
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

// defaultRecentLimit is how many clients the kernel's xt_recent remembers in each list unless it is told otherwise.
const defaultRecentLimit = 100

// warnAffinityLimit says once how many clients can be remembered, if that is as few as the kernel has it.
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
		b.options.Log.Warn("Services with session affinity: each endpoint remembers only its last clients (docs/IPTABLES.md says how it remembers more)",
			"clients", most)
	}
}

// refusedServices finds the Services to which belongs what was refused of a transaction. If the lines do not tell, as they do not
// where the legacy variant's kernel refuses a whole table, the Services are written in portions until those are alone
// that are refused.
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

// maxBisectSteps is how many transactions a search for Services that are refused may take.
const maxBisectSteps = 64

// bisect writes a state with more and more Services, and gives those without which it is taken. It begins with what the
// kernel held of them. If that is not known, since a former process wrote it, those that are still to come have no
// rules for that moment. After an error nobody is named, and nobody either if all are refused: then it is no Service's
// fault.
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

// bisection is a search on its way.
type bisection struct {
	*Backend
	want    *dataplane.State
	part    dataplane.State
	refused map[snapshot.Name]error
	steps   int
}

// try writes what is in the part. What a step that failed has left is read back, since one of its tables may be in.
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

// addServices adds Services, all at once or if that is refused in halves.
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

// Remove takes everything of ours out of the kernel.
func (b *Backend) Remove() error {
	b.model, b.state, b.pending, b.want, b.held = iptshim.New(b.options.Model), unknown, dataplane.Change{}, nil, nil
	b.drift.invalidate()
	return b.programs.remove(b.ctx)
}
