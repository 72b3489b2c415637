package watch

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// inotify watches directories for changes. fsnotify does not fit here because it hides the event that says when a file
// is complete. Without that event, a large file that is still being written would be read half-way, and half a list of
// Services is a valid list.
type inotify struct {
	fd   int
	file *os.File
	// events is closed when reading fails; then err says why.
	events chan []event
	err    error
	done   chan struct{}

	mu sync.Mutex
	// dirs are the directories that are watched, by the number of the watch, and latest the number that each had last.
	dirs   map[int]string
	latest map[string]int
}

// event is a change of a name in a directory. An empty name stands for the directory itself, or for lost events.
type event struct {
	dirEntry
	mask uint32
}

// dirEntry is an entry of a directory, given without symbolic links.
type dirEntry struct {
	dir, name string
}

// A write is reported only when it is finished, by CLOSE_WRITE. CREATE is for links; ATTRIB for files that become
// readable.
const inotifyMask = unix.IN_CLOSE_WRITE | unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
	unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

func newInotify() (*inotify, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w (fs.inotify.max_user_instances is the limit)", err)
	}
	w := &inotify{
		fd: fd, file: os.NewFile(uintptr(fd), "inotify"), events: make(chan []event), done: make(chan struct{}),
		dirs: map[int]string{}, latest: map[string]int{},
	}
	go w.read()
	return w, nil
}

// close stops reading; no event comes after it.
func (w *inotify) close() {
	close(w.done)
	w.file.Close()
}

// add watches further directories. It skips those that do not exist or are not readable, and returns the first other
// error. It takes as long as their file systems take to answer.
func (w *inotify) add(dirs map[string]bool) error {
	var first error
	for dir, needed := range dirs {
		wd, err := unix.InotifyAddWatch(w.fd, dir, inotifyMask)
		switch {
		case err == nil:
			w.mu.Lock()
			w.dirs[wd], w.latest[dir] = dir, wd
			w.mu.Unlock()
		case errors.Is(err, fs.ErrNotExist) || err == unix.ENOTDIR || errors.Is(err, fs.ErrPermission) && !needed:
		case first == nil:
			first = fmt.Errorf("cannot watch %s: %w (fs.inotify.max_user_watches is the limit)", dir, err)
		}
	}
	return first
}

// keep watches no other directories than these, each as it was added last.
func (w *inotify) keep(dirs map[string]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for wd, dir := range w.dirs {
		if _, wanted := dirs[dir]; !wanted || w.latest[dir] != wd {
			unix.InotifyRmWatch(w.fd, uint32(wd)) // fails if the directory is gone already
			delete(w.dirs, wd)
		}
	}
	maps.DeleteFunc(w.latest, func(dir string, wd int) bool { return w.dirs[wd] != dir })
}

func (w *inotify) read() {
	defer close(w.events)
	buf := make([]byte, 64<<10)
	for {
		n, err := w.file.Read(buf)
		if err != nil {
			w.err = err
			return
		}
		select {
		case w.events <- w.parse(buf[:n]):
		case <-w.done:
			return
		}
	}
}

// parse reads struct inotify_event (inotify(7)): wd, mask, cookie and len, 32 bits each, then a name padded with zeros.
func (w *inotify) parse(b []byte) []event {
	w.mu.Lock()
	defer w.mu.Unlock()
	var events []event
	for len(b) >= unix.SizeofInotifyEvent {
		wd, mask := int(int32(binary.NativeEndian.Uint32(b))), binary.NativeEndian.Uint32(b[4:])
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
		name := strings.TrimRight(string(b[unix.SizeofInotifyEvent:end]), "\x00")
		b = b[end:]
		dir, known := w.dirs[wd]
		switch {
		case mask&unix.IN_Q_OVERFLOW != 0:
			events = append(events, event{mask: mask})
		case mask&unix.IN_IGNORED != 0:
			delete(w.dirs, wd)
		case known:
			events = append(events, event{dirEntry{dir, name}, mask})
		}
	}
	return events
}

