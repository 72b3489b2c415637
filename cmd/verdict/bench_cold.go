package main

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/spf13/cobra"
)

func newBenchCold() *cobra.Command {
	var b bench
	var rounds int
	cmd := &cobra.Command{
		Use:   "cold",
		Short: "Everything written into an empty kernel",
		Long: `Cold measures one transaction that brings a whole cluster into an empty kernel. Its steps:

  policy    what should happen to packets is decided from the objects
  compile   what the kernel should hold, and in what order it is written
  encode    that as netlink messages
  commit    the kernel takes them
  floor     the same bytes once more, into another empty namespace: the kernel alone

Each round begins with a collected heap and new namespaces. Medians of all rounds are reported. Memory and allocations are
those of one fill before them, the first of this process, which is not timed.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rounds < 1 {
				return fmt.Errorf("--rounds: %d is not a positive number", rounds)
			}
			return b.run(cmd, func(ctx context.Context) (benchResult, error) { return b.cold(ctx, rounds) })
		},
	}
	b.add(cmd)
	cmd.Flags().IntVar(&rounds, "rounds", 5, "how often it is done")
	return cmd
}

// coldResult is what "bench cold" reports.
type coldResult struct {
	benchFill
	Rounds  int         `json:"rounds"`
	Seconds coldSeconds `json:"seconds"`
	Floor   float64     `json:"floor_seconds"`
	// Slowest are the slowest of each.
	Slowest      coldSeconds `json:"slowest_seconds"`
	SlowestFloor float64     `json:"slowest_floor_seconds"`
}

// coldSeconds are the steps' times.
type coldSeconds struct {
	Policy  float64 `json:"policy"`
	Compile float64 `json:"compile"`
	Encode  float64 `json:"encode"`
	Commit  float64 `json:"commit"`
	Total   float64 `json:"total"`
}

// coldRound is one round's times.
type coldRound struct{ policy, compile, encode, commit, floor time.Duration }

func (r coldRound) total() time.Duration { return r.policy + r.compile + r.encode + r.commit }

func (b *bench) cold(ctx context.Context, rounds int) (*coldResult, error) {
	out := &coldResult{Rounds: rounds}
	b.progress.show("the first fill")
	var err error
	if out.benchFill, err = b.firstFill(ctx); err != nil {
		return nil, err
	}
	var done []coldRound
	for n := range rounds {
		b.progress.show("round %d of %d", n+1, rounds)
		round, err := b.coldRound(ctx)
		if err != nil {
			return nil, err
		}
		done = append(done, round)
	}
	at := func(p int) (s coldSeconds, floor float64) {
		of := func(step func(coldRound) time.Duration) float64 {
			samples := make([]time.Duration, len(done))
			for i, r := range done {
				samples[i] = step(r)
			}
			return percentile(sorted(samples), p).Seconds()
		}
		s.Policy = of(func(r coldRound) time.Duration { return r.policy })
		s.Compile = of(func(r coldRound) time.Duration { return r.compile })
		s.Encode = of(func(r coldRound) time.Duration { return r.encode })
		s.Commit = of(func(r coldRound) time.Duration { return r.commit })
		s.Total = of(coldRound.total)
		return s, of(func(r coldRound) time.Duration { return r.floor })
	}
	out.Seconds, out.Floor = at(50)
	out.Slowest, out.SlowestFloor = at(100)
	return out, nil
}

// firstFill fills a kernel for what it takes besides time.
func (b *bench) firstFill(ctx context.Context) (f benchFill, err error) {
	l, err := newBenchLine()
	if err != nil {
		return f, err
	}
	f, err = b.fill(ctx, newBenchCluster(b.services, b.endpoints), l.fill)
	return f, errors.Join(err, l.close())
}

// coldRound fills one empty kernel, then another with the same bytes.
func (b *bench) coldRound(ctx context.Context) (round coldRound, err error) {
	batches, err := b.coldFill(ctx, &round)
	if err != nil {
		return round, err
	}
	h, err := newBenchHost()
	if err != nil {
		return round, err
	}
	if err = settle(ctx); err == nil {
		round.floor, err = replay(h, batches...)
	}
	return round, errors.Join(err, h.close())
}

// coldFill fills an empty kernel and gives the bytes that took. The namespace is gone after it: two full ones would be in
// each other's way.
func (b *bench) coldFill(ctx context.Context, round *coldRound) (batches [][]byte, err error) {
	l, err := newBenchLine()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	all := newBenchCluster(b.services, b.endpoints).all()
	debug.FreeOSMemory()
	if err := settle(ctx); err != nil {
		return nil, err
	}
	l.backend.Sent = func(sent []byte) { batches = append(batches, slices.Clone(sent)) }
	policy, r, err := l.step(all)
	*round = coldRound{policy: policy, compile: r.Plan, encode: r.Encode, commit: r.Commit}
	return batches, err
}

// replay has the kernel take batches that were made before.
func replay(h *benchHost, batches ...[]byte) (time.Duration, error) {
	start := time.Now()
	for _, batch := range batches {
		if err := h.backend.Replay(batch); err != nil {
			return 0, err
		}
	}
	return time.Since(start), nil
}

func (r *coldResult) print(s *show) {
	s.line("%s", s.paint(bold, fmt.Sprintf("Cold: %s Services with %s endpoints each into an empty kernel, %d rounds",
		thousands(r.Services), thousands(r.Endpoints), r.Rounds)))
	s.line("")
	c := columns{12, 12}
	s.line("  %s", s.paint(dim, c.row("", "median", "slowest")))
	for _, row := range []struct {
		name            string
		median, slowest float64
	}{
		{"policy", r.Seconds.Policy, r.Slowest.Policy},
		{"compile", r.Seconds.Compile, r.Slowest.Compile},
		{"encode", r.Seconds.Encode, r.Slowest.Encode},
		{"commit", r.Seconds.Commit, r.Slowest.Commit},
		{"total", r.Seconds.Total, r.Slowest.Total},
		{"floor", r.Floor, r.SlowestFloor},
	} {
		s.line("  %s", c.row(row.name, seconds(row.median), seconds(row.slowest)))
	}
	s.line("")
	r.benchFill.print(s)
	s.line("\n%s", s.paint(dim, "  The floor is the kernel alone, given the same bytes in another empty namespace."))
}

// seconds writes a time given in seconds.
func seconds(s float64) string { return brief(time.Duration(s * float64(time.Second))) }
