package collector

import (
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// world is a cluster with a collector and its nodes.
type world struct {
	api       *fakeAPI
	collector *Collector
	// stop ends the collector.
	stop  func()
	nodes []*node
}

func newWorld(t testing.TB, nodes int) *world {
	t.Helper()
	w := &world{api: newFakeAPI(t)}
	w.api.set(cart, endpoint(1, "n0", true), endpoint(2, "n1", true))
	w.collector, w.stop = newCollector(t, w.api, "first")
	for i := range nodes {
		name := fmt.Sprintf("n%d", i)
		w.api.addNode(name)
		w.nodes = append(w.nodes, newNode(t, w.api, name))
	}
	w.program()
	connected(t, w.collector, nodes)
	return w
}

// program has all nodes program the cart.
func (w *world) program() {
	for _, n := range w.nodes {
		n.program(w.api, cart)
	}
}

// TestBarrier: the barrier holds until the last node has programmed it; a node that does not is named, and the barrier
// opens at its deadline. A node whose kubelet is gone holds nobody.
func TestBarrier(t *testing.T) {
	w := newWorld(t, 5)
	if a := w.nodes[0].ask(t, "shop/cart", 5*time.Second); !a.Everywhere || a.Nodes != 5 || a.Missing != 0 {
		t.Fatalf("at rest: %+v", a)
	}
	slow := w.nodes[4]
	w.api.set(cart, endpoint(1, "n0", false), endpoint(2, "n1", true))
	for _, n := range w.nodes[:4] {
		n.program(w.api, cart)
	}
	const late = 300 * time.Millisecond
	time.AfterFunc(late, func() { slow.program(w.api, cart) })
	begin := time.Now()
	if a := w.nodes[0].ask(t, "shop/cart", 5*time.Second); !a.Everywhere || time.Since(begin) < late-50*time.Millisecond {
		t.Errorf("after %v: %+v", time.Since(begin), a)
	}
	slow.mu.Lock()
	slow.stopped = true
	slow.mu.Unlock()
	w.api.set(cart, endpoint(2, "n1", true))
	w.program()
	begin = time.Now()
	a := w.nodes[1].ask(t, "shop/cart", 2*time.Second)
	if a.Everywhere || a.Missing != 1 || !slices.Equal(a.MissingNodes, []string{"n4"}) || a.Why == "" ||
		time.Since(begin) < 1900*time.Millisecond {
		t.Errorf("with a node that is stopped, after %v: %+v", time.Since(begin), a)
	}
	w.api.mu.Lock()
	w.api.beat("kube-node-lease/n4", time.Now().Add(-time.Minute))
	w.api.mu.Unlock()
	time.Sleep(leaseFresh) // it was believed to be there
	a = w.nodes[1].ask(t, "shop/cart", 10*time.Second)
	if !a.Everywhere || a.Gone != 1 || !slices.Equal(a.GoneNodes, []string{"n4"}) || a.Seconds < 0.9 {
		t.Errorf("with a node that is gone: %+v", a)
	}
	if s, _ := w.collector.Stats(); s.Waiting != 0 || s.Rounds != 0 {
		t.Errorf("something is left: %+v", s)
	}
}

// TestNothingToWaitFor: Services that do not exist or that no node programs answer at once, and not with 200: the hook
// has waited for nothing.
func TestNothingToWaitFor(t *testing.T) {
	w := newWorld(t, 2)
	headless := cart
	headless.Name = "headless"
	w.api.set(headless)
	w.api.services[headless].Spec.ClusterIP, w.api.services[headless].Spec.ClusterIPs = "None", []string{"None"}
	for _, service := range []string{"shop/none", "shop/headless"} {
		begin := time.Now()
		if a := w.nodes[0].ask(t, service, 5*time.Second); a.Everywhere || a.Nodes != 0 || a.Why == "" ||
			a.code != http.StatusNotFound || time.Since(begin) > time.Second {
			t.Errorf("%s after %v: %+v", service, time.Since(begin), a)
		}
	}
}

// TestTerminating: in a preStop hook, the slices may still say that the pod is ready. Then the answer waits until they
// do not, though all nodes hold what the API has.
func TestTerminating(t *testing.T) {
	w := newWorld(t, 3)
	w.api.addPod(cart, 1, "n0", true)
	w.api.addPod(cart, 2, "n1", false)
	if a := w.nodes[1].ask(t, "shop/cart", 5*time.Second); !a.Everywhere {
		t.Errorf("a node without such a pod: %+v", a)
	}
	if a := w.nodes[0].ask(t, "shop/cart", 300*time.Millisecond); a.Everywhere || a.Nodes != 0 || a.Why == "" {
		t.Errorf("while the slice says that it is ready: %+v", a)
	}
	const late = 300 * time.Millisecond
	time.AfterFunc(late, func() {
		w.api.set(cart, endpoint(1, "n0", false), endpoint(2, "n1", true))
		w.program()
	})
	begin := time.Now()
	if a := w.nodes[0].ask(t, "shop/cart", 5*time.Second); !a.Everywhere || time.Since(begin) < late-50*time.Millisecond {
		t.Errorf("after %v: %+v", time.Since(begin), a)
	}
}

// TestSharing: many waiters of one Service cost a few readings of the API and a few questions.
func TestSharing(t *testing.T) {
	w := newWorld(t, 4)
	w.nodes[3].mu.Lock()
	w.nodes[3].stopped = true
	w.nodes[3].mu.Unlock()
	w.api.set(cart, endpoint(2, "n1", true))
	w.program()
	before, _ := w.collector.Stats()
	const many = 100
	answers := make(chan answer, many)
	for i := range many {
		go func() { answers <- w.nodes[i%3].ask(t, "shop/cart", 10*time.Second) }()
	}
	testkit.Eventually(t, 5*time.Second, "all wait", func() bool {
		s, _ := w.collector.Stats()
		return s.Waiting == many
	})
	reads := w.api.count("GET services")
	w.nodes[3].mu.Lock()
	w.nodes[3].stopped = false
	w.nodes[3].mu.Unlock()
	w.nodes[3].program(w.api, cart)
	for range many {
		if a := <-answers; !a.Everywhere {
			t.Errorf("%+v", a)
		}
	}
	after, _ := w.collector.Stats()
	if q := after.Questions - before.Questions; q > 4*maxOfService || reads > 20 {
		t.Errorf("%d questions, %d readings", q, reads)
	}
}

// TestLeaderChange: another collector takes over when the first one ends, and waits go on there.
func TestLeaderChange(t *testing.T) {
	w := newWorld(t, 3)
	first := w.collector
	second, _ := newCollector(t, w.api, "second")
	w.nodes[2].mu.Lock()
	w.nodes[2].stopped = true
	w.nodes[2].mu.Unlock()
	w.api.set(cart, endpoint(2, "n1", true))
	w.program()
	answers := make(chan answer, 1)
	go func() { answers <- w.nodes[0].ask(t, "shop/cart", 30*time.Second) }()
	testkit.Eventually(t, 5*time.Second, "it waits", func() bool {
		s, _ := first.Stats()
		return s.Rounds == 1
	})
	w.stop()
	connected(t, second, 3)
	w.nodes[2].mu.Lock()
	w.nodes[2].stopped = false
	w.nodes[2].mu.Unlock()
	w.nodes[2].program(w.api, cart)
	if a := <-answers; !a.Everywhere || a.Nodes != 3 {
		t.Errorf("%+v", a)
	}
}

// TestNoCollector: without a collector, the answer comes after a short wait, and says so.
func TestNoCollector(t *testing.T) {
	api := newFakeAPI(t, "n0")
	n := newNode(t, api, "n0")
	begin := time.Now()
	a := n.ask(t, "shop/cart", 10*time.Second)
	if took := time.Since(begin); a.Everywhere || a.Why == "" || took > 4*time.Second || took < time.Second {
		t.Errorf("after %v: %+v", took, a)
	}
}
