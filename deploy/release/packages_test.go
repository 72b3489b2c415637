package main

import (
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// TestPackages: the Debian package has every page that its manual pages, and so the help, point to, and those that the
// README leads to; it has the plugin of kubectl; the archive of the pages has the same.
func TestPackages(t *testing.T) {
	r := &release{version: "v0.2.0", tree: "../..", out: t.TempDir(), stage: t.TempDir(), date: time.Unix(1e9, 0)}
	for _, arch := range arches {
		if err := os.WriteFile(r.binary(arch), []byte("the program"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.documents(); err != nil {
		t.Fatal(err)
	}
	if err := r.packages(); err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	run(t, "dpkg-deb", "--extract", filepath.Join(r.out, "verdict_0.2.0-1_amd64.deb"), root)
	if to, err := os.Readlink(filepath.Join(root, "usr/bin/kubectl-verdict")); err != nil || to != "verdict" {
		t.Errorf("kubectl-verdict leads to %q (%v)", to, err)
	}
	doc, unpacked := filepath.Join(root, "usr/share/doc/verdict"), t.TempDir()
	run(t, "tar", "-xzf", filepath.Join(r.out, "verdict-docs.tar.gz"), "-C", unpacked)
	named := namedPages(t, filepath.Join(root, "usr/share/man/man1"))
	for _, link := range linksOf(t, filepath.Join(doc, "README.md")) {
		named[link] = true
	}
	if len(named) < 15 || !named["docs/CLUSTER.md"] {
		t.Errorf("only %v are named", named)
	}
	for page := range named {
		for _, at := range []string{doc, unpacked} {
			if info, err := os.Stat(filepath.Join(at, page)); err != nil || info.Mode().Perm()&0o444 != 0o444 {
				t.Errorf("%s: %v", page, err)
			}
		}
	}
}

func run(t *testing.T, program string, args ...string) {
	t.Helper()
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v: %s", program, args, err, out)
	}
}

var pageName = regexp.MustCompile(`docs/[A-Z-]+\.md`)

// namedPages returns the pages that compressed manual pages name.
func namedPages(t *testing.T, dir string) map[string]bool {
	files, err := filepath.Glob(filepath.Join(dir, "*.gz"))
	if err != nil || len(files) < 10 {
		t.Fatal(len(files), err)
	}
	named := map[string]bool{}
	for _, file := range files {
		packed, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		page, err := gzip.NewReader(bytes.NewReader(packed))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range pageName.FindAllString(strings.ReplaceAll(string(text), `\-`, "-"), -1) {
			named[name] = true
		}
	}
	return named
}

// linksOf returns the files that a page of the top directory links to, but for the source code.
func linksOf(t *testing.T, page string) (links []string) {
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`).FindAllStringSubmatch(string(text), -1) {
		if !strings.HasPrefix(m[1], "conformance/") {
			links = append(links, m[1])
		}
	}
	return links
}

// TestCommit: what "make build" makes in a clone names the commit, also where Go is told to stamp none.
func TestCommit(t *testing.T) {
	clone := filepath.Join(t.TempDir(), "clone")
	run(t, "git", "clone", "--quiet", "../..", clone)
	if err := copyFile(filepath.Join(clone, "Makefile"), "../../Makefile"); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOFLAGS", "-buildvcs=false")
	run(t, "make", "--no-print-directory", "-C", clone, "build")
	head, err := exec.Command("git", "-C", clone, "rev-parse", "HEAD").Output()
	if err != nil {
		t.Fatal(err)
	}
	said, err := exec.Command(filepath.Join(clone, "bin/verdict"), "version").Output()
	want := "commit    " + strings.TrimSpace(string(head)) + " of "
	if err != nil || !strings.Contains(string(said), want) {
		t.Errorf("there is no %q (%v) in\n%s", want, err, said)
	}
}
