package kernel

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/nft"
)

// sweep takes affinity entries out that name endpoints their pool no longer has. The maps are listed a datagram at a time: the
// kernel needs longer for a large one than a change should wait.
type sweep struct {
	// turns says how often each family's map is still to be looked at, due when next.
	turns [len(nft.Families)]int
	due   [len(nft.Families)]time.Time
	// running says that family's list is under way, in which gone were found.
	running bool
	family  int
	gone    []nft.Element
}

// A map is looked at as soon as the transaction is in, and once more after sweepAgain: for packets that were on their way through
// the rules while it happened.
const (
	sweepTurns = 2
	sweepAgain = time.Second
)

// order asks for a map to be looked at.
func (s *sweep) order(family, turns int, due time.Time) {
	s.turns[family], s.due[family] = max(s.turns[family], turns), due
}

// sweepUntil sweeps until a time, and says whether there is more to do soon.
func (b *Backend) sweepUntil(deadline time.Time) (busy bool, err error) {
	s := &b.sweep
	for first := true; first || time.Now().Before(deadline); first = false {
		if !s.running && !b.startSweep() {
			return false, nil
		}
		done, err := b.sweepOn()
		if err != nil {
			s.running = false
			s.order(s.family, 1, time.Now().Add(sweepAgain))
			return false, errors.Join(fmt.Errorf("session affinity: %w", err), b.reopen())
		}
		if done {
			s.running = false
			if err := b.endSweep(); err != nil {
				return false, fmt.Errorf("session affinity: %w", err)
			}
		}
	}
	return true, nil
}

// startSweep asks for the list of a map that is to be looked at, if there is one.
func (b *Backend) startSweep() bool {
	s := &b.sweep
	for i, f := range nft.Families {
		if s.turns[i] > 0 && !time.Now().Before(s.due[i]) {
			s.turns[i]--
			s.family, s.gone, s.due[i] = i, nil, time.Now().Add(sweepAgain)
			s.running = b.sweeper.send(listRequest(f, nft.Affinity)) == nil
			return true
		}
	}
	return false
}

// sweepOn reads one datagram of the list, and says whether it was the last. That others commit transactions meanwhile does not
// matter here: entries come and go all the time.
func (b *Backend) sweepOn() (done bool, err error) {
	s := &b.sweep
	f := nft.Families[s.family]
	n, err := b.sweeper.recv(true)
	if err != nil {
		return false, err
	}
	err = eachMessage(b.sweeper.receive[:n], func(h header, body []byte) error {
		switch h.typ {
		case unix.NLMSG_DONE:
			done = true
		case unix.NLMSG_ERROR:
			done = true
			if r, ok := parseRefusal(h, body); ok && r.errno != unix.ENOENT {
				return r.errno
			}
		default:
			if len(body) >= 4 {
				eachElement(f, nft.Affinity, body[4:], func(e nft.Listed) {
					if !b.model.Remembers(f, &e.Element) {
						s.gone = append(s.gone, e.Element)
					}
				})
			}
		}
		return nil
	})
	return done, err
}

// endSweep deletes what a sweep found, if it is still wrong: an endpoint may have come back. A map in which there was something to
// delete is looked at again.
func (b *Backend) endSweep() error {
	s := &b.sweep
	f := nft.Families[s.family]
	var gone []nft.Element
	for i := range s.gone {
		if !b.model.Remembers(f, &s.gone[i]) {
			gone = append(gone, s.gone[i])
		}
	}
	s.gone = nil
	err := b.deleteAffinity(f, gone)
	if len(gone) > 0 || err != nil {
		s.order(s.family, 1, time.Now().Add(sweepAgain))
	}
	return err
}

// deleteAffinity deletes entries, each by a message of its own: an entry may run out between reading and deleting, which
// fails the batch, and the kernel then names every one that is gone. Those that are left are tried again.
func (b *Backend) deleteAffinity(f nft.Family, entries []nft.Element) error {
	for len(entries) > 0 {
		b.batch.reset()
		b.batch.notes = b.batch.notes[:0]
		b.batch.batch(unix.NFNL_MSG_BATCH_BEGIN)
		first, n := b.batch.seq, min(len(entries), deleteAtOnce)
		for i := range n {
			b.batch.elements(f, unix.NFT_MSG_DELSETELEM, nft.Affinity, entries[i:i+1])
		}
		b.batch.batch(unix.NFNL_MSG_BATCH_END)
		refused, err := b.conn.transact(b.batch.b)
		if err == nil && len(refused) == 0 {
			b.generation = next(b.generation)
			entries = entries[n:]
			continue
		}
		if err != nil {
			return err
		}
		missing := map[int]bool{}
		for _, r := range refused {
			if r.errno != unix.ENOENT || r.seq < first || r.seq >= first+uint32(n) {
				return b.refusals(refused)
			}
			missing[int(r.seq-first)] = true
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
