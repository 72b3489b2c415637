package routes

import (
	"cmp"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
)

// Compute says what follows from w. It takes time in proportion to the objects and the references between them.
func Compute(w *World) *Plan {
	c := &computation{
		World:    w,
		plan:     &Plan{},
		classes:  map[string]*class{},
		gateways: map[types.NamespacedName]*gateway{},
		grants:   indexGrants(w.Grants),
	}
	c.addClasses()
	c.addGateways()
	for _, o := range w.TCPRoutes {
		c.addRoute(tcpRoute(o))
	}
	for _, o := range w.UDPRoutes {
		c.addRoute(udpRoute(o))
	}
	for _, g := range c.order {
		c.planGateway(g)
	}
	for _, r := range c.routes {
		c.planRoute(r)
	}
	return c.plan
}

// computation is a Compute under way.
type computation struct {
	*World
	plan *Plan
	// classes are those that exist; gateways are ours, and order has them in the World's order.
	classes  map[string]*class
	gateways map[types.NamespacedName]*gateway
	order    []*gateway
	routes   []*route
	grants   *grantIndex
}

// mostMessage bounds a condition's message in bytes: objects of tenants have a part in it.
const mostMessage = 1024

// condition is one without a time. The message is shortened.
func condition[T, R ~string](kind T, is bool, reason R, message string, generation int64) metav1.Condition {
	status := metav1.ConditionFalse
	if is {
		status = metav1.ConditionTrue
	}
	return metav1.Condition{Type: string(kind), Status: status, Reason: string(reason),
		Message: clip.Cut(message, mostMessage), ObservedGeneration: generation}
}

// or is what p points to, or otherwise if it is nil.
func or[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// isKind says whether a reference's group and kind, whose defaults are given, are those of Gateway API.
func isKind(group *gatewayv1.Group, kind gatewayv1.Kind, want string) bool {
	return or(group, gatewayv1.GroupName) == gatewayv1.GroupName && string(kind) == want
}

// older orders objects by age, as the API decides which of two wins.
func older(a, b metav1.Object) int {
	aTime, bTime := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	return cmp.Or(aTime.Compare(bTime.Time), cmp.Compare(a.GetNamespace(), b.GetNamespace()),
		cmp.Compare(a.GetName(), b.GetName()))
}
