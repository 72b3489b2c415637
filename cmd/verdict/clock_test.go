package main

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// TestClockJumps sets the machine's clock ahead and back by an hour: changes come into force as before, nothing is late, and nobody is
// started again. The machine is a guest (internal/guest), whose clock nobody else needs.
func TestClockJumps(t *testing.T) {
	if name, err := os.Hostname(); err != nil || name != "guest" {
		t.Skipf("this machine, %q, is not the test's own; see make matrix", name)
	}
	s := newShown(t, newLog(t))
	s.start()
	s.wait("the kernel carries the Services", 1)
	readyz := fmt.Sprintf("http://%s:10256/readyz", s.cluster.Node.IP(lab.IPv4))
	check := fmt.Sprintf("http://%s:30900", s.cluster.Node.IP(lab.IPv4))
	s.await("at first", s.cluster.Outside, readyz, 200, `"healthy":true`)
	child := s.child()
	sum := 0.0
	for _, jump := range []time.Duration{time.Hour, -2 * time.Hour, time.Hour} {
		s.objects(false) // changed by the clock before
		now := unix.NsecToTimespec(time.Now().Add(jump).UnixNano())
		labtest.Check(t, unix.ClockSettime(unix.CLOCK_REALTIME, &now))
		t.Log("it is now ", time.Now().UTC().Format(time.RFC3339))
		s.await("after a jump", s.cluster.Outside, check, 503, `"localEndpoints": 0`)
		s.objects(true)
		s.await("after a jump", s.cluster.Outside, check, 200, `"localEndpoints": 1`)
		s.await("after a jump", s.cluster.Outside, readyz, 200, `"healthy":true`)
		after := s.metric(`kubeproxy_network_programming_duration_seconds_sum{ip_family="IPv4"}`)
		if after < sum {
			t.Errorf("a sum fell from %v to %v", sum, after)
		}
		sum = after
	}
	if s.child() != child {
		t.Error("the proxy was started again")
	}
	labtest.Check(t, syscall.Kill(child, syscall.SIGKILL))
	if !gone(child) {
		t.Fatal("it lives on")
	}
	s.await("after a crash", s.cluster.Outside, readyz, 200, `"healthy":true`)
	s.ends()
}
