package nfteval

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// value is what an expression gives: bytes, in the order in which they compare, of the length of its type.
type value string

// datatype is one of nft's, by its name; the length of its values is in sizes.
type datatype string

// sizes are the lengths of values, in bytes. Interfaces are known by their names only, so an index is a name here.
var sizes = map[datatype]int{
	"ipv4_addr": 4, "ipv6_addr": 16, "inet_proto": 1, "inet_service": 2, "mark": 4, "classid": 4, "integer": 4,
	"ifname":      16,
	"iface_index": 16, "ct_state": 4, "ct_status": 4, "ct_dir": 1, "fib_addrtype": 4, "nf_proto": 1, "ether_type": 2,
	"tcp_flag":   1,
	"ether_addr": 6,
}

// names are the words that stand for values.
var names = map[datatype]map[string]uint32{
	"inet_proto": protocols,
	"nf_proto":   {"ipv4": 2, "ipv6": 10},
	"ether_type": {"ip": 0x0800, "ip6": 0x86dd, "arp": 0x0806, "vlan": 0x8100},
	"ct_state":   {"invalid": 1, "established": 2, "related": 4, "new": 8, "untracked": 64},
	"ct_status":  {"expected": 1, "seen-reply": 2, "assured": 4, "confirmed": 8, "snat": 16, "dnat": 32, "dying": 512},
	"ct_dir":     {"original": 0, "reply": 1},
	"fib_addrtype": {"unspec": 0, "unicast": 1, "local": 2, "broadcast": 3, "anycast": 4, "multicast": 5, "blackhole": 6,
		"unreachable": 7, "prohibit": 8},
	"tcp_flag": {"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16, "urg": 32, "ecn": 64, "cwr": 128},
	"classid":  {"none": 0, "root": math.MaxUint32},
}

var protocols = map[string]uint32{"tcp": 6, "udp": 17, "sctp": 132}

// otherProtocols are those that rules may name, and no question has.
var otherProtocols = map[string]uint32{"icmp": 1, "igmp": 2, "dccp": 33, "gre": 47, "esp": 50, "ah": 51,
	"ipv6-icmp": 58, "icmpv6": 58, "udplite": 136}

func number(n uint64, t datatype) value {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], n)
	return value(b[8-sizes[t]:])
}

func (v value) number() uint64 {
	var b [8]byte
	copy(b[8-len(v):], v)
	return binary.BigEndian.Uint64(b[:])
}

func address(a netip.Addr) value { return value(a.AsSlice()) }

func interfaceName(s string) value { return value(s + strings.Repeat("\x00", max(0, 16-len(s)))) }

// span is a constant: what lies between two values, both included. Most are the same.
type span struct{ low, high value }

func (s span) holds(v value) bool { return s.low <= v && v <= s.high }

// constant reads what nft's JSON has for a constant of a type.
func constant(t datatype, node any) (span, error) {
	switch n := node.(type) {
	case json.Number:
		return scalar(t, n.String())
	case string:
		return scalar(t, n)
	case bool:
		return span{}, fmt.Errorf("%v stands for a %s", n, t)
	case []any:
		return flags(t, n)
	}
	key, arg := only(node)
	switch key {
	case "prefix":
		m, ok := arg.(map[string]any)
		if !ok {
			return span{}, fmt.Errorf("prefix %s", text(node))
		}
		return prefix(t, fmt.Sprint(m["addr"]), fmt.Sprint(m["len"]))
	case "range":
		ends, ok := arg.([]any)
		if !ok || len(ends) != 2 {
			return span{}, fmt.Errorf("range %s", text(node))
		}
		low, err := constant(t, ends[0])
		if err != nil {
			return span{}, err
		}
		high, err := constant(t, ends[1])
		return span{low.low, high.high}, err
	}
	return span{}, fmt.Errorf("%s is no constant of type %s that is known", text(node), t)
}

// flags are several bits at once.
func flags(t datatype, list []any) (span, error) {
	var bits uint64
	for _, f := range list {
		s, err := constant(t, f)
		if err != nil || s.low != s.high || len(s.low) > 8 {
			return span{}, fmt.Errorf("%s is no list of flags of type %s", text(list), t)
		}
		bits |= s.low.number()
	}
	v := number(bits, t)
	return span{v, v}, nil
}

func prefix(t datatype, addr, bits string) (span, error) {
	base, err := scalar(t, addr)
	n, nerr := strconv.Atoi(bits)
	if err != nil || nerr != nil || n < 0 || n > 8*len(base.low) {
		return span{}, fmt.Errorf("prefix %s/%s of type %s", addr, bits, t)
	}
	low, high := []byte(base.low), []byte(base.low)
	for i := n; i < 8*len(low); i++ {
		low[i/8] &^= 0x80 >> (i % 8)
		high[i/8] |= 0x80 >> (i % 8)
	}
	return span{value(low), value(high)}, nil
}

