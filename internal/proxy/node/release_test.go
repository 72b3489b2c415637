package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/proxy/outlier"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestReleaseOfEjected: an endpoint dies, and its slice never changes. New connections have it ejected; held ones are
// reset soon after they send. Those of the other endpoint go on.
func TestReleaseOfEjected(t *testing.T) {
	t.Parallel()
	n := newShopNode(t, 2, "on")
	for _, f := range lab.Families() {
		defer n.warm(f)()
	}
	var dead, alive []*lab.Conn
	for i := range 40 {
		c, r := n.Pods[0].Open(snapshot.TCP, n.web(lab.Families()[i%len(lab.Families())]), lab.Options{})
		if c == nil {
			t.Fatal(r)
		}
		if r.Endpoint == "remote-1" {
			dead = append(dead, c)
		} else {
			alive = append(alive, c)
		}
	}
	n.firewall(n.RemotePods[0], "meta l4proto tcp drop")
	died := time.Now()
	var all sync.WaitGroup
	for _, c := range dead {
		all.Go(func() {
			if r := c.Ping(30 * time.Second); !errors.Is(r.Err, syscall.ECONNRESET) {
				t.Error(r)
			}
		})
	}
	all.Wait()
	t.Logf("%d clients were reset, the last one %v after their endpoint died", len(dead), time.Since(died))
	for _, c := range alive {
		if r := c.Ping(5 * time.Second); r.Outcome != lab.Answered {
			t.Error(r)
		}
	}
	released := func() int { return int(n.metric("verdict_connections_released_total")) } // counted after the resets
	testkit.Eventually(t, 10*time.Second, "all connections are counted as released",
		func() bool { return released() >= len(dead) }, func() string { return fmt.Sprint(released()) })
}

// slowProber takes 300 ms for a probe. Endpoints with an odd last byte are dead.
type slowProber struct{}

func (slowProber) Probe(_ context.Context, e netip.AddrPort, _ outlier.Manner) outlier.Outcome {
	time.Sleep(300 * time.Millisecond)
	if e.Addr().As4()[3]%2 == 1 {
		return outlier.Silent
	}
	return outlier.Rejected
}

// TestProbeAll: nobody counts as dead who was not probed.
func TestProbeAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var endpoints []netip.AddrPort
		for i := range 250 {
			endpoints = append(endpoints, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80))
		}
		places := make(chan struct{}, maxReleaseProbes)
		start, dead := time.Now(), 0
		for i, answers := range probeAll(t.Context(), slowProber{}, places, endpoints) {
			if !answers && i%2 == 0 {
				t.Errorf("%v counts as dead", endpoints[i])
			}
			if !answers {
				dead++
			}
		}
		if took := time.Since(start); took > 1500*time.Millisecond || dead != 4*maxReleaseProbes/2 {
			t.Errorf("%d are dead, after %v", dead, took)
		}
	})
}

// TestProbesShareTheirPlaces: looks that probe at the same time probe no more endpoints than one alone.
func TestProbesShareTheirPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		places, dead := make(chan struct{}, maxReleaseProbes), make(chan int, 4)
		var endpoints []netip.AddrPort
		for range 100 {
			endpoints = append(endpoints, netip.MustParseAddrPort("10.0.0.1:80"))
		}
		for range cap(dead) {
			go func() {
				n := 0
				for _, answers := range probeAll(t.Context(), slowProber{}, places, endpoints) {
					if !answers {
						n++
					}
				}
				dead <- n
			}()
		}
		all := 0
		for range cap(dead) {
			all += <-dead
		}
		if all != 4*maxReleaseProbes {
			t.Errorf("%d probes ended within a second, with %d places of 300 ms", all, maxReleaseProbes)
		}
	})
}
