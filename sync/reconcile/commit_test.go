package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// partWriter is a kernel that takes some Services at a time, refuses some, and fails now and then.
type partWriter struct {
	*rand.Rand
	// kernel are the Services that are wholly written, left those that are not.
	kernel map[snapshot.Name]*dataplane.Service
	left   map[snapshot.Name]bool
	// parts and failures count what happened.
	parts, failures int
}

func (w *partWriter) Apply(want *dataplane.State, change dataplane.Change) (r dataplane.Receipt, err error) {
	switch w.IntN(8) {
	case 0:
		w.failures++
		return r, errors.New("no memory")
	case 1:
		for n := range want.Services {
			if n.Name != "a" && w.kernel[n] != want.Services[n] {
				w.failures++
				return r, &dataplane.Refused{Services: map[snapshot.Name]error{n: errors.New("no")}}
			}
		}
	}
	due := maps.Clone(w.left)
	for _, n := range change.Services {
		due[n] = true
	}
	if r.Full = w.IntN(9) == 0; r.Full {
		for n := range want.Services {
			due[n] = true
		}
	}
	clear(w.left)
	for n := range due {
		switch svc := want.Services[n]; {
		case svc == nil:
			delete(w.kernel, n)
		case w.IntN(3) == 0:
			w.left[n] = true
			r.Left = append(r.Left, n)
		default:
			w.kernel[n] = svc
		}
	}
	if len(r.Left) > 0 {
		w.parts++
	}
	return r, nil
}

func (w *partWriter) Check() ([]string, time.Duration, error) {
	if w.IntN(20) == 0 {
		return []string{"a set is gone"}, 0, nil
	}
	return nil, 0, nil
}

func (w *partWriter) Remove() error { return nil }

// TestCommitsTellWhatIsProgrammed: whatever is written in parts, refused, tried again or fails, who listens to
// commits knows which Services the kernel holds wholly, and Before is what was told of last. Each Writing has one
// answer.
func TestCommitsTellWhatIsProgrammed(t *testing.T) {
	met := partWriter{}
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			p := &partWriter{Rand: rand.New(rand.NewPCG(seed, 1)), kernel: map[snapshot.Name]*dataplane.Service{},
				left: map[snapshot.Name]bool{}}
			known, writing := map[snapshot.Name]*dataplane.Service{}, 0
			commit := func(c Commit) {
				writing--
				for i, was := range c.Before {
					is := c.After[i]
					if was == nil && is == nil {
						continue
					}
					n := nameOfEither(was, is)
					if known[n] != was {
						t.Errorf("%v was %p; the commit says %p", n, known[n], was)
					}
					if known[n] = is; is == nil {
						delete(known, n)
					}
				}
				if !maps.Equal(known, p.kernel) {
					t.Errorf("seed %d: the commits tell of %v; the kernel holds %v", seed, known, p.kernel)
				}
			}
			b := &fakeBackend{loop: &Loop{Log: slog.New(slog.DiscardHandler), Listeners: []Listener{{
				Writing:   func() { writing++ },
				Committed: commit,
				Failed:    func(Failure) { writing-- },
				Written: func(Transaction) {
					if writing != 0 || len(p.left) > 0 {
						t.Errorf("%d are being written, and %v left, when all is", writing, p.left)
					}
				},
			}}}}
			w := &walk{Walk: testkit.NewWalk(seed, nil), cluster: snapshot.New()}
			w.q, _ = start(t, b)
			b.loop.Writer = p
			w.q.Synced()
			for range 60 {
				w.put(w.delta())
				time.Sleep(time.Duration(w.IntN(400)) * time.Millisecond)
			}
			synctest.Wait() // the loop may be in the middle of a step
			met.parts, met.failures = met.parts+p.parts, met.failures+p.failures
		})
	}
	if met.parts < 100 || met.failures < 100 {
		t.Errorf("there were %d parts and %d failures", met.parts, met.failures)
	}
}

func nameOfEither(a, b *dataplane.Service) snapshot.Name {
	if a != nil {
		return a.Name
	}
	return b.Name
}

// threeParts is a kernel that takes a part of the first transaction, fails at the rest, and takes what comes then.
type threeParts struct {
	queue *snapshot.Queue
	at    []time.Time
}

func (w *threeParts) Apply(want *dataplane.State, change dataplane.Change) (r dataplane.Receipt, err error) {
	time.Sleep(time.Millisecond)
	switch w.at = append(w.at, time.Now()); len(w.at) {
	case 1:
		w.queue.Put(service("b"))
		r.Left = change.Services
	case 2:
		err = errors.New("no memory")
	}
	return r, err
}

func (w *threeParts) Check() ([]string, time.Duration, error) { return nil, 0, nil }

func (w *threeParts) Remove() error { return nil }

// TestRetryWaits: if a change comes while a part is written, and goes out with the rest, it does not hasten the retry.
// That was so in every other case: select takes any of two channels that are ready.
func TestRetryWaits(t *testing.T) {
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			q := snapshot.NewQueue(1)
			w := &threeParts{queue: q}
			l := &Loop{Queue: q, Planner: dataplane.NewPlanner(dataplane.Config{}), Writer: w,
				Log: slog.New(slog.DiscardHandler)}
			q.Put(service("a"))
			q.Synced()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := l.Run(ctx); err != nil {
				t.Fatal(err)
			}
			if len(w.at) != 3 {
				t.Fatalf("transactions at %v; want 3", w.at)
			}
			if waited := w.at[2].Sub(w.at[1]); waited < retryFirst {
				t.Fatalf("the retry came after %v; want %v at least", waited, retryFirst)
			}
		})
	}
}
