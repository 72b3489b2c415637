package kernel

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
)

// hand is a transaction of somebody else's.
type hand struct {
	w *walker
	b batch
	c content
	// i is the family it is about.
	i int
}

func (h *hand) family() ipfamily.Family { return ipfamily.All[h.i] }

func (h *hand) table() *tableContent { return &h.c[h.i] }

// anySet chooses one of our sets with elements; Affinity is the packets'.
func (h *hand) anySet() (nft.SetID, bool) {
	var sets []nft.SetID
	for set, list := range h.table().bySet {
		if len(list) > 0 && nft.SetID(set) != nft.Affinity {
			sets = append(sets, nft.SetID(set))
		}
	}
	if len(sets) == 0 {
		return 0, false
	}
	return oneOf(h.w.Rand, sets...), true
}

// anyElement chooses an element of ours.
func (h *hand) anyElement() (e nft.Element, ok bool) {
	set, ok := h.anySet()
	if !ok {
		return e, false
	}
	return oneOf(h.w.Rand, h.table().bySet[set]...), true
}

// anyChain chooses a chain by name.
func (h *hand) anyChain() string {
	names := slices.Sorted(func(yield func(string) bool) {
		for n := range h.table().chains {
			if !yield(n) {
				return
			}
		}
	})
	if len(names) == 0 {
		return "none"
	}
	return oneOf(h.w.Rand, names...)
}

// edit is something that others do to our tables.
type edit struct {
	name string
	do   func(h *hand)
}

var edits = []edit{
	{"delete elements", func(h *hand) {
		for range 1 + h.w.IntN(4) {
			if e, ok := h.anyElement(); ok {
				h.b.elements(h.family(), unix.NFT_MSG_DELSETELEM, e.Set, []nft.Element{e})
			}
		}
	}},
	{"add elements", func(h *hand) {
		for range 1 + h.w.IntN(3) {
			h.add(false)
		}
	}},
	{"alter elements", func(h *hand) { h.add(true) }},
	{"jump instead of goto", (*hand).jump},
	{"flush set", func(h *hand) {
		set := nft.SetID(h.w.IntN(int(nft.NumSets)))
		if set == nft.Affinity {
			set = nft.Services
		}
		m := h.b.object(h.family(), unix.NFT_MSG_DELSETELEM, 0, "")
		h.b.Text(unix.NFTA_SET_ELEM_LIST_SET, set.String())
		h.b.End(m)
	}},
	{"flush chain", func(h *hand) { h.b.chainNamed(h.family(), false, unix.NFT_MSG_DELRULE, h.anyChain(), "") }},
	{"flush all chains", func(h *hand) { h.b.End(h.b.object(h.family(), unix.NFT_MSG_DELRULE, 0, "")) }},
	{"delete chain", (*hand).deleteChain},
	{"rename chain", (*hand).rename},
	{"add chain", (*hand).addChain},
	{"add rule", func(h *hand) { h.rule(h.anyChain(), unix.NLM_F_APPEND*uint16(h.w.IntN(2))) }},
	{"chain with another policy", func(h *hand) {
		m := h.b.object(h.family(), unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, "")
		h.b.Text(unix.NFTA_CHAIN_NAME, oneOf(h.w.Rand, "prerouting", "output", "postrouting"))
		h.b.Big32(unix.NFTA_CHAIN_POLICY, 0)
		h.b.End(m)
	}},
	{"chain with another priority", (*hand).moveChain},
	{"add set", func(h *hand) { h.set("mine") }},
	{"set of another kind", func(h *hand) {
		h.b.End(h.b.object(h.family(), unix.NFT_MSG_DELRULE, 0, ""))
		name := oneOf(h.w.Rand, nft.Hairpin, nft.Addresses, nft.Pools, nft.Affinity).String()
		h.deleteSet(name)
		if h.w.IntN(2) == 0 {
			h.set(name)
		}
	}},
	{"smaller set", func(h *hand) {
		h.b.End(h.b.object(h.family(), unix.NFT_MSG_DELRULE, 0, ""))
		set := nft.SetByID(oneOf(h.w.Rand, nft.Endpoints, nft.Hairpin, nft.Addresses, nft.Affinity, nft.RevisionSet))
		set.Size = 1
		h.deleteSet(set.Name())
		h.b.newSet(h.family(), &set)
	}},
	{"delete table", func(h *hand) { h.b.deleteTable(h.family()) }},
	{"empty table", func(h *hand) {
		h.b.deleteTable(h.family())
		h.b.End(h.b.object(h.family(), unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, ""))
	}},
	{"table sleeps", func(h *hand) { h.b.claimTable(h.family(), tableDormant) }},
	{"flush ruleset",
		func(h *hand) { h.b.End(h.b.Netfilter(netlink.NFTables(unix.NFT_MSG_DELTABLE), 0, unix.NFPROTO_UNSPEC)) }},
	{"forget affinity", func(h *hand) {
		m := h.b.object(h.family(), unix.NFT_MSG_DELSETELEM, 0, "")
		h.b.Text(unix.NFTA_SET_ELEM_LIST_SET, nft.Affinity.String())
		h.b.End(m)
	}},
}

