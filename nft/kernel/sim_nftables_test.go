package kernel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
)

// simKernel is an nf_tables in memory: it takes batches and answers requests as the kernel does, in the kernel's own
// bytes, so that the backend over it is the one that a node runs. It is stricter: what is added must not be there.
type simKernel struct {
	generation uint32
	handles    uint64
	tables     map[uint8]*simTable // by family
	// counts says that it tells how many elements a set has, as Linux does since 6.16; offsets that it says which
	// element of a message it refuses, as it does since 6.1.
	counts, offsets bool
	// refuse, if not nil, says what the kernel has against an element that is to be added.
	refuse func(e *nft.Element) unix.Errno
	// torn is how many of the next lists are interrupted by others.
	torn int
	// sent, if not nil, is called with each batch and what became of it.
	sent func(batch []byte, refused int, err error)
	// strict, if not nil, is told what a correct transaction never asks for.
	strict func(text string)
	// forget, if not nil, says of a deletion or an addition that it is to be acknowledged and not done.
	forget func(msg uint16, e *nft.Element) bool
	// halfway leaves the last element of a refused batch as it became.
	halfway bool

	rules map[string]simRefs
}

type simTable struct {
	handle uint64
	attrs  []byte
	sets   map[string]*simSet
	chains map[string]*simChain
	// order are the names of the chains as they were made.
	order []string
}

type simSet struct {
	id    nft.SetID
	attrs []byte
	size  int
	held  map[string]*simElement
	// sum is that of the hashes of what it holds: see sumOf.
	sum uint64
	// users is how many rules look into it.
	users int
}

type simElement struct {
	nft.Element
	raw   []byte
	chain string
	isEnd bool
}

type simChain struct {
	attrs []byte
	rules [][]byte
	// users is how many rules and elements lead to it.
	users int
}

// simRefs is what a rule needs: the chain it is in, the chains it leads to, and the sets it looks into.
type simRefs struct {
	chain        string
	chains, sets []string
}

func newSimKernel() *simKernel {
	return &simKernel{generation: 1, tables: map[uint8]*simTable{}, rules: map[string]simRefs{}}
}

// noise is a transaction of others in tables that are not ours.
func (k *simKernel) noise() { k.generation++ }

// simBatch is a batch on its way: what to undo if something of it is refused.
type simBatch struct {
	k    *simKernel
	undo []func()
	// undoElements undoes what most batches consist of, without a closure for each.
	undoElements []simUndo
}

type simUndo struct {
	set  *simSet
	t    *simTable
	key  string
	held *simElement // nil if it was not there
	// at is how many closures came before.
	at int
}

// commit takes a batch as a whole or not at all, and returns the answers.
func (k *simKernel) commit(b []byte) (answers [][]byte) {
	x, finished, elements := &simBatch{k: k}, false, 0
	for m := range netlink.Messages(b) {
		switch m.Type {
		case unix.NFNL_MSG_BATCH_BEGIN:
			continue
		case unix.NFNL_MSG_BATCH_END:
			finished = true
			continue
		}
		n, offset, errno := x.message(m)
		elements += n
		if errno != 0 {
			answers = append(answers, k.refusal(m, errno, offset))
		}
	}
	if len(answers) > 0 || !finished {
		x.rollback()
	} else if len(x.undo)+len(x.undoElements) > 0 {
		if k.generation++; k.generation == 0 {
			k.generation = 1
		}
	}
	if finished {
		k.sent(b, len(answers), nil)
		time.Sleep(100*time.Microsecond + time.Duration(elements)*3*time.Microsecond)
	}
	return answers
}

func (x *simBatch) rollback() {
	e := len(x.undoElements)
	if x.k.halfway && e > 0 {
		e--
	}
	for i := len(x.undo); ; i-- {
		for e > 0 && x.undoElements[e-1].at >= i {
			e--
			x.undoElements[e].do()
		}
		if i == 0 {
			return
		}
		x.undo[i-1]()
	}
}

