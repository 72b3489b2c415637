package main

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/term"
)

// progress tells a person what is going on: lines that stay, and on a terminal one that is written over.
type progress struct {
	out      *os.File
	terminal bool
	last     time.Time
}

// newProgress writes to a file; over says that lines may be written over if it is a terminal.
func newProgress(out *os.File, over bool) *progress {
	return &progress{out: out, terminal: over && term.IsTerminal(int(out.Fd()))}
}

// clear is the sequence that goes to the beginning of the line and empties it.
const clear = "\r\x1b[K"

// say writes a line that stays.
func (p *progress) say(text string) {
	if p.terminal {
		fmt.Fprint(p.out, clear)
	}
	fmt.Fprintln(p.out, text)
}

// show says what is under way, on a terminal only. Empty takes it away.
func (p *progress) show(text string) {
	if !p.terminal || text != "" && time.Since(p.last) < 50*time.Millisecond {
		return
	}
	p.last = time.Now()
	fmt.Fprint(p.out, clear+text)
}
