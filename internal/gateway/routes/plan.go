package routes

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// Plan is what must be, in place of what there is. Conditions in it have no LastTransitionTime, and statuses only hold
// what is ours: MergeClass, MergeGateway, MergeRoute and MergeService put them into what the objects have.
type Plan struct {
	// Classes are those that name our controller, in the World's order.
	Classes []ClassPlan
	// Gateways are those of our classes that are not being deleted, in the World's order.
	Gateways []GatewayPlan
	// Routes are all of the World's, TCPRoutes first, in the World's order: a route that refers to no Gateway of ours
	// has no Parents, and may have a status of ours that must go.
	Routes []RoutePlan
	// Delete are the Services that are Gateways' and must not exist any more. Those of Gateways that are gone go by their
	// owner references, and those of a Gateway whose class is gone stay: a class that is replaced cuts no connection.
	Delete []types.NamespacedName
}

// ClassPlan is a GatewayClass and its status.
type ClassPlan struct {
	Object *gatewayv1.GatewayClass
	Status gatewayv1.GatewayClassStatus
}

// GatewayPlan is a Gateway and what follows from it.
type GatewayPlan struct {
	Object *Gateway
	// ServiceName is the Service that is the Gateway's, if there is one.
	ServiceName types.NamespacedName
	// Service is what of the Gateway's Service is ours; nil if there must be none, or if its name is another's.
	Service *corev1.Service
	// Granted is the condition of the Service's status that names the backends of other namespaces. Its status is False
	// if there are none: the Service needs no such condition.
	Granted metav1.Condition
	// Needs are the Services that all nodes must have programmed before the Gateway is: its own, and its backends that
	// exist and have a weight, sorted. Nil without a Service.
	Needs []types.NamespacedName
	// Programmed is the status once nodes have programmed what is needed; Waiting is the status until then. They differ
	// in conditions of type Programmed alone, and not at all if the Gateway cannot be programmed as it is.
	Programmed, Waiting GatewayStatus
}

// RoutePlan is a route and what its parents of ours say.
type RoutePlan struct {
	// Object is a *gatewayv1.TCPRoute or a *gatewayv1.UDPRoute; Status is the Object's.
	Object metav1.Object
	Status *gatewayv1.RouteStatus
	// Parents are in the order of the route's references.
	Parents []RouteParent
}

// RouteParent is what one Gateway says of a route.
type RouteParent struct {
	Status gatewayv1.RouteParentStatus
	// Gateway is the parent.
	Gateway types.NamespacedName
	// Waits says that the entry must not be written before the Gateway is programmed: the route is accepted.
	Waits bool
}