// watchedPaths holds the path, its files and everything that leads to them.
type watchedPaths struct {
	// entries are the directory entries whose change matters: those on the way, with an empty string, and the files
	// themselves with the name they are read by.
	entries map[dirEntry]string
	// folder is the directory of the path if it is one, without symbolic links.
	folder string
	// dirs are the directories to watch. True is for those without which changes of a file would be missed.
	dirs map[string]bool
	// err says why they cannot be watched.
	err error
}

func newWatchedPaths() watchedPaths {
	return watchedPaths{entries: map[dirEntry]string{}, dirs: map[string]bool{}}
}

// maxLinks is how many symbolic links the kernel follows in one path (path_resolution(7)).
const maxLinks = 40

// resolve records each step to path and returns where it ends: at the target of the path, or at the first missing step.
func (t *watchedPaths) resolve(path string) (dirEntry, bool) {
	rest := strings.Split(path, "/")
	dir, last := "/", dirEntry{"/", ""}
	for links := 0; len(rest) > 0; {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			dir = filepath.Dir(dir)
			continue
		}
		last = dirEntry{dir, name}
		if _, known := t.entries[last]; !known {
			t.entries[last] = ""
		}
		if !t.dirs[dir] {
			t.dirs[dir] = false
		}
		full := filepath.Join(dir, name)
		info, err := os.Lstat(full)
		if err != nil {
			return last, false
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			dir = full
			continue
		}
		target, err := os.Readlink(full)
		if links++; err != nil || links > maxLinks {
			return last, false
		}
		if strings.HasPrefix(target, "/") {
			dir = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return last, true
}

// addFile records the way to a file, and the file itself by its name.
func (t *watchedPaths) addFile(name, path string) {
	at, ok := t.resolve(path)
	t.dirs[at.dir] = true
	if ok {
		t.entries[at] = name
	}
}

// several is the name of a file that is read by several names.
const several = "/"

// merge adds what another one holds.
func (t *watchedPaths) merge(o *watchedPaths) {
	for at, name := range o.entries {
		switch before := t.entries[at]; {
		case before == "" || before == name:
			t.entries[at] = name
		case name != "":
			t.entries[at] = several
		}
	}
	for dir, needed := range o.dirs {
		t.dirs[dir] = t.dirs[dir] || needed
	}
	t.err = cmp.Or(t.err, o.err)
}

// watch watches paths. Call it before reading: a later change makes an event.
func (d *manifestDir) watch(t *watchedPaths) {
	if d.watcher != nil {
		t.err = d.watcher.add(t.dirs)
	}
}

// rewatch takes note of all that leads to the files, and ends the watching of what does no longer, unless somebody may
// have begun to watch it.
func (d *manifestDir) rewatch() {
	if d.watcher == nil || d.listed == nil {
		return
	}
	t := newWatchedPaths()
	t.folder = d.listed.paths.folder
	t.merge(&d.listed.paths)
	for _, way := range d.ways {
		t.merge(way)
	}
	if d.paths = t; d.hanging.Load() == 0 {
		d.watcher.keep(t.dirs)
	}
	d.reportOnce("watch", d.path, t.err, "")
}

// handleEvents marks changed files as dirty and says whether there is something to read.
func (d *manifestDir) handleEvents(events []event) bool {
	for _, e := range events {
		if e.name == "" {
			d.allDirty = true
			clear(d.creating)
			continue
		}
		name, ok := d.paths.entries[e.dirEntry]
		switch {
		case !ok && (e.dir != d.paths.folder || !isManifest(e.name)):
			continue
		case !ok:
			name = e.name
		case name == "" || name == several:
			d.allDirty = true
			continue
		}
		switch {
		case e.mask&unix.IN_CREATE != 0 && beingWritten(e.dirEntry):
			d.creating[name] = true
		case e.mask&unix.IN_ATTRIB != 0 && d.creating[name]:
		default:
			delete(d.creating, name)
			d.dirty[name] = true
		}
	}
	return d.allDirty || len(d.dirty) > 0
}

// beingWritten says whether a new entry is a file that somebody has opened to write and will close. Links are complete
// as they are.
func beingWritten(p dirEntry) bool {
	info, err := os.Lstat(filepath.Join(p.dir, p.name))
	if err != nil || !info.Mode().IsRegular() {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && st.Nlink == 1
}
