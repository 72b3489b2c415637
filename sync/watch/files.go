package watch

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Files is a source that reads manifests: YAML or JSON as kubectl prints and takes it, one object, many documents or
// lists. It reads Services, EndpointSlices, Endpoints, ServiceCIDRs and the Node with our name; other kinds are passed
// over, so that a dump of everything will do.
//
// What the API server would do to an object is done here too (namespace, defaults) except for allocating addresses and
// ports. Endpoints are read unless there are EndpointSlices for the same Service.
//
// A file that can't be read, or has a document that can't, is reported and what it said before stays in force, all of
// it. On first reading there is nothing before: then the good documents count. An object that is in two files is taken
// from the first by name. A file that is being written counts when its writer closes it. Changes made by other hosts on
// a file system they share with us are not noticed.
//
// If Path itself goes away everything stays in force until it is back; an empty directory or file means that there is
// nothing.
type Files struct {
	// Path is a file, or a directory whose *.yaml, *.yml and *.json are read; those that start with a dot or a hash mark
	// are not. Symbolic links are followed, as a mounted ConfigMap has them.
	Path string
	// NodeName is the name of the Node to read; empty means none.
	NodeName string
	// Report takes what is wrong, mostly a *Problem; nil drops it. Calls don't overlap.
	Report func(error)
}

// Changes are gathered until there was none for quiet, but never for longer than gather.
const (
	quiet  = 20 * time.Millisecond
	gather = 60 * time.Millisecond
)

// Run puts what the files say into sink, and then each change as it happens, until ctx is done; then it gives nil. It
// fails if Path, or every file of it, can't be read at the start, or if it can't be watched.
func (f *Files) Run(ctx context.Context, sink Sink) error {
	d := newFolder(f.Path, f.NodeName, quietly(f.Report))
	w, err := newInotify()
	if err != nil {
		return fmt.Errorf("watch %s: %w", f.Path, err)
	}
	defer w.close()
	d.follow(w)
	// Where nothing can be read, nothing is known: that there are no Services would be another thing.
	if err := CheckFiles(f.Path); err != nil {
		return err
	}
	if err := d.refresh(); err != nil {
		return err
	}
	d.tell(sink)
	sink.Synced()
	timer := time.NewTimer(0)
	<-timer.C
	var until time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case events, ok := <-w.events:
			if !ok {
				return fmt.Errorf("watch %s: %w", f.Path, w.err)
			}
			if !d.note(events) {
				continue
			}
			if until.IsZero() {
				until = time.Now().Add(gather)
			}
			timer.Reset(min(quiet, time.Until(until)))
		case <-timer.C:
			until = time.Time{}
			d.follow(w)
			d.once("lost", d.refresh(), "; what was there stays in force")
			d.tell(sink)
		}
	}
}

// CheckFiles says whether Files could read a path: it is a file that can be read, or a directory that is empty or has
// one. What the files hold is not looked at.
func CheckFiles(path string) error {
	d := newFolder(path, "", nil)
	dir, names, err := d.list()
	if err != nil {
		return fmt.Errorf("manifests: %s: %w", path, pathless(err))
	}
	d.dir = dir
	for _, name := range names {
		if _, err = readText(d.file(name), false); err == nil {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("manifests: %s: it can't be read: %w", path, pathless(err))
	}
	return nil
}

// Load reads what Files would, once; path may also be a pipe, such as /dev/stdin, which is read to its end. The errors
// in the list are problems of single files and objects, of which the snapshot has the rest. The last error says that
// path could not be read at all; then there is no snapshot.
func Load(path, nodeName string) (*snapshot.Snapshot, []error, error) {
	var problems []error
	d := newFolder(path, nodeName, func(err error) { problems = append(problems, err) })
	d.pipes = true
	if err := d.refresh(); err != nil {
		return nil, problems, err
	}
	s := snapshot.New()
	s.Apply(d.delta())
	return s, problems, nil
}

// folder is the state of a Files source: what each file said, what was told to the sink, and what has changed since.
type folder struct {
	path   string
	reader *reader
	report func(error)

	// files are by name. A Path that is a file is the only one, and has its base name.
	files map[string]*manifest
	said  *content
	// reported are the errors and conflicts that last and have been told.
	reported map[string]bool

	trail trail
	// dirty files are to be read again; all means every file, and the directory. Files in creating have been opened but
	// not closed by who writes them.
	dirty    map[string]bool
	all      bool
	creating map[string]bool
	// pipes says that a path that is a pipe is waited for.
	pipes bool
	// dir says that the path is a directory.
	dir bool
	// lost says that the path was not there when last looked at.
	lost bool
}

func newFolder(path, nodeName string, report func(error)) *folder {
	return &folder{
		path: path, reader: newReader(nodeName), report: report, all: true, said: &content{},
		files: map[string]*manifest{}, reported: map[string]bool{}, dirty: map[string]bool{}, creating: map[string]bool{},
	}
}

// isManifest says whether a file of a directory counts, by its name.
func isManifest(name string) bool {
	if name == "" || name[0] == '.' || name[0] == '#' {
		return false
	}
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return true
	}
	return false
}

