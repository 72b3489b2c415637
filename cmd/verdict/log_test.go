package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// newShown gives a proxy that is not started yet, and logs to a file.
func newShown(t *testing.T, log *os.File) *shown {
	t.Helper()
	flags := []string{"--cluster-cidr", lab.PodRange[0].String(), "--metrics-bind-address", "127.0.0.1"}
	cluster := labtest.NewCluster(t, lab.Config{LocalPods: 2})
	s := &shown{victim: &victim{t: t, cluster: cluster, dir: t.TempDir(), log: log, flags: flags}, taint: "none"}
	_, err := s.cluster.Pods[0].Serve(snapshot.TCP, 8080)
	labtest.Check(t, err)
	s.objects(true)
	t.Cleanup(func() {
		if s.keeper != nil && s.keeper.ProcessState == nil { // the test has failed
			child := s.child()
			_ = s.keeper.Process.Kill()
			if child != 0 {
				_ = syscall.Kill(child, syscall.SIGKILL)
			}
			_ = s.keeper.Wait()
		}
	})
	return s
}

// newLog gives a file for the log.
func newLog(t *testing.T) *os.File {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	labtest.Check(t, err)
	t.Cleanup(func() { log.Close() })
	return log
}

// worksOn says that the proxy starts, follows changes, and is started again after a crash.
func (s *shown) worksOn() {
	s.t.Helper()
	healthz := fmt.Sprintf("http://%s:10256/readyz", s.cluster.Node.IP(ipfamily.IPv4))
	check := fmt.Sprintf("http://%s:30900", s.cluster.Node.IP(ipfamily.IPv4))
	s.await("at first", s.cluster.Outside, healthz, 200, `"healthy":true`)
	child := s.child()
	for range 5 {
		s.objects(false)
		s.await("after a change", s.cluster.Outside, check, 503, `"localEndpoints": 0`)
		s.objects(true)
		s.await("after a change", s.cluster.Outside, check, 200, `"localEndpoints": 1`)
	}
	if now := s.child(); now != child || child == 0 {
		s.t.Fatalf("the proxy was process %d, and is %d", child, now)
	}
	labtest.Check(s.t, syscall.Kill(child, syscall.SIGKILL))
	if !gone(child) {
		s.t.Fatal("it lives on")
	}
	s.await("after a crash", s.cluster.Outside, healthz, 200, `"healthy":true`)
	s.objects(false)
	s.await("after a crash and a change", s.cluster.Outside, check, 503, `"localEndpoints": 0`)
}

// ends says that the proxy ends when it is told to.
func (s *shown) ends() {
	s.t.Helper()
	labtest.Check(s.t, s.keeper.Process.Signal(syscall.SIGTERM))
	ended := make(chan error, 1)
	child := s.child()
	go func() { ended <- s.keeper.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			s.t.Fatalf("it ends with %v:\n%s", err, s.said())
		}
	case <-time.After(patience):
		s.t.Error("it does not end")
		_ = s.keeper.Process.Kill()
		_ = syscall.Kill(child, syscall.SIGKILL)
		<-ended
	}
}

// fullPipe gives a pipe that has no room for another byte.
func fullPipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	var fds [2]int
	labtest.Check(t, unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	room := make([]byte, 1)
	for {
		if _, err := unix.Write(fds[1], room); err == unix.EAGAIN {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	labtest.Check(t, unix.SetNonblock(fds[1], false))
	r, w = os.NewFile(uintptr(fds[0]), "pipe, to be read"), os.NewFile(uintptr(fds[1]), "pipe, to be written")
	t.Cleanup(func() {
		r.Close()
		w.Close()
	})
	return r, w
}

// TestLogUnread: nobody reads what the proxy writes, from the beginning on. It works as ever, and what it wrote comes
// later.
func TestLogUnread(t *testing.T) {
	r, w := fullPipe(t)
	s := newShown(t, w)
	s.start()
	s.worksOn()
	var text strings.Builder
	labtest.Check(t, r.SetReadDeadline(time.Now().Add(patience)))
	for b := make([]byte, 1<<16); strings.Count(text.String(), "all Services are programmed") < 1; {
		n, err := r.Read(b)
		if err != nil {
			t.Fatalf("%v after\n%s", err, strings.TrimLeft(text.String(), "\x00"))
		}
		text.Write(b[:n])
	}
	s.ends()
}

// TestLogUnreadAtTheEnd: the end waits for nobody who reads.
func TestLogUnreadAtTheEnd(t *testing.T) {
	_, w := fullPipe(t)
	s := newShown(t, w)
	s.start()
	readyz := fmt.Sprintf("http://%s:10256/readyz", s.cluster.Node.IP(ipfamily.IPv4))
	s.await("at first", s.cluster.Outside, readyz, 200, `"healthy":true`)
	s.ends()
}

// TestLogGone: who read the log has gone, so writing is an error, and usually a signal that ends the process.
func TestLogGone(t *testing.T) {
	r, w, err := os.Pipe()
	labtest.Check(t, err)
	defer w.Close()
	labtest.Check(t, r.Close())
	s := newShown(t, w)
	s.start()
	s.worksOn()
	s.ends()
}

// TestLogDiskFull: the file system that the log is on is full.
func TestLogDiskFull(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	labtest.Check(t, err)
	defer full.Close()
	s := newShown(t, full)
	s.start()
	s.worksOn()
	s.ends()
}
