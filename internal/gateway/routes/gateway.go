package routes

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// Gateway is the API's Gateway with what version 1.7 of the API says of addresses: the types of that version need a
// newer Go than the product has. A client reads and writes it as it is.
type Gateway struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              GatewaySpec   `json:"spec"`
	Status            GatewayStatus `json:"status,omitzero"`
}

// GatewaySpec is the API's, whose Addresses stay empty: those of this type hide them.
type GatewaySpec struct {
	gatewayv1.GatewaySpec `json:",inline"`
	Addresses             []SpecAddress `json:"addresses,omitempty"`
}

// SpecAddress is an address that a Gateway asks for.
type SpecAddress struct {
	gatewayv1.GatewaySpecAddress `json:",inline"`
	// Routability is from where the address is reachable: RoutabilityCluster, or empty for the class's own choice.
	Routability string `json:"routability,omitempty"`
}

// GatewayStatus is the API's, whose Addresses stay empty: those of this type hide them.
type GatewayStatus struct {
	gatewayv1.GatewayStatus `json:",inline"`
	Addresses               []StatusAddress `json:"addresses,omitempty"`
}

// StatusAddress is an address that a Gateway has. Routability is only set if the Gateway asked for it, since an API
// server with an older definition drops the field.
type StatusAddress struct {
	gatewayv1.GatewayStatusAddress `json:",inline"`
	Routability                    *string `json:"routability,omitempty"`
}

// RoutabilityCluster asks for an address within the cluster: the cluster IP of a Service.
const RoutabilityCluster = "Cluster"

// GatewayList is what an API server answers to a list.
type GatewayList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Gateway `json:"items"`
}

// Key is the Gateway's namespace and name.
func (g *Gateway) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: g.Namespace, Name: g.Name}
}

// DeepCopyObject makes a Gateway an object for clients.
func (g *Gateway) DeepCopyObject() runtime.Object {
	c := &Gateway{TypeMeta: g.TypeMeta, Status: *g.Status.clone()}
	g.ObjectMeta.DeepCopyInto(&c.ObjectMeta)
	g.Spec.GatewaySpec.DeepCopyInto(&c.Spec.GatewaySpec)
	c.Spec.Addresses = slices.Clone(g.Spec.Addresses)
	for i := range c.Spec.Addresses {
		a := &c.Spec.Addresses[i]
		a.GatewaySpecAddress = *a.GatewaySpecAddress.DeepCopy()
	}
	return c
}

func (s *GatewayStatus) clone() *GatewayStatus {
	c := &GatewayStatus{GatewayStatus: *s.GatewayStatus.DeepCopy(), Addresses: slices.Clone(s.Addresses)}
	for i := range c.Addresses {
		a := &c.Addresses[i]
		a.GatewayStatusAddress = *a.GatewayStatusAddress.DeepCopy()
		if a.Routability != nil {
			a.Routability = new(*a.Routability)
		}
	}
	return c
}

// DeepCopyObject makes a list of Gateways an object for clients.
func (l *GatewayList) DeepCopyObject() runtime.Object {
	c := &GatewayList{TypeMeta: l.TypeMeta, ListMeta: *l.ListMeta.DeepCopy(), Items: make([]Gateway, 0, len(l.Items))}
	for i := range l.Items {
		c.Items = append(c.Items, *l.Items[i].DeepCopyObject().(*Gateway))
	}
	return c
}
