package nft

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// assignSlotsAndIDs assigns slots and ids to a Service's new version, keeping those of the earlier one.
func (p *planner) assignSlotsAndIDs(name snapshot.Name, before, now *service) {
	for i, f := range ipfamily.All {
		is := &now.sources[i]
		is.id = p.m.updateID(before.sources[i].id, is.ranges != nil, sourcesID(name, f))
	}
	for _, want := range now.ports {
		old := before.port(want.id)
		if old == nil {
			old = &port{id: want.id}
		}
		want.sourceID = now.sources[want.id.family].id
		p.ids(old, want)
		p.keptIDs(old, want)
		for i := range want.pools {
			want.pools[i].slots = want.pools[i].assigned(old.pools[i].slots)
		}
	}
	for _, old := range before.ports {
		if now.port(old.id) == nil {
			p.keptIDs(old, &port{id: old.id})
			p.ids(old, &port{id: old.id})
		}
	}
}

// ids assigns ids to the pools of a port, and frees those no longer used.
func (p *planner) ids(old, want *port) {
	for i := range want.pools {
		at := poolIndex(i)
		want.pools[i].id = p.m.updateID(old.pools[i].id, want.pools[i].used, poolID{port: want.id, pool: at})
		if old.sticky(at) && !want.sticky(at) {
			p.txn.Tables[want.id.family].Sweep = true
		}
	}
}

// updateID returns the id of something that had an id or not, and is now used or not.
func (m *Model) updateID(had uint32, used bool, name poolID) uint32 {
	switch {
	case used && had == 0:
		return m.newPoolID(name)
	case !used && had != 0:
		delete(m.pools, had)
		return 0
	}
	return had
}

// port plans the change of a service port; nil means that it was not, or should not be, there.
func (p *planner) port(before, now *port) {
	old, want := before, now
	if old == nil {
		old = &port{id: now.id}
	}
	if want == nil {
		want = &port{id: before.id}
	}
	f := want.id.family
	for i := range numPools {
		p.pool(f, old, want, i)
	}
	for _, a := range want.local {
		p.count(needHairpin, a, +1)
	}
	for _, a := range old.local {
		p.count(needHairpin, a, -1)
	}
	p.keep(f, old, want)
	p.frontends(f, old, want)
}

// pool plans the change of a pool.
func (p *planner) pool(f ipfamily.Family, old, want *port, i poolIndex) {
	op, wp := &old.pools[i], &want.pools[i]
	p.element(f, old.inPools(i), want.inPools(i), func() Element { return old.poolElement(i) },
		func() Element { return want.poolElement(i) })
	p.element(f, old.sticky(i), want.sticky(i),
		func() Element { return old.rememberElement(i) }, func() Element { return want.rememberElement(i) })
	p.share(f, old, want, i)
	p.limits(f, old, want, i)
	p.members(f, old, want, i)
	p.unhealthy(f, old, want, i)
	had, has := op.slots, wp.slots
	if old.slotSet(i) != want.slotSet(i) {
		for n, ep := range had {
			p.del(f, old.slotElement(i, n, ep))
		}
		had = nil
	}
	for n := range max(len(had), len(has)) {
		switch {
		case n >= len(had):
			p.add(f, want.slotElement(i, n, has[n]))
		case n >= len(has):
			p.del(f, old.slotElement(i, n, had[n]))
		case had[n] != has[n]:
			p.replace(f, old.slotElement(i, n, had[n]), want.slotElement(i, n, has[n]))
		}
	}
}

// share plans the change of the share that a pool refuses.
func (p *planner) share(f ipfamily.Family, old, want *port, i poolIndex) {
	planned := p.planned
	p.element(f, old.pools[i].refused > 0, want.pools[i].refused > 0, func() Element { return old.shareElement(i) },
		func() Element { return want.shareElement(i) })
	p.planned += (rangeCost - 1) * (p.planned - planned)
}

// element plans the change of an element that may be there before and after.
func (p *planner) element(f ipfamily.Family, was, is bool, before, now func() Element) {
	switch {
	case was && is:
		if x, y := before(), now(); !x.same(&y) {
			p.replace(f, x, y)
		}
	case was:
		p.del(f, before())
	case is:
		p.add(f, now())
	}
}

