package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb" // registers the format
	_ "github.com/goreleaser/nfpm/v2/rpm" // registers the format
)

// packages makes a deb and an rpm for each architecture, of what nfpm.yaml says.
func (r *release) packages() error {
	if err := cmp.Or(r.packUnit(), r.packPages()); err != nil {
		return err
	}
	for _, arch := range arches {
		for _, format := range []string{"deb", "rpm"} {
			if err := r.pack(format, arch); err != nil {
				return fmt.Errorf("the %s for %s: %w", format, arch, err)
			}
		}
	}
	return nil
}

func (r *release) pack(format, arch string) error {
	variables := map[string]string{"VERSION": r.version, "ARCH": arch, "BINARY": r.binary(arch), "STAGE": r.stage}
	config, err := nfpm.ParseFileWithEnvMapping("nfpm.yaml", func(name string) string { return variables[name] })
	if err != nil {
		return err
	}
	info, err := config.Get(format)
	if err != nil {
		return err
	}
	info.MTime = r.date
	info = nfpm.WithDefaults(info)
	packager, err := nfpm.Get(format)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if err := packager.Package(info, &out); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, packager.ConventionalFileName(info)), out.Bytes(), 0o644)
}

// packUnit stages the unit for the place of the program in a package, without the words on how to install it by hand.
func (r *release) packUnit() error {
	text, err := os.ReadFile(filepath.Join(r.stage, "verdict.service"))
	if err != nil {
		return err
	}
	_, unit, found := strings.Cut(string(text), "[Unit]\n")
	if !found || !strings.Contains(unit, "/usr/local/sbin/verdict ") {
		return fmt.Errorf("verdict.service does not begin as expected, or does not run /usr/local/sbin/verdict")
	}
	unit = "[Unit]\n" + strings.ReplaceAll(unit, "/usr/local/sbin/verdict ", "/usr/bin/verdict ")
	return r.put("package/verdict.service", []byte(unit))
}

// packPages stages the manual pages as distributions compress them.
func (r *release) packPages() error {
	pages, err := filepath.Glob(filepath.Join(r.stage, "man/*.1"))
	if err != nil {
		return err
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			return err
		}
		var out bytes.Buffer
		packed, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
		if err != nil {
			return err
		}
		_, err = packed.Write(text)
		if err := cmp.Or(err, packed.Close(), r.put("package/man/"+filepath.Base(page)+".gz", out.Bytes())); err != nil {
			return err
		}
	}
	return nil
}
