package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// fault is one place of one file, and what stands there instead.
type fault struct {
	// file is the path from the module's root.
	file         string
	source       []byte
	line, column int
	from, to     int
	// instead is what stands there with the fault, and guarded what stands there if a number chooses the fault.
	instead string
	guarded func(number string) string
	kind    string
}

// name identifies a fault as long as the file does not change.
func (f *fault) name() string { return fmt.Sprintf("%s:%d:%d %s", f.file, f.line, f.column, f.kind) }

// text shows what was there and what is there instead, in one line.
func (f *fault) text() string {
	short := func(s string) string {
		s = strings.Join(strings.Fields(s), " ")
		return s[:min(len(s), 100)]
	}
	return short(f.before()) + " => " + short(f.instead)
}

// entry is the fault's line in a table.
func (f *fault) entry() string { return f.name() + "\t" + f.text() }

// overlaps says whether two faults are in the same place, or one within the other.
func (f *fault) overlaps(o fault) bool { return o.file == f.file && o.from < f.to && f.from < o.to }

func (f *fault) before() string { return string(f.source[f.from:f.to]) }

// faultsOf returns all faults that can be planted in a package, in the order of its files.
func faultsOf(root, dir string) ([]fault, error) {
	paths, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
	if err != nil {
		return nil, err
	}
	var out []fault
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		some, err := faultsIn(filepath.ToSlash(filepath.Join(dir, filepath.Base(path))), source)
		if err != nil {
			return nil, err
		}
		out = append(out, some...)
	}
	return out, nil
}

// mutator gathers the faults of one file.
type mutator struct {
	file   string
	source []byte
	set    *token.FileSet
	out    []fault
}

func faultsIn(file string, source []byte) ([]fault, error) {
	m := &mutator{file: file, source: source, set: token.NewFileSet()}
	tree, err := parser.ParseFile(m.set, file, source, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, d := range tree.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Body == nil || f.Name.Name == "String" { // what is only printed is not what the product does
			continue
		}
		ast.Inspect(f.Body, func(n ast.Node) bool {
			if isTalk(n) {
				return false
			}
			m.node(n)
			return true
		})
	}
	return m.out, nil
}

// isTalk says whether a node only makes a text for people, as a line of the log or an error.
func isTalk(n ast.Node) bool {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return false
	}
	s, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	switch x := s.X.(type) {
	case *ast.SelectorExpr:
		return x.Sel.Name == "Log"
	case *ast.Ident:
		return x.Name == "fmt" || x.Name == "errors" && s.Sel.Name == "New"
	}
	return false
}

// add adds a fault. guarded tells the code with it, chosen by a number, from the code without it, on as many lines.
func (m *mutator) add(kind string, from, to token.Pos, instead string, guarded func(number string) string) {
	at := m.set.Position(from)
	m.out = append(m.out, fault{file: m.file, source: m.source, line: at.Line, column: at.Column,
		from: at.Offset, to: m.set.Position(to).Offset, instead: instead, guarded: guarded, kind: kind})
}

// choose adds a fault that is another expression.
func (m *mutator) choose(kind string, n ast.Expr, instead, format string) {
	before := m.text(n)
	if strings.Contains(before, "\n") { // which would move the lines after it
		return
	}
	m.add(kind, n.Pos(), n.End(), instead, func(number string) string {
		return fmt.Sprintf(strings.ReplaceAll(format, "N", number), before, instead)
	})
}

func (m *mutator) text(n ast.Node) string {
	return string(m.source[m.set.Position(n.Pos()).Offset:m.set.Position(n.End()).Offset])
}

// operators are what may stand in the place of an operator.
var operators = map[token.Token]token.Token{
	token.LSS: token.LEQ, token.LEQ: token.LSS, token.GTR: token.GEQ, token.GEQ: token.GTR,
	token.EQL: token.NEQ, token.NEQ: token.EQL, token.LAND: token.LOR, token.LOR: token.LAND,
	token.ADD: token.SUB, token.SUB: token.ADD, token.MUL: token.ADD,
}

// How a number chooses between two expressions: without evaluating both where they are conditions.
const (
	chooseCondition = "(mutated != N && (%[1]s) || mutated == N && (%[2]s))"
	chooseValue     = "mutate(N, %[1]s, %[2]s)"
)

func (m *mutator) node(n ast.Node) {
	switch n := n.(type) {
	case *ast.IfStmt:
		cond := m.text(n.Cond)
		m.add("negated condition", n.Cond.Pos(), n.Cond.End(), "!("+cond+")", func(number string) string {
			return "(mutated == " + number + ") != (" + cond + ")"
		})
	case *ast.BinaryExpr:
		m.operator(n)
	case *ast.BasicLit:
		if v, err := strconv.Atoi(n.Value); err == nil && n.Kind == token.INT {
			m.choose("number", n, strconv.Itoa(v+1), chooseValue)
		}
	case *ast.Ident:
		if other, ok := map[string]string{"true": "false", "false": "true"}[n.Name]; ok {
			m.choose("constant", n, other, chooseValue)
		}
	case *ast.CallExpr:
		if f, ok := n.Fun.(*ast.Ident); ok {
			if other, ok := map[string]string{"min": "max", "max": "min"}[f.Name]; ok {
				m.choose("extreme", n, other+strings.TrimPrefix(m.text(n), f.Name), chooseValue)
			}
		}
	case *ast.BranchStmt:
		if other, ok := map[token.Token]string{token.BREAK: "continue", token.CONTINUE: "break"}[n.Tok]; ok &&
			n.Label == nil {
			m.add("branch", n.Pos(), n.End(), other, func(number string) string {
				return "if mutated == " + number + " { " + other + " }; " + n.Tok.String()
			})
		}
	case *ast.BlockStmt:
		m.statements(n.List)
	case *ast.CaseClause:
		m.statements(n.Body)
	}
}

func (m *mutator) operator(n *ast.BinaryExpr) {
	other, ok := operators[n.Op]
	if !ok {
		return
	}
	format := chooseCondition
	if n.Op == token.ADD || n.Op == token.SUB || n.Op == token.MUL {
		format = chooseValue
	}
	x, y := m.text(n.X), m.text(n.Y)
	m.choose("operator", n, x+" "+other.String()+" "+y, format)
}

// statements drops statements, each by itself.
func (m *mutator) statements(list []ast.Stmt) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt:
			if isTalk(s.X) {
				continue
			}
		case *ast.IncDecStmt:
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE {
				continue
			}
		default:
			continue
		}
		text := m.text(s)
		m.add("dropped statement", s.Pos(), s.End(), "", func(number string) string {
			return "if mutated != " + number + " { " + text + " }"
		})
	}
}
