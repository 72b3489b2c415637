package cases

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
)

// check finds words in a matrix that mean nothing.
func (m *Matrix) check(states map[string]*State) error {
	errs := []error{
		known("frontends", m.Frontends, frontends), known("senders", m.Senders, senders),
		known("protocols", m.Protocols, Protocols), known("families", m.Families, Families),
	}
	if m.Title == "" || len(m.States) == 0 || len(m.Frontends) == 0 || len(m.Senders) == 0 {
		errs = append(errs, errors.New("title, states, frontends and senders are needed"))
	}
	var variations []string
	for _, v := range m.Vary {
		variations = append(variations, v.Name)
		errs = append(errs, m.Options.over(v.Options).check())
	}
	for _, s := range m.States {
		if states[s] == nil {
			errs = append(errs, fmt.Errorf("states: %s is not in %s", s, statesFile))
			continue
		}
		for name := range states[s].Endpoints {
			errs = append(errs, known("state "+s, []string{name}, endpointHosts))
		}
	}
	for i := range m.Differs {
		d := &m.Differs[i]
		errs = append(errs, d.check(), d.When.check(m, variations))
	}
	return errors.Join(append(errs, m.Slice.check(m, variations))...)
}

func (w *When) check(m *Matrix, variations []string) error {
	return errors.Join(
		known("frontends", w.Frontends, m.Frontends), known("senders", w.Senders, m.Senders),
		known("protocols", w.Protocols, Protocols), known("families", w.Families, Families),
		known("states", w.States, m.States), known("variations", w.Variations, variations),
		known("outcomes", w.Outcomes, []Outcome{Answered, Refused, Dropped}),
	)
}

func (o Options) check() error {
	policies := []string{"", "Cluster", "Local"}
	return errors.Join(
		known("internalTrafficPolicy", []string{o.InternalTrafficPolicy}, policies),
		known("externalTrafficPolicy", []string{o.ExternalTrafficPolicy}, policies),
		known("sessionAffinity", []string{o.SessionAffinity}, []string{"", "None", "ClientIP"}),
		known("ipMode", []string{o.IPMode}, []string{"", "VIP", "Proxy"}),
		known("sourceRanges", o.SourceRanges, append([]string{"pods", "nodes", "everybody"}, senders...)),
	)
}

// check holds that a difference has a reason.
func (d *Difference) check() error {
	if len(d.Proxies) == 0 || d.Right == "" || d.Why == "" || d.Want.Outcome == "" {
		return fmt.Errorf("differs (%s): proxies, want, right and why are needed", d.Why)
	}
	return known("stays", []Stays{d.Stays}, []Stays{"", Asked, Mended})
}

func known[T comparable](field string, words, all []T) error {
	for _, w := range words {
		if !slices.Contains(all, w) {
			return fmt.Errorf("%s: %v is none of %v", field, w, all)
		}
	}
	return nil
}

// check finds steps that mean nothing. The error begins with the line.
func (s *Story) check() error {
	var errs []error
	note := func(line int, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%d: story %s: %w", line, s.Name, err))
		}
	}
	if s.Title == "" || len(s.Steps) == 0 {
		note(1, errors.New("title and steps are needed"))
	}
	var names []string
	for i := range s.Steps {
		t := &s.Steps[i]
		names = append(names, t.Step)
		note(t.Line, t.check())
	}
	for i := range s.Differs {
		d := &s.Differs[i]
		note(s.Steps[0].Line, d.check())
		if d.Step != "" {
			note(s.Steps[0].Line, known("differs: step", []string{d.Step}, names))
		}
	}
	return errors.Join(errs...)
}