func (u *simUndo) do() {
	if now := u.set.held[u.key]; now != nil {
		u.t.remove(u.set, u.key, now)
	}
	if u.held != nil {
		u.t.put(u.set, u.key, u.held)
	}
}

// put puts an element into a set that has none with its key.
func (t *simTable) put(s *simSet, key string, e *simElement) {
	s.held[key] = e
	s.sum += sumOf(&e.Element)
	t.use(e.chain, +1)
}

func (t *simTable) remove(s *simSet, key string, e *simElement) {
	delete(s.held, key)
	s.sum -= sumOf(&e.Element)
	t.use(e.chain, -1)
}

func (t *simTable) use(chain string, n int) {
	if c := t.chains[chain]; chain != "" && c != nil {
		c.users += n
	}
}

// message does what one message of a batch asks for.
func (x *simBatch) message(m netlink.Message) (elements, offset int, errno unix.Errno) {
	family, attrs := m.Body[0], m.Body[netlink.NetfilterLen:]
	msg, t := m.Type&0xff, x.k.tables[family]
	if msg != unix.NFT_MSG_NEWTABLE && t == nil {
		return 0, 0, unix.ENOENT
	}
	switch msg {
	case unix.NFT_MSG_NEWTABLE:
		if t != nil {
			return 0, 0, 0
		}
		x.k.handles++
		x.k.tables[family] = &simTable{handle: x.k.handles, attrs: bytes.Clone(attrs), sets: map[string]*simSet{},
			chains: map[string]*simChain{}}
		x.undo = append(x.undo, func() { delete(x.k.tables, family) })
	case unix.NFT_MSG_DELTABLE:
		delete(x.k.tables, family)
		x.undo = append(x.undo, func() { x.k.tables[family] = t })
	case unix.NFT_MSG_NEWSET, unix.NFT_MSG_DELSET:
		return 0, 0, x.set(t, msg, attrs)
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		return 0, 0, x.chain(t, msg, attrs)
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		return 0, 0, x.rule(t, msg, attrs)
	case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
		return x.elements(t, family, msg, attrs)
	default:
		return 0, 0, unix.EOPNOTSUPP
	}
	return 0, 0, 0
}

func (x *simBatch) set(t *simTable, msg uint16, attrs []byte) unix.Errno {
	name := netlink.Find(attrs, unix.NFTA_SET_NAME).Text()
	held := t.sets[name]
	if msg == unix.NFT_MSG_DELSET {
		switch {
		case held == nil:
			return unix.ENOENT
		case held.users > 0:
			return unix.EBUSY
		}
		delete(t.sets, name)
		for _, e := range held.held {
			t.use(e.chain, -1)
		}
		x.undo = append(x.undo, func() {
			t.sets[name] = held
			for _, e := range held.held {
				t.use(e.chain, +1)
			}
		})
		return 0
	}
	if held != nil {
		x.k.strict("add set " + name + ": it is there already")
		return unix.EEXIST
	}
	s := &simSet{held: map[string]*simElement{}}
	for typ, v := range netlink.Each(attrs) {
		switch typ {
		case unix.NFTA_SET_ID: // is for the transaction alone
			s.id = nft.SetID(v.Big32() - 1)
			continue
		case unix.NFTA_SET_DESC:
			s.size = int(netlink.Find(v, unix.NFTA_SET_DESC_SIZE).Big32())
		}
		s.attrs = appendAttr(s.attrs, typ, v)
	}
	t.sets[name] = s
	x.undo = append(x.undo, func() { delete(t.sets, name) })
	return 0
}

// appendAttr appends an attribute as it came.
func appendAttr(b []byte, typ uint16, v []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(netlink.AttrLen+len(v)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, v...)
	for len(b)%unix.NLMSG_ALIGNTO != 0 {
		b = append(b, 0)
	}
	return b
}

