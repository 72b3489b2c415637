package arch

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

// twoScreens is how many lines of a document a reader can find their way in without a table of contents.
const twoScreens = 100

var (
	fence   = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	link    = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^(#{1,6}) +(.+?)\s*$`)
)

// TestLinks: every link within the repository leads to a file, and to a heading of it.
func TestLinks(t *testing.T) {
	followed := 0
	for _, path := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(prose(t, path), -1) {
			if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
				continue
			}
			followed++
			file, anchor, _ := strings.Cut(m[1], "#")
			target := path
			if file != "" {
				target = filepath.Join(filepath.Dir(path), file)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: nothing is at %s", path, m[1])
			} else if anchor != "" && !anchors(t, target)[anchor] {
				t.Errorf("%s: %s has no heading with the anchor #%s", path, target, anchor)
			}
		}
	}
	if followed == 0 {
		t.Error("no document has a link")
	}
}

// TestContents: a document that is longer than two screens begins with links to all its sections.
func TestContents(t *testing.T) {
	long := 0
	for _, path := range documents(t) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Count(string(text), "\n") <= twoScreens || filepath.Base(path) == "CHANGELOG.md" {
			continue
		}
		long++
		before, _, _ := strings.Cut(prose(t, path), "\n## ")
		for _, h := range heading.FindAllStringSubmatch(prose(t, path), -1) {
			if anchor := slug(h[2]); h[1] == "##" && !strings.Contains(before, "(#"+anchor+")") {
				t.Errorf("%s has more than %d lines, and its beginning has no link to #%s", path, twoScreens, anchor)
			}
		}
	}
	if long == 0 {
		t.Error("no document is long")
	}
}

// documents lists all Markdown files of the repository.
func documents(t *testing.T) []string { return filesEnding(t, ".md") }

// filesEnding lists the files of the repository whose names have an ending.
func filesEnding(t *testing.T, ending string) []string {
	const root = "../.."
	var list []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != root:
			return filepath.SkipDir
		case strings.HasSuffix(path, ending):
			list = append(list, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// prose is the text of a document without its blocks of code.
func prose(t *testing.T, path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return fence.ReplaceAllString(string(text), "")
}

// anchors are those that GitHub makes of a document's headings.
func anchors(t *testing.T, path string) map[string]bool {
	made := map[string]bool{}
	for _, h := range heading.FindAllStringSubmatch(prose(t, path), -1) {
		made[slug(h[2])] = true
	}
	return made
}

// slug is a heading in lower case, with hyphens for spaces, without punctuation.
func slug(title string) string {
	title = link.ReplaceAllString(title, "]")
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			return unicode.ToLower(r)
		case r == ' ':
			return '-'
		}
		return -1
	}, title)
}

var duration = regexp.MustCompile(`\b\d+(?:\.\d+)? (?:ms|s)\b`)

// TestFigures: where the museum tells what the benchmark measured, its figures are those of the benchmark's page.
func TestFigures(t *testing.T) {
	text, err := os.ReadFile("../../docs/evidence/BENCHMARKS.md")
	if err != nil {
		t.Fatal(err)
	}
	measured, told := map[string]bool{}, 0
	for _, figure := range duration.FindAllString(string(text), -1) {
		measured[figure] = true
	}
	museum := prose(t, "../../docs/evidence/MUSEUM.md")
	for _, outage := range regexp.MustCompile(`(?m)^\*\*\d+\.`).Split(museum, -1)[1:] {
		_, sides, bullets := strings.Cut(outage, "\n- ")
		if !bullets || !strings.Contains(outage, "BENCHMARKS.md#") {
			continue
		}
		for _, figure := range duration.FindAllString(strings.Join(strings.Fields(sides), " "), -1) {
			if told++; !measured[figure] {
				t.Errorf("the museum tells of %s, which the benchmarks do not have:%.60s", figure, outage)
			}
		}
	}
	if told < 8 {
		t.Errorf("only %d figures of the benchmarks are told", told)
	}
}
