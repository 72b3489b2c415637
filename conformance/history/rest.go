package history

import (
	"fmt"
	"math"
	"slices"
	"sort"
)

// luck is the chance that a proxy which does nothing wrong is accused because no connection happened to reach an
// endpoint.
const luck = 1e-9

// needed is how many connections must miss one of so many endpoints before it is no chance.
func needed(endpoints int) int {
	if endpoints < 2 {
		return 1
	}
	return int(math.Ceil(math.Log(luck) / math.Log1p(-1/float64(endpoints))))
}

// rest looks whether connections see what was written last, once everything is at rest.
func (k *checker) rest(g *group) {
	if k.h.Rest == 0 {
		return
	}
	s := g.service
	begin := sort.Search(len(g.conns), func(i int) bool { return g.conns[i].Begin >= k.h.Rest })
	seen, answered := make(map[string]bool), 0
	for i := begin; i < len(g.conns); i++ {
		c := g.conns[i]
		if !s.final(c.saw()) {
			k.violateAround(Lost, g, i, s.last(c.saw(), c.End), "%s is at rest since %s, and %s does not see its last change",
				c.Service, clock(k.h.Rest), c.Node)
		}
		seen[c.saw()] = true
		if c.Outcome == Answered {
			answered++
		}
	}
	set := s.versions[len(s.versions)-1].set
	if begin == len(g.conns) {
		k.out.Unproven += max(1, len(set))
		return
	}
	if s.affinity != 0 {
		return // its clients stay where they are
	}
	for address := range set {
		switch {
		case seen[address]:
		case answered < needed(len(set)):
			k.out.Unproven++
		default:
			k.violateAround(Lost, g, begin, len(s.versions)-1, "%s: %s sent none of %d connections to %s at rest, one of %d "+
				"endpoints", s.name, g.node, answered, address, len(set))
		}
	}
}

// unused measures how long endpoints got no connection after they were added, though there were so many that it was no
// chance. Services with affinity are left out: their clients do not choose anew.
func (k *checker) unused(g *group) {
	s := g.service
	if s.affinity != 0 {
		return
	}
	var answered []*Conn
	landed := make(map[string][]int64) // by address, when connections to it began
	longest := int64(0)
	for _, c := range g.conns {
		if c.Outcome == Answered && s.last(c.At, c.End) >= 0 {
			answered = append(answered, c)
			landed[c.At] = append(landed[c.At], c.Begin)
			longest = max(longest, c.End-c.Begin)
		}
	}
	enough := needed(s.most)
	for address, spans := range s.spans {
		for _, p := range spans {
			if address == nobody || p.from == 0 {
				continue
			}
			from, to := s.versions[p.from].acked, int64(math.MaxInt64)
			if p.to < len(s.versions) {
				to = s.versions[p.to].sent - longest
			}
			if i, _ := slices.BinarySearch(landed[address], from); i < len(landed[address]) {
				to = min(to, landed[address][i])
			}
			k.missed(g, answered, enough, from, to, address)
		}
	}
}

// missed looks at an address that got none of the connections that began between two times.
func (k *checker) missed(g *group, answered []*Conn, enough int, from, to int64, address string) {
	after := func(at int64) int {
		return sort.Search(len(answered), func(i int) bool { return answered[i].Begin >= at })
	}
	first, end := after(from), after(to)
	if end-first < enough {
		return
	}
	// Even if the connections after this one missed it by chance, this one and those before did not.
	last := answered[end-enough]
	k.out.Unused.Conns += end - first - enough + 1
	beyond := k.measure(&k.out.Unused, g, from, last.Begin, func() []string {
		return []string{fmt.Sprintf("%s  %s of %s was acknowledged, and %s sent none of %d connections there until %s",
			clock(from), address, g.service.name, g.node, end-first, clock(min(to, latest)))}
	})
	if k.opts.Bound > 0 && beyond > k.opts.Bound {
		k.violate(Late, fmt.Sprintf("%s: %s sent none of %d connections to %s for %s after it was added", g.service.name,
			g.node, end-first, address, beyond), nil)
	}
}
