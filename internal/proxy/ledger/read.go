package ledger

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// A ledger is a directory of segments, which are named by their first record, so that names sort as records do.
const (
	segmentPattern = "ledger-*.jsonl"
	segmentFormat  = "ledger-%012d.jsonl"
)

// segments lists the files of a ledger, the oldest first.
func segments(dir string) ([]string, error) {
	list, err := filepath.Glob(filepath.Join(dir, segmentPattern))
	if err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	slices.Sort(list)
	return list, nil
}

// Break is a place at which the chain of records is broken.
type Break struct {
	// File and Line say where; What says what is wrong there.
	File string
	Line int
	What string
}

func (b *Break) String() string {
	return fmt.Sprintf("%s:%d: %s", filepath.Base(b.File), b.Line, b.What)
}

// Reader reads the records of a ledger, also while it is written. Make one with Open.
type Reader struct {
	dir string
	// file is the one that is read, in is at offset of it, and line counts its lines.
	file   string
	in     *bufio.Reader
	closer io.Closer
	line   int
	// rest is the beginning of a line that is not complete yet.
	rest []byte
	// number and sum are those of the last record; 0 before the first.
	number uint64
	sum    string
	breaks []Break
}

// Open opens a ledger for reading. If since is not zero, it begins with the segment that holds that moment.
func Open(dir string, since time.Time) (*Reader, error) {
	list, err := segments(dir)
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		if _, err := os.ReadDir(dir); err != nil {
			return nil, fmt.Errorf("ledger: %w", err)
		}
		return nil, fmt.Errorf("ledger: %s holds no ledger", dir)
	}
	first := list[0]
	for _, file := range list[1:] {
		if since.IsZero() {
			break
		}
		if at, err := firstTime(file); err != nil || at.After(since) {
			break
		}
		first = file
	}
	r := &Reader{dir: dir}
	return r, r.open(first)
}

// firstTime returns the time of a segment's first record.
func firstTime(file string) (time.Time, error) {
	r := &Reader{}
	if err := r.open(file); err != nil {
		return time.Time{}, err
	}
	defer r.Close()
	record, err := r.Next()
	if err != nil {
		return time.Time{}, err
	}
	return record.At, nil
}

// last reads to the end, and returns the last record; nil if there is none.
func (r *Reader) last() (*Record, error) {
	var last *Record
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			return last, nil
		}
		if err != nil {
			return nil, err
		}
		last = record
	}
}

// lastOf returns the last record of a segment; nil if it has none.
func lastOf(file string) (*Record, error) {
	r := &Reader{}
	if err := r.open(file); err != nil {
		return nil, err
	}
	defer r.Close()
	return r.last()
}

func (r *Reader) open(file string) error {
	f, err := openRegular(file, os.O_RDONLY)
	if err != nil {
		return err
	}
	if r.closer != nil {
		_ = r.closer.Close() // it was only read
	}
	r.file, r.in, r.closer, r.line, r.rest = file, bufio.NewReaderSize(f, 1<<16), f, 0, nil
	return nil
}

// Close closes the file that is read.
func (r *Reader) Close() error { return r.closer.Close() }

// Next returns the next record; io.EOF if there is none yet. Where the chain is broken it notes a Break and goes on.
func (r *Reader) Next() (*Record, error) {
	for {
		text, err := r.in.ReadBytes('\n')
		r.rest = append(r.rest, text...)
		if errors.Is(err, io.EOF) {
			more, nerr := r.nextSegment()
			if nerr != nil {
				return nil, nerr
			}
			if !more {
				return nil, io.EOF
			}
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("ledger: %s: %w", r.file, err)
		}
		r.line++
		text, r.rest = r.rest[:len(r.rest)-1], nil
		if record := r.follow(parseLine(text)); record != nil {
			return record, nil
		}
	}
}

// nextSegment opens the next segment, if there is one.
func (r *Reader) nextSegment() (bool, error) {
	if r.dir == "" {
		return false, nil
	}
	list, err := segments(r.dir)
	if err != nil {
		return false, err
	}
	i, found := slices.BinarySearch(list, r.file)
	if found {
		i++
	}
	if i >= len(list) {
		return false, nil
	}
	// What was written between the end of the file and the list.
	if more, err := r.in.Peek(1); err == nil && len(more) > 0 {
		return true, nil
	}
	if len(r.rest) > 0 {
		r.broken(r.line+1, "the line is not complete")
	}
	return true, r.open(list[i])
}

func (r *Reader) broken(line int, format string, args ...any) {
	r.breaks = append(r.breaks, Break{File: r.file, Line: line, What: fmt.Sprintf(format, args...)})
}

// follow holds a record against the one before it. It returns nil if the line is none.
func (r *Reader) follow(record *Record, err error) *Record {
	if err != nil {
		r.broken(r.line, "%v", err)
	}
	if record == nil {
		r.number, r.sum = 0, "" // nothing is known of what follows
		return nil
	}
	switch {
	case r.sum == "":
	case record.Number != r.number+1:
		r.broken(r.line, "record %d follows record %d", record.Number, r.number)
	case record.Prev != r.sum:
		r.broken(r.line, "record %d does not follow the record %d that stands before it", record.Number, r.number)
	}
	r.number, r.sum = record.Number, record.Sum
	return record
}

// Breaks returns the places at which the chain was found broken so far.
func (r *Reader) Breaks() []Break { return r.breaks }

// Torn returns how many bytes of an incomplete line are at the end: one that is being written, or one whose writer
// ended in the middle.
func (r *Reader) Torn() int { return len(r.rest) }
