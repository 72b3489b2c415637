package packets

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// Trace is how one packet went.
type Trace struct {
	// Outcomes are in the order of the lots that lead to them; several may have the same Ending.
	Outcomes []Outcome
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
	Chain  string
	// Rule is the rule's place in the Chain, from 0.
	Rule int
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

// Steps returns the steps up to one, in their order.
func (s *Step) Steps() (list []*Step) {
	for ; s != nil; s = s.Before {
		list = append(list, s)
	}
	slices.Reverse(list)
	return list
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
	w.trace.Outcomes = w.out
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
