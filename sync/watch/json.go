package watch

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// jsonReader reads JSON into trees. encoding/json, which says whether a text is valid, keeps no line numbers and takes
// ten times as long for its tokens; the YAML parser takes as long and does not accept all of JSON's escapes. Of a text
// that is not valid, a jsonReader reads something.
type jsonReader struct {
	text string
	pos  int
	// line is the line number after the first counted bytes of the text.
	line, counted int
}

// parseJSON parses one value; anything but white space after it is an error. With an error the tree holds what came
// before it, which is often enough to name the object.
func parseJSON(text string) (*tree, *syntaxError) {
	r, t := jsonReader{text: text, line: 1}, &tree{}
	if !r.value(t, 0) {
		return t, &syntaxError{r.line, fmt.Errorf("not valid JSON: %w", errTooDeep)}
	}
	at := r.pos
	err := validJSON(text[:at])
	if s := (*json.SyntaxError)(nil); errors.As(err, &s) {
		at = int(s.Offset)
	} else if r.peek() != 0 {
		at, err = r.pos, errors.New("more text after its end; put --- between documents")
	}
	if err != nil {
		return t, &syntaxError{1 + strings.Count(text[:at], "\n"), fmt.Errorf("not valid JSON: %w", err)}
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
func (r *jsonReader) value(t *tree, depth int) (ok bool) {
	if depth > maxDepth {
		return false
	}
	open := r.peek()
	t.line = r.lineHere()
	switch open {
	case '{', '[':
		if t.kind = list; open == '{' {
			t.kind = mapping
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
				t.parts = append(t.parts, tree{})
				if !r.value(&t.parts[len(t.parts)-1], depth+1) {
					return false
				}
			}
		}
	case '"':
		t.text, t.quoted = r.str(), true
	default:
		start := r.pos
		for r.pos < len(r.text) && strings.IndexByte(" \n\t\r,:]}", r.text[r.pos]) < 0 {
			r.pos++
		}
		t.text = r.text[start:r.pos]
	}
	return true
}

// str reads the string at the position. Without escapes, the usual case, it shares the text's memory.
func (r *jsonReader) str() (s string) {
	start := r.pos
	escaped := r.skipString()
	if quoted := r.text[start:r.pos]; !escaped || json.Unmarshal([]byte(quoted), &s) != nil {
		s = strings.Trim(quoted, `"`)
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
