// Package kernel writes package nft's values to the kernel's nf_tables by netlink, and reads them back. Each
// transaction is one batch in one datagram, so the kernel applies it as a whole or not at all.
package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
)

// headerLen is the length of the headers of a message of nf_tables.
const headerLen = netlink.HeaderLen + netlink.NetfilterLen

// Attributes that package unix lacks.
const (
	nftaTableUserdata       = 6  // since 5.10
	nftaChainUserdata       = 12 // since 5.10
	nftaSetExpr             = 17 // since 5.7
	nftaSetElemKeyEnd       = 10 // since 5.6
	nftSetConcat            = 0x80
	nftaSetDescConcat       = 2
	nftaSetFieldLen         = 1
	nfAccept                = 1
	dataTypeVerdict         = 0xffffff00 // NFT_DATA_VERDICT
	maxNest                 = netlink.MaxAttr - 512
	intervalEnd             = 1 // NFT_SET_ELEM_INTERVAL_END
	gotoCode          int32 = -4
)

// hookNumbers are the kernel's, from linux/netfilter.h.
var hookNumbers = map[string]uint32{
	"ingress": 0, "prerouting": 0, "input": 1, "forward": 2, "output": 3, "postrouting": 4,
}

// batch encodes a transaction. It records what each message holds, so that errors can name the object.
type batch struct {
	netlink.Buffer
	messages []message
	// tableName is another name than our tables have, for a probe.
	tableName string
	// tableFlags are those of new tables.
	tableFlags uint32
	// unfinished leaves out the end, without which the kernel takes nothing; single gives each new element a message of
	// its own, so that the kernel says of each what it thinks.
	unfinished, single bool
	// counts are the counts that new elements begin with.
	counts map[countKey]nft.Listed
	// chains caches the bytes of verdicts that lead to a chain.
	chains map[nft.ChainID][]byte
}

// message says what a message does, and which elements it carries, in order.
type message struct {
	seq      uint32
	start    int
	action   string
	family   ipfamily.Family
	ingress  bool
	elements []nft.Element
}

// encode encodes a transaction as one batch. The bytes are valid until the next call.
func (b *batch) encode(txn *nft.Txn) []byte {
	b.restart()
	if txn.Tables[0].Create != nil {
		b.reserve(txn)
	}
	for i, f := range ipfamily.All {
		b.table(f, &txn.Tables[i])
	}
	if !b.unfinished {
		b.Finish()
	}
	return b.Bytes()
}

// restart begins another batch in place of the last one.
func (b *batch) restart() {
	b.Reset()
	b.messages = b.messages[:0]
	b.Begin()
}

// keepBytes is what a batch may keep for the next: the usual change takes far less, and a node full of Services
// should not hold for good what its first fill took.
const keepBytes = 1 << 20

// trim frees memory that only a large transaction needed.
func (b *batch) trim() {
	if cap(b.Bytes()) > keepBytes {
		b.Buffer, b.messages = netlink.Buffer{}, nil
	}
}

// reserve makes room for a transaction's elements, which would otherwise be copied each time they outgrow it.
func (b *batch) reserve(txn *nft.Txn) {
	// An element with its key and data is four nested attributes; one with a verdict has two more and the chain's name.
	const perElement, perVerdict, perComment = 6 * netlink.AttrLen, 2*netlink.AttrLen + 4 + 32, netlink.AttrLen + 6
	n := 64 << 10 // structure
	for i := range txn.Tables {
		for _, elements := range txn.Tables[i].Add {
			for e := range elements {
				n += perElement + int(elements[e].KeyLen) + int(elements[e].DataLen)
				if elements[e].Chain.Kind != nft.NoChain {
					n += perVerdict
				}
				if elements[e].Comment != "" {
					n += perComment + len(elements[e].Comment)
				}
			}
		}
	}
	b.Grow(n)
}

