package dataplane

import (
	"maps"
	"slices"
	"sync/atomic"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Change says what of a State differs from the one before. The zero Change says that nothing does.
type Change struct {
	// Services are those whose value was replaced, added or removed; sorted and unique. A Service not named is the same
	// pointer as before.
	Services []snapshot.Name
	// Globals says that Pods4, Pods6, ServiceCIDRs, IPVSAddresses or LocalhostNodePorts changed.
	Globals bool
}

// Empty says whether there is nothing to do.
func (c Change) Empty() bool { return len(c.Services) == 0 && !c.Globals }

// Planner keeps a State up to date with a snapshot, at a cost that follows the size of each change. Make one with
// NewPlanner. It is not safe for concurrent use.
type Planner struct {
	cfg Config
	// next is the Config that the next Apply shall go by, if another one was set.
	next    atomic.Pointer[Config]
	started bool
	build   builder
	// reservations keeps what the builder must know of other Services.
	reservations reservations
	claims       claims
	state        State
	// before holds the Services that the last Change names as they were, in its order.
	before []*Service
	// omittedConflicts is how many new conflicts the last Apply left out of its answer.
	omittedConflicts int
}

// NewPlanner gives a Planner that has seen nothing yet. Its State is empty.
func NewPlanner(cfg Config) *Planner {
	return &Planner{cfg: cfg, claims: newClaims(0), state: State{
		Services:      map[snapshot.Name]*Service{},
		MasqueradeAll: cfg.MasqueradeAll,
	}}
}

// State gives the answer to all that was applied. It belongs to the Planner and holds until the next Apply, which
// changes it in place; the Services in it are never changed, only replaced.
func (p *Planner) State() *State { return &p.state }

// Before gives what the Services that the last Change names were before it, in its order: nil for one that was not
// there. Whoever asks first is handed them; the Planner keeps none.
func (p *Planner) Before() []*Service {
	before := p.before
	p.before = nil
	return before
}

// OmittedConflicts counts the new conflicts that the last Apply found, and that are in none of the Contests that it gave.
func (p *Planner) OmittedConflicts() int { return p.omittedConflicts }

// SetConfig has the next Apply go by another Config, whatever change that is told. It is the one method that may be
// called at any time, also while Apply is running.
func (p *Planner) SetConfig(cfg Config) { p.next.Store(&cfg) }

// Config gives the one that the State was made by.
func (p *Planner) Config() Config { return p.cfg }

// Apply brings the State up to date with a snapshot in which, since the call before, only what c names has changed. It
// says what of the State that changed, and sums up which conflicts are new, sorted; see Unlisted. The first call looks
// at the whole snapshot whatever c says, and always names Globals.
func (p *Planner) Apply(s *snapshot.Snapshot, c snapshot.Change) (Change, []ConflictSummary) {
	var change Change
	all := !p.started
	next := p.next.Swap(nil)
	if next != nil {
		p.cfg = *next
	}
	if all || c.All || next != nil {
		h := newHost(p.cfg, s)
		change.Globals = p.state.setGlobals(&h, s.ServiceCIDRs) || all
		all = all || !h.equal(&p.build.host)
		p.build.host, p.started = h, true
	}
	names := c.Services
	if !p.reservations.started() {
		names = slices.Collect(maps.Keys(s.Services))
	}
	names = p.build.update(&p.reservations, s, names)
	u := update{Planner: p, snapshot: s}
	if all {
		u.build.budget.recheckAll()
		u.reconsiderAll()
	} else {
		u.reconsider(names)
	}
	u.moveClaims()
	u.resolve()
	u.rebalance()
	change.Services, p.before = u.replacements()
	return change, u.newConflictSummaries()
}

// update is one Apply on its way.
type update struct {
	*Planner
	snapshot *snapshot.Snapshot
	// moved are the Services whose claims may have changed.
	moved []move
	// before holds what the claims were on every key that was contested or has become so.
	before  map[Key][]Claim
	changed []replacement
	// rewriting says that what changes now may have changed already.
	rewriting bool
}

// replacement is a Service that was written, with what it was.
type replacement struct {
	name      snapshot.Name
	before    *Service
	rewritten bool
}

// replacements gives the Services that were written, sorted and unique, and what they were. One whose endpoints changed
// may also have won or lost a key to one that moved: it was written twice, and what it was is what it was the first
// time.
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

// move is a Service between two answers; either is nil if there is none.
type move struct {
	name     snapshot.Name
	old, new *Service
}

// reconsider works out the named Services. Most changes are to endpoints only: the claims stay, and no other Service
// can be concerned.
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

// reconsiderAll works out every Service and starts the books of claims anew.
func (u *update) reconsiderAll() {
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

// moveClaims takes back the old claims of all moved Services, then files the new ones. Meanwhile the State holds what
// the Services ask for, not what they get, so that claimOf finds it there.
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

// withdraw takes back a Service's claims on a key.
func (u *update) withdraw(k Key, n snapshot.Name) {
	if list := u.claims.contested[k]; list != nil {
		u.recordBefore(k, list)
	}
	u.claims.remove(k, n)
}

// recordBefore remembers the claims on a key as they were before this update first touched them.
func (u *update) recordBefore(k Key, before []Claim) {
	if _, noted := u.before[k]; noted {
		return
	}
	if u.before == nil {
		u.before = map[Key][]Claim{}
	}
	u.before[k] = before
}

// claimOf finds the claim of a Service that has the only one on a key.
func (u *update) claimOf(n snapshot.Name, k Key) Claim {
	owner := u.state.Services[n]
	for _, sp := range owner.Ports {
		i, found := slices.BinarySearchFunc(sp.Frontends, k, func(f Frontend, k Key) int { return f.Key.Compare(k) })
		if found {
			return Claim{sp.Name, sp.Frontends[i].Kind, owner.Age}
		}
	}
	panic("dataplane: " + n.String() + " does not claim " + k.String())
}

// resolve leaves every moved Service with the keys it won, then looks again at those that won or lost a key by the move.
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
		// One that moved is settled already: it is found unchanged.
		u.resolveOne(move{n, u.state.Services[n], u.build.service(u.snapshot, n)})
	}
	for k := range u.before {
		u.claims.uncontest(k)
	}
}

// rebalance writes Services that IPVS schedules from now on, or not any more, because of what others ask of it.
func (u *update) rebalance() {
	for _, n := range u.build.budget.balance(&u.build.host.ipvs) {
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

// put writes a Service's answer. One that is equal to the old is dropped for it: what did not change stays the same
// pointer.
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

// maxSummaries bounds how many Contests one Apply gives: an address may be claimed by very many Services.
const maxSummaries = 1024

// newConflictSummaries sums up the conflicts there were none of before, or as many of them as there may be.
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

// With gives a change that names what either names.
func (c Change) With(o Change) Change {
	switch {
	case c.Empty():
		return o
	case o.Empty():
		return c
	}
	names := slices.Concat(c.Services, o.Services)
	slices.SortFunc(names, snapshot.Name.Compare)
	return Change{Services: slices.Compact(names), Globals: c.Globals || o.Globals}
}
