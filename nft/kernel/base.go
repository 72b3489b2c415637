package kernel

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Base is a model of what the tables hold, for planning what a transaction would write.
type Base struct {
	Model *nft.Model
	// There says that both tables are there; otherwise the Model is that of the state alone.
	There bool
	// Stale says where the tables hold something else than the state asks for. Nil if There is false.
	Stale *nft.Stale
}

// Base returns a model of our tables if they hold a state. counters is Options.Counters of who writes them. What is
// Stale is modelled as the state has it.
func (r *Reader) Base(s *dataplane.State, counters int) (*Base, error) {
	for range pieceTries {
		b := &Base{Model: &nft.Model{Counters: counters}}
		quiet, err := r.quietly(func() error { return rights(r.base(b, s)) })
		if err != nil || quiet {
			return b, err
		}
	}
	return nil, fmt.Errorf("%s: the tables are written to all the time", nft.TableName)
}

// base is what Backend.planFrom does for tables of an earlier process, without writing.
func (r *Reader) base(b *Base, s *dataplane.State) error {
	b.Model.Load(s)
	found := &ipfamily.Per[nft.Found]{}
	for i, f := range ipfamily.All {
		info, err := r.conn.table(f)
		if err != nil || !info.exists {
			return err
		}
		held, err := r.conn.structure(f, b.Model.Structure(f), b.Model.Layout(f))
		if err != nil {
			return err
		}
		found[i] = held.Found
	}
	b.There = true
	b.Model.AdoptCounting(found)
	b.Stale = b.Model.Stale(found)
	b.Model.Adopt(found, b.Stale)
	return nil
}

// LearnSlots reads which endpoint has which slot, for Services that are to change. It is not ok if the tables no longer
// hold what the Base was made of.
func (r *Reader) LearnSlots(b *Base, names []snapshot.Name) (ok bool, err error) {
	if !b.There {
		return true, nil
	}
	if ok, err = r.conn.learnSlots(b.Model, names); errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return ok, rights(err)
}

// Plan returns the transactions that a Backend would write to take the tables to a state, which differs from that of
// the Base by a change. The slots of the Services must be learnt.
func (b *Base) Plan(want *dataplane.State, change dataplane.Change) (txns []*nft.Txn) {
	ahead := false
	for {
		txn := planAhead(b.Model, want, change, ahead)
		if ahead = txn != nil; !ahead {
			txn = b.Model.Plan(want, change, writeAtOnce)
		}
		if !txn.Empty() {
			txns = append(txns, txn)
		}
		if change = txn.Left; len(change.Services) == 0 {
			return txns
		}
	}
}

// learnSlots reads the slots that a model must know before it can plan a change of Services. ok is false if they are
// not what they should be.
func (c *Conn) learnSlots(m *nft.Model, names []snapshot.Name) (ok bool, err error) {
	unread := m.UnknownSlots(names)
	for i := range unread {
		x := &unread[i]
		var read []nft.Element
		if err := c.get(x.Family, x.Keys[0].Set, x.Keys, func(e nft.Element) { read = append(read, e) }); err != nil {
			return false, err
		}
		if len(read) != len(x.Keys) {
			return false, nil
		}
		x.Keys = read
	}
	return m.SetSlots(unread), nil
}
