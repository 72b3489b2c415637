//go:build man

package main

import (
	"log"
	"os"
	"regexp"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// main writes the manual pages of all commands into the directory that its argument names. It is a program of its own,
// with the tag man, so that verdict does not link what formats them. Their date is SOURCE_DATE_EPOCH.
func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: go run -tags man ./cmd/verdict DIRECTORY")
	}
	root := newRoot()
	root.DisableAutoGenTag = true
	indentTables(root)
	header := doc.GenManHeader{Section: "1", Source: "Verdict", Manual: "Verdict"}
	if err := doc.GenManTree(root, &header, os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

var indented = regexp.MustCompile(`(?m)^  `)

// indentTables indents the tables and examples of help as far as Markdown wants it, from which the pages are made.
func indentTables(cmd *cobra.Command) {
	cmd.Long = indented.ReplaceAllString(cmd.Long, "      ")
	for _, sub := range cmd.Commands() {
		indentTables(sub)
	}
}
