package logging

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// slowLog takes a line once it may.
type slowLog struct {
	may  chan struct{}
	mu   sync.Mutex
	text strings.Builder
	err  error
}

func (s *slowLog) Write(b []byte) (int, error) {
	<-s.may
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, s.err
	}
	return s.text.Write(b)
}

func (s *slowLog) said() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

func tellLost(w io.Writer, lines int) { fmt.Fprintf(w, "lost %d\n", lines) }

// TestLossyWriter: what is written comes, in order, unless there is too much of it or it cannot be written: then that
// is told.
func TestLossyWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &slowLog{may: make(chan struct{})}
		l := NewLossy(out, tellLost)
		line := strings.Repeat("x", 1023) + "\n"
		fmt.Fprint(l, "first\n")
		synctest.Wait() // it is being written
		for range 2 * lossyMost / len(line) {
			fmt.Fprint(l, line)
		}
		close(out.may)
		synctest.Wait()
		half := lossyMost / len(line)
		if want := "first\n" + strings.Repeat(line, half) + fmt.Sprintf("lost %d\n", half); out.said() != want {
			t.Errorf("%d bytes, not %d; they end with %q", len(out.said()), len(want), out.said()[len(out.said())-20:])
		}
		out.text.Reset()
		out.err = errors.New("no space left on device")
		fmt.Fprint(l, "a\nb\n")
		fmt.Fprint(l, "c\n")
		synctest.Wait()
		out.err = nil
		fmt.Fprint(l, "d\n")
		synctest.Wait()
		fmt.Fprint(l, "e\n")
		l.Close()
		if got := out.said(); got != "d\nlost 3\ne\n" {
			t.Errorf("after errors: %q", got)
		}
	})
}

// TestLossyWriterEnds: closing waits for a while, and not for ever.
func TestLossyWriterEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &slowLog{may: make(chan struct{})}
		l := NewLossy(out, tellLost)
		fmt.Fprint(l, "a\n")
		begin := time.Now()
		l.Close()
		if waited := time.Since(begin); waited != lossyPatience {
			t.Errorf("waited for %v", waited)
		}
		close(out.may)
	})
}
