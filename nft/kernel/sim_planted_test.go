package kernel

import (
	"maps"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// planted are faults that a simulation must see. Each strikes now and then.
var planted = []struct {
	name  string
	plant func(*sim)
}{
	{"the kernel forgets a deletion", forgets(unix.NFT_MSG_DELSETELEM, nft.SetID.IsContent)},
	{"the kernel forgets an element", forgets(unix.NFT_MSG_NEWSETELEM, nft.SetID.IsContent)},
	{"the kernel forgets to delete a client", forgets(unix.NFT_MSG_DELSETELEM,
		func(s nft.SetID) bool { return s == nft.Affinity })},
	{"a refused transaction stays in part", func(s *sim) { s.k.halfway = true }},
	{"a Service is forgotten", writes(func(w *wrongWriter, _ *dataplane.State, c *dataplane.Change) {
		if n := len(c.Services); n > 0 && w.calls%7 == 3 {
			c.Services = c.Services[:n-1]
		}
	})},
	{"what is global is forgotten", writes(func(_ *wrongWriter, _ *dataplane.State, c *dataplane.Change) {
		c.Globals = false
	})},
	{"an old version of a Service is written", writes(func(w *wrongWriter, st *dataplane.State, c *dataplane.Change) {
		if n := len(c.Services); n > 0 && w.last[c.Services[0]] != nil && w.calls%7 == 3 {
			st.Services[c.Services[0]] = w.last[c.Services[0]]
		}
	})},
	{"a transaction is said to be written", func(s *sim) { s.writer = wrong(nil, true, false) }},
	{"an innocent Service is blamed", func(s *sim) { s.writer = wrong(nil, false, true) }},
	{"the last Service is left for ever", func(s *sim) {
		s.writer = func(w reconcile.Writer) reconcile.Writer { return &endlessWriter{w} }
	}},
	{"the watch loses a slice", loses("slice")},
	{"the watch loses a Service", loses("service")},
}

// TestSimulationSeesFaults: each planted fault is seen by one of a few seeds, and with fewer steps than it took.
func TestSimulationSeesFaults(t *testing.T) {
	const seeds = 12
	for _, p := range planted {
		t.Run(p.name, func(t *testing.T) {
			for seed := uint64(2000); seed < 2000+seeds; seed++ {
				s := simulate(t, testkit.NewWalk(seed, testkit.UpTo(simLength)), p.plant)
				if s.Failure == "" {
					continue
				}
				t.Logf("seed %d, %.200s", seed, s.Failure)
				if s.Step < simLength {
					again := simulate(t, testkit.NewWalk(seed, testkit.UpTo(s.Step+1)), p.plant)
					if again.Failure == "" {
						t.Errorf("the same steps do not fail again")
					}
				}
				return
			}
			t.Errorf("%d simulations did not see it", seeds)
		})
	}
}

// forgets has the kernel acknowledge every 40th message about some sets without doing what it says.
func forgets(msg uint16, which func(nft.SetID) bool) func(*sim) {
	return func(s *sim) {
		n, most := 0, 40
		if which(nft.Affinity) {
			most = 2
		}
		s.k.forget = func(m uint16, e *nft.Element) bool {
			if m == msg && which(e.Set) {
				n++
			}
			return m == msg && which(e.Set) && n%most == 0
		}
	}
}

func loses(kind string) func(*sim) {
	return func(s *sim) {
		n := 0
		s.lose = func(e simEvent) bool {
			if e.of.kind == kind {
				n++
			}
			return e.of.kind == kind && n%30 == 29
		}
	}
}

// wrongWriter does not write what it is told.
type wrongWriter struct {
	reconcile.Writer
	distort func(*wrongWriter, *dataplane.State, *dataplane.Change)
	lies    bool
	blames  bool
	calls   int
	// last are the Services of the last state.
	last map[snapshot.Name]*dataplane.Service
}

func writes(distort func(*wrongWriter, *dataplane.State, *dataplane.Change)) func(*sim) {
	return func(s *sim) { s.writer = wrong(distort, false, false) }
}

func wrong(distort func(*wrongWriter, *dataplane.State, *dataplane.Change), lies, blames bool,
) func(reconcile.Writer) reconcile.Writer {
	return func(w reconcile.Writer) reconcile.Writer {
		return &wrongWriter{Writer: w, distort: distort, lies: lies, blames: blames}
	}
}

func (w *wrongWriter) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	w.calls++
	st := *want
	st.Services = maps.Clone(want.Services)
	if w.distort != nil {
		w.distort(w, &st, &change)
	}
	w.last = maps.Clone(want.Services)
	switch {
	case w.lies && w.calls%9 == 8:
		return dataplane.Receipt{}, nil
	case w.blames && w.calls%9 == 8 && len(change.Services) > 0:
		return dataplane.Receipt{}, &dataplane.Refused{Services: map[snapshot.Name]error{change.Services[0]: unix.EINVAL}}
	}
	return w.Writer.Apply(&st, change)
}

// endlessWriter says of some changes that a Service is still to be written.
type endlessWriter struct{ reconcile.Writer }

func (w *endlessWriter) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	r, err := w.Writer.Apply(want, change)
	if err == nil && len(change.Services) == 1 {
		r.Left = change.Services
	}
	return r, err
}
