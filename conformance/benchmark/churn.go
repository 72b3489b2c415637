package benchmark

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

// writers is how many requests may be under way at once.
const writers = 32

// probePause is how long a probe rests, on average, before it changes again. All of them together add some changes a
// second to those of the rate.
const probePause = time.Second

// churn changes endpoints of Services by chance at a steady rate, for a time. Meanwhile the probes change one after
// the other, each as soon as its last change was seen, which says how long a change takes. In the end one of them
// says how far behind the proxy is.
func (n *node) churn(ctx context.Context, rate float64, length, drain time.Duration) (*results.Churn, error) {
	out := &results.Churn{Rate: rate}
	s := &samples{}
	busy := n.usage.processor()
	began := time.Now()
	end := began.Add(length)
	group, inner := errgroup.WithContext(ctx)
	for i := range probes - 1 {
		group.Go(func() error { return n.probing(inner, s, i, end, drain) })
	}
	group.Go(func() error {
		written, err := n.write(inner, rate, end)
		if err != nil {
			return err
		}
		passed := time.Since(began).Seconds()
		out.Written = float64(written) / passed
		out.Cores = (n.usage.processor() - busy).Seconds() / passed
		return n.behind(inner, &out.Behind, drain)
	})
	if err := group.Wait(); err != nil {
		return nil, err
	}
	out.Spans = s.spans()
	return out, nil
}

// probing changes one probe again and again until the end. What is not seen when the drain is over, too, is left open.
func (n *node) probing(ctx context.Context, s *samples, probe int, end time.Time, drain time.Duration) error {
	for {
		if err := sleep(ctx, rand.N(2*probePause)); err != nil {
			return err
		}
		left := time.Until(end)
		if left <= 0 {
			return nil
		}
		if err := n.span(ctx, s, probe, left+drain); err != nil {
			return err
		}
	}
}

// behind changes the last probe and waits: proxies get changes in the order they were written, so what came before is
// done then.
func (n *node) behind(ctx context.Context, out *results.Wait, drain time.Duration) error {
	probe := n.probe(probes - 1)
	want, err := n.change(ctx, probe, 0)
	if err != nil {
		return err
	}
	w, err := n.wait(await(ctx, time.Now(), drain, n.ended, func() bool { return n.reaches(n.frontend(probe)) == want }))
	*out = results.Wait{Seconds: w.Seconds, Limit: w.Limit}
	return err
}

// write has changes written at a rate until the end, and gives how many were.
func (n *node) write(ctx context.Context, rate float64, end time.Time) (int, error) {
	var done atomic.Int64
	due := make(chan struct{}, writers)
	group, inner := errgroup.WithContext(ctx)
	for range writers {
		group.Go(func() error {
			for range due {
				service := rand.IntN(n.size.Services)
				if _, err := n.change(inner, service, rand.IntN(n.size.Endpoints)); err != nil {
					return err
				}
				done.Add(1)
			}
			return nil
		})
	}
	group.Go(func() error {
		defer close(due)
		return pace(inner, rate, end, due)
	})
	err := group.Wait()
	return int(done.Load()), err
}

// pace puts a token into due at a rate until the end. What the writers cannot take is late, and not made up for after
// the end.
func pace(ctx context.Context, rate float64, end time.Time, due chan<- struct{}) error {
	began := time.Now()
	for i := 0; ; i++ {
		at := began.Add(time.Duration(float64(i) / rate * float64(time.Second)))
		if at.After(end) || time.Now().After(end) {
			return nil
		}
		if left := time.Until(at); left > 0 {
			if err := sleep(ctx, left); err != nil {
				return err
			}
		}
		select {
		case due <- struct{}{}:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
