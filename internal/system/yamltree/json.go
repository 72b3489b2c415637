package yamltree

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// jsonReader reads JSON into trees. encoding/json, which says whether a text is valid, keeps no line numbers; the YAML
// parser is ten times slower and does not accept all of JSON's escapes. Of a text that is not valid, a jsonReader reads
// what it can.
type jsonReader struct {
	text string
	pos  int
	// line is the line number after the first counted bytes of the text.
	line, counted int
}

// parseJSON parses one value; anything but white space after it is an error. With an error the tree holds what came
// before it, which is often enough to name the object.
func parseJSON(text string) (*Tree, *SyntaxError) {
	r, t := jsonReader{text: text, line: 1}, &Tree{}
	if !r.value(t, 0) {
		return t, &SyntaxError{r.line, fmt.Errorf("not valid JSON: %w", errTooDeep)}
	}
	at := r.pos
	err := validJSON(text[:at])
	if s := (*json.SyntaxError)(nil); errors.As(err, &s) {
		at = int(s.Offset)
	} else if r.peek() != 0 {
		at, err = r.pos, errMore
	}
	if err != nil {
		return t, &SyntaxError{1 + strings.Count(text[:at], "\n"), fmt.Errorf("not valid JSON: %w", err)}
	}
	return t, nil
}

func validJSON(text string) error {
	if b := []byte(text); !json.Valid(b) {
		return json.Unmarshal(b, new(json.RawMessage))
	}
	return nil
}

// peek moves to the next byte that is not white space and returns it; 0 at the end.
func (r *jsonReader) peek() byte {
	for ; r.pos < len(r.text); r.pos++ {
		if c := r.text[r.pos]; c != ' ' && c != '\n' && c != '\t' && c != '\r' {
			return c
		}
	}
	return 0
}

// lineHere returns the line of the position.
func (r *jsonReader) lineHere() int {
	r.line += strings.Count(r.text[r.counted:r.pos], "\n")
	r.counted = r.pos
	return r.line
}

// value reads the value at the position. It is not ok if the value nests too deep.
func (r *jsonReader) value(t *Tree, depth int) (ok bool) {
	if depth > maxDepth {
		return false
	}
	open := r.peek()
	t.Line = r.lineHere()
	switch open {
	case '{', '[':
		if t.Kind = List; open == '{' {
			t.Kind = Mapping
		}
		for r.pos++; ; {
			switch r.peek() {
			case 0:
				return true
			case '}', ']':
				r.pos++
				return true
			case ',', ':':
				r.pos++
			default:
				t.Parts = append(t.Parts, Tree{})
				if !r.value(&t.Parts[len(t.Parts)-1], depth+1) {
					return false
				}
			}
		}
	case '"':
		t.Text, t.Quoted = r.str(), true
	default:
		start := r.pos
		for r.pos < len(r.text) && strings.IndexByte(" \n\t\r,:]}", r.text[r.pos]) < 0 {
			r.pos++
		}
		t.Text = r.text[start:r.pos]
	}
	return true
}

// str reads the string at the position. Without escapes, the usual case, it shares the text's memory.
func (r *jsonReader) str() (s string) {
	start := r.pos
	escaped := r.skipString()
	if !escaped || json.Unmarshal([]byte(r.text[start:r.pos]), &s) != nil {
		s = r.text[start+1 : max(r.pos-1, start+1)]
	}
	return s
}

// skipString moves past the string at the position.
func (r *jsonReader) skipString() (escaped bool) {
	for r.pos++; r.pos < len(r.text); r.pos++ {
		switch r.text[r.pos] {
		case '"':
			r.pos++
			return escaped
		case '\\':
			escaped = true
			r.pos++
		}
	}
	r.pos = len(r.text)
	return escaped
}

// skip moves past the value at the position.
func (r *jsonReader) skip() {
	for depth := 0; ; {
		switch r.peek() {
		case 0:
			return
		case '{', '[':
			depth++
			r.pos++
		case '}', ']':
			depth--
			r.pos++
		case '"':
			r.skipString()
		default:
			r.pos++
		}
		if depth <= 0 {
			return
		}
	}
}
