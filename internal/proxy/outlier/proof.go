package outlier

import (
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

const (
	// maxCandidates bounds the endpoints for which a proof is looked for at a time, and maxProofTries the looks for each.
	maxCandidates = 32
	maxProofTries = 64
	// proofLasts is how long a proof holds: until the decision.
	proofLasts = time.Second
)

// candidates returns endpoints that are silent, and for which a proof is missing.
func (d *Detector) candidates(now time.Time) (list []*track) {
	for _, t := range d.machine.tracks {
		if _, silent := d.machine.silent(now, t); t.state == doubted && silent && len(list) < maxCandidates {
			list = append(list, t)
		}
	}
	return list
}

// prove looks for clients whom the endpoints accepted before and do not accept now, though other endpoints of the same
// Service do. A client that a policy forbids the Service is accepted by none of them, and one
// that was always forbidden was never accepted: neither is a proof.
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
	took := work(func() {
		if forsaken, err = d.o.Evidence.Forsaken(); err == nil && len(forsaken) > 0 {
			accepted, err = d.o.Evidence.Accepted()
		}
	})
	d.proveAt = time.Now().Add(min(readShare*took, mostReadPause))
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		d.stats.ReadErrors++
	}
	for _, t := range candidates {
		last, _, known := d.machine.lastAnswer(t)
		if known && proven(t, now.Sub(last), forsaken, accepted) {
			t.proven = now
		}
	}
}

// proven says whether there is such a client of an endpoint that has been silent for a time: it was not accepted in
// that time, and was elsewhere in the second half of it. If a policy has just begun to forbid the client all endpoints,
// it was accepted elsewhere before that time, or at its beginning.
func proven(t *track, silence time.Duration, forsaken, accepted []dataplane.Pair) bool {
	waits, tries := map[netip.Addr]bool{}, 0
	for _, p := range forsaken {
		if p.Endpoint == t.endpoint && p.Ago < silence {
			waits[p.Client] = true
		}
	}
	return slices.ContainsFunc(accepted, func(p dataplane.Pair) bool {
		if p.Endpoint == t.endpoint || !waits[p.Client] || p.Ago >= silence/2 || tries == maxProofTries {
			return false
		}
		tries++
		return slices.ContainsFunc(t.ports, func(sp *dataplane.ServicePort) bool { return has(sp, p.Endpoint) })
	})
}
