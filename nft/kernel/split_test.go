package kernel

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// growing is a host with three Services of two endpoints each, of which one is to have five. Nobody has a chain for
// that yet.
type growing struct {
	host   *lab.Host
	b      *Backend
	change dataplane.Change
	// before and after are what is wanted of the tables.
	before, after *dataplane.State
}

func newGrowing(t *testing.T) *growing {
	h, b := host(t)
	name := snapshot.Name{Namespace: "default", Name: "service-0"}
	g := &growing{host: h, b: b, change: dataplane.Change{Services: []snapshot.Name{name}}}
	state := func(deltas ...snapshot.Delta) *dataplane.State {
		snap := snapshot.New()
		for _, d := range deltas {
			snap.Apply(d)
		}
		st, _ := dataplane.Compute(configs["unknown"], snap)
		return st
	}
	g.before, g.after = state(large(3, 2)), state(large(3, 2), large(1, 5))
	apply(t, b, g.before)
	return g
}

// chains are what nft lists of the chains, with the rules.
func (g *growing) chains(t *testing.T) string {
	return labtest.Run(t, g.host, "", labtest.Nfts(t)[0].Path, "list", "chains")
}

// isIn checks that the tables hold what is wanted, and that nothing else is found.
func (g *growing) isIn(t *testing.T, b *Backend, want *dataplane.State) {
	t.Helper()
	if got, want := held(t, b), wanted(want); got != want {
		t.Error(labtest.FirstDifference(got, want))
	}
	quiet(t, b)
}

// TestChainsGoAhead: a chain for a new size is there one transaction before an element leads to it.
func TestChainsGoAhead(t *testing.T) {
	g := newGrowing(t)
	var lead []int // how many elements lead to the chain, after each transaction
	g.b.Sent = func([]byte) {
		l, err := g.b.List()
		labtest.Check(t, err)
		n := 0
		for _, e := range l[0].Elements[nft.Services] {
			if e.Leads() == (nft.ChainID{Kind: nft.Pick, N: 5}) {
				n++
			}
		}
		if lead = append(lead, n); !strings.Contains(g.chains(t), "chain pick-5 {") {
			t.Errorf("after transaction %d, the chain is not there", len(lead))
		}
	}
	for range 2 { // the second time, it is there already
		_, err := g.b.Apply(g.after, g.change)
		labtest.Check(t, err)
	}
	if !slices.Equal(lead, []int{0, 1}) {
		t.Errorf("after each transaction, %v elements lead to the chain", lead)
	}
	g.b.Sent = nil
	g.isIn(t, g.b, g.after)
	if r, err := open(t, g.host, Options{}).Apply(g.after, dataplane.Change{}); err != nil || !r.Adopted {
		t.Errorf("the next process does not adopt the tables: %+v, %v", r, err)
	}
}

// TestChainsWithoutElements: chains have gone ahead, and what leads to them is refused, is not sent, or is nobody's any
// more, since the process ended.
func TestChainsWithoutElements(t *testing.T) {
	for _, evidence := range []bool{false, true} { // with evidence, sets and base chains go ahead, too
		t.Run(fmt.Sprint("refused, evidence ", evidence), func(t *testing.T) {
			g := newGrowing(t)
			chains, bad := g.chains(t), *g.after
			name := g.change.Services[0]
			bad.Services = maps.Clone(bad.Services)
			bad.Services[name] = poison(bad.Services[name])
			bad.Evidence, g.change.Globals = evidence, evidence
			parts := 0
			g.b.Sent = func([]byte) { parts++ }
			var refused *dataplane.Refused
			if _, err := g.b.Apply(&bad, g.change); !errors.As(err, &refused) || refused.Services[name] == nil {
				t.Fatalf("got %v", err)
			}
			if parts == 0 || parts%2 != 0 {
				t.Errorf("%d transactions: each that adds chains is undone by another", parts)
			}
			if now := g.chains(t); now != chains {
				t.Error(labtest.FirstDifference(now, chains))
			}
			g.isIn(t, g.b, g.before)
		})
	}
	t.Run("refused, and they stay", func(t *testing.T) {
		g := newGrowing(t)
		chains, bad, name := g.chains(t), *g.after, g.change.Services[0]
		bad.Services = maps.Clone(bad.Services)
		bad.Services[name] = poison(bad.Services[name])
		g.b.conn.Wire = &faulty{Wire: g.b.conn.Wire, sendErr: []error{nil, nil, unix.ENOBUFS}}
		var refused *dataplane.Refused
		if _, err := g.b.Apply(&bad, g.change); !errors.As(err, &refused) || refused.Services[name] == nil {
			t.Fatalf("got %v", err)
		}
		_, err := g.b.ApplyAll(g.before, g.change)
		labtest.Check(t, err)
		if now := g.chains(t); now != chains {
			t.Error(labtest.FirstDifference(now, chains))
		}
		g.isIn(t, g.b, g.before)
	})
	t.Run("not sent", func(t *testing.T) {
		g := newGrowing(t)
		g.b.conn.Wire = &faulty{Wire: g.b.conn.Wire, sendErr: []error{nil, unix.ENOBUFS}}
		_, err := g.b.ApplyAll(g.after, g.change)
		labtest.Check(t, err)
		g.isIn(t, g.b, g.after)
	})
	t.Run("the process ended", func(t *testing.T) {
		g := newGrowing(t)
		g.b.pending = g.change
		txn, err := g.b.plan(g.after)
		labtest.Check(t, err)
		first, _ := txn.Split()
		labtest.Check(t, g.b.write(first, &dataplane.Receipt{}))
		next := open(t, g.host, Options{})
		_, err = next.ApplyAll(g.before, dataplane.Change{})
		labtest.Check(t, err)
		g.isIn(t, next, g.before)
		if strings.Contains(g.chains(t), "pick-5") {
			t.Error("the chain is still there")
		}
	})
}
