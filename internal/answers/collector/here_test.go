package collector

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestLead: a process that leads may ask as its nodes do. It learns that all have a Service, or who lacks it, and
// shares a round with a node that asks the same. It is stopped before another leads.
func TestLead(t *testing.T) {
	api := newFakeAPI(t)
	api.set(cart, endpoint(1, "n0", true))
	askers, left := make(chan Asker, 1), make(chan struct{})
	c, stop := newCollector(t, api, "first", func(ctx context.Context, ask Asker) {
		askers <- ask
		<-ctx.Done()
		close(left)
	})
	w := &world{api: api, collector: c, stop: stop}
	for _, name := range []string{"n0", "n1", "n2"} {
		api.addNode(name)
		w.nodes = append(w.nodes, newNode(t, api, name))
	}
	w.program()
	connected(t, c, 3)
	ask := <-askers
	ctx := t.Context()
	if a := ask(ctx, cart, 5*time.Second); !a.Everywhere || a.Nodes != 3 {
		t.Errorf("%+v", a)
	}
	if a := ask(ctx, snapshot.Name{Namespace: "shop", Name: "none"}, 5*time.Second); !a.Nothing {
		t.Errorf("without the Service: %+v", a)
	}
	w.nodes[2].mu.Lock()
	w.nodes[2].stopped = true
	w.nodes[2].mu.Unlock()
	api.set(cart, endpoint(1, "n0", true), endpoint(2, "n1", true))
	w.program()
	if a := ask(ctx, cart, 3*time.Second); a.Everywhere || !slices.Equal(a.MissingNodes, []string{"n2"}) {
		t.Errorf("without n2: %+v", a)
	}
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if a := ask(short, cart, time.Minute); a.Everywhere || a.Why == "" {
		t.Errorf("taken back: %+v", a)
	}
	answers := make(chan everywhere.Answer, 2)
	go func() { answers <- ask(ctx, cart, time.Minute) }()
	go func() { answers <- w.nodes[0].ask(t, "shop/cart", time.Minute).Answer }()
	testkit.Eventually(t, 10*time.Second, "both wait for one round", func() bool {
		s, _ := c.Stats()
		return s.Rounds == 1 && s.Waiting == 2
	})
	w.nodes[2].mu.Lock()
	w.nodes[2].stopped = false
	w.nodes[2].mu.Unlock()
	w.program()
	for range 2 {
		if a := <-answers; !a.Everywhere {
			t.Errorf("once n2 has it: %+v", a)
		}
	}
	stop()
	<-left
}
