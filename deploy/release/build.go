package main

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"
)

// binary returns the file of the program for an architecture.
func (r *release) binary(arch string) string { return filepath.Join(r.out, "verdict-linux-"+arch) }

// binaries builds the program, static, for each architecture.
func (r *release) binaries() error {
	const variable = "github.com/verdict-proxy/verdict/internal/node.release"
	for _, arch := range arches {
		env := []string{"GOOS=linux", "GOARCH=" + arch, "GOAMD64=v1", "GOARM64=v8.0"}
		if _, err := r.outputWith(env, "go", "build", "-trimpath", "-buildvcs=true",
			"-ldflags=-s -w -X "+variable+"="+r.version, "-o", r.binary(arch), "./cmd/verdict"); err != nil {
			return err
		}
	}
	return nil
}

// completions are the files of each shell's completion in the stage.
var completions = map[string]string{"bash": "verdict", "zsh": "_verdict", "fish": "verdict.fish"}

// documents stages manual pages, completions, the unit and the example of a configuration, and packs them into an
// archive for those who use no package.
func (r *release) documents() error {
	man := filepath.Join(r.stage, "man")
	if err := os.MkdirAll(man, 0o755); err != nil {
		return err
	}
	if _, err := r.output("go", "run", "-tags", "man", "./cmd/verdict", man); err != nil {
		return err
	}
	for shell, name := range completions {
		text, err := r.output("go", "run", "./cmd/verdict", "completion", shell)
		if err != nil {
			return err
		}
		if err := r.put("completions/"+name, []byte(text)); err != nil {
			return err
		}
	}
	for name, source := range map[string]string{
		"verdict.service": "deploy/systemd/verdict.service",
		"config.conf":     "deploy/systemd/config.conf",
		"manifests.conf":  "deploy/systemd/manifests.conf",
		"services.yaml":   "deploy/systemd/services.yaml",
		"CHANGELOG.md":    "CHANGELOG.md",
		"LICENSE":         "LICENSE",
	} {
		text, err := os.ReadFile(filepath.Join(r.tree, source))
		if err != nil {
			return err
		}
		if err := r.put(name, text); err != nil {
			return err
		}
	}
	return cmp.Or(r.archive("verdict-extras.tar.gz", os.DirFS(r.stage)), r.docs())
}

// docs stages the pages and what they lead a user to, as in the repository, and packs them into an archive. Help and
// manual pages name them as docs/NAME.md.
func (r *release) docs() error {
	list, err := r.output("git", "ls-files", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs",
		"examples", "deploy/helm", "deploy/kustomize", "deploy/systemd")
	if err != nil {
		return err
	}
	for path := range strings.Lines(list) {
		path = strings.TrimSuffix(path, "\n")
		text, err := os.ReadFile(filepath.Join(r.tree, path))
		if err != nil {
			return err
		}
		if err := r.put("doc/"+path, text); err != nil {
			return err
		}
	}
	return r.archive("verdict-docs.tar.gz", os.DirFS(filepath.Join(r.stage, "doc")))
}

// put writes a file into the stage.
func (r *release) put(name string, text []byte) error {
	path := filepath.Join(r.stage, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o644)
}
