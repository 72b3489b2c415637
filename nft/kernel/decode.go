package kernel

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// heldRules are the chains and rules of one of our tables, as they are on the wire.
type heldRules struct {
	// chains holds the attributes of each chain by its name.
	chains map[string]netlink.Attributes
	// rules holds the expressions of each rule, by its chain.
	rules map[string][][]byte
}

func (c *Conn) heldRules(f ipfamily.Family) (*heldRules, error) {
	h := &heldRules{map[string]netlink.Attributes{}, map[string][][]byte{}}
	err := c.objects(f, unix.NFT_MSG_GETCHAIN, func(attrs netlink.Attributes) {
		h.chains[attrs[unix.NFTA_CHAIN_NAME].Text()] = attrs
	})
	if err != nil {
		return nil, err
	}
	err = c.objects(f, unix.NFT_MSG_GETRULE, func(attrs netlink.Attributes) {
		chain := attrs[unix.NFTA_RULE_CHAIN].Text()
		h.rules[chain] = append(h.rules[chain], attrs[unix.NFTA_RULE_EXPRESSIONS])
	})
	return h, err
}

// structure reads from the rules what they were made for. It is only as good as the rules: whoever uses it compares
// them with those that it gives. What the rules may not tell, since their chain comes and goes, the settings do.
func (h *heldRules) structure(f ipfamily.Family, settings []nft.Listed) (s nft.Structure) {
	s.GuardLoopback = h.chains[nft.ChainID{Kind: nft.GuardLoopback}.Name()] != nil
	s.Evidence = h.chains[nft.ChainID{Kind: nft.UnansweredChain}.Name()] != nil
	s.Records = h.chains[nft.ChainID{Kind: nft.RecordResets}.Name()] != nil
	if ingress := h.chains[nft.ChainID{Kind: nft.KeepIngress}.Name()]; ingress != nil {
		s.Device = netlink.Find(ingress[unix.NFTA_CHAIN_HOOK], unix.NFTA_HOOK_DEV).Text()
	}
	for _, rules := range h.rules {
		for _, rule := range rules {
			for set := range nft.NumSets {
				if nft.IsOptional(set) && looksUp(rule, set) {
					s.Uses = s.Uses.With(set)
				}
			}
		}
	}
	if len(h.rules[nft.ChainID{Kind: nft.Input}.Name()]) < 2 { // nobody is remembered there
		s.Uses &^= nft.Uses(0).With(nft.Remember)
	}
	for _, rule := range h.rules[nft.ChainID{Kind: nft.Split}.Name()] {
		if looksUp(rule, nft.OutsideServices) {
			s.Pods = decodePods(f, expressions(rule))
		}
	}
	for _, rule := range h.rules[nft.ChainID{Kind: nft.ClusterIP}.Name()] {
		s.Ping = cmp.Or(s.Ping, decodePing(rule))
	}
	for _, rule := range h.rules[nft.ChainID{Kind: nft.FromClusterIP}.Name()] {
		s.MasqueradeAll = s.MasqueradeAll || len(expressions(rule)) == 1 // without a condition
	}
	config := dataplane.ConfigOf(nft.SettingsOf(settings))
	s.PodsFirst = config.AsKubeProxy && s.Pods.CIDR.IsValid()
	return s
}

func expressions(rule []byte) (list [][]byte) {
	for _, e := range netlink.Each(rule) {
		list = append(list, e)
	}
	return list
}

// looksUp says whether a rule looks into a set.
func looksUp(rule []byte, set nft.SetID) bool {
	return slices.ContainsFunc(expressions(rule), func(e []byte) bool {
		return expressionName(e) == "lookup" && netlink.Find(expressionData(e), unix.NFTA_LOOKUP_SET).Text() == set.String()
	})
}

// decodePing returns the address to which a rule translates all destinations; the zero Addr if it is another rule.
func decodePing(rule []byte) netip.Addr {
	list := expressions(rule)
	if n := len(list); n >= 2 && expressionName(list[n-2]) == "immediate" && expressionName(list[n-1]) == "nat" {
		to, _ := netip.AddrFromSlice(dataValue(netlink.Find(expressionData(list[n-2]), unix.NFTA_IMMEDIATE_DATA)))
		return to
	}
	return netip.Addr{}
}

