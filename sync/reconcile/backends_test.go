package reconcile

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// many gives a Service so many endpoints.
func many(name string, n int) snapshot.Delta {
	d := endpoint(name, "10.1.0.1")
	for _, sl := range d.Slices {
		e := sl.Endpoints[0]
		for i := 1; i < n; i++ {
			e.Addr = netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)})
			sl.Endpoints = append(sl.Endpoints, e)
		}
	}
	return d
}

// referring refers so often to a Service at port 80.
func referring(d snapshot.Delta, to string, often int) snapshot.Delta {
	for _, svc := range d.Services {
		svc.Backends = &snapshot.Backends{}
		for _, p := range svc.Ports {
			of := snapshot.PortBackends{Port: p.Name}
			for range often {
				of.To = append(of.To, snapshot.Backend{Service: nameOf(to), Port: 80, Weight: 1})
			}
			svc.Backends.Ports = append(svc.Backends.Ports, of)
		}
	}
	return d
}

// TestTooManyBackends: a Service that refers to too many endpoints is told of, and has none until there are fewer.
// Whoever listens to what is in sync hears of both.
func TestTooManyBackends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		log := noted(b)
		var told, heard []string
		listen(b, Listener{
			Unscheduled: func(r *dataplane.Refused) {
				for n, why := range r.Services {
					told = append(told, n.Name+" "+r.ChosenInstead(n)+": "+why.Error())
				}
			},
			InSync: func(s InSync) {
				for _, n := range s.Change.Services {
					heard = append(heard, fmt.Sprint(n.Name, " ", s.TooManyBackends(n)))
				}
			},
		})
		q, _ := start(t, b)
		q.Put(merged(with("db", 80), many("db", 10_000), referring(with("gw", 80), "db", 14)))
		q.Synced()
		synctest.Wait()
		if text := strings.Join(told, "\n"); !strings.HasPrefix(text, "gw from none: with the older Services of its "+
			"namespace, it refers to too many endpoints") || len(told) != 1 {
			t.Errorf("told %q", text)
		}
		if lines := log.take("WARN"); len(lines) != 1 || !strings.Contains(lines[0], "such_as=default/gw") {
			t.Errorf("log: %q", lines)
		}
		if got := strings.Join(heard, ", "); got != "db false, gw true" {
			t.Errorf("heard %s", got)
		}
		heard = nil
		q.Put(many("db", 9_000))
		time.Sleep(time.Second)
		synctest.Wait()
		if got := strings.Join(heard, ", "); got != "db false, gw true" { // an eighth must be free
			t.Errorf("heard %s", got)
		}
		q.Put(many("db", 8_000))
		time.Sleep(time.Second)
		synctest.Wait()
		if n := len(b.kernel.Services[nameOf("gw")].Ports[0].Cluster.Endpoints); n != 8_000 ||
			!strings.HasSuffix(strings.Join(heard, ", "), "gw false") {
			t.Errorf("%d endpoints; heard %v", n, heard)
		}
	})
}

// TestReferrersWeigh: who changes a Service pays for those that refer to it.
func TestReferrersWeigh(t *testing.T) {
	l := Loop{snapshot: snapshot.New(), Planner: dataplane.NewPlanner(dataplane.Config{})}
	d := merged(with("db", 80), many("db", 1000))
	for i := range 10 {
		gw := referring(with("gw", 80), "db", 1)
		for _, svc := range gw.Services {
			svc.Name = nameOf(fmt.Sprint("gw", i))
			svc.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 7, byte(i)})}
			d.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc}})
		}
	}
	l.Planner.Apply(l.snapshot, l.snapshot.Apply(d))
	if w := l.weigh(object{nameOf("db"), aService}, &snapshot.Delta{}); w < 11_000 || w > 11_100 {
		t.Errorf("weighs %d", w)
	}
}