func (x *simBatch) chain(t *simTable, msg uint16, attrs []byte) unix.Errno {
	name := netlink.Find(attrs, unix.NFTA_CHAIN_NAME).Text()
	held, order := t.chains[name], t.order
	if msg == unix.NFT_MSG_NEWCHAIN {
		if held != nil {
			x.k.strict("add chain " + name + ": it is there already")
			return unix.EEXIST
		}
		t.chains[name] = &simChain{attrs: bytes.Clone(attrs)}
		t.order = append(slices.Clip(order), name)
		x.undo = append(x.undo, func() { delete(t.chains, name); t.order = order })
		return 0
	}
	if held == nil {
		return unix.ENOENT
	}
	rules := held.rules
	x.k.useAll(t, rules, -1)
	if held.users > 0 {
		x.k.useAll(t, rules, +1)
		return unix.EBUSY
	}
	delete(t.chains, name)
	t.order = slices.DeleteFunc(slices.Clone(order), func(n string) bool { return n == name })
	x.undo = append(x.undo, func() {
		t.chains[name], t.order = held, order
		x.k.useAll(t, rules, +1)
	})
	return 0
}

// useAll counts what rules lead to.
func (k *simKernel) useAll(t *simTable, rules [][]byte, n int) {
	for _, r := range rules {
		refs := k.rules[string(r)]
		for _, c := range refs.chains {
			t.use(c, n)
		}
		for _, s := range refs.sets {
			t.sets[s].users += n
		}
	}
}

func (x *simBatch) rule(t *simTable, msg uint16, attrs []byte) unix.Errno {
	refs, known := x.k.rules[string(attrs)]
	if !known {
		refs = refsOf(attrs)
	}
	c := t.chains[refs.chain]
	if c == nil {
		return unix.ENOENT
	}
	before := c.rules
	if msg == unix.NFT_MSG_DELRULE {
		x.k.useAll(t, before, -1)
		c.rules = nil
		x.undo = append(x.undo, func() { c.rules = before; x.k.useAll(t, before, +1) })
		return 0
	}
	for _, to := range refs.chains {
		if t.chains[to] == nil {
			return unix.ENOENT
		}
	}
	for _, in := range refs.sets {
		if t.sets[in] == nil {
			return unix.ENOENT
		}
	}
	rule := bytes.Clone(attrs)
	x.k.rules[string(rule)] = refs
	c.rules = append(slices.Clip(before), rule)
	x.k.useAll(t, [][]byte{rule}, +1)
	x.undo = append(x.undo, func() { c.rules = before; x.k.useAll(t, [][]byte{rule}, -1) })
	return 0
}

func refsOf(rule []byte) (r simRefs) {
	r.chain = netlink.Find(rule, unix.NFTA_RULE_CHAIN).Text()
	for _, e := range netlink.Each(netlink.Find(rule, unix.NFTA_RULE_EXPRESSIONS)) {
		data := expressionData(e)
		switch expressionName(e) {
		case "lookup":
			r.sets = append(r.sets, netlink.Find(data, unix.NFTA_LOOKUP_SET).Text())
		case "dynset":
			r.sets = append(r.sets, netlink.Find(data, unix.NFTA_DYNSET_SET_NAME).Text())
		case "immediate":
			v := netlink.Find(netlink.Find(data, unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT)
			if to := netlink.Find(v, unix.NFTA_VERDICT_CHAIN).Text(); to != "" {
				r.chains = append(r.chains, to)
			}
		}
	}
	return r
}

// elements adds or deletes elements of a set. The offset is that of the first that is refused.
func (x *simBatch) elements(t *simTable, family uint8, msg uint16, attrs []byte) (n, offset int, errno unix.Errno) {
	name := netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_SET).Text()
	s := t.sets[name]
	if s == nil {
		return 0, 0, unix.ENOENT
	}
	f := ipfamily.IPv4
	if family == ipfamily.IPv6.NFProto() {
		f = ipfamily.IPv6
	}
	at := headerLen
	for typ, v := range netlink.Each(attrs) {
		if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			at += netlink.AttrLen + (len(v)+3)&^3
			continue
		}
		at += netlink.AttrLen
		for _, raw := range netlink.Each(v) {
			n++
			if errno = x.element(t, s, f, msg, raw); errno != 0 {
				return n, at, errno
			}
			at += netlink.AttrLen + (len(raw)+3)&^3
		}
		break
	}
	return n, 0, 0
}

