package dataplane

import (
	"math"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// MaxSlotsPerNamespace bounds the slots that the Services of a namespace ask for by weights, hashes and refused shares:
// a line of YAML may ask for thousands, which take some 200 bytes of kernel memory each. The oldest Services get theirs
// first.
const MaxSlotsPerNamespace = 1 << 16

// What weights and hashes may ask for, as nft grants it: docs/decisions/0019-chances.md.
const (
	hashSlots      = 4093
	largeHashSlots = 16381
	// largeHashFrom is the number of endpoints from which on a hash takes largeHashSlots.
	largeHashFrom = 41
	// weightSlots is how many slots weights may take in any case, and weightSlotsPerEndpoint for each endpoint beyond
	// that.
	weightSlots            = 1024
	weightSlotsPerEndpoint = 4
	// refusedSlots is what a refused share counts for: an element of a set with ranges, which take long to write if there
	// are thousands.
	refusedSlots = 16
)

// slotLimits are the limits in the form of the other budget. Tests make them smaller.
var slotLimits = IPVS{Mode: IPVSAuto, MaxPerService: math.MaxInt, MaxPerNamespace: MaxSlotsPerNamespace}

// applySlotBudget gives the endpoints of a Service equal chances if it asks for too many slots. Nobody else may hold
// the Service yet. Weights of Services that IPVS schedules stay.
func (b *builder) applySlotBudget(s *Service, svc *snapshot.Service) {
	cost := 0
	for _, sp := range s.Ports {
		cost += sp.Cluster.slots(sp.Hash) + sp.Local.slots(sp.Hash) + sp.Keep.Slots()
	}
	if cost == 0 {
		b.slots.forget(s.Name)
		return
	}
	if b.slots.admit(&slotLimits, request{s.Name, svc.Age, cost}, true) == Schedulable {
		return
	}
	for _, sp := range s.Ports {
		b.unkeep(svc, sp)
		if sp.Hash = NoHash; sp.Scheduling != nil {
			continue
		}
		sp.Cluster.equalize()
		sp.Local.equalize()
		for i := range sp.Frontends {
			sp.Frontends[i].NotScheduled = SlotsFull
		}
	}
}

// slots returns about how many slots a pool asks for, 0 if one for each endpoint and no share is refused.
func (p *Pool) slots(h Hash) int {
	if p.Refused > 0 {
		return p.choiceSlots(h) + refusedSlots
	}
	return p.choiceSlots(h)
}

func (p *Pool) choiceSlots(h Hash) int {
	n := len(p.Endpoints)
	switch {
	case n < 2:
		return 0
	case h != NoHash && n < largeHashFrom:
		return hashSlots
	case h != NoHash:
		return largeHashSlots
	}
	divisor, sum := uint64(0), uint64(0)
	for i := range p.Endpoints {
		share := uint64(p.Endpoints[i].Share())
		sum += share
		divisor = gcd(divisor, share)
	}
	if sum /= divisor; sum == uint64(n) {
		return 0
	}
	return min(int(sum), max(weightSlots, weightSlotsPerEndpoint*n))
}

// equalize removes the weights of a pool that nobody else holds, and its refused share.
func (p *Pool) equalize() {
	if len(p.Endpoints) > 0 { // else others hold it
		p.Endpoints, p.Refused = slices.Clone(p.Endpoints), 0 // which the port's Serving may share
	}
	for i := range p.Endpoints {
		p.Endpoints[i].Weight = 0
	}
}

// balance returns the Services that get another answer than before from one of the budgets, sorted and unique.
func (b *builder) balance() []snapshot.Name {
	flipped := append(b.budget.balance(&b.host.ipvs), b.slots.balance(&slotLimits)...)
	slices.SortFunc(flipped, snapshot.Name.Compare)
	return slices.Compact(flipped)
}

// forget removes a Service from the budgets.
func (b *builder) forget(n snapshot.Name) {
	b.budget.forget(n)
	b.slots.forget(n)
}