// table writes a table's part in the order TableTxn gives.
func (b *batch) table(f ipfamily.Family, tt *nft.TableTxn) {
	b.tableAndSets(f, tt)
	for _, name := range tt.DelForeign {
		b.chainNamed(f, false, unix.NFT_MSG_DELRULE, name, "flush chain "+name)
	}
	for set := range tt.Del {
		if !tt.DropIngress || !nft.SetID(set).IsIngress() { // else they went with their table
			b.elements(f, unix.NFT_MSG_DELSETELEM, nft.SetID(set), tt.Del[set])
		}
	}
	chains := tt.AddChains
	if tt.Create != nil {
		chains = append(append([]nft.Chain{}, tt.Create.Chains...), chains...)
	}
	for i := range chains {
		b.newChain(f, &chains[i])
	}
	for _, c := range tt.Rewrite {
		b.chainNamed(f, c.ID.Kind.IsIngress(), unix.NFT_MSG_DELRULE, c.ID.Name(), "flush chain "+c.ID.Name())
		b.rules(f, &c)
	}
	for _, id := range tt.DelChains { // nothing leads there any more
		b.chainNamed(f, id.Kind.IsIngress(), unix.NFT_MSG_DELCHAIN, id.Name(), "delete chain "+id.Name())
	}
	for _, name := range tt.DelForeign {
		b.chainNamed(f, false, unix.NFT_MSG_DELCHAIN, name, "delete chain "+name)
	}
	for _, id := range tt.DelSets { // no rule uses it any more
		m := b.objectAt(f, id.IsIngress(), unix.NFT_MSG_DELSET, 0, "delete set "+id.String())
		b.Text(unix.NFTA_SET_NAME, id.String())
		b.End(m)
	}
	for i := range chains {
		b.rules(f, &chains[i])
	}
	for set := range tt.Add {
		b.elements(f, unix.NFT_MSG_NEWSETELEM, nft.SetID(set), tt.Add[set])
	}
	b.affinity(f, tt.Affinity)
}

// tableAndSets writes what of a table's part comes first.
func (b *batch) tableAndSets(f ipfamily.Family, tt *nft.TableTxn) {
	if tt.DropIngress {
		b.dropIngress(f)
	}
	sets := tt.AddSets
	if tt.Create != nil {
		b.replaceTable(f, tt.Create)
		sets = append(append([]nft.Set{}, tt.Create.Sets...), sets...)
	}
	b.addIngress(f, sets)
	for i := range sets {
		b.newSet(f, &sets[i])
	}
}

// affinity writes entries of the affinity map with the time that is left to them.
func (b *batch) affinity(f ipfamily.Family, entries []nft.Listed) {
	for len(entries) > 0 {
		m := b.object(f, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, "add element "+nft.Affinity.String())
		b.Text(unix.NFTA_SET_ELEM_LIST_SET, nft.Affinity.String())
		list := b.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for len(entries) > 0 && b.Len()-list < maxNest {
			e := &entries[0]
			start := b.Nest(unix.NFTA_LIST_ELEM)
			b.value(unix.NFTA_SET_ELEM_KEY, e.Key())
			b.value(unix.NFTA_SET_ELEM_DATA, e.Data())
			if e.Timeout > 0 {
				b.Big64(unix.NFTA_SET_ELEM_TIMEOUT, uint64(e.Timeout.Milliseconds()))
				b.Big64(unix.NFTA_SET_ELEM_EXPIRATION, uint64(max(e.Expires, time.Millisecond).Milliseconds()))
			}
			b.Close(start)
			entries = entries[1:]
		}
		b.Close(list)
		b.End(m)
	}
}

// tableAt returns the kernel's family and the name of a family's table, or of the one that it has at the ingress.
func tableAt(f ipfamily.Family, ingress bool) (proto uint8, name string) {
	const nfprotoNetdev = 5
	if ingress {
		return nfprotoNetdev, nft.IngressTable(f)
	}
	return f.NFProto(), nft.TableName
}

// tableText names a table for people.
func tableText(f ipfamily.Family, ingress bool) string {
	if ingress {
		return "netdev " + nft.IngressTable(f)
	}
	return f.NFT() + " " + nft.TableName
}

// object starts a message about something of our table and notes what it is for.
func (b *batch) object(f ipfamily.Family, msg uint16, flags uint16, what string) int {
	return b.objectAt(f, false, msg, flags, what)
}

// objectAt is object for either of a family's tables.
func (b *batch) objectAt(f ipfamily.Family, ingress bool, msg uint16, flags uint16, what string) int {
	b.messages = append(b.messages, message{seq: uint32(b.Count()) + 1, start: b.Len(), action: what, family: f,
		ingress: ingress})
	proto, name := tableAt(f, ingress)
	m := b.Netfilter(netlink.NFTables(msg), flags, proto)
	if b.tableName != "" {
		name = b.tableName + name
	}
	b.Text(1, name) // attribute 1 is the table's name in every message of nf_tables
	return m
}

// replaceTable replaces the table. It adds the table first, so that the deletion succeeds whether the table existed or
// not.
func (b *batch) replaceTable(f ipfamily.Family, t *nft.Table) {
	b.End(b.object(f, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "add table"))
	b.deleteTable(f)
	m := b.object(f, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "add table")
	if b.tableFlags != 0 {
		b.Big32(nftaTableFlags, b.tableFlags)
	}
	b.Attr(nftaTableUserdata, commentUserdata(t.Comment)...)
	b.End(m)
}

