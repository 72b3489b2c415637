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

// Files is a source that reads manifests: YAML or JSON as kubectl prints and accepts it, one object, many documents or
// lists. It reads Services, EndpointSlices, Endpoints, ServiceCIDRs and the Node with our name. It skips other kinds,
// so a dump of everything will do.
//
// It applies what the API server would do to an object (namespace, defaults), except for allocating addresses and
// ports. Endpoints are read unless there are EndpointSlices for the same Service.
//
// If a file cannot be read, or one of its documents cannot, the file is reported and its last good version stays in
// force as a whole. On first reading there is no such version: then the valid documents count. If an object is in two
// files, the first file by name wins. A file that is being written counts when its writer closes it. Changes that other
// hosts make on a shared file system are not noticed.
//
// If Path itself disappears, everything stays in force until it is back. An empty directory or file means that there is
// nothing.
type Files struct {
	// Path is a file, or a directory whose *.yaml, *.yml and *.json are read; those that start with a dot or a hash mark
	// are not. Symbolic links are followed, as a mounted ConfigMap has them.
	Path string
	// NodeName is the name of the Node to read; empty means none.
	NodeName string
	// Report gets errors, mostly a *Problem; nil drops them. Calls do not overlap.
	Report func(error)
	// Notice gets what went well after the start, in a sentence: changes that were passed on, and files that can be used
	// again. Nil drops it.
	Notice func(string)
}

// A refresh starts when there was no change for debounce, at the latest after maxDebounce.
const (
	debounce    = 20 * time.Millisecond
	maxDebounce = 60 * time.Millisecond
)

// Run puts the content of the files into sink, and then each change as it happens, until ctx is done; then it returns
// nil. It fails if Path, or every file of it, cannot be read at the start, or if it cannot be watched.
func (f *Files) Run(ctx context.Context, sink Sink) error {
	d := newManifestDir(f.Path, f.NodeName, serialized(f.Report))
	if f.Notice != nil {
		d.notice = f.Notice
	}
	w, err := newInotify()
	if err != nil {
		return fmt.Errorf("watch %s: %w", f.Path, err)
	}
	defer w.close()
	d.rewatch(w)
	// If nothing can be read, nothing is known. That is not the same as having no Services.
	if err := CheckFiles(f.Path); err != nil {
		return err
	}
	if err := d.refresh(); err != nil {
		return err
	}
	d.publish(sink)
	sink.Synced()
	timer := time.NewTimer(0)
	<-timer.C
	var deadline time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case events, ok := <-w.events:
			if !ok {
				return fmt.Errorf("watch %s: %w", f.Path, w.err)
			}
			if !d.handleEvents(events) {
				continue
			}
			if deadline.IsZero() {
				deadline = time.Now().Add(maxDebounce)
			}
			timer.Reset(min(debounce, time.Until(deadline)))
		case <-timer.C:
			deadline = time.Time{}
			d.rewatch(w)
			d.reportOnce("lost", d.path, d.refresh(), "; the last good version stays in force")
			if delta := d.publish(sink); !delta.Empty() {
				d.notice("applying changed manifests: " + deltaText(&delta))
			}
		}
	}
}

// CheckFiles says whether Files could read a path: a readable file, or a directory that is empty or has a readable
// file. It does not look at the content of files.
func CheckFiles(path string) error {
	d := newManifestDir(path, "", nil)
	dir, names, err := d.listFiles()
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
		return fmt.Errorf("manifests: %s: cannot read it: %w", path, pathless(err))
	}
	return nil
}

// Load reads once what Files would. Path may also be a pipe, such as /dev/stdin, which is read to its end. The listed
// errors are problems of single files and objects; the snapshot has the rest. If path cannot be read at all, the last
// error is set and the snapshot is nil.
func Load(path, nodeName string) (*snapshot.Snapshot, []error, error) {
	var problems []error
	d := newManifestDir(path, nodeName, func(err error) { problems = append(problems, err) })
	d.pipes = true
	if err := d.refresh(); err != nil {
		return nil, problems, err
	}
	s := snapshot.New()
	s.Apply(d.delta())
	return s, problems, nil
}

// manifestDir is the state of a Files source: the content of each file, what was published to the sink, and what has
// changed since.
type manifestDir struct {
	path   string
	reader *reader
	report func(error)
	notice func(string)

	// files are keyed by name. A Path that is a file is the only one, and has its base name.
	files     map[string]*manifest
	published *content
	// reported holds the errors and conflicts that persist and have been reported.
	reported map[string]bool

	paths watchedPaths
	// dirty files are to be read again; allDirty means every file, and the directory. Files in creating have been opened
	// but not closed by their writer.
	dirty    map[string]bool
	allDirty bool
	creating map[string]bool
	// pipes allows a path that is a pipe, and waits for it.
	pipes bool
	// dir says that the path is a directory.
	dir bool
	// missing says that the path did not exist at the last refresh.
	missing bool
}

func newManifestDir(path, nodeName string, report func(error)) *manifestDir {
	return &manifestDir{
		path: path, reader: newReader(nodeName), report: report, notice: func(string) {}, allDirty: true,
		published: &content{},
		files:     map[string]*manifest{}, reported: map[string]bool{}, dirty: map[string]bool{}, creating: map[string]bool{},
	}
}

// isManifest says whether a file of a directory is read, by its name.
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

