package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
)

// tableInfo is what the kernel says of a table itself.
type tableInfo struct {
	exists bool
	flags  uint32
	// owner is the netlink port that may write the table; 0 if everybody may.
	owner  uint32
	handle uint64
}

// Flags of tables; package unix has the first alone.
const (
	tableDormant = 0x1
	tableOwner   = 0x2 // since Linux 5.12
	tablePersist = 0x4 // since Linux 6.9

	nftaTableFlags  = 2
	nftaTableHandle = 4
	nftaTableOwner  = 7
)

// table looks for our table of a family.
func (c *Conn) table(f ipfamily.Family) (tableInfo, error) { return c.tableAt(f, false) }

// tableAt looks for either of our tables of a family.
func (c *Conn) tableAt(f ipfamily.Family, ingress bool) (info tableInfo, err error) {
	var w netlink.Buffer
	proto, name := tableAt(f, ingress)
	m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETTABLE), 0, proto)
	w.Text(unix.NFTA_TABLE_NAME, name)
	w.End(m)
	err = c.query(w.Bytes(), func(attrs []byte) {
		a := netlink.Decode(attrs)
		info = tableInfo{exists: true, flags: a[nftaTableFlags].Big32(), owner: a[nftaTableOwner].Big32(),
			handle: a[nftaTableHandle].Big64()}
	})
	// A kernel without the family netdev has no table there.
	if err != nil && !errors.Is(err, unix.ENOENT) && !(ingress && errors.Is(err, unix.EAFNOSUPPORT)) {
		return info, fmt.Errorf("nft: look for table %s: %w", tableText(f, ingress), err)
	}
	return info, nil
}

// structure is what a table holds besides elements, compared with what it should hold.
type structure struct {
	nft.Found
	// sets says that all sets are as they should be, and that elements and rules alone can correct the chains. counted
	// says that the kernel reports the number of elements of each set.
	sets, counted bool
	// digested says that the digests are in Verdict's format.
	digested bool
	counts   [nft.NumSets]int
	// differences describes what is not as it should be.
	differences []string
}

// structure reads a table back and compares it with what it should be. An extra chain with a name of ours counts as
// found, and is compared with the content that its name stands for.
func (c *Conn) structure(f ipfamily.Family, want nft.Table, layout nft.Structure) (*structure, error) {
	s := &structure{Found: nft.Found{Chains: map[nft.ChainID]bool{}}}
	err := errors.Join(c.compareSets(f, want, s), c.compareChains(f, want, layout, s), c.compareVerdicts(f, s))
	if err != nil {
		return nil, err
	}
	revisions, err := c.Elements(f, nft.RevisionSet)
	if err != nil {
		return nil, err
	}
	for _, r := range revisions {
		s.Revisions = append(s.Revisions, r.Element)
	}
	s.Revision = nft.RevisionOf(s.Revisions)
	digests, err := c.Elements(f, nft.DigestSet)
	for _, d := range digests {
		s.DigestElements = append(s.DigestElements, d.Element)
	}
	if s.Digests, s.digested = nft.DigestsOf(s.DigestElements); !s.digested {
		s.Revision = nft.Revision{} // which says that nobody knows what there is
	}
	return s, err
}

func (s *structure) addDifference(f ipfamily.Family, format string, args ...any) {
	s.differences = append(s.differences, fmt.Sprintf("%s %s: ", f.NFT(), nft.TableName)+fmt.Sprintf(format, args...))
}

// objects dumps all of a table's objects of a kind. A table that is not there has none.
func (c *Conn) objects(f ipfamily.Family, msg uint16, do func(attrs netlink.Attributes)) error {
	return errors.Join(c.objectsAt(f, false, msg, do), c.objectsAt(f, true, msg, do))
}

