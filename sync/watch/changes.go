package watch

import (
	"context"
	"path/filepath"
	"slices"
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
	c := fileWatcher{path: path, last: statFile(path)}
	var err error
	var events <-chan []event
	if c.inotify, err = newInotify(); err == nil {
		defer c.inotify.close()
		events, err = c.inotify.events, c.rewatch()
	}
	if err != nil && report != nil {
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
		case list, ok := <-events:
			if !ok {
				events = nil
			} else if c.affected(list) {
				debounceTimer.Reset(debounce)
			}
		case <-ticker.C:
			if statFile(path) != c.last {
				debounceTimer.Reset(debounce)
			}
		case <-debounceTimer.C:
			_ = c.rewatch()
			c.last = statFile(path)
			changed()
		}
	}
}

type fileWatcher struct {
	path string
	// inotify is nil if there is none.
	inotify *inotify
	paths   watchedPaths
	last    fileState
}

// rewatch resolves the file's path again and watches all directories on the way.
func (c *fileWatcher) rewatch() error {
	if c.inotify == nil {
		return nil
	}
	c.paths = newWatchedPaths()
	path := absolute(c.path)
	c.paths.addFile(filepath.Base(path), path)
	err := c.inotify.add(c.paths.dirs)
	c.inotify.keep(c.paths.dirs)
	return err
}

// affected says whether events may concern the file.
func (c *fileWatcher) affected(events []event) bool {
	return slices.ContainsFunc(events, func(e event) bool {
		_, ours := c.paths.entries[e.dirEntry]
		return e.name == "" || ours && (e.mask&unix.IN_CREATE == 0 || !beingWritten(e.dirEntry))
	})
}

// fileState is what stat says about a file; zero if it says nothing.
type fileState struct {
	dev, ino uint64
	size     int64
	modified unix.Timespec
}

func statFile(path string) (s fileState) {
	var st unix.Stat_t
	if unix.Stat(path, &st) == nil {
		s = fileState{uint64(st.Dev), st.Ino, st.Size, st.Mtim}
	}
	return s
}
