package watch

import "strings"

// chunk is a part of a manifest that can be parsed by itself: a document, or one item of a list. Large dumps are one
// list. Splitting them before parsing keeps one item's tree in memory instead of all.
type chunk struct {
	text string
	// line is the chunk's first line in the file, from 1.
	line int
	json bool
	// item says that text is a YAML list of one element.
	item bool
	// kind and apiVersion apply to items that have none of their own, as in a ServiceList.
	kind, apiVersion string
	// whole is the document the item came from.
	whole *chunk
}

// documents splits a file at its document markers ("---", "..."). Text on a marker's own line belongs to the document
// after it.
func documents(text string) []chunk {
	text = strings.TrimPrefix(text, "\uFEFF") // a byte order mark
	var docs []chunk
	start, startLine := 0, 1
	add := func(end int) {
		if body := text[start:end]; !blank(body) {
			json := strings.HasPrefix(strings.TrimLeft(body, " \t\r\n"), "{")
			docs = append(docs, chunk{text: body, line: startLine, json: json})
		}
	}
	for at, line := 0, 1; at < len(text); line++ {
		if isMarker(text[at:]) {
			add(at)
			start, startLine = at+3, line
		}
		end := strings.IndexByte(text[at:], '\n')
		if end < 0 {
			break
		}
		at += end + 1
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

// items splits a list as kubectl prints it. It returns nil if the document is anything else; then the document must be
// parsed as a whole.
//
// In YAML it only uses the indentation. That is wrong for a quoted text that spans lines and has a dash at the very
// column of the items, and for an anchor in another item. In both cases one of the parts is not valid YAML.
func items(doc *chunk) []chunk {
	var head *tree
	var parts []chunk
	if doc.json {
		head, parts = jsonItems(doc.text)
	} else {
		head, parts = yamlItems(doc.text)
	}
	if head == nil || !strings.HasSuffix(head.str("kind"), "List") {
		return nil
	}
	kind, apiVersion := head.str("kind"), head.str("apiVersion")
	for i := range parts {
		p := &parts[i]
		p.whole, p.json, p.item, p.line = doc, doc.json, !doc.json, p.line+doc.line
		if kind != "List" {
			p.kind, p.apiVersion = strings.TrimSuffix(kind, "List"), apiVersion
		}
	}
	return parts
}

// yamlItems returns the list without its items, and the items with the lines before them. Both are nil if it cannot
// split the text.
func yamlItems(text string) (*tree, []chunk) {
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
	var parts []chunk
	for body != "" {
		n, lines := itemLength(body, indent)
		parts = append(parts, chunk{text: body[:n], line: line})
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
func jsonItems(text string) (*tree, []chunk) {
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
			if err != nil || len(head.get(key).parts) > 0 {
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
func (r *jsonReader) elements() (parts []chunk) {
	for {
		r.pos++
		if next := r.peek(); next == 0 || next == ']' {
			return nil
		}
		start, line := r.pos, r.lineHere()-1
		r.skip()
		parts = append(parts, chunk{text: r.text[start:r.pos], line: line})
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