// list gives the names of the files that are there, sorted.
func (d *folder) list() (dir bool, names []string, err error) {
	info, err := os.Stat(d.path)
	if err != nil {
		return false, nil, err
	}
	if !info.IsDir() {
		return false, []string{filepath.Base(d.path)}, nil
	}
	entries, err := os.ReadDir(d.path)
	for _, e := range entries {
		if isManifest(e.Name()) && !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return true, names, err
}

// refresh reads what has changed. An error means that the path can't be read; then nothing has changed.
func (d *folder) refresh() error {
	dir, names, err := d.list()
	if err != nil {
		d.all, d.lost = true, true
		clear(d.creating)
		return fmt.Errorf("manifests: %s: %w", d.path, pathless(err))
	}
	d.dir = dir
	if d.lost && len(names) == 0 {
		return nil // it has just come back, and its files are yet to come
	}
	d.lost = false
	for _, name := range names {
		if d.creating[name] && d.files[name] != nil || !d.all && !d.dirty[name] {
			continue
		}
		d.read(name, d.file(name))
	}
	maps.DeleteFunc(d.files, func(name string, _ *manifest) bool {
		_, there := slices.BinarySearch(names, name)
		return !there
	})
	d.all = false
	clear(d.dirty)
	return nil
}

// read reads one file.
func (d *folder) read(name, file string) {
	text, err := readText(file, d.pipes && !d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(file); err != nil {
			delete(d.files, name)
			return
		}
		err = errors.New("it is a link to nothing")
	}
	if err != nil {
		err = &Problem{File: file, Err: fmt.Errorf("it can't be read: %w", pathless(err))}
	}
	if d.once("read "+name, err, ""); err != nil {
		return
	}
	before := d.files[name]
	if before != nil && before.hash == maphash.String(d.reader.seed, text) {
		return
	}
	m, problems, bad := d.reader.manifest(file, text, before)
	for _, p := range problems {
		d.report(p)
	}
	if bad && before != nil {
		d.report(&Problem{File: file, Err: errors.New("what this file said before stays in force")})
		before.hash = m.hash
		return
	}
	d.files[name] = m
}

// once reports an error that may last the first time only, until it was nil once. The key says which error it is.
func (d *folder) once(key string, err error, and string) {
	if err == nil {
		delete(d.reported, key)
	} else if !d.reported[key] {
		d.reported[key] = true
		d.report(fmt.Errorf("%w%s", err, and))
	}
}

// pathless takes the path off an error that is about to be shown after it.
func pathless(err error) error {
	if p := (*fs.PathError)(nil); errors.As(err, &p) {
		return p.Err
	}
	return err
}

// readText reads a regular file; also a pipe, if we may wait for somebody who writes.
func readText(file string, pipes bool) (string, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() && !(pipes && info.Mode()&fs.ModeNamedPipe != 0) {
		return "", errors.New("it is not a regular file")
	}
	var b strings.Builder
	b.Grow(int(min(info.Size(), 1<<30)))
	_, err = io.Copy(&b, f)
	return b.String(), err
}

// content is what all files say together.
type content struct {
	services map[snapshot.Name]*snapshot.Service
	slices   map[snapshot.Name]*snapshot.Slice
	node     *snapshot.Node // nil if there is none
	cidrs    []netip.Prefix
}

// merge puts the files together. The first file by name wins, and within a file the first object.
func (d *folder) merge() *content {
	c := &content{services: map[snapshot.Name]*snapshot.Service{}, slices: map[snapshot.Name]*snapshot.Slice{}}
	owner := map[objectKey]string{}
	sliced := map[snapshot.Name]bool{} // the Services that have EndpointSlices
	endpoints := map[snapshot.Name][]*snapshot.Slice{}
	conflicts := map[string]bool{}
	var cidrs []*[]netip.Prefix
	for _, name := range slices.Sorted(maps.Keys(d.files)) {
		for _, o := range d.files[name].objects {
			if first, taken := owner[o.key]; taken {
				d.conflict(conflicts, o, name, first)
				continue
			}
			owner[o.key] = name
			switch v := o.value.(type) {
			case *snapshot.Service:
				if v != nil {
					c.services[v.Name] = v
				}
			case *snapshot.Slice:
				if v != nil {
					c.slices[v.Name] = v
					sliced[snapshot.Name{Namespace: v.Name.Namespace, Name: v.Service}] = true
				}
			case []*snapshot.Slice:
				endpoints[o.key.name] = v
			case *snapshot.Node:
				c.node = v
			case *[]netip.Prefix:
				cidrs = append(cidrs, v)
			}
		}
	}
	for service, list := range endpoints {
		for _, s := range list {
			if !sliced[service] {
				c.slices[s.Name] = s
			}
		}
	}
	c.cidrs = union(cidrs)
	maps.DeleteFunc(d.reported, func(key string, _ bool) bool {
		return strings.HasPrefix(key, "twice ") && !conflicts[key]
	})
	return c
}

// conflict reports an object that is there twice, unless that has been said. A dump given twice has as many as objects:
// the first few tell.
func (d *folder) conflict(conflicts map[string]bool, o object, name, first string) {
	if len(conflicts) >= maxProblems {
		return
	}
	object := objectName(o.key.kind, o.key.name)
	key := "twice " + object + " " + name
	conflicts[key] = true
	if !d.reported[key] {
		d.reported[key] = true
		err := fmt.Errorf("it is in %s already, which counts", d.file(first))
		d.report(&Problem{File: d.file(name), Line: o.line, Object: object, Err: err})
	}
}

// file gives the path of one of the files.
func (d *folder) file(name string) string {
	if d.dir {
		return filepath.Join(d.path, name)
	}
	return d.path
}

// tell puts what has changed into sink.
func (d *folder) tell(sink Sink) {
	if delta := d.delta(); !delta.Empty() {
		sink.Put(delta)
	}
}

// delta gives what the files say now and was not told yet.
func (d *folder) delta() snapshot.Delta {
	now := d.merge()
	before := d.said
	d.said = now
	delta := snapshot.Delta{
		Services: difference(before.services, now.services, sameService),
		Slices:   difference(before.slices, now.slices, sameSlice),
	}
	switch {
	case now.node == nil && before.node != nil:
		delta.Node = &snapshot.Node{}
	case now.node != nil && (before.node == nil || !sameNode(before.node, now.node)):
		delta.Node = now.node
	}
	if !slices.Equal(before.cidrs, now.cidrs) {
		delta.ServiceCIDRs = &now.cidrs
	}
	return delta
}

// difference gives what is new or other in now, and nil for what is gone.
func difference[T any](before, now map[snapshot.Name]*T, same func(a, b *T) bool) map[snapshot.Name]*T {
	changed := map[snapshot.Name]*T{}
	for n, v := range now {
		if old := before[n]; old == nil || !same(old, v) {
			changed[n] = v
		}
	}
	for n := range before {
		if now[n] == nil {
			changed[n] = nil
		}
	}
	return changed
}
