package kernel

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Owned says that a table of ours belongs to the socket of another process.
type Owned struct {
	Family ipfamily.Family
	// Port is the owner's netlink port: usually the pid of the process that opened the socket.
	Port uint32
}

func (e *Owned) Error() string {
	return fmt.Sprintf(
		"the table %s %s belongs to another process, that has netlink port %d (usually its pid): "+
			"stop it first, or wait for it if it is about to be restarted",
		e.Family.NFT(),
		nft.TableName,
		e.Port,
	)
}

// outcome is what follows from a transaction that failed.
type outcome uint8

const (
	// giveUp: the Apply ends with an error.
	giveUp outcome = iota
	// planAgain: what is known of the kernel still holds.
	planAgain
	// readBack: the kernel may not hold what the model says. The tables are read back before anything else is written.
	readBack
	// readAll is readBack with a list of all elements.
	readAll
	// rewrite: the tables are made anew.
	rewrite
	// wasCommitted: only the kernel's answer was lost.
	wasCommitted
)

// failed does what follows from a failed transaction. It returns nil if the caller should plan and try again at once.
func (b *Backend) failed(txn *nft.Txn, err error) error {
	what, err := b.judge(txn, err)
	if what != wasCommitted {
		b.model.Rollback(txn)
	}
	switch what {
	case giveUp:
		return err
	case readBack, readAll:
		b.listAll = b.listAll || what == readAll
		if b.syncState == stateInSync {
			b.syncState = stateStale
		}
	case rewrite:
		b.syncState = stateUnfixable
	case wasCommitted: // what remains is to read the tables back, and to write what had no room
		b.syncState, b.filling = stateStale, b.fillsAfter(txn)
		b.pending = mergeChange(txn.Left, b.pending)
	}
	return nil
}

// judge says what follows from a failed transaction, and with which error Apply ends if it gives up.
func (b *Backend) judge(txn *nft.Txn, err error) (outcome, error) {
	var large *netlink.TooLarge
	var r *rejected
	var half *halfway
	created := txn.Tables[0].Create != nil
	switch {
	case errors.As(err, &half):
		return readBack, nil
	case errors.As(err, &large):
		return b.shrink(large), err
	case !errors.As(err, &r):
		return b.lookAfter(txn, err)
	case r.any(unix.EPERM):
		return giveUp, b.ownerError(err)
	case !b.model.NoIngress && b.refusedIngress(r):
		// The device is gone, or the kernel lacks something: all else goes on without.
		b.model.NoIngress, b.pending.Globals, b.refusal = true, true, err
		return planAgain, nil
	case r.all(unix.ERESTART, unix.EAGAIN, unix.EINTR):
		return planAgain, nil
	case r.any(unix.ENOMEM): // no Service is the cause
		return giveUp, err
	case r.any(unix.EEXIST) && !created && !b.listAll:
		// Others may have put an element there before we read the tables, or a process that was stopped midway.
		return readAll, nil
	case !b.noOtherWriter():
		return readBack, nil
	}
	if services := b.blameServices(txn); len(services) > 0 {
		return giveUp, fmt.Errorf("nft: %w", &dataplane.Refused{Services: services})
	}
	if created || b.syncState == stateUnfixable {
		return giveUp, err
	}
	return rewrite, nil
}

// maxElementBytes is more than any element takes in a batch, its deletion included.
const maxElementBytes = 512

// shrink limits later transactions to a size that can be sent.
func (b *Backend) shrink(large *netlink.TooLarge) outcome {
	room, before := max(large.Room/maxElementBytes, 1), b.maxElements
	if before > 0 && room >= before {
		room = before / 2
	}
	if room == 0 {
		return giveUp
	}
	b.maxElements = room
	if before > 0 && b.syncState != stateInSync { // a correction cannot be split
		return rewrite
	}
	return planAgain
}

// halfway says that the first part of a transaction is committed and the second is not, and that the first could not be
// taken away again. Why is in the text alone: nothing follows from it before the tables are read back.
type halfway struct{ error }

// rejected is what the kernel rejected of a batch. Its text names the objects.
type rejected struct {
	error
	refused []netlink.Error
}

func (r *rejected) Unwrap() error { return r.error }

// all says whether every rejection has one of the given error numbers.
func (r *rejected) all(errnos ...unix.Errno) bool {
	return !slices.ContainsFunc(r.refused, func(e netlink.Error) bool { return !slices.Contains(errnos, e.Errno) })
}

func (r *rejected) any(errno unix.Errno) bool {
	return slices.ContainsFunc(r.refused, func(e netlink.Error) bool { return e.Errno == errno })
}

// noOtherWriter says whether nobody else has written to nf_tables since the tables were last known.
func (b *Backend) noOtherWriter() bool {
	generation, err := b.reader.Generation()
	return err == nil && generation == b.generation
}

// lookAfter judges a transaction that may or may not be committed: it could not be sent completely, or the answers were
// lost. The revision in the tables decides.
func (b *Backend) lookAfter(txn *nft.Txn, err error) (outcome, error) {
	b.syncState = min(b.syncState, stateStale)
	if rerr := b.openSockets(); rerr != nil {
		return giveUp, errors.Join(err, rerr)
	}
	for i, f := range ipfamily.All {
		if len(txn.Tables[i].Add[nft.RevisionSet]) == 0 {
			continue
		}
		switch revision, rerr := b.revision(f); {
		case rerr != nil:
			return giveUp, errors.Join(err, rerr)
		case revision == b.model.Revision(f):
			continue
		case b.holdsFirst(txn):
			return readBack, nil
		}
		return giveUp, err
	}
	return wasCommitted, nil
}

