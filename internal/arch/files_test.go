package arch

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// eachFile calls do for every file of the repository, but for what git and others keep in hidden folders, and binaries
// under bin. Paths are from the root, with slashes.
func eachFile(t *testing.T, do func(path string, text []byte)) {
	t.Helper()
	const root = "../.."
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if path != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "bin") {
				return filepath.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		short, err := filepath.Rel(root, path)
		do(filepath.ToSlash(short), text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// eachText calls do for every file of Go, Markdown and YAML.
func eachText(t *testing.T, do func(path, text string)) {
	t.Helper()
	eachFile(t, func(path string, text []byte) {
		switch filepath.Ext(path) {
		case ".go", ".md", ".yaml":
			do(path, string(text))
		}
	})
}
