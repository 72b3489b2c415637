package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Files is a source that reads manifests: YAML or JSON as kubectl prints and accepts it, one object, many documents or
// lists. It reads Services, EndpointSlices, Endpoints, ServiceCIDRs and the Node with our name. It skips other kinds,
// so a dump of everything will do.
//
// It applies what the API server would do to an object (namespace, defaults), except for allocating addresses and
// ports. Endpoints count unless there are EndpointSlices for the same Service; it says of each file that it has such.
//
// If a file cannot be read, or one of its documents cannot, the file is reported and its last good version stays in
// force as a whole. On first reading there is no such version: then the valid documents count. If an object is in two
// files, the first file by name wins. A file that is being written counts when its writer closes it. Changes that other
// hosts make on a shared file system are not noticed.
//
// If Path itself disappears, everything stays in force until it is back. An empty directory or file means that there is
// nothing. A file that is too large, or whose file system does not answer, is one that cannot be read: the others
// count, and it is tried again.
type Files struct {
	// Path is a file, or a directory whose *.yaml, *.yml and *.json are read; those that start with a dot or a hash mark
	// are not. Symbolic links are followed, as a mounted ConfigMap has them.
	Path string
	// NodeName is the name of the Node to read; empty means none.
	NodeName string
	// Nodes, if not nil, gets the addresses of all other Nodes, by name, before the objects: once, and whenever they
	// differ. Without it, other Nodes are not read. The map is not changed afterwards.
	Nodes func(map[string][]netip.Addr)
	// Report gets errors, mostly a *Problem; nil drops them. Calls do not overlap.
	Report func(error)
	// Notice gets what went well after the start, in a sentence: changes that were passed on, and files that can be used
	// again. Nil drops it.
	Notice func(string)

	mu     sync.Mutex
	unread []Unread
	// patience is that of the constant of this name, but in tests.
	patience time.Duration
}

// Unread is a file that cannot be read, or the path of all files.
type Unread struct {
	File  string
	Err   error
	Since time.Time
}

// Unread returns what cannot be read now, sorted by name. It is safe for concurrent use.
func (f *Files) Unread() []Unread {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.unread
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
	d.patience = cmp.Or(f.patience, patience)
	if f.Nodes != nil {
		d.reader.nodeName, d.others = anyNode, f.Nodes
	}
	if f.Notice != nil {
		d.notice = f.Notice
	}
	w, err := newInotify()
	if err != nil {
		return fmt.Errorf("watch %s: %w", f.Path, err)
	}
	defer w.close()
	d.watcher = w
	// If nothing can be read, nothing is known. That is not the same as having no Services.
	if err := cmp.Or(d.refresh(ctx), d.nothingRead()); err != nil {
		return unlessDone(ctx, err)
	}
	f.setUnread(d)
	d.publish(sink)
	sink.Synced()
	return f.follow(ctx, d, sink)
}

// unlessDone returns an error, but not that of a context that is done.
func unlessDone(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// follow waits for changes and applies them.
func (f *Files) follow(ctx context.Context, d *manifestDir, sink Sink) error {
	timer := time.NewTimer(0)
	<-timer.C
	retry := time.NewTicker(d.patience)
	defer retry.Stop()
	var deadline time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case events, ok := <-d.watcher.events:
			if !ok {
				return fmt.Errorf("watch %s: %w", f.Path, d.watcher.err)
			}
			if !d.handleEvents(events) {
				continue
			}
			if deadline.IsZero() {
				deadline = time.Now().Add(maxDebounce)
			}
			timer.Reset(min(debounce, time.Until(deadline)))
			continue
		case <-retry.C:
			if len(d.unread) == 0 {
				continue
			}
		case <-timer.C:
			deadline = time.Time{}
		}
		err := d.refresh(ctx)
		if ctx.Err() != nil {
			return nil
		}
		d.reportOnce("lost", d.path, err, "; the last good version stays in force")
		f.setUnread(d)
		if delta := d.publish(sink); !delta.Empty() {
			d.notice("applying changed manifests: " + deltaText(&delta))
		}
	}
}

