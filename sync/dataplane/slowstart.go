package dataplane

import (
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// weightedSchedulers are the IPVS schedulers that slow starts and zones apply to: weights are shares of connections
// there, and nothing else.
var weightedSchedulers = []string{"wrr", "wlc", "sed", "nq"}

// startingOf returns the endpoints of a Service that start slowly; nil if there are none, or whoever chooses the
// endpoint cannot give them less than others.
func (b *builder) startingOf(s *snapshot.Snapshot, svc *snapshot.Service) *snapshot.Starting {
	byIPVS := b.scheduling != nil && !slices.Contains(weightedSchedulers, b.scheduling.Scheduler)
	if byIPVS || hashOf(svc) != NoHash || svc.Backends != nil {
		return nil
	}
	return s.Starting[svc.Name]
}

// startScales are how many parts the share of an endpoint is divided into while others of its pool start, from small
// pools to large ones. With primes, hardly any pool of equal weights gets another number of slots from step to step: an
// endpoint that starts gets its slots one by one, and nobody else's change.
var startScales = [...]uint32{11, 7, 5, 3}

func startScale(endpoints int) uint32 {
	for _, scale := range startScales {
		if endpoints*int(scale) <= weightSlots {
			return scale
		}
	}
	return startScales[len(startScales)-1]
}

// slowStart gives endpoints of a pool that start slowly less than their parts, in proportion to all others. If all
// started together, that is the same for all.
func (b *builder) slowStart(endpoints []Endpoint, parts []uint32) {
	starts := func(e Endpoint) bool { return b.starting.Find(e.AddrPort) != nil }
	if b.starting == nil || !slices.ContainsFunc(endpoints, starts) {
		return
	}
	scale := startScale(len(endpoints))
	for i := range parts {
		share := scale
		if st := b.starting.Find(endpoints[i].AddrPort); st != nil {
			rounded := (scale*uint32(st.Tenths) + snapshot.FullTenths/2) / snapshot.FullTenths
			share = min(max(rounded, 1), scale-1)
		}
		parts[i] *= share
	}
}
