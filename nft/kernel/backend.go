package kernel

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Backend keeps our tables in one network namespace equal to a dataplane.State. It is not safe for concurrent use.
type Backend struct {
	// Sent, if not nil, is given the batch of each transaction that took the kernel to a state, for Conn.Replay. The bytes hold
	// until the Backend is called again.
	Sent func(batch []byte)

	conn  *Conn
	model nft.Model
	batch batch
	// unforgotten is what the affinity maps may still name though a transaction took it away.
	unforgotten []nft.Forget
}

// NewBackend gives a backend that writes through a connection. Whatever tables of ours are there, its first transaction
// replaces them as a whole.
func NewBackend(c *Conn) *Backend { return &Backend{conn: c} }

// Apply takes the kernel to a state in one transaction. After an error the kernel holds what it held before, and the next
// call writes everything anew.
func (b *Backend) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	start := time.Now()
	txn := b.model.Plan(want, change)
	r := dataplane.Receipt{Plan: time.Since(start)}
	if txn.Empty() {
		return r, b.forget()
	}
	r.Full = txn.Tables[0].Create != nil
	r.Added, r.Replaced, r.Removed = txn.Counts()
	defer b.batch.trim()
	start = time.Now()
	bytes := b.batch.encode(txn)
	r.Encode, r.Bytes, r.Messages = time.Since(start), len(bytes), int(b.batch.seq)-1
	start = time.Now()
	err := b.commit(bytes)
	r.Commit = time.Since(start)
	if err != nil {
		b.model = nft.Model{}
		return r, err
	}
	if b.Sent != nil {
		b.Sent(bytes)
	}
	if r.Full { // the affinity maps are new, too
		b.unforgotten = nil
	}
	b.unforgotten = append(b.unforgotten, txn.Forget...)
	return r, b.forget()
}

// Remove deletes our tables. That they are not there is no error.
func (b *Backend) Remove() error {
	b.model, b.unforgotten = nft.Model{}, nil
	b.batch.reset()
	b.batch.notes = b.batch.notes[:0]
	b.batch.batch(unix.NFNL_MSG_BATCH_BEGIN)
	for _, f := range nft.Families {
		b.batch.end(b.batch.object(f, unix.NFT_MSG_NEWTABLE, flagsCreate, "add table"))
		b.batch.deleteTable(f)
	}
	b.batch.batch(unix.NFNL_MSG_BATCH_END)
	return b.commit(b.batch.b)
}

// List reads back what the kernel holds of our tables' elements and counters. The structure is what the model says.
func (b *Backend) List() ([len(nft.Families)]nft.Listing, error) {
	var out [len(nft.Families)]nft.Listing
	for i, f := range nft.Families {
		out[i].Table = b.model.Structure(f)
		if err := b.conn.ruleCounters(f, out[i].Table.Chains); err != nil {
			return out, err
		}
		for set := range nft.NumSets {
			elements, err := b.conn.Elements(f, set)
			if err != nil {
				return out, err
			}
			out[i].Elements[set] = elements
		}
	}
	return out, nil
}

// commit sends the batch's bytes and turns what was refused into an error that names the objects.
func (b *Backend) commit(bytes []byte) error {
	refused, err := b.conn.transact(bytes)
	if err != nil {
		return errors.Join(fmt.Errorf("nft: send transaction: %w", err), b.refusals(refused))
	}
	return b.refusals(refused)
}

// maxRefusals bounds the length of an error: when one object is refused, often all are.
const maxRefusals = 8

func (b *Backend) refusals(refused []refusal) error {
	var errs []error
	for i, r := range refused {
		if i == maxRefusals {
			errs = append(errs, fmt.Errorf("and %d more", len(refused)-i))
			break
		}
		errs = append(errs, b.batch.refusalError(r))
	}
	return errors.Join(errs...)
}

// forget deletes the affinity entries that transactions made wrong. What it could not do, the next call does.
func (b *Backend) forget() error {
	for _, f := range nft.Families {
		wrong := matcher(f, b.unforgotten)
		if wrong == nil {
			continue
		}
		entries, err := b.conn.Elements(f, nft.Affinity)
		if err != nil {
			return fmt.Errorf("session affinity: %w", err)
		}
		var gone []nft.Element
		for i := range entries {
			if wrong(&entries[i].Element) {
				gone = append(gone, entries[i].Element)
			}
		}
		if err := b.deleteAffinity(f, gone); err != nil {
			return fmt.Errorf("session affinity: %w", err)
		}
	}
	b.unforgotten = nil
	return nil
}

// matcher gives a function that says whether an entry is to be forgotten; nil if there is nothing to forget in a family.
func matcher(f nft.Family, list []nft.Forget) func(*nft.Element) bool {
	set := map[nft.Forget]bool{}
	for _, x := range list {
		if x.Family == f {
			set[x] = true
		}
	}
	if len(set) == 0 {
		return nil
	}
	return func(e *nft.Element) bool {
		id, ep := e.AffinityOf(f)
		return set[nft.Forget{Family: f, ID: id}] || set[nft.Forget{Family: f, ID: id, Endpoint: ep}]
	}
}

// deleteAffinity deletes entries, each by a message of its own: an entry may run out between reading and deleting, which
// fails the batch, and the kernel then names every one that is gone. Those that are left are tried again.
func (b *Backend) deleteAffinity(f nft.Family, entries []nft.Element) error {
	for len(entries) > 0 {
		b.batch.reset()
		b.batch.notes = b.batch.notes[:0]
		b.batch.batch(unix.NFNL_MSG_BATCH_BEGIN)
		first := b.batch.seq
		for i := range entries {
			b.batch.elements(f, unix.NFT_MSG_DELSETELEM, nft.Affinity, entries[i:i+1])
		}
		b.batch.batch(unix.NFNL_MSG_BATCH_END)
		refused, err := b.conn.transact(b.batch.b)
		if err != nil || len(refused) == 0 {
			return err
		}
		gone := map[int]bool{}
		for _, r := range refused {
			if r.errno != unix.ENOENT {
				return b.refusals(refused)
			}
			gone[int(r.seq-first)] = true
		}
		left := entries[:0]
		for i := range entries {
			if !gone[i] {
				left = append(left, entries[i])
			}
		}
		if len(left) == len(entries) { // it was no entry that was refused
			return b.refusals(refused)
		}
		entries = left
	}
	return nil
}
