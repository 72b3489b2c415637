package nfteval

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// ruleText writes a rule as nft would. Where a construct is not known, it writes the JSON.
func ruleText(statements []any) string {
	parts := make([]string, len(statements))
	for i, s := range statements {
		parts[i] = text(s)
	}
	return strings.Join(parts, " ")
}

// text writes a statement or an expression as nft would.
func text(node any) string {
	switch n := node.(type) {
	case nil:
		return ""
	case string:
		return n
	case json.Number:
		return n.String()
	case []any:
		return list(n, ", ")
	}
	key, arg := only(node)
	m, _ := arg.(map[string]any)
	parts, _ := arg.([]any)
	switch key {
	case "match", "mangle", "vmap", "map", "set":
		if out := compound(key, m); out != "" {
			return out
		}
		if key == "set" {
			return "{ " + elements(parts) + " }"
		}
	case "concat":
		return list(parts, " . ")
	case "&", "|", "^", "<<", ">>":
		return list(parts, " "+key+" ")
	case "payload", "fib":
		return field(key, m)
	case "meta":
		name := field(key, m)
		if t := fieldTypes[name]; t == "ifname" || t == "iface_index" {
			return strings.TrimPrefix(name, "meta ")
		}
		return name
	case "counter", "accept", "drop", "return", "continue", "notrack":
		return key
	}
	return other(key, node, arg)
}

func other(key string, node, arg any) string {
	m, _ := arg.(map[string]any)
	parts, _ := arg.([]any)
	switch key {
	case "ct":
		if dir, ok := m["dir"]; ok {
			return fmt.Sprintf("ct %v %v", dir, m["key"])
		}
		return field(key, m)
	case "prefix":
		return fmt.Sprintf("%v/%v", m["addr"], m["len"])
	case "range":
		return list(parts, "-")
	case "elem":
		return text(m["val"])
	case "numgen":
		return fmt.Sprintf("numgen %v mod %v", m["mode"], m["mod"])
	case "jump", "goto":
		return fmt.Sprintf("%s %v", key, m["target"])
	case "dnat", "snat", "masquerade", "redirect":
		return translation(key, m)
	case "reject":
		if m["expr"] != nil {
			return fmt.Sprintf("reject with %v %v", m["type"], m["expr"])
		}
		if m["type"] != nil {
			return fmt.Sprintf("reject with %v", m["type"])
		}
		return "reject"
	}
	raw, err := json.Marshal(node)
	if err != nil {
		return fmt.Sprint(node)
	}
	return string(raw)
}

func compound(key string, m map[string]any) string {
	switch {
	case m == nil:
		return ""
	case key == "match":
		op := fmt.Sprint(m["op"]) + " "
		if op == "== " || op == "in " {
			op = ""
		}
		return fmt.Sprintf("%s %s%s", text(m["left"]), op, text(m["right"]))
	case key == "mangle":
		return fmt.Sprintf("%s set %s", text(m["key"]), text(m["value"]))
	case key == "vmap", key == "map" && m["key"] != nil:
		return fmt.Sprintf("%s %s %s", text(m["key"]), key, text(m["data"]))
	}
	name, data := m["set"], ""
	if key == "map" {
		name, data = m["map"], " : "+text(m["data"])
	}
	return fmt.Sprintf("%v %v { %s%s }", m["op"], name, text(m["elem"]), data)
}

func translation(key string, m map[string]any) string {
	out := key
	if m["family"] != nil {
		out += fmt.Sprintf(" %v", m["family"])
	}
	if m["addr"] != nil {
		out += " to " + text(m["addr"])
	}
	if m["port"] != nil {
		out += ":" + text(m["port"])
	}
	for _, f := range words(m["flags"]) {
		out += " " + f
	}
	return out
}

func list(nodes []any, between string) string {
	parts := make([]string, len(nodes))
	for i, n := range nodes {
		parts[i] = text(n)
	}
	return strings.Join(parts, between)
}

// elements writes those of an anonymous set or map.
func elements(nodes []any) string {
	nodes = slices.Clone(nodes)
	for i, n := range nodes {
		if pair, ok := n.([]any); ok && len(pair) == 2 {
			nodes[i] = text(pair[0]) + " : " + text(pair[1])
		}
	}
	return list(nodes, ", ")
}