// objectsAt is objects for one of a family's tables.
func (c *Conn) objectsAt(f ipfamily.Family, ingress bool, msg uint16, do func(attrs netlink.Attributes)) error {
	var w netlink.Buffer
	proto, name := tableAt(f, ingress)
	m := w.Netfilter(netlink.NFTables(msg), unix.NLM_F_DUMP, proto)
	w.Text(1, name)
	w.End(m)
	var all []netlink.Attributes
	err := c.dump(w.Bytes(), func() { all = nil }, func(b []byte) {
		attrs := netlink.Decode(b)
		if attrs[1].Text() == name { // not every kernel looks at the table that was asked for
			all = append(all, attrs)
		}
	})
	if err != nil && !errors.Is(err, unix.ENOENT) && !(ingress && errors.Is(err, unix.EAFNOSUPPORT)) {
		return fmt.Errorf("nft: list table %s: %w", tableText(f, ingress), err)
	}
	for _, attrs := range all {
		do(attrs)
	}
	return nil
}

// nftaSetCount tells how many elements a set has, since Linux 6.16.
const nftaSetCount = 20

// compareSets looks at the sets.
func (c *Conn) compareSets(f ipfamily.Family, want nft.Table, s *structure) error {
	var seen [nft.NumSets]bool
	s.sets = true
	err := c.objects(f, unix.NFT_MSG_GETSET, func(attrs netlink.Attributes) {
		name := attrs[unix.NFTA_SET_NAME].Text()
		set, wanted := setNamed(want, name)
		if set == nil {
			s.sets = false
			s.addDifference(f, "set %s is not ours", name)
			return
		}
		seen[set.ID] = true
		if v := attrs[nftaSetCount]; len(v) == 4 {
			s.counted, s.counts[set.ID] = true, int(v.Big32())
			s.Counts[set.ID] = s.counts[set.ID]
		}
		switch {
		case !sameSet(f, *set, attrs):
			s.sets = false
			s.addDifference(f, "set %s is another one", name)
		case !wanted:
			s.Extra = append(s.Extra, set.ID)
			s.addDifference(f, "nothing needs set %s", name)
		}
	})
	for i := range want.Sets {
		if id := want.Sets[i].ID; !seen[id] {
			s.Missing = append(s.Missing, id)
			s.sets = s.sets && id.ComesLater()
			s.addDifference(f, "set %s is gone", want.Sets[i].Name())
		}
	}
	return err
}

// setNamed returns the set with a name: one that a table should have, or one of evidence that it should not have; nil
// if there is none.
func setNamed(want nft.Table, name string) (s *nft.Set, wanted bool) {
	for i := range want.Sets {
		if want.Sets[i].Name() == name {
			return &want.Sets[i], true
		}
	}
	for _, id := range nft.EvidenceSets {
		if set := nft.SetByID(id); set.Name() == name {
			return &set, false
		}
	}
	return nil, false
}

// sameSet compares a set with the attributes the kernel lists.
func sameSet(f ipfamily.Family, want nft.Set, attrs netlink.Attributes) bool {
	var w batch
	w.newSet(f, &want)
	same := true
	for typ, v := range netlink.Each(attrs[unix.NFTA_SET_DESC]) { // one that others made may take only so many elements
		same = same && (typ != unix.NFTA_SET_DESC_SIZE || len(v) == 4 && v.Big32() == want.Size)
	}
	for typ, v := range netlink.Each(w.Bytes()[headerLen:]) {
		switch typ {
		case unix.NFTA_SET_ID: // only meant for the transaction
		case unix.NFTA_SET_FLAGS: // not listed if there are none
			same = same && bytes.Equal(v, append(attrs[typ], make([]byte, 4)...)[:4])
		case nftaSetExpr:
			same = same && expressionName(attrs[typ]) == expressionName(v)
		case unix.NFTA_SET_DESC:
			same = same && covers(v, attrs[typ])
		default:
			same = same && bytes.Equal(v, attrs[typ])
		}
	}
	return same
}

