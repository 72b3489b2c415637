package run

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
)

// written is the objects of a Service of a matrix.
type written struct {
	service *v1.Service
	slices  []*discovery.EndpointSlice
}

// matrix writes the objects of all cases at once, waits until the proxies have them, and then looks at all.
func (r *proxyRun) matrix(ctx context.Context, all []*cases.Case) error {
	if len(all) == 0 {
		return nil
	}
	objects, err := r.writeMatrix(ctx, all)
	if err != nil {
		return err
	}
	began := time.Now()
	if err := r.testbed.Sync(ctx); err != nil {
		return fmt.Errorf("%d Services of the matrix: %w", len(objects), err)
	}
	r.progress.say("%d Services written, in force after %v", len(objects), time.Since(began).Round(time.Millisecond))
	if err := r.witness.hear(ctx, r, all, objects); err != nil {
		return err
	}
	// Packets that are dropped cost no time but their own.
	patient, busy := make(chan struct{}, 2000), make(chan struct{}, r.parallel)
	var wait sync.WaitGroup
	for _, c := range all {
		wait.Go(func() {
			if ctx.Err() == nil {
				r.lookAt(c, objects[c.Theme+"/"+c.Service], patient, busy)
			}
		})
	}
	wait.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return r.clearMatrix(ctx, objects)
}

// clearMatrix removes the objects again, so that the stories' own changes are not slow because of them.
func (r *proxyRun) clearMatrix(ctx context.Context, objects map[string]*written) error {
	for _, o := range objects {
		if err := r.testbed.Client.CoreV1().Services(o.service.Namespace).Delete(ctx, o.service.Name,
			metav1.DeleteOptions{}); err != nil {
			return err
		}
		for _, slice := range o.slices {
			if err := r.testbed.Client.DiscoveryV1().EndpointSlices(slice.Namespace).Delete(ctx, slice.Name,
				metav1.DeleteOptions{}); err != nil {
				return err
			}
		}
	}
	return r.testbed.Sync(ctx)
}

// writeMatrix writes each Service once, however many cases look at it.
func (r *proxyRun) writeMatrix(ctx context.Context, all []*cases.Case) (map[string]*written, error) {
	objects := make(map[string]*written)
	spaces := make(map[string]bool)
	for _, c := range all {
		if !spaces[c.Theme] {
			spaces[c.Theme] = true
			if err := r.testbed.CreateNamespace(ctx, c.Theme); err != nil {
				return nil, err
			}
		}
		key := c.Theme + "/" + c.Service
		if objects[key] != nil {
			continue
		}
		s, err := writeService(ctx, r.testbed, matrixService(c, r.nextNumber()))
		if err != nil {
			return nil, err
		}
		o := &written{service: s}
		o.slices = endpointSlices(
			r.testbed.Topology,
			c.Theme,
			c.Service,
			c.Service,
			c.State.Endpoints,
			slicePorts(s.Spec.Ports, nil, false),
			cases.Families,
		)
		for _, slice := range o.slices {
			if err := writeSlice(ctx, r.testbed, slice); err != nil {
				return nil, err
			}
		}
		objects[key] = o
	}
	return objects, nil
}

// lookAt judges one case.
func (r *proxyRun) lookAt(c *cases.Case, o *written, patient, busy chan struct{}) {
	began := time.Now()
	result := &report.Result{Outcome: report.Pass}
	looks := make([]report.Look, len(c.Looks))
	reasons := make([]*cases.Difference, len(c.Looks))
	var wait sync.WaitGroup
	for i := range c.Looks {
		l := &c.Looks[i]
		limit := busy
		if w, _ := r.wanted(l); w.Outcome == cases.Dropped {
			limit = patient
		}
		wait.Go(func() {
			limit <- struct{}{}
			defer func() { <-limit }()
			looks[i], reasons[i] = r.lookOnce(l, o.service)
		})
	}
	wait.Wait()
	for i := range looks {
		judge(result, &looks[i], reasons[i])
	}
	result.Looks = looks
	if result.Outcome == report.Fail {
		result.Objects = o.yaml()
		result.Listing = r.excerpt(o.service.Namespace + "/" + o.service.Name)
	}
	result.Took = time.Since(began)
	r.done(&report.Case{Name: c.Name, Theme: c.Theme, Title: c.Title, Source: c.Source, StandsFor: c.StandsFor}, result)
}

