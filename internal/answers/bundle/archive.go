// Package bundle writes archives for bug reports: what a node, or all nodes, say of themselves, without secrets and, if
// that is asked for, without addresses.
package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"
)

const (
	// maxFile bounds a file of an archive, and maxFiles how many files of a node are taken over.
	maxFile  = 8 << 20
	maxFiles = 64
)

// Part is one file of a node: what it holds is what Write writes. An error of it is noted in the archive.
type Part struct {
	Name  string
	Write func(ctx context.Context, w io.Writer) error
}

// Archive is a tar archive, compressed. Make one with New.
type Archive struct {
	zip *gzip.Writer
	tar *tar.Writer
	// addresses, if not nil, replaces addresses.
	addresses *addresses
	// missing says what is not in the archive, and why.
	missing []string
	now     time.Time
	// most is maxFile, but for tests.
	most int
}

// New begins an archive.
func New(w io.Writer, noAddresses bool) *Archive {
	a := &Archive{zip: gzip.NewWriter(w), now: time.Now(), most: maxFile}
	if a.tar = tar.NewWriter(a.zip); noAddresses {
		a.addresses = newAddresses()
	}
	return a
}

// Add adds a file, cut at maxFile bytes, without secrets.
func (a *Archive) Add(name string, text []byte) error {
	if len(text) > a.most {
		text = fmt.Appendf(text[:a.most:a.most], "\n[cut after %d KiB]\n", a.most>>10)
	}
	return a.add(name, withoutSecrets(text))
}

// add adds a file without secrets.
func (a *Archive) add(name string, text []byte) error {
	if a.addresses != nil {
		text, name = a.addresses.replace(text), string(a.addresses.replace([]byte(name)))
	}
	h := &tar.Header{Name: name, Mode: 0o600, Size: int64(len(text)), ModTime: a.now, Typeflag: tar.TypeReg}
	if err := a.tar.WriteHeader(h); err != nil {
		return err
	}
	_, err := a.tar.Write(text)
	return err
}

// Lacks notes what is not in the archive, and why.
func (a *Archive) Lacks(what string, why error) {
	a.missing = append(a.missing, fmt.Sprintf("%s: %v", what, why))
}

// Missing says what is not in the archive.
func (a *Archive) Missing() []string { return a.missing }

// AddParts adds files below a directory, one after another.
func (a *Archive) AddParts(ctx context.Context, dir string, parts []Part) error {
	for _, p := range parts {
		b := &bounded{most: a.most}
		err := p.Write(ctx, b)
		if err != nil && !errors.Is(err, errFull) {
			a.Lacks(path.Join(dir, p.Name), err)
		}
		if b.Len() == 0 {
			continue
		}
		if err := a.Add(path.Join(dir, p.Name), b.Bytes()); err != nil {
			return err
		}
	}
	return nil
}

// AddArchive adds the files of another Archive below a directory.
func (a *Archive) AddArchive(dir string, packed []byte) error {
	zip, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return err
	}
	from := tar.NewReader(zip)
	for range maxFiles {
		h, err := from.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		text, err := io.ReadAll(io.LimitReader(from, maxFile+1024))
		if err != nil {
			return err
		}
		if err := a.add(path.Join(dir, path.Base(h.Name)), text); err != nil {
			return err
		}
	}
	return fmt.Errorf("it has more than %d files", maxFiles)
}

// Close adds what is missing, and ends the archive.
func (a *Archive) Close() error {
	if len(a.missing) > 0 {
		if err := a.Add("missing.txt", []byte(strings.Join(a.missing, "\n")+"\n")); err != nil {
			return err
		}
	}
	return errors.Join(a.tar.Close(), a.zip.Close())
}

// errFull ends what writes more than fits into a file.
var errFull = errors.New("the file is full")

// bounded keeps a little more than fits into a file.
type bounded struct {
	bytes.Buffer
	most int
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.Len() > b.most {
		return 0, errFull
	}
	return b.Buffer.Write(p)
}
