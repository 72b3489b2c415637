package kernel

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// AffinityShare is how many entries of a family's map of remembered clients are a Service's.
type AffinityShare struct {
	Service snapshot.Name
	Family  ipfamily.Family
	Entries int
}

// affinityFill watches how full the maps of remembered clients are.
type affinityFill struct {
	due    time.Time
	shares ipfamily.Per[[]AffinityShare]
	// published is what AffinityShares gives.
	published atomic.Pointer[[]AffinityShare]
}

const (
	// fillCheckEvery is how often the kernel is asked how full the maps are. Before Linux 6.16 it does not tell, and they
	// are listed.
	fillCheckEvery = 30 * time.Second
	// nearlyFull is how many entries make a map nearly full: three quarters of its size.
	nearlyFull = nft.AffinitySize / 4 * 3
	// maxShares is how many Services are named for each family.
	maxShares = 10
)

// checkAffinityFill has a map listed that may be nearly full.
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

// updateShares takes note of whose the entries of a map are, by pool.
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

// AffinityShares names the Services that hold most of a map of remembered clients, those with most first, at most ten
// in each family; none unless the map is three quarters full. New clients are not remembered while it is full. Safe
// for concurrent use.
func (b *Backend) AffinityShares() []AffinityShare {
	if shown := b.affinityFill.published.Load(); shown != nil {
		return *shown
	}
	return nil
}
