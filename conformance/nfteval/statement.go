package nfteval

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// statement carries out one statement of a rule.
func (w *evaluation) statement(r *rule, node any, p *packet, depth int) ([]packetVerdict, error) {
	if s, ok := node.(string); ok {
		var err error
		if node, err = update(s); err != nil {
			return nil, err
		}
	}
	key, arg := only(node)
	m, _ := arg.(map[string]any)
	switch key {
	case "match":
		return w.match(m, p)
	case "counter", "log", "comment", "last":
		return []packetVerdict{{p, verdictContinue}}, nil
	case "vmap":
		return w.verdictMap(r, m, p, depth)
	case "mangle":
		return w.mangle(m, p)
	case "set", "map":
		return w.update(key, m, p)
	case "dnat", "snat", "redirect", "masquerade":
		return w.translate(r, key, m, p)
	case "notrack":
		if !p.tracked {
			p.untracked = true
		}
		return []packetVerdict{{p, verdictContinue}}, nil
	}
	return w.verdict(r, node, p, depth)
}

// verdict carries out a statement that ends a rule.
func (w *evaluation) verdict(r *rule, node any, p *packet, depth int) ([]packetVerdict, error) {
	key, arg := only(node)
	m, _ := arg.(map[string]any)
	switch key {
	case "accept", "return", "continue":
		p.addStep(r)
		return []packetVerdict{{p, map[string]ruleVerdict{"accept": verdictAccept, "return": verdictReturn,
			"continue": verdictBreak}[key]}}, nil
	case "drop":
		p.addStep(r)
		w.addOutcome(p, Outcome{Verdict: Dropped})
		return []packetVerdict{{p, verdictDone}}, nil
	case "reject":
		return w.reject(r, m, p)
	case "jump", "goto":
		c := w.rules.chains[chainName{r.in.family, r.in.table, fmt.Sprint(m["target"])}]
		if c == nil {
			return nil, fmt.Errorf("chain %v is not listed", m["target"])
		}
		if depth++; depth > maxDepth && key == "jump" || depth > 64 {
			return nil, fmt.Errorf("more than %d jumps", maxDepth)
		}
		p.addStep(r)
		list, err := w.chain(c, p, depth)
		for i := range list {
			if list[i].verdict == verdictReturn && key == "jump" {
				list[i].verdict = verdictBreak
			}
		}
		return list, err
	}
	return nil, fmt.Errorf("statement %s is not known", text(node))
}

func (w *evaluation) reject(r *rule, m map[string]any, p *packet) ([]packetVerdict, error) {
	kind, _ := m["type"].(string)
	code, _ := m["expr"].(string)
	switch {
	case kind == "":
		kind = map[string]string{"ip": "icmp", "ip6": "icmpv6"}[w.family]
		code = "port-unreachable"
	case kind == "tcp reset":
		if w.question.Protocol != "tcp" {
			return nil, errNoMatch
		}
		code = ""
	case code == "":
		return nil, fmt.Errorf("reject with %s: the code is missing", kind)
	}
	p.addStep(r)
	w.addOutcome(p, Outcome{Verdict: Refused, Refusal: strings.TrimSpace(kind + " " + code)})
	return []packetVerdict{{p, verdictDone}}, nil
}

// match compares.
func (w *evaluation) match(m map[string]any, p *packet) ([]packetVerdict, error) {
	left, err := w.eval(m["left"], nil, p)
	if err != nil {
		return nil, err
	}
	holds, err := w.comparison(m, p)
	if err != nil {
		return nil, err
	}
	var out []packetVerdict
	for _, d := range left {
		yes, found, err := holds(d.parts)
		if err != nil {
			return nil, err
		}
		c := p.split(d)
		if found != "" {
			c.found = append(c.found, found)
		}
		f := packetVerdict{c, verdictBreak}
		if yes {
			f.verdict = verdictContinue
		}
		out = append(out, f)
	}
	return out, nil
}

