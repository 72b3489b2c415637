package benchmark

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Load is how many changes come a second, and for how many seconds.
type Load struct{ Rate, Seconds float64 }

const (
	maxRate    = 1e6
	maxSeconds = 24 * 60 * 60
)

// Check refuses a load that cannot be made. An error begins with the field's name in lower case.
func (l Load) Check() error {
	switch {
	case !(l.Rate > 0 && l.Rate <= maxRate):
		return fmt.Errorf("rate: %v is not between 0 and %v", l.Rate, maxRate)
	case !(l.Seconds > 0 && l.Seconds <= maxSeconds):
		return fmt.Errorf("seconds: %v is not between 0 and %v", l.Seconds, maxSeconds)
	}
	return nil
}

// changes is how many come in all.
func (l Load) changes() int { return max(int(l.Rate*l.Seconds), 1) }

// due is when a change is to be put, after the first.
func (l Load) due(n int) time.Duration {
	return time.Duration(float64(n) / l.Rate * float64(time.Second))
}

// ChurnResult is what Churn measured.
type ChurnResult struct {
	Fill
	Changes int `json:"changes"`
	// Rate is what was asked for, Seconds how long it took to put all the changes.
	Rate    float64 `json:"rate"`
	Seconds float64 `json:"seconds"`
	P50     float64 `json:"p50_ms"`
	P99     float64 `json:"p99_ms"`
	Max     float64 `json:"max_ms"`
	Cores   float64 `json:"cores"`
	Behind  int     `json:"behind"`
	Backlog int     `json:"backlog_max"`
	Late    float64 `json:"late_max_ms"`
	// Transactions is how many carried the changes; their messages, elements and bytes are those of all of them.
	Transactions int `json:"transactions"`
	TxnMessages  int `json:"transactions_messages"`
	TxnElements  int `json:"transactions_elements"`
	TxnBytes     int `json:"transactions_bytes"`
}

// drainMost is how long changes that are behind are waited for.
const drainMost = 30 * time.Second

// Churn fills a kernel, then puts changes into the queue at a steady rate while the proxy's own loop programs them,
// and measures each from that moment to the acknowledgement of the transaction that holds it.
func Churn(ctx context.Context, o Options, load Load) (_ *ChurnResult, err error) {
	h, err := newHost(o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	run := &churnRun{
		Options: o, load: load, cluster: NewCluster(o.Services, o.Endpoints), random: rand.New(rand.NewPCG(1, 1)),
		queue: snapshot.NewQueue(1),
		watch: &churnWatch{
			Writer:  h.backend,
			filled:  make(chan dataplane.Receipt, 1),
			waiting: map[snapshot.Name][]churnChange{},
		},
		out: &ChurnResult{Rate: load.Rate},
	}
	loop := reconcile.Loop{
		Queue: run.queue, Planner: dataplane.NewPlanner(NodeConfig), Writer: run.watch, Log: slog.New(slog.DiscardHandler),
	}
	group, inner := errgroup.WithContext(ctx)
	inner, stop := context.WithCancelCause(inner)
	run.watch.failed = stop
	group.Go(func() error { return loop.Run(inner) })
	group.Go(func() error {
		defer stop(nil)
		return run.measure(inner)
	})
	err = group.Wait()
	if cause := context.Cause(inner); errors.Is(err, context.Canceled) && ctx.Err() == nil {
		err = cause // what the kernel refused
	}
	return run.out, err
}

// churnRun is one measurement on its way.
type churnRun struct {
	Options
	load    Load
	cluster *Cluster
	random  *rand.Rand
	queue   *snapshot.Queue
	watch   *churnWatch
	// slices are the Services' slices as they were put last.
	slices []*snapshot.Slice
	out    *ChurnResult
}

// measure has the loop fill the kernel, then puts the changes and waits for them.
func (r *churnRun) measure(ctx context.Context) (err error) {
	r.show("filling the kernel")
	r.out.Fill, err = r.fill(ctx, r.cluster, func(all snapshot.Delta) (dataplane.Receipt, error) {
		for i := range r.Services {
			r.slices = append(r.slices, all.Slices[r.cluster.SliceName(i)])
		}
		r.queue.Put(all)
		r.queue.Synced()
		select {
		case receipt := <-r.watch.filled:
			return receipt, nil
		case <-ctx.Done():
			return dataplane.Receipt{}, ctx.Err()
		}
	})
	if err != nil {
		return err
	}
	busy, start := processorTime(), time.Now()
	if err := r.put(ctx, start); err != nil {
		return err
	}
	took := time.Since(start)
	r.out.Seconds, r.out.Cores = took.Seconds(), (processorTime()-busy).Seconds()/took.Seconds()
	r.out.Behind = r.watch.behind()
	if err := r.drain(ctx); err != nil {
		return err
	}
	r.watch.report(r.out)
	return nil
}

// put puts all the changes, each when it is due, or at once if that is over.
func (r *churnRun) put(ctx context.Context, start time.Time) error {
	late, shown := time.Duration(0), time.Duration(0)
	for n := range r.load.changes() {
		due := r.load.due(n)
		if wait := due - time.Since(start); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		at := r.random.IntN(len(r.slices))
		s := r.changed(n, r.slices[at])
		r.slices[at] = s
		d := SliceDelta(s)
		now := time.Now()
		r.watch.expect(r.cluster.Name(at), churnChange{s, now})
		r.queue.Put(d)
		late = max(late, now.Sub(start)-due)
		if due >= shown {
			shown = due + time.Second
			r.show("%.0f of %v seconds, %d behind", due.Seconds(), r.load.Seconds, r.watch.behind())
		}
	}
	r.out.Changes, r.out.Late = r.load.changes(), milliseconds(late)
	return nil
}

// changed gives the slice that a change makes of another. The last endpoint is never removed, but replaced. Endpoints
// do not come back, so that no two states of a slice are alike.
func (r *churnRun) changed(n int, s *snapshot.Slice) *snapshot.Slice {
	switch {
	case n%3 == 1:
		return r.cluster.Added(s)
	case n%3 == 2 && len(s.Endpoints) > 1:
		return r.cluster.Removed(s)
	}
	return r.cluster.Replaced(s)
}

// drain waits until nothing is behind.
func (r *churnRun) drain(ctx context.Context) error {
	r.show("waiting for what is behind")
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	patience := time.After(drainMost)
	for r.watch.behind() > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-patience:
			return fmt.Errorf("%d changes are not in the kernel %s after the last was put", r.watch.behind(), drainMost)
		case <-tick.C:
		}
	}
	return nil
}

