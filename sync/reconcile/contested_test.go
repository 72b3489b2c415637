package reconcile

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestConflictsAreSummedUp: a Service that claims thousands of addresses in use is a line in the log for each Service
// that keeps them, up to a few, and not one for each address.
func TestConflictsAreSummedUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		var told []dataplane.ConflictSummary
		b := &fakeBackend{loop: &Loop{Log: slog.New(slog.NewTextHandler(&log, nil)),
			Listeners: []Listener{{Contested: func(c []dataplane.ConflictSummary) { told = append(told, c...) }}}}}
		q, _ := start(t, b)
		claims := func(name string, from, addrs, created int) {
			d := service(name)
			svc := d.Services[nameOf(name)]
			svc.Age, svc.Ports = snapshot.Age{Created: int64(created)}, nil
			for i := range addrs {
				svc.ExternalIPs = append(svc.ExternalIPs, netip.AddrFrom4([4]byte{198, 18, byte((from + i) >> 8), byte(from + i)}))
			}
			for p := range 10 {
				svc.Ports = append(
					svc.Ports,
					snapshot.Port{Name: fmt.Sprint("p", p), Protocol: snapshot.TCP, Port: uint16(1000 + p)},
				)
			}
			q.Put(d)
		}
		for i := range 10 { // 10 owners of 100 addresses each
			claims(string(rune('k'+i)), 100*i, 100, 1)
		}
		q.Synced()
		synctest.Wait()
		log.Reset()
		claims("a", 0, 1000, 2)
		synctest.Wait()
		lines := strings.Count(log.String(), "\n")
		if lines != maxContests+1 || !strings.Contains(log.String(), "first=198.18.0.0:1000/tcp addresses=1000") ||
			!strings.Contains(log.String(), `"more Services claim the same addresses" addresses=6000`) {
			t.Errorf("%d lines:\n%s", lines, log.String())
		}
		if len(told) != 10 {
			t.Errorf("%d contests were told", len(told))
		}
		for _, c := range told {
			if c.Keys != 1000 || c.Loser.Port.Service != nameOf("a") {
				t.Errorf("%v", c)
			}
		}
		if owner := b.calls()[1].state[nameOf("k")]; len(owner.Ports[0].Frontends) != 101 {
			t.Errorf("an older Service has %d frontends of a port; want 101", len(owner.Ports[0].Frontends))
		}
	})
}
