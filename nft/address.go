package nft

import (
	"bytes"
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// need is something that a Service needs of an address that it may share with others.
type need uint8

const (
	// needHairpin: an endpoint on this node that may reach itself. It is an address of no Service.
	needHairpin need = iota
	needClusterIP
	// needSilence: a cluster IP without an endpoint, which answers no ping.
	needSilence
	// needPing and needRefusal: a load balancer address that answers a ping from outside, and of which unused ports are
	// rejected, for packets from outside.
	needPing
	needRefusal
	// needMasquerade: ExternalServices may say something of its frontends.
	needMasquerade
	// needAffinity: it has frontends with session affinity.
	needAffinity
)

// addressKinds are the chains for what no frontend takes, in the order of the kinds' numbers, from 1.
var addressKinds = [...]ChainKind{ClusterIP, SilentClusterIP, LoadBalancer, SilentLoadBalancer, PingableAddress,
	OtherAddress}

// silentKind is the last kind of cluster IPs. To the number of a kind the others are added.
const (
	silentKind = 2
	stickyKind = 0x10
	// bothKind: a cluster IP that others have as their external address.
	bothKind = 0x20
)

// stickySources are the chains of Sources for addresses with session affinity, with those they lead to.
var stickySources = [...][2]ChainKind{{FromStickyClusterIP, FromClusterIP}, {FromStickyExternal, FromExternal},
	{FromStickyBoth, FromBoth}}

// kindOf returns the number of the kind of an address; 0 if no Service has it.
func (tm *tableModel) kindOf(a netip.Addr) (kind uint32) {
	needs := func(n need) bool { return tm.needed[sharedAddr{n, a}] > 0 }
	number := func(k ChainKind) uint32 { return uint32(slices.Index(addressKinds[:], k)) + 1 }
	switch {
	case needs(needClusterIP):
		if kind = number(ClusterIP); needs(needSilence) {
			kind = number(SilentClusterIP)
		}
		if needs(needMasquerade) {
			kind |= bothKind
		}
	case needs(needPing) && needs(needRefusal):
		kind = number(LoadBalancer)
	case needs(needRefusal):
		kind = number(SilentLoadBalancer)
	case needs(needPing):
		kind = number(PingableAddress)
	case needs(needMasquerade), needs(needAffinity):
		kind = number(OtherAddress)
	}
	if kind > 0 && needs(needAffinity) {
		kind |= stickyKind
	}
	return kind
}

// addressMaps have the kinds of addresses. SourceKinds has no cluster IPs without session affinity that are nothing
// else: they are many, and need none of it.
var addressMaps = [...]SetID{Addresses, SourceKinds}

// holdsKind reports whether a map has the addresses of a kind.
func holdsKind(m SetID, kind uint32) bool { return kind > 0 && (m == Addresses || kind > silentKind) }

// kindElement is an element of Addresses or SourceKinds.
func kindElement(set SetID, a netip.Addr, kind uint32) Element {
	e := addrElement(set, a, 1)
	e.setID(kind)
	return e
}

// fixedElements are those that every table has.
func fixedElements() (out [NumSets][]Element) {
	lead := func(set SetID, key uint32, to ChainKind) {
		e := idElement(set, key)
		e.Chain = to.id()
		out[set] = append(out[set], e)
	}
	for _, k := range fixedClasses {
		for _, e := range leadingTo(k.id()) {
			out[e.Set] = append(out[e.Set], e)
		}
	}
	for i, k := range addressKinds {
		from, own := FromExternal, uint32(i)+1
		if k == ClusterIP || k == SilentClusterIP {
			from = FromClusterIP
		}
		sticky := stickySources[slices.IndexFunc(stickySources[:], func(s [2]ChainKind) bool { return s[1] == from })][0]
		lead(Kinds, own, k)
		lead(Kinds, own|stickyKind, k)
		if holdsKind(SourceKinds, own) {
			lead(Sources, own, from)
		}
		lead(Sources, own|stickyKind, sticky)
		if from == FromClusterIP {
			lead(Kinds, own|bothKind, k)
			lead(Kinds, own|bothKind|stickyKind, k)
			lead(Sources, own|bothKind, FromBoth)
			lead(Sources, own|bothKind|stickyKind, FromStickyBoth)
		}
	}
	return out
}

// count adds to the number of those who need something of an address. Elements of Hairpin are planned when the first
// comes or the last goes; callers let come before they let go, so what stays is never planned. The kind of an address
// is planned at the end, by addresses. Such elements belong to no Service alone.
func (p *planner) count(n need, a netip.Addr, by int) {
	f := ipfamily.Of(a)
	tm, at := &p.m.tables[f], sharedAddr{n, a}
	if n != needHairpin {
		if _, noted := p.kindsBefore[f][a]; !noted {
			p.kindsBefore[f][a] = tm.kindOf(a)
		}
	}
	before := tm.needed[at]
	if tm.needed[at] += by; tm.needed[at] == 0 {
		delete(tm.needed, at)
	}
	comes, goes := before == 0, before+by == 0
	switch {
	case !comes && !goes:
	case n != needHairpin:
		p.planned++
	default:
		p.inShared(func() {
			if e := addrElement(Hairpin, a, 2); comes {
				p.add(f, e)
			} else {
				p.del(f, e)
			}
		})
	}
}

// addresses plans the addresses of which the kind is not what it was before the transaction.
func (p *planner) addresses() {
	for i, f := range ipfamily.All {
		touched := make([]netip.Addr, 0, len(p.kindsBefore[i]))
		for a := range p.kindsBefore[i] {
			touched = append(touched, a)
		}
		slices.SortFunc(touched, netip.Addr.Compare) // the same change is the same bytes
		for _, a := range touched {
			was, is := p.kindsBefore[i][a], p.m.tables[i].kindOf(a)
			if was == is {
				continue
			}
			p.inShared(func() {
				for _, set := range addressMaps {
					p.element(f, holdsKind(set, was), holdsKind(set, is), func() Element { return kindElement(set, a, was) },
						func() Element { return kindElement(set, a, is) })
				}
			})
		}
		clear(p.kindsBefore[i])
	}
}

// inShared plans what belongs to no Service alone.
func (p *planner) inShared(plan func()) {
	own := p.bucket
	p.bucket = sharedBucket
	plan()
	p.bucket = own
}

// VerdictElements returns the elements of a table's verdict maps, given its numbered chains.
func VerdictElements(numbered []ChainID) (out [NumSets][]Element) {
	out = fixedElements()
	for _, id := range numbered {
		for _, e := range leadingTo(id) {
			out[e.Set] = append(out[e.Set], e)
		}
	}
	return out
}

// addKinds adds the elements of an address.
func (tm *tableModel) addKinds(to *[NumSets][]Element, a netip.Addr) {
	for _, set := range addressMaps {
		if kind := tm.kindOf(a); holdsKind(set, kind) {
			to[set] = append(to[set], kindElement(set, a, kind))
		}
	}
}

// sharedElements returns the elements of addresses, and those of verdict maps.
func (tm *tableModel) sharedElements() (out [NumSets][]Element) {
	out = VerdictElements(slices.Collect(maps.Keys(tm.chains)))
	seen := map[netip.Addr]bool{}
	for at := range tm.needed {
		switch {
		case at.need == needHairpin:
			out[Hairpin] = append(out[Hairpin], addrElement(Hairpin, at.addr, 2))
		case !seen[at.addr]:
			seen[at.addr] = true
			tm.addKinds(&out, at.addr)
		}
	}
	for _, set := range shared { // the same correction is the same bytes
		slices.SortFunc(out[set], func(a, b Element) int { return bytes.Compare(a.Key(), b.Key()) })
	}
	return out
}