// compareChains looks at the chains and their rules.
func (c *Conn) compareChains(f ipfamily.Family, want nft.Table, layout nft.Structure, s *structure) error {
	chains := map[string]netlink.Attributes{}
	if err := c.objects(f, unix.NFT_MSG_GETCHAIN, func(attrs netlink.Attributes) {
		name := attrs[unix.NFTA_CHAIN_NAME].Text()
		if chains[name] != nil { // the kernel adds a chain by a name that the same transaction gives to another
			s.sets = false // a name leads to only one of them, so that the other could be neither emptied nor deleted
			s.addDifference(f, "there is more than one chain %s", name)
		}
		chains[name] = attrs
	}); err != nil {
		return err
	}
	rules := map[string][][]byte{}
	if err := c.objects(f, unix.NFT_MSG_GETRULE, func(attrs netlink.Attributes) {
		chain := attrs[unix.NFTA_RULE_CHAIN].Text()
		rules[chain] = append(rules[chain], attrs[unix.NFTA_RULE_EXPRESSIONS])
	}); err != nil {
		return err
	}
	for i := range want.Chains {
		if name := want.Chains[i].ID.Name(); chains[name] == nil {
			s.addDifference(f, "chain %s is gone", name)
		}
	}
	for name, attrs := range chains {
		chain, ok := nft.ChainNamed(want, layout, name)
		if !ok {
			s.Foreign = append(s.Foreign, name)
			s.addDifference(f, "chain %s is not ours", name)
			continue
		}
		sound := sameChain(f, chain, attrs)
		if !sound {
			s.sets = false // no rewriting of rules will mend it
			s.addDifference(f, "chain %s is another one", name)
		} else if sound = sameRules(f, chain.Rules, rules[name]); !sound {
			s.addDifference(f, "the rules of chain %s are others", name)
		} else if !slices.ContainsFunc(want.Chains, func(c nft.Chain) bool { return c.ID == chain.ID }) {
			s.addDifference(f, "nothing needs chain %s", name)
		}
		s.Chains[chain.ID] = sound
	}
	slices.Sort(s.Foreign)
	slices.Sort(s.differences)
	return nil
}

// compareVerdicts looks at the verdict maps, whose elements follow from the chains that are there.
func (c *Conn) compareVerdicts(f ipfamily.Family, s *structure) error {
	var numbered []nft.ChainID
	for id := range s.Chains {
		if id.IsNumbered() {
			numbered = append(numbered, id)
		}
	}
	for set, want := range nft.VerdictElements(numbered) {
		id := nft.SetID(set)
		if !nft.SetByID(id).Verdicts || slices.Contains(s.Missing, id) {
			continue
		}
		listed, err := c.Elements(f, id)
		if err != nil {
			return err
		}
		there := map[string]nft.ChainID{}
		for i := range listed {
			there[string(listed[i].Key())] = listed[i].Chain
		}
		if len(listed) != len(want) || slices.ContainsFunc(want, func(e nft.Element) bool {
			return there[string(e.Key())] != e.Chain
		}) {
			s.Misled = true
			s.addDifference(f, "the elements of %s are others", id)
		}
	}
	return nil
}

// sameChain compares a chain, without its rules, with the attributes the kernel lists. A comment makes no difference:
// it cannot be changed in place, and one of an earlier version is no reason to replace the table.
func sameChain(f ipfamily.Family, want nft.Chain, attrs netlink.Attributes) bool {
	var w batch
	w.newChain(f, &want)
	_, based := attrs[unix.NFTA_CHAIN_HOOK]
	same := based == (want.Hook != nil)
	for typ, v := range netlink.Each(w.Bytes()[headerLen:]) {
		switch typ {
		case nftaChainUserdata:
		case unix.NFTA_CHAIN_HOOK:
			same = same && covers(v, attrs[typ])
		default:
			same = same && bytes.Equal(v, attrs[typ])
		}
	}
	return same
}

// sameRules compares the rules of a chain with the expressions the kernel lists of each.
func sameRules(f ipfamily.Family, want []nft.Rule, listed [][]byte) bool {
	if len(want) != len(listed) {
		return false
	}
	for i, r := range want {
		ours := ruleExprs(f, r)
		adoptScratch(ours, listed[i])
		n := 0
		same := true
		for _, theirs := range netlink.Each(listed[i]) {
			same = same && n < len(ours) && sameExpression(marshal(f, ours[n]), theirs)
			n++
		}
		if !same || n != len(ours) {
			return false
		}
	}
	return true
}

