package routes

import (
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/sync/watch"
)

func TestServiceName(t *testing.T) {
	if name := ServiceName(types.NamespacedName{Namespace: "edge", Name: "db"}).String(); name != "edge/db-verdict" {
		t.Errorf("db becomes %s", name)
	}
	seen := map[string]bool{}
	for _, name := range []string{"1db", "a.b", strings.Repeat("a", 253), strings.Repeat("a", 56), "-"} {
		service := ServiceName(types.NamespacedName{Name: name}).Name
		if errs := validation.IsDNS1035Label(service); len(errs) > 0 || !strings.HasSuffix(service, "-verdict") {
			t.Errorf("%s becomes %s: %v", name, service, errs)
		}
		if seen[service] {
			t.Errorf("%s is another's, too", service)
		}
		seen[service] = true
	}
}

// TestServiceMetadata: labels and annotations of the Gateway's infrastructure are the Service's, but none that would
// replace ours or hide the Service from nodes. A name that is no label's value is none.
func TestServiceMetadata(t *testing.T) {
	const infrastructure = `infrastructure: {labels: {team: a, gateway.networking.k8s.io/gateway-name: x,
    service.kubernetes.io/service-proxy-name: x, service.kubernetes.io/headless: ''},
    annotations: {note: b, verdict-proxy.github.io/backends: x, gateway.verdict-proxy.github.io/infrastructure: x}}`
	for name, label := range map[string]string{"db": "db", strings.Repeat("a", 64): ""} {
		s := Compute(&readCluster(t, gatewayYAML(name, tcp5432, infrastructure)).World).Gateways[0].Service
		labels := map[string]string{"team": "a", "gateway.networking.k8s.io/gateway-class-name": "verdict"}
		if label != "" {
			labels["gateway.networking.k8s.io/gateway-name"] = label
		}
		if !maps.Equal(s.Labels, labels) {
			t.Errorf("labels %v, want %v", s.Labels, labels)
		}
		if s.Annotations["note"] != "b" || !strings.Contains(s.Annotations[watch.AnnotationBackends], "Gateway edge/") {
			t.Errorf("annotations %v", s.Annotations)
		}
		if o := s.OwnerReferences; len(o) != 1 || o[0].Name != name || o[0].Kind != "Gateway" ||
			o[0].APIVersion != "gateway.networking.k8s.io/v1" || !*o[0].Controller {
			t.Errorf("owners %v", o)
		}
		if len(s.Spec.Selector) > 0 || len(s.Spec.ExternalIPs) > 0 {
			t.Errorf("spec %+v", s.Spec)
		}
	}
}

// live is the Service of gatewayDB as an API server has it.
func live(t *testing.T, objects string) (*cluster, *corev1.Service) {
	c := readCluster(t, objects)
	c.compute()
	s := c.Service(types.NamespacedName{Namespace: "edge", Name: "db-verdict"}).DeepCopy()
	s.ResourceVersion, s.Spec.SessionAffinity = "5", corev1.ServiceAffinityNone
	s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].NodePort = int32(30000 + i)
	}
	c.add(s)
	return c, s
}

// TestMergeService: what others set stays, what is ours is set, and nothing is written in vain.
func TestMergeService(t *testing.T) {
	const two = tcp5432 + ", {name: dns, protocol: UDP, port: 5432}"
	c, has := live(t, gatewayYAML("db", two, "infrastructure: {labels: {old: a}, annotations: {old: b}}"))
	has.Labels["theirs"], has.Annotations["theirs"] = "x", "y"
	want := Compute(&c.World).Gateways[0].Service
	if s, differs := MergeService(has, want); differs {
		t.Fatalf("there is something to write: %+v, has %+v", s, has)
	}
	before := has.DeepCopy()
	c.Gateways[0].Spec.Infrastructure = nil
	slices.Reverse(c.Gateways[0].Spec.Listeners)
	s, differs := MergeService(has, Compute(&c.World).Gateways[0].Service)
	if !differs || !equal(has, before) {
		t.Fatal("nothing differs, or the object was changed")
	}
	if s.Labels["theirs"] != "x" || s.Annotations["theirs"] != "y" || s.ResourceVersion != "5" ||
		s.Spec.ClusterIP != has.Spec.ClusterIP || len(s.Status.LoadBalancer.Ingress) != 1 {
		t.Errorf("what is theirs became %+v", s)
	}
	if s.Labels["old"] != "" || s.Annotations["old"] != "" || s.Annotations[annotationInfrastructure] != "" {
		t.Errorf("of the infrastructure stays %v %v", s.Labels, s.Annotations)
	}
	if p := s.Spec.Ports; p[0].Name != "udp-5432" || p[0].NodePort != 30001 || p[1].NodePort != 30000 {
		t.Errorf("node ports %+v", p)
	}
	s.Spec.Ports[0].AppProtocol = new("x")
	if _, differs := MergeService(s, Compute(&c.World).Gateways[0].Service); !differs {
		t.Error("a field of ours that another has changed stays")
	}
}

