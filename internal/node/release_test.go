package node

import (
	"context"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/outlier"
)

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
