package main

import (
	"fmt"
	"net/netip"
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
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// inGuest skips a test that does something to the whole machine, unless that is a guest (internal/lab/guest), which is
// the test's own.
func inGuest(t *testing.T) {
	t.Helper()
	if name, err := os.Hostname(); err != nil || name != "guest" {
		t.Skipf("this machine, %q, is not the test's own; make matrix has one", name)
	}
}

// TestClockJumps sets the machine's clock ahead and back by an hour: changes come into force as before, nothing is
// late, and nobody is started again.
func TestClockJumps(t *testing.T) {
	inGuest(t)
	s := newShown(t, newLog(t))
	s.start()
	s.wait("all Services are programmed", 1)
	readyz := fmt.Sprintf("http://%s:10256/readyz", s.cluster.Node.IP(ipfamily.IPv4))
	check := fmt.Sprintf("http://%s:30900", s.cluster.Node.IP(ipfamily.IPv4))
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

// TestConntrackFull fills the kernel's table of connections: nobody can open another, held ones stay, changes come
// into force, and all is well once there is room. The limit is the whole machine's, so it is a guest.
func TestConntrackFull(t *testing.T) {
	inGuest(t)
	s := newShown(t, newLog(t))
	s.start()
	s.wait("all Services are programmed", 1)
	const limit = "/proc/sys/net/netfilter/nf_conntrack_max"
	before, err := os.ReadFile(limit)
	labtest.Check(t, err)
	labtest.Check(t, os.WriteFile(limit, []byte("16"), 0))
	defer os.WriteFile(limit, before, 0)
	at := netip.AddrPortFrom(s.clusterIP(), 80)
	var held []*lab.Conn
	for full := false; !full; {
		if len(held) > 16 {
			t.Fatalf("%d connections are open, and the table holds 16", len(held))
		}
		c, r := s.cluster.Outside.Open(snapshot.TCP, at, lab.Options{Timeout: 3 * time.Second})
		if full = c == nil; full && r.Outcome != lab.TimedOut {
			t.Fatal(r)
		} else if !full {
			defer c.Close()
			held = append(held, c)
			if r := c.Ping(0); r.Outcome != lab.Answered {
				t.Fatal(r)
			}
		}
	}
	if len(held) == 0 {
		t.Fatal("no connection could be opened at all")
	}
	text, err := os.ReadFile(filepath.Join(s.dir, "all.yaml"))
	labtest.Check(t, err)
	other := lab.Nth(lab.ServiceRange[0], 2)
	s.write("all.yaml", strings.ReplaceAll(string(text), s.clusterIP().String(), other.String()))
	testkit.Eventually(t, patience, "the change is in force", func() bool {
		table := labtest.Run(t, s.cluster.Node, "", "nft", "list", "table", "ip", "verdict")
		return strings.Contains(table, other.String()+" .")
	}, s.said)
	for _, c := range held {
		if r := c.Ping(0); r.Outcome != lab.Answered {
			t.Errorf("a connection that was held: %v", r)
		}
	}
	labtest.Check(t, os.WriteFile(limit, before, 0))
	at = netip.AddrPortFrom(other, 80)
	if r := s.cluster.Outside.Dial(snapshot.TCP, at, lab.Options{Timeout: 20 * time.Second}); r.Outcome != lab.Answered {
		t.Errorf("there is room again: %v", r)
	}
	s.ends()
}
