// Release makes everything of a release that needs no registry, from a commit: the same commit and the same Go give the
// same bytes. "make release" runs it.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/semver"
)

// arches are the architectures of a release, by their names in Go.
var arches = []string{"amd64", "arm64"}

// release is one release under way.
type release struct {
	// version is that of the tag, such as v0.2.0.
	version string
	// tree is the repository's top directory, out that of the result, and stage that of what goes into packages.
	tree, out, stage string
	// date is the commit's: everything made is of that date.
	date time.Time
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("release: ")
	var r release
	flag.StringVar(&r.version, "version", "", "the version, such as v0.2.0")
	flag.StringVar(&r.tree, "tree", "../..", "the repository's top directory")
	flag.StringVar(&r.out, "out", "../../bin/release", "the directory for the result, which is emptied first")
	flag.Parse()
	if err := r.run(); err != nil {
		log.Fatal(err)
	}
}

func (r *release) run() error {
	if err := r.check(); err != nil {
		return err
	}
	stage, err := os.MkdirTemp("", "verdict-release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(stage)
	r.stage = stage
	if err := cmp.Or(os.RemoveAll(r.out), os.MkdirAll(r.out, 0o755)); err != nil {
		return err
	}
	for _, step := range []func() error{
		r.binaries, r.documents, r.packages, r.chart, r.krew, r.components, r.image, r.sums,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	log.Printf("made %s in %s", r.version, r.out)
	return nil
}

// check completes r, and refuses what would not be a release of one commit.
func (r *release) check() error {
	if semver.Canonical(r.version) != r.version || r.version == "" {
		return fmt.Errorf("the version %q is not like v0.2.0", r.version)
	}
	var err error
	if r.tree, err = filepath.Abs(r.tree); err != nil {
		return err
	}
	if r.out, err = filepath.Abs(r.out); err != nil {
		return err
	}
	// In a worktree, .git is a file, and the go command writes no commit into the programs.
	if info, err := os.Stat(filepath.Join(r.tree, ".git")); err != nil || !info.IsDir() {
		return fmt.Errorf("%s is not the top of a clone: make the release in one (git clone)", r.tree)
	}
	changes, err := r.output("git", "status", "--porcelain")
	if err != nil {
		return err
	}
	if changes != "" {
		return fmt.Errorf("the tree has changes that are not committed:\n%s", changes)
	}
	seconds, err := r.output("git", "log", "-1", "--format=%ct")
	if err != nil {
		return err
	}
	epoch, err := strconv.ParseInt(strings.TrimSpace(seconds), 10, 64)
	if err != nil {
		return err
	}
	r.date = time.Unix(epoch, 0).UTC()
	changelog, err := os.ReadFile(filepath.Join(r.tree, "CHANGELOG.md"))
	if err == nil && !strings.Contains(string(changelog), "\n## "+r.version+" ") {
		err = fmt.Errorf("CHANGELOG.md has no section %s", r.version)
	}
	return err
}

// output runs a command in the tree, and returns what it prints. The environment gets the variables env ("K=V") and
// the commit's date; flags for the go command do not count.
func (r *release) output(program string, args ...string) (string, error) {
	return r.outputWith(nil, program, args...)
}

func (r *release) outputWith(env []string, program string, args ...string) (string, error) {
	cmd := exec.Command(program, args...)
	cmd.Dir = r.tree
	cmd.Env = append(os.Environ(), "GOFLAGS=", "CGO_ENABLED=0", fmt.Sprintf("SOURCE_DATE_EPOCH=%d", r.date.Unix()))
	cmd.Env = append(cmd.Env, env...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err)
	}
	return string(out), nil
}
