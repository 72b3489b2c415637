package benchmark

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The kinds of change, in the order of a round.
const (
	endpointReplaced = iota
	endpointAdded
	endpointRemoved
	serviceAdded
	serviceRemoved
	numChangeKinds
)

// ChangeOptions say what Change measures. Services of Options is not used.
type ChangeOptions struct {
	Options
	// Sizes are numbers of Services, Rounds how many changes of each kind are made in each.
	Sizes  []int
	Rounds int
}

// Prepare sorts the sizes and refuses what cannot be measured. An error begins with the field's name in lower case.
func (o *ChangeOptions) Prepare() error {
	slices.Sort(o.Sizes)
	o.Sizes = slices.Compact(o.Sizes)
	switch {
	case o.Rounds < 1:
		return fmt.Errorf("rounds: %d is not a positive number", o.Rounds)
	case len(o.Sizes) == 0 || o.Sizes[0] < 1 || o.Sizes[len(o.Sizes)-1] > MaxServices:
		return fmt.Errorf("sizes: %v are not between 1 and %d", o.Sizes, MaxServices)
	}
	o.Services = o.Sizes[len(o.Sizes)-1] // there must be addresses for all endpoints
	return nil
}

// ChangeResult is what Change measured.
type ChangeResult struct {
	Endpoints int          `json:"endpoints"`
	Rounds    int          `json:"rounds"`
	Sizes     []ChangeSize `json:"sizes"`
}

// ChangeSize is what Change measured in a cluster of one size.
type ChangeSize struct {
	Fill
	Kinds ChangeKinds `json:"kinds"`
}

// ChangeKinds has what each kind of change takes.
type ChangeKinds struct {
	EndpointReplaced ChangeKind `json:"endpoint_replaced"`
	EndpointAdded    ChangeKind `json:"endpoint_added"`
	EndpointRemoved  ChangeKind `json:"endpoint_removed"`
	ServiceAdded     ChangeKind `json:"service_added"`
	ServiceRemoved   ChangeKind `json:"service_removed"`
}

// each gives the kinds in their order, with their names for people.
func (k *ChangeKinds) each() [numChangeKinds]struct {
	name string
	*ChangeKind
} {
	return [...]struct {
		name string
		*ChangeKind
	}{
		{"endpoint replaced", &k.EndpointReplaced},
		{"endpoint added", &k.EndpointAdded},
		{"endpoint removed", &k.EndpointRemoved},
		{"service added", &k.ServiceAdded},
		{"service removed", &k.ServiceRemoved},
	}
}

// ChangeKind is what one kind of change takes. Messages, elements, bytes and allocations are those of one change.
type ChangeKind struct {
	P50            float64 `json:"p50_us"`
	P99            float64 `json:"p99_us"`
	OwnP50         float64 `json:"own_p50_us"`
	KernelP50      float64 `json:"kernel_p50_us"`
	FloorP50       float64 `json:"floor_p50_us"`
	Messages       int     `json:"messages"`
	Elements       int     `json:"elements"`
	Bytes          int     `json:"bytes"`
	Allocations    uint64  `json:"allocations"`
	AllocatedBytes uint64  `json:"allocated_bytes"`
}

// changeRun is one measurement on its way.
type changeRun struct {
	Options
	line    *line
	cluster *Cluster
	random  *rand.Rand
	result  *ChangeSize
	// batches are what was sent for all changes, in their order.
	batches [][]byte
	total   [numChangeKinds][]time.Duration
	own     [numChangeKinds][]time.Duration
	kernel  [numChangeKinds][]time.Duration
	floor   [numChangeKinds][]time.Duration
}

// Change fills a kernel, then changes one thing at a time and measures from the event to the kernel's
// acknowledgement. A round is one change of each kind. Prepare comes first.
func Change(ctx context.Context, o *ChangeOptions) (*ChangeResult, error) {
	out := &ChangeResult{Endpoints: o.Endpoints, Rounds: o.Rounds}
	for _, n := range o.Sizes {
		size := o.Options
		size.Services = n
		r := &changeRun{Options: size, cluster: NewCluster(n, o.Endpoints), random: rand.New(rand.NewPCG(1, 1)),
			result: &ChangeSize{}}
		if err := r.run(ctx, o.Rounds); err != nil {
			return nil, fmt.Errorf("%d Services: %w", n, err)
		}
		out.Sizes = append(out.Sizes, *r.result)
	}
	return out, nil
}

// run makes all changes, and replays them.
func (r *changeRun) run(ctx context.Context, rounds int) error {
	if err := r.measure(ctx, rounds); err != nil {
		return err
	}
	r.show("%d Services: the same bytes once more", r.Services)
	if err := r.replay(ctx); err != nil {
		return err
	}
	median := func(samples []time.Duration) float64 { return microseconds(percentile(sorted(samples), 50)) }
	for i, k := range r.result.Kinds.each() {
		k.P50, k.P99 = median(r.total[i]), microseconds(percentile(sorted(r.total[i]), 99))
		k.OwnP50, k.KernelP50, k.FloorP50 = median(r.own[i]), median(r.kernel[i]), median(r.floor[i])
	}
	return nil
}

// measure fills a kernel and makes all the changes.
func (r *changeRun) measure(ctx context.Context, rounds int) (err error) {
	if r.line, err = newLine(r.Options); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.line.close()) }()
	r.show("filling the kernel with %d Services", r.Services)
	if r.result.Fill, err = r.fill(ctx, r.cluster, r.line.fill); err != nil {
		return err
	}
	r.line.backend.Sent = func(batch []byte) { r.batches = append(r.batches, slices.Clone(batch)) }
	// One Service has an endpoint more from here on: in real clusters there is a chain for every usual number.
	if _, _, err := r.line.step(SliceDelta(r.cluster.Added(r.sliceOf(0)))); err != nil {
		return err
	}
	for n := range rounds + 1 {
		r.show("%d Services: round %d of %d", r.Services, n, rounds)
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
		endpointReplaced: func() snapshot.Delta { return SliceDelta(r.cluster.Replaced(r.sliceOf(replaced))) },
		endpointAdded:    func() snapshot.Delta { return SliceDelta(r.cluster.Added(r.sliceOf(scaled))) },
		endpointRemoved:  func() snapshot.Delta { return SliceDelta(r.cluster.Removed(r.sliceOf(scaled))) },
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

// sliceOf gives a Service's slice as it is now.
func (r *changeRun) sliceOf(i int) *snapshot.Slice {
	owner, name := r.cluster.Name(i), r.cluster.SliceName(i)
	return r.line.snapshot.Slices[owner][name.Name]
}

// timed makes one change.
func (r *changeRun) timed(kind int, d snapshot.Delta) error {
	start := time.Now()
	_, receipt, err := r.line.step(d)
	total := time.Since(start)
	r.total[kind] = append(r.total[kind], total)
	r.own[kind] = append(r.own[kind], total-receipt.Commit)
	r.kernel[kind] = append(r.kernel[kind], receipt.Commit)
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
	l, err := newLine(r.Options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	if _, _, err := l.step(r.cluster.All()); err != nil {
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
		took, err := replay(l.host, batch)
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
