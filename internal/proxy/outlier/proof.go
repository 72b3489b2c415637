package outlier

import (
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

const (
	// maxCandidates bounds the endpoints for which a proof is looked for at a time, maxProofTries the looks for each, and
	// maxDenied the clients that are remembered of each.
	maxCandidates = 1024
	maxProofTries = 64
	maxDenied     = 16
	// proofLasts is how long a proof holds, and what the last probe showed: until the decision.
	proofLasts = time.Second
	// An endpoint whose silence means little, as of one with few clients, must have denied its clients something at
	// fewMoments, or one of them at two that lie fewSpan apart. A moment is a first packet that is sent again, so that two
	// are lost, or one that waits until its connection is deleted, or is refused. On a busy node, a reading is of several
	// moments.
	fewMoments = 4
	fewSpan    = 3 * time.Second
)

// proof is what clients were denied since an endpoint answered last, whom it accepted before.
type proof struct {
	since  time.Time
	denied map[netip.Addr]*denials
	// found is when it was last seen to suffice, with clients that another endpoint accepted after that, and complete
	// since when it does.
	found, complete time.Time
}

// denials are those of one client: what a policy forbids others says nothing about a packet of his.
type denials struct {
	// moments counts readings that saw later packets which were not accepted, and first and last are when the first and
	// the last of them were sent. Connections that were deleted count, too.
	moments     int
	first, last time.Time
}

// candidates returns endpoints that answer nobody, and for which a proof is missing.
func (d *Detector) candidates(now time.Time) (list []*track) {
	for _, t := range d.machine.tracks {
		if t.state != suspected && t.state != doubted || t.asks == asResort || len(list) == maxCandidates {
			continue
		}
		if last, _, known := d.machine.lastAnswer(t); known && now.Sub(last) >= readEvery {
			list = append(list, t)
		}
	}
	return list
}

// prove looks for clients whom the endpoints accepted before and do not accept now, and whom other endpoints of the
// same Service accepted after that. A client that a policy begins to forbid the Service is accepted by none of them
// from then on, and one that was always forbidden was never accepted: neither is a proof.
func (d *Detector) prove() {
	now := time.Now()
	d.mu.Lock()
	candidates := d.candidates(now)
	d.mu.Unlock()
	if len(candidates) == 0 || now.Before(d.proveAt) {
		return
	}
	var forsaken, accepted []dataplane.Pair
	var err error
	took := work(func() { forsaken, err = d.o.Evidence.Forsaken() })
	d.mu.Lock()
	candidates = d.denied(now, candidates, forsaken)
	d.mu.Unlock()
	if len(candidates) > 0 {
		took += work(func() { accepted, err = d.o.Evidence.Accepted() })
	}
	d.proveAt = time.Now().Add(min(readShare*took, mostReadPause))
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		d.stats.ReadErrors++
	}
	byClient := map[netip.Addr][]dataplane.Pair{}
	for _, p := range accepted {
		byClient[p.Client] = append(byClient[p.Client], p)
	}
	for _, t := range candidates {
		if d.machine.elsewhere(now, t, byClient) {
			t.proof.suffices(now)
		}
	}
}

// suffices notes that a proof was found.
func (p *proof) suffices(now time.Time) {
	if now.Sub(p.found) >= proofLasts {
		p.complete = now
	}
	p.found = now
}

// denied records what clients were denied, and returns the endpoints for which that suffices.
func (d *Detector) denied(now time.Time, candidates []*track, forsaken []dataplane.Pair) (ready []*track) {
	byEndpoint := map[netip.AddrPort][]dataplane.Pair{}
	for _, p := range forsaken {
		byEndpoint[p.Endpoint] = append(byEndpoint[p.Endpoint], p)
	}
	for _, t := range candidates {
		last, _, known := d.machine.lastAnswer(t)
		if !known {
			continue
		}
		t.proof.add(now, last, byEndpoint[t.endpoint])
		if _, silent := d.machine.silent(now, t); silent && len(t.proof.denied) > 0 {
			ready = append(ready, t)
		}
	}
	return ready
}

// add records the clients of a reading whom an endpoint did not accept since its last answer.
func (p *proof) add(now, last time.Time, forsaken []dataplane.Pair) {
	if last.Sub(p.since) > sameAnswer {
		*p = proof{since: last, denied: map[netip.Addr]*denials{}}
	}
	for _, f := range forsaken {
		at := now.Add(-f.Ago)
		d := p.denied[f.Client]
		switch {
		case !at.After(last):
		case d != nil && at.Sub(d.last) > sameAnswer:
			d.moments, d.last = d.moments+1, at
		case d == nil && len(p.denied) < maxDenied:
			p.denied[f.Client] = &denials{moments: 1, first: at, last: at}
		}
	}
}

// release records clients whose connections waited in vain, and are deleted now: they would send again otherwise, which
// the kernel records. The connections began after a time; what was recorded later may be one of their packets.
func (p *proof) release(began time.Time, clients map[netip.Addr]bool) {
	for client := range clients {
		if d := p.denied[client]; d != nil && !d.last.After(began) {
			d.moments++
		}
	}
}

// elsewhere reports whether enough was denied to clients whom another endpoint of the Service accepted after that, and
// within the second half of the silence.
func (m *machine) elsewhere(now time.Time, t *track, accepted map[netip.Addr][]dataplane.Pair) bool {
	tries, half := 0, now.Sub(t.proof.since)/2
	enough := fewMoments
	if !m.few(t) {
		enough = 1
	}
	for client, denied := range t.proof.denied {
		if !slices.ContainsFunc(accepted[client], func(p dataplane.Pair) bool {
			after := now.Add(-p.Ago).Sub(denied.first)
			if p.Endpoint == t.endpoint || after <= sameAnswer || p.Ago >= half || tries == maxProofTries {
				return false
			}
			tries++
			return slices.ContainsFunc(t.ports, func(sp *dataplane.ServicePort) bool { return has(sp, p.Endpoint) })
		}) {
			continue
		}
		enough -= denied.moments
		if enough <= 0 || denied.last.Sub(denied.first) >= fewSpan-sameAnswer {
			return true
		}
	}
	return false
}

// few reports whether an endpoint's silence may be less than the pauses of its clients.
func (m *machine) few(t *track) bool {
	p := m.answers.of[t.endpoint]
	return p == nil || p.few()
}

// probedSince reports whether a probe has just failed that says something: what forbade an earlier one may be over. At
// an endpoint of few clients, it began after there was a proof.
func (m *machine) probedSince(now time.Time, t *track) bool {
	return now.Sub(t.ended) < proofLasts && (!m.few(t) || t.begun.After(t.proof.complete))
}
