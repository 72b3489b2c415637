package run

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// stories tells the stories that share nothing at the same time, and the others one by one.
func (r *proxyRun) stories(ctx context.Context, all []*cases.Story, parallel int) error {
	var alone []*cases.Story
	limit := make(chan struct{}, max(1, parallel))
	var wait sync.WaitGroup
	for _, s := range all {
		if s.Alone() {
			alone = append(alone, s)
			continue
		}
		wait.Go(func() {
			limit <- struct{}{}
			defer func() { <-limit }()
			r.story(ctx, s)
		})
	}
	wait.Wait()
	for _, s := range alone {
		r.story(ctx, s)
	}
	return context.Cause(ctx)
}

func (r *proxyRun) story(ctx context.Context, s *cases.Story) {
	if ctx.Err() != nil {
		return
	}
	began := time.Now()
	result := r.tell(ctx, s)
	if result.Outcome == report.Fail && r.testbed.Kind.Peer() {
		result = r.tellAgain(ctx, s, result)
	}
	result.Took = time.Since(began)
	r.done(
		&report.Case{Name: s.FullName(), Theme: s.Theme, Title: s.Title, Source: s.Source, StandsFor: s.StandsFor},
		result,
	)
}

// tellAgain tells a story once more that failed of somebody else's proxy. What it fails only sometimes is a race of its
// own: worth a line, and no reason to stop the work on Verdict, which gets no second chance here.
func (r *proxyRun) tellAgain(ctx context.Context, s *cases.Story, first *report.Result) *report.Result {
	again := r.tell(ctx, s)
	if again.Outcome != report.Pass && again.Outcome != report.Differs {
		return first
	}
	i := slices.IndexFunc(first.Looks, func(l report.Look) bool { return !l.OK })
	l := &first.Looks[i]
	again.Outcome, again.Right = report.Differs, "verdict"
	again.Why = fmt.Sprintf("It failed in the first of two runs: %s > %s: want %s, got %s", l.From, l.To, l.Want, l.Got)
	return again
}

// teller tells one story.
type teller struct {
	*proxyRun
	story     *cases.Story
	namespace string
	result    *report.Result

	services map[string]*v1.Service
	numbers  map[string]int // of external addresses, by Service
	dirty    bool           // objects were written, and nobody has waited for the proxies
	apiDown  bool
	relisted bool // proxies list all objects anew
	open     map[string]*opened
	traffic  map[string]*traffic
	servers  map[string]*lab.Server    // by host and port
	others   map[string]*testbed.Proxy // not of the kind under test, by node
	holes    []*cases.PortStep         // ports where packets vanish
	routes   []lab.Route               // of the router
	undo     []func(context.Context) error
}

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// tell runs all steps. Looks that are not as wanted do not end it; errors do.
func (r *proxyRun) tell(ctx context.Context, s *cases.Story) *report.Result {
	t := &teller{
		proxyRun: r, story: s, result: &report.Result{Outcome: report.Pass},
		namespace: strings.Trim(notInNames.ReplaceAllString(strings.ToLower(s.FullName()), "-"), "-"),
		services:  make(map[string]*v1.Service), numbers: make(map[string]int), open: make(map[string]*opened),
		traffic: make(map[string]*traffic), servers: make(map[string]*lab.Server), others: make(map[string]*testbed.Proxy),
	}
	if len(t.namespace) > 63 {
		t.namespace = strings.Trim(t.namespace[len(t.namespace)-63:], "-")
	}
	if why := t.unfit(); why != "" {
		return &report.Result{Outcome: report.Skipped, Why: why}
	}
	err := r.testbed.CreateNamespace(ctx, t.namespace)
	for i := range s.Steps {
		if err != nil || ctx.Err() != nil {
			break
		}
		if err = t.step(ctx, &s.Steps[i]); err != nil {
			err = fmt.Errorf("%s.yaml:%d: %w", s.Theme, s.Steps[i].Line, err)
		}
	}
	err = errors.Join(err, context.Cause(ctx))
	if t.result.Outcome == report.Fail || err != nil {
		t.result.Objects, t.result.Listing = t.objects(), grep(r.listAll(), t.namespace+"/")
		t.result.Logged = grep(r.logs(), t.namespace+"/")
	}
	// What a story leaves behind would spoil others, so it is also removed after an interruption.
	if e := t.end(context.WithoutCancel(ctx)); e != nil {
		err = errors.Join(err, fmt.Errorf("end of the story: %w", e))
	}
	if err != nil {
		t.result.Outcome, t.result.Why = report.Broken, err.Error()
	}
	return t.result
}

// unfit says why a story cannot be told of this proxy.
func (t *teller) unfit() string {
	for i := range t.story.Steps {
		if p := t.story.Steps[i].Proxy; p != nil && (p.With != nil || p.Own != nil) && !t.testbed.Kind.Adjustable() {
			return "it changes the configuration, which is not known of this proxy"
		}
		if r := t.story.Steps[i].Run; r != nil && r.Reads != "" {
			if strings.Contains(t.testbed.Kind.Name, "iptables") {
				return "its own rules are in the tables that the story writes"
			}
			if _, err := os.Stat(neighborFile(r.Reads)); err != nil {
				return "it needs what other programs write: make neighbors"
			}
		}
	}
	return ""
}

