package nfteval

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// errNoMatch says that an expression has no value for this packet, so that the rule does not match.
var errNoMatch = errors.New("no match")

// errMasqueraded says that an expression's value is not known for this packet.
var errMasqueraded = errors.New("the packet was masqueraded, and as what is not known")

// branch is a value that an expression may have, in parts if it is a concatenation, with its probability.
type branch struct {
	parts       []value
	probability float64
	found       []string
}

func singleBranch(parts ...value) []branch { return []branch{{parts: parts, probability: 1}} }

// maxBranches bounds the lots of one expression.
const maxBranches = 1 << 16

// typeOf gives the types of an expression's parts.
func typeOf(node any) ([]datatype, error) {
	key, arg := only(node)
	switch key {
	case "concat":
		list, _ := arg.([]any)
		var out []datatype
		for _, part := range list {
			t, err := typeOf(part)
			if err != nil {
				return nil, err
			}
			out = append(out, t...)
		}
		return out, nil
	case "numgen", "jhash", "symhash":
		return []datatype{"integer"}, nil
	case "&", "|", "^":
		list, _ := arg.([]any)
		for _, part := range list {
			if t, err := typeOf(part); err == nil {
				return t, nil
			}
		}
	case "payload", "meta", "ct", "fib":
		m, _ := arg.(map[string]any)
		if t, ok := fieldTypes[field(key, m)]; ok {
			return []datatype{t}, nil
		}
	}
	return nil, fmt.Errorf("what type %s has is not known", text(node))
}

// field names a field of the packet, as nft would, without the direction of ct.
func field(key string, m map[string]any) string {
	switch key {
	case "payload":
		if m["base"] != nil {
			return fmt.Sprintf("@%v,%v,%v", m["base"], m["offset"], m["len"])
		}
		return fmt.Sprintf("%v %v", m["protocol"], m["field"])
	case "fib":
		return fmt.Sprintf("fib %s %v", strings.Join(words(m["flags"]), " . "), m["result"])
	}
	return fmt.Sprintf("%s %v", key, m["key"])
}

// linkSource is the sender's address in a packet's link-layer header, as raw bits: by its name it would be asked for
// only on Ethernet, and so not where no interface is told.
const linkSource = "@ll,48,48"

// fieldTypes are the types of all fields that are known.
var fieldTypes = map[string]datatype{
	"ip saddr": "ipv4_addr", "ip daddr": "ipv4_addr", "ip protocol": "inet_proto",
	"ip6 saddr": "ipv6_addr", "ip6 daddr": "ipv6_addr", "ip6 nexthdr": "inet_proto",
	"th sport": "inet_service", "th dport": "inet_service", "tcp sport": "inet_service", "tcp dport": "inet_service",
	"udp sport": "inet_service", "udp dport": "inet_service", "sctp sport": "inet_service", "sctp dport": "inet_service",
	"tcp flags": "tcp_flag", linkSource: "ether_addr", "icmp type": "icmp_type", "icmpv6 type": "icmpv6_type",
	"meta iif": "iface_index", "meta iifname": "ifname", "meta oif": "iface_index", "meta oifname": "ifname",
	"meta l4proto": "inet_proto", "meta nfproto": "nf_proto", "meta protocol": "ether_type", "meta mark": "mark",
	"meta priority": "classid",
	"ct state":      "ct_state", "ct status": "ct_status", "ct direction": "ct_dir", "ct mark": "mark",
	"ct protocol": "inet_proto", "ct l3proto": "nf_proto",
	"ct ip saddr": "ipv4_addr", "ct ip daddr": "ipv4_addr", "ct ip6 saddr": "ipv6_addr", "ct ip6 daddr": "ipv6_addr",
	"ct proto-src": "inet_service", "ct proto-dst": "inet_service",
	"fib daddr type": "fib_addrtype", "fib saddr type": "fib_addrtype",
}

// eval gives all values that an expression may have. Want is the type of a constant that stands in its place.
func (w *evaluation) eval(node any, want []datatype, p *packet) ([]branch, error) {
	key, arg := only(node)
	m, _ := arg.(map[string]any)
	list, _ := arg.([]any)
	switch key {
	case "concat":
		return w.concat(list, want, p)
	case "payload", "meta", "ct", "fib":
		v, err := w.field(key, m, p)
		return singleBranch(v), err
	case "numgen", "jhash", "symhash":
		if key == "jhash" && m["seed"] != nil { // otherwise the kernel has thought of one
			return w.jenkins(m, p)
		}
		return lots(key, m)
	case "&", "|", "^":
		return w.bitwise(key, list, want, p)
	case "map":
		return w.mapped(m, want, p)
	}
	if want == nil {
		return nil, fmt.Errorf("expression %s is not known", text(node))
	}
	s, err := constants(want, node)
	if err != nil {
		return nil, fmt.Errorf("expression %s: %w", text(node), err)
	}
	parts := make([]value, len(s))
	for i := range s {
		if parts[i] = s[i].low; s[i].low != s[i].high {
			return nil, fmt.Errorf("expression %s is a range where one value is needed", text(node))
		}
	}
	return singleBranch(parts...), nil
}

