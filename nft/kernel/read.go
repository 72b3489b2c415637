package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
)

// Elements reads all elements of one of our sets, in the kernel's order. It returns none if the table or set does not
// exist.
//
// The kernel gives a set that has grown more buckets a moment after the transaction. Meanwhile it may list some
// elements twice and omit others. So the list is repeated until it has each element once, and as many as the kernel
// reports (Linux 6.16).
func (c *Conn) Elements(f ipfamily.Family, set nft.SetID) (out []nft.Listed, err error) {
	if s := nft.SetByID(set); s.Interval {
		return c.ranges(f, set)
	}
	for range maxLists {
		twice := false
		if out, twice, err = c.list(f, set); err != nil {
			return nil, err
		}
		if set.IsDynamic() { // entries come and go all the time
			return out, nil
		}
		n, told, err := c.setCount(f, set)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, fmt.Errorf("nft: count %s %s %s: %w", f.NFT(), nft.TableName, set, err)
		}
		if !twice && (!told || n == len(out)) {
			return out, nil
		}
		time.Sleep(growPause)
	}
	return out, nil
}

// maxLists bounds how often a set is listed again because the kernel was moving its elements.
const maxLists = 10

// growPause is how long the kernel is given to move a set's elements to new buckets.
const growPause = time.Millisecond

// some lists so many elements of a set at most, and counts the others.
func (c *Conn) some(f ipfamily.Family, set nft.SetID, most int) (out []nft.Listed, left int, err error) {
	err = c.dump(listRequest(f, set), func() { out, left = nil, 0 }, func(attrs []byte) {
		eachElement(f, set, attrs, func(e nft.Listed) {
			if len(out) < most {
				out = append(out, e)
			} else {
				left++
			}
		})
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, 0, fmt.Errorf("nft: list %s %s: %w", f.NFT(), set, err)
	}
	return out, left, nil
}

// list lists a set once, and says whether the kernel listed an element twice.
func (c *Conn) list(f ipfamily.Family, set nft.SetID) (out []nft.Listed, twice bool, err error) {
	var seen map[string]bool
	err = c.dump(listRequest(f, set), func() { out, twice, seen = nil, false, map[string]bool{} }, func(attrs []byte) {
		eachElement(f, set, attrs, func(e nft.Listed) {
			key := string(e.Key())
			twice = twice || seen[key]
			if !seen[key] {
				out = append(out, e)
			}
			seen[key] = true
		})
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, false, fmt.Errorf("nft: list %s %s %s: %w", f.NFT(), nft.TableName, set, err)
	}
	return out, twice, nil
}

// ranges lists a set of ranges.
func (c *Conn) ranges(f ipfamily.Family, set nft.SetID) (out []nft.Listed, err error) {
	var ends [][]byte
	err = c.dump(listRequest(f, set), func() { out, ends = nil, nil }, func(attrs []byte) {
		ends = append(ends, eachElement(f, set, attrs, func(e nft.Listed) { out = append(out, e) })...)
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("nft: list %s %s %s: %w", f.NFT(), nft.TableName, set, err)
	}
	if set.IsTree() {
		closeRanges(f, out, ends)
	}
	return out, nil
}

// setCount asks how many elements a set has. Before Linux 6.16 the kernel does not tell.
func (c *Conn) setCount(f ipfamily.Family, set nft.SetID) (n int, told bool, err error) {
	var w netlink.Buffer
	proto, table := tableAt(f, set.IsIngress())
	m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETSET), 0, proto)
	w.Text(unix.NFTA_SET_TABLE, table)
	w.Text(unix.NFTA_SET_NAME, set.String())
	w.End(m)
	err = c.query(w.Bytes(), func(attrs []byte) {
		if v := netlink.Find(attrs, nftaSetCount); len(v) == 4 {
			n, told = int(v.Big32()), true
		}
	})
	return n, told, err
}

// rawElements lists a set that the layout may not have.
func (c *Conn) rawElements(f ipfamily.Family, set string) (out []parsed, err error) {
	err = c.dump(listNamed(f, false, set), func() { out = nil }, func(attrs []byte) {
		for _, elem := range netlink.Each(netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			p := parseElement(elem)
			p.data = bytes.Clone(p.data)
			out = append(out, p)
		}
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("nft: list %s %s %s: %w", f.NFT(), nft.TableName, set, err)
	}
	return out, nil
}

// listRequest asks for all elements of a set.
func listRequest(f ipfamily.Family, set nft.SetID) []byte {
	return listNamed(f, set.IsIngress(), set.String())
}

func listNamed(f ipfamily.Family, ingress bool, set string) []byte {
	var w netlink.Buffer
	proto, table := tableAt(f, ingress)
	m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETSETELEM), unix.NLM_F_DUMP, proto)
	w.Text(unix.NFTA_SET_ELEM_LIST_TABLE, table)
	w.Text(unix.NFTA_SET_ELEM_LIST_SET, set)
	w.End(m)
	return w.Bytes()
}

