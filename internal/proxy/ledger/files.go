package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// A ledger has segmentsKept segments, of which the oldest goes when a new one begins.
const segmentsKept = 8

// errSegmentFull says that a record needs a new segment.
var errSegmentFull = errors.New("ledger: the segment is full")

// files are the segments that a Writer writes. It is not safe for concurrent use.
type files struct {
	dir  string
	most int64

	// file is the last segment, at path; size is its length, and total that of all.
	file        *os.File
	path        string
	size, total int64
	// number and sum are those of the last record, and missing counts those that could not be written after it.
	number  uint64
	sum     string
	missing uint64
}

// segment is how long a segment becomes.
func (f *files) segment() int64 { return f.most / segmentsKept }

// open continues the last segment of the directory. A line that is not complete is cut off: its writer ended in the
// middle.
func (f *files) open() error {
	if f.file != nil {
		_ = f.file.Close() // the error that matters has been reported
		f.file = nil
	}
	if err := f.makeDir(); err != nil {
		return err
	}
	list, err := segments(f.dir)
	if err != nil {
		return err
	}
	f.total = 0
	for _, file := range list {
		if info, err := os.Stat(file); err == nil {
			f.total += info.Size()
		}
	}
	if len(list) == 0 {
		return f.next()
	}
	f.path = list[len(list)-1]
	return f.continueLast(list[:len(list)-1])
}

// makeDir makes the directory. One that is there must not be writable by others, who could put other files into the
// place of the records, or have this process, which has many rights, write to a file of their choice.
func (f *files) makeDir() error {
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	info, err := os.Stat(f.dir)
	if err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	if mode := info.Mode().Perm(); mode&0o022 != 0 {
		return fmt.Errorf("ledger: others than its owner may write to %s, mode %04o: chmod go-w", f.dir, mode)
	}
	return nil
}

// exposed returns the first segment that others than its owner may read or write, and its mode; empty if there is none.
func (f *files) exposed() (path string, mode fs.FileMode) {
	list, _ := segments(f.dir) // which open has listed
	for _, file := range list {
		if info, err := os.Stat(file); err == nil && info.Mode().Perm()&0o077 != 0 {
			return file, info.Mode().Perm()
		}
	}
	return "", 0
}

// continueLast opens the last segment behind its last complete record. If it has none, since its writer ended before
// the first one was complete, the chain goes on from the segments before it.
func (f *files) continueLast(before []string) error {
	file, err := openRegular(f.path, os.O_RDWR|os.O_APPEND|syscall.O_NOFOLLOW)
	if err != nil {
		return err
	}
	r := &Reader{}
	if err := r.open(f.path); err != nil {
		return errors.Join(err, file.Close())
	}
	defer r.Close()
	last, err := r.last()
	info, serr := file.Stat()
	for i := len(before) - 1; last == nil && i >= 0 && err == nil; i-- {
		last, err = lastOf(before[i])
	}
	if err != nil || serr != nil {
		return errors.Join(err, serr, file.Close())
	}
	if last != nil {
		f.number, f.sum = last.Number, last.Sum
	}
	f.file, f.size = file, info.Size()-int64(r.Torn())
	f.total -= int64(r.Torn())
	if err := file.Truncate(f.size); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	return nil
}

// openRegular opens a file that is there. It does not wait for the other end of a pipe.
func openRegular(path string, flag int) (*os.File, error) {
	file, err := os.OpenFile(path, flag|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("not a regular file")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ledger: %s: %w", path, err), file.Close())
	}
	return file, nil
}

// gone reports whether the last segment was removed or another file is in its place, and how many records it has, which
// nobody has then.
func (f *files) gone() (records uint64, gone bool) {
	if f.file == nil {
		return 0, false
	}
	there, err := os.Lstat(f.path)
	own, serr := f.file.Stat()
	if err != nil && !errors.Is(err, fs.ErrNotExist) || serr != nil || err == nil && os.SameFile(there, own) {
		return 0, false // what else is wrong, the next write says
	}
	first := f.number + 1
	_, _ = fmt.Sscanf(filepath.Base(f.path), segmentFormat, &first) // which has named it
	return f.number + 1 - min(first, f.number+1), true
}

// next begins a new segment.
func (f *files) next() error {
	if f.file != nil {
		if err := f.close(); err != nil {
			return err
		}
	}
	path := filepath.Join(f.dir, fmt.Sprintf(segmentFormat, f.number+1))
	file, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	f.file, f.path, f.size = file, path, 0
	return nil
}

// append writes a record to the last segment. The error is errSegmentFull if there is no room in it.
func (f *files) append(r *Record) error {
	if f.file == nil {
		return errors.New("ledger: it is not open")
	}
	r.Number, r.Prev = f.number+1, f.sum
	line, err := r.line()
	if err != nil {
		return err
	}
	if int64(len(line)) > f.segment() && len(r.Batch) > 0 {
		r.Error, r.Batch = fmt.Sprintf("the batch takes %d bytes, too many for a segment", len(line)), nil
		if line, err = r.line(); err != nil {
			return err
		}
	}
	if f.size > 0 && f.size+int64(len(line)) > f.segment() && r.Kind != Checkpoint && !f.fresh() {
		return errSegmentFull
	}
	if err := f.makeRoom(int64(len(line))); err != nil {
		return err
	}
	n, err := f.file.Write(line)
	f.size, f.total = f.size+int64(n), f.total+int64(n)
	if err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	f.number, f.sum = r.Number, r.Sum
	return nil
}

// fresh reports whether the segment holds no more than its checkpoint, which may be large.
func (f *files) fresh() bool {
	return filepath.Base(f.path) == fmt.Sprintf(segmentFormat, f.number)
}

// makeRoom deletes the oldest segments until there is room for some bytes.
func (f *files) makeRoom(n int64) error {
	for f.total+n > f.most {
		list, err := segments(f.dir)
		if err != nil {
			return err
		}
		if len(list) == 0 || list[0] == f.path {
			return fmt.Errorf("ledger: %d bytes have no room in %d", n, f.most)
		}
		info, err := os.Stat(list[0])
		if err == nil {
			err = os.Remove(list[0])
		}
		if err != nil {
			return fmt.Errorf("ledger: %w", err)
		}
		f.total -= info.Size()
	}
	return nil
}

// close closes the last segment, and has it written to the disk.
func (f *files) close() error {
	if f.file == nil {
		return nil
	}
	err := errors.Join(f.file.Sync(), f.file.Close())
	f.file = nil
	if err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	return nil
}
