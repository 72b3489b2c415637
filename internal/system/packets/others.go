package packets

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// MaxRules bounds how many rules of other programs are kept, of all chains that packets come to. Rules take some 1 KB
// each; a proxy reads them every minute.
const MaxRules = 10_000

// maxSets bounds how many of their sets, named or not, are asked for elements: the kernel finds a set by its name among
// all sets of its table, one after the other.
const maxSets = 1_000

// beyondSets is what is odd about one beyond them.
var beyondSets = fmt.Sprintf("one of more than %d sets", maxSets)

// maxLegacy bounds the bytes that are read of a table of legacy iptables, which is all or none. A rule has some 200.
const maxLegacy = 8 << 20

// ErrTooMany says that other programs have more rules than are read.
var ErrTooMany = errors.New("other programs have too many rules to follow a packet through")

// others reads rules of other programs as packets come to their chains, and elements of sets by their keys: how much
// there is, is not for Verdict to say.
type others struct {
	*reader
	// room is how many rules there is room for, and setRoom how many sets.
	room, setRoom int
}

// ReadOthers opens the tables of nf_tables, of the families ip, ip6 and inet, that have a chain by which packets come
// in, are taken, sent, forwarded or translated, but for those of a name, and the tables raw, mangle and filter of
// legacy iptables, in the network namespace of the calling thread. A kernel without nf_tables has none of the former.
// What is in the chains is read when packets come there. Close has to be called if there is no error.
func ReadOthers(name string, host *Host) (*Rules, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("read nf_tables: %w", err)
	}
	o := &others{&reader{Conn: c, rules: &Rules{host: host}}, MaxRules, maxSets}
	o.rules.close = func() error { return o.Close() }
	if err := o.read(name); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	o.rules.order()
	return o.rules, nil
}

// Close ends the reading of ReadOthers.
func (r *Rules) Close() error { return r.close() }

func (o *others) read(name string) error {
	tables, err := o.others(name)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("read nf_tables: %w", err)
	}
	for _, t := range tables {
		t.others = o
		if err := o.baseChains(t); err != nil {
			return fmt.Errorf("read table %s of nf_tables: %w", t.name, err)
		}
	}
	return o.legacy()
}

// ReadAll reads all tables of nf_tables, of the families ip, ip6 and inet, in the network namespace of the calling
// thread.
func ReadAll(host *Host) (*Rules, error) {
	return settled("all tables", host, func(r *reader) error {
		tables, err := r.others("")
		for i := 0; err == nil && i < len(tables); i++ {
			err = r.contents(tables[i])
		}
		return err
	})
}

// others lists the tables, without what is in them.
func (r *reader) others(name string) (tables []*nfTable, err error) {
	var w netlink.Buffer
	w.End(w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETTABLE), unix.NLM_F_DUMP, unix.NFPROTO_UNSPEC))
	err = r.Dump(w.Bytes(), func() { tables = nil }, func(b []byte) {
		if len(b) < netlink.NetfilterLen {
			return
		}
		a := netlink.Decode(b[netlink.NetfilterLen:])
		for _, f := range ipfamily.All {
			t := &nfTable{family: f, both: b[0] == unix.NFPROTO_INET, name: a[unix.NFTA_TABLE_NAME].Text(),
				chains: map[string]*nfChain{}, sets: map[string]*nfSet{}}
			const dormant = 1
			t.dormant = a[unix.NFTA_TABLE_FLAGS].Big32()&dormant != 0
			if (t.both || b[0] == f.NFProto()) && t.name != name && !t.dormant {
				tables = append(tables, t)
			}
		}
	})
	return tables, err
}

// baseChains reads the base chains of a table, and forgets a table that has none of interest. One that went meanwhile
// has none.
func (o *others) baseChains(t *nfTable) error {
	err := o.list(request(unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, t), func() { clear(t.chains) }, func(attrs []byte) {
		if netlink.Find(attrs, unix.NFTA_CHAIN_HOOK) == nil { // there may be many others: see nfTable.chain
			return
		}
		if a := netlink.Decode(attrs); a[unix.NFTA_CHAIN_TABLE].Text() == t.name {
			t.addChain(a)
		}
	})
	if err != nil {
		return err
	}
	concerns := false
	for _, c := range t.chains {
		o.readLater(c)
		concerns = concerns || c.base && (c.nat || c.hook <= hookOutput)
	}
	if concerns {
		o.rules.tables[t.family] = append(o.rules.tables[t.family], t)
	}
	return nil
}

func (o *others) readLater(c *nfChain) { c.load = func() error { return o.readRules(c) } }