// TestMergeServiceTypes: a Service that is no load balancer's any more has nothing of it, and the class of a load
// balancer is set when the type is, and never changes.
func TestMergeServiceTypes(t *testing.T) {
	c, has := live(t, gatewayDB)
	has.Spec.LoadBalancerClass = new("old.b/c")
	c.configs[types.NamespacedName{Namespace: "edge", Name: "p"}] = map[string]string{"serviceType": "ClusterIP"}
	c.Classes[0].Spec.ParametersRef = paramsRef("p")
	inCluster, _ := MergeService(has, Compute(&c.World).Gateways[0].Service)
	if s := inCluster.Spec; s.Type != corev1.ServiceTypeClusterIP || s.Ports[0].NodePort != 0 ||
		s.ExternalTrafficPolicy != "" || s.AllocateLoadBalancerNodePorts != nil || s.LoadBalancerClass != nil {
		t.Errorf("became %+v", s)
	}
	c.configs[types.NamespacedName{Namespace: "edge", Name: "p"}] = map[string]string{"loadBalancerClass": "a.b/c",
		"externalTrafficPolicy": "Local", "allocateLoadBalancerNodePorts": "false"}
	want := Compute(&c.World).Gateways[0].Service
	if s, _ := MergeService(has, want); or(s.Spec.LoadBalancerClass, "") != "old.b/c" ||
		s.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal || *s.Spec.AllocateLoadBalancerNodePorts {
		t.Errorf("became %+v", s.Spec)
	}
	if s, _ := MergeService(inCluster, want); or(s.Spec.LoadBalancerClass, "") != "a.b/c" {
		t.Errorf("became %+v", s.Spec)
	}
}

// TestServiceOfAnother: a Service that has the name and is not ours is left alone.
func TestServiceOfAnother(t *testing.T) {
	taken := "kind: Service\nmetadata: {namespace: edge, name: db-verdict}\nspec: {clusterIP: 10.96.0.9}\n---\n"
	p := Compute(&readCluster(t, gatewayDB+routeDB+services+taken).World)
	p.check(t, []string{"gateway db: Programmed=False/NoResources", "no service db", "no delete", "no address db",
		"route db of db/: Accepted=False/NoReadyListeners"})
}

// TestDelete: a Service goes that its Gateway has no use for, and one whose Gateway has become another controller's.
// One whose class is gone stays.
func TestDelete(t *testing.T) {
	c, _ := live(t, gatewayDB+classYAML("else", "example.com/c"))
	g := c.Gateways[0]
	g.Spec.GatewayClassName = "gone"
	Compute(&c.World).check(t, []string{"no delete"})
	g.Spec.GatewayClassName = "else"
	Compute(&c.World).check(t, []string{"delete edge/db-verdict", "no gateway db"})
	g.Spec.GatewayClassName = "verdict"
	g.Spec.Listeners[0].AllowedRoutes.Kinds = []gatewayv1.RouteGroupKind{{Kind: "HTTPRoute"}}
	Compute(&c.World).check(t, []string{"delete edge/db-verdict", "no service db", "no address db"})
	g.UID = "other"
	Compute(&c.World).check(t, []string{"no delete"})
	delete(c.services[types.NamespacedName{Namespace: "edge", Name: "db-verdict"}].Annotations, watch.AnnotationBackends)
	g.UID, g.Spec.GatewayClassName = "db", "else"
	Compute(&c.World).check(t, []string{"no delete"})
}

// TestMergeGranted: names are there, or the condition is not.
func TestMergeGranted(t *testing.T) {
	c := readCluster(t, gatewayDB+routeDB+services)
	s := &corev1.Service{Status: corev1.ServiceStatus{Conditions: []metav1.Condition{{Type: "Theirs"}}}}
	granted := Compute(&c.World).Gateways[0].Granted
	merged, differs := MergeGranted(s, granted, now)
	if !differs || len(merged) != 2 || merged[1].Message != "shop/db" || merged[1].Type != watch.ConditionGranted ||
		merged[1].LastTransitionTime != now || len(s.Status.Conditions) != 1 {
		t.Fatalf("merged %v", merged)
	}
	s.Status.Conditions = merged
	if _, differs := MergeGranted(s, granted, later); differs {
		t.Error("there is something to write")
	}
	c.TCPRoutes = nil
	merged, differs = MergeGranted(s, Compute(&c.World).Gateways[0].Granted, later)
	if !differs || len(merged) != 1 || merged[0].Type != "Theirs" {
		t.Errorf("merged %v", merged)
	}
}
