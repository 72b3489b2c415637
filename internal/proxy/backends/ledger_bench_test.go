package backends

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// keeping is a backend with a ledger, which has programmed Services.
type keeping struct {
	b       *testing.B
	dir     string
	tables  *kernel.Backend
	ledger  *ledger.Writer
	snap    *snapshot.Snapshot
	planner *dataplane.Planner
	// round counts the changes.
	round int
}

// newKeeping programs Services. The returned function ends the ledger and the backend.
func newKeeping(b *testing.B, services, endpoints int, maxBytes int64) (*keeping, func()) {
	b.Helper()
	k := &keeping{b: b, dir: filepath.Join(b.TempDir(), "ledger"), snap: snapshot.New(),
		planner: dataplane.NewPlanner(dataplane.Config{NodeName: "node-1"})}
	host := labtest.NewHost(b, labtest.NewNet(b), "node")
	labtest.Check(b, host.Do(func() (err error) {
		k.tables, err = kernel.Open(kernel.Options{})
		return err
	}))
	k.ledger = ledger.New(ledger.Options{Dir: k.dir, MaxBytes: maxBytes, Source: ledgerSource(k.tables),
		Log: slog.New(slog.DiscardHandler)})
	ctx, stop := context.WithCancel(b.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.ledger.Run(ctx)
	}()
	change, _ := k.planner.Apply(k.snap, k.snap.Apply(manyServices(services, endpoints)))
	batches := uint64(0)
	k.tables.Sent = func(batch []byte) {
		k.ledger.Sent(batch)
		batches++
	}
	_, err := k.tables.ApplyAll(k.planner.State(), change)
	labtest.Check(b, err)
	k.tables.Sent = k.ledger.Sent
	k.ledger.Listener().Committed(reconcile.Commit{Receipt: dataplane.Receipt{Full: true}})
	testkit.Eventually(b, time.Minute, "the first fill is written", func() bool {
		return k.ledger.Stats().Records > batches // besides the start
	})
	return k, func() {
		stop()
		<-done
		labtest.Check(b, k.tables.Close())
	}
}

// change replaces an endpoint of the next Service.
func (k *keeping) change() dataplane.Change {
	n := len(k.snap.Services)
	change, _ := k.planner.Apply(k.snap, k.snap.Apply(oneEndpoint(k.snap, k.round%n, k.round)))
	k.round++
	return change
}

// BenchmarkLedger: what the transaction of one endpoint costs the loop with a ledger and without, in turns, and what a
// record takes on the disk, and that of the first fill, which is as large as a checkpoint.
func BenchmarkLedger(b *testing.B) {
	for _, services := range []int{1000, 10000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			k, end := newKeeping(b, services, 10, 256<<20)
			tables, w := k.tables, k.ledger
			before := settled(b, w)
			var took [2][]time.Duration
			for i := 0; b.Loop(); i++ {
				change := k.change()
				start := time.Now()
				if tables.Sent = nil; i%2 == 1 {
					tables.Sent = w.Sent
				}
				_, err := tables.Apply(k.planner.State(), change)
				if i%2 == 1 {
					w.Listener().Committed(commitOf(change, k.planner.State()))
				}
				labtest.Check(b, err)
				took[i%2] = append(took[i%2], time.Since(start))
			}
			after := settled(b, w)
			end()
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

// BenchmarkRotation: what a new file of the usual size takes, which begins with a checkpoint: how long nothing else is
// written, and how far the heap grows meanwhile, beside how far it grows otherwise. Held is what the elements take.
func BenchmarkRotation(b *testing.B) {
	k, end := newKeeping(b, 10000, 10, 64<<20)
	settled(b, k.ledger)
	var gap time.Duration
	var grown [2]int64 // without a new file, and with one
	for range b.N {
		for rotated := 0; rotated == 0; {
			files := k.files()
			g, n := k.watch(func() { k.changes(500) })
			rotated = min(k.files()-files, 1)
			grown[rotated] = max(grown[rotated], n)
			if rotated == 1 {
				gap = max(gap, g)
			}
		}
	}
	before := liveHeap()
	m, err := ledger.At(k.dir, time.Now(), func() ledger.State { return &kernel.Replay{} })
	labtest.Check(b, err)
	b.ReportMetric(float64(liveHeap()-before)/1e6, "held-MB")
	runtime.KeepAlive(m)
	b.ReportMetric(float64(before)/1e6, "live-MB")
	b.ReportMetric(float64(grown[0])/1e6, "usual-MB")
	b.ReportMetric(float64(grown[1])/1e6, "rotation-MB")
	b.ReportMetric(float64(gap.Milliseconds()), "gap-ms")
	end()
}

// changes makes as many changes, and waits until their records are written.
func (k *keeping) changes(n int) {
	k.b.Helper()
	want := k.ledger.Stats().Records + uint64(n)
	for range n {
		change := k.change()
		_, err := k.tables.Apply(k.planner.State(), change)
		labtest.Check(k.b, err)
		k.ledger.Listener().Committed(commitOf(change, k.planner.State()))
	}
	testkit.Eventually(k.b, time.Minute, "all records are written", func() bool {
		return k.ledger.Stats().Records >= want
	})
}

// files is how many files the ledger has.
func (k *keeping) files() int {
	list, err := filepath.Glob(filepath.Join(k.dir, "*"))
	labtest.Check(k.b, err)
	return len(list)
}

// watch returns the longest time in f in which the ledger wrote no record, and how far the heap grew, with its garbage.
func (k *keeping) watch(f func()) (gap time.Duration, grown int64) {
	before, last, since := liveHeap(), k.ledger.Stats().Records, time.Now()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			if now := k.ledger.Stats().Records; now != last {
				last, since = now, time.Now()
			}
			gap, grown = max(gap, time.Since(since)), max(grown, heap()-before)
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	f()
	close(stop)
	<-done
	return gap, grown
}

// heap returns the bytes of all objects on the heap, with those that have not been collected yet.
func heap() int64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	return int64(sample[0].Value.Uint64())
}

// liveHeap is heap after a collection.
func liveHeap() int64 {
	runtime.GC()
	return heap()
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
