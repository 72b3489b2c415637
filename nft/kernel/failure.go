package kernel

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/netlink"
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
		"the table %s %s belongs to another process, that has netlink port %d (usually its pid): stop it first, or wait for it if it is about to be restarted",
		e.Family.NFT(),
		nft.TableName,
		e.Port,
	)
}

// failed decides what to do about a transaction that failed: nil means to try again at once.
func (b *Backend) failed(txn *nft.Txn, err error) error {
	var large *netlink.TooLarge
	if errors.As(err, &large) {
		b.model.Rollback(txn)
		shrunkBefore := b.maxElements > 0
		if !b.shrink(large) {
			return err
		}
		if shrunkBefore &&
			b.syncState != stateInSync { // what is wrong cannot be mended at once: everything is made anew, a little at a time
			b.syncState = stateUnfixable
		}
		return nil
	}
	var r *rejected
	if !errors.As(err, &r) {
		return b.resolveUnknownOutcome(txn, err)
	}
	switch {
	case r.any(unix.EPERM):
		b.model.Rollback(txn)
		return b.ownerError(err)
	case r.all(unix.ERESTART, unix.EAGAIN, unix.EINTR):
		b.model.Rollback(txn)
		return nil
	case r.any(unix.ENOMEM): // which is nobody's fault
		b.model.Rollback(txn)
		return err
	case !b.noOtherWriter(), txn.Tables[0].Create == nil && b.isFirstEEXIST(err): // perhaps the kernel does not hold what we think
		b.listAll = b.listAll || b.isFirstEEXIST(err)
		b.model.Rollback(txn)
		if b.syncState == stateInSync {
			b.syncState = stateStale
		}
		return nil
	}
	services := b.blameServices(txn)
	b.model.Rollback(txn)
	switch {
	case len(services) > 0:
		return fmt.Errorf("nft: %w", &dataplane.Refused{Services: services})
	case b.syncState != stateUnfixable && txn.Tables[0].Create == nil:
		b.syncState = stateUnfixable
		return nil
	}
	return err
}

// isFirstEEXIST says whether a transaction failed for the first time because something is where an element of ours has to go:
// others may have put it there before we looked, or a process that was stopped midway, and no one has listed all
// there is.
func (b *Backend) isFirstEEXIST(err error) bool {
	var r *rejected
	return !b.listAll && errors.As(err, &r) && r.any(unix.EEXIST)
}

// noOtherWriter says whether nobody else wrote to nf_tables since we know what is there.
func (b *Backend) noOtherWriter() bool {
	generation, err := b.reader.Generation()
	return err == nil && generation == b.generation
}

// resolveUnknownOutcome deals with a transaction of which nobody knows whether it is in: it could not be sent as a whole, or its
// answers got lost. The revision in the tables tells.
func (b *Backend) resolveUnknownOutcome(txn *nft.Txn, err error) error {
	if rerr := b.reopenSockets(); rerr != nil {
		b.syncState = min(b.syncState, stateStale)
		b.model.Rollback(txn)
		return errors.Join(err, rerr)
	}
	for i, f := range ipfamily.All {
		if len(txn.Tables[i].Add[nft.RevisionSet]) == 0 {
			continue
		}
		revision, rerr := b.revision(f)
		if rerr == nil && revision == b.model.Revision(f) {
			continue
		}
		b.syncState = min(b.syncState, stateStale)
		b.model.Rollback(txn)
		return errors.Join(err, rerr)
	}
	// It is in, and the model says so: there is nothing more to do but to see to it that all of that is true, and to
	// write what it had no room for.
	b.syncState, b.pending = stateStale, mergeChange(txn.Left, b.pending)
	b.filling = (b.filling || txn.Tables[0].Create != nil) && len(txn.Left.Services) > 0
	return nil
}

// revision reads what a table says of itself.
func (b *Backend) revision(f ipfamily.Family) (nft.Revision, error) {
	listed, err := b.reader.Elements(f, nft.RevisionSet)
	elements := make([]nft.Element, len(listed))
	for i := range listed {
		elements[i] = listed[i].Element
	}
	return nft.RevisionOf(elements), err
}

// reopenSockets opens those sockets anew that an error has left of no use.
func (b *Backend) reopenSockets() error {
	for _, c := range []struct {
		conn **Conn
		open func() (*Conn, error)
	}{{&b.reader, b.openReader}, {&b.sweeper, b.openReader}, {&b.conn, b.openWriter}} {
		if (*c.conn).Fresh() == nil {
			continue
		}
		if c.conn == &b.conn { // it may have owned the tables
			b.generation = 0
		}
		(*c.conn).Close() // it may be closed already
		fresh, err := c.open()
		if err != nil {
			return err
		}
		*c.conn = fresh
	}
	return nil
}

// ownerError turns EPERM into who owns the table, if that is why.
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

// notServiceErrors are the error numbers of refusals that say nothing of an element: no memory, no room in a set, another
// owner of the table, and that the kernel wants to be asked again.
var notServiceErrors = []unix.Errno{unix.ENOMEM, unix.ENFILE, unix.EPERM, unix.ERESTART, unix.EAGAIN, unix.EINTR}

// blameServices finds the Services whose elements of a transaction the kernel does not take. It gives none if anything but
// elements of Services is refused: then they are not to blame.
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

// objection is what the kernel has against an element.
type objection struct {
	family  ipfamily.Family
	element nft.Element
	why     error
}

// objections asks the kernel which elements of a transaction it would refuse, each of what is added in a message of
// its own: kernels before 6.1 do not say which of several they refuse. If that is more than this process may send, a
// part of the elements is asked for at a time, always with all the rest of the transaction. It is not ok if that did
// not work out, or something else is refused.
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

// part gives a step without those of its new elements that are not among some of them, counted through all sets.
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

// trial asks the kernel what it would refuse, by a batch that is never finished: it says of each message what it
// thinks of it, and then throws all of it away.
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
