package nfteval

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
)

// packet is a packet on its way. Copies of it go the ways that lots lead to.
type packet struct {
	hook     string
	iif, oif string
	src, dst netip.AddrPort
	// origSrc and origDst are as they were when its connection was first seen.
	origSrc, origDst netip.AddrPort
	mark, priority   uint32
	// tracked says that conntrack has seen it, untracked that it was told not to.
	tracked, untracked bool
	ctMark, status     uint32
	// dstDone and srcDone say that NAT has decided on its destination and source.
	dstDone, srcDone        bool
	translated, masqueraded bool
	source                  netip.Addr
	probability             float64
	// at is the rule that looks at it, found what it found so far.
	at      chainName
	found   []string
	updates []Update
	trace   []Step
}

// evaluation is a question on its way.
type evaluation struct {
	rules    *Ruleset
	question *Question
	family   string
	reverse  bool
	outcomes []Outcome
	// evaluated counts packets, so that a ruleset cannot take for ever.
	evaluated int
}

const (
	// maxEvaluated bounds the ways that are followed for one question.
	maxEvaluated = 1 << 20
	// maxDepth is how many chains may be left behind by jumps, as in the kernel.
	maxDepth = 16
)

// ruleVerdict is what has become of a packet in a rule, or in a chain.
type ruleVerdict uint8

const (
	// verdictContinue: it goes on to the next statement.
	verdictContinue ruleVerdict = iota
	// verdictBreak: it goes on to the next rule. At a chain's end it means the same as returned.
	verdictBreak
	// verdictReturn: it goes back to where the chain was jumped to from.
	verdictReturn
	// verdictAccept: it leaves the base chain, and goes on to the next.
	verdictAccept
	// verdictDone: it has an Outcome.
	verdictDone
)

// packetVerdict is a packet with what has become of it.
type packetVerdict struct {
	*packet
	verdict ruleVerdict
}

// hookUnit is what runs at a priority of a hook: a filter chain, or all nat chains.
type hookUnit struct {
	priority int64
	chains   []*chain
	nat      bool
}

// priorities of NAT in the kernel, by hook: it does not look at those of nat chains.
var natPriority = map[string]int64{"prerouting": -100, "output": -100, "input": 100, "postrouting": 100}

// trackPriority is that of conntrack in prerouting and output.
const trackPriority = -200

// units gives what runs in a hook, in order.
func (w *evaluation) units(hook string) ([]hookUnit, error) {
	var list []hookUnit
	nat := hookUnit{priority: natPriority[hook], nat: true}
	hasNAT := false
	for _, c := range w.rules.bases {
		foreign := c.name.family != w.family && c.name.family != "inet"
		if foreign || w.rules.dormant[tableName{c.name.family, c.name.table}] {
			continue
		}
		hasNAT = hasNAT || c.kind == "nat"
		if c.hook != hook {
			continue
		}
		switch c.kind {
		case "nat":
			nat.chains = append(nat.chains, c)
		case "filter", "route":
			list = append(list, hookUnit{priority: c.priority, chains: []*chain{c}})
		default:
			return nil, fmt.Errorf("%s %s %s: chain type %q is not known", c.name.family, c.name.table, c.name.chain, c.kind)
		}
	}
	if _, ok := natPriority[hook]; ok && hasNAT { // one nat chain anywhere makes NAT decide in all hooks
		list = append(list, nat)
	}
	if w.reverse {
		slices.Reverse(list)
		slices.Reverse(nat.chains)
	}
	slices.SortStableFunc(nat.chains, func(a, b *chain) int { return cmp.Compare(a.priority, b.priority) })
	slices.SortStableFunc(list, func(a, b hookUnit) int { return cmp.Compare(a.priority, b.priority) })
	return list, nil
}

// hasPriorityTies says whether two chains of a hook have the same priority, so that their order is not known.
func (r *Ruleset) hasPriorityTies(q *Question) bool {
	type place struct {
		hook     string
		nat      bool
		priority int64
	}
	seen := map[place]int{}
	for _, c := range r.bases {
		foreign := c.name.family != "inet" && c.name.family == "ip" != q.Dst.Addr().Is4()
		if foreign || r.dormant[tableName{c.name.family, c.name.table}] {
			continue
		}
		p := place{c.hook, c.kind == "nat", c.priority}
		seen[p]++
		if at := (place{c.hook, false, natPriority[c.hook]}); p.nat && seen[place{c.hook, true, math.MaxInt64}] == 0 {
			seen[place{c.hook, true, math.MaxInt64}] = 1
			seen[at]++
		}
	}
	for _, n := range seen {
		if n > 1 {
			return true
		}
	}
	return false
}

// rejectUnsupportedHooks fails if a packet would meet a chain of a hook that is not followed.
func (w *evaluation) rejectUnsupportedHooks() error {
	for _, c := range w.rules.bases {
		unsupported := c.hook == "ingress" || c.hook == "egress"
		if unsupported && (len(c.rules) > 0 || c.policy == "drop") &&
			!w.rules.dormant[tableName{c.name.family, c.name.table}] {
			return fmt.Errorf("nfteval: %s %s %s: hook %s is not followed", c.name.family, c.name.table, c.name.chain, c.hook)
		}
	}
	return nil
}

