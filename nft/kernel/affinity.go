package kernel

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
)

// affinitySweep removes affinity entries whose endpoint is no longer in their pool. It lists the maps one datagram at a
// time, because the kernel takes longer to list a large map than a change should wait.
type affinitySweep struct {
	// left is how many more times each family's map is to be listed, and due is when.
	left ipfamily.Per[int]
	due  ipfamily.Per[time.Time]
	// running says that a list of family's map is in progress. stale holds the entries to remove that it has found.
	running bool
	family  int
	stale   []nft.Element
	// entries counts the entries of each pool in the current list, and seen holds their keys. torn says that the list
	// has an entry twice: the kernel is moving entries to other buckets and left out another one instead.
	entries map[uint32]int
	seen    map[[affinityKey]byte]struct{}
	torn    bool
}

// affinityKey is the length of a key of the maps: pool and bucket.
const affinityKey = 8

// A map is listed as soon as the transaction is committed, and again after secondSweepAfter, for packets that were
// passing the old rules at that time.
const (
	sweepsPerTransaction = 2
	secondSweepAfter     = time.Second
)

// schedule requests a number of sweeps of a map. The first is due at the given time at the latest.
func (s *affinitySweep) schedule(family, turns int, due time.Time) {
	if s.left[family] == 0 || due.Before(s.due[family]) {
		s.due[family] = due
	}
	s.left[family] = max(s.left[family], turns)
}

// sweepUntil sweeps until the deadline, and says whether there is more to do soon.
func (b *Backend) sweepUntil(deadline time.Time) (busy bool, err error) {
	s := &b.sweep
	for first := true; first || time.Now().Before(deadline); first = false {
		if !s.running && !s.begin() {
			return false, nil
		}
		done, err := b.sweepStep()
		if err == nil && done {
			err = b.endSweep()
		}
		if s.running = err == nil && !done; err != nil {
			s.schedule(s.family, 1, time.Now().Add(secondSweepAfter))
			return false, fmt.Errorf("session affinity: %w", err)
		}
	}
	return true, nil
}

// begin chooses a map that is due. It returns false if there is none.
func (s *affinitySweep) begin() bool {
	for i := range ipfamily.All {
		if s.left[i] > 0 && !time.Now().Before(s.due[i]) {
			s.left[i]--
			s.family, s.stale, s.due[i] = i, nil, time.Now().Add(secondSweepAfter)
			s.seen, s.entries, s.torn = map[[affinityKey]byte]struct{}{}, map[uint32]int{}, false
			return true
		}
	}
	return false
}

// sweepStep requests the list or reads one datagram of it, and says whether that was the last. Other transactions in
// between do not matter: entries come and go all the time.
func (b *Backend) sweepStep() (done bool, err error) {
	s := &b.sweep
	f := ipfamily.All[s.family]
	if !s.running {
		return false, b.sweeper.Ask(listRequest(f, nft.Affinity))
	}
	done, err = b.sweeper.Next(withAttributes(func(attrs []byte) {
		eachElement(f, nft.Affinity, attrs, func(e nft.Listed) { s.add(&e.Element, b.model.Remembers(f, &e.Element)) })
	}))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, netlink.ErrTorn) {
		err = nil
	}
	return done, err
}

// add records an entry of the list.
func (s *affinitySweep) add(e *nft.Element, remembered bool) {
	s.entries[e.ID()]++ // which twice stands for the one that was left out
	key := [affinityKey]byte(e.Key())
	_, twice := s.seen[key]
	s.seen[key] = struct{}{}
	s.torn = s.torn || twice
	if !remembered && !twice {
		s.stale = append(s.stale, *e)
	}
}

// endSweep deletes the entries that a sweep found, if they are still stale: an endpoint may have come back. If
// something was deleted, or if the list was torn, the map is swept again.
func (b *Backend) endSweep() error {
	s := &b.sweep
	f := ipfamily.All[s.family]
	var gone []nft.Element
	for i := range s.stale {
		if !b.model.Remembers(f, &s.stale[i]) {
			gone = append(gone, s.stale[i])
		}
	}
	s.stale, s.seen = nil, nil
	b.updateShares(s.family, s.entries)
	err := b.deleteAffinity(f, gone)
	if len(gone) > 0 || s.torn {
		s.schedule(s.family, 1, time.Now().Add(secondSweepAfter))
	}
	return err
}

// deleteAffinity deletes entries, each with its own message. An entry may expire between reading and deleting, which
// fails the batch. The kernel then names every entry that is gone, and the others are tried again.
func (b *Backend) deleteAffinity(f ipfamily.Family, entries []nft.Element) error {
	for len(entries) > 0 {
		b.batch.restart()
		first, n := uint32(b.batch.Count())+1, min(len(entries), deleteAtOnce)
		for i := range n {
			b.batch.elements(f, unix.NFT_MSG_DELSETELEM, nft.Affinity, entries[i:i+1])
		}
		b.batch.Finish()
		refused, err := b.conn.Commit(b.batch.Bytes())
		if err == nil && len(refused) == 0 {
			b.generation = nextGeneration(b.generation)
			entries = entries[n:]
			continue
		}
		if err != nil {
			return err
		}
		missing := map[int]bool{}
		for _, r := range refused {
			if r.Errno != unix.ENOENT || r.Seq < first || r.Seq >= first+uint32(n) {
				return b.refusals(refused)
			}
			missing[int(r.Seq-first)] = true
		}
		left := entries[:0]
		for i := range entries {
			if !missing[i] {
				left = append(left, entries[i])
			}
		}
		entries = left
	}
	return nil
}

// deleteAtOnce bounds a batch of deletions, so that all rejections fit into the socket.
const deleteAtOnce = 128
