package watch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// Bounds of reading.
const (
	// maxManifest is how many bytes a file or a pipe may have.
	maxManifest = 128 << 20
	// maxHanging bounds the questions to file systems that are not answered, since each may hold a thread. maxRepeated is
	// the bound at which none is asked again.
	maxHanging, maxRepeated = 256, 16
)

// A file system has patience to answer before others are asked, and a pipe may say nothing for pipePatience. What could
// not be read is tried again as often as patience ends.
const patience, pipePatience = 10 * time.Second, time.Minute

// slow says that a file system has not answered for this long.
type slow time.Duration

func (s slow) Error() string { return fmt.Sprintf("no answer within %v", time.Duration(s)) }

// question is one to a file system. It may never be answered: a network file system hangs, /proc/kmsg waits for the
// kernel. So each has a goroutine, and nobody waits for it for ever. Value and err are valid when done is closed.
type question[T any] struct {
	done  chan struct{}
	value T
	err   error
}

func (q *question[T]) answered() bool {
	select {
	case <-q.done:
		return true
	default:
		return false
	}
}

// ask asks a question.
func ask[T any](f *fileSystems, answer func() (T, error)) *question[T] {
	q := &question[T]{done: make(chan struct{})}
	f.hanging.Add(1)
	go func() {
		q.value, q.err = answer()
		f.hanging.Add(-1)
		close(q.done)
	}()
	return q
}

// fileSystems is what is known of the file systems that are asked.
type fileSystems struct {
	hanging atomic.Int32
	// patience is that of the constant, but in tests. Left is how long to wait for the next answer: it halves with each
	// that does not come, so that many files that hang do not hold up the others for long.
	patience, left time.Duration
}

// mayAsk reports whether there may be one more question; again says that an earlier one like it is not answered.
func (f *fileSystems) mayAsk(again bool) bool {
	return f.hanging.Load() < maxRepeated || !again && f.hanging.Load() < maxHanging
}

// wait waits for an answer.
func (f *fileSystems) wait(ctx context.Context, done <-chan struct{}) error {
	timer := time.NewTimer(f.left)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		f.left = max(f.left/2, f.patience/256)
		return slow(f.patience)
	}
}

// listing is what a path holds.
type listing struct {
	// dir and pipe say what the path is. Names are the files of a directory, or the only one, sorted; folders are the
	// directories in it.
	dir, pipe      bool
	names, folders []string
	// paths lead to the path.
	paths watchedPaths
}

// fileText is the text of a file, and what leads to it.
type fileText struct {
	text  string
	paths watchedPaths
}

// list lists the files.
func (d *manifestDir) list(ctx context.Context) (*listing, error) {
	d.left = d.patience
	if d.listing == nil || d.listing.answered() || d.mayAsk(true) {
		d.listing = ask(&d.fileSystems, d.look)
	}
	if err := d.wait(ctx, d.listing.done); err != nil {
		return nil, err
	}
	l, err := &d.listing.value, d.listing.err
	if d.listing, d.listed = nil, l; err != nil {
		return nil, err
	}
	if d.dir = l.dir; l.pipe {
		d.left = 1 << 62 // its reader is patient enough
	}
	return l, nil
}

// look looks what the path holds, and watches it before. It runs in a goroutine of its own.
func (d *manifestDir) look() (l listing, err error) {
	l.paths = newWatchedPaths()
	at, ok := l.paths.resolve(absolute(d.path))
	l.paths.dirs[at.dir] = true
	info, err := os.Stat(d.path)
	if l.dir = ok && err == nil && info.IsDir(); l.dir {
		l.paths.folder = filepath.Join(at.dir, at.name)
		l.paths.dirs[at.dir], l.paths.dirs[l.paths.folder] = false, true
	}
	d.watch(&l.paths)
	if err != nil {
		return l, err
	}
	if !l.dir {
		l.pipe = d.pipes && info.Mode()&fs.ModeNamedPipe != 0
		l.names = []string{filepath.Base(d.path)}
		return l, nil
	}
	entries, err := os.ReadDir(d.path)
	for _, e := range entries {
		switch {
		case e.IsDir() && e.Name()[0] != '.': // the kubelet has ..data beside the files of a ConfigMap
			l.folders = append(l.folders, e.Name())
		case isManifest(e.Name()):
			l.names = append(l.names, e.Name())
		}
	}
	return l, err
}

func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}

// text reads a file. One that is being read already is read again only if it is new: then it may be another one.
func (d *manifestDir) text(ctx context.Context, name string, fresh bool) (string, error) {
	q, file := d.reading[name], d.file(name)
	if q == nil || fresh && d.mayAsk(true) {
		if !d.mayAsk(q != nil) {
			return "", errors.New("too many files do not answer")
		}
		path, idle, pipes := filepath.Join(d.listed.paths.folder, name), d.patience, d.pipes && !d.dir
		if !d.dir {
			path = absolute(file)
		}
		q = ask(&d.fileSystems, func() (t fileText, err error) {
			t.paths = newWatchedPaths()
			t.paths.addFile(name, path)
			d.watch(&t.paths)
			t.text, err = readText(file, idle, pipes)
			return t, err
		})
		d.reading[name] = q
	}
	if before, hangs := d.unread[name].Err.(slow); hangs && !q.answered() {
		return "", before // it may answer while nobody waits
	}
	if err := d.wait(ctx, q.done); err != nil {
		return "", err
	}
	delete(d.reading, name)
	paths := q.value.paths // a pointer into the answer would keep the text in memory, too
	d.ways[name] = &paths
	return q.value.text, q.err
}

// readText reads a regular file, and also a pipe if pipes is set. Idle is how long bytes may stay away.
func readText(file string, idle time.Duration, pipes bool) (string, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	pipe := pipes && info.Mode()&fs.ModeNamedPipe != 0
	switch {
	case pipe:
		idle = pipePatience
	case !info.Mode().IsRegular():
		return "", errors.New("not a regular file")
	}
	var b strings.Builder
	if info.Size() <= maxManifest {
		b.Grow(int(info.Size()))
		_, err = io.Copy(&b, io.LimitReader(impatient{f, idle}, maxManifest+1))
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "", slow(idle)
	case max(info.Size(), int64(b.Len())) > maxManifest:
		return "", fmt.Errorf("it has more than %d MiB: split it into several files", maxManifest>>20)
	}
	if pipe && b.Len() == 0 && err == nil {
		err = errors.New("nothing comes out of this pipe")
	}
	return b.String(), err
}

// impatient reads a file whose bytes may come late, such as those of a pipe or of /proc/kmsg.
type impatient struct {
	file *os.File
	idle time.Duration
}

func (r impatient) Read(b []byte) (int, error) {
	_ = r.file.SetReadDeadline(time.Now().Add(r.idle)) // a file on a disk has none
	return r.file.Read(b)
}
