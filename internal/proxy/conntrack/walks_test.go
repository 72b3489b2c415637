package conntrack

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// countedTable counts how often the kernel walks its table.
type countedTable struct {
	*Conn
	lists *atomic.Int64
}

func (t countedTable) list(q query, do func([]flow) error) error {
	t.lists.Add(1)
	return t.Conn.list(q, do)
}

// rolling is a cluster of Services whose endpoints are replaced one after the other.
type rolling struct {
	services  []*dataplane.Service
	protocols []snapshot.Protocol
	families  int
	changes   int
}

func (r *rolling) service(n, version int) *dataplane.Service {
	s := &dataplane.Service{Name: name(fmt.Sprint("s", n))}
	for v := range r.families {
		for _, protocol := range r.protocols {
			k := dataplane.Key{Addr: netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)}), Protocol: protocol, Port: 80}
			if v == 1 {
				k.Addr = netip.AddrFrom16([16]byte{0: 0xfd, 13: byte(n >> 8), 14: byte(n)})
			}
			sp := &dataplane.ServicePort{Name: dataplane.PortName{Service: s.Name, Port: "p", Protocol: protocol},
				Frontends: []dataplane.Frontend{{Key: k}}, SecondChance: snapshot.SecondChanceOn,
				Cluster: &dataplane.Pool{}, Local: &dataplane.Pool{}}
			for i := range 10 {
				e := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(version + i), byte(n >> 8), byte(n)}), 8080)
				if v == 1 {
					e = netip.AddrPortFrom(netip.AddrFrom16([16]byte{0: 0xfd, 12: byte(version + i), 13: byte(n >> 8),
						14: byte(n)}), 8080)
				}
				sp.Serving = append(sp.Serving, dataplane.Endpoint{AddrPort: e})
			}
			s.Ports = append(s.Ports, sp)
		}
	}
	return s
}

// change replaces an endpoint of a Service by another one.
func (r *rolling) change() (before, after *dataplane.Service) {
	n := r.changes % len(r.services)
	r.changes++
	before, after = r.services[n], r.service(n, 1+r.changes/len(r.services)+1)
	r.services[n] = after
	return before, after
}

// BenchmarkChanges changes 100 endpoints a second for 10 s, of 1,000 Services of 10 endpoints each, in a table of few
// or of many flows to others.
func BenchmarkChanges(b *testing.B) {
	for _, protocols := range [][]snapshot.Protocol{{snapshot.TCP}, {snapshot.TCP, snapshot.UDP}} {
		for _, families := range []int{1, 2} {
			for _, flows := range []int{1000, 20_000} {
				b.Run(fmt.Sprintf("%v/families=%d/flows=%d", protocols, families, flows), func(b *testing.B) {
					for b.Loop() {
						benchmarkChanges(b, &rolling{protocols: protocols, families: families}, flows)
					}
				})
			}
		}
	}
}

func benchmarkChanges(b *testing.B, r *rolling, flows int) {
	var lists atomic.Int64
	conn := emptyHost(b)
	conn.few = fewFlows
	w := newWalker(countedTable{conn, &lists})
	c, rel := NewCleaner(w, nil), NewReleaser(w, ReleaserOptions{})
	c.SetTCP(rel)
	listeners := []reconcile.Listener{c.Listener(), rel.Listener()}
	many := make([]entry, flows)
	for i := range many {
		protocol := []string{"tcp", "udp"}[i%2]
		many[i] = entry{client: clientOf(i, false), frontend: key("198.51.100.1:443/" + protocol),
			endpoint: netip.MustParseAddrPort("198.51.100.1:443"), answered: true}
	}
	insert(b, conn, many...)
	var before, after []*dataplane.Service
	for n := range 1000 {
		r.services = append(r.services, r.service(n, 1))
		before, after = append(before, nil), append(after, r.services[n])
	}
	ctx, cancel := context.WithCancel(b.Context())
	var all sync.WaitGroup
	all.Go(func() { w.Run(ctx) })
	commit := func(c reconcile.Commit) {
		for _, l := range listeners {
			l.Writing()
		}
		for _, l := range listeners {
			l.Committed(c)
		}
	}
	commit(reconcile.Commit{Before: before, After: after, First: true})
	time.Sleep(4 * time.Second)
	lists.Store(0)
	var was, is unix.Rusage
	labtest.Check(b, unix.Getrusage(unix.RUSAGE_SELF, &was))
	start := time.Now()
	for i := range 1000 {
		time.Sleep(time.Until(start.Add(time.Duration(i) * 10 * time.Millisecond)))
		old, now := r.change()
		commit(reconcile.Commit{Before: []*dataplane.Service{old}, After: []*dataplane.Service{now}})
	}
	labtest.Check(b, unix.Getrusage(unix.RUSAGE_SELF, &is))
	took := time.Since(start).Seconds()
	cancel()
	all.Wait()
	b.ReportMetric(float64(lists.Load()), "lists")
	b.ReportMetric(float64(is.Utime.Nano()-was.Utime.Nano())/1e9/took, "user-cores")
	b.ReportMetric(float64(is.Stime.Nano()-was.Stime.Nano())/1e9/took, "system-cores")
}
