package arch

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	decisionHead = regexp.MustCompile(`^# (\d{4})\. (.+)\n\nDate: (\d{4}-\d\d-\d\d)\. Status: (accepted|superseded)`)
	decisionLink = regexp.MustCompile(`decisions/([\w-]+\.md)`)
)

// TestDecisions: each decision begins with its number, date and status, and the index says the same. Where a document
// or a comment names a decision, it is there.
func TestDecisions(t *testing.T) {
	const folder = "../../docs/decisions"
	index, err := os.ReadFile(folder + "/README.md")
	if err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(folder + "/0*.md")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Base(file)
		m := decisionHead.FindStringSubmatch(string(text))
		if m == nil || !strings.HasPrefix(name, m[1]+"-") {
			t.Errorf("%s does not begin with its number, date and status", name)
			continue
		}
		line := fmt.Sprintf("| [%s](%s) | %s | %s | %s |\n", m[1], name, m[3], m[4], m[2])
		if !strings.Contains(string(index), line) {
			t.Errorf("the index has no line %s", line)
		}
	}
	if n := strings.Count(string(index), "\n| [0"); n != len(files) {
		t.Errorf("the index has %d decisions; there are %d", n, len(files))
	}
	eachText(t, func(path, text string) {
		for _, m := range decisionLink.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(folder, m[1])); err != nil {
				t.Errorf("%s names decision %s, which is not there", path, m[1])
			}
		}
	})
}

var required = regexp.MustCompile(`(?m)^(?:require |\t)(\S+\.\S+/\S+) v\S+$`)

// TestDependencies: every direct dependency of every module of ours has a line that says why.
func TestDependencies(t *testing.T) {
	why, err := filepath.Glob("../../docs/decisions/*-dependencies.md")
	if err != nil || len(why) != 1 {
		t.Fatal(why, err)
	}
	reasons, err := os.ReadFile(why[0])
	if err != nil {
		t.Fatal(err)
	}
	direct := 0
	eachFile(t, func(path string, text []byte) {
		if filepath.Base(path) != "go.mod" {
			return
		}
		for _, m := range required.FindAllSubmatch(text, -1) {
			direct++
			if name := string(m[1]); !strings.HasPrefix(name, strings.TrimSuffix(module, "/")) &&
				!strings.Contains(string(reasons), "| "+name+" | ") {
				t.Errorf("%s requires %s, and %s does not say why", path, name, why[0])
			}
		}
	})
	if direct < 20 {
		t.Errorf("only %d direct dependencies were found", direct)
	}
}