// concat puts parts together, in all their combinations.
func (w *evaluation) concat(list []any, want []datatype, p *packet) ([]branch, error) {
	out := singleBranch()
	for i, part := range list {
		var t []datatype
		if len(want) == len(list) {
			t = want[i : i+1]
		}
		values, err := w.eval(part, t, p)
		if err != nil {
			return nil, err
		}
		var next []branch
		for _, a := range out {
			for _, b := range values {
				next = append(next, branch{slices.Concat(a.parts, b.parts), a.probability * b.probability,
					slices.Concat(a.found, b.found)})
			}
		}
		if out = next; len(out) > maxBranches {
			return nil, fmt.Errorf("more than %d lots", maxBranches)
		}
	}
	return out, nil
}

// lots gives the values that numgen and hashes draw.
func lots(kind string, m map[string]any) ([]branch, error) {
	mod, offset := integer(m["mod"], 0), integer(m["offset"], 0)
	if mod < 1 || mod > maxBranches {
		return nil, fmt.Errorf("%s mod %v is none of 1 to %d", kind, m["mod"], maxBranches)
	}
	out := make([]branch, mod)
	for i := range out {
		out[i] = branch{parts: []value{number(uint64(i+offset), "integer")}, probability: 1 / float64(mod)}
	}
	return out, nil
}

func integer(node any, otherwise int) int {
	n, ok := node.(json.Number)
	if !ok {
		return otherwise
	}
	i, err := n.Int64()
	if err != nil {
		return -1
	}
	return int(i)
}

// bitwise evaluates an operation whose operands are of one type: that of a field among them, or what is wanted.
func (w *evaluation) bitwise(op string, list []any, want []datatype, p *packet) ([]branch, error) {
	types, err := typeOf(map[string]any{op: list})
	if err != nil && want == nil {
		return nil, err
	}
	if err != nil {
		types = want
	}
	if len(types) != 1 || len(list) < 2 {
		return nil, fmt.Errorf("%s of %s", op, text(list))
	}
	out, err := w.eval(list[0], types, p)
	if err != nil {
		return nil, err
	}
	for _, node := range list[1:] {
		others, err := w.eval(node, types, p)
		if err != nil {
			return nil, err
		}
		var next []branch
		for _, a := range out {
			for _, b := range others {
				v, err := bits(op, a.parts[0], b.parts[0])
				if err != nil {
					return nil, err
				}
				next = append(next, branch{parts: []value{v}, probability: a.probability * b.probability})
			}
		}
		out = next
	}
	return out, nil
}

// mapped looks up in a map. A lot that finds nothing has nil parts.
func (w *evaluation) mapped(m map[string]any, want []datatype, p *packet) ([]branch, error) {
	keys, err := w.eval(m["key"], nil, p)
	if err != nil {
		return nil, err
	}
	s, err := w.set(m["data"], m["key"], p, want, true)
	if err != nil {
		return nil, err
	}
	if s.verdicts || !s.isMap {
		return nil, fmt.Errorf("%s is no map of values", text(m["data"]))
	}
	out := make([]branch, len(keys))
	for i, k := range keys {
		e, err := p.find(s, k.parts)
		if err != nil {
			return nil, err
		}
		out[i].probability = k.probability
		if e == nil {
			continue
		}
		out[i].found = append(slices.Clone(k.found), s.show(e))
		for _, d := range e.data {
			if d.low != d.high {
				return nil, fmt.Errorf("element %s has a range as its data", s.show(e))
			}
			out[i].parts = append(out[i].parts, d.low)
		}
	}
	return out, nil
}

// set gives the set that an expression names or holds. Of one that it holds, the key is of the type of an expression.
func (w *evaluation) set(node, of any, p *packet, data []datatype, isMap bool) (*set, error) {
	if name, ok := node.(string); ok {
		name, ok := strings.CutPrefix(name, "@")
		s := w.rules.sets[setName{p.at.family, p.at.table, name}]
		if !ok || s == nil {
			return nil, fmt.Errorf("set %v is not listed", node)
		}
		return s, nil
	}
	key, arg := only(node)
	list, _ := arg.([]any)
	if key != "set" {
		return nil, fmt.Errorf("%s is no set", text(node))
	}
	types, err := typeOf(of)
	if err != nil {
		return nil, err
	}
	s := &set{key: types, isMap: isMap, verdicts: isMap && data == nil, data: data}
	s.fill(list)
	return s, s.err
}

// find looks an element up: first among what packets did to the set, then among what is listed.
func (p *packet) find(s *set, parts []value) (*element, error) {
	if s.err != nil {
		return nil, s.err
	}
	if len(parts) != len(s.key) {
		return nil, fmt.Errorf("a key of %d parts for set %s, which has %d", len(parts), s.name, len(s.key))
	}
	if s.name != "" {
		key := joinParts(parts, s.key, value.show)
		for _, u := range slices.Backward(p.updates) {
			if u.Family != s.family || u.Table != s.table || u.Set != s.name || u.Key != key {
				continue
			}
			if u.Delete {
				return nil, nil
			}
			return s.updated(u)
		}
	}
	return s.find(parts)
}

// updated reads what an Update says.
func (s *set) updated(u Update) (*element, error) {
	key, err := constants(s.key, dotted(u.Key))
	if err != nil {
		return nil, fmt.Errorf("state: key %q of set %s: %w", u.Key, u.Set, err)
	}
	e := &element{key: key}
	if s.isMap {
		if e.data, err = constants(s.data, dotted(u.Data)); err != nil {
			return nil, fmt.Errorf("state: data %q of map %s: %w", u.Data, u.Set, err)
		}
	}
	return e, nil
}

func dotted(s string) any {
	var list []any
	for part := range strings.SplitSeq(s, " . ") {
		list = append(list, part)
	}
	return map[string]any{"concat": list}
}
