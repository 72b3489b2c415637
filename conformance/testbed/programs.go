package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Programs says where proxies and control plane come from.
type Programs struct {
	// Root is the directory of Verdict's sources, where programs are built.
	Root string
	// Ready is a directory that holds verdict and the real components under their own names. Empty means that they are
	// built.
	Ready string
}

// Sources finds the directory of Verdict's sources, which is dir or one above it; empty stands for the working
// directory.
func Sources(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "conformance", "peers", "build")); err == nil {
			return at, nil
		}
		if at == filepath.Dir(at) {
			return "", fmt.Errorf("--source: neither %s nor a directory above it holds Verdict's sources", dir)
		}
	}
}

// Peers gives the paths of real components. Building them takes minutes the first time.
func (p Programs) Peers(ctx context.Context, names ...string) ([]string, error) {
	if p.Ready != "" {
		return p.ready(names)
	}
	cmd := exec.CommandContext(ctx, filepath.Join(p.Root, "conformance", "peers", "build"), names...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("build %s: %w", strings.Join(names, ", "), err)
	}
	paths := strings.Fields(string(out))
	if len(paths) != len(names) {
		return nil, errors.New("conformance/peers/build printed other than one path for each name")
	}
	return paths, nil
}

// Archive writes Verdict's sources as they were at a commit into a directory.
func (p Programs) Archive(ctx context.Context, commit, dir string) error {
	const archive = `git -C "$1" archive "$2" | tar -x -C "$3"`
	script := exec.CommandContext(ctx, "sh", "-ec", archive, "sh", p.Root, commit, dir)
	if out, err := script.CombinedOutput(); err != nil {
		return fmt.Errorf("the sources of commit %.60q: %w: %s", commit, err, out)
	}
	return nil
}

func (p Programs) ready(names []string) (paths []string, err error) {
	for _, name := range names {
		path, err := exec.LookPath(filepath.Join(p.Ready, name))
		if err != nil {
			return nil, fmt.Errorf("--programs: %w", err)
		}
		paths = append(paths, path)
	}
	return paths, nil
}

func buildVerdict(ctx context.Context, from Programs, dir string) (string, error) {
	if from.Ready != "" {
		return first(from.ready([]string{"verdict"}))
	}
	binary := filepath.Join(dir, "bin", "verdict")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", binary, "./cmd/verdict")
	cmd.Dir, cmd.Env = from.Root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build verdict: %w: %s", err, out)
	}
	return binary, nil
}

// OldCommit is the oldest commit from which Verdict is upgraded in tests.
const OldCommit = "08c2c1a"

func buildOldVerdict(ctx context.Context, from Programs, dir string) (string, error) {
	if from.Ready != "" {
		return first(from.ready([]string{"verdict-old"}))
	}
	source := filepath.Join(dir, "old")
	if err := os.MkdirAll(source, 0o700); err != nil {
		return "", err
	}
	if err := from.Archive(ctx, OldCommit, source); err != nil {
		return "", err
	}
	return buildVerdict(ctx, Programs{Root: source}, source)
}

func first(paths []string, err error) (string, error) {
	if err != nil {
		return "", err
	}
	return paths[0], nil
}
