package dataplane

import (
	"maps"
	"slices"
	"sync/atomic"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Change names what differs between two States. Services are those whose value was replaced, added or removed; all
// others are the same pointers as before. Globals says that a field of State other than Services changed.
type Change = snapshot.Change

// Planner keeps a State in sync with a snapshot, at a cost that grows with each change, not with the cluster. Make one
// with NewPlanner. It is not safe for concurrent use.
type Planner struct {
	cfg Config
	// next is the Config that the next Apply uses, if SetConfig was called.
	next    atomic.Pointer[Config]
	started bool
	build   builder
	// reservations records what other Services reserve, for the builder.
	reservations reservations
	claims       claims
	state        State
	// before holds the earlier versions of the Services that the last Change names, in its order.
	before []*Service
	// overlaps are those of the last Apply.
	overlaps []Overlap
	// omittedConflicts is how many new conflicts the last Apply did not return.
	omittedConflicts int
}

// NewPlanner returns a Planner with an empty State.
func NewPlanner(cfg Config) *Planner {
	return &Planner{cfg: cfg, claims: newClaims(0), state: State{
		Services:      map[snapshot.Name]*Service{},
		MasqueradeAll: cfg.MasqueradeAll,
	}}
}

// State returns the State after the last Apply. It belongs to the Planner, and the next Apply changes it in place.
// Services in it are never changed, only replaced.
func (p *Planner) State() *State { return &p.state }

// Before returns the earlier versions of the Services that the last Change names, in its order: nil for a new Service.
// Only the first call after an Apply returns them.
func (p *Planner) Before() []*Service {
	before := p.before
	p.before = nil
	return before
}

// OmittedConflicts returns how many new conflicts of the last Apply are in none of the summaries that it returned.
func (p *Planner) OmittedConflicts() int { return p.omittedConflicts }

// Overlaps returns where the ServiceCIDRs are used by something other than Services. The list is never changed.
func (p *Planner) Overlaps() []Overlap { return p.overlaps }

// SetConfig replaces the configuration that the next Apply uses, whatever change Apply is given. It is the only method
// that may be called at any time, also while Apply runs.
func (p *Planner) SetConfig(cfg Config) { p.next.Store(&cfg) }

// Config returns the configuration of the current State.
func (p *Planner) Config() Config { return p.cfg }

// Apply brings the State in sync with a snapshot in which, since the last call, only what c names has changed. It
// returns what changed in the State and a summary of the new conflicts, sorted; see OmittedConflicts. The first call
// reads the whole snapshot whatever c says, and always names Globals.
func (p *Planner) Apply(s *snapshot.Snapshot, c snapshot.Change) (Change, []ConflictSummary) {
	var change Change
	all := !p.started
	next := p.next.Swap(nil)
	if next != nil {
		p.cfg = *next
	}
	if all || c.Globals || next != nil || slices.Contains(c.Services, KubernetesService) {
		p.overlaps = Overlaps(p.cfg, s)
		h := newHost(p.cfg, s, p.overlaps)
		change.Globals = p.state.setGlobals(&h, s.ServiceCIDRs, p.overlaps) || all
		all = all || !h.equal(&p.build.host)
		p.build.host, p.started = h, true
	}
	names := c.Services
	if !p.reservations.started() {
		names = slices.Collect(maps.Keys(s.Services))
	}
	names = p.build.update(&p.reservations, s, names)
	if flipped := p.build.refer(s, names); len(flipped) > 0 {
		names = Change{Services: names}.With(Change{Services: flipped}).Services
	}
	u := update{Planner: p, snapshot: s}
	if all {
		u.build.budget.recheckAll()
		u.build.slots.recheckAll()
		u.reconsiderAll(names)
	} else {
		u.reconsider(names)
	}
	u.moveClaims()
	u.resolve()
	u.rebalance()
	change.Services, p.before = u.replacements()
	return change, u.newConflictSummaries()
}

// update is the state of one Apply.
type update struct {
	*Planner
	snapshot *snapshot.Snapshot
	// moved are the Services whose claims may have changed.
	moved []move
	// before holds the earlier claims on every key that was contested or has become so.
	before  map[Key][]Claim
	changed []replacement
	// claimsOf are the claims of Services with many ports, as far as they were asked for.
	claimsOf map[*Service]map[Key]Claim
	// rewriting says that Services written from now on may have been written before in this update.
	rewriting bool
}

// replacement is a Service that was written, and its earlier version.
type replacement struct {
	name      snapshot.Name
	before    *Service
	rewritten bool
}

// replacements returns the Services that were written, sorted and unique, and their earlier versions. A Service is
// written twice if its endpoints changed and another Service that moved gave it a key or took one; then its version
// before the first write counts.
func (u *update) replacements() (names []snapshot.Name, before []*Service) {
	if len(u.changed) == 0 {
		return nil, nil
	}
	slices.SortFunc(u.changed, func(a, b replacement) int {
		if c := a.name.Compare(b.name); c != 0 || a.rewritten == b.rewritten {
			return c
		}
		if a.rewritten {
			return +1
		}
		return -1
	})
	u.changed = slices.CompactFunc(u.changed, func(a, b replacement) bool { return a.name == b.name })
	names, before = make([]snapshot.Name, len(u.changed)), make([]*Service, len(u.changed))
	for i, r := range u.changed {
		names[i], before[i] = r.name, r.before
	}
	return names, before
}

// move is a Service's old and new version; either is nil if there is none.
type move struct {
	name     snapshot.Name
	old, new *Service
}

// reconsider recomputes the named Services. Most changes are to endpoints only: then the claims stay, and no other
// Service is affected.
func (u *update) reconsider(names []snapshot.Name) {
	for _, n := range names {
		old, svc := u.state.Services[n], u.build.service(u.snapshot, n)
		if svc.sameClaims(old) && len(u.claims.lost[n]) == 0 {
			u.put(n, old, svc)
			continue
		}
		u.moved = append(u.moved, move{n, old, svc})
	}
}

// reconsiderAll recomputes every Service and rebuilds the claims. names are those that changed.
func (u *update) reconsiderAll(names []snapshot.Name) {
	for _, n := range names {
		if u.snapshot.Services[n] == nil {
			u.build.forget(n)
		}
	}
	u.before = u.claims.contested
	u.claims = newClaims(max(len(u.claims.only), len(u.snapshot.Services)))
	u.moved = make([]move, 0, len(u.snapshot.Services))
	if len(u.state.Services) == 0 { // a map that grows is copied again and again
		u.state.Services = make(map[snapshot.Name]*Service, len(u.snapshot.Services))
		u.changed = make([]replacement, 0, len(u.snapshot.Services))
	}
	for n := range u.snapshot.Services {
		u.moved = append(u.moved, move{n, u.state.Services[n], u.build.service(u.snapshot, n)})
	}
	for n, old := range u.state.Services {
		if u.snapshot.Services[n] == nil {
			u.moved = append(u.moved, move{n, old, nil})
		}
	}
}

// moveClaims withdraws the old claims of all moved Services, then adds the new ones. Meanwhile the State holds what the
// Services ask for, not what they win, so that claimOf finds it there.
func (u *update) moveClaims() {
	for _, m := range u.moved {
		m.old.eachClaim(func(k Key, _ Claim) { u.withdraw(k, m.name) })
		for _, k := range u.claims.lost[m.name] {
			u.withdraw(k, m.name)
		}
	}
	for _, m := range u.moved {
		u.set(m.name, m.new)
		m.new.eachClaim(func(k Key, c Claim) {
			if list := u.claims.add(k, c, u.claimOf); list != nil {
				u.recordBefore(k, list)
			}
		})
	}
}

// withdraw removes a Service's claims on a key.
func (u *update) withdraw(k Key, n snapshot.Name) {
	if list := u.claims.contested[k]; list != nil {
		u.recordBefore(k, list)
	}
	u.claims.remove(k, n)
}

// recordBefore records the claims on a key as they were before this update first changed them.
func (u *update) recordBefore(k Key, before []Claim) {
	if _, noted := u.before[k]; noted {
		return
	}
	if u.before == nil {
		u.before = map[Key][]Claim{}
	}
	u.before[k] = before
}

// claimOf returns the claim of the only Service that claims a key.
func (u *update) claimOf(n snapshot.Name, k Key) Claim {
	owner := u.state.Services[n]
	if len(owner.Ports) > fewSlicePorts { // and as many keys may be asked for
		all := u.claimsOf[owner]
		if all == nil {
			all = make(map[Key]Claim, len(owner.Ports))
			owner.eachClaim(func(k Key, c Claim) { all[k] = c })
			if u.claimsOf == nil {
				u.claimsOf = map[*Service]map[Key]Claim{}
			}
			u.claimsOf[owner] = all
		}
		return all[k]
	}
	for _, sp := range owner.Ports {
		if f := sp.Frontend(k); f != nil {
			return Claim{sp.Name, f.Kind, owner.Age}
		}
	}
	panic("dataplane: " + n.String() + " does not claim " + k.String())
}

// resolve gives every moved Service the keys it won, then recomputes the Services that won or lost a key because of
// that.
func (u *update) resolve() {
	for _, m := range u.moved {
		u.resolveOne(m)
	}
	touched := map[snapshot.Name]struct{}{}
	for k, before := range u.before {
		if was, is := before[0].Port.Service, u.claims.winner(k); was != is {
			touched[was], touched[is] = struct{}{}, struct{}{}
		}
	}
	u.rewriting = true
	for n := range touched {
		// A Service that moved is resolved already: it is found unchanged.
		u.resolveOne(move{n, u.state.Services[n], u.build.service(u.snapshot, n)})
	}
	for k := range u.before {
		u.claims.uncontest(k)
	}
}

// rebalance rewrites Services that IPVS starts or stops scheduling because of what other Services ask for.
func (u *update) rebalance() {
	for _, n := range u.build.balance() {
		u.resolveOne(move{n, u.state.Services[n], u.build.service(u.snapshot, n)})
	}
}

func (u *update) resolveOne(m move) {
	left, lost := m.new.removeLost(u.claims.wins)
	if lost == nil {
		delete(u.claims.lost, m.name)
	} else {
		u.claims.lost[m.name] = lost
	}
	u.put(m.name, m.old, left)
}

// put writes a Service. If it is equal to the old version, the old pointer stays.
func (u *update) put(n snapshot.Name, old, svc *Service) {
	if svc.equal(old) {
		svc = old
	} else {
		u.changed = append(u.changed, replacement{n, old, u.rewriting})
	}
	u.set(n, svc)
}

func (u *update) set(n snapshot.Name, svc *Service) {
	if svc == nil {
		delete(u.state.Services, n)
	} else {
		u.state.Services[n] = svc
	}
}

// maxSummaries bounds how many conflict summaries one Apply returns: very many Services may claim one address.
const maxSummaries = 1024

// newConflictSummaries summarizes the conflicts that did not exist before, up to maxSummaries.
func (u *update) newConflictSummaries() []ConflictSummary {
	found := conflictSummaries{}
	u.omittedConflicts = 0
	for k, before := range u.before {
		for _, c := range newConflicts(k, before, u.claims.contested[k]) {
			if !found.add(c, maxSummaries) {
				u.omittedConflicts++
			}
		}
	}
	return found.sorted()
}
