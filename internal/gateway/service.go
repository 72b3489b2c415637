package gateway

import (
	"context"
	"encoding/json"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/gateway/routes"
)

// service writes what is missing of a Gateway's Service, and reports whether nothing was.
//
// What is granted is written before the backends that need it, and what is granted no more after the backends that
// needed it, so that a change refuses no connection; unless the backends cannot be written.
func (p *pass) service(g *routes.GatewayPlan) (written bool) {
	has := p.world.services.known[g.ServiceName]
	switch {
	case g.Service == nil:
		return true
	case has == nil:
		p.create(g.Service)
		return false
	case !routes.Owns(g.Object, has):
		return false // somebody was faster: the next plan says so
	case has.DeletionTimestamp != nil:
		return false
	}
	want, differs := routes.MergeService(has, g.Service)
	granted, grants := g.Granted, namesIn(&g.Granted)
	hadGrants := namesIn(find(has.Status.Conditions, g.Granted.Type))
	adds := slices.ContainsFunc(grants, func(n string) bool { return !slices.Contains(hadGrants, n) })
	failed := p.writer.failureOf(ref{resource: services, name: g.ServiceName}) != nil
	if differs && adds && !failed {
		all := append(slices.Clone(grants), hadGrants...)
		slices.Sort(all)
		granted.Message = strings.Join(slices.Compact(all), " ")
	}
	if differs && (!adds || failed) {
		p.update(has, want)
	}
	if differs && !adds && !failed {
		return false
	}
	if conditions, differ := routes.MergeGranted(has, granted, p.now); differ {
		now := has.Status
		now.Conditions = conditions
		status(p, p.world.services, services, has, has.Status, now)
		return false
	}
	return !differs
}

// namesIn are the Services that a condition grants.
func namesIn(c *metav1.Condition) []string {
	if c == nil || c.Status != metav1.ConditionTrue {
		return nil
	}
	return strings.Fields(c.Message)
}

func (p *pass) create(s *corev1.Service) {
	body, err := json.Marshal(s)
	if err != nil {
		panic(err) // a Service can be written
	}
	p.add(services, "", nameOf(s), string(body), func(ctx context.Context) error {
		made := &corev1.Service{}
		err := p.api.core.Post().Namespace(s.Namespace).Resource(services).Body(body).Do(ctx).Into(made)
		if err != nil {
			return err
		}
		return p.world.services.Update(made)
	})
}

func (p *pass) update(has, want *corev1.Service) {
	put(p, p.world.services, services, "", has, has, want)
}

// remove deletes a Service, unless it has changed.
func (p *pass) remove(s *corev1.Service) {
	if s.DeletionTimestamp != nil {
		return
	}
	body, err := json.Marshal(metav1.DeleteOptions{
		TypeMeta:      metav1.TypeMeta{APIVersion: "v1", Kind: "DeleteOptions"},
		Preconditions: &metav1.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion}})
	if err != nil {
		panic(err) // as above
	}
	name := nameOf(s)
	p.add(services, "", name, s.ResourceVersion, func(ctx context.Context) error {
		err := p.api.core.Delete().Namespace(name.Namespace).Resource(services).Name(name.Name).Body(body).Do(ctx).Error()
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
}
