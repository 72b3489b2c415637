package packets

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// Attributes and values of nf_tables that package unix lacks.
const (
	nftaSetElemKeyEnd      = 10 // since Linux 5.6
	nftaSetElemExpressions = 11 // since Linux 5.12
	nftaSetDescConcat      = 2
	nftaSetFieldLen        = 1
	nftaSetCount           = 19 // since Linux 6.16
	catchAll               = 2

	codeContinue int32 = -1
	codeBreak    int32 = -2
	codeJump     int32 = -3
	codeGoto     int32 = -4
	codeReturn   int32 = -5
	codeDrop     int32 = 0
	codeAccept   int32 = 1
)

// nfTable is one table, as the kernel lists it.
type nfTable struct {
	family ipfamily.Family
	// both says that it is one of the family inet, and ingress of netdev, as IPv4 or IPv6 packets see it.
	both, ingress bool
	// legacy says that it is one of legacy iptables.
	legacy  bool
	name    string
	chains  map[string]*nfChain
	sets    map[string]*nfSet
	dormant bool
	// elements counts those of all sets.
	elements int
	// others, if not nil, reads the rest of the table when packets come there.
	others *others
}

// nfChain is a chain with its rules.
type nfChain struct {
	table *nfTable
	name  string
	// base says that a hook calls it; the rest is of base chains only.
	base     bool
	nat      bool
	hook     uint32
	priority int32
	drops    bool
	// devices are those at whose ingress it sees packets; nil at other hooks.
	devices []string
	rules   []nfRule
	// load, if not nil, reads the rules, and unread is what went wrong with that.
	load   func() error
	unread error
}

// nfRule is a rule, compiled.
type nfRule struct {
	handle uint64
	ops    []nfOp
	// lot is the place behind a lot about which only matters what the next expression finds by it, and whether it does;
	// 0 if there is none. Again is how many rules behind this one are the same, if it has such a lot.
	lot, again int
}

// nfSet is a set or map with its elements.
type nfSet struct {
	name  string
	flags uint32
	// fields are the lengths of the parts of a key; nil if it is no concatenation.
	fields []int
	// keyLen and dataLen are the lengths of keys, with the padding of parts, and of data.
	keyLen, dataLen int
	// timeout is that of new elements, in milliseconds; 0 if they stay.
	timeout  uint64
	exact    map[string]nfElement
	ranges   []nfRange            // sorted by low
	grouped  map[string][]nfRange // of a concatenation, by the first field, if it is exact in all of them
	catchAll *nfElement
	// odd says what about the set is not known.
	odd string
	// read, if not nil, reads elements by their keys instead; nil is for one that is not there.
	read func(keys [][]byte) ([]*nfElement, error)
}

func (s *nfSet) dynamic() bool { return s.flags&unix.NFT_SET_EVAL != 0 }

// nfElement is what a map has for a key.
type nfElement struct {
	data  []byte
	code  int32
	chain *nfChain
	odd   string
}

// nfRange is an element that stands for a range of keys: of each field, both ends belong to it.
type nfRange struct {
	low, high []byte
	nfElement
}

// Rules are tables of nf_tables, as the kernel lists them: a Walker.
type Rules struct {
	tables ipfamily.Per[[]*nfTable]
	hooks  ipfamily.Per[[hookIngress + 1][]*nfChain]
	host   *Host
	digest [sha256.Size]byte
	size   Size
	// close is that of ReadOthers.
	close func() error
}

// Size says how much was read.
type Size struct {
	Tables   int `json:"tables,omitempty"`
	Chains   int `json:"chains"`
	Rules    int `json:"rules"`
	Elements int `json:"elements,omitempty"`
}

// Size says how much there is.
func (r *Rules) Size() Size { return r.size }

// Digest identifies what decides about packets: structure, rules and elements, without counters, comments and
// what rules write themselves.
func (r *Rules) Digest() [sha256.Size]byte { return r.digest }

// reader reads tables.
type reader struct {
	*netlink.Conn
	digest hash.Hash
	rules  *Rules
}

// maxReads bounds how often everything is read because somebody wrote meanwhile.
const maxReads = 5

// ErrBusy says that somebody wrote whenever the tables were read.
var ErrBusy = errors.New("the tables were written to each time they were read")

// ReadNFTables reads the tables of a name, of both families, and those of the family netdev of some names, in the
// network namespace of the calling thread. If there is none, the Rules do nothing.
func ReadNFTables(table string, host *Host, ingress ...string) (*Rules, error) {
	return settled("table "+table, host, func(r *reader) error {
		err := r.named(table, false)
		for i := 0; err == nil && i < len(ingress); i++ {
			err = r.named(ingress[i], true)
		}
		return err
	})
}