// eachElement calls do with the elements of one message, and gives the ends of ranges among them.
func eachElement(f ipfamily.Family, set nft.SetID, attrs []byte, do func(nft.Listed)) (ends [][]byte) {
	for _, elem := range netlink.Each(netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
		p := parseElement(elem)
		if p.isEnd {
			ends = append(ends, p.key)
		} else if e, ok := nft.ElementFrom(f, set, p.key, p.keyEnd, p.data, p.chain, p.comment); ok {
			p.Element = e
			do(p.Listed)
		}
	}
	return ends
}

// closeRanges gives the elements of a tree of ranges their ends: each ends before the nearest end after it, or at the
// last address there is. The kernel lists beginnings and ends as elements of their own, in no order that says which
// belong together.
func closeRanges(f ipfamily.Family, starts []nft.Listed, ends [][]byte) {
	slices.SortFunc(ends, bytes.Compare)
	for i := range starts {
		key := bytes.Clone(starts[i].Key())
		last := bytes.Repeat([]byte{0xff}, len(key))
		if n := slices.IndexFunc(ends, func(end []byte) bool { return bytes.Compare(end, key) > 0 }); n >= 0 {
			end, _ := netip.AddrFromSlice(ends[n])
			last = end.Prev().AsSlice()
		}
		if e, ok := nft.ElementFrom(f, starts[i].Set, key, last, nil, "", starts[i].Comment); ok {
			starts[i].Element = e
		}
	}
}

// parsed is an element as it is on the wire. Its slices point into the message.
type parsed struct {
	nft.Listed
	key, keyEnd, data []byte
	chain, comment    string
	// isEnd marks the end of a range, which is no element of its own.
	isEnd bool
}

func parseElement(elem []byte) (p parsed) {
	for typ, v := range netlink.Each(elem) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			p.key = bytes.Clone(dataValue(v))
		case nftaSetElemKeyEnd:
			p.keyEnd = dataValue(v)
		case unix.NFTA_SET_ELEM_DATA:
			p.data, p.chain = dataValue(v), verdictChain(v)
		case unix.NFTA_SET_ELEM_FLAGS:
			p.isEnd = v.Big32()&intervalEnd != 0
		case unix.NFTA_SET_ELEM_USERDATA:
			if len(v) > 2 && v[0] == udataComment {
				p.comment = unix.ByteSliceToString(v[2:])
			}
		case unix.NFTA_SET_ELEM_TIMEOUT:
			p.Timeout = time.Duration(v.Big64()) * time.Millisecond
		case unix.NFTA_SET_ELEM_EXPIRATION:
			p.Expires = time.Duration(v.Big64()) * time.Millisecond
		case unix.NFTA_SET_ELEM_EXPR:
			if expressionName(v) == "limit" {
				p.data = limitData(expressionData(v))
			} else {
				p.Counted, p.Packets, p.Bytes = counter(v)
			}
		}
	}
	return p
}

