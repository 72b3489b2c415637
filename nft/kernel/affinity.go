package kernel

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
)

// affinitySweep takes affinity entries out that name endpoints their pool no longer has. The maps are listed a datagram at a
// time: the kernel needs longer for a large one than a change should wait.
type affinitySweep struct {
	// left says how often each family's map is still to be looked at, due when next.
	left ipfamily.Per[int]
	due  ipfamily.Per[time.Time]
	// running says that family's list is under way, in which gone were found.
	running bool
	family  int
	stale   []nft.Element
	// entries counts those of each pool in the list under way, in which seen are the keys. Torn says that it has an
	// entry twice: the kernel is moving entries to other buckets, and left another one out in its place.
	entries map[uint32]int
	seen    map[[affinityKey]byte]struct{}
	torn    bool
}

// affinityKey is the length of a key of the maps: pool and bucket.
const affinityKey = 8

// A map is looked at as soon as the transaction is in, and once more after secondSweepAfter: for packets that were on their
// way through the rules while it happened.
const (
	sweepsPerTransaction = 2
	secondSweepAfter     = time.Second
)

// schedule asks for a map to be looked at, not later than at the given time.
func (s *affinitySweep) schedule(family, turns int, due time.Time) {
	if s.left[family] == 0 || due.Before(s.due[family]) {
		s.due[family] = due
	}
	s.left[family] = max(s.left[family], turns)
}

// sweepUntil sweeps until a time, and says whether there is more to do soon.
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

// begin chooses a map that is to be looked at, if there is one.
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

// sweepStep asks for the list, or reads one datagram of it, and says whether that was the last. That others commit
// transactions meanwhile does not matter here: entries come and go all the time.
func (b *Backend) sweepStep() (done bool, err error) {
	s := &b.sweep
	f := ipfamily.All[s.family]
	if !s.running {
		return false, b.sweeper.Ask(listRequest(f, nft.Affinity))
	}
	done, err = b.sweeper.Next(withAttributes(func(attrs []byte) {
		eachElement(f, nft.Affinity, attrs, func(e nft.Listed) { s.add(&e.Element, b.model.Remembers(f, &e.Element)) })
	}))
	if done && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINTR)) {
		err = nil
	}
	return done, err
}

// add takes note of an entry of the list.
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

// endSweep deletes what a sweep found, if it is still wrong: an endpoint may have come back. A map in which there was
// something to delete, or of which the list was torn, is looked at again.
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

// deleteAffinity deletes entries, each by a message of its own: an entry may run out between reading and deleting,
// which fails the batch, and the kernel then names every one that is gone. Those that are left are tried again.
func (b *Backend) deleteAffinity(f ipfamily.Family, entries []nft.Element) error {
	for len(entries) > 0 {
		b.batch.Reset()
		b.batch.messages = b.batch.messages[:0]
		b.batch.Begin()
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

// deleteAtOnce bounds a batch of deletions: so many refusals fit into the socket.
const deleteAtOnce = 128
