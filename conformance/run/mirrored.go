package run

//lint:file-ignore SA1019 Endpoints are deprecated, and this is about what becomes of those that are left.

import (
	"context"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// mirrored writes an Endpoints object, the older kind, which a controller mirrors into EndpointSlices.
func (t *teller) mirrored(ctx context.Context, m *cases.MirroredStep) error {
	if err := t.testbed.Plane.StartControllers(); err != nil {
		return err
	}
	t.dirty = true
	client := t.testbed.Client.CoreV1().Endpoints(t.namespace)
	if len(m.Hosts) == 0 {
		return client.Delete(ctx, m.Of, metav1.DeleteOptions{})
	}
	var subset v1.EndpointSubset
	for _, host := range m.Hosts {
		subset.Addresses = append(
			subset.Addresses,
			v1.EndpointAddress{IP: t.testbed.Host(host).IP4.String(), NodeName: new(testbed.NodeOf(host))},
		)
	}
	for _, p := range t.services[m.Of].Spec.Ports {
		subset.Ports = append(subset.Ports, v1.EndpointPort{Name: p.Name, Port: m.Port, Protocol: p.Protocol})
	}
	e := &v1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: m.Of, Namespace: t.namespace},
		Subsets:    []v1.EndpointSubset{subset},
	}
	_, err := client.Create(ctx, e, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = client.Update(ctx, e, metav1.UpdateOptions{})
	}
	return err
}
