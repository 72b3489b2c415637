package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"testing"
)

var logKey = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

// TestLogKeys: the keys of the log's fields are words without spaces, as who searches it expects.
func TestLogKeys(t *testing.T) {
	methods, found := []string{"Debug", "Info", "Warn", "Error"}, 0
	walk(t, "../..", func(path, _ string, _ []string) {
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			method, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !slices.Contains(methods, method.Sel.Name) {
				return true
			}
			if of, ok := method.X.(*ast.Ident); ok && of.Name == "http" {
				return true
			}
			for i := 1; i < len(call.Args); i += 2 {
				if text, ok := call.Args[i].(*ast.BasicLit); ok && text.Kind == token.STRING {
					found++
					if key, _ := strconv.Unquote(text.Value); !logKey.MatchString(key) {
						t.Errorf("%v: the key %q is not like kept_by", files.Position(text.Pos()), key)
					}
				}
			}
			return true
		})
	})
	if found == 0 {
		t.Error("no log line has a field")
	}
}
