package routes

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/sync/watch"
)

// cluster is a World from YAML.
type cluster struct {
	World
	namespaces map[string]map[string]string
	services   map[types.NamespacedName]*corev1.Service
	configs    map[types.NamespacedName]map[string]string
}

// readCluster reads documents, separated by lines of ---. All objects get generation 7, their name as UID, and in their
// order ages of whole seconds, unless they say others. The class verdict and some namespaces are there.
func readCluster(t testing.TB, text string) *cluster {
	t.Helper()
	c := newCluster()
	at := time.Unix(1_700_000_000, 0)
	for i, document := range strings.Split(strings.TrimSuffix(text, "---\n"), "\n---\n") {
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
		Bundles:    []Bundle{{"v1.7.0", "standard"}},
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

// good are the conditions of what is served.
var good = []string{"Accepted=True/Accepted", "Programmed=True/Programmed", "ResolvedRefs=True/ResolvedRefs",
	"Conflicted=False/NoConflicts", "SupportedVersion=True/SupportedVersion",
	"AddressesAssigned=True/AddressesAssigned"}

// brief has the conditions that are not good, such as "Programmed=False/Pending".
func brief(conditions []metav1.Condition) string {
	var words []string
	for _, c := range conditions {
		if word := c.Type + "=" + string(c.Status) + "/" + c.Reason; !slices.Contains(good, word) {
			words = append(words, word)
		}
	}
	return cmp.Or(strings.Join(words, " "), "good")
}

// lines are what a plan says, in brief.
func (p *Plan) lines() []string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for _, c := range p.Classes {
		add("class %s: %s", c.Object.Name, brief(c.Status.Conditions))
	}
	for _, g := range p.Gateways {
		add("gateway %s: %s", g.Object.Name, brief(g.Programmed.Conditions))
		for _, a := range g.Programmed.Addresses {
			add("address %s: %s %s %s", g.Object.Name, *a.Type, a.Value, or(a.Routability, "unsaid"))
		}
		for _, l := range g.Programmed.Listeners {
			kinds := []string{}
			for _, k := range l.SupportedKinds {
				kinds = append(kinds, string(k.Kind))
			}
			add("listener %s/%s: %s %v %d", g.Object.Name, l.Name, brief(l.Conditions), kinds, l.AttachedRoutes)
		}
		if s := g.Service; s != nil {
			var ports []string
			for _, port := range s.Spec.Ports {
				ports = append(ports, fmt.Sprintf("%s=%d/%s", port.Name, port.Port, port.Protocol))
			}
			add("service %s: %s %v", g.Object.Name, s.Spec.Type, ports)
			add("backends %s: %s", g.Object.Name, s.Annotations[watch.AnnotationBackends])
			add("granted %s: %s", g.Object.Name, g.Granted.Message)
			add("needs %s: %s", g.Object.Name, g.Needs)
		}
	}
	for _, r := range p.Routes {
		for _, o := range r.Parents {
			add("route %s of %s/%s: %s", r.Object.GetName(), o.Gateway.Name, or(o.Status.ParentRef.SectionName, ""),
				brief(o.Status.Conditions))
		}
	}
	for _, name := range p.Delete {
		add("delete %s", name)
	}
	return lines
}

// check fails if a plan has not all lines that are wanted. One that ends with "..." is wanted by its beginning, and one
// that begins with "no " must not be there so.
func (p *Plan) check(t *testing.T, want []string) {
	t.Helper()
	lines := p.lines()
	for _, w := range want {
		text, not := strings.CutPrefix(w, "no ")
		begins := strings.TrimSuffix(text, "...")
		if slices.ContainsFunc(lines, func(l string) bool {
			return l == text || (begins != text || not) && strings.HasPrefix(l, begins)
		}) == not {
			t.Errorf("wanted %s\namong\n%s", w, strings.Join(lines, "\n"))
		}
	}
}
