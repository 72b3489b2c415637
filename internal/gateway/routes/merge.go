package routes

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// MergeClass returns the status of a GatewayClass with ours in it, and whether it differs from what the object has.
// Conditions of others stay, as does the time of a condition whose status does not change.
func MergeClass(has *gatewayv1.GatewayClassStatus, ours gatewayv1.GatewayClassStatus, now metav1.Time) (
	gatewayv1.GatewayClassStatus, bool) {
	panic("not yet")
}

// MergeGateway is MergeClass for a Gateway.
func MergeGateway(has *GatewayStatus, ours GatewayStatus, now metav1.Time) (GatewayStatus, bool) {
	panic("not yet")
}

// MergeRoute is MergeClass for a route. Entries of other controllers stay. An entry that waits stays as the object has
// it, or is left out if it has none: programmed says of which Gateways it need not wait.
func MergeRoute(p *RoutePlan, by gatewayv1.GatewayController, programmed func(*RouteParent) bool, now metav1.Time) (
	gatewayv1.RouteStatus, bool) {
	panic("not yet")
}

// MergeService returns has with what is ours of the Service in want, and whether it differs from has. What others set
// stays: node ports, cluster IPs, other labels and annotations.
func MergeService(has, want *corev1.Service) (*corev1.Service, bool) { panic("not yet") }

// MergeGranted returns the conditions of a Service's status with the Gateway's in them, and whether they differ.
func MergeGranted(has *corev1.Service, granted metav1.Condition, now metav1.Time) ([]metav1.Condition, bool) {
	panic("not yet")
}

// Owns says whether a Service is the Gateway's: its controller is.
func Owns(g *Gateway, s *corev1.Service) bool { return metav1.IsControlledBy(s, g) }