// assign gives each endpoint of a pool its slots; it is in want, which is sorted, once for each. An endpoint keeps its
// slots. Endpoints beyond the end move into the holes, then new ones follow. So adding or removing one endpoint with
// one slot changes one or two elements, whatever the pool's size.
func assign(before, want []netip.AddrPort) []netip.AddrPort {
	if len(before) == 0 || slices.Equal(before, want) {
		return want
	}
	n := len(want)
	// used is, at the first place of an endpoint in want, how many of its places have a slot.
	slots, placed, used := make([]netip.AddrPort, n), make([]bool, n), make([]int32, n)
	place := func(slot int, ep netip.AddrPort) bool {
		first, ok := slices.BinarySearchFunc(want, ep, netip.AddrPort.Compare)
		if !ok {
			return false
		}
		i := first + int(used[first])
		if i == n || want[i] != ep {
			return false
		}
		used[first]++
		slots[slot], placed[i] = ep, true
		return true
	}
	var holes []int
	for slot := range n {
		if slot >= len(before) || !place(slot, before[slot]) {
			holes = append(holes, slot)
		}
	}
	for _, ep := range before[min(n, len(before)):] {
		if len(holes) > 0 && place(holes[0], ep) {
			holes = holes[1:]
		}
	}
	for i, ep := range want {
		if !placed[i] {
			slots[holes[0]], holes = ep, holes[1:]
		}
	}
	return slots
}

// members plans the change of the members of a pool with session affinity.
func (p *planner) members(f ipfamily.Family, old, want *port, i poolIndex) {
	before, now := old.members(i), want.members(i)
	same := old.memberSet() == want.memberSet()
	if same && slices.Equal(before, now) {
		return
	}
	have := make(map[netip.AddrPort]bool, len(before))
	for _, ep := range before {
		have[ep] = true
	}
	for _, ep := range now {
		if !have[ep] || !same {
			p.add(f, want.memberElement(i, ep))
		}
		if have[ep] && !same {
			p.del(f, old.memberElement(i, ep))
		}
		delete(have, ep)
	}
	for _, ep := range before {
		if have[ep] {
			p.del(f, old.memberElement(i, ep))
			p.txn.Tables[f].Sweep = true
		}
	}
}

// members returns the endpoints of a pool with session affinity; nil without it.
func (p *port) members(i poolIndex) []netip.AddrPort {
	if !p.sticky(i) {
		return nil
	}
	return p.pools[i].members()
}

// frontends walks both sorted lists of frontends side by side.
func (p *planner) frontends(f ipfamily.Family, old, want *port) {
	o, w, alike := old.frontends, want.frontends, old.sameElements(want)
	for len(o) > 0 || len(w) > 0 {
		switch {
		case len(w) == 0 || len(o) > 0 && o[0].key.Compare(w[0].key) < 0:
			p.frontend(f, old, &o[0], want, nil)
			o = o[1:]
		case len(o) == 0 || o[0].key.Compare(w[0].key) > 0:
			p.frontend(f, old, nil, want, &w[0])
			w = w[1:]
		default:
			if !alike || o[0] != w[0] {
				p.frontend(f, old, &o[0], want, &w[0])
			}
			o, w = o[1:], w[1:]
		}
	}
}

// frontend plans the change of one frontend from the old port to the new; of or wf may be nil.
func (p *planner) frontend(f ipfamily.Family, old *port, of *frontend, want *port, wf *frontend) {
	var before, now []Element
	var room [2][perFrontend]Element
	if of != nil {
		before = old.elements(of, &room[0])
		p.frontendNeeds(old, of, -1)
	}
	if wf != nil {
		now = want.elements(wf, &room[1])
		p.frontendNeeds(want, wf, +1)
	}
	var met [perFrontend]bool
	for i := range before {
		n := slices.IndexFunc(now, func(e Element) bool { return e.Set == before[i].Set })
		if n < 0 {
			p.del(f, before[i])
			continue
		}
		restart := restartsCounter(&before[i], old, of, want, wf)
		if met[n] = true; restart || !before[i].same(&now[n]) {
			p.replace(f, before[i], now[n])
			if !restart && SetByID(now[n].Set).Counter {
				p.txn.Tables[f].Keep = append(p.txn.Tables[f].Keep, now[n])
			}
		}
	}
	for n := range now {
		if !met[n] {
			p.add(f, now[n])
		}
	}
}

// frontendNeeds counts what a frontend needs of its address. One that stays as it is, is not counted again: a Service
// may have very many, and usually another endpoint is all that changes.
func (p *planner) frontendNeeds(of *port, f *frontend, by int) {
	if !f.clusterIP {
		p.count(needMasquerade, f.key.Addr, by)
	}
	if of.timeout > 0 {
		p.count(needAffinity, f.key.Addr, by)
	}
}

// restartsCounter reports whether a frontend's element must be rewritten to restart its count: packets were refused
// before and are served now, or the reverse.
func restartsCounter(e *Element, old *port, of *frontend, want *port, wf *frontend) bool {
	if len(want.frontends) > dataplane.MaxResetFrontends {
		return false
	}
	switch e.Set {
	case Services, InsideServices:
		return old.pools[of.inside].verdict != want.pools[wf.inside].verdict
	case OutsideServices:
		return old.pools[of.outside].verdict != want.pools[wf.outside].verdict
	}
	return false
}
