package nft

// Txn is one transaction: what has to be written to take the kernel from what it holds to what it should hold.
type Txn struct {
	// Tables are in the order of Families.
	Tables [len(Families)]TableTxn
	undo   undo
}

// TableTxn is one table's part of a transaction. It is written in this order: Create; all of Del; DelChains and DelForeign; the
// new chains and rules; Resize; all of Add.
type TableTxn struct {
	// Create, if not nil, makes everything in the table anew.
	Create *Table
	// Keep, with Create, leaves the table itself in place, and in it Affinity, the only thing that is not written by us.
	Keep bool
	// Rewrite holds chains whose rules are replaced.
	Rewrite   []Chain
	AddChains []Chain
	DelChains []ChainID
	// DelForeign names chains that are not ours.
	DelForeign []string
	// Resize holds sets that get another size.
	Resize []Set
	// Del and Add hold the elements by their set.
	Del, Add [NumSets][]Element
	// Replaced is how many elements are both in Del and in Add, under the same key with other contents.
	Replaced int
	// Sweep says that Affinity may hold entries that Model.Remembers denies once the transaction is in. They are left to another
	// one: elements of dynamic maps come and go by themselves, and deleting one that is gone would fail this transaction.
	Sweep bool
}

// Empty says whether the transaction writes nothing.
func (t *Txn) Empty() bool {
	for i := range t.Tables {
		if tt := &t.Tables[i]; !tt.empty() || len(tt.Add[RevisionSet])+len(tt.Del[RevisionSet]) > 0 {
			return false
		}
	}
	return true
}

// empty says whether nothing is written but perhaps a revision.
func (tt *TableTxn) empty() bool {
	return tt.Create == nil && len(tt.Rewrite)+len(tt.AddChains)+len(tt.DelChains)+len(tt.DelForeign)+len(tt.Resize) == 0 &&
		count(tt.Del)+count(tt.Add) == 0
}

// leaving counts the elements that go from a set for good. One that is replaced goes in the same transaction as the new one comes,
// even in steps.
func (tt *TableTxn) leaving(set SetID) int {
	goes := make(map[elementKey]bool, len(tt.Del[set]))
	for i := range tt.Del[set] {
		goes[tt.Del[set][i].identity()] = true
	}
	for i := range tt.Add[set] {
		delete(goes, tt.Add[set][i].identity())
	}
	return len(goes)
}

// count gives the number of elements in a table's Del or Add. A revision is no content.
func count(by [NumSets][]Element) int {
	n := 0
	for set, elements := range by {
		if SetID(set) != RevisionSet {
			n += len(elements)
		}
	}
	return n
}

// Counts gives the number of elements; one that is replaced is neither added nor removed.
func (t *Txn) Counts() (added, replaced, removed int) {
	for i := range t.Tables {
		tt := &t.Tables[i]
		added += count(tt.Add) - tt.Replaced
		replaced += tt.Replaced
		removed += count(tt.Del) - tt.Replaced
	}
	return added, replaced, removed
}