// claimTable makes a table that nobody owns ours.
func (b *batch) claimTable(f ipfamily.Family, flags uint32) {
	m := b.object(f, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "own table")
	b.Big32(nftaTableFlags, flags)
	b.End(m)
}

func (b *batch) deleteTable(f ipfamily.Family) {
	b.End(b.object(f, unix.NFT_MSG_DELTABLE, 0, "delete table"))
}

// deleteRules deletes the rules of all chains of the table.
func (b *batch) deleteRules(f ipfamily.Family) {
	b.End(b.object(f, unix.NFT_MSG_DELRULE, 0, "delete all rules"))
}

// dropIngress deletes the table at the ingress. It adds it first, so that the deletion succeeds whether it existed or
// not.
func (b *batch) dropIngress(f ipfamily.Family) {
	b.End(b.objectAt(f, true, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "add table"))
	b.End(b.objectAt(f, true, unix.NFT_MSG_DELTABLE, 0, "delete table"))
}

// addIngress adds the table at the ingress if some of these sets are to be there.
func (b *batch) addIngress(f ipfamily.Family, sets []nft.Set) {
	if !slices.ContainsFunc(sets, func(s nft.Set) bool { return s.ID.IsIngress() }) {
		return
	}
	m := b.objectAt(f, true, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "add table")
	if b.tableFlags != 0 {
		b.Big32(nftaTableFlags, b.tableFlags)
	}
	b.Attr(nftaTableUserdata, commentUserdata(nft.IngressComment)...)
	b.End(m)
}

func (b *batch) newSet(f ipfamily.Family, s *nft.Set) {
	m := b.objectAt(f, s.ID.IsIngress(), unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, "add set "+s.Name())
	b.Text(unix.NFTA_SET_NAME, s.Name())
	b.Big32(unix.NFTA_SET_FLAGS, setFlags(s))
	b.Big32(unix.NFTA_SET_KEY_TYPE, dataType(f, s.Key))
	b.Big32(unix.NFTA_SET_KEY_LEN, uint32(nft.PaddedLen(f, s.Key)))
	switch {
	case s.Verdicts:
		b.Big32(unix.NFTA_SET_DATA_TYPE, dataTypeVerdict)
	case s.IsMap():
		b.Big32(unix.NFTA_SET_DATA_TYPE, dataType(f, s.Data))
		b.Big32(unix.NFTA_SET_DATA_LEN, uint32(nft.PaddedLen(f, s.Data)))
	}
	b.setDescription(f, s)
	b.Big32(unix.NFTA_SET_ID, uint32(s.ID)+1)
	b.Attr(unix.NFTA_SET_USERDATA, setUserdata(f, s)...)
	if s.Counter {
		b.Attr(nftaSetExpr|unix.NLA_F_NESTED, marshal(f, &expr.Counter{})...)
	}
	if s.Limit {
		b.Attr(nftaSetExpr|unix.NLA_F_NESTED, marshal(f, limitExpr(nft.NoLimit))...)
	}
	b.End(m)
}

func setFlags(s *nft.Set) uint32 {
	var flags uint32
	if s.IsMap() {
		flags |= unix.NFT_SET_MAP
	}
	if s.Interval {
		flags |= unix.NFT_SET_INTERVAL
	}
	if s.Interval && len(s.Key) > 1 {
		flags |= nftSetConcat
	}
	if s.Dynamic {
		flags |= unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT
	}
	return flags
}

// setDescription tells the kernel the size, and the fields of a key that holds a range.
func (b *batch) setDescription(f ipfamily.Family, s *nft.Set) {
	concat := s.Interval && len(s.Key) > 1
	if s.Size == 0 && !concat {
		return
	}
	d := b.Nest(unix.NFTA_SET_DESC)
	if s.Size > 0 {
		b.Big32(unix.NFTA_SET_DESC_SIZE, s.Size)
	}
	if concat {
		c := b.Nest(nftaSetDescConcat)
		for _, field := range s.Key {
			e := b.Nest(unix.NFTA_LIST_ELEM)
			b.Big32(nftaSetFieldLen, uint32(field.Len(f)))
			b.Close(e)
		}
		b.Close(c)
	}
	b.Close(d)
}

