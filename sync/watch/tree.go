package watch

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/verdict-proxy/verdict/internal/system/clip"
)

// tree is a parsed YAML or JSON value with line numbers. Aliases and merge keys are resolved.
type tree struct {
	kind treeKind
	// quoted scalars are text, whatever they look like.
	quoted bool
	// line counts from 1 in the text that was parsed.
	line int
	// text is the text of a scalar.
	text string
	// parts are a list's values, or a mapping's keys and values alternating.
	parts []tree
}

type treeKind uint8

const (
	scalar treeKind = iota
	list
	mapping
)

var kindWords = [...]string{"a single value", "a list", "a mapping"}

// maxDepth is how deep values may nest. The objects we know need about ten levels.
const maxDepth = 100

// get returns the value of a key, the last one if there are several, or nil.
func (t *tree) get(key string) *tree {
	if t.kind != mapping {
		return nil
	}
	for i := len(t.parts)&^1 - 2; i >= 0; i -= 2 {
		if t.parts[i].text == key {
			return &t.parts[i+1]
		}
	}
	return nil
}

// str returns the text of a key's scalar, or "".
func (t *tree) str(key string) string {
	if v := t.get(key); v != nil && v.kind == scalar && !v.null() {
		return v.text
	}
	return ""
}

func (t *tree) null() bool {
	if t.kind != scalar || t.quoted {
		return false
	}
	switch t.text {
	case "", "~", "null", "Null", "NULL":
		return true
	}
	return false
}

// lineOf returns the line of a field, written as in Problem.Field, or that of its nearest parent.
func (t *tree) lineOf(field string) int {
	at := t
	line := t.line
	for field != "" && at != nil {
		var key string
		switch {
		case field[0] == '.':
			field = field[1:]
			continue
		case field[0] == '[':
			end := strings.IndexByte(field, ']')
			if end < 0 {
				return line
			}
			key, field = field[1:end], field[end+1:]
		default:
			end := strings.IndexAny(field, ".[")
			if end < 0 {
				end = len(field)
			}
			key, field = field[:end], field[end:]
		}
		at, line = at.child(key, line)
	}
	return line
}

// child returns a list's element or a mapping's value, and the line to report for it.
func (t *tree) child(key string, line int) (*tree, int) {
	if t.kind == list {
		var i int
		if _, err := fmt.Sscanf(key, "%d", &i); err != nil || i < 0 || i >= len(t.parts) {
			return nil, line
		}
		return &t.parts[i], t.parts[i].line
	}
	if t.kind == mapping {
		for i := len(t.parts) - 2; i >= 0; i -= 2 {
			if t.parts[i].text == key {
				return &t.parts[i+1], t.parts[i].line
			}
		}
	}
	return nil, line
}

// syntaxError says that a text is not valid YAML or JSON.
type syntaxError struct {
	line int // in the text that was parsed, from 1
	err  error
}

// parseYAML parses one document. With search it finds the line of an error, which takes a dozen times as long, and
// returns the tree of what comes before it. Without, it reports the first line and no tree.
func parseYAML(text string, search bool) (*tree, *syntaxError) {
	n, err := yamlNode(text)
	if err == nil {
		return buildYAML(n, len(text))
	}
	reason := clip.Visible(yamlPlace.ReplaceAllString(err.Error(), ""), maxReason)
	problem := &syntaxError{1, fmt.Errorf("not valid YAML: %s", reason)}
	if !search || len(text) > maxErrorText {
		return nil, problem
	}
	lines := strings.SplitAfter(text, "\n")
	good := goodLines(lines)
	problem.line = min(good+1, len(lines))
	if n, err = yamlNode(strings.Join(lines[:good], "")); err != nil {
		return nil, problem
	}
	t, _ := buildYAML(n, len(text))
	return t, problem
}

func buildYAML(n *yaml.Node, size int) (*tree, *syntaxError) {
	if n.Kind == yaml.DocumentNode && len(n.Content) == 1 {
		n = n.Content[0]
	}
	// Aliases may refer to each other and grow exponentially. Ten times the size of the text is more than anybody writes
	// by hand.
	b := &yamlBuilder{budget: 10*size + 1000}
	t := &tree{}
	if err := b.build(n, t, 0); err != nil {
		return nil, err
	}
	return t, nil
}

// yamlNode calls the YAML parser. It has had crashes (CVE-2022-28948); one bad file must not end the data plane.
func yamlNode(text string) (n *yaml.Node, err error) {
	defer func() {
		if r := recover(); r != nil {
			n, err = nil, fmt.Errorf("the parser crashed: %v", r)
		}
	}()
	n = &yaml.Node{}
	return n, yaml.Unmarshal([]byte(text), n)
}