// adoptScratch moves what our expressions hold only for a moment, the sender before it is hashed and the data of an
// update, to the registers at which the kernel lists them: versions of nft have different places for it when they load
// what render prints. The place must lie behind the key, of which the hash is the last part.
func adoptScratch(ours []expr.Any, listed []byte) {
	n, key := 0, 0
	for _, theirs := range netlink.Each(listed) {
		if n == len(ours) {
			return
		}
		data := expressionData(theirs)
		switch e := ours[n].(type) {
		case *expr.Hash:
			key = place(e.DestRegister) + 1
			e.SourceRegister = moveLoads(ours[:n], e.SourceRegister, netlink.Find(data, unix.NFTA_HASH_SREG).Big32(), key)
		case *expr.Dynset:
			if key > 0 && e.SrcRegData != 0 {
				e.SrcRegData = moveLoads(ours[:n], e.SrcRegData, netlink.Find(data, unix.NFTA_DYNSET_SREG_DATA).Big32(), key)
			}
		}
		n++
	}
}

// moveLoads moves what the last expressions load, from a register on, to another one, if that is none of the first
// words, which are a key. It returns where it is then.
func moveLoads(exprs []expr.Any, from, to uint32, key int) uint32 {
	by := place(to) - place(from)
	if place(to) < key {
		return from
	}
	for _, e := range slices.Backward(exprs) {
		load, ok := e.(*expr.Payload)
		if !ok || place(load.DestRegister) < place(from) {
			break
		}
		load.DestRegister = register(place(load.DestRegister) + by)
	}
	return register(place(to))
}

// Attributes that the kernel does not list: they tell it about sets of the same transaction, or are 0.
const (
	lookupSetID = 4 // NFTA_LOOKUP_SET_ID
	dynsetSetID = 2 // NFTA_DYNSET_SET_ID
	dynsetExpr  = unix.NFTA_DYNSET_EXPR
	hashOffset  = unix.NFTA_HASH_OFFSET
)

// sameExpression compares an expression with what the kernel lists of it, which may be more than we wrote.
func sameExpression(ours, theirs []byte) bool {
	name := expressionName(ours)
	if expressionName(theirs) != name {
		return false
	}
	mine, held := expressionData(ours), expressionData(theirs)
	skip := map[string][]uint16{"lookup": {lookupSetID}, "dynset": {dynsetSetID, dynsetExpr}, "hash": {hashOffset}}[name]
	switch {
	case name == "counter":
		return true
	case name == "reject" && netlink.Find(mine, unix.NFTA_REJECT_TYPE).Big32() == unix.NFT_REJECT_TCP_RST:
		skip = []uint16{unix.NFTA_REJECT_ICMP_CODE} // which it has not
	}
	return coversBut(skip, mine, held) && (name != "dynset" || sameElementExpr(mine, held))
}

// sameElementExpr compares what two dynset expressions give to each element: nothing, a counter or a limit.
func sameElementExpr(ours, theirs []byte) bool {
	mine, held := netlink.Find(ours, dynsetExpr), netlink.Find(theirs, dynsetExpr)
	if len(mine) == 0 || len(held) == 0 {
		return len(mine) == len(held)
	}
	return sameExpression(mine, held)
}

// covers says whether all attributes of ours are among theirs.
func covers(ours, theirs []byte) bool { return coversBut(nil, ours, theirs) }

// coversBut is covers without the attributes of some types. Those of the same type are compared in their order.
func coversBut(skip []uint16, ours, theirs []byte) bool {
	listed := map[uint16][][]byte{}
	for typ, v := range netlink.Each(theirs) {
		listed[typ] = append(listed[typ], v)
	}
	for typ, v := range netlink.EachFlagged(ours) {
		nested := typ&unix.NLA_F_NESTED != 0
		typ &^= unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER
		if slices.Contains(skip, typ) {
			continue
		}
		if len(listed[typ]) == 0 {
			return false
		}
		held := listed[typ][0]
		listed[typ] = listed[typ][1:]
		if nested && !covers(v, held) || !nested && !bytes.Equal(v, held) {
			return false
		}
	}
	return true
}
