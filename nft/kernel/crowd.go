package kernel

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// AffinityShare says how many entries of a family's affinity map belong to one Service.
type AffinityShare struct {
	Service snapshot.Name
	Family  ipfamily.Family
	Entries int
}

// affinityFill tracks how full the affinity maps are.
type affinityFill struct {
	due    time.Time
	shares ipfamily.Per[[]AffinityShare]
	// published is what AffinityShares returns.
	published atomic.Pointer[[]AffinityShare]
}

const (
	// fillCheckEvery is how often the kernel is asked how full the maps are. Before Linux 6.16 it cannot tell, and the
	// maps are listed.
	fillCheckEvery = 30 * time.Second
	// nearlyFull is the number of entries from which on a map is nearly full: three quarters of its size.
	nearlyFull = nft.AffinitySize / 4 * 3
	// maxShares is how many Services are named for each family.
	maxShares = 10
)

// checkAffinityFill schedules a list of each map that may be nearly full.
func (b *Backend) checkAffinityFill(now time.Time) error {
	if now.Before(b.affinityFill.due) {
		return nil
	}
	b.affinityFill.due = now.Add(fillCheckEvery)
	for i, f := range ipfamily.All {
		if !b.model.Sticky(f) {
			b.updateShares(i, nil)
			continue
		}
		n, told, err := b.reader.setCount(f, nft.Affinity)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("session affinity: %w", err)
		}
		if !told || n >= nearlyFull || b.affinityFill.shares[i] != nil {
			b.sweep.schedule(i, 1, now)
		}
	}
	return nil
}

// updateShares attributes the entries of a map, counted by pool, to Services.
func (b *Backend) updateShares(family int, entries map[uint32]int) {
	total, services := 0, map[snapshot.Name]int{}
	for id, n := range entries {
		total += n
		if name, ok := b.model.ServiceOf(id); ok {
			services[name] += n
		}
	}
	var shares []AffinityShare
	if total >= nearlyFull {
		for name, n := range services {
			shares = append(shares, AffinityShare{Service: name, Family: ipfamily.All[family], Entries: n})
		}
		slices.SortFunc(shares, func(a, b AffinityShare) int {
			return cmp.Or(cmp.Compare(b.Entries, a.Entries), a.Service.Compare(b.Service))
		})
		shares = shares[:min(len(shares), maxShares)]
	}
	was := b.affinityFill.shares[family]
	if len(was) == 0 && len(shares) == 0 {
		return
	}
	b.affinityFill.shares[family] = shares
	all := slices.Concat(b.affinityFill.shares[:]...)
	b.affinityFill.published.Store(&all)
	news := len(shares) > 0 && (len(was) == 0 || was[0].Service != shares[0].Service)
	if news && b.options.Crowded != nil {
		b.options.Crowded(shares)
	}
}

// AffinityShares returns the Services that hold most of an affinity map, largest first, ten for each family at most. It
// returns none unless the map is three quarters full. While a map is full, new clients are not remembered. It is safe
// for concurrent use.
func (b *Backend) AffinityShares() []AffinityShare {
	if shown := b.affinityFill.published.Load(); shown != nil {
		return *shown
	}
	return nil
}
