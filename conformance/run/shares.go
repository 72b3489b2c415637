package run

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/internal/lab"
)

// chance is how often a share may be out of bounds by chance.
const chance = 1e-9

// shares counts who answers, for all targets at the same time.
func (t *teller) shares(s *cases.Step) error {
	c := s.Shares
	all, err := t.targets(c.From, c.To, nil, c.Frontends, c.Families)
	if err != nil {
		return err
	}
	var wait sync.WaitGroup
	for _, a := range all {
		wait.Go(func() { t.sharesOf(s, a) })
	}
	wait.Wait()
	return nil
}

func (t *teller) sharesOf(s *cases.Step, to target) {
	weights, got := s.Shares.Of, newSeen()
	l := report.Look{Step: s.Step, From: to.from, To: to.words(), Want: sharesWords(weights)}
	d := t.differs(s)
	if d != nil {
		weights = make(map[string]int)
		for _, name := range d.Want.Endpoints {
			weights[name] = 1
		}
	}
	host, o := t.testbed.Host(to.from), lab.Options{Timeout: t.testbed.Slow.Times(answerTimeout)}
	lost := 0
	for got.tries < s.Shares.Times {
		r := host.Dial(labProtocol(to.protocol), to.to, o)
		if r.Outcome == lab.TimedOut && lost < lossTries {
			lost++
			continue
		}
		got.note(r)
		if r.Outcome != lab.Answered {
			break
		}
	}
	l.Count, l.OK = got.tries, got.refused+got.dropped+len(got.errs) == 0 && shared(got.endpoints, weights)
	l.Got = fmt.Sprintf("%s; %d refused, %d dropped, %d failed", sharesWords(got.endpoints), got.refused, got.dropped,
		len(got.errs))
	t.look(l, d)
}

func sharesWords(of map[string]int) string {
	text := ""
	for _, name := range slices.Sorted(maps.Keys(of)) {
		text += fmt.Sprintf(", %s: %d", name, of[name])
	}
	return "shares" + strings.TrimPrefix(text, ",")
}

// shared says whether counts are as weights say. By Hoeffding's inequality, a count is off by more than the bound with
// the probability chance at most, whatever the weights are.
func shared(counts, weights map[string]int) bool {
	n, whole := sum(counts), sum(weights)
	bound := math.Sqrt(float64(n) * math.Log(2/chance) / 2)
	for name := range counts {
		if weights[name] == 0 {
			return false
		}
	}
	for name, weight := range weights {
		expected := float64(n) * float64(weight) / float64(whole)
		if math.Abs(float64(counts[name])-expected) > bound {
			return false
		}
	}
	return n > 0
}