// wanted gives what is to be seen of this proxy, and why if that is not what others show.
func (r *proxyRun) wanted(l *cases.Look) (cases.Want, *cases.Difference) {
	for _, d := range l.Differs {
		if !r.testbed.Kind.Knows(d.Proxies) {
			continue
		}
		if d = r.meant(d); d == nil {
			break
		}
		return d.Wants(l.Want), d
	}
	return l.Want, nil
}

// meant gives what a difference means for this proxy; nil if it means none.
func (r *proxyRun) meant(d *cases.Difference) *cases.Difference {
	if as := r.testbed.Kind.As; as != "" && slices.Contains(d.Proxies, as) {
		return d.As()
	}
	return d
}

// ask gives what a look asks, with what the case says of this proxy. A look that the Service has no frontend for is
// an error.
func (r *proxyRun) ask(l *cases.Look, s *v1.Service) (a asked, differs *cases.Difference, err error) {
	var port *v1.ServicePort
	for i := range s.Spec.Ports {
		if caseProtocol(s.Spec.Ports[i].Protocol) == l.Protocol {
			port = &s.Spec.Ports[i]
		}
	}
	to, ok := reach(r.testbed.Topology, s, port, l.Frontend, l.Family)
	if !ok {
		return a, nil, fmt.Errorf("service %s/%s has no %s", s.Namespace, s.Name, l.Frontend)
	}
	a = asked{from: l.From, to: to, protocol: labProtocol(l.Protocol)}
	a.want, differs = r.wanted(l)
	return a, differs, nil
}

// lookOnce takes a look.
func (r *proxyRun) lookOnce(l *cases.Look, s *v1.Service) (report.Look, *cases.Difference) {
	out := report.Look{From: l.From, Count: 1}
	a, differs, err := r.ask(l, s)
	if err != nil {
		out.Got = err.Error()
		return out, nil
	}
	seen, ok := look(r.testbed.Topology, r.testbed.Slow, a)
	out.To = fmt.Sprintf("%s/%s (%s)", a.to, l.Protocol, l.Frontend)
	out.Count, out.OK, out.Want, out.Got = seen.tries, ok, a.want.String(), seen.words(r.testbed.Topology, a)
	if ok {
		out.Got = out.Want
	}
	if differs != nil && ok {
		out.Want = l.Want.String() // what others show
	}
	if said := r.witness.hold(l, r.testbed.Topology, a, seen); said != "" {
		out.OK, out.Got = false, said
	}
	return out, differs
}

// judge adds a look to a result.
func judge(result *report.Result, l *report.Look, d *cases.Difference) {
	switch {
	case !l.OK:
		result.Outcome = report.Fail
	case d.Counts() && result.Outcome == report.Pass:
		result.Outcome = report.Differs
	}
	if d.Counts() && l.OK {
		result.Right = d.Right
		result.Why = d.Why
		if d.Source != "" {
			result.Why += " (" + d.Source + ")"
		}
	}
}

func (o *written) yaml() string {
	var all strings.Builder
	o.service.ManagedFields = nil
	add := func(kind, version string, object any) {
		text, err := yaml.Marshal(object)
		if err != nil {
			text = []byte(err.Error())
		}
		fmt.Fprintf(&all, "apiVersion: %s\nkind: %s\n%s---\n", version, kind, text)
	}
	add("Service", "v1", o.service)
	for _, s := range o.slices {
		add("EndpointSlice", "discovery.k8s.io/v1", s)
	}
	return strings.TrimSuffix(all.String(), "---\n")
}