// runUnits takes a packet through a hook, and gives those that come out.
func (w *evaluation) runUnits(p *packet) ([]*packet, error) {
	units, err := w.units(p.hook)
	if err != nil {
		return nil, err
	}
	first := p.hook == "prerouting" || p.hook == "output"
	live := []*packet{p}
	for _, u := range units {
		var out []*packet
		for _, p := range live {
			p.tracked = p.tracked || first && u.priority > trackPriority && !p.untracked
			list, err := w.runUnit(u, p)
			if err != nil {
				return nil, err
			}
			out = append(out, list...)
		}
		live = out
	}
	for _, p := range live {
		p.tracked = p.tracked || !p.untracked
	}
	return live, nil
}

func (w *evaluation) runUnit(u hookUnit, p *packet) ([]*packet, error) {
	destination := p.hook == "prerouting" || p.hook == "output"
	done := func(p *packet) *bool {
		if destination {
			return &p.dstDone
		}
		return &p.srcDone
	}
	if u.nat && (p.untracked || *done(p)) {
		return []*packet{p}, nil
	}
	live := []*packet{p}
	for _, c := range u.chains {
		var out []*packet
		for _, p := range live {
			if u.nat && *done(p) {
				out = append(out, p)
				continue
			}
			list, err := w.runBaseChain(c, p)
			if err != nil {
				return nil, err
			}
			out = append(out, list...)
		}
		live = out
	}
	if u.nat {
		for _, p := range live {
			*done(p) = true
		}
	}
	return live, nil
}

// runBaseChain takes a packet through a base chain, and gives those that come out.
func (w *evaluation) runBaseChain(c *chain, p *packet) ([]*packet, error) {
	list, err := w.chain(c, p, 0)
	if err != nil {
		return nil, err
	}
	var out []*packet
	for _, f := range list {
		switch {
		case f.verdict == verdictDone:
		case f.verdict != verdictAccept && c.policy == "drop":
			f.trace = append(slices.Clip(f.trace), Step{f.hook, c.name.family, c.name.table, c.name.chain, 0, "policy drop",
				nil})
			w.addOutcome(f.packet, Outcome{Verdict: Dropped})
		default:
			out = append(out, f.packet)
		}
	}
	return out, nil
}

// chain takes a packet through the rules of a chain.
func (w *evaluation) chain(c *chain, p *packet, depth int) ([]packetVerdict, error) {
	var out []packetVerdict
	live := []*packet{p}
	for _, r := range c.rules {
		var rest []*packet
		for _, p := range live {
			list, err := w.rule(r, p, depth)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", r, err)
			}
			for _, f := range list {
				if f.verdict == verdictBreak {
					rest = append(rest, f.packet)
				} else {
					out = append(out, f)
				}
			}
		}
		live = rest
	}
	for _, p := range live {
		out = append(out, packetVerdict{p, verdictReturn})
	}
	return out, nil
}

// rule takes a packet through the statements of a rule. None that comes out is on.
func (w *evaluation) rule(r *rule, p *packet, depth int) ([]packetVerdict, error) {
	if w.evaluated++; w.evaluated > maxEvaluated {
		return nil, fmt.Errorf("more than %d ways", maxEvaluated)
	}
	start := *p
	start.at, start.found = r.in, nil
	live := []*packet{&start}
	var out []packetVerdict
	for i, node := range r.statements {
		var rest []*packet
		for _, p := range live {
			list, err := w.statement(r, node, p, depth)
			if errors.Is(err, errNoMatch) || errors.Is(err, errMasqueraded) && w.fails(r, r.statements[i+1:], p, depth) {
				list, err = []packetVerdict{{p, verdictBreak}}, nil
			}
			if err != nil {
				return nil, err
			}
			for _, f := range list {
				if f.verdict == verdictContinue {
					rest = append(rest, f.packet)
				} else {
					out = append(out, f)
				}
			}
		}
		live = rest
	}
	for _, p := range live {
		p.addStep(r)
		out = append(out, packetVerdict{p, verdictBreak})
	}
	return out, nil
}

// fails reports whether one of a rule's matches does not hold, so that others do not matter.
func (w *evaluation) fails(r *rule, statements []any, p *packet, depth int) bool {
	return slices.ContainsFunc(statements, func(node any) bool {
		if key, _ := only(node); key != "match" {
			return false
		}
		list, err := w.statement(r, node, p, depth)
		holds := func(f packetVerdict) bool { return f.verdict == verdictContinue }
		return errors.Is(err, errNoMatch) || err == nil && !slices.ContainsFunc(list, holds)
	})
}

// addStep writes down that a rule was carried out.
func (p *packet) addStep(r *rule) {
	p.trace = append(slices.Clip(p.trace), Step{p.hook, r.in.family, r.in.table, r.in.chain, r.handle, r.text, p.found})
	p.found = nil
}

// split gives a copy for each lot.
func (p *packet) split(d branch) *packet {
	c := *p
	c.probability *= d.probability
	c.found = slices.Concat(p.found, d.found)
	return &c
}
