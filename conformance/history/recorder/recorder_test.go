package recorder

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/conformance/history"
	"github.com/verdict-proxy/verdict/internal/lab"
)

// Every state of an endpoint is written as Kubernetes has it.
func TestConditions(t *testing.T) {
	for state, want := range map[history.State][3]bool{
		history.Ready:       {true, true, false},
		history.Unready:     {false, false, false},
		history.Serving:     {false, true, true},
		history.Terminating: {false, false, true},
	} {
		c := conditions(state)
		if got := [3]bool{*c.Ready, *c.Serving, *c.Terminating}; got != want {
			t.Errorf("%s: %v", state, got)
		}
	}
}

func TestRecord(t *testing.T) {
	at := netip.MustParseAddrPort("10.244.1.10:9500")
	for outcome, r := range map[history.Outcome]lab.Result{
		history.Answered: {Outcome: lab.Answered, Endpoint: "web/x1.0", Destination: at},
		history.Refused:  {Outcome: lab.Refused},
		history.TimedOut: {Outcome: lab.TimedOut},
		history.Failed:   {Err: fmt.Errorf("%0500d", 1)},
	} {
		var c history.Conn
		record(&c, r)
		if c.Outcome != outcome || (c.At == at.String()) != (outcome == history.Answered) || len(c.Error) > 200 {
			t.Errorf("%s: %+v", outcome, c)
		}
	}
}

// Files and namespaces are named after scenarios, and each does something.
func TestScenarios(t *testing.T) {
	names := make(map[string]bool)
	for _, s := range scenarios {
		if names[s.name] || s.services > maxServices || (s.step == nil) == (s.all == nil) || s.shared != (s.all != nil) {
			t.Errorf("%+v", s)
		}
		names[s.name] = true
	}
}

// A Service has as many endpoints as it shall, from the same seed the same ones.
func TestFill(t *testing.T) {
	w := &web{states: make(map[*server]history.State)}
	for range 8 {
		w.pool = append(w.pool, &server{})
	}
	for seed := range uint64(20) {
		w.fill(rand.New(rand.NewPCG(seed, 0)), 2, 4)
		first := maps.Clone(w.states)
		if n := w.ready(); n < 2 || n > 4 {
			t.Fatalf("%d endpoints", n)
		}
		if w.fill(rand.New(rand.NewPCG(seed, 0)), 2, 4); !maps.Equal(first, w.states) {
			t.Error("the same seed gives something else")
		}
	}
	w.set(w.pick(rand.New(rand.NewPCG(1, 1)), history.Serving), none) // there is none
	if s := w.pick(rand.New(rand.NewPCG(1, 1)), history.Ready); s == nil || w.states[s] != history.Ready {
		t.Error("a server that is ready was not found")
	}
}

// Beginnings are rounded down and ends up.
func TestClock(t *testing.T) {
	r := &recording{began: time.Now()}
	for range 100 {
		if a, b := r.floor(), r.ceil(); a >= b {
			t.Fatalf("%d, then %d", a, b)
		}
	}
}