func (b *batch) newChain(f ipfamily.Family, c *nft.Chain) {
	m := b.objectAt(f, c.ID.Kind.IsIngress(), unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, "add chain "+c.ID.Name())
	b.Text(unix.NFTA_CHAIN_NAME, c.ID.Name())
	if c.Hook != nil {
		h := b.Nest(unix.NFTA_CHAIN_HOOK)
		b.Big32(unix.NFTA_HOOK_HOOKNUM, hookNumbers[c.Hook.Name])
		b.Big32(unix.NFTA_HOOK_PRIORITY, uint32(c.Hook.Priority))
		if c.Device != "" {
			b.Text(unix.NFTA_HOOK_DEV, c.Device)
		}
		b.Close(h)
		b.Big32(unix.NFTA_CHAIN_POLICY, nfAccept)
		b.Text(unix.NFTA_CHAIN_TYPE, c.Hook.Type)
	}
	if c.Comment != "" {
		b.Attr(nftaChainUserdata, commentUserdata(c.Comment)...)
	}
	b.End(m)
}

// chainNamed writes a message that needs no more than a chain's name, which is attribute 3 of chains and 2 of rules.
func (b *batch) chainNamed(f ipfamily.Family, ingress bool, msg uint16, name, what string) {
	attr := uint16(unix.NFTA_CHAIN_NAME)
	if msg == unix.NFT_MSG_DELRULE {
		attr = unix.NFTA_RULE_CHAIN
	}
	m := b.objectAt(f, ingress, msg, 0, what)
	b.Text(attr, name)
	b.End(m)
}

func (b *batch) rules(f ipfamily.Family, c *nft.Chain) {
	for _, r := range c.Rules {
		m := b.objectAt(f, c.ID.Kind.IsIngress(), unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND,
			"add rule "+c.ID.Name()+" "+r.Text(f))
		b.Text(unix.NFTA_RULE_CHAIN, c.ID.Name())
		x := b.Nest(unix.NFTA_RULE_EXPRESSIONS)
		for _, e := range ruleExprs(f, r) {
			b.Attr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, marshal(f, e)...)
		}
		b.Close(x)
		b.End(m)
	}
}

// marshal never fails for the expressions of this package: the library only refuses kinds it does not know.
func marshal(f ipfamily.Family, e expr.Any) []byte {
	if e, ok := e.(*forward); ok {
		return e.marshal()
	}
	data, err := expr.Marshal(byte(f.NFProto()), e)
	if err != nil {
		panic(fmt.Sprintf("kernel: %T: %v", e, err))
	}
	return data
}

// elements writes elements of one set, as many to a message as its list takes: 64 KiB.
func (b *batch) elements(f ipfamily.Family, msg uint16, set nft.SetID, elements []nft.Element) {
	for len(elements) > 0 {
		what := "add element " + set.String()
		flags := uint16(unix.NLM_F_CREATE)
		if msg == unix.NFT_MSG_DELSETELEM {
			what, flags = "delete element "+set.String(), 0
		}
		m := b.objectAt(f, set.IsIngress(), msg, flags, what)
		b.Text(unix.NFTA_SET_ELEM_LIST_SET, set.String())
		list := b.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		n := 0
		for n < len(elements) && b.Len()-list < maxNest && !(b.single && n == 1 && msg == unix.NFT_MSG_NEWSETELEM) {
			b.element(f, &elements[n], msg == unix.NFT_MSG_NEWSETELEM)
			n++
		}
		b.Close(list)
		b.End(m)
		b.messages[len(b.messages)-1].elements = elements[:n]
		elements = elements[n:]
	}
}

// element writes one element; whole says whether with its data and comment, or only the key.
func (b *batch) element(f ipfamily.Family, e *nft.Element, whole bool) {
	start := b.Nest(unix.NFTA_LIST_ELEM)
	b.value(unix.NFTA_SET_ELEM_KEY, e.Key())
	switch e.Set {
	case nft.SourceRanges, nft.RefusedShares:
		b.value(nftaSetElemKeyEnd, e.KeyEnd(f))
	case nft.ServiceCIDRs, nft.SharedRanges:
		b.Close(start)
		b.rangeEnd(f, e)
		return
	}
	if whole {
		if e.Chain.Kind != nft.NoChain {
			b.Append(b.verdict(e.Chain)...)
		} else if e.Set == nft.RateLimits {
			b.Attr(unix.NFTA_SET_ELEM_EXPR|unix.NLA_F_NESTED, marshal(f, limitExpr(e.Limit()))...)
		} else if data := e.Data(); len(data) > 0 && e.Set != nft.RefusedShares {
			b.value(unix.NFTA_SET_ELEM_DATA, data)
		}
		if len(b.counts) > 0 {
			b.count(f, e)
		}
		if e.Comment != "" {
			u := b.Open(unix.NFTA_SET_ELEM_USERDATA)
			b.Append(udataComment, byte(len(e.Comment)+1))
			b.AppendText(e.Comment)
			b.Close(u)
		}
	}
	b.Close(start)
}

