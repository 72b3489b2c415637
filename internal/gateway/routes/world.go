// Package routes computes from the objects of Gateway API which Services must exist and what statuses all have. It does
// no I/O and knows no clock: docs/decisions/0036-gateway.md has the form of what it writes.
package routes

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// ControllerName is what a GatewayClass must name for its Gateways to be ours.
const ControllerName gatewayv1.GatewayController = "verdict-proxy.github.io/gateway"

// World is what there is. Compute changes nothing of it. Objects of a list are in any order.
type World struct {
	// Controller is who we are, as in ControllerName.
	Controller gatewayv1.GatewayController
	// Bundles are of what releases the definitions of the API's kinds are that the cluster has.
	Bundles []Bundle

	// Classes, Gateways and routes may include those of other controllers.
	Classes   []*gatewayv1.GatewayClass
	Gateways  []*Gateway
	TCPRoutes []*gatewayv1.TCPRoute
	UDPRoutes []*gatewayv1.UDPRoute
	Grants    []*gatewayv1.ReferenceGrant

	// Namespace returns a namespace's labels, and whether it exists.
	Namespace func(name string) (labels map[string]string, exists bool)
	// Service returns a Service, or nil. Of Services that are backends, only labels, type, cluster IP and ports are
	// read. Of those that are Gateways', also the rest of metadata, cluster IPs, loadBalancerClass and status.
	Service func(types.NamespacedName) *corev1.Service
	// ConfigMap returns the data of a ConfigMap that a GatewayClass refers to, and whether it exists.
	ConfigMap func(types.NamespacedName) (data map[string]string, exists bool)
}

// Bundle is what a CustomResourceDefinition of the API says of itself in the annotations gateway.networking.k8s.io/
// bundle-version and channel, such as "v1.7.0" and "standard"; empty without them.
type Bundle struct{ Version, Channel string }