// readRules reads the rules of a chain.
func (o *others) readRules(c *nfChain) error {
	for range maxReads {
		list, err := o.listRules(c)
		switch {
		case errors.Is(err, unix.EINTR): // others changed it meanwhile
			continue
		case err != nil && !errors.Is(err, unix.ENOENT):
			return err
		}
		for _, r := range list {
			c.rules = append(c.rules, c.table.compile(r.handle, r.expressions))
		}
		c.prepare()
		return nil
	}
	return ErrBusy
}

// rawRule is a rule as the kernel lists it.
type rawRule struct {
	handle      uint64
	expressions []byte
}

// listRules lists the rules of a chain while there is room. To list them takes the kernel the longer, by far, the more
// there are, since for each datagram it goes through the chain from its beginning: so the list is not read to its end
// if it is too long.
func (o *others) listRules(c *nfChain) (list []rawRule, err error) {
	if o.room <= 0 {
		return nil, ErrTooMany
	}
	if err := o.Ask(request(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, c.table, unix.NFTA_RULE_CHAIN, c.name)); err != nil {
		return nil, err
	}
	for done := false; !done && err == nil && len(list) <= o.room; {
		done, err = o.Next(func(body []byte) {
			a := body[min(netlink.NetfilterLen, len(body)):]
			if netlink.Find(a, unix.NFTA_RULE_CHAIN).Text() == c.name &&
				netlink.Find(a, unix.NFTA_RULE_TABLE).Text() == c.table.name {
				list = append(list, rawRule{netlink.Find(a, unix.NFTA_RULE_HANDLE).Big64(),
					clone(netlink.Find(a, unix.NFTA_RULE_EXPRESSIONS))})
			}
		})
	}
	if err != nil || len(list) <= o.room {
		o.room -= len(list)
		return list, err
	}
	o.room = 0
	return nil, errors.Join(ErrTooMany, o.again())
}

// again opens the socket anew: to ask through one that has an unread list means to read that.
func (o *others) again() error {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return err
	}
	err = o.Close()
	o.Conn = c
	return err
}

// loaded reads the rules of the chain, unless they are there.
func (c *nfChain) loaded() error {
	if c.load != nil {
		c.unread, c.load = c.load(), nil
	}
	return c.unread
}

// chain returns a chain; nil if there is none. One that others wrote is there if a rule names it.
func (t *nfTable) chain(name string) *nfChain {
	c := t.chains[name]
	if c == nil && t.others != nil {
		c = &nfChain{table: t, name: name}
		t.others.readLater(c)
		t.chains[name] = c
	}
	return c
}

// set returns a set; nil if there is none.
func (t *nfTable) set(name string) *nfSet {
	if s := t.sets[name]; s != nil || t.others == nil {
		return s
	}
	if t.others.setRoom--; t.others.setRoom < 0 {
		return &nfSet{name: name, odd: beyondSets}
	}
	body, err := t.others.Get(request(unix.NFT_MSG_GETSET, 0, t, unix.NFTA_SET_NAME, name))
	if err != nil || len(body) < netlink.NetfilterLen {
		return nil
	}
	s := newSet(netlink.Decode(body[netlink.NetfilterLen:]))
	if !s.dynamic() {
		s.read = func(keys [][]byte) ([]*nfElement, error) { return t.others.find(s, t, keys) }
	}
	t.sets[name] = s
	return s
}

// find asks for the elements of a set that have the keys, or whose ranges do.
func (o *others) find(s *nfSet, t *nfTable, keys [][]byte) ([]*nfElement, error) {
	if len(keys) > MaxRules {
		return nil, ErrTooMany
	}
	out := make([]*nfElement, len(keys))
	for i, key := range keys {
		e, err := o.element(s, t, key)
		if e == nil && err == nil {
			e, err = o.element(s, t, nil)
		}
		if err != nil {
			return nil, fmt.Errorf("set %s %s: %w", t.place(), s.name, err)
		}
		out[i] = e
	}
	return out, nil
}

// element asks for an element by its key, or for that of all other keys, which nil stands for; nil if it is not there.
func (o *others) element(s *nfSet, t *nfTable, key []byte) (*nfElement, error) {
	var w netlink.Buffer
	m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETSETELEM), 0, t.proto())
	w.Text(unix.NFTA_SET_ELEM_LIST_TABLE, t.name)
	w.Text(unix.NFTA_SET_ELEM_LIST_SET, s.name)
	list := w.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	elem := w.Nest(unix.NFTA_LIST_ELEM)
	if key == nil {
		w.Big32(unix.NFTA_SET_ELEM_FLAGS, catchAll)
	} else {
		value := w.Nest(unix.NFTA_SET_ELEM_KEY)
		w.Attr(unix.NFTA_DATA_VALUE, key...)
		w.Close(value)
	}
	w.Close(elem)
	w.Close(list)
	w.End(m)
	body, err := o.Get(w.Bytes())
	// A kernel that knows none for all other keys, before Linux 5.13, asks for a key.
	if errors.Is(err, unix.ENOENT) || key == nil && errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	if err != nil || len(body) < netlink.NetfilterLen {
		return nil, err
	}
	for _, elem := range netlink.Each(netlink.Find(body[netlink.NetfilterLen:], unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
		e := t.element(elem)
		return &e.nfElement, nil
	}
	return nil, nil
}

