package iptshim

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Dispatch is how a packet finds its row in a chain that many Services have rules in.
type Dispatch uint8

const (
	// Tree has chains for ranges of addresses, and of ports, under KUBE-SERVICES and KUBE-NODEPORTS: a packet passes some
	// tens of rules among 10,000 Services. As long as there are but a few, it is a list.
	Tree Dispatch = iota
	// List is what kube-proxy has: every packet that begins a connection passes one row after the other.
	List
)

const (
	// leafSize is how many rows a chain holds at most before it is divided.
	leafSize = 16
	// strideBits is by how many bits of the key a chain is divided: into 8 parts at most.
	strideBits = 3
)

// listSpecs say where each list is, what the names of its branches begin with, and whether its keys have an address.
var listSpecs = [numLists]struct {
	table        Table
	root, branch string
	addressed    bool
}{
	natServices:      {NAT, servicesChain, svcPrefix, true},
	natNodePorts:     {NAT, nodePortsChain, extPrefix, false},
	filterServices:   {Filter, servicesChain, "", true},
	filterExternal:   {Filter, externalChain, "", true},
	filterFirewall:   {Filter, firewallChain, "", true},
	filterNodePorts:  {Filter, nodePortsChain, "", false},
	filterClusterIPs: {Filter, clusterIPsChain, clusterIPsPrefix, true},
}

// list is a chain of rows with the branches under it.
type list struct {
	id     listID
	family ipfamily.Family
	tree   bool
	// rows are sorted; tail are the rules after them.
	rows []row
	tail []rule
	// branches are the chains that lie under a chain of the tree.
	branches map[string][]string
}

// span is a range of keys: those that begin with some bits.
type span struct {
	key  string
	bits int
}

// holds says whether a key lies in the span.
func (s span) holds(key string) bool { return commonBits(s.key, key) >= s.bits }

// commonBits counts with how many bits two keys begin alike.
func commonBits(a, b string) int {
	for i := range min(len(a), len(b)) {
		if x := a[i] ^ b[i]; x != 0 {
			n := 8 * i
			for ; x&0x80 == 0; x <<= 1 {
				n++
			}
			return n
		}
	}
	return 8 * min(len(a), len(b))
}

// addrBits is how much of a key is an address.
func (l *list) addrBits() int {
	if !listSpecs[l.id].addressed {
		return 0
	}
	return l.family.Bits()
}

// divide splits rows, all of them in one chain, into those of its branches. Within each the rows have more in common.
// It gives nil where they cannot be told apart any more.
func (l *list) divide(rows []row) (parts [][]row, spans []span) {
	first, last := rows[0].key, rows[len(rows)-1].key
	at, addr, all := commonBits(first, last), l.addrBits(), 8*len(first)
	if at >= all {
		return nil, nil
	}
	// A chain is divided by address, then by protocol, then by port, and not by two of them at once.
	end, exact := addr, false
	switch {
	case at >= addr+8:
		end = all
	case at >= addr:
		end, exact = addr+8, true
	}
	to := end
	if !exact {
		to = min(at+strideBits, end)
	}
	for len(rows) > 0 {
		s := span{rows[0].key, to}
		n := 1
		for n < len(rows) && s.holds(rows[n].key) {
			n++
		}
		if s.bits = min(commonBits(rows[0].key, rows[n-1].key), end); s.bits < to {
			s.bits = to
		}
		parts, spans, rows = append(parts, rows[:n]), append(spans, s), rows[n:]
	}
	return parts, spans
}

// match is what a packet to a span has in common, as far as the chains before did not ask for it.
func (l *list) match(s span) (before, after string) {
	addr := l.addrBits()
	if s.bits <= addr {
		return " -d " + l.prefix(s).String(), ""
	}
	protocol := snapshot.Protocol(s.key[addr/8]).String()
	if s.bits == addr+8 {
		return " -p " + protocol, ""
	}
	low, high := ports(s, addr)
	text := strconv.Itoa(low)
	if high != low {
		text += ":" + strconv.Itoa(high)
	}
	return " -p " + protocol, " -m " + protocol + " --dport " + text
}

// prefix gives the range of addresses of a span that is no more than that.
func (l *list) prefix(s span) netip.Prefix {
	a, _ := netip.AddrFromSlice([]byte(s.key[:l.addrBits()/8]))
	return netip.PrefixFrom(a, s.bits).Masked()
}

// ports gives the first and the last port of a span.
func ports(s span, addrBits int) (low, high int) {
	port := int(s.key[addrBits/8+1])<<8 | int(s.key[addrBits/8+2])
	free := 16 - (s.bits - addrBits - 8)
	low = port >> free << free
	return low, low + 1<<free - 1
}

