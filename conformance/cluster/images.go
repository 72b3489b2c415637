package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// WorkloadImage is the image of the tests' own, from conformance/cmd/workload. Without arguments it holds a pod's
// namespaces, in place of the image called pause.
const WorkloadImage = "localhost/workload:dev"

// loadWorkload builds the image of the tests' own and gives it to the nodes.
func (c *Cluster) loadWorkload(ctx context.Context) error {
	c.Log("building the image of the tests")
	dir := c.file("workload")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	sources := filepath.Join(c.from.Root, "conformance")
	if err := build(ctx, sources, filepath.Join(dir, "workload"), "./cmd/workload"); err != nil {
		return err
	}
	return c.loadImage(ctx, WorkloadImage, dir, "FROM scratch\nCOPY workload /workload\nENTRYPOINT [\"/workload\"]\n")
}

// LoadVerdict builds Verdict's image from the sources in a directory, by the Dockerfile there, and gives it to the
// nodes.
func (c *Cluster) LoadVerdict(ctx context.Context, sources, image string) error {
	c.Log("building the image %s", image)
	dir, err := os.MkdirTemp("", "verdict-image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := build(ctx, sources, filepath.Join(dir, "verdict"), "./cmd/verdict"); err != nil {
		return err
	}
	file, err := os.ReadFile(filepath.Join(sources, "Dockerfile"))
	if err != nil {
		return err
	}
	last, err := lastStage(string(file))
	if err != nil {
		return err
	}
	return c.loadImage(ctx, image, dir, last)
}

var stage = regexp.MustCompile(`(?m)^FROM `)

// lastStage returns the Dockerfile with the stage "build" replaced by one that takes the program as it is, and without
// the stages that need an image of others: they cannot be had without a registry.
func lastStage(dockerfile string) (string, error) {
	at := stage.FindAllStringIndex(dockerfile, -1)
	if len(at) == 0 {
		return "", errors.New("the Dockerfile has no stage")
	}
	last := dockerfile[at[len(at)-1][0]:]
	if !strings.HasPrefix(last, "FROM scratch ") {
		return "", errors.New("the Dockerfile's last stage does not begin with FROM scratch")
	}
	return "FROM scratch AS build\nCOPY verdict /verdict\n" + last, nil
}

// build builds a static program of ours.
func build(ctx context.Context, dir, target, pkg string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-p", "2", "-ldflags", "-s -w", "-o", target, pkg)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s in %s: %w: %s", pkg, dir, err, out)
	}
	return nil
}

// loadImage builds an image without a daemon, and gives it to containerd on every node.
func (c *Cluster) loadImage(ctx context.Context, image, dir, dockerfile string) error {
	work, err := os.MkdirTemp("", "verdict-buildah-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	file, archive := filepath.Join(work, "Dockerfile"), filepath.Join(work, "image.tar")
	if err := os.WriteFile(file, []byte(dockerfile), 0o644); err != nil {
		return err
	}
	buildah := []string{"--storage-driver", "vfs", "--root", filepath.Join(work, "root"),
		"--runroot", filepath.Join(work, "run")}
	_, err = run(ctx, "buildah", append(buildah, "bud", "--isolation", "chroot", "-f", file, "-t", image, dir)...)
	if err != nil {
		return err
	}
	_, err = run(ctx, "buildah", append(buildah, "push", image, "docker-archive:"+archive+":"+image)...)
	if err != nil {
		return err
	}
	for _, n := range c.Nodes {
		// The node sees the file at the same place.
		if _, err := n.Exec(ctx, "ctr", "--namespace", "k8s.io", "images", "import", archive); err != nil {
			return err
		}
	}
	return nil
}
