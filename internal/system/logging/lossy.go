package logging

import (
	"bytes"
	"io"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/wake"
)

const (
	// lossyMost is how many bytes of the log wait at most until they are taken.
	lossyMost = 1 << 20
	// lossyPatience is how long the end waits for them to be taken.
	lossyPatience = time.Second
)

// Lossy is a log that nobody waits for: a pipe that is not read, or a disk that hangs, would otherwise hold up
// whoever logs, and with it the Services. Lines that find no room, or cannot be written, are lost, and counted.
type Lossy struct {
	out io.Writer
	// tell writes that so many lines were lost.
	tell func(w io.Writer, lines int)
	// wake has a value if there is something to do; ended is closed after all is written.
	wake, ended chan struct{}

	mu      sync.Mutex
	waiting []byte
	lost    int
	closed  bool
}

// NewLossy gives a log that goes to out, until it is closed.
func NewLossy(out io.Writer, tell func(w io.Writer, lines int)) *Lossy {
	l := &Lossy{out: out, tell: tell, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	go l.run()
	return l
}

// Write takes whole lines. It never fails, and never waits for anybody who reads them.
func (l *Lossy) Write(lines []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
	case len(l.waiting)+len(lines) > lossyMost:
		l.lost += bytes.Count(lines, []byte("\n"))
	default:
		l.waiting = append(l.waiting, lines...)
	}
	l.notify()
	return len(lines), nil
}

// notify wakes run; the lock is held.
func (l *Lossy) notify() { wake.Up(l.wake) }

// Close writes what is left, if that takes no longer than lossyPatience.
func (l *Lossy) Close() {
	l.mu.Lock()
	l.closed = true
	l.notify()
	l.mu.Unlock()
	select {
	case <-l.ended:
	case <-time.After(lossyPatience):
	}
}

// run writes until the log is closed and everything is written.
func (l *Lossy) run() {
	defer close(l.ended)
	for range l.wake {
		for {
			l.mu.Lock()
			lines, lost, closed := l.waiting, l.lost, l.closed
			l.waiting, l.lost = nil, 0
			l.mu.Unlock()
			if len(lines) == 0 && lost == 0 {
				if closed {
					return
				}
				break
			}
			if unwritten := l.write(lines, lost); unwritten > 0 {
				l.mu.Lock()
				l.lost += unwritten
				l.mu.Unlock()
				break // until there is another line
			}
		}
	}
}

// write writes lines one by one, as there may be other writers, and how many were lost after them. It says how many
// are lost now.
func (l *Lossy) write(lines []byte, lost int) (unwritten int) {
	for line := range bytes.Lines(lines) {
		if _, err := l.out.Write(line); err != nil {
			lost++
		}
	}
	if lost == 0 {
		return 0
	}
	once := &firstError{Writer: l.out}
	l.tell(once, lost)
	if once.err != nil {
		return lost
	}
	return 0
}

// firstError remembers that a write failed.
type firstError struct {
	io.Writer
	err error
}

func (f *firstError) Write(b []byte) (int, error) {
	n, err := f.Writer.Write(b)
	if f.err == nil {
		f.err = err
	}
	return n, err
}
