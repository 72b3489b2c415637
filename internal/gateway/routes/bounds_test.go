package routes

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// asNodes reads a Gateway's Service as nodes do.
func asNodes(t testing.TB, g *GatewayPlan) *snapshot.Service {
	t.Helper()
	s := g.Service.DeepCopy()
	s.APIVersion, s.Kind, s.UID = "v1", "Service", "u"
	s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.7", []string{"10.96.0.7"}
	s.Status.Conditions, _ = MergeGranted(s, g.Granted, now)
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "service.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	read, problems, err := watch.Load(context.Background(), file, "")
	if err != nil || len(problems) > 0 {
		t.Fatalf("nodes say %v %v of %s", err, problems, text)
	}
	return read.Services[snapshot.Name{Namespace: s.Namespace, Name: s.Name}]
}

// TestNodesRead: nodes read what is written for them.
func TestNodesRead(t *testing.T) {
	c := readCluster(t, gatewayDB+services+routeYAML("db", toDB, "{name: db, port: 5432, weight: 80}, "+
		"{namespace: edge, name: near, port: 5432}, {name: no.such, port: 1, weight: 0}, "+
		"{namespace: other, name: far, port: 1}")+grantYAML("TCPRoute", "shop", "{group: '', kind: Service}"))
	got := asNodes(t, &Compute(&c.World).Gateways[0])
	want := &snapshot.Backends{For: "Gateway edge/db", Ports: []snapshot.PortBackends{{Port: "tcp-5432", Listener: "db",
		Route: "TCPRoute shop/db", To: []snapshot.Backend{
			{Service: snapshot.Name{Namespace: "shop", Name: "db"}, Port: 5432, Weight: 80},
			{Service: snapshot.Name{Namespace: "edge", Name: "near"}, Port: 5432, Weight: 1},
			{Refused: "the Service shop/no.such does not exist"},
			{Weight: 1, Refused: "no ReferenceGrant in namespace other allows TCPRoutes of namespace shop the Service far"},
		}}}}
	if !equal(got.Backends, want) {
		t.Errorf("nodes read %+v", got.Backends)
	}
}

// largest is a Gateway with all that the API lets it have, and with the longest names.
func largest(backend func(listener, i int) types.NamespacedName) *cluster {
	c := newCluster()
	long := func(n int, format string, args ...any) string {
		s := fmt.Sprintf(format, args...)
		return s + strings.Repeat("x", n-len(s))
	}
	namespace := long(63, "edge")
	g := &Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: long(253, "g"), UID: "g"},
		Spec: GatewaySpec{GatewaySpec: gatewayv1.GatewaySpec{GatewayClassName: "verdict",
			Infrastructure: &gatewayv1.GatewayInfrastructure{
				Annotations: map[gatewayv1.AnnotationKey]gatewayv1.AnnotationValue{}}}}}
	for i := range 16 {
		key := gatewayv1.AnnotationKey(long(252, "a%d", i) + "/" + long(63, "b"))
		g.Spec.Infrastructure.Annotations[key] = gatewayv1.AnnotationValue(long(4096, ""))
	}
	for i := range snapshot.MaxBackendPorts {
		l := gatewayv1.Listener{Name: gatewayv1.SectionName(long(253, "l%d", i)), Port: int32(60000 + i),
			Protocol: gatewayv1.TCPProtocolType}
		g.Spec.Listeners = append(g.Spec.Listeners, l)
		r := &gatewayv1.TCPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: long(253, "r%d", i)}}
		r.Spec.ParentRefs = []gatewayv1.ParentReference{{Name: gatewayv1.ObjectName(g.Name), SectionName: &l.Name}}
		rule := gatewayv1.TCPRouteRule{}
		for j := range snapshot.MaxBackends {
			name := backend(i, j)
			name.Name = long(63, "%s", name.Name)
			if name.Namespace == "" {
				name.Namespace = namespace
			} else {
				name.Namespace = long(63, "%s", name.Namespace)
			}
			c.services[name] = &corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 65535}}}}
			ref := gatewayv1.BackendRef{Weight: new(int32(snapshot.MaxBackendWeight))}
			ref.Name, ref.Port = gatewayv1.ObjectName(name.Name), new(int32(65535))
			ref.Namespace = new(gatewayv1.Namespace(name.Namespace))
			rule.BackendRefs = append(rule.BackendRefs, ref)
			grant := &gatewayv1.ReferenceGrant{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace}}
			grant.Spec.From = []gatewayv1.ReferenceGrantFrom{{Group: gatewayv1.GroupName, Kind: kindTCP,
				Namespace: gatewayv1.Namespace(namespace)}}
			grant.Spec.To = []gatewayv1.ReferenceGrantTo{{Kind: "Service"}}
			c.Grants = append(c.Grants, grant)
		}
		r.Spec.Rules = []gatewayv1.TCPRouteRule{rule}
		c.TCPRoutes = append(c.TCPRoutes, r)
	}
	c.Gateways = append(c.Gateways, g)
	return c
}