// add adds an element that is nearly one of ours, or puts it in the place of that one.
func (h *hand) add(replace bool) {
	e, ok := h.anyElement()
	if !ok {
		return
	}
	def := nft.SetByID(e.Set)
	key, data := slices.Clone(e.Key()), slices.Clone(e.Data())
	var end []byte
	chain, comment := "", e.Comment
	if def.Interval && replace {
		end = e.KeyEnd(h.family())
	}
	if def.Verdicts {
		chain = e.Chain.Name()
	}
	switch at := h.w.IntN(4); {
	case !replace:
		n := h.w.IntN(len(key))
		key[n]++
	case at == 0 || len(data) == 0 && chain == "":
		comment = "nothing of ours"
	case chain != "":
		chain = oneOf(h.w.Rand, "no-endpoints", "no-local-endpoints", h.anyChain())
	default:
		data[h.w.IntN(len(data))]++
	}
	other, ok := nft.ElementFrom(h.family(), e.Set, key, end, data, chain, comment)
	if !ok {
		return
	}
	if replace {
		h.b.elements(h.family(), unix.NFT_MSG_DELSETELEM, e.Set, []nft.Element{e})
	}
	h.b.elements(h.family(), unix.NFT_MSG_NEWSETELEM, e.Set, []nft.Element{other})
}

// jump has packets jump where they should go.
func (h *hand) jump() {
	list := h.table().bySet[nft.Picks]
	if len(list) == 0 {
		return
	}
	e := oneOf(h.w.Rand, list...)
	h.b.elements(h.family(), unix.NFT_MSG_DELSETELEM, e.Set, []nft.Element{e})
	was := h.b.chains
	code := int32(unix.NFT_JUMP)
	var v netlink.Buffer
	d := v.Nest(unix.NFTA_SET_ELEM_DATA)
	n := v.Nest(unix.NFTA_DATA_VERDICT)
	v.Big32(unix.NFTA_VERDICT_CODE, uint32(code))
	v.Text(unix.NFTA_VERDICT_CHAIN, e.Chain.Name())
	v.Close(n)
	v.Close(d)
	h.b.chains = map[nft.ChainID][]byte{e.Chain: v.Bytes()}
	h.b.elements(h.family(), unix.NFT_MSG_NEWSETELEM, e.Set, []nft.Element{e})
	h.b.chains = was
}

// rule adds a rule.
func (h *hand) rule(chain string, flags uint16, does ...nft.Statement) {
	m := h.b.object(h.family(), unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, "")
	h.b.Text(unix.NFTA_RULE_CHAIN, chain)
	x := h.b.Nest(unix.NFTA_RULE_EXPRESSIONS)
	for _, e := range ruleExprs(h.family(), append(nft.Rule{nft.Counter{}}, does...)) {
		h.b.Attr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, marshal(h.family(), e)...)
	}
	h.b.Close(x)
	h.b.End(m)
}

// addChain adds a chain: of a strange name, or of a name of ours, with or without what that name promises.
func (h *hand) addChain() {
	name := oneOf(h.w.Rand, "mine", "pick-77", "pick-077", "sticky-78", "uncounted-pick-79", "remember-5")
	c, ours := nft.ChainNamed(nft.ProbeTable(h.family(), nft.Structure{}), nft.Structure{}, name)
	if ours && h.w.IntN(2) == 0 && name != "sticky-78" {
		h.b.newChain(h.family(), &c)
		h.b.rules(h.family(), &c)
		return
	}
	m := h.b.object(h.family(), unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, "")
	h.b.Text(unix.NFTA_CHAIN_NAME, name)
	h.b.End(m)
	if h.w.IntN(2) == 0 {
		h.rule(name, 0)
	}
	if h.w.IntN(2) == 0 {
		h.rule(h.anyChain(), 0, nft.Jump{Chain: c.ID})
	}
}

// deleteChain deletes a chain, which succeeds if nothing leads there.
func (h *hand) deleteChain() {
	name := h.anyChain()
	h.b.End(h.b.object(h.family(), unix.NFT_MSG_DELRULE, 0, ""))
	h.b.chainNamed(h.family(), false, unix.NFT_MSG_DELCHAIN, name, "")
}