// listFiles returns the names of the existing files, sorted.
func (d *manifestDir) listFiles() (dir bool, names []string, err error) {
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

// refresh reads what has changed. An error means that the path cannot be read; then nothing has changed.
func (d *manifestDir) refresh() error {
	dir, names, err := d.listFiles()
	if err != nil {
		d.allDirty, d.missing = true, true
		clear(d.creating)
		return fmt.Errorf("manifests: %s: %w", d.path, pathless(err))
	}
	d.dir = dir
	if d.missing && len(names) == 0 {
		return nil // the directory has just been created again, and its files are yet to come
	}
	d.missing = false
	for _, name := range names {
		if d.creating[name] && d.files[name] != nil || !d.allDirty && !d.dirty[name] {
			continue
		}
		d.read(name, d.file(name))
	}
	maps.DeleteFunc(d.files, func(name string, _ *manifest) bool {
		_, there := slices.BinarySearch(names, name)
		return !there
	})
	d.allDirty = false
	clear(d.dirty)
	return nil
}

// read reads one file.
func (d *manifestDir) read(name, file string) {
	text, err := readText(file, d.pipes && !d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(file); err != nil {
			delete(d.files, name)
			return
		}
		err = errors.New("dangling symbolic link")
	}
	if err != nil {
		err = &Problem{File: file, Err: fmt.Errorf("cannot read it: %w", pathless(err))}
	}
	if d.reportOnce("read "+name, file, err, ""); err != nil {
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
		d.report(&Problem{File: file, Err: errors.New("the last good version of this file stays in force")})
		before.hash, before.bad = m.hash, true
		return
	}
	if before != nil {
		kept, mended := m.keepGood(before)
		if before.bad {
			d.notice(file + " is valid again")
			mended = nil // which says as much
		}
		for _, object := range mended {
			d.notice(file + ": " + object + " is valid again")
		}
		for _, object := range kept {
			d.report(&Problem{File: file, Object: object,
				Err: errors.New("the last good version of this object stays in force")})
		}
	}
	d.files[name] = m
}

// reportOnce reports an error about a path once, until it was nil in between, which it reports too. The key identifies
// the error.
func (d *manifestDir) reportOnce(key, path string, err error, suffix string) {
	if err == nil {
		if d.reported[key] {
			d.notice(path + " can be read again")
		}
		delete(d.reported, key)
	} else if !d.reported[key] {
		d.reported[key] = true
		d.report(fmt.Errorf("%w%s", err, suffix))
	}
}

// pathless removes the path from an error, for messages that show it already.
func pathless(err error) error {
	if p := (*fs.PathError)(nil); errors.As(err, &p) {
		return p.Err
	}
	return err
}

// readText reads a regular file, and also a pipe if pipes is set.
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
		return "", errors.New("not a regular file")
	}
	var b strings.Builder
	b.Grow(int(min(info.Size(), 1<<30)))
	_, err = io.Copy(&b, f)
	return b.String(), err
}

// content is the merged content of all files.
type content struct {
	services map[snapshot.Name]*snapshot.Service
	slices   map[snapshot.Name]*snapshot.Slice
	node     *snapshot.Node // nil if there is none
	cidrs    []netip.Prefix
}

// merge merges the files. The first file by name wins, and within a file the first object.
func (d *manifestDir) merge() *content {
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
	c.cidrs = mergePrefixes(cidrs)
	maps.DeleteFunc(d.reported, func(key string, _ bool) bool {
		return strings.HasPrefix(key, "twice ") && !conflicts[key]
	})
	return c
}

// conflict reports a duplicate object, unless it was reported before. It reports only the first few: a copied dump has
// as many as objects.
func (d *manifestDir) conflict(conflicts map[string]bool, o object, name, first string) {
	if len(conflicts) >= maxProblems {
		return
	}
	object := objectName(o.key.kind, o.key.name)
	key := "twice " + object + " " + name
	conflicts[key] = true
	if !d.reported[key] {
		d.reported[key] = true
		err := fmt.Errorf("duplicate: the one in %s counts", d.file(first))
		d.report(&Problem{File: d.file(name), Line: o.line, Object: object, Err: err})
	}
}

// file returns the path of one of the files.
func (d *manifestDir) file(name string) string {
	if d.dir {
		return filepath.Join(d.path, name)
	}
	return d.path
}

// publish puts what has changed into sink, and returns it.
func (d *manifestDir) publish(sink Sink) snapshot.Delta {
	delta := d.delta()
	if !delta.Empty() {
		sink.Put(delta)
	}
	return delta
}

// deltaText says how many objects changed, and names the Services if they are few.
func deltaText(delta *snapshot.Delta) string {
	const few = 3
	var parts []string
	count := func(n int, kind string) {
		if n > 1 {
			kind += "s"
		}
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, kind))
		}
	}
	if n := len(delta.Services); n > 0 && n <= few {
		for _, name := range slices.SortedFunc(maps.Keys(delta.Services), snapshot.Name.Compare) {
			parts = append(parts, objectName("Service", name))
		}
	} else {
		count(n, "Service")
	}
	count(len(delta.Slices), "EndpointSlice")
	if delta.Node != nil {
		parts = append(parts, "the Node")
	}
	if delta.ServiceCIDRs != nil {
		parts = append(parts, "ServiceCIDRs")
	}
	return strings.Join(parts, ", ")
}

// delta returns what was not published yet.
func (d *manifestDir) delta() snapshot.Delta {
	now := d.merge()
	before := d.published
	d.published = now
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

// difference returns what is new or changed in now, and nil for what is gone.
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
