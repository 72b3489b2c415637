package run

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// connect opens all connections at the same time: none waits for what another one has shown.
func (t *teller) connect(ctx context.Context, s *cases.Step) error {
	c := s.Connect
	all, err := t.targets(c.From, c.To, c.Ports, c.Frontends, c.Families)
	if err != nil {
		return err
	}
	var wait sync.WaitGroup
	for _, a := range all {
		wait.Go(func() { t.connectAll(ctx, s, a) })
	}
	wait.Wait()
	return nil
}

// connectAll opens the connections of one target, and looks at what became of them together.
func (t *teller) connectAll(ctx context.Context, s *cases.Step, to target) {
	c := s.Connect
	limit := t.testbed.Slow.Times(time.Duration(c.Within))
	d := t.differs(s)
	want := cases.Want{Outcome: c.Answer.Outcome, Endpoints: c.Answer.Endpoints}
	words := want.String()
	if d != nil {
		want = d.Wants(want)
	}
	var got *seen
	var longest time.Duration
	t.within(ctx, c.Eventually, func() bool {
		got, longest = t.dialAll(c.Times, to, limit)
		return got.ended(want)
	})
	l := report.Look{Step: s.Step, From: to.from, To: to.words(), Count: c.Times, OK: got.ended(want)}
	l.Want = fmt.Sprintf("%s within %v", words, limit)
	l.Got = fmt.Sprintf("%d answered by %v, %d refused, %d dropped, %d failed; the longest took %v",
		sum(got.endpoints), slices.Sorted(maps.Keys(got.endpoints)), got.refused, got.dropped, len(got.errs),
		longest.Round(time.Millisecond))
	t.look(l, d)
}

// dialAll opens connections at the same time, and returns what became of them, and how long the slowest took.
func (t *teller) dialAll(times int, to target, limit time.Duration) (got *seen, longest time.Duration) {
	results := make([]lab.Result, times)
	var wait sync.WaitGroup
	for i := range results {
		wait.Go(func() { results[i] = t.testbed.Host(to.from).Dial(snapshot.TCP, to.to, lab.Options{Timeout: limit}) })
	}
	wait.Wait()
	got = newSeen()
	for _, r := range results {
		got.note(r)
		longest = max(longest, r.Latency)
	}
	return got, longest
}

func sum(counts map[string]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

// ended says whether connections that were opened together ended as wanted.
func (s *seen) ended(w cases.Want) bool {
	refused, dropped := s.refused > 0, s.dropped > 0
	switch {
	case len(s.errs) > 0:
		return false
	case w.Outcome == cases.Refused:
		return refused && !dropped
	case w.Outcome == cases.Dropped:
		return dropped && !refused
	case w.Outcome == cases.Unanswered:
		return refused || dropped
	case refused || dropped:
		return false
	}
	return len(w.Endpoints) == 0 ||
		slices.Equal(slices.Sorted(maps.Keys(s.endpoints)), slices.Sorted(slices.Values(w.Endpoints)))
}

// blackhole has the hosts themselves drop what comes for a port.
func (t *teller) blackhole(s *cases.PortStep) error {
	for _, host := range s.On {
		rule := fmt.Sprintf("table inet %s { chain input { type filter hook input priority 0; th dport %d drop; }\n}\n",
			blackholeTable(s.Port), s.Port)
		if _, err := t.testbed.Host(host).RunInput(rule, "nft", "-f", "-"); err != nil {
			return err
		}
	}
	t.holes = append(t.holes, s)
	return nil
}

func blackholeTable(port uint16) string { return fmt.Sprintf("blackhole-%d", port) }

// heal ends what blackhole began. To heal what is well already is fine.
func (t *teller) heal(s *cases.PortStep) error {
	for _, host := range s.On {
		table := "inet " + blackholeTable(s.Port)
		// Adding a table that is there changes nothing, so that deleting it never fails.
		rule := fmt.Sprintf("add table %s\ndelete table %s\n", table, table)
		if _, err := t.testbed.Host(host).RunInput(rule, "nft", "-f", "-"); err != nil {
			return err
		}
	}
	return nil
}
