package nfteval

import (
	"fmt"
	"strings"
)

// set is a set or a map. What of it cannot be read is an error when a packet looks into it.
type set struct {
	family, table, name string
	key, data           []datatype
	isMap, verdicts     bool
	elements            []element
	// exact are the elements without ranges, by their keys.
	exact    map[value]int
	catchall *element
	err      error
}

// element is one of a set. Data is that of a map; goTo the statement, if it is a verdict map.
type element struct {
	key  []span
	data []span
	goTo any
}

// find gives the element for a key.
func (s *set) find(parts []value) (*element, error) {
	if s.err != nil {
		return nil, s.err
	}
	if i, ok := s.exact[join(parts)]; ok {
		return &s.elements[i], nil
	}
	for i := range s.elements {
		if e := &s.elements[i]; e.ranged() && e.holds(parts) {
			return e, nil
		}
	}
	return s.catchall, nil
}

func (e *element) ranged() bool {
	for _, k := range e.key {
		if k.low != k.high {
			return true
		}
	}
	return false
}

func (e *element) holds(parts []value) bool {
	for i, k := range e.key {
		if !k.holds(parts[i]) {
			return false
		}
	}
	return len(parts) == len(e.key)
}

// show writes an element as nft does.
func (s *set) show(e *element) string {
	out := "*"
	if len(e.key) > 0 {
		out = joinParts(e.key, s.key, span.show)
	}
	switch {
	case s.verdicts:
		out += " : " + text(e.goTo)
	case s.isMap:
		out += " : " + joinParts(e.data, s.data, span.show)
	}
	return out
}

// fill reads elements.
func (s *set) fill(list []any) {
	s.exact = make(map[value]int, len(list))
	for _, node := range list {
		e, err := s.element(node)
		if err != nil {
			s.err = fmt.Errorf("set %s: element %s: %w", s.name, text(node), err)
			return
		}
		if e.key == nil {
			s.catchall = &e
			continue
		}
		if !e.ranged() {
			low := make([]value, len(e.key))
			for i, k := range e.key {
				low[i] = k.low
			}
			s.exact[join(low)] = len(s.elements)
		}
		s.elements = append(s.elements, e)
	}
}

func (s *set) element(node any) (e element, err error) {
	if s.isMap {
		pair, ok := node.([]any)
		if !ok || len(pair) != 2 {
			return e, fmt.Errorf("a map's element has a key and data")
		}
		node = pair[0]
		if s.verdicts {
			e.goTo = pair[1]
		} else if e.data, err = constants(s.data, pair[1]); err != nil {
			return e, err
		}
	}
	if key, arg := only(node); key == "elem" {
		m, ok := arg.(map[string]any)
		if !ok {
			return e, fmt.Errorf("no value")
		}
		for k := range m {
			switch k {
			case "val", "comment", "timeout", "expires", "counter":
			default:
				return e, fmt.Errorf("%s of elements is not known", k)
			}
		}
		node = m["val"]
	}
	if node == "*" {
		return e, nil
	}
	e.key, err = constants(s.key, node)
	return e, err
}

// constants reads a constant, or a concatenation of several.
func constants(types []datatype, node any) ([]span, error) {
	parts := []any{node}
	if key, arg := only(node); key == "concat" {
		parts, _ = arg.([]any)
	}
	if len(parts) != len(types) {
		return nil, fmt.Errorf("%d parts, and %d types", len(parts), len(types))
	}
	out := make([]span, len(parts))
	for i, p := range parts {
		var err error
		if out[i], err = constant(types[i], p); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// typesOf reads the type of a set: a name, several names as a list or with dots between them, or an expression that has
// it.
func typesOf(node any) ([]datatype, error) {
	var list []datatype
	switch n := node.(type) {
	case string:
		for name := range strings.SplitSeq(n, " . ") {
			list = append(list, datatype(name))
		}
	case []any:
		for _, part := range n {
			name, ok := part.(string)
			if !ok {
				return nil, fmt.Errorf("type %s is not known", text(part))
			}
			list = append(list, datatype(name))
		}
	default:
		key, arg := only(node)
		if key != "typeof" {
			return nil, fmt.Errorf("type %s is not known", text(node))
		}
		return typeOf(arg)
	}
	for _, t := range list {
		if _, ok := sizes[t]; !ok {
			return nil, fmt.Errorf("type %q is not known", t)
		}
	}
	return list, nil
}
