package yamltree

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/verdict-proxy/verdict/internal/system/clip"
)

// SyntaxError says that a text is not valid YAML or JSON.
type SyntaxError struct {
	Line int // in the text that was parsed, from 1
	Err  error
}

// maxReason is how much of the parser's error an error repeats.
const maxReason = 200

// parseYAML parses one document: see Chunk.Parse.
func parseYAML(text string, search bool) (*Tree, *SyntaxError) {
	n, err := yamlNode(text)
	if err == nil {
		return buildYAML(n, len(text))
	}
	reason := clip.Visible(yamlPlace.ReplaceAllString(err.Error(), ""), maxReason)
	problem := &SyntaxError{1, fmt.Errorf("not valid YAML: %s", reason)}
	if !search || len(text) > MaxErrorText {
		return nil, problem
	}
	lines := strings.SplitAfter(text, "\n")
	good := goodLines(lines)
	problem.Line = min(good+1, len(lines))
	if n, err = yamlNode(strings.Join(lines[:good], "")); err != nil {
		return nil, problem
	}
	t, _ := buildYAML(n, len(text))
	return t, problem
}

func buildYAML(n *yaml.Node, size int) (*Tree, *SyntaxError) {
	if n.Kind == yaml.DocumentNode && len(n.Content) == 1 {
		n = n.Content[0]
	}
	// Aliases may refer to each other and grow exponentially. Ten times the size of the text is more than anybody writes
	// by hand.
	b := &yamlBuilder{budget: 10*size + 1000}
	t := &Tree{}
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
	d := yaml.NewDecoder(strings.NewReader(text))
	n = &yaml.Node{}
	if err := d.Decode(n); err != nil && err != io.EOF {
		return nil, err
	}
	if d.Decode(&yaml.Node{}) != io.EOF {
		return nil, errMore
	}
	return n, nil
}

var errMore = errors.New("more text after its end; put --- between documents")

var yamlPlace = regexp.MustCompile(`^yaml: (line \d+: )?`)

// MaxErrorText is the largest text whose error is searched for. maxOpen is how many lines a quoted text or a bracket
// may span for the search to see beyond it.
const (
	MaxErrorText = 64 << 10
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

func (b *yamlBuilder) build(n *yaml.Node, t *Tree, depth int) *SyntaxError {
	if b.budget--; b.budget < 0 {
		return &SyntaxError{n.Line, errors.New("aliases make this too large")}
	}
	if depth > maxDepth {
		return &SyntaxError{n.Line, errTooDeep}
	}
	t.Line = n.Line
	switch n.Kind {
	case yaml.AliasNode:
		line := t.Line
		err := b.build(n.Alias, t, depth+1)
		t.Line = line
		return err
	case yaml.ScalarNode:
		t.Text = n.Value
		const quotes = yaml.SingleQuotedStyle | yaml.DoubleQuotedStyle | yaml.LiteralStyle | yaml.FoldedStyle
		t.Quoted = n.Style&quotes != 0 || n.Tag == "!!str" && n.Style&yaml.TaggedStyle != 0
	case yaml.SequenceNode:
		t.Kind = List
		t.Parts = make([]Tree, len(n.Content))
		for i, c := range n.Content {
			if err := b.build(c, &t.Parts[i], depth+1); err != nil {
				return err
			}
		}
	case yaml.MappingNode:
		return b.mapping(n, t, depth)
	}
	return nil
}

// mapping puts merged keys ("<<") before the mapping's own, so that the last one of each counts.
func (b *yamlBuilder) mapping(n *yaml.Node, t *Tree, depth int) *SyntaxError {
	t.Kind = Mapping
	own := make([]Tree, 0, len(n.Content))
	for i := 0; i+1 < len(n.Content); i += 2 {
		var k, v Tree
		if err := b.build(n.Content[i], &k, depth+1); err != nil {
			return err
		}
		if err := b.build(n.Content[i+1], &v, depth+1); err != nil {
			return err
		}
		switch {
		case k.Kind != Scalar:
			return &SyntaxError{k.Line, fmt.Errorf("%s can't be a key", k.Kind)}
		case k.Text == "<<" && !k.Quoted:
			t.Parts = append(t.Parts, merged(&v)...)
		default:
			own = append(own, k, v)
		}
	}
	if t.Parts == nil {
		t.Parts = own
		return nil
	}
	// A merged key that is overridden is no duplicate; the mapping's own duplicates are kept, so that the decoder reports
	// them.
	known := make(map[string]bool, len(own)/2)
	for i := 0; i < len(own); i += 2 {
		known[own[i].Text] = true
	}
	kept := make([]Tree, 0, len(t.Parts))
	for i := len(t.Parts) - 2; i >= 0; i -= 2 {
		if !known[t.Parts[i].Text] {
			known[t.Parts[i].Text] = true
			kept = append(kept, t.Parts[i], t.Parts[i+1])
		}
	}
	t.Parts = append(kept, own...)
	return nil
}

// merged returns the keys and values of a mapping, or of a list of mappings of which the first ones take precedence.
func merged(v *Tree) []Tree {
	if v.Kind == Mapping {
		return v.Parts
	}
	var parts []Tree
	for i := len(v.Parts) - 1; v.Kind == List && i >= 0; i-- {
		if v.Parts[i].Kind == Mapping {
			parts = append(parts, v.Parts[i].Parts...)
		}
	}
	return parts
}

var errTooDeep = fmt.Errorf("values nest deeper than %d levels", maxDepth)