// holdsFirst says whether the kernel holds the first part of a transaction that has two.
func (b *Backend) holdsFirst(txn *nft.Txn) bool {
	first, _ := txn.Split()
	if first == nil {
		return false
	}
	for i, f := range ipfamily.All {
		for _, c := range first.Tables[i].AddChains {
			there := false
			err := b.reader.objects(f, unix.NFT_MSG_GETCHAIN, func(attrs netlink.Attributes) {
				there = there || attrs[unix.NFTA_CHAIN_NAME].Text() == c.ID.Name()
			})
			return err == nil && there // as is one, so are all
		}
	}
	return false
}

// revision reads the revision of a table.
func (b *Backend) revision(f ipfamily.Family) (nft.Revision, error) {
	listed, err := b.reader.Elements(f, nft.RevisionSet)
	elements := make([]nft.Element, len(listed))
	for i := range listed {
		elements[i] = listed[i].Element
	}
	return nft.RevisionOf(elements), err
}

// ownerError returns an error that names the table's owner, if that is the reason for EPERM.
func (b *Backend) ownerError(err error) error {
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	for _, f := range ipfamily.All {
		info, terr := b.reader.table(f)
		port, perr := b.conn.Wire.Port()
		if terr == nil && perr == nil && info.owner != 0 && info.owner != port {
			return &Owned{f, info.owner}
		}
	}
	return fmt.Errorf("%w (%w)", ErrRights, err)
}

// notServiceErrors are errors that say nothing about an element: no memory, no room in a set, another owner of the
// table, or a request to try again.
var notServiceErrors = []unix.Errno{unix.ENOMEM, unix.ENFILE, unix.EPERM, unix.ERESTART, unix.EAGAIN, unix.EINTR}

// blameServices finds the Services whose elements the kernel rejects. It returns none if the kernel rejects anything
// but elements of Services, because then they are not the cause.
func (b *Backend) blameServices(txn *nft.Txn) map[snapshot.Name]error {
	objections, ok := b.objections(txn)
	if !ok {
		return nil
	}
	var elements ipfamily.Per[[]nft.Element]
	var why ipfamily.Per[[]error]
	for _, o := range objections {
		i := slices.Index(ipfamily.All[:], o.family)
		elements[i], why[i] = append(elements[i], o.element), append(why[i], o.why)
	}
	out := map[snapshot.Name]error{}
	for i, askers := range b.model.OwnersOf(txn, &elements) {
		for n, names := range askers {
			if len(names) == 0 {
				return nil
			}
			for _, name := range names {
				if out[name] == nil {
					out[name] = why[i][n]
				}
			}
		}
	}
	return out
}

// objection is an element that the kernel rejects.
type objection struct {
	family  ipfamily.Family
	element nft.Element
	why     error
}

// objections asks the kernel which elements of a transaction it would reject. Each new element gets its own message,
// because kernels before 6.1 do not say which of several elements they reject. If that is more than this process may
// send at once, it asks for a part of the elements at a time, always with the rest of the transaction. ok is false if
// that fails, or if the kernel rejects something else.
func (b *Backend) objections(step *nft.Txn) (out []objection, ok bool) {
	added := 0
	for i := range step.Tables {
		for _, elements := range step.Tables[i].Add {
			added += len(elements)
		}
	}
	var large *netlink.TooLarge
	for size := added; size > 0; size = (size + 1) / 2 {
		var err error
		out, err = nil, nil
		for from := 0; from < added && err == nil; from += size {
			var some []objection
			some, err = b.trial(part(step, from, from+size))
			out = append(out, some...)
		}
		if err == nil || !errors.As(err, &large) || size == 1 {
			return out, err == nil
		}
	}
	return nil, false
}

// part returns the transaction with only some of its new elements: those from one index to another, counted through all
// sets.
func part(step *nft.Txn, from, to int) *nft.Txn {
	p := &nft.Txn{Tables: step.Tables}
	for i := range p.Tables {
		for set, elements := range p.Tables[i].Add {
			n := len(elements)
			p.Tables[i].Add[set] = elements[min(max(from, 0), n):min(max(to, 0), n)]
			from, to = from-n, to-n
		}
	}
	return p
}

// trial asks the kernel what it would reject, with a batch that is never finished. The kernel answers each message and
// then discards them all.
func (b *Backend) trial(step *nft.Txn) (out []objection, err error) {
	offer := &batch{unfinished: true, single: true, tableFlags: b.batch.tableFlags}
	refused, err := b.conn.Commit(offer.encode(step))
	if err != nil && !errors.Is(err, unix.ENOBUFS) { // there is only so much room for answers
		return nil, err
	}
	for _, r := range refused {
		f, e, ok := offer.elementOf(r)
		if !ok || slices.Contains(notServiceErrors, r.Errno) {
			return nil, fmt.Errorf("no element is to blame: %w", offer.refusalError(r))
		}
		out = append(out, objection{f, e, offer.refusalError(r)})
	}
	return out, nil
}