// comparison gives what says whether a match holds of its left side.
func (w *evaluation) comparison(m map[string]any, p *packet) (func([]value) (bool, string, error), error) {
	op, right := fmt.Sprint(m["op"]), m["right"]
	name, _ := right.(string)
	if key, _ := only(right); key == "set" || strings.HasPrefix(name, "@") {
		if op != "==" && op != "!=" && op != "in" {
			return nil, fmt.Errorf("operator %s with a set", op)
		}
		s, err := w.set(right, m["left"], p, nil, false)
		return func(parts []value) (bool, string, error) {
			e, err := p.find(s, parts)
			if e == nil || err != nil {
				return op == "!=" && err == nil, "", err
			}
			return op != "!=", s.show(e), nil
		}, err
	}
	types, err := typeOf(m["left"])
	if err != nil {
		return nil, err
	}
	want, err := w.operand(types, right, p)
	return func(parts []value) (bool, string, error) {
		yes, err := compare(op, parts, want)
		return yes, "", err
	}, err
}

// operand is the right side of a comparison: a constant, or an expression.
func (w *evaluation) operand(types []datatype, node any, p *packet) ([]span, error) {
	switch key, _ := only(node); key {
	case "payload", "meta", "ct", "fib", "&", "|", "^":
		d, err := w.eval(node, types, p)
		if err != nil {
			return nil, err
		}
		if len(d) != 1 || len(d[0].parts) != 1 {
			return nil, fmt.Errorf("comparison with %s", text(node))
		}
		return []span{{d[0].parts[0], d[0].parts[0]}}, nil
	}
	return constants(types, node)
}

func compare(op string, parts []value, want []span) (bool, error) {
	if len(parts) != len(want) {
		return false, fmt.Errorf("%d parts compared with %d", len(parts), len(want))
	}
	if op == "==" || op == "!=" {
		e := element{key: want}
		return e.holds(parts) == (op == "=="), nil
	}
	if len(want) != 1 || want[0].low != want[0].high {
		return false, fmt.Errorf("operator %s with a range", op)
	}
	a, b := parts[0], want[0].low
	switch op {
	case "in":
		both, err := bits("&", a, b)
		return strings.Trim(string(both), "\x00") != "", err
	case "<":
		return a < b, nil
	case ">":
		return a > b, nil
	case "<=":
		return a <= b, nil
	case ">=":
		return a >= b, nil
	}
	return false, fmt.Errorf("operator %q is not known", op)
}

func (w *evaluation) verdictMap(r *rule, m map[string]any, p *packet, depth int) ([]packetVerdict, error) {
	keys, err := w.eval(m["key"], nil, p)
	if err != nil {
		return nil, err
	}
	s, err := w.set(m["data"], m["key"], p, nil, true)
	if err != nil {
		return nil, err
	}
	if !s.verdicts && s.err == nil {
		return nil, fmt.Errorf("%s is no verdict map", text(m["data"]))
	}
	var out []packetVerdict
	for _, k := range keys {
		e, err := p.find(s, k.parts)
		if err != nil {
			return nil, err
		}
		c := p.split(k)
		if e == nil {
			out = append(out, packetVerdict{c, verdictBreak})
			continue
		}
		c.found = append(c.found, s.show(e))
		list, err := w.verdict(r, e.goTo, c, depth)
		if err != nil {
			return nil, err
		}
		out = append(out, list...)
	}
	return out, nil
}

// mangle sets a field of the packet or of its connection.
func (w *evaluation) mangle(m map[string]any, p *packet) ([]packetVerdict, error) {
	kind, arg := only(m["key"])
	fields, _ := arg.(map[string]any)
	name := field(kind, fields)
	if name == "meta nftrace" {
		return []packetVerdict{{p, verdictContinue}}, nil
	}
	types, err := typeOf(m["key"])
	if err != nil || len(types) != 1 {
		return nil, fmt.Errorf("setting %s is not known", text(m["key"]))
	}
	values, err := w.eval(m["value"], types, p)
	if err != nil {
		return nil, err
	}
	var out []packetVerdict
	for _, d := range values {
		c := p.split(d)
		if len(d.parts) != 1 {
			out = append(out, packetVerdict{c, verdictBreak})
			continue
		}
		n := uint32(d.parts[0].number())
		switch name {
		case "meta mark":
			c.mark = n
		case "meta priority":
			c.priority = n
		case "ct mark":
			if c.untracked || !c.tracked {
				return nil, errNoMatch
			}
			c.ctMark = n
		default:
			return nil, fmt.Errorf("setting %s is not known", name)
		}
		out = append(out, packetVerdict{c, verdictContinue})
	}
	return out, nil
}

