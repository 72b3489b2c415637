package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/node"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

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
	l, lerr := net.Listen("unixpacket", "@"+node.LeaseName)
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
	s.wait("running without the lease", 1)
	s.wait("all Services are programmed", 1)
	held := func(want float64) {
		t.Helper()
		what := fmt.Sprintf("verdict_place_held %v", want)
		testkit.Eventually(t, 20*time.Second, what, func() bool { return s.metric("verdict_place_held") == want }, s.said)
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