// scalar reads one value; of an interface's name with a star, all names it stands for.
func scalar(t datatype, s string) (span, error) {
	bad := fmt.Errorf("%q is no value of type %s", s, t)
	size, known := sizes[t]
	if !known {
		return span{}, fmt.Errorf("type %q is not known", t)
	}
	switch t {
	case "ipv4_addr", "ipv6_addr":
		if cut, bits, ok := strings.Cut(s, "/"); ok {
			return prefix(t, cut, bits)
		}
		a, err := netip.ParseAddr(s)
		if err != nil || len(a.AsSlice()) != size {
			return span{}, bad
		}
		return span{address(a), address(a)}, nil
	case "ifname", "iface_index":
		return interfaceSpan(t, s)
	}
	named, ok := names[t][s]
	if !ok && t == "inet_proto" {
		named, ok = otherProtocols[s]
	}
	if !ok && t == "classid" {
		named, ok = classid(s)
	}
	n := uint64(named)
	if !ok {
		var err error
		if n, err = strconv.ParseUint(s, 0, 8*size); err != nil {
			return span{}, bad
		}
	}
	v := number(n, t)
	return span{v, v}, nil
}

// interfaceSpan reads an interface's name. An index that is listed as a number is that of no interface, or of one that
// is gone.
func interfaceSpan(t datatype, s string) (span, error) {
	if t == "iface_index" && s == "0" {
		s = ""
	} else if _, err := strconv.Atoi(s); t == "iface_index" && err == nil {
		return span{}, fmt.Errorf("interface %s has no name", s)
	}
	if len(s) > 15 || strings.Contains(s, `\`) {
		return span{}, fmt.Errorf("%q is no name of an interface that is known", s)
	}
	if stem, ok := strings.CutSuffix(s, "*"); ok {
		return span{interfaceName(stem), value(stem + strings.Repeat("\xff", 16-len(stem)))}, nil
	}
	return span{interfaceName(s), interfaceName(s)}, nil
}

// classid reads MAJOR:MINOR, both hexadecimal; either may be left out if it is 0.
func classid(s string) (uint32, bool) {
	a, b, ok := strings.Cut(s, ":")
	if !ok || a == "" && b == "" {
		return 0, false
	}
	major, aerr := strconv.ParseUint("0"+a, 16, 16)
	minor, berr := strconv.ParseUint("0"+b, 16, 16)
	return uint32(major<<16 | minor), aerr == nil && berr == nil
}

// show writes a value as nft does.
func (v value) show(t datatype) string {
	switch t {
	case "ipv4_addr", "ipv6_addr":
		a, _ := netip.AddrFromSlice([]byte(v))
		return a.String()
	case "ifname", "iface_index":
		return strings.TrimRight(string(v), "\x00")
	case "classid":
		n := v.number()
		return fmt.Sprintf("%x:%x", n>>16, n&0xffff)
	}
	n := v.number()
	for name, m := range names[t] {
		if uint64(m) == n {
			return name
		}
	}
	return strconv.FormatUint(n, 10)
}

func (s span) show(t datatype) string {
	if s.low == s.high {
		return s.low.show(t)
	}
	return s.low.show(t) + "-" + s.high.show(t)
}

// only gives the key and value of an object that has one key; else an empty key.
func only(node any) (string, any) {
	if m, ok := node.(map[string]any); ok && len(m) == 1 {
		for k, v := range m {
			return k, v
		}
	}
	return "", nil
}

// joinParts writes parts of a concatenation.
func joinParts[T any](parts []T, types []datatype, show func(T, datatype) string) string {
	list := make([]string, len(parts))
	for i, p := range parts {
		list[i] = show(p, types[i])
	}
	return strings.Join(list, " . ")
}

func join(parts []value) value {
	if len(parts) == 1 {
		return parts[0]
	}
	var b strings.Builder
	for _, p := range parts {
		b.WriteString(string(p))
	}
	return value(b.String())
}

// bits applies a bitwise operation.
func bits(op string, a, b value) (value, error) {
	if len(a) != len(b) {
		return "", fmt.Errorf("%s of %d and %d bytes", op, len(a), len(b))
	}
	out := slices.Clone([]byte(a))
	for i := range out {
		switch op {
		case "&":
			out[i] &= b[i]
		case "|":
			out[i] |= b[i]
		case "^":
			out[i] ^= b[i]
		}
	}
	return value(out), nil
}