var yamlPlace = regexp.MustCompile(`^yaml: (line \d+: )?`)

// maxErrorText is the largest text whose error is searched for. maxOpen is how many lines a quoted text or a bracket
// may span for the search to see beyond it.
const (
	maxErrorText = 64 << 10
	maxOpen      = 30
)

// goodLines returns the length of the longest valid beginning: the error is on the line after it. The parser itself
// names the line where the block around the error starts, or the one before that.
func goodLines(lines []string) int {
	lo, hi := 0, len(lines) // the first lo lines are good
search:
	for lo < hi {
		mid := (lo + hi + 1) / 2
		for n := mid; n <= min(hi, mid+maxOpen); n++ {
			_, err := yamlNode(strings.Join(lines[:n], ""))
			if err == nil {
				lo = n
				continue search
			}
			if !yamlOpen.MatchString(err.Error()) {
				break
			}
		}
		hi = mid - 1
	}
	return lo
}

// yamlOpen matches the errors of a text that would be valid if it went on.
var yamlOpen = regexp.MustCompile(`unexpected end of stream|expected ',' or|expected node content`)

// yamlBuilder converts nodes of the YAML library to trees.
type yamlBuilder struct {
	budget int
}

func (b *yamlBuilder) build(n *yaml.Node, t *tree, depth int) *syntaxError {
	if b.budget--; b.budget < 0 {
		return &syntaxError{n.Line, errors.New("aliases make this too large")}
	}
	if depth > maxDepth {
		return &syntaxError{n.Line, errTooDeep}
	}
	t.line = n.Line
	switch n.Kind {
	case yaml.AliasNode:
		line := t.line
		err := b.build(n.Alias, t, depth+1)
		t.line = line
		return err
	case yaml.ScalarNode:
		t.text = n.Value
		const quotes = yaml.SingleQuotedStyle | yaml.DoubleQuotedStyle | yaml.LiteralStyle | yaml.FoldedStyle
		t.quoted = n.Style&quotes != 0 || n.Tag == "!!str" && n.Style&yaml.TaggedStyle != 0
	case yaml.SequenceNode:
		t.kind = list
		t.parts = make([]tree, len(n.Content))
		for i, c := range n.Content {
			if err := b.build(c, &t.parts[i], depth+1); err != nil {
				return err
			}
		}
	case yaml.MappingNode:
		return b.mapping(n, t, depth)
	}
	return nil
}

// mapping puts merged keys ("<<") before the mapping's own, so that the last one of each counts.
func (b *yamlBuilder) mapping(n *yaml.Node, t *tree, depth int) *syntaxError {
	t.kind = mapping
	own := make([]tree, 0, len(n.Content))
	for i := 0; i+1 < len(n.Content); i += 2 {
		var k, v tree
		if err := b.build(n.Content[i], &k, depth+1); err != nil {
			return err
		}
		if err := b.build(n.Content[i+1], &v, depth+1); err != nil {
			return err
		}
		switch {
		case k.kind != scalar:
			return &syntaxError{k.line, fmt.Errorf("%s can't be a key", kindWords[k.kind])}
		case k.text == "<<" && !k.quoted:
			t.parts = append(t.parts, merged(&v)...)
		default:
			own = append(own, k, v)
		}
	}
	if t.parts == nil {
		t.parts = own
		return nil
	}
	// A merged key that is overridden is no duplicate; the mapping's own duplicates are kept, so that the decoder reports
	// them.
	known := make(map[string]bool, len(own)/2)
	for i := 0; i < len(own); i += 2 {
		known[own[i].text] = true
	}
	kept := make([]tree, 0, len(t.parts))
	for i := len(t.parts) - 2; i >= 0; i -= 2 {
		if !known[t.parts[i].text] {
			known[t.parts[i].text] = true
			kept = append(kept, t.parts[i], t.parts[i+1])
		}
	}
	t.parts = append(kept, own...)
	return nil
}

// merged returns the keys and values of a mapping, or of a list of mappings of which the first ones take precedence.
func merged(v *tree) []tree {
	if v.kind == mapping {
		return v.parts
	}
	var parts []tree
	for i := len(v.parts) - 1; v.kind == list && i >= 0; i-- {
		if v.parts[i].kind == mapping {
			parts = append(parts, v.parts[i].parts...)
		}
	}
	return parts
}

var errTooDeep = fmt.Errorf("values nest deeper than %d levels", maxDepth)