// update adds an element to a set or map, or deletes it.
func (w *evaluation) update(kind string, m map[string]any, p *packet) ([]packetVerdict, error) {
	op := fmt.Sprint(m["op"])
	if op != "add" && op != "update" && op != "delete" {
		return nil, fmt.Errorf("operation %q on a set is not known", op)
	}
	s, err := w.set(m[kind], nil, p, nil, false)
	if err != nil || s.err != nil {
		return nil, firstError(err, s)
	}
	if stmts, ok := m["stmt"]; ok && text(stmts) != "counter" {
		return nil, fmt.Errorf("%s of an element is not known", text(stmts))
	}
	node := m["elem"]
	if key, arg := only(node); key == "elem" {
		e, _ := arg.(map[string]any)
		node = e["val"]
	}
	keys, err := w.eval(node, s.key, p)
	if err != nil {
		return nil, err
	}
	data := singleBranch()
	if kind == "map" {
		if data, err = w.eval(m["data"], s.data, p); err != nil {
			return nil, err
		}
	}
	if len(keys) != 1 || len(data) != 1 || len(keys[0].parts) != len(s.key) || len(data[0].parts) != len(s.data) {
		return nil, fmt.Errorf("an element whose key or data is drawn by lot, or is of another type than %s", s.name)
	}
	u := Update{s.family, s.table, s.name, joinParts(keys[0].parts, s.key, value.show), joinParts(data[0].parts, s.data,
		value.show), op == "delete"}
	p.updates = append(slices.Clip(p.updates), u)
	return []packetVerdict{{p, verdictContinue}}, nil
}

func firstError(err error, s *set) error {
	if err != nil {
		return err
	}
	return s.err
}

var updateText = regexp.MustCompile(`^(add|update|delete) (@\S+) \{ (.+?)(?: timeout [0-9a-z]+)? : (.+) \}$`)

// update reads the text of a statement: nft 1.0.6 has no JSON for the update of a map, and puts its text instead.
func update(s string) (any, error) {
	part := updateText.FindStringSubmatch(s)
	if part == nil {
		return nil, fmt.Errorf("statement %s is not known", s)
	}
	key, err := expression(part[3])
	if err != nil {
		return nil, err
	}
	data, err := expression(part[4])
	return map[string]any{"map": map[string]any{"op": part[1], "map": part[2], "elem": key, "data": data}}, err
}

// expression reads the text of a concatenation of fields.
func expression(s string) (any, error) {
	var parts []any
	for word := range strings.SplitSeq(s, " . ") {
		kind, name, _ := strings.Cut(word, " ")
		if kind == "jhash" {
			node, err := hashed(name)
			if err != nil {
				return nil, err
			}
			parts = append(parts, node)
			continue
		}
		node := map[string]any{"payload": map[string]any{"protocol": kind, "field": name}}
		switch original, isOriginal := strings.CutPrefix(name, "original "); {
		case kind == "meta":
			node = map[string]any{"meta": map[string]any{"key": name}}
		case kind == "ct" && isOriginal:
			node = map[string]any{"ct": map[string]any{"key": original, "dir": "original"}}
		}
		if _, err := typeOf(node); err != nil {
			return nil, fmt.Errorf("expression %q in a text is not known", word)
		}
		parts = append(parts, node)
	}
	if len(parts) == 1 {
		return parts[0], nil
	}
	return map[string]any{"concat": parts}, nil
}

var hashText = regexp.MustCompile(`^(.+) mod ([0-9]+) seed (0x[0-9a-f]+)$`)

// hashed reads the text of a jhash, without that word.
func hashed(s string) (any, error) {
	part := hashText.FindStringSubmatch(s)
	if part == nil {
		return nil, fmt.Errorf("jhash %q in a text is not known", s)
	}
	of, err := expression(part[1])
	if err != nil {
		return nil, err
	}
	seed, err := strconv.ParseUint(part[3], 0, 32)
	return map[string]any{"jhash": map[string]any{"mod": json.Number(part[2]),
		"seed": json.Number(strconv.FormatUint(seed, 10)),
		"expr": of}}, err
}

