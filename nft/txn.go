package nft

import (
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Txn is one transaction: what has to be written to take the kernel from what it holds to what it should hold. Split
// says which part of it has to be committed before the rest.
type Txn struct {
	// Tables are in the order of Families.
	Tables ipfamily.Per[TableTxn]
	// Left is the part of the change that is still to be planned.
	Left dataplane.Change
	undo undo
}

// TableTxn is one table's part of a transaction. It is written in this order: Create; AddSets; all of Del; new chains;
// Rewrite; DelChains and DelForeign; DelSets; the rules of new chains; all of Add; Affinity.
type TableTxn struct {
	// Create, if not nil, creates the table anew.
	Create *Table
	// DropIngress deletes the table at the ingress first, with all that is in it: Del names that, too. Where Create or
	// AddSets have sets there, it is made anew.
	DropIngress bool
	// AddSets and DelSets are sets that come and go without Create. A set goes with its elements.
	AddSets []Set
	DelSets []SetID
	// Rewrite holds chains whose rules are replaced.
	Rewrite   []Chain
	AddChains []Chain
	DelChains []ChainID
	// DelForeign names chains that are not ours.
	DelForeign []string
	// Del and Add hold the elements by their set.
	Del, Add [NumSets][]Element
	// Keep are elements of Add that replace others and go on counting where those end.
	Keep []Element
	// Affinity are the entries of clients to keep, with Create.
	Affinity []Listed
	// Replaced is how many elements are in both Del and Add, with the same key and other contents.
	Replaced int
	// Sweep says that, after the transaction, Affinity may hold entries that Model.Remembers rejects. Another transaction
	// deletes them: elements of dynamic maps come and go by themselves, and deleting one that is gone would fail this
	// transaction.
	Sweep bool
}

// Split returns what is committed before the rest of a transaction, nil if there is nothing, and the rest. A packet
// that entered the rules before a transaction sees the chains that it adds as empty, and may yet be led to one by an
// element that it changes. So chains for pools of a size that no pool had are there one transaction earlier.
func (t *Txn) Split() (first, rest *Txn) {
	if !t.InTwo() {
		return nil, t
	}
	first, rest = &Txn{}, &Txn{Tables: t.Tables}
	var ingress ipfamily.Per[TableTxn] // nothing else leads there
	for i := range t.Tables {
		tt := &rest.Tables[i]
		for _, s := range tt.AddSets {
			to := &first.Tables[i]
			if s.ID.IsIngress() {
				to = &ingress[i]
			}
			to.AddSets = append(to.AddSets, s)
		}
		for _, c := range tt.AddChains {
			to := &first.Tables[i]
			if c.ID.Kind.IsIngress() {
				to = &ingress[i]
			}
			to.AddChains = append(to.AddChains, c)
		}
		tt.AddSets, tt.AddChains = ingress[i].AddSets, ingress[i].AddChains
		for _, set := range [...]SetID{Picks, SplitPicks, PoolPicks, Timeouts, ClientRates} {
			first.Tables[i].Add[set], tt.Add[set] = tt.Add[set], nil
		}
	}
	return first, rest
}

// InTwo reports whether Split gives two parts: whether chains come to which elements lead, in tables that are in use.
func (t *Txn) InTwo() bool {
	for i := range t.Tables {
		tt := &t.Tables[i]
		numbered := func(c Chain) bool { return c.ID.Kind > numFixedChains }
		if tt.Create == nil && slices.ContainsFunc(tt.AddChains, numbered) {
			return true
		}
	}
	return false
}

// Undoing returns a transaction that takes away again what the first part of another has added.
func (t *Txn) Undoing() *Txn {
	out := &Txn{}
	for i := range t.Tables {
		tt := &out.Tables[i]
		for _, c := range t.Tables[i].AddChains {
			tt.DelChains = append(tt.DelChains, c.ID)
		}
		for _, s := range t.Tables[i].AddSets {
			tt.DelSets = append(tt.DelSets, s.ID)
		}
		tt.Del = t.Tables[i].Add
		tt.sortChains()
	}
	return out
}

// Follow makes a transaction stand for another one, too, that was planned before it and is not written by itself:
// Rollback undoes both, and what the other one left is left.
func (t *Txn) Follow(earlier *Txn) { t.undo.earlier, t.Left = earlier, earlier.Left }

// Empty reports whether the transaction writes nothing.
func (t *Txn) Empty() bool {
	for i := range t.Tables {
		if tt := &t.Tables[i]; !tt.empty() || len(tt.Add[RevisionSet])+len(tt.Add[DigestSet])+len(tt.Del[DigestSet]) > 0 {
			return false
		}
	}
	return true
}

// empty reports whether nothing is written, except perhaps a revision.
func (tt *TableTxn) empty() bool {
	return tt.Create == nil && !tt.DropIngress && len(tt.AddSets)+len(tt.DelSets) == 0 &&
		len(tt.Rewrite)+len(tt.AddChains)+len(tt.DelChains)+len(tt.DelForeign) == 0 &&
		count(tt.Del)+count(tt.Add) == 0
}

// count returns the number of elements in a table's Del or Add. Revision and digests are no content.
func count(by [NumSets][]Element) int {
	n := 0
	for set, elements := range by {
		if set := SetID(set); set != RevisionSet && set != DigestSet {
			n += len(elements)
		}
	}
	return n
}

// Counts returns the number of elements; a replaced element is neither added nor removed. Those of verdict maps come
// and go with their chains, and do not count.
func (t *Txn) Counts() (added, replaced, removed int) {
	for i := range t.Tables {
		tt := &t.Tables[i]
		come, gone := tt.Add, tt.Del
		for set := range NumSets {
			if setsByID[set].Verdicts {
				come[set], gone[set] = nil, nil
			}
		}
		same := min(tt.Replaced, count(come), count(gone))
		added += count(come) - same
		replaced += same
		removed += count(gone) - same
	}
	return added, replaced, removed
}