// Crossing is what the chains of one hook do to a packet.
type Crossing struct {
	Verdict Verdict
	// To is the destination that a rule chose, if the packet is Sent on. Untracked says that a rule keeps connection
	// tracking from it, so that nothing translates it.
	To        netip.AddrPort
	Untracked bool
	// By names the chain that decided, and Rule the handle of its rule, 0 for the policy; unset if nothing did. Legacy
	// says that it is a chain of legacy iptables, in which Rule is the number of the rule.
	By     string
	Rule   uint64
	Legacy bool
}

// Forward follows a packet through the forward hook. Before is the destination that it had before a rule elsewhere
// translated it.
func (r *Rules) Forward(p Packet, before netip.AddrPort) (Crossing, error) {
	return r.cross(p, hookForward, before, func(*nfChain) bool { return true })
}

// Input follows a packet through the input hook, as Forward does.
func (r *Rules) Input(p Packet, before netip.AddrPort) (Crossing, error) {
	return r.cross(p, hookInput, before, func(*nfChain) bool { return true })
}

// Translate follows a packet through the chains that see it before those that translate destinations at a priority.
func (r *Rules) Translate(p Packet, priority int32) (Crossing, error) {
	hook := hookPrerouting
	if p.Interface == "" {
		hook = hookOutput
	}
	return r.cross(p, hook, p.Destination, func(c *nfChain) bool {
		return c.at() < natPriority[hook] || c.ahead(priority)
	})
}

func (r *Rules) cross(p Packet, hook int, before netip.AddrPort, only func(*nfChain) bool) (Crossing, error) {
	w := walker{rules: r, family: ipfamily.Of(p.Destination.Addr()), packet: &p, only: only}
	m := w.machine()
	m.hook, m.base, m.origDest, m.origPort = hook, 0, before.Addr(), before.Port()
	m.translated = before != p.Destination
	w.enter(m)
	for w.queue = append(w.queue, m); len(w.queue) > 0 && len(w.out) == 0; {
		next := w.queue[len(w.queue)-1]
		w.queue = w.queue[:len(w.queue)-1]
		if err := w.run(next); err != nil {
			return Crossing{}, err
		}
	}
	c := Crossing{Verdict: w.out[0].Verdict, To: w.out[0].To}
	if c.Verdict == Sent && c.To == p.Destination {
		return Crossing{}, nil
	}
	c.Untracked = w.untracked && c.Verdict == Untouched
	if w.by != nil && (c.Untracked || c.Verdict != Untouched) {
		c.By, c.Rule, c.Legacy = w.by.table.place()+" "+w.by.name, w.handle, w.by.table.legacy
	}
	return c, nil
}

// ahead reports whether a chain translates destinations before those at a priority do.
func (c *nfChain) ahead(priority int32) bool { return c.nat && c.priority < priority }

// place names a table as nft does, or by the program that lists it.
func (t *nfTable) place() string {
	switch {
	case t.legacy:
		return t.family.NFT() + "tables-legacy " + t.name
	case t.both:
		return "inet " + t.name
	case t.ingress:
		return "netdev " + t.name
	}
	return t.family.NFT() + " " + t.name
}

// HasTable reports whether one of the tables of nf_tables has a name.
func (r *Rules) HasTable(name string) bool {
	return r.any(func(t *nfTable) bool { return t.name == name && !t.legacy })
}

// HasChain reports whether one of the tables has a chain.
func (r *Rules) HasChain(name string) bool {
	return r.any(func(t *nfTable) bool {
		if t.others == nil || t.chains[name] != nil {
			return t.chains[name] != nil
		}
		_, err := t.others.Get(request(unix.NFT_MSG_GETCHAIN, 0, t, unix.NFTA_CHAIN_NAME, name))
		return err == nil
	})
}

func (r *Rules) any(is func(*nfTable) bool) bool {
	return slices.ContainsFunc(slices.Concat(r.tables[:]...), is)
}

// Translators returns the base chains with rules that translate destinations before those at a priority do.
func (r *Rules) Translators(priority int32) (names []string) {
	for _, hooks := range r.hooks {
		for _, hook := range []int{hookPrerouting, hookOutput} {
			for _, c := range hooks[hook] {
				if name := c.table.place() + " " + c.name; c.ahead(priority) && !slices.Contains(names, name) &&
					(c.loaded() != nil || len(c.rules) > 0) {
					names = append(names, name)
				}
			}
		}
	}
	return names
}