// step does one step. Before it looks, it waits for what was written.
func (t *teller) step(ctx context.Context, s *cases.Step) error {
	switch {
	case s.Expect != nil,
		s.Connect != nil,
		s.Stray != nil,
		s.Echo != nil,
		s.Shares != nil,
		s.Open != nil,
		s.Ping != nil,
		s.Traffic != nil,
		s.Stop != nil,
		s.HTTP != nil,
		s.Exchange != nil,
		s.Wait != 0,
		s.Proxy != nil:
		if err := t.settle(ctx); err != nil {
			return err
		}
	}
	switch {
	case s.Expect != nil:
		return t.expect(ctx, s)
	case s.Connect != nil:
		return t.connect(ctx, s)
	case s.Stray != nil:
		return t.stray(s)
	case s.Echo != nil:
		return t.echo(s)
	case s.Shares != nil:
		return t.shares(s)
	case s.Open != nil:
		return t.openOne(s)
	case s.Ping != nil:
		return t.ping(ctx, s)
	case s.Traffic != nil:
		return t.begin(s.Traffic)
	case s.Stop != nil:
		return t.stop(s)
	case s.HTTP != nil:
		return t.http(ctx, s)
	case s.Exchange != nil:
		return t.exchange(ctx, s)
	case s.Wait != 0:
		return pause(ctx, time.Duration(s.Wait))
	}
	return t.change(ctx, s)
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// settle waits until the proxies have what was written, if they and the API server are there.
func (t *teller) settle(ctx context.Context) error {
	if !t.dirty || t.apiDown {
		return nil
	}
	for node, p := range t.testbed.Proxies {
		if other := t.others[node]; p.Ended() && (other == nil || other.Ended()) {
			return nil
		}
	}
	t.dirty = false
	// After a new list, objects come in any order: only what is written after it comes last.
	if t.relisted {
		t.relisted = false
		if err := t.testbed.Sync(ctx); err != nil {
			return err
		}
	}
	return t.testbed.Sync(ctx)
}

// look adds a look to the result. d is what the story says of this proxy.
func (t *teller) look(l report.Look, d *cases.Difference) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.result.Looks = append(t.result.Looks, l)
	judge(t.result, &l, d)
}

// differs gives what the story says of this proxy at a step.
func (t *teller) differs(s *cases.Step) *cases.Difference {
	for i := range t.story.Differs {
		if d := &t.story.Differs[i]; (d.Step == "" || d.Step == s.Step) && t.testbed.Kind.Knows(d.Proxies) {
			return t.meant(d)
		}
	}
	return nil
}

// target is one way to ask a Service.
type target struct {
	from     string
	frontend cases.Frontend
	port     string
	protocol cases.Protocol
	family   cases.Family
	to       netip.AddrPort
}

func (a target) words() string {
	if a.frontend == "" {
		return fmt.Sprintf("%s/%s", a.to, a.protocol)
	}
	return fmt.Sprintf("%s/%s (%s)", a.to, a.protocol, a.frontend)
}

