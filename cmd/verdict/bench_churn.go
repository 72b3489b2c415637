package main

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

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func newBenchChurn() *cobra.Command {
	var b bench
	load := churnLoad{}
	cmd := &cobra.Command{
		Use:   "churn",
		Short: "A steady rate of changes",
		Long: `Churn fills a kernel, then puts changes into the queue at a steady rate, by turns an endpoint replaced, added and
removed, each in a Service by chance, while the proxy's own loop carries them to the kernel, as many in one transaction as
have come meanwhile. It measures each change from the moment it is put to the acknowledgement of the transaction that holds
it, or a later change of the same object.

  cores     processor time of this process, in user and kernel mode, by the time that passed; making the changes is
            part of it, the kernel's own threads are not
  behind    changes put and not yet acknowledged when the time was up; those are waited for, and count in the percentiles
  backlog   the most there were at any moment
  late      by how much at most a change was put later than the rate asks for, which says whether the rate was kept`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := load.check(); err != nil {
				return err
			}
			return b.run(cmd, func(ctx context.Context) (benchResult, error) { return b.churn(ctx, load) })
		},
	}
	b.add(cmd)
	cmd.Flags().Float64Var(&load.rate, "rate", 1000, "changes a second")
	cmd.Flags().Float64Var(&load.seconds, "seconds", 60, "how long they come")
	return cmd
}

// churnLoad is how many changes come.
type churnLoad struct{ rate, seconds float64 }

const (
	maxRate    = 1e6
	maxSeconds = 24 * 60 * 60
)

func (l churnLoad) check() error {
	switch {
	case !(l.rate > 0 && l.rate <= maxRate):
		return fmt.Errorf("--rate: %v is not between 0 and %v", l.rate, maxRate)
	case !(l.seconds > 0 && l.seconds <= maxSeconds):
		return fmt.Errorf("--seconds: %v is not between 0 and %v", l.seconds, maxSeconds)
	}
	return nil
}

// changes is how many come in all.
func (l churnLoad) changes() int { return max(int(l.rate*l.seconds), 1) }

// due is when a change is to be put, after the first.
func (l churnLoad) due(n int) time.Duration {
	return time.Duration(float64(n) / l.rate * float64(time.Second))
}

// churnResult is what "bench churn" reports.
type churnResult struct {
	benchFill
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

func (b *bench) churn(ctx context.Context, load churnLoad) (_ *churnResult, err error) {
	h, err := newBenchHost()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	run := &churnRun{
		bench: b, load: load, cluster: newBenchCluster(b.services, b.endpoints), random: rand.New(rand.NewPCG(1, 1)),
		queue: snapshot.NewQueue(1),
		watch: &churnWatch{Backend: h.backend, filled: make(chan dataplane.Receipt, 1), waiting: map[snapshot.Name][]churnChange{}},
		out:   &churnResult{Rate: load.rate},
	}
	loop := reconcile.Loop{
		Queue: run.queue, Planner: dataplane.NewPlanner(benchConfig), Backend: run.watch, Log: slog.New(slog.DiscardHandler),
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
	*bench
	load    churnLoad
	cluster *benchCluster
	random  *rand.Rand
	queue   *snapshot.Queue
	watch   *churnWatch
	// slices are the Services' slices as they were put last.
	slices []*snapshot.Slice
	out    *churnResult
}

// measure has the loop fill the kernel, then puts the changes and waits for them.
func (r *churnRun) measure(ctx context.Context) (err error) {
	r.progress.show("filling the kernel")
	r.out.benchFill, err = r.fill(ctx, r.cluster, func(all snapshot.Delta) (dataplane.Receipt, error) {
		for i := range r.services {
			r.slices = append(r.slices, all.Slices[r.cluster.sliceName(i)])
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
		d := sliceDelta(s)
		now := time.Now()
		r.watch.expect(r.cluster.name(at), churnChange{s, now})
		r.queue.Put(d)
		late = max(late, now.Sub(start)-due)
		if due >= shown {
			shown = due + time.Second
			r.progress.show("%.0f of %v seconds, %d behind", due.Seconds(), r.load.seconds, r.watch.behind())
		}
	}
	r.out.Changes, r.out.Late = r.load.changes(), milliseconds(late)
	return nil
}

// changed gives the slice that a change makes of another. The last endpoint is never removed, but replaced. Endpoints do not
// come back, so that no two states of a slice are alike.
func (r *churnRun) changed(n int, s *snapshot.Slice) *snapshot.Slice {
	switch {
	case n%3 == 1:
		return r.cluster.added(s)
	case n%3 == 2 && len(s.Endpoints) > 1:
		return r.cluster.removed(s)
	}
	return r.cluster.replaced(s)
}

// drain waits until nothing is behind.
func (r *churnRun) drain(ctx context.Context) error {
	r.progress.show("waiting for what is behind")
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
	reconcile.Backend
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
	r, err := w.Backend.Apply(want, change)
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

func (w *churnWatch) report(out *churnResult) {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := sorted(w.samples)
	out.P50, out.P99 = milliseconds(percentile(all, 50)), milliseconds(percentile(all, 99))
	out.Max, out.Backlog = milliseconds(percentile(all, 100)), w.most
	out.Transactions, out.TxnMessages, out.TxnElements, out.TxnBytes = w.receipts, w.sum.Messages, w.sum.Added, w.sum.Bytes
}

func (r *churnResult) print(s *show) {
	s.line("%s", s.paint(bold, fmt.Sprintf("Churn: %v changes a second in a kernel with %s Services with %s endpoints each",
		r.Rate, thousands(r.Services), thousands(r.Endpoints))))
	s.line("")
	s.line("  put         %s changes in %s, at most %s late", thousands(r.Changes), seconds(r.Seconds), milli(r.Late))
	s.line("  to the acknowledgement: p50 %s, p99 %s, slowest %s", milli(r.P50), milli(r.P99), milli(r.Max))
	s.line("  behind      %s when the time was up, at most %s", thousands(r.Behind), thousands(r.Backlog))
	s.line("  cores       %.2f", r.Cores)
	s.line("  written     %s elements, %s in %s transactions of %s messages", thousands(r.TxnElements), size(int64(r.TxnBytes)),
		thousands(r.Transactions), thousands(r.TxnMessages))
	s.line("\n  The first fill:")
	r.benchFill.print(s)
}

// milli writes a time given in milliseconds.
func milli(ms float64) string { return brief(time.Duration(ms * 1e6)) }
