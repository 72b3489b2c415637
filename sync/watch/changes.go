package watch

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pollInterval is how often a file is checked in addition to inotify, which does not report what other hosts do on a
// shared file system.
const pollInterval = 10 * time.Second

// Changes calls changed after each change of a file, until ctx is done. It follows symbolic links: a mounted ConfigMap
// is a link to a link, of which the second one is replaced. A file that is being written counts when its writer closes
// it. Changes calls changed once at the start, when no later change can be missed any more. It may also call changed
// without need.
//
// Report gets an error once if changes are only noticed by polling; nil drops it.
func Changes(ctx context.Context, path string, changed func(), report func(error)) {
	watcher := fileWatcher{path: path, last: statFile(path)}
	w, err := newInotify()
	if err != nil {
		if report != nil {
			report(err)
		}
		watcher.poll(ctx, changed)
		return
	}
	defer w.close()
	if err := watcher.rewatch(w); err != nil && report != nil {
		report(err)
	}
	changed()
	debounceTimer := time.NewTimer(0)
	<-debounceTimer.C
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case events, ok := <-w.events:
			if !ok {
				watcher.poll(ctx, changed)
				return
			}
			if watcher.affected(events) {
				debounceTimer.Reset(debounce)
			}
		case <-ticker.C:
			if now := statFile(path); now != watcher.last {
				debounceTimer.Reset(debounce)
			}
		case <-debounceTimer.C:
			_ = watcher.rewatch(w)
			watcher.last = statFile(path)
			changed()
		}
	}
}

type fileWatcher struct {
	path  string
	paths watchedPaths
	last  fileState
}

// rewatch resolves the file's path again and watches all directories on the way.
func (c *fileWatcher) rewatch(w *inotify) error {
	c.paths = newWatchedPaths()
	path := absolute(c.path)
	c.paths.addFile(filepath.Base(path), path)
	err := w.add(c.paths.dirs)
	w.keep(c.paths.dirs)
	return err
}

// affected says whether events may concern the file.
func (c *fileWatcher) affected(events []event) bool {
	for _, e := range events {
		if e.name == "" {
			return true
		}
		_, ours := c.paths.entries[e.dirEntry]
		if ours && (e.mask&unix.IN_CREATE == 0 || !beingWritten(e.dirEntry)) {
			return true
		}
	}
	return false
}

// poll checks the file at intervals, without inotify.
func (c *fileWatcher) poll(ctx context.Context, changed func()) {
	changed()
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if now := statFile(c.path); now != c.last {
				c.last = now
				changed()
			}
		}
	}
}

// fileState is what stat says about a file.
type fileState struct {
	dev, ino    uint64
	size, mtime int64
}

func statFile(path string) fileState {
	info, err := os.Stat(path)
	if err != nil {
		return fileState{}
	}
	l := fileState{size: info.Size(), mtime: info.ModTime().UnixNano()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		l.dev, l.ino = uint64(st.Dev), st.Ino
	}
	return l
}
