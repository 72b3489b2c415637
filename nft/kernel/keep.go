package kernel

import (
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
)

// countKey identifies an element with a counter.
type countKey struct {
	family ipfamily.Family
	set    nft.SetID
	key    [40]byte
}

func countKeyOf(f ipfamily.Family, e *nft.Element) countKey {
	k := countKey{family: f, set: e.Set}
	copy(k.key[:], e.Key())
	return k
}

// countsToKeep reads the counters of the elements that a transaction replaces, and that go on counting. The kernel
// cannot change an element's data in its place. What it counts between this reading and the commit, a fraction of a
// millisecond later, is lost. So is everything before if the counters cannot be read: that is no reason not to write.
func (c *Conn) countsToKeep(txn *nft.Txn) (counts map[countKey]nft.Listed) {
	for i, f := range ipfamily.All {
		keys := map[nft.SetID][]nft.Element{}
		for _, e := range txn.Tables[i].Keep {
			keys[e.Set] = append(keys[e.Set], e)
		}
		for set, of := range keys {
			if counts == nil {
				counts = map[countKey]nft.Listed{}
			}
			_ = c.getListed(f, set, of, func(l nft.Listed) { counts[countKeyOf(f, &l.Element)] = l })
		}
	}
	return counts
}
