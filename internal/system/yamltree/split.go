package yamltree

import (
	"errors"
	"strings"
)

// Chunk is a part of a text that can be parsed by itself: a document, or one item of a list. Large dumps are one list.
// Splitting them before parsing keeps one item's tree in memory instead of all.
type Chunk struct {
	Text string
	// Line is the chunk's first line in the text that it came from, from 1.
	Line int
	JSON bool
	// Item says that Text is a YAML list of one element.
	Item bool
	// Kind and APIVersion apply to items that have none of their own, as in a ServiceList.
	Kind, APIVersion string
	// Whole is the document the item came from; nil for a document.
	Whole *Chunk
}

// Documents splits a text at its document markers ("---", "..."). Text on a marker's own line belongs to the document
// after it. Documents without content are left out.
func Documents(text string) []Chunk {
	text = strings.TrimPrefix(text, "\uFEFF") // a byte order mark
	var docs []Chunk
	start, startLine := 0, 1
	add := func(end int) {
		if body := text[start:end]; !blank(body) {
			json := strings.HasPrefix(strings.TrimLeft(body, " \t\r\n"), "{")
			docs = append(docs, Chunk{Text: body, Line: startLine, JSON: json})
		}
	}
	for at, line := 0, 1; at < len(text); line++ {
		end := strings.IndexByte(text[at:], '\n') + 1
		if isMarker(text[at:]) {
			add(at)
			start, startLine = at+3, line
			if end > 0 && blank(text[start:at+end]) {
				start, startLine = at+end, line+1
			}
		}
		if end == 0 {
			break
		}
		at += end
	}
	add(len(text))
	return docs
}

func isMarker(line string) bool {
	return (strings.HasPrefix(line, "---") || strings.HasPrefix(line, "...")) &&
		(len(line) == 3 || strings.IndexByte(" \t\r\n", line[3]) >= 0)
}

// blank says whether a text has only white space, comments and YAML directives.
func blank(text string) bool {
	for text != "" {
		line, rest, _ := strings.Cut(text, "\n")
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' && line[0] != '%' {
			return false
		}
		text = rest
	}
	return true
}

// Items splits a list as kubectl prints it. It returns nil if the document is anything else; then the document must be
// parsed as a whole.
//
// In YAML it only uses the indentation. That is wrong for a quoted text that spans lines and has a dash at the very
// column of the items, and for an anchor in another item. In both cases one of the parts is not valid YAML.
func (doc *Chunk) Items() []Chunk {
	var head *Tree
	var parts []Chunk
	if doc.JSON {
		head, parts = jsonItems(doc.Text)
	} else {
		head, parts = yamlItems(doc.Text)
	}
	if head == nil || !strings.HasSuffix(head.Str("kind"), "List") {
		return nil
	}
	kind, apiVersion := head.Str("kind"), head.Str("apiVersion")
	for i := range parts {
		p := &parts[i]
		p.Whole, p.JSON, p.Item, p.Line = doc, doc.JSON, !doc.JSON, p.Line+doc.Line
		if kind != "List" {
			p.Kind, p.APIVersion = strings.TrimSuffix(kind, "List"), apiVersion
		}
	}
	return parts
}

// Parse parses the chunk. With search it finds the line of an error in YAML, which takes a dozen times as long.
// Otherwise that is the first line. With an error the tree holds what came before it; it is nil if that is not known.
func (c *Chunk) Parse(search bool) (*Tree, *SyntaxError) {
	parse := func(text string) (*Tree, *SyntaxError) { return parseYAML(text, search) }
	if c.JSON {
		parse = parseJSON
	}
	t, err := parse(c.Text)
	if err != nil && c.JSON && len(c.Text) <= MaxErrorText { // it may be YAML in braces
		if t, err := parseYAML(c.Text, false); err == nil {
			return t, nil
		}
	}
	if err != nil || !c.Item {
		return t, err
	}
	if t.Kind != List || len(t.Parts) != 1 {
		return t, &SyntaxError{1, errors.New("this is not one item of a list")}
	}
	return &t.Parts[0], nil
}

// yamlItems returns the list without its items, and the items with the lines before them. Both are nil if it cannot
// split the text.
func yamlItems(text string) (*Tree, []Chunk) {
	const key = "items:"
	at := 0
	if !strings.HasPrefix(text, key) {
		if at = strings.Index(text, "\n"+key) + 1; at == 0 {
			return nil, nil
		}
	}
	line := strings.Count(text[:at], "\n")
	body := text[at+len(key):]
	if first, rest, _ := strings.Cut(body, "\n"); blank(first) {
		body, line = rest, line+1
	} else {
		return nil, nil
	}
	indent := len(body) - len(strings.TrimLeft(body, " "))
	if !isItem(body[indent:]) {
		return nil, nil
	}
	var parts []Chunk
	for body != "" {
		n, lines := itemLength(body, indent)
		parts = append(parts, Chunk{Text: body[:n], Line: line})
		body, line = body[n:], line+lines
		if len(body) < indent || strings.Trim(body[:indent], " ") != "" || !isItem(body[indent:]) {
			break
		}
	}
	if strings.HasPrefix(body, key) || strings.Contains(body, "\n"+key) {
		return nil, nil
	}
	head, err := parseYAML(text[:at]+body, false)
	if err != nil {
		return nil, nil
	}
	return head, parts
}

func isItem(line string) bool {
	return line != "" && line[0] == '-' && (len(line) == 1 || strings.IndexByte(" \r\n", line[1]) >= 0)
}

// itemLength returns the bytes and lines of the item that body starts with: up to the next line that is indented no
// deeper than the item's dash and is neither empty nor a comment.
func itemLength(body string, indent int) (n, lines int) {
	for n < len(body) {
		end := strings.IndexByte(body[n:], '\n') + 1
		if end == 0 {
			end = len(body) - n
		}
		line := body[n : n+end]
		text := strings.TrimLeft(line, " ")
		if n > 0 && len(line)-len(text) <= indent && text != "" && strings.IndexByte("#\r\n", text[0]) < 0 {
			break
		}
		n, lines = n+end, lines+1
	}
	return n, lines
}

// jsonItems is yamlItems for JSON.
func jsonItems(text string) (*Tree, []Chunk) {
	r := &jsonReader{text: text, line: 1}
	if r.peek() != '{' {
		return nil, nil
	}
	for r.pos++; r.peek() == '"'; r.pos++ {
		key := r.str()
		if r.peek() != ':' {
			break
		}
		r.pos++
		if r.peek() == '[' && key == "items" {
			open := r.pos
			parts := r.elements()
			head, err := parseJSON(text[:open] + "[]" + text[r.pos:])
			if err != nil || len(head.Get(key).Parts) > 0 {
				break
			}
			return head, parts
		}
		if r.skip(); r.peek() != ',' {
			break
		}
	}
	return nil, nil
}

// elements splits the list at the position into its elements, or returns nil if it cannot.
func (r *jsonReader) elements() (parts []Chunk) {
	for {
		r.pos++
		if next := r.peek(); next == 0 || next == ']' {
			return nil
		}
		start, line := r.pos, r.lineHere()-1
		r.skip()
		parts = append(parts, Chunk{Text: r.text[start:r.pos], Line: line})
		switch r.peek() {
		case ',':
		case ']':
			r.pos++
			return parts
		default:
			return nil
		}
	}
}