func (x *simBatch) element(t *simTable, s *simSet, f ipfamily.Family, msg uint16, raw []byte) unix.Errno {
	p := parseElement(raw)
	key := simKey(&p)
	held := s.held[key]
	if msg == unix.NFT_MSG_DELSETELEM {
		if held == nil {
			if !s.id.IsDynamic() {
				x.k.strict(fmt.Sprintf("delete element %s %x: it is not there", s.id, key))
			}
			return unix.ENOENT
		}
		if x.k.forget != nil && x.k.forget(msg, &held.Element) {
			return 0
		}
		x.undoElements = append(x.undoElements, simUndo{s, t, key, held, len(x.undo)})
		t.remove(s, key, held)
		return 0
	}
	e := &simElement{raw: bytes.Clone(raw), chain: p.chain, isEnd: p.isEnd}
	e.Element, _ = nft.ElementFrom(f, s.id, p.key, p.keyEnd, p.data, p.chain, p.comment)
	switch {
	case held != nil && s.id.IsDynamic():
		return 0
	case held != nil:
		x.k.strict("add " + elementText(f, &e.Element) + ": it is there already")
		return unix.EEXIST
	case p.chain != "" && t.chains[p.chain] == nil:
		x.k.strict("add " + elementText(f, &e.Element) + ": there is no such chain")
		return unix.ENOENT
	case s.size > 0 && len(s.held) >= s.size:
		return unix.ENFILE
	}
	if x.k.refuse != nil {
		if errno := x.k.refuse(&e.Element); errno != 0 {
			return errno
		}
	}
	if x.k.forget != nil && x.k.forget(msg, &e.Element) {
		return 0
	}
	x.undoElements = append(x.undoElements, simUndo{s, t, key, nil, len(x.undo)})
	t.put(s, key, e)
	return 0
}

func simKey(p *parsed) string {
	key := string(p.key)
	if p.isEnd {
		return key + "end"
	}
	return key + string(p.keyEnd)
}

// refusal is the kernel's answer to one message of a batch.
func (k *simKernel) refusal(m netlink.Message, errno unix.Errno, offset int) []byte {
	var w netlink.Buffer
	if k.offsets && offset > 0 {
		w.Native32(unix.NLMSGERR_ATTR_OFFS, uint32(offset))
	}
	return simError(m, errno, w.Bytes())
}

