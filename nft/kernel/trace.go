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
}

type elementRead struct{ set, key string }

// walk follows a packet as the kernel would: package packets does, which knows nothing of what the rules are for.
// Unclear says of rules that it met what is not known of them; they are taken for rules that do not match.
func (t *TableFound) walk(from Tables, p dataplane.Packet, node dataplane.LocalNode) (w *nft.Walk, unclear []string,
	err error) {
	x, f := tracing{t, from, p, map[elementRead]*nft.Listed{}}, t.Table.Family
	source := packets.Source{Family: f, Name: nft.TableName, Read: x.elements, Rules: t.held.rules,
		Chains: slices.Collect(maps.Values(t.held.chains))}
	for _, s := range t.Table.Sets {
		source.Sets = append(source.Sets, packets.Set{Name: s.Name(), KeyLen: nft.PaddedLen(f, s.Key),
			DataLen: nft.PaddedLen(f, s.Data), Dynamic: s.Dynamic})
	}
	trace, err := source.Trace(packets.Packet{Source: netip.AddrPortFrom(p.Source, 0), Interface: p.Interface,
		Destination: netip.AddrPortFrom(p.Destination, p.Port), Protocol: packets.Protocol(p.Protocol), MAC: p.MAC},
		&packets.Host{Addrs: node.Addrs, Bridged: node.Bridged})
	if err != nil {
		return nil, nil, err
	}
	w = &nft.Walk{}
	slots, all := make([]int, len(trace.Outcomes)), 0
	for i := range trace.Outcomes {
		end, n := x.ending(&trace.Outcomes[i])
		w.Endings, slots[i], all = append(w.Endings, end), n, all+n
	}
	for i, n := range slots { // the chances of most are as many as their slots: 2 of 10, and not 1 of 5
		if n > 0 && trace.Outcomes[i].Chance.Near(packets.NewChance(uint64(n), uint64(all))) {
			w.Endings[i].Share, w.Endings[i].Of = n, all
		}
	}
	for _, s := range trace.Steps {
		w.Steps = append(w.Steps, x.step(s))
	}
	for _, s := range trace.Later {
		w.Later = append(w.Later, x.step(s))
	}
	return w, trace.Unclear, nil
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
	switch {
	case len(ask) > 1 && nft.SetByID(id).Interval:
		if err := x.within(id, ask); err != nil {
			return nil, err
		}
	case len(ask) > 0:
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

// within reads the ranges that hold some keys, all of one pool.
func (x *tracing) within(set nft.SetID, keys []nft.Element) error {
	ranges, _, err := x.from.List(x.Table.Family, set)
	ranges = slices.DeleteFunc(ranges, func(l nft.Listed) bool { return l.ID() != keys[0].ID() })
	for i := range keys {
		if l, ok := nft.Holding(x.Table.Family, ranges, &keys[i]); ok {
			x.read[elementRead{set.String(), string(keys[i].Key())}] = &l
		}
	}
	return err
}

func (x *tracing) element(l *nft.Listed) packets.Element {
	e := packets.Element{There: true}
	switch set := nft.SetByID(l.Set); {
	case set.Limit:
		e.Odd = packets.OverLimit
	case !set.Verdicts:
		e.Data = l.Data()
	case l.Chain.Kind == nft.NoChain:
		e.Odd = fmt.Sprintf("%s { %s }", set.Name(), l.Text(x.Table.Family, &set))
	default:
		e.Goto = l.Chain.Name()
	}
	return e
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

// outcomes are what verdicts are called.
var outcomes = [...]dataplane.Outcome{packets.Untouched: dataplane.Untouched, packets.Sent: dataplane.Sent,
	packets.Rejected: dataplane.Rejected, packets.Dropped: dataplane.Dropped, packets.Forwarded: dataplane.Forwarded}

// ending returns an outcome as an Inspector gives it, and how many slots lead to it.
func (x *tracing) ending(o *packets.Outcome) (e dataplane.Ending, slots int) {
	e.Outcome = outcomes[o.Verdict]
	by := o.Last.Decided()
	e.Share, e.Of = o.Chance.Short()
	switch {
	case o.Verdict == packets.Forwarded:
		e.Endpoint = o.To
	case o.Verdict == packets.Untouched && by != nil && by.Chain == (nft.ChainID{Kind: nft.LeftToIPVS}).Name():
		e.Outcome = dataplane.Scheduled
	case o.Verdict == packets.Sent && x.packet.Protocol.IsPing(): // it is this node's now
		e.Outcome = dataplane.Answered
	case o.Verdict == packets.Sent:
		e.Endpoint, e.Masquerade, e.Hairpin = o.To, o.Masqueraded, o.Masqueraded && x.packet.Source == o.To.Addr()
		e.Remember, e.Remembered = time.Duration(o.Remembered)*time.Second, o.Recalled
		step := x.step(by)
		if slots = len(step.Found); slots > 0 {
			e.Connections, e.Left = step.Connections(), step.Found[slots-1].Expires
		}
	}
	return e, slots
}
