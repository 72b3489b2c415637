package labtest

import (
	"sync"
	"testing"
	"time"
)

// Stalls takes note of when this process did not get to run, and with it the servers and clients in it: whoever then
// waits in vain for an answer says something about the machine, and nothing about the network.
type Stalls struct {
	mu   sync.Mutex
	last time.Time
	// end is when the process ran again after the last time in which something should have run and did not.
	end time.Time
}

const (
	stallTick = 10 * time.Millisecond
	// stallLeast is what a process that gets to run does not reach by far: the collector stops it for less than a
	// millisecond.
	stallLeast = 50 * time.Millisecond
)

// WatchStalls watches until the test ends.
func WatchStalls(t testing.TB) *Stalls {
	s := &Stalls{last: time.Now()}
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(stallTick)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
				s.ran(time.Now())
			}
		}
	}()
	t.Cleanup(func() {
		close(end)
		<-ended
	})
	return s
}

// ran takes note that it runs.
func (s *Stalls) ran(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.last) >= stallTick+stallLeast {
		s.end = now
	}
	s.last = now
}

// Since says whether the process stalled at some moment since then.
func (s *Stalls) Since(then time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.last) >= stallTick+stallLeast || s.end.After(then)
}
