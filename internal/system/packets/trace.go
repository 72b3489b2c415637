package packets

import (
	"fmt"
	"io"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// Trace is how one packet may go. What happens to next to no packet is left out.
type Trace struct {
	// Outcomes are in the order of the lots that lead to them, each Ending once.
	Outcomes []Outcome
	// Steps are the rules that looked at the packet, in their order, and Later those that did after it was translated, or
	// behind its first hook, on the way to the first of the Outcomes that has any.
	Steps, Later []*Step
	// Unclear says what is not known of rules that the packet met, which are taken for rules that do not match.
	Unclear []string
	// failed is what went wrong when elements were read.
	failed error
}

func (t *Trace) unclear(err error) {
	if text := err.Error(); !slices.Contains(t.Unclear, text) {
		t.Unclear = append(t.Unclear, text)
	}
}

// Step is a rule that looked at a packet, with those that did before it.
type Step struct {
	Before *Step
	// Table is empty for nf_tables. Rule is the rule's place in the Chain, from 0, and Text what iptables-save prints of
	// it behind the chain.
	Table, Chain string
	Rule         int
	Text         string
	// Matched says that all of the rule was carried out, Later that the packet was translated before, or behind its first
	// hook.
	Matched, Later bool
	// Found are the elements that the rule found.
	Found []Found
}

// Found are elements of a set, by the keys that led to them. Where there are several, a lot chose among them.
type Found struct {
	Set  string
	Keys [][]byte
}

// Decided returns the last step up to one that matched and is not Later; nil if there is none.
func (s *Step) Decided() *Step {
	for s != nil && (s.Later || !s.Matched) {
		s = s.Before
	}
	return s
}

// stepPlace is where the rule of a step is.
type stepPlace struct {
	table, chain string
	rule         int
}

// gather puts together what ways have in common.
func (t *Trace) gather(ways []Outcome) {
	never := Chance{0, 1}
	at, met, places := map[Ending]int{}, map[*Step]bool{}, map[stepPlace]*Step{}
	for _, o := range ways {
		if n, known := at[o.Ending]; known {
			t.Outcomes[n].Chance = t.Outcomes[n].Chance.Plus(o.Chance)
		} else {
			at[o.Ending], t.Outcomes = len(t.Outcomes), append(t.Outcomes, o)
		}
		if !o.Chance.Near(never) {
			t.addSteps(&o, met, places)
		}
	}
	t.Outcomes = slices.DeleteFunc(t.Outcomes, func(o Outcome) bool { return o.Chance.Near(never) })
}

// addSteps adds the steps to an outcome that are not among those that were met. Other outcomes may have met the same
// rules.
func (t *Trace) addSteps(o *Outcome, met map[*Step]bool, places map[stepPlace]*Step) {
	var list []*Step
	for s := o.Last; s != nil && !met[s]; s = s.Before {
		met[s] = true
		list = append(list, s)
	}
	later := len(t.Later) == 0 && o.Verdict != Untouched
	for _, s := range slices.Backward(list) {
		at := stepPlace{s.Table, s.Chain, s.Rule}
		switch same := places[at]; {
		case s.Later && later:
			t.Later = append(t.Later, s)
		case s.Later:
		case same == nil:
			own := *s
			places[at], t.Steps = &own, append(t.Steps, &own)
		default:
			same.Matched = same.Matched || s.Matched
			same.Found = append(same.Found, s.Found...)
		}
	}
}

// Source is a table of nf_tables of which the elements are read as packets ask for them.
type Source struct {
	Family ipfamily.Family
	Name   string
	// Chains are the attributes of the chains as the kernel lists them, and Rules the expressions of their rules, by
	// chain.
	Chains []netlink.Attributes
	Rules  map[string][][]byte
	Sets   []Set
	// Read returns an element of a set for each key; one that is not there is the zero Element.
	Read func(set string, keys [][]byte) ([]Element, error)
}

// Set is a set or map of a Source. The lengths are of keys, with the padding of their parts, and of data.
type Set struct {
	Name            string
	KeyLen, DataLen int
	// Dynamic says that rules add elements.
	Dynamic bool
}

// Element is an element of a Source.
type Element struct {
	There bool
	// Data is what a map has for the key, or else Goto the chain that the key leads to. Odd says what of it is not known.
	Data      []byte
	Goto, Odd string
}

// Trace follows a packet. The error is that of Read, or says that the chains lead in a circle.
func (s *Source) Trace(p Packet, host *Host) (*Trace, error) {
	t := &nfTable{family: s.Family, name: s.Name, chains: map[string]*nfChain{}, sets: map[string]*nfSet{}}
	for _, a := range s.Chains {
		t.addChain(a)
	}
	for _, set := range s.Sets {
		of := &nfSet{name: set.Name, keyLen: set.KeyLen, dataLen: set.DataLen}
		if set.Dynamic {
			of.flags = unix.NFT_SET_EVAL
		}
		of.read = func(keys [][]byte) ([]*nfElement, error) { return t.read(s, set.Name, keys) }
		t.sets[set.Name] = of
	}
	for name, c := range t.chains {
		for i, expressions := range s.Rules[name] {
			c.rules = append(c.rules, t.compile(uint64(i)+1, expressions))
		}
		c.prepare()
	}
	r := Rules{host: host}
	r.tables[s.Family] = []*nfTable{t}
	r.order()
	w := walker{rules: &r, packet: &p, trace: &Trace{}}
	err := w.walk()
	w.trace.gather(w.out)
	return w.trace, err
}

func (t *nfTable) read(s *Source, set string, keys [][]byte) ([]*nfElement, error) {
	elements, err := s.Read(set, keys)
	out := make([]*nfElement, len(keys))
	for i, e := range elements {
		if !e.There {
			continue
		}
		out[i] = &nfElement{data: e.Data, code: codeGoto, chain: t.chains[e.Goto], odd: e.Odd}
		if e.Goto != "" && out[i].chain == nil {
			out[i].odd = "a verdict that leads to the unknown chain " + e.Goto
		}
	}
	return out, err
}

// ParseTraced reads what iptables-save, or ip6tables-save, prints for Trace.
func ParseTraced(f ipfamily.Family, text []byte, host *Host) (*Chains, error) {
	c := &Chains{host: host, seconds: map[string]uint32{}, keepsText: true}
	c.tables[f] = map[string]map[string]*iptChain{}
	if err := c.parse(f, text, io.Discard); err != nil {
		return nil, fmt.Errorf("iptables, %s: %w", f, err)
	}
	return c, nil
}

// Trace follows a packet. Recent, if not nil, reports whether a list of xt_recent, such as "KUBE-SEP-...", holds the
// sender, seen within so many seconds. The error says that the chains lead in a circle.
func (c *Chains) Trace(p Packet, recent func(list string, seconds uint32) bool) (*Trace, error) {
	w := iptWalker{chains: c, packet: &p, trace: &Trace{}, recent: recent}
	err := w.walk()
	w.trace.gather(w.out)
	return w.trace, err
}
