package main

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// archive writes all files of a file system into an archive of the release, which it compresses if the name ends in gz.
// It keeps names and contents; the owner is root, and the date the commit's.
func (r *release) archive(name string, files fs.FS) error {
	file, err := os.Create(filepath.Join(r.out, name))
	if err != nil {
		return err
	}
	defer file.Close()
	if !strings.HasSuffix(name, ".gz") {
		return cmp.Or(r.writeTar(file, files), file.Close())
	}
	packed := gzip.NewWriter(file)
	return cmp.Or(r.writeTar(packed, files), packed.Close(), file.Close())
}

func (r *release) writeTar(to io.Writer, files fs.FS) error {
	out := tar.NewWriter(to)
	err := fs.WalkDir(files, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := fs.ReadFile(files, path)
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		mode := int64(0o644)
		if info.Mode()&0o100 != 0 {
			mode = 0o755
		}
		if err := out.WriteHeader(&tar.Header{Name: path, Mode: mode, Size: int64(len(text)), ModTime: r.date}); err != nil {
			return err
		}
		_, err = out.Write(text)
		return err
	})
	return cmp.Or(err, out.Close())
}

// krew packs the program as a plugin of kubectl, and fills krew's manifest with the archives' sums.
func (r *release) krew() error {
	manifest, err := os.ReadFile(filepath.Join(r.tree, "deploy/krew/verdict.yaml"))
	if err != nil {
		return err
	}
	text := string(manifest[strings.Index(string(manifest), "apiVersion:"):])
	for _, arch := range arches {
		dir := filepath.Join(r.stage, "krew-"+arch)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		err := cmp.Or(os.Link(filepath.Join(r.stage, "LICENSE"), filepath.Join(dir, "LICENSE")),
			copyFile(filepath.Join(dir, "kubectl-verdict"), r.binary(arch)))
		if err != nil {
			return err
		}
		name := "kubectl-verdict-linux-" + arch + ".tar.gz"
		if err := r.archive(name, os.DirFS(dir)); err != nil {
			return err
		}
		sum, err := sumOf(filepath.Join(r.out, name))
		if err != nil {
			return err
		}
		if text, err = fillKrew(text, name, sum); err != nil {
			return err
		}
	}
	text = strings.ReplaceAll(text, "VERSION", r.version)
	return os.WriteFile(filepath.Join(r.out, "krew-verdict.yaml"), []byte(text), 0o644)
}

// fillKrew returns the manifest with the sum of one archive.
func fillKrew(manifest, archive, sum string) (string, error) {
	before, after, found := strings.Cut(manifest, archive+"\n    sha256: SHA256\n")
	if !found {
		return "", fmt.Errorf("deploy/krew/verdict.yaml has no place for the sum of %s", archive)
	}
	return before + archive + "\n    sha256: " + sum + "\n" + after, nil
}

func copyFile(to, from string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, text, 0o755)
}

// sumOf returns the SHA-256 of a file, in hexadecimal.
func sumOf(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	sum := sha256.New()
	_, err = io.Copy(sum, file)
	return fmt.Sprintf("%x", sum.Sum(nil)), err
}

// sums lists the sums of everything else, as sha256sum --check reads them.
func (r *release) sums() error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, entry := range entries {
		sum, err := sumOf(filepath.Join(r.out, entry.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&text, "%s  %s\n", sum, entry.Name())
	}
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS"), []byte(text.String()), 0o644)
}
