package benchmark

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// TestTurns has both nodes without a proxy take turns: each path has a figure of each counted round.
func TestTurns(t *testing.T) {
	w := &world{cluster: newCluster(results.Size{Services: 20, Endpoints: 2}), net: lab.New(), dir: t.TempDir()}
	labtest.Check(t, w.lay())
	out := &results.Paths{Size: w.size, Turns: map[string]map[results.Path][]float64{}, Missing: map[string]string{}}
	turns := &turns{
		settings: results.Settings{Rounds: 2, TurnTime: 0.05}, out: out, random: rand.New(rand.NewPCG(1, 1)),
		step: func(text string) { t.Log(text) },
	}
	t.Cleanup(func() {
		if err := errors.Join(turns.close(), w.close()); err != nil {
			t.Error(err)
		}
	})
	labtest.Check(t, turns.open(t.Context(), w, bareKinds))
	labtest.Check(t, turns.run(t.Context()))
	for _, k := range bareKinds {
		for _, path := range results.AllPaths {
			figures := out.Turns[k.Name][path]
			want := 2
			if path == results.ForwardedService || path == results.NodeService {
				want = 0 // there is no proxy
			}
			if len(figures) != want || want > 0 && min(figures[0], figures[1]) <= 0 {
				t.Errorf("%s, %s: %v; want %d figures", k.Name, path, figures, want)
			}
		}
	}
	held, err := turns.nodes[1].connections.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil || len(held) == 0 {
		t.Errorf("%s tracks %d connections: %v", turns.nodes[1].kind.Name, len(held), err)
	}
	// What leads nowhere is no figure.
	n := turns.nodes[0]
	labtest.Check(t, n.host.DelRoute(lab.Route{To: endpointRange, Via: serverAddr, Link: n.server.Name}))
	if figure, err := n.newFlows(n.client, n.targets([]int{1, 2, 3}, true)); err == nil {
		t.Errorf("packets that did not arrive took %v µs", figure)
	}
}

// TestNeedsPaths: turns that another proxy took no part in are taken again.
func TestNeedsPaths(t *testing.T) {
	size := results.Size{Services: 10, Endpoints: 1}
	p := &Plan{Kinds: []*Kind{{Name: "a"}, {Name: "b"}}, Results: &results.Results{}}
	p.Results.Settings.Rounds = 8
	if !p.needsPaths(size, 1) {
		t.Error("there are none")
	}
	found := &results.Paths{
		Size: size, Repeat: 1, Turns: map[string]map[results.Path][]float64{"a": {}},
		Missing: map[string]string{"b": "not in time"},
	}
	p.Results.Paths = []*results.Paths{found}
	if p.needsPaths(size, 1) || !p.needsPaths(size, 2) {
		t.Error("the first repeat is there, and the second is not")
	}
	p.Kinds = append(p.Kinds, &Kind{Name: "c"})
	if !p.needsPaths(size, 1) {
		t.Error("one was not there")
	}
}
