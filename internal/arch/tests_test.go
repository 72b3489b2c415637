package arch

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

var (
	testNamed = regexp.MustCompile("`((?:Test|Fuzz|Benchmark)[A-Za-z0-9]+)(\\*?)")
	testThere = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)[A-Za-z0-9]+)\(`)
)

// TestNamedTests: what the documents say is held by a test, is: the tests that they name are there.
func TestNamedTests(t *testing.T) {
	there := map[string]bool{}
	for _, path := range filesEnding(t, "_test.go") {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range testThere.FindAllSubmatch(text, -1) {
			there[string(m[1])] = true
		}
	}
	named := 0
	for _, document := range documents(t) {
		text, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range testNamed.FindAllSubmatch(text, -1) {
			named++
			if name, several := string(m[1]), len(m[2]) > 0; !there[name] && !(several && anyBegins(there, name)) {
				t.Errorf("%s names %s, which is not there", document, name)
			}
		}
	}
	if named == 0 {
		t.Error("no document names a test")
	}
}

func anyBegins(names map[string]bool, prefix string) bool {
	for name := range names {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}