// processorTime is what this process has used so far.
func processorTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0 // it knows no error but a bad argument
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// churnChange is a change on its way: the slice as it is to be, and when it was put.
type churnChange struct {
	slice *snapshot.Slice
	put   time.Time
}

// churnWatch is the loop's backend, watched: it knows which changes are not acknowledged yet.
type churnWatch struct {
	reconcile.Writer
	// filled gets the receipt of the first transaction.
	filled chan dataplane.Receipt
	failed context.CancelCauseFunc

	mu sync.Mutex
	// waiting are the changes of each Service that are not acknowledged, in their order; count is how many, most how many
	// there were at most.
	waiting     map[snapshot.Name][]churnChange
	count, most int
	samples     []time.Duration
	// receipts is how many transactions came after the first, sum what they wrote.
	receipts int
	sum      dataplane.Receipt
}

// Apply is the backend's; an error ends the measurement.
func (w *churnWatch) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	r, err := w.Writer.Apply(want, change)
	now := time.Now()
	if err != nil {
		w.failed(err)
		return r, err
	}
	if r.Full {
		select {
		case w.filled <- r:
			return r, nil
		default: // a set was full, and everything written anew
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.receipts++
	w.sum.Messages, w.sum.Bytes = w.sum.Messages+r.Messages, w.sum.Bytes+r.Bytes
	w.sum.Added += r.Added + r.Replaced + r.Removed
	for _, n := range change.Services {
		w.acknowledge(n, want.Services[n], now)
	}
	return r, nil
}

// acknowledge takes off the list what a state of a Service holds: the last change it shows, and those before it.
func (w *churnWatch) acknowledge(n snapshot.Name, svc *dataplane.Service, now time.Time) {
	list := w.waiting[n]
	for i := len(list) - 1; i >= 0; i-- {
		if !shows(svc, list[i].slice) {
			continue
		}
		for _, c := range list[:i+1] {
			w.samples = append(w.samples, now.Sub(c.put))
		}
		w.count -= i + 1
		if list = list[i+1:]; len(list) == 0 {
			delete(w.waiting, n)
		} else {
			w.waiting[n] = list
		}
		return
	}
}

// shows says whether a Service has exactly a slice's endpoints.
func shows(svc *dataplane.Service, s *snapshot.Slice) bool {
	pool := svc.Ports[0].Cluster.Endpoints
	return len(pool) == len(s.Endpoints) && !slices.ContainsFunc(s.Endpoints, func(e snapshot.Endpoint) bool {
		_, found := slices.BinarySearchFunc(pool, e.Addr, func(p dataplane.Endpoint, a netip.Addr) int {
			return p.Addr().Compare(a)
		})
		return !found
	})
}

// expect puts a change on the list, before it is put into the queue.
func (w *churnWatch) expect(n snapshot.Name, c churnChange) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waiting[n] = append(w.waiting[n], c)
	w.count++
	w.most = max(w.most, w.count)
}

func (w *churnWatch) behind() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count
}

func (w *churnWatch) report(out *ChurnResult) {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := sorted(w.samples)
	out.P50, out.P99 = milliseconds(percentile(all, 50)), milliseconds(percentile(all, 99))
	out.Max, out.Backlog = milliseconds(percentile(all, 100)), w.most
	out.Transactions, out.TxnMessages, out.TxnElements, out.TxnBytes = w.receipts, w.sum.Messages, w.sum.Added, w.sum.Bytes
}
