package packets

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Fault is a single fault that can be planted in what was listed.
type Fault struct {
	// What says what is wrong; Place is the chain or set.
	What, Place string
	// Plant plants it, and returns what takes it out again. Probe plants something unknown in the same place: where no
	// packet becomes unknown then, none comes there.
	Plant, Probe func() (undo func())
}

// ForbidLeftovers puts rules behind all others that make a packet unknown if it leaves with a priority or a mark.
func (r *Rules) ForbidLeftovers() {
	var rules []nfRule
	for _, key := range []uint8{unix.NFT_META_PRIORITY, unix.NFT_META_MARK} {
		rules = append(rules, nfRule{ops: []nfOp{{kind: opMeta, what: key},
			{kind: opCompare, what: unix.NFT_CMP_NEQ, n: 4, data: make([]byte, 4), sourceAt: -1}, {unknown: "what is left"}}})
	}
	for f, tables := range r.tables {
		for _, hook := range []int{hookInput, hookPostrouting} {
			for _, t := range tables {
				r.hooks[f][hook] = append(r.hooks[f][hook], &nfChain{table: t, name: "behind", base: true, rules: rules})
			}
		}
	}
}

// Faults returns faults of every kind for every rule and element: one that is missing, an element with other data or
// another key, a verdict that leads elsewhere, and an expression that is missing or compares with something else.
func (r *Rules) Faults() (list []Fault) {
	for _, tables := range r.tables {
		for _, t := range tables {
			for _, c := range sortedBy(t.chains, func(c *nfChain) string { return c.name }) {
				list = append(list, t.ruleFaults(c)...)
			}
			for _, s := range sortedBy(t.sets, func(s *nfSet) string { return s.name }) {
				list = append(list, t.setFaults(s)...)
			}
		}
	}
	return list
}

func (t *nfTable) ruleFaults(c *nfChain) (list []Fault) {
	swap := func(rules []nfRule) func() func() {
		return func() func() {
			old := c.rules
			put := func(rules []nfRule) {
				c.rules = rules
				c.prepare()
			}
			put(rules)
			return func() { put(old) }
		}
	}
	for i, rule := range c.rules {
		with := func(what string, rules []nfRule, reached []nfOp) {
			probe := slices.Clone(c.rules)
			probe[i].ops = slices.Insert(slices.Clone(reached), max(len(reached)-1, 0), nfOp{unknown: "a probe"})
			list = append(list, Fault{fmt.Sprintf("rule %d%s", i, what), t.family.NFT() + " " + c.name, swap(rules),
				swap(probe)})
		}
		with(" is missing", slices.Delete(slices.Clone(c.rules), i, i+1), rule.ops)
		for k, op := range rule.ops {
			change := func(what string, ops []nfOp) {
				rules := slices.Clone(c.rules)
				rules[i].ops = ops
				with(fmt.Sprintf(", expression %d %s", k, what), rules, ops)
			}
			other := slices.Clone(rule.ops)
			switch {
			case op.kind == opCompare || op.kind == opRange:
				change("is missing", slices.Delete(other, k, k+1))
			case op.kind == opVerdict && op.chain != nil:
				other[k].chain = t.otherChain(op.chain)
				change("leads to "+other[k].chain.name+", not "+op.chain.name, other)
			case op.kind == opLookup && op.inverted:
				other[k].inverted = false
				change("is the other way round", other)
			case op.kind == opLot || op.isLot:
				other[k].modulus++
				change("has one more value", other)
			}
		}
	}
	return list
}

// otherChain returns another chain, the nearest by name.
func (t *nfTable) otherChain(c *nfChain) *nfChain {
	names := slices.Sorted(maps.Keys(t.chains))
	i := slices.Index(names, c.name)
	for k := 1; ; k++ {
		if other := t.chains[names[(i+k)%len(names)]]; !other.base {
			return other
		}
	}
}

func (t *nfTable) setFaults(s *nfSet) (list []Fault) {
	place := t.family.NFT() + " " + s.name
	with := func(what, key string, change func(m map[string]nfElement)) {
		swap := func(change func(m map[string]nfElement)) func() func() {
			return func() func() {
				old := s.exact
				s.exact = maps.Clone(old)
				change(s.exact)
				return func() { s.exact = old }
			}
		}
		probe := s.exact[key]
		probe.odd = "a probe"
		list = append(list, Fault{fmt.Sprintf("element %x %s", key, what), place, swap(change),
			swap(func(m map[string]nfElement) { m[key] = probe })})
	}
	for _, key := range slices.Sorted(maps.Keys(s.exact)) {
		e := s.exact[key]
		with("is missing", key, func(m map[string]nfElement) { delete(m, key) })
		other := []byte(key)
		other[len(other)-1-len(strings.TrimRight(key, "\x00"))%2] ^= 0x40
		with("has another key", key, func(m map[string]nfElement) { delete(m, key); m[string(other)] = e })
		if e.data != nil {
			changed := e
			changed.data = bytes.Clone(e.data)
			changed.data[0] ^= 1
			with("has other data", key, func(m map[string]nfElement) { m[key] = changed })
		}
		if e.chain != nil {
			changed := e
			changed.chain = t.otherChain(e.chain)
			with("leads to "+changed.chain.name+", not "+e.chain.name, key, func(m map[string]nfElement) { m[key] = changed })
		}
	}
	for i, r := range s.ranges {
		swap := func(to ...nfRange) func() func() {
			ranges := slices.Replace(slices.Clone(s.ranges), i, i+1, to...)
			return func() func() {
				old := s.ranges
				s.ranges = ranges
				s.group()
				return func() { s.ranges = old; s.group() }
			}
		}
		probe := r
		probe.odd = "a probe"
		list = append(list, Fault{fmt.Sprintf("range %x is missing", r.low), place, swap(), swap(probe)},
			Fault{fmt.Sprintf("range %x is shorter", r.low), place,
				swap(nfRange{r.low, before(r.high), r.nfElement}), swap(probe)})
	}
	return list
}

// Unused reports whether no packet of a set of questions may ask for the place of a fault: what only later packets,
// pings or the proxy itself read.
func (f *Fault) Unused() bool {
	_, name, _ := strings.Cut(f.Place, " ")
	return slices.Contains([]string{"revision", "digests", "settings", "unhealthy-endpoints", "retry-services",
		"unanswered", "refused", "evidence", "evidence-input"}, name)
}
