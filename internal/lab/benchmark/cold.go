package benchmark

import (
	"context"
	"errors"
	"runtime/debug"
	"slices"
	"time"
)

// ColdResult is what Cold measured.
type ColdResult struct {
	Fill
	Rounds  int         `json:"rounds"`
	Seconds ColdSeconds `json:"seconds"`
	Floor   float64     `json:"floor_seconds"`
	// Slowest are the slowest of each.
	Slowest      ColdSeconds `json:"slowest_seconds"`
	SlowestFloor float64     `json:"slowest_floor_seconds"`
}

// ColdSeconds are the steps' times.
type ColdSeconds struct {
	Policy  float64 `json:"policy"`
	Compile float64 `json:"compile"`
	Encode  float64 `json:"encode"`
	Commit  float64 `json:"commit"`
	Total   float64 `json:"total"`
}

// coldRound is one round's times.
type coldRound struct{ policy, compile, encode, commit, floor time.Duration }

func (r coldRound) total() time.Duration { return r.policy + r.compile + r.encode + r.commit }

// Cold measures one transaction that brings a whole cluster into an empty kernel, several times: the time of each
// step, and beside it the floor, which is the kernel alone given the same bytes. The first fill, which is not timed,
// says how much memory it takes.
func Cold(ctx context.Context, o Options, rounds int) (*ColdResult, error) {
	out := &ColdResult{Rounds: rounds}
	o.show("the first fill")
	var err error
	if out.Fill, err = o.firstFill(ctx); err != nil {
		return nil, err
	}
	var done []coldRound
	for n := range rounds {
		o.show("round %d of %d", n+1, rounds)
		round, err := o.coldRound(ctx)
		if err != nil {
			return nil, err
		}
		done = append(done, round)
	}
	at := func(p int) (s ColdSeconds, floor float64) {
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
func (o Options) firstFill(ctx context.Context) (f Fill, err error) {
	l, err := newLine(o)
	if err != nil {
		return f, err
	}
	f, err = o.fill(ctx, NewCluster(o.Services, o.Endpoints), l.fill)
	return f, errors.Join(err, l.close())
}

// coldRound fills one empty kernel, then another with the same bytes.
func (o Options) coldRound(ctx context.Context) (round coldRound, err error) {
	batches, err := o.coldFill(ctx, &round)
	if err != nil {
		return round, err
	}
	h, err := newHost(o)
	if err != nil {
		return round, err
	}
	if err = settle(ctx); err == nil {
		round.floor, err = replay(h, batches...)
	}
	return round, errors.Join(err, h.close())
}

// coldFill fills an empty kernel and gives the bytes that took. The namespace is gone after it: two full ones would
// be in each other's way.
func (o Options) coldFill(ctx context.Context, round *coldRound) (batches [][]byte, err error) {
	l, err := newLine(o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	all := NewCluster(o.Services, o.Endpoints).All()
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
func replay(h *host, batches ...[]byte) (time.Duration, error) {
	start := time.Now()
	for _, batch := range batches {
		if err := h.backend.Replay(batch); err != nil {
			return 0, err
		}
	}
	return time.Since(start), nil
}