// setUnread publishes what cannot be read.
func (f *Files) setUnread(d *manifestDir) {
	var list []Unread
	for _, name := range slices.Sorted(maps.Keys(d.unread)) {
		list = append(list, d.unread[name])
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unread = list
}

// CheckFiles says whether Files could read a path: a readable file, or a directory that is empty or has a readable
// file. It does not look at the content of files.
func CheckFiles(ctx context.Context, path string) error {
	d := newManifestDir(path, "", nil)
	l, err := d.list(ctx)
	if err != nil {
		return fmt.Errorf("manifests: %s: %w", path, pathless(err))
	}
	for _, left := range [...]time.Duration{d.patience / 16, d.patience} { // one that hangs may have others behind it
		d.left = left
		for _, name := range l.names {
			if _, err = d.text(ctx, name, false); err == nil {
				return nil
			}
		}
	}
	return d.unreadable(err)
}

// Load reads once what Files would. Path may also be a pipe, such as /dev/stdin, which is read to its end. The listed
// errors are problems of single files and objects; the snapshot has the rest. If nothing of path can be read, the last
// error is set and the snapshot is nil.
func Load(ctx context.Context, path, nodeName string) (*snapshot.Snapshot, []error, error) {
	s, _, problems, err := LoadNodes(ctx, path, nodeName, false)
	return s, problems, err
}

// LoadNodes is Load; with all, it also returns the addresses of the other Nodes, by name.
func LoadNodes(ctx context.Context, path, nodeName string, all bool) (s *snapshot.Snapshot,
	nodes map[string][]netip.Addr, problems []error, err error) {
	d := newManifestDir(path, nodeName, func(err error) { problems = append(problems, err) })
	d.pipes = true
	if all {
		d.reader.nodeName = anyNode
	}
	if err := cmp.Or(d.refresh(ctx), d.nothingRead()); err != nil {
		return nil, nil, nil, err
	}
	s = snapshot.New()
	s.Apply(d.delta())
	return s, d.published.others, problems, nil
}

// manifestDir is the state of a Files source: the content of each file, what was published to the sink, and what has
// changed since.
type manifestDir struct {
	path string
	// nodeName is Files.NodeName, and others Files.Nodes.
	nodeName string
	others   func(map[string][]netip.Addr)
	reader   *reader
	report   func(error)
	notice   func(string)
	// watcher is nil if the files are read only once.
	watcher *inotify
	fileSystems

	// listing and reading are questions that are not answered yet, reading by name; listed is the last answer. Ways lead
	// to the files, by name.
	listing *question[listing]
	listed  *listing
	reading map[string]*question[fileText]
	ways    map[string]*watchedPaths
	// unread are the files that cannot be read, by name, and the path itself, as the empty name.
	unread map[string]Unread

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
	// folders is what was said of directories that are not read.
	folders string
}

func newManifestDir(path, nodeName string, report func(error)) *manifestDir {
	return &manifestDir{
		path: path, nodeName: nodeName, reader: newReader(nodeName), report: report, notice: func(string) {}, allDirty: true,
		published:   &content{},
		fileSystems: fileSystems{patience: patience},
		files:       map[string]*manifest{}, reported: map[string]bool{}, dirty: map[string]bool{},
		creating: map[string]bool{}, reading: map[string]*question[fileText]{}, ways: map[string]*watchedPaths{},
		unread: map[string]Unread{},
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

// refresh reads what has changed, and what could not be read. An error means that the path cannot be read; then nothing
// has changed.
func (d *manifestDir) refresh(ctx context.Context) error {
	l, err := d.list(ctx)
	if err != nil {
		d.allDirty, d.missing = true, true
		clear(d.creating)
		d.setUnread("", d.path, err)
		d.rewatch()
		return fmt.Errorf("manifests: %s: %w", d.path, pathless(err))
	}
	d.setUnread("", d.path, nil)
	if d.missing && len(l.names) == 0 {
		d.rewatch()
		return nil // the directory has just been created again, and its files are yet to come
	}
	d.missing = false
	for _, name := range l.names {
		if d.creating[name] && d.files[name] != nil || !d.toRead(name) {
			continue
		}
		if d.read(ctx, name); ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	d.forget(l.names)
	d.noticeFolders(l.folders)
	d.allDirty = false
	clear(d.dirty)
	d.rewatch()
	return nil
}

// toRead says whether a file is to be read: it may have changed, could not be read, or was read late.
func (d *manifestDir) toRead(name string) bool {
	_, unread := d.unread[name]
	return d.allDirty || d.dirty[name] || unread
}

// forget forgets all files but these.
func (d *manifestDir) forget(names []string) {
	gone := func(name string) bool {
		_, there := slices.BinarySearch(names, name)
		return !there
	}
	maps.DeleteFunc(d.files, func(name string, _ *manifest) bool { return gone(name) })
	maps.DeleteFunc(d.unread, func(name string, _ Unread) bool { return gone(name) })
	maps.DeleteFunc(d.reading, func(name string, _ *question[fileText]) bool { return gone(name) })
	maps.DeleteFunc(d.ways, func(name string, _ *watchedPaths) bool { return gone(name) })
}

// noticeFolders says once which directories of the path are not read.
func (d *manifestDir) noticeFolders(names []string) {
	const few = 3
	if len(names) == 0 {
		return
	}
	text := short(names[0])
	for i, name := range names[1:] {
		if i == few {
			text += fmt.Sprintf(" and %d more", len(names)-1-i)
			break
		}
		text += ", " + short(name)
	}
	if text = d.path + ": directories in it are not read: " + text; text != d.folders {
		d.folders = text
		d.notice(text)
	}
}

// setUnread takes note of whether a file, or the path itself, can be read.
func (d *manifestDir) setUnread(name, file string, err error) {
	if err == nil {
		delete(d.unread, name)
		return
	}
	since := time.Now()
	if before, known := d.unread[name]; known {
		since = before.Since
	}
	d.unread[name] = Unread{file, pathless(err), since}
}

// nothingRead returns an error if there are files and none can be read.
func (d *manifestDir) nothingRead() error {
	if len(d.files) > 0 {
		return nil
	}
	for _, u := range d.unread {
		return d.unreadable(u.Err)
	}
	return nil
}

func (d *manifestDir) unreadable(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("manifests: %s: cannot read it: %w", d.path, pathless(err))
}

// read reads one file.
func (d *manifestDir) read(ctx context.Context, name string) {
	text, ok := d.readText(ctx, name)
	before := d.files[name]
	if !ok || before != nil && before.hash == maphash.String(d.reader.seed, text) {
		return
	}
	file, last := d.file(name), before.byKey()
	m, problems, bad := d.reader.manifest(file, text, before, last)
	for _, p := range problems {
		d.report(p)
	}
	if bad && before != nil {
		d.report(&Problem{File: file, Err: errors.New("the last good version of this file stays in force")})
		before.hash, before.bad = m.hash, true
		return
	}
	if before != nil {
		kept, mended := m.keepGood(last)
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

// readText returns the text of a file. It is not ok if the file cannot be read, which is reported, or is gone.
func (d *manifestDir) readText(ctx context.Context, name string) (text string, ok bool) {
	file := d.file(name)
	text, err := d.text(ctx, name, d.allDirty || d.dirty[name])
	if ctx.Err() != nil {
		return "", false
	}
	if errors.Is(err, fs.ErrNotExist) {
		if _, gone := os.Lstat(file); gone != nil {
			delete(d.files, name)
			delete(d.unread, name)
			return "", false
		}
		err = errors.New("dangling symbolic link")
	}
	d.setUnread(name, file, err)
	if err != nil {
		err = &Problem{File: file, Err: fmt.Errorf("cannot read it: %w", pathless(err))}
	}
	d.reportOnce("read "+name, file, err, "")
	return text, err == nil
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

// content is the merged content of all files.
type content struct {
	services map[snapshot.Name]*snapshot.Service
	slices   map[snapshot.Name]*snapshot.Slice
	node     *snapshot.Node // nil if there is none
	others   map[string][]netip.Addr
	cidrs    []netip.Prefix
}

// merge merges the files. The first file by name wins, and within a file the first object.
func (d *manifestDir) merge() *content {
	c := &content{services: map[snapshot.Name]*snapshot.Service{}, slices: map[snapshot.Name]*snapshot.Slice{},
		others: map[string][]netip.Addr{}}
	owner := map[objectKey]place{}
	endpoints := map[string][]*object{} // by file
	conflicts := map[string]bool{}
	var cidrs []*[]netip.Prefix
	for _, name := range slices.Sorted(maps.Keys(d.files)) {
		for _, o := range d.files[name].objects {
			if first, taken := owner[o.key]; taken {
				d.conflict(conflicts, o, name, first)
				continue
			}
			owner[o.key] = place{d.file(name), o.line}
			switch v := o.value.(type) {
			case *snapshot.Service:
				if v != nil {
					c.services[v.Name] = v
				}
			case *snapshot.Slice:
				if v != nil {
					c.slices[v.Name] = v
				}
			case []*snapshot.Slice:
				if len(v) > 0 {
					endpoints[name] = append(endpoints[name], &o)
				}
			case *snapshot.Node:
				if v.Name == d.nodeName {
					c.node = v
				} else {
					c.others[v.Name] = v.Addresses
				}
			case *[]netip.Prefix:
				cidrs = append(cidrs, v)
			}
		}
	}
	d.addEndpoints(c, endpoints, conflicts)
	c.cidrs = mergePrefixes(cidrs)
	maps.DeleteFunc(d.reported, func(key string, _ bool) bool {
		return (strings.HasPrefix(key, "twice ") || strings.HasPrefix(key, "shadowed ")) && !conflicts[key]
	})
	return c
}

// addEndpoints adds the Endpoints objects of each file to the content, but for Services that have EndpointSlices.
func (d *manifestDir) addEndpoints(c *content, endpoints map[string][]*object, conflicts map[string]bool) {
	sliced := make(map[snapshot.Name]bool, len(c.slices))
	for name, s := range c.slices {
		sliced[snapshot.Name{Namespace: name.Namespace, Name: s.Service}] = true
	}
	for _, name := range slices.Sorted(maps.Keys(endpoints)) {
		var ignored []*object
		for _, o := range endpoints[name] {
			if sliced[o.key.name] {
				ignored = append(ignored, o)
				continue
			}
			for _, s := range o.value.([]*snapshot.Slice) {
				c.slices[s.Name] = s
			}
		}
		d.shadowed(conflicts, name, ignored)
	}
}

// place is where an object stands.
type place struct {
	file string
	line int
}

func (p place) String() string { return fmt.Sprintf("%s:%d", p.file, p.line) }

// conflict reports a duplicate object, unless it was reported before. It reports only the first few: a copied dump has
// as many as objects.
func (d *manifestDir) conflict(conflicts map[string]bool, o object, name string, first place) {
	if len(conflicts) >= maxProblems {
		return
	}
	object := objectName(o.key.kind, o.key.name)
	if d.once(conflicts, "twice "+object+" "+name) {
		err := fmt.Errorf("duplicate: the one in %v counts", first)
		d.report(&Problem{File: d.file(name), Line: o.line, Object: object, Err: err})
	}
}

// once notes a conflict, and reports whether it is new.
func (d *manifestDir) once(conflicts map[string]bool, key string) bool {
	known := d.reported[key]
	conflicts[key], d.reported[key] = true, true
	return !known
}

// shadowed reports Endpoints of a file that do not count, once for the file: a dump has as many as Services.
func (d *manifestDir) shadowed(conflicts map[string]bool, name string, of []*object) {
	if len(of) == 0 || len(conflicts) >= maxProblems || !d.once(conflicts, "shadowed "+name) {
		return
	}
	more := ""
	if n := len(of) - 1; n > 0 {
		more = fmt.Sprintf("; the same holds for %d more Endpoints of this file", n)
	}
	d.report(&Problem{File: d.file(name), Line: of[0].line, Object: objectName(of[0].key.kind, of[0].key.name),
		Err: fmt.Errorf("ignored: the Service has EndpointSlices, which count%s", more), Warning: true})
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
	before := d.published.others
	delta := d.delta()
	if now := d.published.others; d.others != nil && (before == nil || !maps.EqualFunc(before, now, slices.Equal)) {
		d.others(now)
	}
	if !delta.Empty() {
		sink.Put(delta)
	}
	return delta
}

// deltaText says how many objects changed and how many are gone, and names the Services if they are few.
func deltaText(delta *snapshot.Delta) string {
	const few = 3
	var parts []string
	count := func(n int, kind, is string) {
		if n > 1 {
			kind += "s"
		}
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s%s", n, kind, is))
		}
	}
	const gone = " removed"
	changed, removed := tally(delta.Services)
	if len(delta.Services) > few {
		count(changed, "Service", "")
		count(removed, "Service", gone)
	} else {
		for _, name := range slices.SortedFunc(maps.Keys(delta.Services), snapshot.Name.Compare) {
			text := objectName("Service", name)
			if delta.Services[name] == nil {
				text += gone
			}
			parts = append(parts, text)
		}
	}
	changed, removed = tally(delta.Slices)
	count(changed, "EndpointSlice", "")
	count(removed, "EndpointSlice", gone)
	if delta.Node != nil {
		parts = append(parts, "the Node")
	}
	if delta.ServiceCIDRs != nil {
		parts = append(parts, "ServiceCIDRs")
	}
	return strings.Join(parts, ", ")
}

// tally counts the objects that changed and those that are gone.
func tally[T any](objects map[snapshot.Name]*T) (changed, removed int) {
	for _, o := range objects {
		if o == nil {
			removed++
		}
	}
	return len(objects) - removed, removed
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
