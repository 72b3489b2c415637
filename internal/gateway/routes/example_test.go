package routes

import (
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/sync/watch"
)

// TestExample: all of examples/gateway.yaml is accepted and served, in the shares that it says.
func TestExample(t *testing.T) {
	text, err := os.ReadFile("../../../examples/gateway.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c := readCluster(t, string(text))
	c.namespaces["shop"] = map[string]string{corev1.LabelMetadataName: "shop"}
	for name, port := range map[string]corev1.ServicePort{"shop/db": {Port: 5432}, "shop/db-next": {Port: 5432},
		"names/dns": {Port: 53, Protocol: corev1.ProtocolUDP}} {
		s := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{port}}}
		s.Namespace, s.Name, _ = strings.Cut(name, "/")
		c.add(s)
	}
	plan := Compute(&c.World)
	var all []metav1.Condition
	for i := range plan.Routes {
		for _, p := range plan.Routes[i].Parents {
			all = append(all, p.Status.Conditions...)
		}
	}
	for _, l := range plan.Gateways[0].Waiting.Listeners {
		if all = append(all, l.Conditions...); l.AttachedRoutes != 1 {
			t.Errorf("listener %s has %d routes", l.Name, l.AttachedRoutes)
		}
	}
	for _, c := range all {
		if c.Status != metav1.ConditionTrue && !slices.Contains([]string{"Programmed", "Conflicted"}, c.Type) {
			t.Errorf("%s is %s: %s", c.Type, c.Status, c.Message)
		}
	}
	const shares = `"to":[{"service":"shop/db","port":5432,"weight":90},` +
		`{"service":"shop/db-next","port":5432,"weight":10}]`
	s := plan.Gateways[0].Service
	if s == nil || !strings.Contains(s.Annotations[watch.AnnotationBackends], shares) {
		t.Errorf("the Service is %+v", s)
	}
}
