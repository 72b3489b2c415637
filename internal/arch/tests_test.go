package arch

import (
	"io/fs"
	"os"
	"path/filepath"
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
	const root = "../.."
	there := map[string]bool{}
	var documents []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != root:
			return filepath.SkipDir
		case strings.HasSuffix(path, ".md"):
			documents = append(documents, path)
		case strings.HasSuffix(path, "_test.go"):
			text, err := os.ReadFile(path)
			for _, m := range testThere.FindAllSubmatch(text, -1) {
				there[string(m[1])] = true
			}
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for _, document := range documents {
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
