package gateway

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/verdict-proxy/verdict/internal/answers/collector"
	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// tracker learns which Gateways all nodes have programmed.
type tracker struct {
	ask collector.Asker
	// changed is called when an answer came, and observe is told how long it took until all nodes had a change.
	changed func()
	observe func(time.Duration)
	// all are the goroutines that ask.
	all sync.WaitGroup

	mu  sync.Mutex
	has map[types.NamespacedName]*progress
	// held are backends that all nodes had programmed once, by their UIDs: from then on nodes follow them by themselves.
	held map[types.NamespacedName]types.UID
}

// progress is how far a Gateway is.
type progress struct {
	// goal names what nodes must have; empty while it is not written yet. programmed says that they have.
	goal       string
	programmed bool
	// began is when it ceased to be programmed, and asked when nodes were asked first since then, zero if they were not.
	began, asked time.Time
	// why says what was missing last.
	why  string
	stop context.CancelFunc
}

// need is a Service that nodes must have.
type need struct {
	name types.NamespacedName
	uid  types.UID
}

const (
	// patience is how long statuses say nothing of a change that nodes may program any moment.
	patience = 5 * time.Second
	// Nodes are asked again after askAgain, then after twice as long each time, up to askRarely.
	askAgain, askRarely = time.Second, time.Minute
	// asksOfGateway is how many Services of a Gateway are asked about at once.
	asksOfGateway = 8
	// maxNamed is how many nodes a status names, and maxHeld bounds what is remembered of backends.
	maxNamed, maxHeld = 3, 100_000
)

func newTracker(ask collector.Asker, changed func(), observe func(time.Duration)) *tracker {
	return &tracker{ask: ask, changed: changed, observe: observe, has: map[types.NamespacedName]*progress{},
		held: map[types.NamespacedName]types.UID{}}
}

// known reports whether something is known of a Gateway.
func (t *tracker) known(n types.NamespacedName) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.has[n] != nil
}

// trust notes that a Gateway was programmed when this process began to lead.
func (t *tracker) trust(n types.NamespacedName, goal string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.has[n] = &progress{goal: goal, programmed: true, stop: func() {}}
}

// aim has nodes asked whether they have a goal, if it is a new one; an empty goal is not written yet. It returns how
// far the Gateway is.
func (t *tracker) aim(ctx context.Context, n types.NamespacedName, goal string, needs func() []need) progress {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.has[n]
	if p == nil {
		p = &progress{began: time.Now(), stop: func() {}}
		t.has[n] = p
	} else if p.goal == goal {
		return *p
	}
	p.stop()
	if p.programmed {
		p.began, p.asked = time.Now(), time.Time{}
	}
	p.goal, p.programmed, p.why, p.stop = goal, false, "", func() {}
	if goal != "" {
		if p.asked.IsZero() {
			p.asked = time.Now()
		}
		var asking context.Context
		asking, p.stop = context.WithCancel(ctx)
		wanted := needs()
		t.all.Go(func() { t.follow(asking, p, wanted) })
	}
	return *p
}

// keep forgets all Gateways but some.
func (t *tracker) keep(names map[types.NamespacedName]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for n, p := range t.has {
		if !names[n] {
			p.stop()
			delete(t.has, n)
		}
	}
}

// follow asks nodes until all of them have what a Gateway needs, or ctx is done.
func (t *tracker) follow(ctx context.Context, p *progress, needs []need) {
	timeout := patience
	for pause := askAgain; ; pause = min(2*pause, askRarely) {
		why := t.askAll(ctx, needs, timeout)
		t.mu.Lock()
		if ctx.Err() != nil { // another goal
			t.mu.Unlock()
			return
		}
		p.programmed, p.why = why == "", why
		took := time.Since(p.began)
		t.mu.Unlock()
		t.changed()
		if why == "" {
			t.observe(took)
			return
		}
		clock.Pause(ctx, pause)
		timeout = everywhere.MaxTimeout
	}
}

// askAll asks about all Services, the Gateway's first, and returns why not all nodes have them.
func (t *tracker) askAll(ctx context.Context, needs []need, timeout time.Duration) string {
	end := time.Now().Add(timeout)
	ctx, cancel := context.WithDeadline(ctx, end.Add(time.Second)) // after the answers that name nodes
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(asksOfGateway)
	for i, n := range needs {
		t.mu.Lock()
		held := i > 0 && t.held[n.name] == n.uid
		t.mu.Unlock()
		if held {
			continue
		}
		group.Go(func() error {
			a := t.ask(ctx, snapshot.Name{Namespace: n.name.Namespace, Name: n.name.Name},
				max(time.Until(end), time.Millisecond))
			if !a.Everywhere && (i == 0 || !a.Nothing) {
				return fmt.Errorf("%s", reason(n.name, a))
			}
			t.mu.Lock()
			defer t.mu.Unlock()
			if len(t.held) >= maxHeld {
				clear(t.held)
			}
			t.held[n.name] = n.uid
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err.Error()
	}
	return ""
}

// reason says which nodes do not have a Service, or why that is not known.
func reason(n types.NamespacedName, a everywhere.Answer) string {
	if a.Missing == 0 {
		return fmt.Sprintf("it is not known whether nodes have programmed the Service %v: %.200s", n, a.Why)
	}
	names := slices.Clone(a.MissingNodes[:min(len(a.MissingNodes), maxNamed)])
	if more := a.Missing - len(names); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return fmt.Sprintf("not yet programmed by %d of %d nodes: the Service %v on %s", a.Missing, a.Nodes, n,
		strings.Join(names, ", "))
}