// branch names the chain of a span: by the span if that is short enough, else by a hash, which no chain of a Service
// has.
func (l *list) branch(s span) string {
	addr, prefix := l.addrBits(), listSpecs[l.id].branch
	full := ""
	if addr > 0 {
		at := s
		at.bits = min(s.bits, addr)
		full = l.prefix(at).String()
	}
	if s.bits > addr {
		full += "-" + snapshot.Protocol(s.key[addr/8]).String()
	}
	if s.bits > addr+8 {
		low, high := ports(s, addr)
		full += fmt.Sprintf("-%d-%d", low, high)
	}
	full = strings.TrimPrefix(full, "-")
	if len(prefix)+len(full) <= maxChainName && !strings.Contains(full, ":") {
		return prefix + full
	}
	return prefix + strings.ToLower(hash(full))
}

// change replaces rows and gives the keys that it touched.
func (l *list) change(gone, come []row) (keys []string) {
	if len(gone) == 0 && len(come) == 0 {
		return nil
	}
	for _, r := range gone {
		keys = append(keys, r.key)
	}
	for _, r := range come {
		keys = append(keys, r.key)
	}
	if len(gone)+len(come) <= fewRows {
		for _, r := range gone {
			if i, found := slices.BinarySearchFunc(l.rows, r, compareRows); found {
				l.rows = slices.Delete(l.rows, i, i+1)
			}
		}
		for _, r := range come {
			i, _ := slices.BinarySearchFunc(l.rows, r, compareRows)
			l.rows = slices.Insert(l.rows, i, r)
		}
		return keys
	}
	left := make(map[row]int, len(gone))
	for _, r := range gone {
		left[r]++
	}
	l.rows = slices.DeleteFunc(l.rows, func(r row) bool {
		left[r]--
		return left[r] >= 0
	})
	l.rows = append(l.rows, come...)
	slices.SortFunc(l.rows, compareRows)
	return keys
}

// fewRows is up to how many rows are moved one by one.
const fewRows = 64

// render gives the chains that the keys lie in, or all if there are no keys, and drops those that are gone.
func (l *list) render(keys []string, write func(chain), drop func(Table, string)) {
	v := listVisit{list: l, keys: keys, write: write, before: map[string][]string{}}
	v.visit(listSpecs[l.id].root, l.rows, l.tail)
	for _, name := range v.orphaned {
		v.removeBranch(name, drop)
	}
}

// listVisit is one rendering on its way.
type listVisit struct {
	*list
	keys  []string
	write func(chain)
	// before are the branches that the visited chains had, and left those that are not under the same chain any more.
	before   map[string][]string
	orphaned []string
}

func (v *listVisit) visit(name string, rows []row, tail []rule) {
	v.before[name] = v.branches[name]
	parts, spans := v.partition(rows)
	var rules []rule
	var under []string
	for i, part := range parts {
		if spans == nil || len(part) == 1 {
			for _, r := range part {
				rules = append(rules, r.rule)
			}
			continue
		}
		branch := v.branch(spans[i])
		match, after := v.match(spans[i])
		rules = append(rules, rule{before: match, after: after + " -j " + branch})
		under = append(under, branch)
		if v.keys == nil || !slices.Contains(v.before[name], branch) || slices.ContainsFunc(v.keys, spans[i].holds) {
			v.visit(branch, part, nil)
		}
	}
	v.write(chain{table: listSpecs[v.id].table, name: name, rules: append(rules, tail...)})
	for _, b := range v.before[name] {
		if !slices.Contains(under, b) {
			v.orphaned = append(v.orphaned, b)
		}
	}
	if v.branches[name] = under; under == nil {
		delete(v.branches, name)
	}
}

// partition divides rows if they are many; a list is one part, without a span.
func (v *listVisit) partition(rows []row) ([][]row, []span) {
	if v.tree && listSpecs[v.id].branch != "" && len(rows) > leafSize {
		if parts, spans := v.divide(rows); parts != nil {
			return parts, spans
		}
	}
	return [][]row{rows}, nil
}

// removeBranch drops a branch with what was under it, unless it is under another chain now.
func (v *listVisit) removeBranch(name string, drop func(Table, string)) {
	if _, visited := v.before[name]; visited {
		return
	}
	for _, b := range v.branches[name] {
		v.removeBranch(b, drop)
	}
	delete(v.branches, name)
	drop(listSpecs[v.id].table, name)
}
