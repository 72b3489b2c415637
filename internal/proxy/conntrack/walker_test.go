package conntrack

import (
	"context"
	"testing"
	"time"
)

func newCleaner(t table, report func(SweepResult)) *Cleaner { return NewCleaner(newWalker(t), report) }

func newReleaser(t table, o ReleaserOptions) *Releaser { return NewReleaser(newWalker(t), o) }

// run takes a look by itself, which is not repeated.
func (s *sweep) run(ctx context.Context) SweepResult {
	s.result.Walked = s.walker.takeAlone(ctx, s)
	return s.result
}

func (l *releaseLook) run(ctx context.Context) ReleaseResult {
	return l.result(l.walker.takeAlone(ctx, l))
}

// newUnanswered returns one whose Walker runs until the test ends.
func newUnanswered(t testing.TB, of table) *Unanswered {
	u := NewUnanswered(newWalker(of))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- u.walker.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return u
}

// alone is a look that does nothing at its end.
type alone struct{ look }

func (alone) done(context.Context, Walked, time.Duration) bool { return true }

func (w *Walker) takeAlone(ctx context.Context, l look) Walked {
	u := &user{look: alone{l}}
	r := round{table: w.table, narrow: w.table.narrow(), users: []*user{u}}
	r.run(ctx)
	return u.Walked
}
