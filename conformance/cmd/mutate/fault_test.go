package main

import (
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const example = `package p

import "fmt"

func f(list []int, l *T) (sum int, ok bool) {
	for i, v := range list {
		if v < 0 || i > 9 {
			continue
		}
		sum += v
		l.Log.Info("not this", "v", v+1)
	}
	l.done(fmt.Errorf("nor this: %d", sum-1))
	return min(sum, 100), true
}

func (t T) String() string { return "nor" + "this" }
`

// TestFaults: every kind of fault is planted once in the place that it names, and none in what only makes text.
func TestFaults(t *testing.T) {
	faults, err := faultsIn("p.go", []byte(example))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for i := range faults {
		f := &faults[i]
		got = append(got, f.name()+": "+f.text())
		guarded := string(f.source[:f.from]) + f.guarded("7") + string(f.source[f.to:])
		if _, err := parser.ParseFile(token.NewFileSet(), "p.go", guarded, 0); err != nil {
			t.Errorf("%s: %v", f.name(), err)
		}
		if strings.Count(guarded, "\n") != strings.Count(example, "\n") {
			t.Errorf("%s moves lines", f.name())
		}
	}
	want := []string{
		"p.go:13:2 dropped statement: l.done(fmt.Errorf(\"nor this: %d\", sum-1)) => ",
		"p.go:10:3 dropped statement: sum += v => ",
		"p.go:7:6 negated condition: v < 0 || i > 9 => !(v < 0 || i > 9)",
		"p.go:7:6 operator: v < 0 || i > 9 => v < 0 && i > 9",
		"p.go:7:6 operator: v < 0 => v <= 0",
		"p.go:7:10 number: 0 => 1",
		"p.go:7:15 operator: i > 9 => i >= 9",
		"p.go:7:19 number: 9 => 10",
		"p.go:8:4 branch: continue => break",
		"p.go:14:9 extreme: min(sum, 100) => max(sum, 100)",
		"p.go:14:18 number: 100 => 101",
		"p.go:14:24 constant: true => false",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%q\nwant\n%q", got, want)
	}
}

// TestMatching: the faults of one name are found without a seed, and a name of two that overlap is refused.
func TestMatching(t *testing.T) {
	faults, err := faultsIn("p.go", []byte(example))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		named string
		want  int
		wrong bool
	}{
		{`^p\.go:7:\d+ number\t`, 2, false}, {`:7:6 .*=> v < 0 &&`, 1, false}, {"branch", 1, false},
		{"no such fault", 0, false}, {"p.go:7:", 0, true},
	} {
		found, err := (&choice{named: regexp.MustCompile(c.named)}).matching(faults)
		if len(found) != c.want || (err != nil) != c.wrong {
			t.Errorf("%s: %d faults, error %v", c.named, len(found), err)
		}
	}
}
