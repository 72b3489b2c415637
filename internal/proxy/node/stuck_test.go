package node

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// slowWriter takes its time for a transaction, and for a check.
type slowWriter struct{ apply, check atomic.Int64 }

func (b *slowWriter) Apply(*dataplane.State, dataplane.Change) (dataplane.Receipt, error) {
	time.Sleep(time.Duration(b.apply.Load()))
	return dataplane.Receipt{}, nil
}

func (b *slowWriter) Check() ([]string, time.Duration, error) {
	time.Sleep(time.Duration(b.check.Load()))
	return nil, 0, nil
}

func (b *slowWriter) Remove() error { return nil }

// TestLoopThatIsStuck: one transaction that does not end, and one look at the kernel, end the process; many slow ones
// do not, nor does one of which the kernel answers a part now and then.
func TestLoopThatIsStuck(t *testing.T) {
	for _, c := range []struct {
		what         string
		apply, check time.Duration
		answers      time.Duration // how often the kernel answers meanwhile; 0 means never
		stuck        bool
	}{
		{"slow", stuckAfter / 2, stuckAfter / 2, 0, false},
		{"a transaction", 24 * time.Hour, 0, 0, true},
		{"a transaction of many messages", 24 * time.Hour, 0, stuckAfter / 2, false},
		{"a transaction whose messages are not answered in time", 24 * time.Hour, 0, 24 * time.Hour, true},
		{"a check", 0, 24 * time.Hour, 0, true},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var b slowWriter
				b.apply.Store(int64(c.apply))
				b.check.Store(int64(c.check))
				queue := snapshot.NewQueue(1)
				loop := reconcile.Loop{Queue: queue, Planner: dataplane.NewPlanner(dataplane.Config{}), Writer: &b,
					Log: slog.New(slog.DiscardHandler)}
				var why []string
				began, at := time.Now(), time.Duration(0)
				n := Node{stuck: func(what string) { why, at = append(why, what), time.Since(began) }}
				if c.answers > 0 {
					n.Backend = &backends.Opened{Heard: func() time.Time {
						return began.Add(time.Since(began).Truncate(c.answers))
					}}
				}
				ctx, cancel := context.WithCancel(t.Context())
				go loop.Run(ctx)
				go n.watchdog(ctx, &loop)
				queue.Synced()
				for i := range 100 {
					addr := fmt.Sprint("10.0.0.", i)
					queue.Put(snapshot.Delta{Node: &snapshot.Node{Name: addr}})
					time.Sleep(stuckAfter / 10)
				}
				synctest.Wait()
				if (len(why) == 1) != c.stuck || c.stuck && (at < stuckAfter || at > stuckAfter+stuckAfter/5) {
					t.Errorf("after %v: %q", at, why)
				}
				cancel()
				b.apply.Store(0)
				b.check.Store(0)
				time.Sleep(48 * time.Hour)
			})
		})
	}
}

// envAbort has this test program be a process that aborts.
const envAbort = "VERDICT_TEST_ABORT"

// TestAbort: the process says what its goroutines are doing, and is ended by a signal: for its keeper that is a crash.
func TestAbort(t *testing.T) {
	if os.Getenv(envAbort) != "" {
		abort(slog.New(slog.NewTextHandler(os.Stderr, nil)), "a test")
		time.Sleep(time.Hour)
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestAbort$")
	cmd.Env = append(os.Environ(), envAbort+"=1", "GOTRACEBACK=crash")
	out, err := cmd.CombinedOutput()
	if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); err == nil || ws.Signal() != syscall.SIGABRT {
		t.Error(err)
	}
	for _, want := range []string{`why="a test"`, "goroutine 1 "} {
		if !strings.Contains(string(out), want) {
			t.Errorf("it says no %q:\n%.2000s", want, out)
		}
	}
}