// rename gives a chain another name. What leads there leads there still.
func (h *hand) rename() {
	name := h.anyChain()
	m := h.b.object(h.family(), unix.NFT_MSG_NEWCHAIN, 0, "")
	h.b.Attr(unix.NFTA_CHAIN_HANDLE, h.table().handles[name]...)
	h.b.Text(unix.NFTA_CHAIN_NAME, oneOf(h.w.Rand, "mine", "pick-76"))
	h.b.End(m)
}

// moveChain makes a base chain anew with another priority.
func (h *hand) moveChain() {
	c := nft.Chain{ID: nft.ChainID{Kind: nft.Prerouting}, Hook: &nft.Hook{Type: "nat", Name: "prerouting", Priority: -90}}
	h.b.chainNamed(h.family(), false, unix.NFT_MSG_DELRULE, c.ID.Name(), "")
	h.b.chainNamed(h.family(), false, unix.NFT_MSG_DELCHAIN, c.ID.Name(), "")
	h.b.newChain(h.family(), &c)
}

func (h *hand) deleteSet(name string) {
	m := h.b.object(h.family(), unix.NFT_MSG_DELSET, 0, "")
	h.b.Text(unix.NFTA_SET_NAME, name)
	h.b.End(m)
}

// set adds a set of marks.
func (h *hand) set(name string) {
	m := h.b.object(h.family(), unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, "")
	h.b.Text(unix.NFTA_SET_NAME, name)
	h.b.Big32(unix.NFTA_SET_FLAGS, 0)
	h.b.Big32(unix.NFTA_SET_KEY_TYPE, typeMark)
	h.b.Big32(unix.NFTA_SET_KEY_LEN, 4)
	h.b.Big32(unix.NFTA_SET_ID, 99)
	h.b.End(m)
}

// meddleOnce does something to our tables, if their owner lets others. It says whether anything changed.
func (w *walker) meddleOnce() {
	w.t.Helper()
	h := &hand{w: w, c: w.content(), i: w.IntN(len(ipfamily.All))}
	h.b.Reset()
	h.b.Begin()
	var names []string
	for range 1 + w.IntN(2) {
		e := oneOf(w.Rand, edits...)
		e.do(h)
		names = append(names, e.name)
	}
	h.b.Finish()
	w.watch.pause()
	refused, err := w.other.Commit(h.b.Bytes())
	w.must(err)
	if len(refused) > 0 {
		w.Note("  others fail to do: %s: %v", strings.Join(names, ", "), refused[0].Errno)
		w.Count["foreign: refused"]++
		return
	}
	w.Note("  others do: %s (%s)", strings.Join(names, ", "), h.family().NFT())
	for _, n := range names {
		w.Count["foreign: "+n]++
		if n == "forget affinity" {
			clear(w.clients[h.i])
		}
	}
	w.meddled = true
}

// othersTables writes to tables that are not ours.
func (w *walker) othersTables() {
	w.t.Helper()
	b := batch{tableName: oneOf(w.Rand, "verdict", "kube-proxy", "verdict-probe")}
	families := []byte{unix.NFPROTO_INET, unix.NFPROTO_ARP, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}
	if b.tableName == "verdict" {
		families = families[:2]
	}
	const f = ipfamily.IPv4 // replaced below by one that Verdict does not know
	b.Reset()
	b.Begin()
	b.End(b.object(f, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, ""))
	m := b.object(f, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, "")
	b.Text(unix.NFTA_CHAIN_NAME, oneOf(w.Rand, "services", "pick-1"))
	b.End(m)
	if w.IntN(3) == 0 {
		b.deleteTable(f)
	}
	family := oneOf(w.Rand, families...)
	for _, n := range b.messages {
		b.Bytes()[n.start+unix.NLMSG_HDRLEN] = family
	}
	b.Finish()
	refused, err := w.other.Commit(b.Bytes())
	if err != nil || len(refused) > 0 {
		w.fail("another table: %v, %v", err, refused)
	}
}

// mustNotChange has others try some of what they do to tables that are owned.
func (w *walker) mustNotChange() {
	w.t.Helper()
	before := w.content()
	for range 3 {
		e := oneOf(w.Rand, edits...)
		h := &hand{w: w, c: before, i: w.IntN(len(ipfamily.All))}
		h.b.Reset()
		h.b.Begin()
		e.do(h)
		h.b.Finish()
		refused, err := w.other.Commit(h.b.Bytes())
		w.must(err)
		for _, r := range refused {
			if !errors.Is(r.Errno, unix.EPERM) {
				w.fail("%s: %v, not EPERM", e.name, r.Errno)
			}
		}
		if len(refused) == 0 && e.name != "flush ruleset" && h.b.Count() > 2 {
			w.fail("%s: others may do that to tables that are ours", e.name)
		}
	}
	now := w.content()
	if d := before.difference(&now); d != "" {
		w.fail("others changed what is ours:\n%s", d)
	}
}
