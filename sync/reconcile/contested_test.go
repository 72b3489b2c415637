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
				svc.Ports = append(svc.Ports,
					snapshot.Port{Name: fmt.Sprint("p", p), Protocol: snapshot.TCP, Port: uint16(1000 + p)})
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

// TestConflictsSayWhy: the log says by which rule a Service keeps an address: the kind, the age, or the name.
func TestConflictsSayWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		b := &fakeBackend{loop: &Loop{Log: slog.New(slog.NewTextHandler(&log, nil))}}
		q := startWith(t, b)
		put := func(name string, created int64, clusterIP, external string) {
			d := service(name)
			svc := d.Services[nameOf(name)]
			svc.Age, svc.ClusterIPs = snapshot.Age{Created: created}, []netip.Addr{netip.MustParseAddr(clusterIP)}
			svc.ExternalIPs = []netip.Addr{netip.MustParseAddr(external)}
			q.Put(d)
			synctest.Wait()
		}
		put("old", 1, "10.96.0.1", "10.96.0.3")
		for _, test := range []struct {
			name                string
			created             int64
			clusterIP, external string
			want                string
		}{
			{"new", 9, "10.96.0.3", "198.18.0.1", "ClusterIP goes before ExternalIP"},
			{"newer", 10, "10.96.0.4", "198.18.0.1", "the oldest Service keeps them"},
			{"same", 10, "10.96.0.4", "198.18.0.9", "the first one by name keeps them"},
		} {
			log.Reset()
			put(test.name, test.created, test.clusterIP, test.external)
			if !strings.Contains(log.String(), "Services claim the same addresses; "+test.want) {
				t.Errorf("%s: %s", test.name, log.String())
			}
		}
	})
}

// TestEndpointsNowhere: an endpoint that is an address of Services is logged once, and not with each change.
func TestEndpointsNowhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		b := &fakeBackend{loop: &Loop{Log: slog.New(slog.NewTextHandler(&log, nil))}}
		q, _ := start(t, b)
		cidrs := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
		q.Put(snapshot.Delta{ServiceCIDRs: &cidrs})
		lines := func(d snapshot.Delta, want int) {
			t.Helper()
			log.Reset()
			q.Put(d)
			synctest.Wait()
			if got := strings.Count(log.String(), "reach nobody"); got != want ||
				want > 0 && !strings.Contains(log.String(), "service=default/a endpoint=10.96.0.77:80") {
				t.Errorf("%d lines, want %d:\n%s", got, want, log.String())
			}
		}
		slice := func(addrs ...string) snapshot.Delta {
			sl := &snapshot.Slice{Name: nameOf("a-1"), Service: "a",
				Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 80}}}
			for _, a := range addrs {
				sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: netip.MustParseAddr(a), Ready: true, Serving: true})
			}
			return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{sl.Name: sl}}
		}
		q.Put(service("a"))
		q.Synced()
		lines(slice("10.244.0.1"), 0)
		lines(slice("10.244.0.1", "10.96.0.77"), 1)
		lines(slice("10.244.0.2", "10.96.0.77"), 0)
		lines(snapshot.Delta{Node: &snapshot.Node{Name: "node-1", Zone: "b"}}, 0)
		lines(slice("10.244.0.1"), 0)
		lines(slice("10.96.0.77"), 1)
	})
}
