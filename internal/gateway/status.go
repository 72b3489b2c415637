package gateway

import (
	"context"
	"encoding/json"
	"reflect"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/internal/gateway/routes"
)

func (p *pass) add(resource, sub string, name types.NamespacedName, basis string, do func(context.Context) error) {
	p.jobs = append(p.jobs, job{ref{resource, sub, name}, basis, do})
}

// withStatus is an object as far as a patch of its status goes.
type withStatus[S any] struct {
	Status S `json:"status"`
}

// status writes an object's status.
func status[T object, S any](p *pass, s *store[T], resource string, o T, has, want S) {
	put(p, s, resource, "status", o, withStatus[S]{has}, withStatus[S]{want})
}

// create writes an object that does not exist.
func create[T object](p *pass, s *store[T], resource string, o T) {
	body, err := json.Marshal(o)
	if err != nil {
		panic(err) // it is an object of the API
	}
	client, name := p.world.clientOf(resource), nameOf(o)
	p.add(resource, "", name, string(body), func(ctx context.Context) error {
		into := reflect.New(reflect.TypeOf(o).Elem()).Interface().(T)
		if err := client.Post().Namespace(name.Namespace).Resource(resource).Body(body).Do(ctx).Into(into); err != nil {
			return err
		}
		return s.wrote(into)
	})
}

// put writes what differs between two values of an object, or of its subresource.
func put[T object](p *pass, s *store[T], resource, sub string, o T, has, want any) {
	body, err := patch(o.GetResourceVersion(), has, want)
	if err != nil {
		panic(err) // these are objects of the API
	}
	if body == nil {
		return
	}
	client, name := p.world.clientOf(resource), nameOf(o)
	p.add(resource, sub, name, o.GetResourceVersion(), func(ctx context.Context) error {
		into := reflect.New(reflect.TypeOf(o).Elem()).Interface().(T) // decoding leaves what is there
		if err := p.api.send(ctx, client, resource, name, sub, body, into); err != nil {
			return err
		}
		return s.wrote(into)
	})
}

// reasonNotAccepted is a reason of a route's ProgrammedCondition; others are the Gateway's.
const reasonNotAccepted = "NotAccepted"

// programmedAs is the ProgrammedCondition of a route's entry, given its Gateway's condition.
func programmedAs(parent *routes.RouteParent, gateway metav1.Condition) metav1.Condition {
	switch {
	case !parent.Waits || gateway.Reason == "":
		return metav1.Condition{Status: metav1.ConditionFalse, Reason: reasonNotAccepted}
	case gateway.Status == metav1.ConditionTrue:
		return metav1.Condition{Status: metav1.ConditionTrue, Reason: string(gatewayv1.GatewayReasonProgrammed)}
	}
	return gateway
}

// route writes what a route's parents say by now.
func (p *pass) route(of *routes.RoutePlan) {
	r := *of
	r.Parents = slices.Clone(r.Parents)
	for i := range r.Parents {
		parent := &r.Parents[i]
		s := p.shown[parent.Gateway]
		c := programmedAs(parent, s.programmed)
		has := entryOf(r.Status, &parent.Status)
		if c.Status != metav1.ConditionTrue && parent.Waits && has != nil && saysSame(has.Conditions,
			parent.Status.Conditions) {
			c = *find(has.Conditions, ProgrammedCondition) // the route itself has not changed: its Gateway says the rest
		}
		mark(parent, c)
	}
	said := func(parent *routes.RouteParent) bool { return p.shown[parent.Gateway].said }
	want, differs := routes.MergeRoute(&r, routes.ControllerName, said, p.now)
	if !differs {
		return
	}
	if want.Parents == nil {
		want.Parents = []gatewayv1.RouteParentStatus{} // the field is required
	}
	switch o := r.Object.(type) {
	case *gatewayv1.TCPRoute:
		status(p, p.world.tcp, tcpRoutes, o, o.Status.RouteStatus, want)
	case *gatewayv1.UDPRoute:
		status(p, p.world.udp, udpRoutes, o, o.Status.RouteStatus, want)
	}
}

// entryOf returns what a status has for a parent of ours; nil if there is nothing.
func entryOf(s *gatewayv1.RouteStatus, want *gatewayv1.RouteParentStatus) *gatewayv1.RouteParentStatus {
	for i := range s.Parents {
		if e := &s.Parents[i]; e.ControllerName == want.ControllerName && reflect.DeepEqual(e.ParentRef, want.ParentRef) {
			return e
		}
	}
	return nil
}

// saysSame reports whether conditions are what is wanted, and have a ProgrammedCondition.
func saysSame(has, want []metav1.Condition) bool {
	for i := range want {
		w, h := &want[i], find(has, want[i].Type)
		if h == nil || h.Status != w.Status || h.Reason != w.Reason || h.Message != w.Message ||
			h.ObservedGeneration != w.ObservedGeneration {
			return false
		}
	}
	return find(has, ProgrammedCondition) != nil
}

// mark gives a route's entry its ProgrammedCondition.
func mark(parent *routes.RouteParent, c metav1.Condition) {
	s := &parent.Status
	c.Type, c.LastTransitionTime = ProgrammedCondition, metav1.Time{}
	if len(s.Conditions) > 0 {
		c.ObservedGeneration = s.Conditions[0].ObservedGeneration
	}
	s.Conditions = append(slices.Clone(s.Conditions), c)
}