// check looks at one step.
func (t *Step) check() error {
	kinds := 0
	v := reflect.ValueOf(*t)
	for i := range v.NumField() {
		if name := v.Type().Field(i).Name; name != "Step" && name != "Line" && !v.Field(i).IsZero() {
			kinds++
		}
	}
	if kinds != 1 {
		return fmt.Errorf("a step has one kind, this one has %d", kinds)
	}
	switch {
	case t.Service != nil:
		return t.Service.parse()
	case t.Endpoints != nil:
		return errors.Join(hostsOf("set", t.Endpoints.Set), known("families", t.Endpoints.Families, Families))
	case t.Pods != nil:
		return hostsOf("pods", t.Pods.Set)
	case t.Proxy != nil:
		return known("proxy: do", []string{t.Proxy.Do}, []string{"restart", "stop", "kill", "start", "killAndStart"})
	case t.API != "":
		return known("api", []string{t.API}, []string{"stop", "kill", "start"})
	case t.Expect != nil:
		return t.Expect.check()
	case t.Connect != nil:
		return t.Connect.check()
	case t.Stray != nil:
		return errors.Join(
			known("stray: from", t.Stray.From, senders), known("stray: frontends", t.Stray.Frontends, storyFrontends),
			known("stray: answer", []Outcome{t.Stray.Answer.Outcome}, []Outcome{Refused, Dropped}),
		)
	case t.Echo != nil:
		return t.Echo.check()
	case t.Shares != nil:
		return t.Shares.check()
	case t.Route != nil:
		return errors.Join(known("route: via", []string{t.Route.Via}, []string{"node-a", "node-b"}),
			known("route: from", []string{t.Route.From}, []string{"", "client-a", "client-b"}))
	case t.Open != nil:
		return errors.Join(
			known("from", []string{t.Open.From}, senders),
			known("frontend", []Frontend{t.Open.Frontend}, append(storyFrontends, "")),
		)
	case t.Exchange != nil:
		return known("from", t.Exchange.From, senders)
	case t.Traffic != nil:
		return errors.Join(known("from", t.Traffic.From, senders), known("frontends", t.Traffic.Frontends, storyFrontends))
	}
	return nil
}

func hostsOf[V any](field string, set map[string]V) error {
	for name := range set {
		if err := known(field, []string{name}, endpointHosts); err != nil {
			return err
		}
	}
	return nil
}

func (e *ExpectStep) check() error {
	err := errors.Join(
		known("expect: from", e.From, senders),
		known("expect: frontends", e.Frontends, storyFrontends),
		known("expect: families", e.Families, Families),
		known("expect: sees", []string{e.Sees}, []string{"", Kept, "node-a", "node-b"}),
	)
	if len(e.From) == 0 || (e.To == "") == (e.Address == "") || e.Answer.Outcome == "" {
		err = errors.Join(err, errors.New("expect: from, answer, and one of to and address are needed"))
	}
	return err
}

func (c *ConnectStep) check() error {
	err := errors.Join(
		known("connect: from", c.From, senders), known("connect: frontends", c.Frontends, storyFrontends),
		known("connect: families", c.Families, Families),
	)
	if len(c.From) == 0 || c.To == "" || c.Times < 1 || c.Within <= 0 || c.Answer.Outcome == "" {
		err = errors.Join(err, errors.New("connect: from, to, times, answer and within are needed"))
	}
	return err
}

func (e *EchoStep) check() error {
	err := errors.Join(
		known("echo: from", e.From, senders), known("echo: frontends", e.Frontends, storyFrontends),
		known("echo: families", e.Families, Families),
		known("echo: answer", []Outcome{e.Answer.Outcome}, []Outcome{Answered, Refused, Dropped, Unanswered}),
	)
	if len(e.From) == 0 || e.To == "" || len(e.Answer.Endpoints) > 0 {
		err = errors.Join(err, errors.New("echo: from, to and answer are needed, and nobody knows which host answers"))
	}
	return err
}

func (s *SharesStep) check() error {
	err := errors.Join(
		known("shares: from", s.From, senders), known("shares: frontends", s.Frontends, storyFrontends),
		known("shares: families", s.Families, Families), hostsOf("shares: of", s.Of),
	)
	if len(s.From) == 0 || s.To == "" || s.Times < 1 || len(s.Of) == 0 {
		err = errors.Join(err, errors.New("shares: from, to, times and of are needed"))
	}
	return err
}
