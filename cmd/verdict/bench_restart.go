package main

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func newBenchRestart() *cobra.Command {
	var b bench
	var rounds, changed int
	cmd := &cobra.Command{
		Use:   "restart",
		Short: "A new process finds what an old one left in the kernel",
		Long: `Restart measures what a new process takes from objects in memory, that is after the first lists, until the kernel is known
to carry them, in two cases:

  adopted     nothing changed meanwhile: the tables are taken over, and nothing is written
  corrected   --changed Services lost an endpoint and got another one: the tables are read back, and the difference is
              written

Medians of all rounds are reported.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case rounds < 1:
				return fmt.Errorf("--rounds: %d is not a positive number", rounds)
			case changed < 1 || changed > b.services:
				return fmt.Errorf("--changed: %d is not between 1 and the number of Services", changed)
			}
			return b.run(cmd, func(ctx context.Context) (benchResult, error) { return b.restart(ctx, rounds, changed) })
		},
	}
	b.add(cmd)
	cmd.Flags().IntVar(&rounds, "rounds", 5, "how often it is done")
	cmd.Flags().IntVar(&changed, "changed", 10, "Services that change while nobody is there")
	return cmd
}

// restartResult is what "bench restart" reports.
type restartResult struct {
	benchFill
	Rounds    int         `json:"rounds"`
	Changed   int         `json:"changed"`
	Adopted   restartKind `json:"adopted"`
	Corrected restartKind `json:"corrected"`
}

// restartKind is what one kind of restart takes. Messages and elements are those that were written in one round.
type restartKind struct {
	Seconds  float64 `json:"seconds"`
	Slowest  float64 `json:"slowest_seconds"`
	Messages int     `json:"messages"`
	Elements int     `json:"elements_written"`
}

func (b *bench) restart(ctx context.Context, rounds, changed int) (_ *restartResult, err error) {
	out := &restartResult{Rounds: rounds, Changed: changed}
	l, err := newBenchLine()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	cluster := newBenchCluster(b.services, b.endpoints)
	b.progress.show("the first fill")
	if out.benchFill, err = b.fill(ctx, cluster, l.fill); err != nil {
		return nil, err
	}
	objects := snapshot.New()
	objects.Apply(cluster.all())
	slices := map[int]*snapshot.Slice{}
	var adopted, corrected []time.Duration
	for n := range rounds {
		b.progress.show("round %d of %d", n+1, rounds)
		took, err := l.again(ctx, objects, &out.Adopted)
		if err != nil {
			return nil, err
		}
		adopted = append(adopted, took)
		for i := range changed {
			if slices[i] == nil {
				slices[i] = cluster.slice(i)
			}
			slices[i] = cluster.replaced(slices[i])
			objects.Apply(sliceDelta(slices[i]))
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
	out.Adopted.Seconds, out.Adopted.Slowest = percentile(sorted(adopted), 50).Seconds(), percentile(sorted(adopted), 100).Seconds()
	out.Corrected.Seconds, out.Corrected.Slowest = percentile(sorted(corrected), 50).Seconds(), percentile(sorted(corrected), 100).Seconds()
	return out, nil
}

// again goes on with a new backend and planner, which know nothing, and measures until the kernel carries all objects.
func (l *benchLine) again(ctx context.Context, objects *snapshot.Snapshot, k *restartKind) (time.Duration, error) {
	if err := l.backend.Close(); err != nil {
		return 0, err
	}
	err := l.host.Do(func() (err error) {
		l.backend, err = openWithin(kernel.Options{}, config.DefaultCounterMemoryMiB)
		return err
	})
	if err != nil {
		return 0, err
	}
	debug.FreeOSMemory()
	if err := settle(ctx); err != nil {
		return 0, err
	}
	l.planner = dataplane.NewPlanner(benchConfig)
	start := time.Now()
	change, _ := l.planner.Apply(objects, snapshot.Change{})
	r, err := l.backend.ApplyAll(l.planner.State(), change)
	took := time.Since(start)
	k.Messages, k.Elements = r.Messages, r.Added+2*r.Replaced+r.Removed
	return took, err
}

func (r *restartResult) print(s *show) {
	s.line("%s", s.paint(bold, fmt.Sprintf("Restart: %s Services with %s endpoints each in the kernel, %d rounds",
		thousands(r.Services), thousands(r.Endpoints), r.Rounds)))
	s.line("")
	c := columns{12, 12, 12, 12}
	s.line("  %s", s.paint(dim, c.row("", "median", "slowest", "messages", "elements")))
	for _, row := range []struct {
		name string
		restartKind
	}{{"adopted", r.Adopted}, {"corrected", r.Corrected}} {
		s.line("  %s", c.row(row.name, seconds(row.Seconds), seconds(row.Slowest), thousands(row.Messages), thousands(row.Elements)))
	}
	s.line("")
	r.benchFill.print(s)
	s.line("\n%s", s.paint(dim, fmt.Sprintf("  Corrected: %s Services changed while nobody was there.", thousands(r.Changed))))
}
