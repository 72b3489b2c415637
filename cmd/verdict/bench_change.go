package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func newBenchChange() *cobra.Command {
	var b bench
	var rounds int
	cmd := &cobra.Command{
		Use:   "change",
		Short: "One endpoint or Service changed in a full kernel",
		Long: `Change fills a kernel, then changes one thing at a time and measures from the event, an object in memory that differs,
to the kernel's acknowledgement. A round is one change of each kind, each of another Service by chance:

  endpoint replaced   an endpoint goes, another comes: its slot is written again
  endpoint added      a slot more, and the frontend goes to another chain
  endpoint removed    a slot less, and again another chain
  service added       with its endpoints
  service removed     the one added before

Own is what is not the kernel's: all but the time of the commit. The floor is the kernel alone: when all is done, the same
bytes are given, in the same order, to another namespace with the same content.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rounds < 1 {
				return fmt.Errorf("--rounds: %d is not a positive number", rounds)
			}
			return b.run(cmd, func(ctx context.Context) (benchResult, error) { return b.change(ctx, rounds) })
		},
	}
	b.add(cmd)
	cmd.Flags().IntVar(&rounds, "rounds", 1000, "how often each kind is done")
	return cmd
}

// The kinds of change, in the order of a round.
const (
	endpointReplaced = iota
	endpointAdded
	endpointRemoved
	serviceAdded
	serviceRemoved
	numChangeKinds
)

// changeResult is what "bench change" reports.
type changeResult struct {
	benchFill
	Rounds int         `json:"rounds"`
	Kinds  changeKinds `json:"kinds"`
}

type changeKinds struct {
	EndpointReplaced changeKind `json:"endpoint_replaced"`
	EndpointAdded    changeKind `json:"endpoint_added"`
	EndpointRemoved  changeKind `json:"endpoint_removed"`
	ServiceAdded     changeKind `json:"service_added"`
	ServiceRemoved   changeKind `json:"service_removed"`
}

// each gives the kinds in their order, with their names for people.
func (k *changeKinds) each() [numChangeKinds]struct {
	name string
	*changeKind
} {
	return [...]struct {
		name string
		*changeKind
	}{
		{"endpoint replaced", &k.EndpointReplaced},
		{"endpoint added", &k.EndpointAdded},
		{"endpoint removed", &k.EndpointRemoved},
		{"service added", &k.ServiceAdded},
		{"service removed", &k.ServiceRemoved},
	}
}

// changeKind is what one kind of change takes. Messages, elements, bytes and allocations are those of one change.
type changeKind struct {
	P50            float64 `json:"p50_us"`
	P99            float64 `json:"p99_us"`
	OwnP50         float64 `json:"own_p50_us"`
	FloorP50       float64 `json:"floor_p50_us"`
	Messages       int     `json:"messages"`
	Elements       int     `json:"elements"`
	Bytes          int     `json:"bytes"`
	Allocations    uint64  `json:"allocations"`
	AllocatedBytes uint64  `json:"allocated_bytes"`
}

// changeRun is one measurement on its way.
type changeRun struct {
	*bench
	line    *benchLine
	cluster *benchCluster
	random  *rand.Rand
	result  *changeResult
	// batches are what was sent for all changes, in their order.
	batches [][]byte
	total   [numChangeKinds][]time.Duration
	own     [numChangeKinds][]time.Duration
	floor   [numChangeKinds][]time.Duration
}

func (b *bench) change(ctx context.Context, rounds int) (_ *changeResult, err error) {
	r := &changeRun{bench: b, cluster: newBenchCluster(b.services, b.endpoints), random: rand.New(rand.NewPCG(1, 1)),
		result: &changeResult{Rounds: rounds}}
	if err := r.measure(ctx, rounds); err != nil {
		return nil, err
	}
	b.progress.show("the same bytes once more")
	if err := r.replay(ctx); err != nil {
		return nil, err
	}
	for i, k := range r.result.Kinds.each() {
		total := sorted(r.total[i])
		k.P50, k.P99 = microseconds(percentile(total, 50)), microseconds(percentile(total, 99))
		k.OwnP50 = microseconds(percentile(sorted(r.own[i]), 50))
		k.FloorP50 = microseconds(percentile(sorted(r.floor[i]), 50))
	}
	return r.result, nil
}

// measure fills a kernel and makes all the changes.
func (r *changeRun) measure(ctx context.Context, rounds int) (err error) {
	if r.line, err = newBenchLine(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.line.close()) }()
	r.progress.show("filling the kernel")
	if r.result.benchFill, err = r.fill(ctx, r.cluster, r.line.fill); err != nil {
		return err
	}
	r.line.backend.Sent = func(batch []byte) { r.batches = append(r.batches, slices.Clone(batch)) }
	// One Service has an endpoint more from here on: in real clusters there is a chain for every usual number.
	if _, _, err := r.line.step(sliceDelta(r.cluster.added(r.slice(0)))); err != nil {
		return err
	}
	for n := range rounds + 1 {
		r.progress.show("round %d of %d", n, rounds)
		if err := r.round(ctx, n == 0); err != nil {
			return err
		}
	}
	return nil
}

// round makes one change of each kind. The first is not timed: it counts allocations, which stops the world.
func (r *changeRun) round(ctx context.Context, first bool) error {
	replaced, scaled := r.random.IntN(r.cluster.services), r.random.IntN(r.cluster.services)
	added := r.cluster.services + r.random.IntN(r.cluster.services) // one that is not there
	deltas := [numChangeKinds]func() snapshot.Delta{
		endpointReplaced: func() snapshot.Delta { return sliceDelta(r.cluster.replaced(r.slice(replaced))) },
		endpointAdded:    func() snapshot.Delta { return sliceDelta(r.cluster.added(r.slice(scaled))) },
		endpointRemoved:  func() snapshot.Delta { return sliceDelta(r.cluster.removed(r.slice(scaled))) },
		serviceAdded:     func() snapshot.Delta { return r.cluster.born(added) },
		serviceRemoved:   func() snapshot.Delta { return r.cluster.gone(added) },
	}
	for kind, delta := range deltas {
		if err := ctx.Err(); err != nil {
			return err
		}
		step := r.timed
		if first {
			step = r.counted
		}
		if err := step(kind, delta()); err != nil {
			return err
		}
	}
	return nil
}

// slice gives a Service's slice as it is now.
func (r *changeRun) slice(i int) *snapshot.Slice {
	owner, name := r.cluster.name(i), r.cluster.sliceName(i)
	return r.line.snapshot.Slices[owner][name.Name]
}

// timed makes one change.
func (r *changeRun) timed(kind int, d snapshot.Delta) error {
	start := time.Now()
	_, receipt, err := r.line.step(d)
	total := time.Since(start)
	r.total[kind] = append(r.total[kind], total)
	r.own[kind] = append(r.own[kind], total-receipt.Commit)
	return err
}

// counted makes one change and notes how large it is.
func (r *changeRun) counted(kind int, d snapshot.Delta) error {
	sent := r.line.backend.Sent
	defer func() { r.line.backend.Sent = sent }()
	var batch []byte
	r.line.backend.Sent = func(b []byte) { batch = b } // it holds until the next transaction
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, receipt, err := r.line.step(d)
	runtime.ReadMemStats(&after)
	sent(batch)
	k := r.result.Kinds.each()[kind]
	k.Messages, k.Bytes = receipt.Messages, receipt.Bytes
	k.Elements = receipt.Added + receipt.Replaced + receipt.Removed
	k.Allocations, k.AllocatedBytes = after.Mallocs-before.Mallocs, after.TotalAlloc-before.TotalAlloc
	return err
}

// replay gives the batches to another kernel with the same content.
func (r *changeRun) replay(ctx context.Context) (err error) {
	r.line = nil // its memory is not needed any more
	l, err := newBenchLine()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	if _, _, err := l.step(r.cluster.all()); err != nil {
		return err
	}
	if err := settle(ctx); err != nil {
		return err
	}
	const before = 1 + numChangeKinds // those not timed
	for n, batch := range r.batches {
		if err := ctx.Err(); err != nil {
			return err
		}
		took, err := replay(l.benchHost, batch)
		if err != nil {
			return err
		}
		if n >= before {
			kind := (n - before) % numChangeKinds
			r.floor[kind] = append(r.floor[kind], took)
		}
	}
	return nil
}

func (r *changeResult) print(s *show) {
	s.line("%s", s.paint(bold, fmt.Sprintf("Change: in a kernel with %s Services with %s endpoints each, %s rounds",
		thousands(r.Services), thousands(r.Endpoints), thousands(r.Rounds))))
	s.line("")
	c := columns{18, 12, 12, 12, 12, 10, 10, 8}
	s.line("  %s", s.paint(dim, c.row("", "p50", "p99", "own p50", "floor p50", "elements", "bytes", "allocations")))
	for _, k := range r.Kinds.each() {
		s.line("  %s", c.row(k.name, micro(k.P50), micro(k.P99), micro(k.OwnP50), micro(k.FloorP50),
			fmt.Sprint(k.Elements), fmt.Sprint(k.Bytes), fmt.Sprint(k.Allocations)))
	}
	s.line("\n  The first fill:")
	r.benchFill.print(s)
	s.line("\n%s", s.paint(dim,
		"  Own is all but the commit. The floor is the kernel alone, given the same bytes in another namespace."))
}

// micro writes a time given in microseconds.
func micro(us float64) string { return brief(time.Duration(us * 1e3)) }
