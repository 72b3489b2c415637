// Package yamltree reads YAML and JSON into trees that know their lines: of documents of any size, and of lists item by
// item.
package yamltree

import (
	"regexp"
	"strconv"
	"strings"
)

// Tree is a YAML or JSON value with line numbers. Aliases and merge keys are resolved. The zero Tree is null.
type Tree struct {
	Kind Kind
	// Quoted scalars are text, whatever they look like.
	Quoted bool
	// Line counts from 1 in the text that was parsed.
	Line int
	// Text is the text of a scalar.
	Text string
	// Parts are a list's values, or a mapping's keys and values alternating. A mapping may have a key twice; then the last
	// one counts.
	Parts []Tree
}

// Kind is what a Tree is.
type Kind uint8

// The kinds.
const (
	Scalar Kind = iota
	List
	Mapping
)

var kindWords = [...]string{"a single value", "a list", "a mapping"}

// String returns words for a message.
func (k Kind) String() string { return kindWords[k] }

// maxDepth is how deep values may nest. The objects we know need about ten levels.
const maxDepth = 100

// Get returns the value of a mapping's key, or nil.
func (t *Tree) Get(key string) *Tree {
	if t.Kind != Mapping {
		return nil
	}
	v, _ := t.child(key, 0)
	return v
}

// Str returns the text of a key's scalar, or "".
func (t *Tree) Str(key string) string {
	if v := t.Get(key); v != nil && v.Kind == Scalar && !v.Null() {
		return v.Text
	}
	return ""
}

// Null reports whether there is no value.
func (t *Tree) Null() bool {
	if t.Kind != Scalar || t.Quoted {
		return false
	}
	switch t.Text {
	case "", "~", "null", "Null", "NULL":
		return true
	}
	return false
}

// Path names a place in a Tree, step by step; the steps into a list, or to a key of a free choice, are in brackets.
type Path []string

// PathOf splits what Path.String returns, such as "spec.ports[0].name".
func PathOf(field string) Path { return step.FindAllString(field, -1) }

var step = regexp.MustCompile(`\[[^]]*]|[^.[]+`)

// Key returns the path to a key.
func (p Path) Key(k string) Path { return append(p[:len(p):len(p)], k) }

// Index returns the path to an element of a list.
func (p Path) Index(i int) Path { return p.Key("[" + strconv.Itoa(i) + "]") }

func (p Path) String() string {
	var b strings.Builder
	for i, step := range p {
		if i > 0 && !strings.HasPrefix(step, "[") {
			b.WriteByte('.')
		}
		b.WriteString(step)
	}
	return b.String()
}

// LineOf returns the line of a place, or that of its nearest parent.
func (t *Tree) LineOf(p Path) int {
	line := t.Line
	for _, s := range p {
		if t, line = t.child(strings.Trim(s, "[]"), line); t == nil {
			break
		}
	}
	return line
}

// child returns a list's element or a mapping's value, and the line to report for it.
func (t *Tree) child(key string, line int) (*Tree, int) {
	switch t.Kind {
	case List:
		if i, err := strconv.Atoi(key); err == nil && i >= 0 && i < len(t.Parts) {
			return &t.Parts[i], t.Parts[i].Line
		}
	case Mapping:
		for i := len(t.Parts)&^1 - 2; i >= 0; i -= 2 { // after an error there may be a key without a value
			if t.Parts[i].Text == key {
				return &t.Parts[i+1], t.Parts[i].Line
			}
		}
	}
	return nil, line
}
