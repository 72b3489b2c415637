package yamltree

import (
	"fmt"
	"strings"
	"testing"
)

// TestLines: of YAML and JSON alike, a field's line is that of its key, and otherwise that of what is around it.
func TestLines(t *testing.T) {
	yaml := "a: &x\n  b: 1\nlist:\n- {c: 2}\n-\n  c.d: 3\nmore: {<<: *x, b: 4}\na: # again\n  e: 5\n"
	json := "{\"a\": {\n\"b\": \"1\"},\n" + "\"list\": [\n{\"c\": 2}, {\n\n\"c.d\": 3}],\n" +
		"\"more\": {\"b\": 4},\n\"a\": {\n\"e\": 5}}"
	for _, text := range []string{yaml, json} {
		docs := Documents(text)
		if len(docs) != 1 {
			t.Fatalf("%d documents", len(docs))
		}
		tree, err := docs[0].Parse(false)
		if err != nil {
			t.Fatalf("line %d: %v", err.Line, err.Err)
		}
		for field, want := range map[string]int{"list": 3, "list[0].c": 4, "list[1][c.d]": 6, "list[2]": 3, "more.b": 7,
			"more.none.at.all": 7, "a": 8, "a.e": 9, "a.b": 8, "none": 1} {
			if got := tree.LineOf(PathOf(field)); got != want {
				t.Errorf("%s: line %d, want %d, of %q", field, got, want, text)
			}
		}
	}
}

// TestDocuments: documents have the lines that they have in the file, and empty ones are left out.
func TestDocuments(t *testing.T) {
	const text = "\uFEFF# nothing\n---\na: 1\n--- {b: 2}\n--- # c\nc: 3\n...\n%YAML 1.2\n---\n\nd: 4\n---\n"
	var got []string
	docs := Documents(text)
	for i := range docs {
		tree, err := docs[i].Parse(false)
		if err != nil {
			t.Fatal(err.Err)
		}
		got = append(got, fmt.Sprintf("%s:%d", tree.Parts[0].Text, docs[i].Line+tree.Line-1))
	}
	if is, want := strings.Join(got, " "), "a:3 b:4 c:6 d:11"; is != want {
		t.Errorf("got %s, want %s", is, want)
	}
}

// TestErrors: an error names its line, and leaves what comes before it.
func TestErrors(t *testing.T) {
	for text, want := range map[string]string{
		"kind: x\nspec:\n  a: b: c\n":                     "3 x mapping values are not allowed in this context",
		"kind: x\n? {a: b}\n: c\n":                        "2  a mapping can't be a key",
		"{\"kind\": \"x\",\n\"a\" \"b\": 7}":              "2 x invalid character '\"' after object key",
		"{\"kind\": \"x\",\n\"a\": [1, 2":                 "2 x unexpected end of JSON input",
		"{\"kind\": \"x\"}\n\n{}":                         "3 x more text after its end; put --- between documents",
		"{\"kind\": \"x\\q\"}":                            "1 x\\q invalid character 'q' in string escape code",
		"{\"kind\":\n" + strings.Repeat("[", maxDepth+50): "2  values nest deeper than 100 levels",
		"{\"kind\": \"x\",\n\"a\": [1, 2]]":               "2 x invalid character ']' after object key:value pair",
	} {
		docs := Documents(text)
		tree, err := docs[0].Parse(true)
		if err == nil {
			t.Errorf("%q is good: %+v", text, tree)
			continue
		}
		if tree == nil {
			tree = &Tree{}
		}
		_, reason, _ := strings.Cut(err.Err.Error(), ": ")
		if reason == "" {
			reason = err.Err.Error()
		}
		if got := fmt.Sprintf("%d %s %s", err.Line, tree.Str("kind"), reason); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// TestItems: a list in either language comes apart; what is no list, or not valid, does not.
func TestItems(t *testing.T) {
	for text, want := range map[string]string{
		"kind: List\nitems:\n- a: 1\n\n- a: 2\n":                           "3 5",
		"items:\n  - a: 1\n  - a: 2\nkind: ServiceList\napiVersion: v1\n":  "2 Service v1 3 Service v1",
		"{\"items\": [{\"a\": \"]\"},\n{\"a\": [2]}], \"kind\": \"List\"}": "1 2",
		"{\"kind\": \"List\", \"items\": []}":                              "",
		"{\"kind\": \"List\" \"items\": [{}]}":                             "",
		"{\"kind\": \"List\", \"items\": [{}, {}}":                         "",
		"{\"kind\": \"List\", \"items\": [{}], \"items\": [{}]}":           "",
		"{\"kind\": \"Service\", \"items\": [{}]}":                         "",
		"kind: List\nitems:\n- a: 1\nitems:\n- a: 2\n":                     "",
	} {
		var got []string
		docs := Documents(text)
		for _, item := range docs[0].Items() {
			got = append(got, strings.TrimSpace(fmt.Sprintf("%d %s %s", item.Line, item.Kind, item.APIVersion)))
		}
		if is := strings.Join(got, " "); is != want {
			t.Errorf("%q: got %q, want %q", text, is, want)
		}
	}
}
