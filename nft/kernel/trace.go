package kernel

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// tracing is the trace of a packet through a table.
type tracing struct {
	*TableFound
	from   Tables
	packet dataplane.Packet
	// read holds the elements that were asked for; nil is for one that is not there.
	read map[elementRead]*nft.Listed
	way  nft.Walk
	// met are the steps that walk has, and places where, by the rules; ends are where it has each ending.
	met    map[*packets.Step]bool
	places map[rulePlace]int
	ends   map[dataplane.Ending]int
}

type elementRead struct{ set, key string }

type rulePlace struct {
	chain string
	rule  int
}

// walk follows a packet as the kernel would: package packets does, which knows nothing of what the rules are for.
// Unclear says of rules that it met what is not known of them; they are taken for rules that do not match.
func (t *TableFound) walk(from Tables, p dataplane.Packet, node dataplane.LocalNode) (w *nft.Walk, unclear []string,
	err error) {
	x := tracing{TableFound: t, from: from, packet: p, read: map[elementRead]*nft.Listed{},
		met: map[*packets.Step]bool{}, places: map[rulePlace]int{}, ends: map[dataplane.Ending]int{}}
	f := t.Table.Family
	source := packets.Source{Family: f, Name: nft.TableName, Read: x.elements, Rules: t.held.rules,
		Chains: slices.Collect(maps.Values(t.held.chains))}
	for _, s := range t.Table.Sets {
		source.Sets = append(source.Sets, packets.Set{Name: s.Name(), KeyLen: nft.PaddedLen(f, s.Key),
			DataLen: nft.PaddedLen(f, s.Data), Dynamic: s.Dynamic})
	}
	trace, err := source.Trace(packets.Packet{Source: netip.AddrPortFrom(p.Source, 0), Interface: p.Interface,
		Destination: netip.AddrPortFrom(p.Destination, p.Port), Protocol: packets.Protocol(p.Protocol)},
		&packets.Host{Addrs: node.Addrs, Bridged: node.Bridged})
	if err != nil {
		return nil, nil, err
	}
	x.outcomes(trace.Outcomes)
	return &x.way, trace.Unclear, nil
}

// elements reads elements by their keys.
func (x *tracing) elements(set string, keys [][]byte) ([]packets.Element, error) {
	id, _ := setByName(set)
	var ask []nft.Element
	for _, key := range keys {
		at := elementRead{set, string(key)}
		if _, known := x.read[at]; known {
			continue
		}
		e, ok := keyElement(id, x.Table.Family, parsed{key: key})
		if x.read[at] = nil; ok {
			ask = append(ask, e)
		}
	}
	if len(ask) > 0 {
		found, err := x.from.Get(x.Table.Family, id, ask)
		if err != nil {
			return nil, err
		}
		for i := range found {
			key := found[i].Key()
			if nft.SetByID(id).Interval { // a range, by a key that it holds
				key = keys[0]
			}
			x.read[elementRead{set, string(key)}] = &found[i]
		}
	}
	out := make([]packets.Element, len(keys))
	for i, key := range keys {
		if l := x.read[elementRead{set, string(key)}]; l != nil {
			out[i] = x.element(l)
		}
	}
	return out, nil
}

func (x *tracing) element(l *nft.Listed) packets.Element {
	e := packets.Element{There: true}
	switch set := nft.SetByID(l.Set); {
	case !set.Verdicts:
		e.Data = l.Data()
	case l.Chain.Kind == nft.NoChain:
		e.Odd = fmt.Sprintf("%s { %s }", set.Name(), l.Text(x.Table.Family, &set))
	default:
		e.Goto = l.Chain.Name()
	}
	return e
}

// outcomes puts together what outcomes have in common. What happens to next to no packet is left out.
func (x *tracing) outcomes(list []packets.Outcome) {
	var chances []packets.Chance
	for i := range list {
		o := &list[i]
		end := x.ending(o)
		id := dataplane.Ending{Outcome: end.Outcome, Endpoint: end.Endpoint}
		n, known := x.ends[id]
		if known {
			chances[n] = chances[n].Plus(o.Chance)
		} else {
			x.ends[id] = len(chances)
			x.way.Endings, chances = append(x.way.Endings, end), append(chances, o.Chance)
		}
		if !o.Chance.Near(packets.Chance{Den: 1}) {
			x.addSteps(o)
		}
	}
	for n := range chances {
		x.way.Endings[n].Share, x.way.Endings[n].Of = chances[n].Short()
	}
	x.way.Endings = slices.DeleteFunc(x.way.Endings, func(e dataplane.Ending) bool { return e.Share == 0 })
}

// addSteps adds the rules of an outcome, of which others may have met some, too.
func (x *tracing) addSteps(o *packets.Outcome) {
	later := len(x.way.Later) == 0 && o.Verdict == packets.Sent
	for _, s := range o.Last.Steps() {
		switch at := (rulePlace{s.Chain, s.Rule}); {
		case x.met[s] || s.Later && !later:
		case s.Later:
			x.way.Later = append(x.way.Later, x.step(s))
		default:
			x.met[s] = true
			step := x.step(s)
			n, known := x.places[at]
			if !known {
				x.places[at] = len(x.way.Steps)
				x.way.Steps = append(x.way.Steps, step)
				continue
			}
			x.way.Steps[n].Matched = x.way.Steps[n].Matched || step.Matched
			x.way.Steps[n].Found = append(x.way.Steps[n].Found, step.Found...)
		}
	}
}

// step returns a step with the rule and the elements as Verdict knows them.
func (x *tracing) step(s *packets.Step) nft.Step {
	step := nft.Step{Matched: s.Matched}
	i := slices.IndexFunc(x.Table.Chains, func(c nft.Chain) bool { return c.ID.Name() == s.Chain })
	if i >= 0 {
		step.Chain, step.Rule = x.Table.Chains[i].ID, x.Table.Chains[i].Rules[s.Rule]
	} else {
		step.Rule = nft.Rule{nft.Foreign{What: s.Chain + " " + describeRule(x.held.rules[s.Chain][s.Rule])}}
	}
	for _, found := range s.Found {
		for _, key := range found.Keys {
			step.Found = append(step.Found, *x.read[elementRead{found.Set, string(key)}])
		}
	}
	return step
}

// ending returns an outcome as an Inspector gives it, without its chance.
func (x *tracing) ending(o *packets.Outcome) (e dataplane.Ending) {
	last := o.Last // that matched, before the packet was translated or behind its first hook
	for last != nil && (last.Later || !last.Matched) {
		last = last.Before
	}
	switch {
	case o.Verdict == packets.Rejected:
		e.Outcome = dataplane.Rejected
	case o.Verdict == packets.Dropped:
		e.Outcome = dataplane.Dropped
	case o.Verdict == packets.Untouched && last != nil && last.Chain == (nft.ChainID{Kind: nft.LeftToIPVS}).Name():
		e.Outcome = dataplane.Scheduled
	case o.Verdict == packets.Untouched:
		e.Outcome = dataplane.Untouched
	case x.packet.Protocol.IsPing(): // it is this node's now
		e.Outcome = dataplane.Answered
	default:
		e.Outcome, e.Endpoint, e.Masquerade = dataplane.Sent, o.To, o.Masqueraded
		e.Hairpin = o.Masqueraded && x.packet.Source == o.To.Addr()
		e.Remember, e.Remembered = time.Duration(o.Remembered)*time.Second, o.Recalled
		step := x.step(last)
		if n := len(step.Found); n > 0 {
			e.Connections, e.Left = step.Connections(), step.Found[n-1].Expires
		}
	}
	return e
}