// count writes the count with which an element begins.
func (b *batch) count(f ipfamily.Family, e *nft.Element) {
	if l, ok := b.counts[countKeyOf(f, e)]; ok {
		b.Attr(unix.NFTA_SET_ELEM_EXPR|unix.NLA_F_NESTED,
			marshal(f, &expr.Counter{Packets: l.Packets, Bytes: l.Bytes})...)
	}
}

// rangeEnd writes the element that ends a range of a tree: the first key after it. A range up to the last address has
// none.
func (b *batch) rangeEnd(f ipfamily.Family, e *nft.Element) {
	last, _ := netip.AddrFromSlice(e.KeyEnd(f))
	next := last.Next()
	if !next.IsValid() {
		return
	}
	start := b.Nest(unix.NFTA_LIST_ELEM)
	b.value(unix.NFTA_SET_ELEM_KEY, next.AsSlice())
	b.Big32(unix.NFTA_SET_ELEM_FLAGS, intervalEnd)
	b.Close(start)
}

// value writes a nested attribute that holds one data value.
func (b *batch) value(typ uint16, v []byte) {
	n := b.Nest(typ)
	b.Attr(unix.NFTA_DATA_VALUE, v...)
	b.Close(n)
}

// verdict gives the data of an element that goes to a chain.
func (b *batch) verdict(id nft.ChainID) []byte {
	if v, ok := b.chains[id]; ok {
		return v
	}
	var w netlink.Buffer
	d := w.Nest(unix.NFTA_SET_ELEM_DATA)
	v := w.Nest(unix.NFTA_DATA_VERDICT)
	code := gotoCode
	w.Big32(unix.NFTA_VERDICT_CODE, uint32(code))
	w.Text(unix.NFTA_VERDICT_CHAIN, id.Name())
	w.Close(v)
	w.Close(d)
	if b.chains == nil {
		b.chains = map[nft.ChainID][]byte{}
	}
	b.chains[id] = w.Bytes()
	return w.Bytes()
}

// describe names the object of the message with a sequence number; offset is where in the message the kernel points
// to, or 0.
func (b *batch) describe(seq uint32, offset int) string {
	i := sort.Search(len(b.messages), func(i int) bool { return b.messages[i].seq >= seq })
	if i == len(b.messages) || b.messages[i].seq != seq {
		return "transaction"
	}
	n := &b.messages[i]
	what := tableText(n.family, n.ingress) + ": " + n.action
	if len(n.elements) == 0 {
		return what
	}
	index := b.elementAt(n, offset)
	e := &n.elements[max(index, 0)]
	set := nft.SetByID(e.Set)
	what = fmt.Sprintf("%s { %s }", what, e.Text(n.family, &set))
	if others := len(n.elements) - 1; index < 0 && others > 0 {
		what += fmt.Sprintf(" or one of the %d after it", others)
	}
	return what
}

// elementOf returns the rejected element. ok is false if something else was rejected, or one of several elements and
// the kernel does not say which.
func (b *batch) elementOf(r netlink.Error) (f ipfamily.Family, e nft.Element, ok bool) {
	i := sort.Search(len(b.messages), func(i int) bool { return b.messages[i].seq >= r.Seq })
	if i == len(b.messages) || b.messages[i].seq != r.Seq || len(b.messages[i].elements) == 0 {
		return 0, e, false
	}
	n, at := &b.messages[i], 0
	if len(n.elements) > 1 {
		at = b.elementAt(n, r.Offset)
	}
	if at < 0 {
		return 0, e, false
	}
	return n.family, n.elements[at], true
}

// elementAt gives the index of the element that an offset into a message lies in; -1 if it lies before the elements,
// as it does with kernels that do not say which one they refuse (5.10 does not, 6.1 does). Ranges of a tree are two
// on the wire.
func (b *batch) elementAt(n *message, offset int) int {
	at := headerLen + netlink.AttrLen // of the list's first element, after the table and the set
	var list []byte
	for typ, v := range netlink.Each(b.Bytes()[n.start+headerLen:]) {
		if typ == unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			list = v
			break
		}
		at += netlink.AttrLen + (len(v)+3)&^3
	}
	index := -1
	for _, v := range netlink.Each(list) {
		if at > offset {
			break
		}
		index++
		at += netlink.AttrLen + (len(v)+3)&^3
	}
	if n.elements[0].Set.IsTree() && index > 0 {
		index /= 2
	}
	return min(index, len(n.elements)-1)
}