// limitData reads a limit. One that Verdict would not write has no rate, and so is none.
func limitData(data []byte) []byte {
	l := nft.Limit{Burst: netlink.Find(data, unix.NFTA_LIMIT_BURST).Big32()}
	a := netlink.Decode(data)
	if rate := a[unix.NFTA_LIMIT_RATE].Big64(); a[unix.NFTA_LIMIT_UNIT].Big64() == 1 && rate <= math.MaxUint32 &&
		a[unix.NFTA_LIMIT_TYPE].Big32() == unix.NFT_LIMIT_PKTS && a[unix.NFTA_LIMIT_FLAGS].Big32() == unix.NFT_LIMIT_F_INV {
		l.Rate = uint32(rate)
	}
	return l.Data()
}

// ruleCounters fills in the counters of the rules of our table's chains. Rules come in the order they have in their
// chain.
func (c *Conn) ruleCounters(f ipfamily.Family, chains []nft.Chain) error {
	var w netlink.Buffer
	m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETRULE), unix.NLM_F_DUMP, f.NFProto())
	w.Text(unix.NFTA_RULE_TABLE, nft.TableName)
	w.End(m)
	var seen map[string]int
	err := c.dump(w.Bytes(), func() { seen = map[string]int{} }, func(attrs []byte) {
		a := netlink.Decode(attrs)
		chain := a[unix.NFTA_RULE_CHAIN].Text()
		if a[unix.NFTA_RULE_TABLE].Text() != nft.TableName {
			// Kernels before 4.10 do not look at the table that was asked for.
			return
		}
		n := seen[chain]
		seen[chain]++
		if i := slices.IndexFunc(chains, func(c nft.Chain) bool { return c.ID.Name() == chain }); i >= 0 &&
			n < len(chains[i].Rules) {
			countRule(chains[i].Rules[n], a[unix.NFTA_RULE_EXPRESSIONS])
		}
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("nft: list rules of %s %s: %w", f.NFT(), nft.TableName, err)
	}
	return nil
}

// countRule fills in the counter of a rule, of which there is at most one.
func countRule(r nft.Rule, expressions []byte) {
	i := slices.IndexFunc(r, func(s nft.Statement) bool { _, ok := s.(nft.Counter); return ok })
	if i < 0 {
		return
	}
	for _, e := range netlink.Each(expressions) {
		if ok, packets, bytes := counter(e); ok && expressionName(e) == "counter" {
			r[i] = nft.Counter{Counted: true, Packets: packets, Bytes: bytes}
		}
	}
}

func expressionName(e []byte) string { return netlink.Find(e, unix.NFTA_EXPR_NAME).Text() }

func expressionData(e []byte) []byte { return netlink.Find(e, unix.NFTA_EXPR_DATA) }

// dataValue gives the bytes of a nested data attribute; nil if it holds a verdict.
func dataValue(nested []byte) []byte { return netlink.Find(nested, unix.NFTA_DATA_VALUE) }

// verdictChain gives the chain a verdict goes to; empty if it is another verdict, such as a jump.
func verdictChain(nested []byte) string {
	v := netlink.Find(nested, unix.NFTA_DATA_VERDICT)
	if int32(netlink.Find(v, unix.NFTA_VERDICT_CODE).Big32()) != gotoCode {
		return ""
	}
	return netlink.Find(v, unix.NFTA_VERDICT_CHAIN).Text()
}

func counter(expression []byte) (ok bool, packets, bytes uint64) {
	for typ, v := range netlink.Each(expressionData(expression)) {
		switch {
		case typ == unix.NFTA_COUNTER_PACKETS && len(v) == 8:
			ok, packets = true, v.Big64()
		case typ == unix.NFTA_COUNTER_BYTES:
			bytes = v.Big64()
		}
	}
	return ok, packets, bytes
}
