package watch

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// jsonParser parses JSON into trees. encoding/json keeps no line numbers. The YAML parser could read JSON too, but is
// ten times slower and does not accept all of its escapes.
type jsonParser struct {
	text string
	pos  int
	// line is the line number after the first counted bytes of the text.
	line, counted int
}

// parseJSON parses one value; anything but white space after it is an error. With an error the tree holds what came
// before it, which is often enough to name the object.
func parseJSON(text string) (*tree, *syntaxError) {
	p := &jsonParser{text: text, line: 1}
	t := &tree{}
	err := p.value(t, 0)
	if err == nil {
		if p.space(); p.pos < len(text) {
			err = errors.New("more text after its end; put --- between documents")
		}
	}
	if err != nil {
		return t, &syntaxError{p.lineAt(p.pos), fmt.Errorf("not valid JSON: %w", err)}
	}
	return t, nil
}

// lineAt returns the line of a position. Positions must not decrease from call to call.
func (p *jsonParser) lineAt(pos int) int {
	p.line += strings.Count(p.text[p.counted:pos], "\n")
	p.counted = pos
	return p.line
}

func (p *jsonParser) space() {
	for p.pos < len(p.text) {
		switch p.text[p.pos] {
		case ' ', '\n', '\t', '\r':
			p.pos++
		default:
			return
		}
	}
}

// peek returns the next byte that is not white space, or 0 at the end.
func (p *jsonParser) peek() byte {
	if p.space(); p.pos < len(p.text) {
		return p.text[p.pos]
	}
	return 0
}

var errUnexpectedEnd = errors.New("unexpected end")

func (p *jsonParser) unexpected() error {
	if p.pos >= len(p.text) {
		return errUnexpectedEnd
	}
	return fmt.Errorf("unexpected %q", p.text[p.pos])
}

func (p *jsonParser) value(t *tree, depth int) error {
	if depth > maxDepth {
		return errTooDeep
	}
	c := p.peek()
	t.line = p.lineAt(p.pos)
	switch c {
	case '{':
		t.kind = mapping
		return p.sequence(t, '}', depth)
	case '[':
		t.kind = list
		return p.sequence(t, ']', depth)
	case '"':
		var err error
		t.quoted = true
		t.text, err = p.str()
		return err
	}
	start := p.pos
	for p.pos < len(p.text) && strings.IndexByte(" \n\t\r,:]}", p.text[p.pos]) < 0 {
		p.pos++
	}
	t.text = p.text[start:p.pos]
	if t.text == "" {
		return p.unexpected()
	}
	if !json.Valid([]byte(t.text)) {
		p.pos = start
		return fmt.Errorf("%s is not a value", quote(t.text))
	}
	return nil
}

// sequence reads a list's values or a mapping's keys and values, from the opening bracket to the closing one.
func (p *jsonParser) sequence(t *tree, closing byte, depth int) error {
	p.pos++
	if p.peek() == closing {
		p.pos++
		return nil
	}
	for {
		if closing == '}' {
			if p.peek() != '"' {
				return p.unexpected()
			}
			key := tree{line: p.lineAt(p.pos), quoted: true}
			var err error
			if key.text, err = p.str(); err != nil {
				return err
			}
			if p.peek() != ':' {
				return p.unexpected()
			}
			p.pos++
			t.parts = append(t.parts, key)
		}
		t.parts = append(t.parts, tree{})
		if err := p.value(&t.parts[len(t.parts)-1], depth+1); err != nil {
			return err
		}
		switch p.peek() {
		case ',':
			p.pos++
		case closing:
			p.pos++
			return nil
		default:
			return p.unexpected()
		}
	}
}

// str reads a string. Without escapes, the usual case, the string shares the text's memory.
func (p *jsonParser) str() (string, error) {
	start := p.pos
	end, escaped, err := p.skipString()
	if err != nil {
		return "", err
	}
	if !escaped {
		return p.text[start+1 : end-1], nil
	}
	var s string
	if err := json.Unmarshal([]byte(p.text[start:end]), &s); err != nil {
		return "", err
	}
	return s, nil
}

// skipString moves past the string at pos.
func (p *jsonParser) skipString() (end int, escaped bool, err error) {
	for i := p.pos + 1; i < len(p.text); i++ {
		switch c := p.text[i]; {
		case c == '"':
			p.pos = i + 1
			return p.pos, escaped, nil
		case c == '\\':
			escaped = true
			i++
		case c < ' ':
			p.pos = i
			return 0, false, errors.New("a string must end on the line it starts on")
		}
	}
	return 0, false, errors.New("a string does not end")
}

// skip moves past the value at pos, without validating its inside.
func (p *jsonParser) skip() error {
	depth := 0
	for {
		switch p.peek() {
		case 0:
			return errUnexpectedEnd
		case '{', '[':
			depth++
			p.pos++
		case '}', ']':
			depth--
			p.pos++
		case '"':
			if _, _, err := p.skipString(); err != nil {
				return err
			}
		default:
			p.pos++
		}
		if depth <= 0 {
			return nil
		}
	}
}
