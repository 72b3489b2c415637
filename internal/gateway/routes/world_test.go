package routes

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"
)

// cluster is a World from YAML.
type cluster struct {
	World
	namespaces map[string]map[string]string
	services   map[types.NamespacedName]*corev1.Service
	configs    map[types.NamespacedName]map[string]string
}

// readCluster reads documents, separated by lines of ---. All objects get generation 7 and, in their order, ages of
// whole seconds, unless they say others; Gateways get their name as UID. The class verdict and the namespaces are there.
func readCluster(t testing.TB, text string) *cluster {
	t.Helper()
	c := newCluster()
	at := time.Unix(1_700_000_000, 0)
	for i, document := range strings.Split(text, "\n---\n") {
		var meta struct {
			Kind string
			metav1.ObjectMeta
		}
		if err := yaml.Unmarshal([]byte(document), &meta); err != nil {
			t.Fatalf("document %d: %v", i, err)
		}
		o := c.object(t, meta.Kind)
		if err := yaml.UnmarshalStrict([]byte(document), o); err != nil {
			t.Fatalf("document %d: %v", i, err)
		}
		m := o.(metav1.Object)
		m.SetGeneration(7)
		if created := m.GetCreationTimestamp(); created.IsZero() {
			m.SetCreationTimestamp(metav1.NewTime(at.Add(time.Duration(i) * time.Second)))
		}
		if m.GetUID() == "" {
			m.SetUID(types.UID(m.GetName()))
		}
		c.add(o)
	}
	return c
}

func newCluster() *cluster {
	c := &cluster{
		namespaces: map[string]map[string]string{"edge": {"team": "edge"}, "shop": {"team": "shop"}, "other": {}},
		services:   map[types.NamespacedName]*corev1.Service{},
		configs:    map[types.NamespacedName]map[string]string{},
	}
	c.World = World{
		Controller: ControllerName,
		Bundles:    []Bundle{{"v1.7.0", "experimental"}},
		Classes: []*gatewayv1.GatewayClass{{ObjectMeta: metav1.ObjectMeta{Name: "verdict", Generation: 3},
			Spec: gatewayv1.GatewayClassSpec{ControllerName: ControllerName}}},
		Namespace: func(name string) (map[string]string, bool) {
			labels, exists := c.namespaces[name]
			return labels, exists
		},
		Service: func(name types.NamespacedName) *corev1.Service { return c.services[name] },
		ConfigMap: func(name types.NamespacedName) (map[string]string, bool) {
			data, exists := c.configs[name]
			return data, exists
		},
	}
	return c
}

func (c *cluster) object(t testing.TB, kind string) any {
	switch kind {
	case "GatewayClass":
		return &gatewayv1.GatewayClass{}
	case "Gateway":
		return &Gateway{}
	case "TCPRoute":
		return &gatewayv1.TCPRoute{}
	case "UDPRoute":
		return &gatewayv1.UDPRoute{}
	case "ReferenceGrant":
		return &gatewayv1.ReferenceGrant{}
	case "Service":
		return &corev1.Service{}
	case "ConfigMap":
		return &corev1.ConfigMap{}
	}
	t.Fatalf("kind %q", kind)
	return nil
}

func (c *cluster) add(o any) {
	switch o := o.(type) {
	case *gatewayv1.GatewayClass:
		c.Classes = append(c.Classes, o)
	case *Gateway:
		c.Gateways = append(c.Gateways, o)
	case *gatewayv1.TCPRoute:
		c.TCPRoutes = append(c.TCPRoutes, o)
	case *gatewayv1.UDPRoute:
		c.UDPRoutes = append(c.UDPRoutes, o)
	case *gatewayv1.ReferenceGrant:
		c.Grants = append(c.Grants, o)
	case *corev1.Service:
		c.services[types.NamespacedName{Namespace: o.Namespace, Name: o.Name}] = o
	case *corev1.ConfigMap:
		c.configs[types.NamespacedName{Namespace: o.Namespace, Name: o.Name}] = o.Data
	}
}

// serve creates the Services of a plan, with addresses, as the API server and a load balancer would.
func (c *cluster) serve(p *Plan) {
	for i := range p.Gateways {
		want := p.Gateways[i].Service
		if want == nil {
			continue
		}
		s := want.DeepCopy()
		if len(s.Spec.ClusterIPs) == 0 {
			s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.7", []string{"10.96.0.7", "fd00::7"}
		}
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
			ip := s.Spec.LoadBalancerIP
			if ip == "" {
				ip = "203.0.113.7"
			}
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ip}}
		}
		c.add(s)
	}
}

// compute computes twice, the second time with the Services that the first asked for.
func (c *cluster) compute() *Plan {
	c.serve(Compute(&c.World))
	return Compute(&c.World)
}

// brief is "Accepted=True/Accepted Programmed=False/Pending".
func brief(conditions []metav1.Condition) string {
	var words []string
	for _, c := range conditions {
		words = append(words, c.Type+"="+string(c.Status)+"/"+c.Reason)
	}
	return strings.Join(words, " ")
}

// gatewayDB is a Gateway with a listener db for TCP, and the Services and the route that it serves.
const gatewayDB = `
kind: Gateway
metadata: {namespace: edge, name: db}
spec:
  gatewayClassName: verdict
  listeners:
  - {name: db, protocol: TCP, port: 5432, allowedRoutes: {namespaces: {from: All}}}
---
kind: Service
metadata: {namespace: shop, name: db}
spec: {clusterIP: 10.96.0.1, ports: [{name: pg, port: 5432}]}
---
kind: TCPRoute
metadata: {namespace: shop, name: db}
spec:
  parentRefs: [{namespace: edge, name: db}]
  rules: [{backendRefs: [{name: db, port: 5432}]}]
`