// decodePods is matchPods' inverse: it reads the match that a rule begins with.
func decodePods(f ipfamily.Family, list [][]byte) (p dataplane.Pods) {
	if len(list) < 2 {
		return p
	}
	data := expressionData(list[0])
	mask, compared := []byte(nil), list[1]
	if expressionName(compared) == "bitwise" && len(list) > 2 {
		mask, compared = dataValue(netlink.Find(expressionData(compared), unix.NFTA_BITWISE_MASK)), list[2]
	}
	if expressionName(compared) != "cmp" {
		return p
	}
	value := dataValue(netlink.Find(expressionData(compared), unix.NFTA_CMP_DATA))
	switch expressionName(list[0]) {
	case "meta":
		if key := netlink.Find(data, unix.NFTA_META_KEY); key.Big32() != unix.NFT_META_IIFNAME {
			return p
		}
		if name := string(bytes.TrimRight(value, "\x00")); len(value) == unix.IFNAMSIZ {
			p.Interface = name
		} else {
			p.InterfacePrefix = name
		}
	case "payload":
		offset := netlink.Find(data, unix.NFTA_PAYLOAD_OFFSET)
		if offset.Big32() != addrOffset(f, nft.SourceAddr) || len(value) > f.AddrLen() {
			return p
		}
		bits := 8 * len(value)
		for i := range mask {
			bits += countOnes(mask[i]) - 8
		}
		addr, _ := netip.AddrFromSlice(append(bytes.Clone(value), make([]byte, f.AddrLen()-len(value))...))
		p.CIDR = netip.PrefixFrom(addr, bits)
	}
	return p
}

func countOnes(b byte) (n int) {
	for ; b != 0; b &= b - 1 {
		n++
	}
	return n
}

// read reads from the rules what they were made for, and which of them are there. It returns the table that should be
// there.
func (t *TableFound) read(f ipfamily.Family, held *heldRules, settings []nft.Listed) (wanted nft.Table) {
	t.held, t.Structure = held, held.structure(f, settings)
	var numbered []nft.ChainID
	for _, name := range slices.Sorted(maps.Keys(held.chains)) {
		if id, ok := nft.NumberedChain(name); ok {
			numbered = append(numbered, id)
		}
	}
	wanted = nft.TableOf(f, t.Structure, numbered)
	t.Table = held.table(f, wanted)
	return wanted
}

// table gives the chains of ours that are there, each with the rules that are in it. Wanted has the rules they should
// have.
func (h *heldRules) table(f ipfamily.Family, wanted nft.Table) nft.Table {
	t := nft.Table{Family: f, Comment: wanted.Comment, Sets: wanted.Sets}
	for _, c := range wanted.Chains {
		name := c.ID.Name()
		if h.chains[name] == nil {
			continue
		}
		held := c
		held.Rules = make([]nft.Rule, len(h.rules[name]))
		for i, rule := range h.rules[name] {
			held.Rules[i] = recognize(f, rule, i, c.Rules)
		}
		t.Chains = append(t.Chains, held)
	}
	return t
}

// recognize gives the rule of a chain that expressions stand for: most likely the one that should be in that place.
func recognize(f ipfamily.Family, rule []byte, place int, wanted []nft.Rule) nft.Rule {
	is := func(r nft.Rule) bool { return sameRules(f, []nft.Rule{r}, [][]byte{rule}) }
	if place < len(wanted) && is(wanted[place]) {
		return wanted[place]
	}
	if i := slices.IndexFunc(wanted, is); i >= 0 {
		return wanted[i]
	}
	return nft.Rule{nft.Foreign{What: describeRule(rule)}}
}

// describeRule names the expressions of a rule that is not ours, and what can be said of them in a word.
func describeRule(rule []byte) string {
	var words []string
	for _, e := range expressions(rule) {
		name, data := expressionName(e), expressionData(e)
		switch name {
		case "lookup", "dynset":
			name += " @" + netlink.Find(data, unix.NFTA_LOOKUP_SET).Text() // the same attribute in both
		case "immediate":
			if v := netlink.Find(netlink.Find(data, unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT); v != nil {
				name = verdictText(v)
			}
		}
		words = append(words, name)
	}
	return "(" + strings.Join(words, ", ") + ")"
}

func verdictText(v []byte) string {
	code := int32(netlink.Find(v, unix.NFTA_VERDICT_CODE).Big32())
	names := map[int32]string{0: "drop", 1: "accept", -1: "continue", -3: "jump", -4: "goto", -5: "return"}
	name, ok := names[code]
	if !ok {
		name = fmt.Sprintf("verdict %d", code)
	}
	if chain := netlink.Find(v, unix.NFTA_VERDICT_CHAIN).Text(); chain != "" {
		name += " " + chain
	}
	return name
}
