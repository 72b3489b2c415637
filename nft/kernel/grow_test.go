package kernel

import (
	"testing"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestListedWhileGrowing lists sets that have just grown, while the kernel moves their elements to new buckets. Each element is listed
// once, and all are where the kernel tells how many there are.
func TestListedWhileGrowing(t *testing.T) {
	_, first := host(t)
	apply(t, first, &dataplane.State{})
	_, told, err := first.reader.setCount(ipfamily.IPv4, nft.Services)
	labtest.Check(t, err)
	for range 10 {
		_, b := host(t)
		snap, planner := snapshot.New(), dataplane.NewPlanner(configs["cluster CIDR"])
		for n := 10; n < 3000; n = n * 3 / 2 {
			change, _ := planner.Apply(snap, snap.Apply(large(n, 2)))
			_, err := b.ApplyAll(planner.State(), change)
			labtest.Check(t, err)
			for _, set := range []nft.SetID{nft.Services, nft.Endpoints, nft.Services} {
				listed, err := b.reader.Elements(ipfamily.IPv4, set)
				labtest.Check(t, err)
				seen := map[string]bool{}
				for _, l := range listed {
					seen[string(l.Key())] = true
				}
				if want := b.model.Count(ipfamily.IPv4, set); len(seen) != len(listed) || told && len(seen) != want {
					t.Errorf("%d elements of %s are listed, %d different ones; want %d", len(listed), set, len(seen), want)
				}
			}
		}
		labtest.Check(t, b.Remove())
	}
}
