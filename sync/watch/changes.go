package watch

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// lookEvery is how often a file is looked at where nobody tells of changes: inotify knows nothing of what other hosts
// do on a file system they share with us.
const lookEvery = 10 * time.Second

// Changes calls changed after each change of a file, until ctx is done. What leads to the file is followed too: a
// mounted ConfigMap is a link to a link, of which the second one is replaced. A file that is being written counts when
// its writer closes it. Changed is called once at the start, when it is made sure that no later change is missed; it
// may also be called for no reason.
//
// Report is told, once, if changes are only noticed by looking now and then; nil drops that.
func Changes(ctx context.Context, path string, changed func(), report func(error)) {
	c := changes{path: path, last: look(path)}
	w, err := newInotify()
	if err != nil {
		if report != nil {
			report(err)
		}
		c.poll(ctx, changed)
		return
	}
	defer w.close()
	if err := c.follow(w); err != nil && report != nil {
		report(err)
	}
	changed()
	quietly := time.NewTimer(0)
	<-quietly.C
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case events, ok := <-w.events:
			if !ok {
				c.poll(ctx, changed)
				return
			}
			if c.concern(events) {
				quietly.Reset(quiet)
			}
		case <-ticker.C:
			if now := look(path); now != c.last {
				quietly.Reset(quiet)
			}
		case <-quietly.C:
			_ = c.follow(w)
			c.last = look(path)
			changed()
		}
	}
}

type changes struct {
	path  string
	trail trail
	last  looks
}

// follow finds out again where the file lies, and watches that.
func (c *changes) follow(w *inotify) error {
	c.trail = trail{places: map[place]string{}, dirs: map[string]bool{}}
	path, err := filepath.Abs(c.path)
	if err != nil {
		path = c.path
	}
	c.trail.file(filepath.Base(path), path)
	return w.set(c.trail.dirs)
}

// concern says whether events may have to do with the file.
func (c *changes) concern(events []event) bool {
	for _, e := range events {
		if e.name == "" {
			return true
		}
		_, ours := c.trail.places[e.place]
		if ours && (e.mask&unix.IN_CREATE == 0 || !beingWritten(e.place)) {
			return true
		}
	}
	return false
}

// poll only looks now and then.
func (c *changes) poll(ctx context.Context, changed func()) {
	changed()
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if now := look(c.path); now != c.last {
				c.last = now
				changed()
			}
		}
	}
}

// looks are what a file looks like from outside.
type looks struct {
	dev, ino    uint64
	size, mtime int64
}

func look(path string) looks {
	info, err := os.Stat(path)
	if err != nil {
		return looks{}
	}
	l := looks{size: info.Size(), mtime: info.ModTime().UnixNano()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		l.dev, l.ino = uint64(st.Dev), st.Ino
	}
	return l
}