// targets gives all ways that a step names.
func (t *teller) targets(
	from []string,
	to string,
	ports []string,
	frontends []cases.Frontend,
	families []cases.Family,
) ([]target, error) {
	s := t.services[to]
	if s == nil {
		return nil, fmt.Errorf("there is no Service %s", to)
	}
	if len(frontends) == 0 {
		frontends = []cases.Frontend{cases.ClusterIP}
	}
	var all []target
	for _, f := range t.families(s, families) {
		for i := range s.Spec.Ports {
			p := &s.Spec.Ports[i]
			if len(ports) > 0 && !contains(ports, p.Name) {
				continue
			}
			for _, frontend := range frontends {
				addr, ok := reach(t.testbed.Topology, s, p, frontend, f)
				if !ok {
					return nil, fmt.Errorf("service %s has no %s %s of %s", to, f, frontend, p.Name)
				}
				for _, who := range from {
					all = append(all, target{who, frontend, p.Name, caseProtocol(p.Protocol), f, addr})
				}
			}
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("service %s has no port of %v", to, ports)
	}
	return all, nil
}

// families gives those that a step names, or those of the Service.
func (t *teller) families(s *v1.Service, named []cases.Family) []cases.Family {
	if len(named) > 0 {
		return named
	}
	var all []cases.Family
	for _, f := range cases.Families {
		if ofFamily(s.Spec.ClusterIPs, f).IsValid() {
			all = append(all, f)
		}
	}
	return all
}

func contains(all []string, one string) bool {
	for _, s := range all {
		if s == one {
			return true
		}
	}
	return false
}

// expect looks at all targets at the same time.
func (t *teller) expect(ctx context.Context, s *cases.Step) error {
	e := s.Expect
	var all []target
	var err error
	if e.Address != "" {
		to, err := netip.ParseAddrPort(e.Address)
		if err != nil {
			return err
		}
		for _, who := range e.From {
			all = append(all, target{from: who, protocol: orTCP(e.Protocol), to: to})
		}
	} else if all, err = t.targets(e.From, e.To, e.Ports, e.Frontends, e.Families); err != nil {
		return err
	}
	want := cases.Want{Outcome: e.Answer.Outcome, Endpoints: e.Answer.Endpoints, Sticky: e.Sticky, Some: e.Some}
	if e.Sees != "" {
		want.Sources = make(map[string]string)
		for _, name := range want.Endpoints {
			want.Sources[name] = e.Sees
		}
	}
	var wait sync.WaitGroup
	answered := make([]*seen, len(all))
	for i, a := range all {
		wait.Go(func() { answered[i] = t.expectOne(ctx, s, a, want) })
	}
	wait.Wait()
	if e.Apart {
		t.together(s, "all of them", e.To, answered, false)
	}
	if e.Same {
		type client struct {
			from   string
			family ipfamily.Family
		}
		by := make(map[client][]*seen)
		for i, a := range all {
			c := client{a.from, ipfamily.Of(a.to.Addr())}
			by[c] = append(by[c], answered[i])
		}
		for c, answered := range by {
			t.together(s, c.from, fmt.Sprintf("all frontends of %s (%s)", e.To, c.family), answered, true)
		}
	}
	return nil
}

// together looks whether exactly one endpoint has answered all of these, or more than one.
func (t *teller) together(s *cases.Step, from, to string, answered []*seen, same bool) {
	all := map[string]bool{}
	for _, a := range answered {
		for name := range a.endpoints {
			all[name] = true
		}
	}
	d := t.differs(s)
	want := "not the same endpoint for all"
	if same {
		want = "the same endpoint for all"
	}
	t.look(
		report.Look{
			Step:  s.Step,
			From:  from,
			To:    to,
			Count: len(answered),
			Want:  want,
			Got:   strings.Join(slices.Sorted(maps.Keys(all)), ", "),
			OK:    len(all) == 1 == same == (d == nil),
		},
		d,
	)
}

func orTCP(p cases.Protocol) cases.Protocol {
	if p == "" {
		return cases.TCP
	}
	return p
}

func (t *teller) expectOne(ctx context.Context, s *cases.Step, to target, want cases.Want) *seen {
	q := asked{from: to.from, to: to.to, protocol: labProtocol(to.protocol), want: want, at: s.Expect.At,
		own: s.Expect.FromPort}
	d := t.differs(s)
	if d != nil {
		q.want = d.Wants(want)
	}
	var got *seen
	var ok bool
	t.within(ctx, s.Expect.Within, func() bool {
		got, ok = look(t.testbed.Topology, t.testbed.Slow, q)
		return ok
	})
	l := report.Look{
		Step:  s.Step,
		From:  to.from,
		To:    to.words(),
		Count: got.tries,
		Want:  q.want.String(),
		Got:   got.words(t.testbed.Topology, q),
		OK:    ok,
	}
	if ok {
		l.Got = l.Want
		l.Want = want.String()
	}
	t.look(l, d)
	return got
}

// within asks again until it is so, or the time is over.
func (t *teller) within(ctx context.Context, limit cases.Duration, ok func() bool) {
	deadline := time.Now().Add(t.testbed.Slow.Times(time.Duration(limit)))
	for !ok() && time.Now().Before(deadline) && ctx.Err() == nil {
		_ = pause(ctx, 20*time.Millisecond)
	}
}

// end stops what goes on and removes what the story made.
func (t *teller) end(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for _, c := range t.traffic {
		c.end()
	}
	var errs []error
	for _, c := range t.open {
		errs = append(errs, c.close())
	}
	if t.apiDown {
		errs = append(errs, t.testbed.Plane.StartServer(ctx))
	}
	errs = append(errs, t.clear(ctx))
	for i := len(t.undo) - 1; i >= 0; i-- {
		errs = append(errs, t.undo[i](ctx))
	}
	for _, h := range t.holes {
		errs = append(errs, t.heal(h))
	}
	for _, r := range t.routes {
		errs = append(errs, t.testbed.Host("router").DelRoute(r))
	}
	for _, s := range t.servers {
		errs = append(errs, s.Close())
	}
	if len(t.undo) > 0 {
		errs = append(errs, t.testbed.Sync(ctx))
	}
	return errors.Join(errs...)
}

// clear removes the objects of the story.
func (t *teller) clear(ctx context.Context) error {
	var errs []error
	core, zero := t.testbed.Client.CoreV1(), metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
	for name := range t.services {
		errs = append(errs, ignoreMissing(core.Services(t.namespace).Delete(ctx, name, metav1.DeleteOptions{})))
	}
	errs = append(
		errs,
		t.testbed.Client.DiscoveryV1().
			EndpointSlices(t.namespace).
			DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
		core.Pods(t.namespace).DeleteCollection(ctx, zero, metav1.ListOptions{}),
	)
	return errors.Join(errs...)
}
