package backends

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/ledger"
	"github.com/verdict-proxy/verdict/internal/testkit"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/reconcile/reconciletest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// BenchmarkLedger: what the transaction of one endpoint costs the loop with a ledger and without, in turns, and what a
// record takes on the disk, and that of the first fill, which is as large as a checkpoint.
func BenchmarkLedger(b *testing.B) {
	const endpoints = 10
	for _, services := range []int{1000, 10000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			host := labtest.NewHost(b, labtest.NewNet(b), "node")
			var tables *kernel.Backend
			labtest.Check(b, host.Do(func() (err error) {
				tables, err = kernel.Open(kernel.Options{})
				return err
			}))
			defer tables.Close()
			w := ledger.New(ledger.Options{Dir: b.TempDir(), MaxBytes: 256 << 20, Source: ledgerSource(tables),
				Log: slog.New(slog.DiscardHandler)})
			ctx, stop := context.WithCancel(b.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				w.Run(ctx)
			}()
			with := reconciletest.Loop{Writer: tables, Listeners: []reconcile.Listener{w.Listener()}}
			snap, planner := snapshot.New(), dataplane.NewPlanner(dataplane.Config{NodeName: "node-1"})
			change, _ := planner.Apply(snap, snap.Apply(manyServices(services, endpoints)))
			tables.Sent = w.Sent
			_, err := tables.ApplyAll(planner.State(), change)
			labtest.Check(b, err)
			with.Apply(planner.State(), dataplane.Change{})
			before := settled(b, w)
			var took [2][]time.Duration
			for i := 0; b.Loop(); i++ {
				change, _ := planner.Apply(snap, snap.Apply(oneEndpoint(snap, i%services, i)))
				start := time.Now()
				if i%2 == 0 {
					tables.Sent = nil
					_, err = tables.Apply(planner.State(), change)
				} else {
					tables.Sent = w.Sent
					_, err = tables.Apply(planner.State(), change)
					w.Listener().Committed(commitOf(change, planner.State()))
				}
				labtest.Check(b, err)
				took[i%2] = append(took[i%2], time.Since(start))
			}
			after := settled(b, w)
			stop()
			<-done
			if len(took[1]) == 0 || after.Records == before.Records {
				return // the first, short round
			}
			off, on := median(took[0]), median(took[1])
			b.ReportMetric(float64(off.Nanoseconds())/1000, "off-us")
			b.ReportMetric(float64(on.Nanoseconds())/1000, "on-us")
			b.ReportMetric(float64(on)/float64(off), "on/off")
			b.ReportMetric(float64(after.Bytes-before.Bytes)/float64(after.Records-before.Records), "B/record")
			b.ReportMetric(float64(after.Missing), "missing")
			b.ReportMetric(float64(before.Bytes), "fill-B")
		})
	}
}

// settled waits until what was handed over is written.
func settled(b *testing.B, w *ledger.Writer) ledger.Stats {
	b.Helper()
	var last ledger.Stats
	testkit.Eventually(b, time.Minute, "all records are written", func() bool {
		time.Sleep(700 * time.Millisecond)
		now := w.Stats()
		same := now == last
		last = now
		return same && now.Records > 0
	})
	return last
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// commitOf is the event of a change of one slice.
func commitOf(change dataplane.Change, s *dataplane.State) reconcile.Commit {
	n := change.Services[0]
	now := time.Now()
	return reconcile.Commit{Before: []*dataplane.Service{s.Services[n]}, After: []*dataplane.Service{s.Services[n]},
		Cause: &reconcile.Cause{Since: now, Began: now, Delta: snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{
			n: {Name: n, Service: n.Name, Version: "123456"}}}}}
}

// manyServices has Services with endpoints.
func manyServices(services, endpoints int) snapshot.Delta {
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for i := range services {
		n := snapshot.Name{Namespace: fmt.Sprintf("team-%d", i%50), Name: fmt.Sprintf("service-%d", i)}
		d.Services[n] = &snapshot.Service{Name: n, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8),
			byte(i)})}, Ports: []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}}}
		s := &snapshot.Slice{Name: n, Service: n.Name, Version: "1",
			Ports: []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}}}
		for e := range endpoints {
			at := i*endpoints + e
			s.Endpoints = append(s.Endpoints, snapshot.Endpoint{Ready: true, Serving: true,
				Addr: netip.AddrFrom4([4]byte{10, 128 + byte(at>>16), byte(at >> 8), byte(at)})})
		}
		d.Slices[n] = s
	}
	return d
}

// oneEndpoint replaces an endpoint of a Service.
func oneEndpoint(s *snapshot.Snapshot, service, round int) snapshot.Delta {
	n := snapshot.Name{Namespace: fmt.Sprintf("team-%d", service%50), Name: fmt.Sprintf("service-%d", service)}
	sl := *s.Slices[n][n.Name]
	sl.Endpoints = slices.Clone(sl.Endpoints)
	sl.Endpoints[round%len(sl.Endpoints)].Addr = netip.AddrFrom4([4]byte{10, 160 + byte(round>>16), byte(round >> 8),
		byte(round)})
	return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{n: &sl}}
}