// simError is an NLMSG_ERROR: an acknowledgement if errno is 0.
func simError(m netlink.Message, errno unix.Errno, attrs []byte) []byte {
	n := unix.NLMSG_HDRLEN + 4 + unix.NLMSG_HDRLEN + len(attrs)
	var b []byte
	b = binary.NativeEndian.AppendUint32(b, uint32(n))
	b = binary.NativeEndian.AppendUint16(b, unix.NLMSG_ERROR)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_CAPPED|unix.NLM_F_ACK_TLVS)
	b = binary.NativeEndian.AppendUint32(b, m.Seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = binary.NativeEndian.AppendUint32(b, uint32(-int32(errno)))
	b = binary.NativeEndian.AppendUint32(b, uint32(unix.NLMSG_HDRLEN+len(m.Body)))
	b = binary.NativeEndian.AppendUint16(b, m.Type)
	b = binary.NativeEndian.AppendUint16(b, m.Flags)
	b = binary.NativeEndian.AppendUint32(b, m.Seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	return append(b, attrs...)
}

// simAnswer gathers the objects that answer a request.
type simAnswer struct {
	m     netlink.Message
	w     netlink.Buffer
	parts [][]byte
}

// simDatagram is about how long a datagram of a list gets.
const simDatagram = 16 << 10

func (a *simAnswer) object(msg uint16, family uint8, attrs ...[]byte) {
	start := a.begin(msg, family)
	for _, b := range attrs {
		a.w.Append(b...)
	}
	a.end(start)
}

func (a *simAnswer) begin(msg uint16, family uint8) int {
	return a.w.Netfilter(netlink.NFTables(msg), unix.NLM_F_MULTI, family)
}

func (a *simAnswer) end(start int) {
	if a.w.End(start); a.w.Len() > simDatagram {
		a.flush()
	}
}

func (a *simAnswer) flush() {
	if a.w.Len() > 0 {
		a.parts = append(a.parts, bytes.Clone(a.w.Bytes()))
		a.w.Reset()
	}
}

// answer answers a request that changes nothing.
func (k *simKernel) answer(m netlink.Message) [][]byte {
	a := &simAnswer{m: m}
	errno := k.objects(a)
	a.flush()
	if m.Flags&unix.NLM_F_DUMP != unix.NLM_F_DUMP || errno != 0 {
		return append(a.parts, simError(m, errno, nil))
	}
	flags := uint16(unix.NLM_F_MULTI)
	if k.torn > 0 {
		k.torn--
		flags |= unix.NLM_F_DUMP_INTR
	}
	var end []byte
	end = binary.NativeEndian.AppendUint32(end, unix.NLMSG_HDRLEN+4)
	end = binary.NativeEndian.AppendUint16(end, unix.NLMSG_DONE)
	end = binary.NativeEndian.AppendUint16(end, flags)
	end = binary.NativeEndian.AppendUint32(end, m.Seq)
	end = binary.NativeEndian.AppendUint32(end, 0)
	return append(a.parts, binary.NativeEndian.AppendUint32(end, 0))
}

func (k *simKernel) objects(a *simAnswer) unix.Errno {
	family, attrs := a.m.Body[0], a.m.Body[netlink.NetfilterLen:]
	msg, dump := a.m.Type&0xff, a.m.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP
	if msg == unix.NFT_MSG_GETGEN {
		var w netlink.Buffer
		w.Big32(unix.NFTA_GEN_ID, k.generation)
		a.object(unix.NFT_MSG_NEWGEN, 0, w.Bytes())
		return 0
	}
	t := k.tables[family]
	if t == nil {
		if dump && msg != unix.NFT_MSG_GETSETELEM {
			return 0
		}
		return unix.ENOENT
	}
	switch msg {
	case unix.NFT_MSG_GETTABLE:
		var w netlink.Buffer
		w.Big64(nftaTableHandle, t.handle)
		a.object(unix.NFT_MSG_NEWTABLE, family, t.attrs, w.Bytes())
	case unix.NFT_MSG_GETSET:
		return k.listSets(a, t, netlink.Find(attrs, unix.NFTA_SET_NAME).Text(), dump)
	case unix.NFT_MSG_GETCHAIN:
		for _, name := range t.order {
			a.object(unix.NFT_MSG_NEWCHAIN, family, t.chains[name].attrs)
		}
	case unix.NFT_MSG_GETRULE:
		for _, name := range t.order {
			for _, r := range t.chains[name].rules {
				a.object(unix.NFT_MSG_NEWRULE, family, r)
			}
		}
	case unix.NFT_MSG_GETSETELEM:
		return listElements(a, t, attrs, dump)
	}
	return 0
}

func (k *simKernel) listSets(a *simAnswer, t *simTable, only string, dump bool) unix.Errno {
	if !dump && t.sets[only] == nil {
		return unix.ENOENT
	}
	for _, name := range slices.Sorted(maps.Keys(t.sets)) {
		if dump || name == only {
			var w netlink.Buffer
			if k.counts {
				w.Big32(nftaSetCount, uint32(len(t.sets[name].held)))
			}
			a.object(unix.NFT_MSG_NEWSET, a.m.Body[0], t.sets[name].attrs, w.Bytes())
		}
	}
	return 0
}

// listElements lists a set, or gives some of its elements up to the first that is not there.
func listElements(a *simAnswer, t *simTable, attrs []byte, dump bool) unix.Errno {
	name := netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_SET).Text()
	s := t.sets[name]
	if s == nil {
		return unix.ENOENT
	}
	give := func(e *simElement) {
		start := a.begin(unix.NFT_MSG_NEWSETELEM, a.m.Body[0])
		a.w.Text(unix.NFTA_SET_ELEM_LIST_TABLE, nft.TableName)
		a.w.Text(unix.NFTA_SET_ELEM_LIST_SET, name)
		list := a.w.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		a.w.Attr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, e.raw...)
		a.w.Close(list)
		a.end(start)
	}
	if dump {
		for _, key := range slices.Sorted(maps.Keys(s.held)) {
			give(s.held[key])
		}
		return 0
	}
	for _, raw := range netlink.Each(netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
		p := parseElement(raw)
		e := s.held[simKey(&p)]
		if e == nil {
			return unix.ENOENT
		}
		give(e)
	}
	return 0
}

