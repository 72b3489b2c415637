package main

import (
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
)

// image makes an OCI archive of the Dockerfile's default image for all architectures, with the programs built before.
// So the base image that builds the program is not needed. It is skipped where there is no buildah.
func (r *release) image() error {
	if _, err := exec.LookPath("buildah"); err != nil {
		log.Print("no image is made: there is no buildah here")
		return nil
	}
	name := "docker.io/verdict/verdict:" + r.version
	storage := []string{"--storage-driver=vfs", "--root=" + r.stage + "/images", "--runroot=" + r.stage + "/run"}
	buildah := func(args ...string) error {
		_, err := r.output("buildah", append(storage[:len(storage):len(storage)], args...)...)
		return err
	}
	for _, arch := range arches {
		context := filepath.Join(r.stage, "image-"+arch)
		if err := os.Mkdir(context, 0o755); err != nil {
			return err
		}
		if err := copyFile(filepath.Join(context, "verdict"), r.binary(arch)); err != nil {
			return err
		}
		if err := buildah("build", "--quiet", "--file=Dockerfile", "--target=nft", "--platform=linux/"+arch,
			"--build-context=build="+context, "--build-arg=VERSION="+r.version,
			fmt.Sprintf("--timestamp=%d", r.date.Unix()), "--manifest="+name, context); err != nil {
			return err
		}
	}
	layout := filepath.Join(r.stage, "oci")
	if err := buildah("manifest", "push", "--quiet", "--all", name, "oci:"+layout+":"+r.version); err != nil {
		return err
	}
	return r.archive("verdict-image.tar", os.DirFS(layout))
}