// settled reads until nobody wrote meanwhile.
func settled(what string, host *Host, read func(*reader) error) (*Rules, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("read nf_tables: %w", err)
	}
	defer c.Close()
	for try := range maxReads {
		before, err := c.Generation()
		if err != nil {
			return nil, err
		}
		r := reader{Conn: c, digest: sha256.New(), rules: &Rules{host: host}}
		if err := read(&r); err != nil {
			return nil, fmt.Errorf("read %s of nf_tables: %w", what, err)
		}
		after, err := c.Generation()
		if err != nil {
			return nil, err
		}
		if before == after {
			r.rules.order()
			r.digest.Sum(r.rules.digest[:0])
			return r.rules, nil
		}
		time.Sleep(time.Duration(try+1) * 100 * time.Millisecond)
	}
	return nil, fmt.Errorf("read %s of nf_tables: %w", what, ErrBusy)
}

// named reads the tables of a name. One of the family netdev sees packets of both families.
func (r *reader) named(name string, ingress bool) error {
	for _, f := range ipfamily.All {
		t := &nfTable{family: f, ingress: ingress, name: name, chains: map[string]*nfChain{}, sets: map[string]*nfSet{}}
		there, err := r.table(t)
		if there {
			err = r.contents(t)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// contents reads what is in a table.
func (r *reader) contents(t *nfTable) error {
	fmt.Fprintf(r.digest, "table %s %v\n", t.place(), t.dormant)
	for _, read := range []func(*nfTable) error{r.chains, r.sets, r.ruleset} {
		if err := read(t); err != nil {
			return err
		}
	}
	r.rules.tables[t.family] = append(r.rules.tables[t.family], t)
	if !t.ingress || t.family == ipfamily.IPv4 { // which is there once, for both
		r.rules.size.add(t)
	}
	return nil
}

// add counts what is in a table.
func (s *Size) add(t *nfTable) {
	s.Tables++
	s.Chains += len(t.chains)
	s.Elements += t.elements
	for _, c := range t.chains {
		s.Rules += len(c.rules)
	}
}

// request builds a request about a table.
func request(message uint16, flags uint16, t *nfTable, attrs ...any) []byte {
	var w netlink.Buffer
	m := w.Netfilter(netlink.NFTables(message), flags, t.proto())
	w.Text(1, t.name) // the attribute of the table's name is the first of all objects
	for i := 0; i+1 < len(attrs); i += 2 {
		w.Text(uint16(attrs[i].(int)), attrs[i+1].(string))
	}
	w.End(m)
	return w.Bytes()
}

// proto is the family by which the kernel knows the table.
func (t *nfTable) proto() byte {
	switch {
	case t.both:
		return unix.NFPROTO_INET
	case t.ingress:
		return unix.NFPROTO_NETDEV
	}
	return t.family.NFProto()
}

// list lists objects of a table, and calls do with the attributes of each.
func (r *reader) list(req []byte, begin func(), do func(attrs []byte)) error {
	return r.Dump(req, begin, func(b []byte) { do(b[min(netlink.NetfilterLen, len(b)):]) })
}

func (r *reader) table(t *nfTable) (there bool, err error) {
	body, err := r.Get(request(unix.NFT_MSG_GETTABLE, 0, t))
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil || len(body) < netlink.NetfilterLen {
		return false, err
	}
	const dormant = 1
	t.dormant = netlink.Find(body[netlink.NetfilterLen:], unix.NFTA_TABLE_FLAGS).Big32()&dormant != 0
	return true, nil
}

func (r *reader) chains(t *nfTable) error {
	begin := func() { clear(t.chains) }
	err := r.list(request(unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, t), begin, func(attrs []byte) {
		a := netlink.Decode(attrs)
		if a[unix.NFTA_CHAIN_TABLE].Text() != t.name {
			return
		}
		t.addChain(a)
	})
	for _, c := range sortedBy(t.chains, func(c *nfChain) string { return c.name }) {
		fmt.Fprintf(r.digest, "chain %q %v %v %d %d %v\n", c.name, c.base, c.nat, c.hook, c.priority, c.drops)
		if c.devices != nil {
			fmt.Fprintf(r.digest, "%q\n", c.devices)
		}
	}
	return err
}

// addChain adds a chain with its attributes.
func (t *nfTable) addChain(a netlink.Attributes) {
	c := &nfChain{table: t, name: a[unix.NFTA_CHAIN_NAME].Text()}
	if hook, ok := a[unix.NFTA_CHAIN_HOOK]; ok {
		h := netlink.Decode(hook)
		c.base, c.nat = true, a[unix.NFTA_CHAIN_TYPE].Text() == "nat"
		c.hook, c.priority = h[unix.NFTA_HOOK_HOOKNUM].Big32(), int32(h[unix.NFTA_HOOK_PRIORITY].Big32())
		policy, ok := a[unix.NFTA_CHAIN_POLICY]
		c.drops = ok && int32(policy.Big32()) == codeDrop
		c.findDevices(h)
	}
	t.chains[c.name] = c
}

// findDevices takes over at which devices' ingress a chain of the family netdev sees packets. What is at their egress,
// or in the family inet at their ingress, is not followed.
func (c *nfChain) findDevices(hook netlink.Attributes) {
	const devs, name, ingress = 4, 1, 0 // NFTA_HOOK_DEVS, NFTA_DEVICE_NAME, NF_NETDEV_INGRESS
	if one := hook[unix.NFTA_HOOK_DEV]; len(one) > 0 {
		c.devices = []string{one.Text()}
	}
	for typ, v := range netlink.Each(hook[devs]) {
		if typ == name {
			c.devices = append(c.devices, v.Text())
		}
	}
	if c.devices == nil {
		return
	}
	c.base = c.hook == ingress
	c.hook = hookIngress
}

func sortedBy[T any](m map[string]T, name func(T) string) []T {
	return slices.SortedFunc(maps.Values(m), func(a, b T) int { return cmp.Compare(name(a), name(b)) })
}

func (r *reader) sets(t *nfTable) error {
	begin := func() { clear(t.sets) }
	err := r.list(request(unix.NFT_MSG_GETSET, unix.NLM_F_DUMP, t), begin, func(attrs []byte) {
		a := netlink.Decode(attrs)
		if a[unix.NFTA_SET_TABLE].Text() != t.name {
			return
		}
		s := newSet(a)
		t.sets[s.name] = s
	})
	if err != nil {
		return err
	}
	for _, s := range sortedBy(t.sets, func(s *nfSet) string { return s.name }) {
		fmt.Fprintf(r.digest, "set %q %x %v %d\n", s.name, s.flags, s.fields, s.timeout)
		if s.dynamic() {
			continue
		}
		if err := r.elements(t, s); err != nil {
			return fmt.Errorf("set %s %s: %w", t.family.NFT(), s.name, err)
		}
	}
	return nil
}

// newSet returns a set with its attributes, without elements.
func newSet(a netlink.Attributes) *nfSet {
	s := &nfSet{name: a[unix.NFTA_SET_NAME].Text(), flags: a[unix.NFTA_SET_FLAGS].Big32(),
		timeout: a[unix.NFTA_SET_TIMEOUT].Big64(), exact: map[string]nfElement{}}
	s.keyLen, s.dataLen = int(a[unix.NFTA_SET_KEY_LEN].Big32()), int(a[unix.NFTA_SET_DATA_LEN].Big32())
	if s.flags&unix.NFT_SET_OBJECT != 0 {
		s.odd = "a map of objects"
	}
	for _, field := range netlink.Each(netlink.Find(a[unix.NFTA_SET_DESC], nftaSetDescConcat)) {
		s.fields = append(s.fields, int(netlink.Find(field, nftaSetFieldLen).Big32()))
	}
	return s
}

// rawElement is an element of a list, before ranges get their ends.
type rawElement struct {
	key, keyEnd []byte
	end         bool
	nfElement
}

// growPause is how long the kernel is given to move a set's elements to new buckets: meanwhile it may list some twice
// and omit others.
const growPause = time.Millisecond

// elements reads the elements of a set until the kernel lists each once, and as many as it says there are.
func (r *reader) elements(t *nfTable, s *nfSet) error {
	var list []rawElement
	for range 10 {
		err := r.list(request(unix.NFT_MSG_GETSETELEM, unix.NLM_F_DUMP, t, unix.NFTA_SET_ELEM_LIST_SET, s.name),
			func() { list = nil }, func(attrs []byte) {
				for _, elem := range netlink.Each(netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
					list = append(list, t.element(elem))
				}
			})
		if err != nil {
			return err
		}
		slices.SortFunc(list, compareRaw)
		unique := slices.CompactFunc(slices.Clone(list), func(a, b rawElement) bool { return compareRaw(a, b) == 0 })
		n, told, err := r.count(t, s)
		if err != nil {
			return err
		}
		if len(unique) == len(list) && (!told || s.flags&unix.NFT_SET_INTERVAL != 0 || n == len(list)) {
			r.digestElements(list)
			t.elements += len(list)
			return s.fill(list)
		}
		time.Sleep(growPause)
	}
	return ErrBusy
}

func compareRaw(a, b rawElement) int {
	end := func(e rawElement) int {
		if e.end {
			return 0
		}
		return 1
	}
	return cmp.Or(bytes.Compare(a.key, b.key), cmp.Compare(end(a), end(b)), bytes.Compare(a.keyEnd, b.keyEnd))
}

func (r *reader) digestElements(list []rawElement) {
	for _, e := range list {
		chain := ""
		if e.chain != nil {
			chain = e.chain.name
		}
		fmt.Fprintf(r.digest, "%x %x %v %x %d %q\n", e.key, e.keyEnd, e.end, e.data, e.code, chain)
	}
}

// count asks how many elements a set has, which older kernels do not tell.
func (r *reader) count(t *nfTable, s *nfSet) (n int, told bool, err error) {
	if len(s.name) > 1 && s.flags&unix.NFT_SET_ANONYMOUS != 0 {
		return 0, false, nil // it never grows
	}
	body, err := r.Get(request(unix.NFT_MSG_GETSET, 0, t, unix.NFTA_SET_NAME, s.name))
	if err != nil {
		return 0, false, err
	}
	v := netlink.Find(body[min(netlink.NetfilterLen, len(body)):], nftaSetCount)
	return int(v.Big32()), len(v) == 4, nil
}

func (t *nfTable) element(elem []byte) (e rawElement) {
	for typ, v := range netlink.Each(elem) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			e.key = bytes.Clone(netlink.Find(v, unix.NFTA_DATA_VALUE))
		case nftaSetElemKeyEnd:
			e.keyEnd = bytes.Clone(netlink.Find(v, unix.NFTA_DATA_VALUE))
		case unix.NFTA_SET_ELEM_DATA:
			if verdict := netlink.Find(v, unix.NFTA_DATA_VERDICT); verdict != nil {
				e.code, e.chain, e.odd = t.verdict(verdict)
			} else {
				e.data = bytes.Clone(netlink.Find(v, unix.NFTA_DATA_VALUE))
			}
		case unix.NFTA_SET_ELEM_FLAGS:
			e.end = v.Big32()&unix.NFT_SET_ELEM_INTERVAL_END != 0
			if v.Big32()&catchAll != 0 {
				e.key = nil
			}
		case unix.NFTA_SET_ELEM_EXPR:
			e.odd = cmp.Or(e.odd, oddExpression(v))
		case nftaSetElemExpressions:
			for _, x := range netlink.Each(v) {
				e.odd = cmp.Or(e.odd, oddExpression(x))
			}
		}
	}
	return e
}

// OverLimit is what is odd about an element that rules match only over a limit of its own. Packets are taken for those
// within it.
const OverLimit = "over a limit"

// oddExpression names the expression of an element, unless it only counts.
func oddExpression(e []byte) string {
	data := netlink.Find(e, unix.NFTA_EXPR_DATA)
	if name := netlink.Find(e, unix.NFTA_EXPR_NAME).Text(); name == "limit" &&
		netlink.Value(netlink.Find(data, unix.NFTA_LIMIT_FLAGS)).Big32()&unix.NFT_LIMIT_F_INV != 0 {
		return OverLimit
	}
	if name := netlink.Find(e, unix.NFTA_EXPR_NAME).Text(); name != "counter" && name != "last" {
		return "an element with " + name
	}
	return ""
}

func (t *nfTable) verdict(v []byte) (code int32, chain *nfChain, odd string) {
	code = int32(netlink.Find(v, unix.NFTA_VERDICT_CODE).Big32())
	if name := netlink.Find(v, unix.NFTA_VERDICT_CHAIN).Text(); name != "" {
		if chain = t.chain(name); chain == nil {
			odd = "a verdict that leads to the unknown chain " + name
		}
	}
	return code, chain, odd
}

// fill sorts a set's elements, which are sorted, into what lookups need.
func (s *nfSet) fill(list []rawElement) error {
	for i := 0; i < len(list); i++ {
		e := list[i]
		switch {
		case e.key == nil:
			s.catchAll = &list[i].nfElement
		case s.flags&unix.NFT_SET_INTERVAL == 0:
			s.exact[string(e.key)] = e.nfElement
		case len(s.fields) > 1:
			high := e.keyEnd
			if high == nil {
				high = e.key
			}
			s.ranges = append(s.ranges, nfRange{e.key, high, e.nfElement})
		case !e.end:
			high := bytes.Repeat([]byte{0xff}, len(e.key))
			if i+1 < len(list) {
				high = before(list[i+1].key)
			}
			s.ranges = append(s.ranges, nfRange{e.key, high, e.nfElement})
		}
	}
	s.group()
	return nil
}

// before returns the number before a number that is not 0.
func before(b []byte) []byte {
	out := bytes.Clone(b)
	for i := len(out) - 1; i >= 0; i-- {
		out[i]--
		if out[i] != 0xff {
			break
		}
	}
	return out
}

// group indexes ranges by their first field, so that a lookup does not try all of them.
func (s *nfSet) group() {
	if len(s.fields) < 2 {
		return
	}
	n := s.fields[0]
	grouped := map[string][]nfRange{}
	for _, r := range s.ranges {
		if !bytes.Equal(r.low[:n], r.high[:n]) {
			return
		}
		grouped[string(r.low[:n])] = append(grouped[string(r.low[:n])], r)
	}
	s.grouped = grouped
}

// find looks a key up; nil if it is not there.
func (s *nfSet) find(key []byte) *nfElement {
	if s.flags&unix.NFT_SET_INTERVAL == 0 {
		if e, ok := s.exact[string(key)]; ok {
			return &e
		}
		return s.catchAll
	}
	if len(s.fields) > 1 {
		for _, r := range s.candidates(key) {
			if s.within(&r, key) {
				return &r.nfElement
			}
		}
		return s.catchAll
	}
	i, found := slices.BinarySearchFunc(s.ranges, key, func(r nfRange, key []byte) int {
		return bytes.Compare(r.low, key)
	})
	if !found {
		i--
	}
	if i >= 0 && bytes.Compare(key, s.ranges[i].high) <= 0 {
		return &s.ranges[i].nfElement
	}
	return s.catchAll
}

// candidates are the ranges of a concatenation that may hold a key.
func (s *nfSet) candidates(key []byte) []nfRange {
	if s.grouped != nil {
		return s.grouped[string(key[:s.fields[0]])]
	}
	return s.ranges
}

func (s *nfSet) within(r *nfRange, key []byte) bool {
	at := 0
	for _, n := range s.fields {
		part := key[at : at+n]
		if bytes.Compare(part, r.low[at:at+n]) < 0 || bytes.Compare(part, r.high[at:at+n]) > 0 {
			return false
		}
		at += (n + 3) &^ 3
	}
	return true
}

func (r *reader) ruleset(t *nfTable) error {
	begin := func() {
		for _, c := range t.chains {
			c.rules = nil
		}
	}
	var failed error
	type raw struct{ name, text string }
	rules := map[string][]raw{}
	request := request(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, t)
	err := r.list(request, func() { begin(); clear(rules) }, func(attrs []byte) {
		a := netlink.Decode(attrs)
		if a[unix.NFTA_RULE_TABLE].Text() != t.name {
			return
		}
		c := t.chains[a[unix.NFTA_RULE_CHAIN].Text()]
		if c == nil {
			failed = errors.New("a rule of an unknown chain")
			return
		}
		text := ruleText(a[unix.NFTA_RULE_EXPRESSIONS])
		rules[c.name] = append(rules[c.name], raw{c.name, text})
		c.rules = append(c.rules, t.compile(a[unix.NFTA_RULE_HANDLE].Big64(), a[unix.NFTA_RULE_EXPRESSIONS]))
	})
	for _, c := range t.chains {
		c.prepare()
	}
	for _, list := range sortedBy(rules, func(l []raw) string { return l[0].name }) {
		for _, rule := range list {
			fmt.Fprintf(r.digest, "rule %q %s\n", rule.name, rule.text)
		}
	}
	return errors.Join(err, failed)
}

// ruleText identifies a rule by its expressions, without what they count.
func ruleText(expressions []byte) string {
	var b bytes.Buffer
	for _, e := range netlink.Each(expressions) {
		name, data := netlink.Find(e, unix.NFTA_EXPR_NAME).Text(), netlink.Find(e, unix.NFTA_EXPR_DATA)
		b.WriteString(name)
		for typ, v := range netlink.Each(data) {
			inner := name == "dynset" && (typ == unix.NFTA_DYNSET_EXPR || typ > unix.NFTA_DYNSET_FLAGS)
			id := name == "lookup" && typ == unix.NFTA_LOOKUP_SET_ID || name == "dynset" && typ == unix.NFTA_DYNSET_SET_ID
			if name != "counter" && name != "last" && !inner && !id {
				fmt.Fprintf(&b, " %d=%x", typ, []byte(v))
			}
		}
		b.WriteString(";")
	}
	return b.String()
}
