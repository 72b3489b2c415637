package run

import (
	"sync"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/internal/lab"
)

// echo pings all addresses at the same time.
func (t *teller) echo(s *cases.Step) error {
	e := s.Echo
	var ports []string // one will do: an echo request has none
	if service := t.services[e.To]; service != nil {
		ports = []string{service.Spec.Ports[0].Name}
	}
	all, err := t.targets(e.From, e.To, ports, e.Frontends, e.Families)
	if err != nil {
		return err
	}
	var wait sync.WaitGroup
	for _, a := range all {
		wait.Go(func() { t.echoOne(s, a) })
	}
	wait.Wait()
	return nil
}

func (t *teller) echoOne(s *cases.Step, to target) {
	d := t.differs(s)
	want := cases.Want{Outcome: s.Echo.Answer.Outcome}
	l := report.Look{Step: s.Step, From: to.from, Want: want.String()}
	l.To = to.to.Addr().String() + " (" + string(to.frontend) + ")"
	if d != nil {
		want = d.Wants(want)
	}
	patience := silence
	if want.Outcome == cases.Answered || want.Outcome == cases.Refused {
		patience = t.testbed.Slow.Times(answerTimeout)
	}
	var r lab.Result
	for l.Count < lossTries { // a busy machine loses packets
		l.Count++
		if r = t.testbed.Host(to.from).Echo(to.to.Addr(), patience); r.Outcome != lab.TimedOut {
			break
		}
	}
	l.OK, l.Got = met(want, r, 0), echoWord(r)
	t.look(l, d)
}

// echoWord gives an outcome in the words of the cases.
func echoWord(r lab.Result) string {
	switch r.Outcome {
	case lab.Answered:
		return string(cases.Answered)
	case lab.Refused:
		return string(cases.Refused)
	case lab.TimedOut:
		return string(cases.Dropped)
	}
	return r.String()
}
