package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

const repository = "../.."

var (
	// codeBlock is one between fences, or one line of an indented one; codeWords are a line's backticks.
	codeBlock     = regexp.MustCompile("(?ms)^ *```.*?^ *```|^ {4,}[^\n]*$")
	codeWords     = regexp.MustCompile("`[^`\n]+`")
	typedCommand  = regexp.MustCompile("(?m)^[` ]*(?:[$#] )?((?:bin/)?verdict|kubectl verdict|make) ([^`\n]+)")
	continuedLine = regexp.MustCompile(`\\\n *`)
	makeTarget    = regexp.MustCompile(`(?m)^([a-z-]+):`)
)

// TestDocumentedCommands: the commands that the documents show are ones that the program and the Makefile know, with
// flags that exist and as many arguments as it takes.
func TestDocumentedCommands(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(repository, "Makefile"))
	labtest.Check(t, err)
	targets := map[string]bool{}
	for _, m := range makeTarget.FindAllSubmatch(makefile, -1) {
		targets[string(m[1])] = true
	}
	seen := 0
	for _, document := range markdown(t) {
		text, err := os.ReadFile(document)
		labtest.Check(t, err)
		for _, m := range typedCommand.FindAllStringSubmatch(codeOf(string(text)), -1) {
			words, ok := wordsOf(m[2])
			if !ok || len(words) == 0 {
				continue
			}
			var err error
			switch m[1] {
			case "make":
				for _, word := range words {
					if !strings.Contains(word, "=") && !targets[word] {
						t.Errorf("%s: make %s: there is no target %s", document, m[2], word)
					}
				}
			case "kubectl verdict":
				err = parsed(newKubectl(), words)
			default:
				err = parsed(newRoot(), words)
			}
			seen++
			if err != nil && !slices.Contains(wrongOnPurpose, m[2]) {
				t.Errorf("%s: %s %s: %v", document, m[1], m[2], err)
			}
		}
	}
	if seen < 100 {
		t.Errorf("only %d commands were found", seen)
	}
}

// wrongOnPurpose are commands that a document shows for the error that they get.
var wrongOnPurpose = []string{"explain 192.0.2.100"}

// codeOf gives a document's blocks of code and words in backticks, each on lines of their own.
func codeOf(text string) string {
	text = continuedLine.ReplaceAllString(text, " ")
	blocks := codeBlock.FindAllString(text, -1)
	words := codeWords.FindAllString(codeBlock.ReplaceAllString(text, ""), -1)
	return strings.Join(slices.Concat(blocks, words), "\n")
}

// wordsOf splits what stands behind a command's name. It is no command if it is cut short, or names alternatives.
func wordsOf(text string) (words []string, ok bool) {
	text, _, _ = strings.Cut(text, " #")
	for _, end := range []string{" | ", " > ", " 2> ", " & ", "; ", " && "} {
		text, _, _ = strings.Cut(text, end)
	}
	if strings.ContainsAny(text, "|<[…") || strings.Contains(text, "...") {
		return nil, false
	}
	for _, word := range strings.Fields(text) {
		words = append(words, strings.Trim(word, `'"`))
	}
	return words, true
}

// parsed says what is wrong with a command line, and runs nothing.
func parsed(root *cobra.Command, words []string) error {
	cmd, rest, err := root.Find(words)
	if err != nil {
		return err
	}
	cmd.InitDefaultHelpFlag()
	cmd.InitDefaultVersionFlag()
	if err := cmd.ParseFlags(rest); err != nil {
		return err
	}
	if len(cmd.Flags().Args()) == 0 {
		return nil // a text may name a command without what it is for
	}
	return cmd.ValidateArgs(cmd.Flags().Args())
}

// markdown lists the documents.
func markdown(t *testing.T) []string {
	var list []string
	labtest.Check(t, filepath.WalkDir(repository, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != repository {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, ".md") {
			list = append(list, path)
		}
		return err
	}))
	return list
}

var (
	// documentedAnswer is a call of explain in an indented block, and what it prints.
	documentedAnswer = regexp.MustCompile(`(?m)^    \$ verdict explain (.*)\n((?:    .+\n)+)`)
	counted          = regexp.MustCompile(`\b\d+ connections?\b|(\d:\d+) \d+ `)
)

// TestDocumentedAnswers: the answers of explain in the documents are those of examples/cluster.yaml, but for counters.
// A document may leave out lines by "..." and break long ones.
func TestDocumentedAnswers(t *testing.T) {
	c := newCompared(t, "10.244.1.1/24", "192.0.2.10/24")
	labtest.Run(t, c.host, "", "ip", "route", "add", "10.244.2.0/24", "dev", "eth0", "src", "192.0.2.10")
	normal := func(text string) string {
		return counted.ReplaceAllString(strings.Join(strings.Fields(text), " "), "$1 N ")
	}
	seen := 0
	for _, document := range markdown(t) {
		text, err := os.ReadFile(document)
		labtest.Check(t, err)
		for _, m := range documentedAnswer.FindAllStringSubmatch(string(text), -1) {
			words, ok := wordsOf(m[1])
			if !ok || !slices.Contains(words, "--live") || slices.Contains(words, "--in-cluster") {
				continue
			}
			seen++
			out, _ := c.run(append([]string{"explain"}, words...)...)
			rest := normal(out)
			for part := range strings.SplitSeq(m[2], "    ...\n") {
				_, behind, found := strings.Cut(rest, normal(part))
				if rest = behind; !found {
					t.Errorf("%s: explain %s: the document says\n%sand the program\n%s", document, m[1], part, out)
					break
				}
			}
		}
	}
	if seen < 8 {
		t.Errorf("the documents have %d answers", seen)
	}
}
