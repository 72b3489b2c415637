package node

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/outlier"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestReleaseOfEjected: an endpoint dies, and its slice never changes. New connections have it ejected; held ones are
// reset soon after they send. Those of the other endpoint go on.
func TestReleaseOfEjected(t *testing.T) {
	n := newShopNode(t, 2, "on")
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
	for _, f := range lab.Families() {
		all.Go(func() { n.dial(n.Pods[1], f, 16) })
	}
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
	if released := int(n.metric("verdict_connections_released_total")); released < len(dead) {
		t.Errorf("%d connections were released, of %d", released, len(dead))
	}
}

// slowProber takes 300 ms for a probe. Endpoints with an odd last byte are dead.
type slowProber struct{}

func (slowProber) Probe(_ context.Context, e netip.AddrPort) outlier.Outcome {
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
		start, dead := time.Now(), 0
		for i, answers := range probeAll(t.Context(), slowProber{}, endpoints) {
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