// simWire is a socket to a simKernel.
type simWire struct {
	k       *simKernel
	answers [][]byte
	closed  bool
}

func (w *simWire) Send(b []byte) error {
	if w.closed {
		return os.ErrClosed
	}
	for m := range netlink.Messages(b) {
		if m.Type == unix.NFNL_MSG_BATCH_BEGIN {
			w.answers = append(w.answers, w.k.commit(b)...)
		} else {
			w.answers = append(w.answers, w.k.answer(m)...)
		}
		break
	}
	return nil
}

func (w *simWire) Recv(b []byte, wait bool) (int, error) {
	switch {
	case w.closed:
		return 0, os.ErrClosed
	case len(w.answers) > 0:
		n := copy(b, w.answers[0])
		n += len(w.answers[0]) - n // which says that it did not fit
		w.answers = w.answers[1:]
		return n, nil
	case wait:
		time.Sleep(10 * time.Second)
		return 0, os.ErrDeadlineExceeded
	}
	return 0, unix.EAGAIN
}

func (w *simWire) Room(n int) (int, error) { return n, nil }

func (w *simWire) Port() (uint32, error) { return 4711, nil }

func (w *simWire) Close() error { w.closed = true; return nil }

// content is what the kernel holds of our tables' elements.
func (k *simKernel) content() (c content) {
	for i, f := range ipfamily.All {
		c[i].family = f
		t := k.tables[f.NFProto()]
		if t == nil {
			continue
		}
		for _, s := range t.sets {
			list := make([]nft.Element, 0, len(s.held))
			for _, e := range s.held {
				if s.id != nft.ServiceCIDRs {
					list = append(list, e.Element)
				}
			}
			c[i].bySet[s.id] = list
		}
		c[i].bySet[nft.ServiceCIDRs] = t.cidrs(f)
	}
	return c
}

// cidrs puts the beginnings and ends of ranges together.
func (t *simTable) cidrs(f ipfamily.Family) (out []nft.Element) {
	s := t.sets[nft.ServiceCIDRs.String()]
	if s == nil {
		return nil
	}
	var starts []nft.Listed
	var ends [][]byte
	for _, e := range s.held {
		if e.isEnd {
			ends = append(ends, parseElement(e.raw).key)
		} else {
			starts = append(starts, nft.Listed{Element: e.Element})
		}
	}
	closeRanges(f, starts, ends)
	for i := range starts {
		out = append(out, starts[i].Element)
	}
	return out
}
