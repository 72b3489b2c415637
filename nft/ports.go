package nft

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// settle decides what of a Service's new answer depends on the one before: slots and pool ids.
func (p *planner) settle(before, now *service) {
	for _, want := range now.ports {
		old := before.port(want.id)
		if old == nil {
			old = &port{id: want.id}
		}
		slots := old.slots
		if p.slotsFound != nil {
			slots = p.found(want)
		}
		for i := range want.slots {
			want.slots[i] = assign(slots[i], want.slots[i])
		}
		p.stickyIDs(old, want)
	}
	for _, old := range before.ports {
		if now.port(old.id) == nil {
			p.stickyIDs(old, &port{id: old.id})
		}
	}
}

// port takes a service port from what it was to what it should be; nil means it was not, or should not be, there.
func (p *planner) port(before, now *port) {
	old, want := before, now
	if old == nil {
		old = &port{id: now.id}
	}
	if want == nil {
		want = &port{id: before.id}
	}
	f := want.id.family
	p.members(f, old, want)
	addrs := p.m.tables[f.index()].hairpin
	for _, a := range want.local {
		p.count(addrs, a, +1, addrElement(Hairpin, a, 2))
	}
	for _, a := range old.local {
		p.count(addrs, a, -1, addrElement(Hairpin, a, 2))
	}
	p.frontends(f, old, want)
}

// assign gives each endpoint of a pool its slot. An endpoint keeps the slot it has; those beyond the end move into the holes,
// then the new ones: so one endpoint added or removed is one or two elements, whatever the pool's size.
func assign(before, want []netip.AddrPort) []netip.AddrPort {
	if len(before) == 0 || slices.Equal(before, want) {
		return want
	}
	n := len(want)
	slots, placed := make([]netip.AddrPort, n), make([]bool, n)
	place := func(slot int, ep netip.AddrPort) bool {
		i, ok := slices.BinarySearchFunc(want, ep, netip.AddrPort.Compare)
		if !ok || placed[i] {
			return false
		}
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

// stickyIDs gives the pools of a port with session affinity their ids, and frees those no longer used.
func (p *planner) stickyIDs(old, want *port) {
	for i := range want.stickyIDs {
		used := want.timeout > 0 && want.uses(poolIndex(i), NoChain)
		switch id := old.stickyIDs[i]; {
		case used && id != 0:
			want.stickyIDs[i] = id
		case used && want.stickyIDs[i] == 0:
			want.stickyIDs[i] = p.m.newPoolID(poolID{want.id, poolIndex(i)})
		case !used && id != 0:
			delete(p.m.pools, id)
			p.txn.Tables[want.id.family.index()].Sweep = true
		}
	}
}

// members takes the endpoints of sticky pools from what they were to what they should be.
func (p *planner) members(f Family, old, want *port) {
	for i := range want.stickyIDs {
		before, now := old.members(i), want.members(i)
		if slices.Equal(before, now) && old.stickyIDs[i] == want.stickyIDs[i] {
			continue
		}
		have := make(map[netip.AddrPort]bool, len(before))
		for _, ep := range before {
			have[ep] = true
		}
		for _, ep := range now {
			if !have[ep] {
				p.add(f, memberElement(want.stickyIDs[i], ep))
			}
			delete(have, ep)
		}
		for _, ep := range before {
			if have[ep] {
				p.del(f, memberElement(old.stickyIDs[i], ep))
				p.txn.Tables[f.index()].Sweep = true
			}
		}
	}
}

// members gives the endpoints of a sticky pool; nil if the pool is not sticky.
func (p *port) members(pool int) []netip.AddrPort {
	if p.stickyIDs[pool] == 0 {
		return nil
	}
	return p.slots[pool]
}

// frontends walks both sorted lists of frontends side by side.
func (p *planner) frontends(f Family, old, want *port) {
	o, w := old.frontends, want.frontends
	for len(o) > 0 || len(w) > 0 {
		switch {
		case len(w) == 0 || len(o) > 0 && o[0].key.Compare(w[0].key) < 0:
			p.frontend(f, old, &o[0], want, nil)
			o = o[1:]
		case len(o) == 0 || o[0].key.Compare(w[0].key) > 0:
			p.frontend(f, old, nil, want, &w[0])
			w = w[1:]
		default:
			p.frontend(f, old, &o[0], want, &w[0])
			o, w = o[1:], w[1:]
		}
	}
}

// frontend takes one frontend from what it was in the old port to what it should be in the new; of or wf may be nil.
func (p *planner) frontend(f Family, old *port, of *frontend, want *port, wf *frontend) {
	for _, set := range singles {
		var before, now Element
		var had, has bool
		if of != nil {
			before, had = old.single(of, set)
		}
		if wf != nil {
			now, has = want.single(wf, set)
		}
		switch {
		case had && has && !before.same(&now):
			p.replace(f, before, now)
		case had && !has:
			p.del(f, before)
		case has && !had:
			p.add(f, now)
		}
	}
	var key dataplane.Key
	var osrc, wsrc []netip.Prefix
	if of != nil {
		key, osrc = of.key, of.sources
	}
	if wf != nil {
		key, wsrc = wf.key, wf.sources
	}
	prefixes(osrc, wsrc, func(c netip.Prefix) { p.del(f, sourceElement(key, c)) },
		func(c netip.Prefix) { p.add(f, sourceElement(key, c)) })
	p.slots(f, Endpoints, key, old.insideSlots(of), want.insideSlots(wf))
	p.slots(f, OutsideEndpoints, key, old.outsideSlots(of), want.outsideSlots(wf))
}

// slots takes a frontend's slots from what they were to what they should be.
func (p *planner) slots(f Family, set SetID, key dataplane.Key, before, now []netip.AddrPort) {
	for n := range max(len(before), len(now)) {
		switch {
		case n >= len(before):
			p.add(f, slotElement(set, key, n, now[n]))
		case n >= len(now):
			p.del(f, slotElement(set, key, n, before[n]))
		case before[n] != now[n]:
			p.replace(f, slotElement(set, key, n, before[n]), slotElement(set, key, n, now[n]))
		}
	}
}
