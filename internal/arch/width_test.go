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
	mostLines   = 60
)

// wide are the files that still have longer lines, and long those that still have longer functions. Both lists only
// ever shrink: a file that has been mended must leave them.
var (
	wide = strings.Fields(`
conformance/benchmark
docs/BENCHMARKS.md
docs/RULESET.md
`)
	long []string
)

// TestWidth: no line of Go or Markdown is longer than 120 columns, but for tables and lines that are a URL, or hold
// one, in Markdown. A tab counts for one column.
func TestWidth(t *testing.T) {
	found := map[string]int{} // the first such line of each file
	eachText(t, func(path, text string) {
		if ext := filepath.Ext(path); ext != ".go" && ext != ".md" || strings.Contains(path, "testdata/") {
			return
		}
		n := 0
		for line := range strings.Lines(text) {
			n++
			columns := utf8.RuneCountInString(strings.TrimRight(line, "\n"))
			if columns > mostColumns && found[path] == 0 && !mayBeWide(path, line) {
				found[path] = n
			}
		}
	})
	shrink(t, found, wide, "is longer than 120 columns")
}

// mayBeWide says whether a line cannot be wrapped.
func mayBeWide(path, line string) bool {
	return strings.HasSuffix(path, ".md") && (strings.HasPrefix(line, "|") || strings.Contains(line, "://"))
}

// TestLength: no function of the program is longer than 60 lines.
func TestLength(t *testing.T) {
	found := map[string]int{}
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
				if last-first+1 > mostLines && found[path] == 0 {
					found[path] = first
				}
			}
		}
	})
	shrink(t, found, long, "begins a function of more than 60 lines")
}

// shrink reports what is found outside of what is exempt, and what is exempt without need.
func shrink(t *testing.T, found map[string]int, exempt []string, what string) {
	t.Helper()
	needed := map[string]bool{}
	for path, line := range found {
		by := "" // the innermost folder that is exempt
		for _, e := range exempt {
			if (path == e || strings.HasPrefix(path, e+"/")) && len(e) > len(by) {
				by = e
			}
		}
		needed[by] = true
		if by == "" {
			t.Errorf("%s:%d %s", path, line, what)
		}
	}
	for _, e := range exempt {
		if !needed[e] {
			t.Errorf("%s needs no exception any more: take it out of the list", e)
		}
	}
}
