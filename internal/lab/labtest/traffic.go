package labtest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Traffic is what clients do while something happens to the network: they open connections and hold others, and all of
// them must be answered.
type Traffic struct {
	// Target chooses where a new connection goes.
	Target func(r *rand.Rand) (snapshot.Protocol, netip.AddrPort)
	// Patience is how long a client waits for an answer to a new connection, HeldPatience over one that it holds; 0 means
	// lab's own.
	Patience, HeldPatience time.Duration
	// Stalls, if not nil, are when nobody could answer. Of a hundred clients, one may wait in vain then.
	Stalls *Stalls
	// Deletes says that flows are deleted: a datagram may be on its way just when its endpoint leaves the Service, and
	// the answer, which comes a moment later, finds no way back.
	Deletes bool
	// Cause, if not nil, says why a connection failed that began at a time, in words that end its line.
	Cause func(from *lab.Host, p snapshot.Protocol, to netip.AddrPort, r lab.Result, began time.Time, held bool) string
	// Dials and Pings count what was done. Slowest is how long a new connection took at most, in nanoseconds.
	Dials, Pings, Slowest atomic.Int64

	// excused counts who waited in vain while the machine was busy, lost the datagrams that were answered in vain.
	excused, lost atomic.Int64
	causes        atomic.Int64
	clients       sync.WaitGroup
	stop          chan struct{}
	mu            sync.Mutex
	failures      []string
}

// Beside runs something beside the clients until they are stopped.
func (tr *Traffic) Beside(run func(stop <-chan struct{})) {
	if tr.stop == nil {
		tr.stop = make(chan struct{})
	}
	stop := tr.stop
	tr.clients.Go(func() { run(stop) })
}

// Stop ends all clients.
func (tr *Traffic) Stop() {
	close(tr.stop)
	tr.clients.Wait()
	tr.stop = nil
}

// Fail notes what a client did not get.
func (tr *Traffic) Fail(format string, args ...any) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.failures = append(tr.failures, time.Now().Format("05.000 ")+fmt.Sprintf(format, args...))
}

// fail is Fail, unless it is nobody's fault. It says whether it is somebody's.
func (tr *Traffic) fail(start time.Time, r lab.Result, format string, args ...any) bool {
	if tr.Deletes && r.Lost && tr.lost.Add(1) <= 1+tr.Dials.Load()/50000 {
		return false
	}
	if r.Outcome == lab.TimedOut && tr.Stalls != nil && tr.Stalls.Since(start) &&
		tr.excused.Add(1) <= 10+(tr.Dials.Load()+tr.Pings.Load())/100 {
		return false
	}
	tr.Fail(format, args...)
	return true
}

// maxCauses is how many failures have their cause asked for.
const maxCauses = 50

// cause asks for the cause of a failure.
func (tr *Traffic) cause(from *lab.Host, p snapshot.Protocol, to netip.AddrPort, r lab.Result, began time.Time,
	held bool) string {
	if tr.Cause == nil || tr.causes.Add(1) > maxCauses {
		return ""
	}
	return tr.Cause(from, p, to, r, began, held)
}

// Open has a client open new connections, one after the other, to targets that a seed chooses.
func (tr *Traffic) Open(from *lab.Host, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 2))
	tr.Beside(func(stop <-chan struct{}) {
		for !after(stop, 0) {
			p, to := tr.Target(random)
			start := time.Now()
			r := from.Dial(p, to, lab.Options{Timeout: tr.Patience})
			if r.Outcome != lab.Answered {
				tr.fail(start, r, "%s to %s %s: %v%s", from.Name, to, p, r, tr.cause(from, p, to, r, start, false))
			}
			tr.Dials.Add(1)
			for slowest := tr.Slowest.Load(); int64(r.Latency) > slowest; slowest = tr.Slowest.Load() {
				tr.Slowest.CompareAndSwap(slowest, int64(r.Latency))
			}
		}
	})
}

// Hold has a client keep a TCP connection for so long, and another one after that. Each must answer whenever a pause is
// over.
func (tr *Traffic) Hold(from *lab.Host, to netip.AddrPort, lifetime, pause time.Duration) {
	tr.Beside(func(stop <-chan struct{}) {
		for !after(stop, 0) {
			start := time.Now()
			c, r := from.Open(snapshot.TCP, to, lab.Options{Timeout: tr.HeldPatience})
			if c == nil {
				if tr.fail(start, r, "%s to %s: %v%s", from.Name, to, r,
					tr.cause(from, snapshot.TCP, to, r, start, false)) {
					return
				}
				continue
			}
			for end := start.Add(lifetime); time.Now().Before(end) && !after(stop, pause); {
				asked := time.Now()
				if r := c.Ping(tr.HeldPatience); r.Outcome != lab.Answered {
					tr.fail(asked, r, "connection of %s to %s: %v%s", from.Name, to, r,
						tr.cause(from, snapshot.TCP, to, r, start, true))
					break
				}
				tr.Pings.Add(1)
			}
			c.Close()
		}
	})
}

// after waits, and says whether the end came meanwhile.
func after(stop <-chan struct{}, pause time.Duration) bool {
	select {
	case <-stop:
		return true
	case <-time.After(pause):
	}
	select {
	case <-stop:
		return true
	default:
		return false
	}
}

// String says what was done.
func (tr *Traffic) String() string {
	return fmt.Sprintf("%d connections opened, %d pings over held ones; %d failures, %d late since the machine was busy, "+
		"%d answers lost; the slowest took %v", tr.Dials.Load(), tr.Pings.Load(), len(tr.failures), tr.excused.Load(),
		tr.lost.Load(), time.Duration(tr.Slowest.Load()).Round(time.Millisecond))
}

// Failures is how many clients failed. All must have been stopped.
func (tr *Traffic) Failures() int { return len(tr.failures) }

// Check fails the test if a client failed, with what was done meanwhile. All clients must have been stopped.
func (tr *Traffic) Check(t testing.TB, done ...string) {
	t.Helper()
	if n := len(tr.failures); n > 0 {
		t.Errorf("%d clients failed, such as:\n%s\n%s", n, strings.Join(tr.failures[:min(n, 10)], "\n"),
			strings.Join(done, "\n"))
	}
}