// translate carries out NAT.
func (w *evaluation) translate(r *rule, kind string, m map[string]any, p *packet) ([]packetVerdict, error) {
	if p.untracked || !p.tracked {
		return nil, errNoMatch
	}
	for k := range m {
		if !slices.Contains([]string{"family", "addr", "port", "flags", "type_flags"}, k) {
			return nil, fmt.Errorf("%s with %s is not known", kind, k)
		}
	}
	if kind == "masquerade" {
		c := *p
		c.addStep(r)
		c.masqueraded, c.srcDone = true, true
		c.status |= names["ct_status"]["snat"]
		return []packetVerdict{{&c, verdictAccept}}, nil
	}
	if kind == "redirect" {
		return w.redirect(r, m, p)
	}
	targets, err := w.targets(m, p)
	if err != nil {
		return nil, err
	}
	var out []packetVerdict
	for _, d := range targets {
		c := p.split(d)
		if len(d.parts) == 0 {
			out = append(out, packetVerdict{c, verdictBreak})
			continue
		}
		if err := c.rewrite(kind, d.parts); err != nil {
			return nil, err
		}
		c.addStep(r)
		out = append(out, packetVerdict{c, verdictAccept})
	}
	return out, nil
}

// targets evaluates where NAT leads to: an address, or an address and a port.
func (w *evaluation) targets(m map[string]any, p *packet) ([]branch, error) {
	t := datatype("ipv4_addr")
	if w.family == "ip6" {
		t = "ipv6_addr"
	}
	if m["addr"] == nil {
		return nil, fmt.Errorf("translation of the port alone is not known")
	}
	out, err := w.eval(m["addr"], natTypes(m["addr"], t), p)
	if err != nil || m["port"] == nil {
		return out, err
	}
	ports, err := w.eval(m["port"], []datatype{"inet_service"}, p)
	if err != nil {
		return nil, err
	}
	var both []branch
	for _, a := range out {
		for _, b := range ports {
			d := branch{nil, a.probability * b.probability, slices.Concat(a.found, b.found)}
			if len(a.parts) == 1 && len(b.parts) == 1 {
				d.parts = []value{a.parts[0], b.parts[0]}
			}
			both = append(both, d)
		}
	}
	return both, nil
}

// natTypes are those of the data of a map, or of a constant, that NAT leads to.
func natTypes(node any, t datatype) []datatype {
	key, arg := only(node)
	if key == "map" {
		m, _ := arg.(map[string]any)
		_, set := only(m["data"])
		if list, ok := set.([]any); ok && len(list) > 0 {
			if pair, ok := list[0].([]any); ok && len(pair) == 2 {
				key, _ = only(pair[1])
			}
		}
	}
	if key == "concat" {
		return []datatype{t, "inet_service"}
	}
	return []datatype{t}
}

// rewrite changes the destination or the source.
func (p *packet) rewrite(kind string, to []value) error {
	a, ok := netip.AddrFromSlice([]byte(to[0]))
	if !ok || a.Is4() != p.dst.Addr().Is4() || len(to) > 2 {
		return fmt.Errorf("%s to something that is no address of the packet's family", kind)
	}
	if kind == "snat" {
		if a != p.src.Addr() {
			p.status |= names["ct_status"]["snat"]
		}
		p.src, p.source, p.srcDone = netip.AddrPortFrom(a, p.src.Port()), a, true
		return nil
	}
	port := p.dst.Port()
	if len(to) == 2 {
		port = uint16(to[1].number())
	}
	target := netip.AddrPortFrom(a, port)
	if target != p.dst { // else conntrack has nothing to translate, and does not say that it did
		p.status |= names["ct_status"]["dnat"]
	}
	p.dst, p.translated, p.dstDone = target, true, true
	return nil
}

// redirect leads to this host. Which of its addresses that is, is known for its own packets only.
func (w *evaluation) redirect(r *rule, m map[string]any, p *packet) ([]packetVerdict, error) {
	if p.hook != "output" {
		return nil, fmt.Errorf("redirect in %s: the interface's address is not known", p.hook)
	}
	lo := map[string]any{"addr": "127.0.0.1", "port": m["port"]}
	if w.family == "ip6" {
		lo["addr"] = "::1"
	}
	return w.translate(r, "dnat", lo, p)
}
