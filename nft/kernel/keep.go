package kernel

import (
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
)

// countKey identifies an element with a counter.
type countKey struct {
	family ipfamily.Family
	set    nft.SetID
	key    string
}

func countKeyOf(f ipfamily.Family, e *nft.Element) countKey {
	return countKey{f, e.Set, string(e.Key())}
}

// countsToKeep reads the counters of the elements that a transaction replaces, and that go on counting. The kernel
// cannot change an element's data in its place. What it counts between this reading and the commit is lost. So is
// everything before if the counters cannot be read: that is no reason not to write.
func (c *Conn) countsToKeep(txn *nft.Txn) map[countKey]nft.Listed {
	counts := map[countKey]nft.Listed{}
	for i, f := range ipfamily.All {
		keys := map[nft.SetID][]nft.Element{}
		for _, e := range txn.Tables[i].Keep {
			keys[e.Set] = append(keys[e.Set], e)
		}
		for _, set := range nft.FrontendSets() { // always in one order
			_ = c.getListed(f, set, keys[set], func(l nft.Listed) { counts[countKeyOf(f, &l.Element)] = l })
		}
	}
	return counts
}
