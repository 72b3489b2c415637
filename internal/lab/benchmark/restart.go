package benchmark

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// RestartResult is what Restart measured.
type RestartResult struct {
	Fill
	Rounds    int         `json:"rounds"`
	Changed   int         `json:"changed"`
	Adopted   RestartKind `json:"adopted"`
	Corrected RestartKind `json:"corrected"`
}

// RestartKind is what one kind of restart takes. Messages and elements are those that were written in one round.
type RestartKind struct {
	Seconds  float64 `json:"seconds"`
	Slowest  float64 `json:"slowest_seconds"`
	Messages int     `json:"messages"`
	Elements int     `json:"elements_written"`
}

// Restart measures how long a new process takes to adopt the tables that it finds, from objects in memory until the
// kernel is known to hold them: when nothing changed meanwhile, and when changed Services have another endpoint.
func Restart(ctx context.Context, o Options, rounds, changed int) (_ *RestartResult, err error) {
	out := &RestartResult{Rounds: rounds, Changed: changed}
	l, err := newLine(o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	cluster := NewCluster(o.Services, o.Endpoints)
	o.show("the first fill")
	if out.Fill, err = o.fill(ctx, cluster, l.fill); err != nil {
		return nil, err
	}
	objects := snapshot.New()
	objects.Apply(cluster.All())
	slices := map[int]*snapshot.Slice{}
	var adopted, corrected []time.Duration
	for n := range rounds {
		o.show("round %d of %d", n+1, rounds)
		took, err := l.again(ctx, objects, &out.Adopted)
		if err != nil {
			return nil, err
		}
		adopted = append(adopted, took)
		for i := range changed {
			if slices[i] == nil {
				slices[i] = cluster.Slice(i)
			}
			slices[i] = cluster.Replaced(slices[i])
			objects.Apply(SliceDelta(slices[i]))
		}
		if took, err = l.again(ctx, objects, &out.Corrected); err != nil {
			return nil, err
		}
		corrected = append(corrected, took)
	}
	// Each changed Service has one element replaced; an endpoint on this node may reach itself besides.
	if out.Adopted.Messages != 0 || out.Corrected.Elements < 2*changed || out.Corrected.Elements > 4*changed {
		return nil, fmt.Errorf("%d messages and %d elements were written: this measures something else",
			out.Adopted.Messages, out.Corrected.Elements)
	}
	out.Adopted.setTimes(adopted)
	out.Corrected.setTimes(corrected)
	return out, nil
}

func (k *RestartKind) setTimes(took []time.Duration) {
	all := sorted(took)
	k.Seconds, k.Slowest = percentile(all, 50).Seconds(), percentile(all, 100).Seconds()
}

// again goes on with a new backend and planner, which know nothing, and measures until the kernel carries all objects.
func (l *line) again(ctx context.Context, objects *snapshot.Snapshot, k *RestartKind) (time.Duration, error) {
	if err := l.reopen(); err != nil {
		return 0, err
	}
	debug.FreeOSMemory()
	if err := settle(ctx); err != nil {
		return 0, err
	}
	l.planner = dataplane.NewPlanner(NodeConfig)
	start := time.Now()
	change, _ := l.planner.Apply(objects, snapshot.Change{})
	r, err := l.backend.ApplyAll(l.planner.State(), change)
	took := time.Since(start)
	k.Messages, k.Elements = r.Messages, r.Added+2*r.Replaced+r.Removed
	return took, err
}