// TestBounds: the largest Gateway's annotations and condition are what an API server takes and nodes read. What does
// not fit is refused, and its route says so.
func TestBounds(t *testing.T) {
	type key = types.NamespacedName
	for name, backend := range map[string]func(l, i int) key{
		"own namespace":         func(l, i int) key { return key{Name: fmt.Sprint("s", l, "-", i)} },
		"another namespace":     func(l, i int) key { return key{Namespace: "n", Name: fmt.Sprint("s", i)} },
		"many other namespaces": func(l, i int) key { return key{Namespace: fmt.Sprint("n", l, "-", i), Name: "s"} },
	} {
		p := Compute(&largest(backend).World)
		g := &p.Gateways[0]
		size := 0
		for k, v := range g.Service.Annotations {
			size += len(k) + len(v)
		}
		if size > mostAnnotations || len(g.Granted.Message) > mostGranted {
			t.Errorf("%s: %d bytes of annotations, %d of names", name, size, len(g.Granted.Message))
		}
		refused := 0
		for _, r := range p.Routes {
			if brief(r.Parents[0].Status.Conditions) == "ResolvedRefs=False/TooManyBackends" {
				refused++
			}
		}
		of := asNodes(t, g).Backends
		t.Logf("%s: %d bytes of annotations, %d of names, %d routes left out", name, size, len(g.Granted.Message), refused)
		if len(of.Ports)+refused != snapshot.MaxBackendPorts || (refused > 0) != (name != "own namespace") {
			t.Errorf("%s: %d ports, %d routes are refused", name, len(of.Ports), refused)
		}
		for b := range of.Each() {
			if b.Refused != "" {
				t.Errorf("%s: nodes refuse %v: %s", name, b.Service, b.Refused)
			}
		}
	}
}

// many are Gateways with as many routes each, to Services of another namespace.
func many(gateways, routes int) *cluster {
	c := newCluster()
	c.services[types.NamespacedName{Namespace: "shop", Name: "db"}] = &corev1.Service{
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 5432}}}}
	for i := range gateways {
		g := &Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "edge", Name: fmt.Sprint("g", i), UID: "g"},
			Spec: GatewaySpec{GatewaySpec: gatewayv1.GatewaySpec{GatewayClassName: "verdict"}}}
		for j := range min(routes, snapshot.MaxBackendPorts) {
			l := gatewayv1.Listener{Name: gatewayv1.SectionName(fmt.Sprint("l", j)), Port: int32(j + 1), Protocol: "TCP",
				AllowedRoutes: &gatewayv1.AllowedRoutes{Namespaces: &gatewayv1.RouteNamespaces{
					From: new(gatewayv1.NamespacesFromSelector), Selector: &metav1.LabelSelector{
						MatchLabels: map[string]string{"team": "shop"}}}}}
			g.Spec.Listeners = append(g.Spec.Listeners, l)
		}
		c.Gateways = append(c.Gateways, g)
		for j := range routes {
			r := &gatewayv1.TCPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprint("r", i, "-", j)}}
			ref := gatewayv1.ParentReference{Name: gatewayv1.ObjectName(g.Name), Namespace: new(gatewayv1.Namespace("edge"))}
			if routes <= snapshot.MaxBackendPorts {
				ref.SectionName = &g.Spec.Listeners[j].Name
			}
			backend := gatewayv1.BackendRef{}
			backend.Name, backend.Port = "db", new(int32(5432))
			r.Spec.ParentRefs = []gatewayv1.ParentReference{ref}
			r.Spec.Rules = []gatewayv1.TCPRouteRule{{BackendRefs: []gatewayv1.BackendRef{backend}}}
			c.TCPRoutes = append(c.TCPRoutes, r)
		}
	}
	return c
}

// BenchmarkCompute measures 1,000 routes on 100 Gateways, and one Gateway whose tenant makes 1,000 and 10,000 routes to
// all its 64 listeners.
func BenchmarkCompute(b *testing.B) {
	for _, size := range [][2]int{{100, 10}, {1, 1000}, {1, 10_000}} {
		b.Run(fmt.Sprintf("%dx%d", size[0], size[1]), func(b *testing.B) {
			c := many(size[0], size[1])
			b.ReportAllocs()
			for b.Loop() {
				Compute(&c.World)
			}
		})
	}
}
