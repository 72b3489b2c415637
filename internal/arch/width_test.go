package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	mostColumns = 120
	mostLines   = 50
)

// TestWidth: no line of Go or Markdown is longer than 120 columns, but for tables and lines that are a URL, or hold
// one, in Markdown. A tab counts for one column.
func TestWidth(t *testing.T) {
	eachText(t, func(path, text string) {
		if ext := filepath.Ext(path); ext != ".go" && ext != ".md" || strings.Contains(path, "testdata/") {
			return
		}
		n := 0
		for line := range strings.Lines(text) {
			n++
			columns := utf8.RuneCountInString(strings.TrimRight(line, "\n"))
			if columns > mostColumns && !mayBeWide(path, line) {
				t.Errorf("%s:%d is longer than %d columns", path, n, mostColumns)
			}
		}
	})
}

// mayBeWide says whether a line cannot be wrapped.
func mayBeWide(path, line string) bool {
	return strings.HasSuffix(path, ".md") && (strings.HasPrefix(line, "|") || strings.Contains(line, "://"))
}

// TestLength: no function of the program is longer than 50 lines.
func TestLength(t *testing.T) {
	eachText(t, func(path, text string) {
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, text, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok {
				first, last := files.Position(f.Pos()).Line, files.Position(f.End()).Line
				if last-first+1 > mostLines {
					t.Errorf("%s:%d begins a function of more than %d lines", path, first, mostLines)
				}
			}
		}
	})
}
