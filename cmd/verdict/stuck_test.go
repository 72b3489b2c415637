package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// slowBackend takes its time for a transaction, and for a check.
type slowBackend struct{ apply, check atomic.Int64 }

func (b *slowBackend) Apply(*dataplane.State, dataplane.Change) (dataplane.Receipt, error) {
	time.Sleep(time.Duration(b.apply.Load()))
	return dataplane.Receipt{}, nil
}

func (b *slowBackend) Check() ([]string, time.Duration, error) {
	time.Sleep(time.Duration(b.check.Load()))
	return nil, 0, nil
}

func (b *slowBackend) Remove() error { return nil }

// TestLoopThatIsStuck: one transaction that does not end, and one look at the kernel, end the process; many slow ones
// do not.
func TestLoopThatIsStuck(t *testing.T) {
	for _, c := range []struct {
		what         string
		apply, check time.Duration
		stuck        bool
	}{
		{"slow", stuckAfter / 2, stuckAfter / 2, false},
		{"a transaction", 24 * time.Hour, 0, true},
		{"a check", 0, 24 * time.Hour, true},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var b slowBackend
				b.apply.Store(int64(c.apply))
				b.check.Store(int64(c.check))
				queue := snapshot.NewQueue(1)
				loop := reconcile.Loop{Queue: queue, Planner: dataplane.NewPlanner(dataplane.Config{}), Writer: &b,
					Log: slog.New(slog.DiscardHandler)}
				var why []string
				began, at := time.Now(), time.Duration(0)
				n := node{stuck: func(what string) { why, at = append(why, what), time.Since(began) }}
				ctx, cancel := context.WithCancel(t.Context())
				go loop.Run(ctx)
				go n.watch(ctx, &loop)
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
		l := &live{log: &logger{Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))}}
		l.abort("a test")
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

// beThief makes the test program one that has the name of the place, without any capability, until its input ends.
const beThief = "VERDICT_TEST_BE_THIEF"

func init() {
	if os.Getenv(beThief) == "" {
		return
	}
	runtime.LockOSThread() // the first thread is the one that /proc tells of
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	err := unix.Capset(&header, &none[0])
	l, lerr := net.Listen("unixpacket", "@"+placeName)
	if err := errors.Join(err, lerr); err != nil {
		panic(err)
	}
	fmt.Println("bound")
	_, _ = io.Copy(io.Discard, os.Stdin)
	l.Close()
	os.Exit(0)
}

// TestPlaceIsTaken: somebody without rights has the name of the place before the proxy comes. Services are carried,
// the metrics say what is wrong, and when he is gone, another proxy can take over.
func TestPlaceIsTaken(t *testing.T) {
	s := &shown{victim: newVictim(t)}
	cmd := s.cluster.Node.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), beThief+"=1")
	in, err := cmd.StdinPipe()
	labtest.Check(t, err)
	out, err := cmd.StdoutPipe()
	labtest.Check(t, err)
	labtest.Check(t, cmd.Start())
	if _, err := fmt.Fscanln(out, new(string)); err != nil {
		t.Fatal(err)
	}
	s.start()
	s.wait("working without the place", 1)
	s.wait("all Services are programmed", 1)
	held := func(want float64) {
		t.Helper()
		deadline := time.Now().Add(20 * time.Second)
		for ; s.metric("verdict_place_held") != want; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("verdict_place_held is not %v:\n%s", want, s.said())
			}
		}
	}
	held(0)
	in.Close()
	_ = cmd.Wait()
	held(1)
	first := s.keeper
	s.start()
	s.wait("standing by", 1)
	s.wait("nothing was written", 1)
	for _, p := range []*lab.Cmd{first, s.keeper} {
		labtest.Check(t, p.Process.Signal(syscall.SIGTERM))
		labtest.Check(t, p.Wait())
	}
}

// TestFewDescriptors has a proxy that may have 128 descriptors, and 400 slow connections to each of its ports. It
// goes on to tell of its health and its metrics, follows the files, and another proxy can take over.
func TestFewDescriptors(t *testing.T) {
	s := &shown{victim: newVictim(t)}
	s.descriptors = 128
	s.start()
	s.wait("all Services are programmed", 1)
	for _, addr := range []string{"127.0.0.1:10256", "127.0.0.1:10249"} {
		for range 400 {
			var c net.Conn
			labtest.Check(t, s.cluster.Node.Do(func() (err error) { c, err = net.Dial("tcp", addr); return err }))
			defer c.Close()
			_, _ = c.Write([]byte("GET /livez HTTP/1.1\r\nHost: node\r\n"))
		}
	}
	s.await("health", s.cluster.Node, "http://127.0.0.1:10256/livez", 200, "healthy")
	if n := s.metric("process_open_fds"); n < 1 || n > 100 {
		t.Errorf("%v descriptors are open", n)
	}
	first := s.keeper
	s.descriptors = 0
	s.start()
	s.wait("nothing was written", 1)
	for _, p := range []*lab.Cmd{first, s.keeper} {
		labtest.Check(t, p.Process.Signal(syscall.SIGTERM))
		labtest.Check(t, p.Wait())
	}
}
