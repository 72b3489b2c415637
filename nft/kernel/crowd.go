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

// crowd watches how full the maps of remembered clients are.
type crowd struct {
	due    time.Time
	shares ipfamily.Per[[]AffinityShare]
	// shown is what AffinityShares gives.
	shown atomic.Pointer[[]AffinityShare]
}

const (
	// crowdAgain is how often the kernel is asked how full the maps are. Before Linux 6.16 it does not tell, and they
	// are listed.
	crowdAgain = 30 * time.Second
	// crowded is how many entries make a map nearly full: three quarters of its size.
	crowded = nft.AffinitySize / 4 * 3
	// crowdShown is how many Services are named for each family.
	crowdShown = 10
)

// lookAtAffinity has a map listed that may be nearly full.
func (b *Backend) lookAtAffinity(now time.Time) error {
	if now.Before(b.crowd.due) {
		return nil
	}
	b.crowd.due = now.Add(crowdAgain)
	for i, f := range ipfamily.All {
		if !b.model.Sticky(f) {
			b.share(i, nil)
			continue
		}
		n, told, err := b.reader.setCount(f, nft.Affinity)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("session affinity: %w", err)
		}
		if !told || n >= crowded || b.crowd.shares[i] != nil {
			b.sweep.order(i, 1, now)
		}
	}
	return nil
}

// share takes note of whose the entries of a map are, by pool.
func (b *Backend) share(family int, entries map[uint32]int) {
	total, services := 0, map[snapshot.Name]int{}
	for id, n := range entries {
		total += n
		if name, ok := b.model.ServiceOf(id); ok {
			services[name] += n
		}
	}
	var shares []AffinityShare
	if total >= crowded {
		for name, n := range services {
			shares = append(shares, AffinityShare{Service: name, Family: ipfamily.All[family], Entries: n})
		}
		slices.SortFunc(shares, func(a, b AffinityShare) int {
			return cmp.Or(cmp.Compare(b.Entries, a.Entries), a.Service.Compare(b.Service))
		})
		shares = shares[:min(len(shares), crowdShown)]
	}
	was := b.crowd.shares[family]
	if len(was) == 0 && len(shares) == 0 {
		return
	}
	b.crowd.shares[family] = shares
	all := slices.Concat(b.crowd.shares[:]...)
	b.crowd.shown.Store(&all)
	news := len(shares) > 0 && (len(was) == 0 || was[0].Service != shares[0].Service)
	if news && b.options.Crowded != nil {
		b.options.Crowded(shares)
	}
}

// AffinityShares names the Services that hold most of a map of remembered clients, those with most first, at most ten
// in each family; none unless the map is three quarters full. New clients are not remembered while it is full. Safe
// for concurrent use.
func (b *Backend) AffinityShares() []AffinityShare {
	if shown := b.crowd.shown.Load(); shown != nil {
		return *shown
	}
	return nil
}
