package routes

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

func paramsRef(name string) *gatewayv1.ParametersReference {
	return &gatewayv1.ParametersReference{Kind: "ConfigMap", Name: name, Namespace: new(gatewayv1.Namespace("edge"))}
}

// TestParameters reads a class's ConfigMap strictly. An empty message means that it is right.
func TestParameters(t *testing.T) {
	type data = map[string]string
	for _, r := range []struct {
		data
		message string
	}{
		{data{}, ""},
		{data{"serviceType": "ClusterIP"}, ""},
		{data{"serviceType": "LoadBalancer", "externalTrafficPolicy": "Local", "loadBalancerClass": "example.com/lb",
			"allocateLoadBalancerNodePorts": "false"}, ""},
		{data{"serviceType": "NodePort"}, `data.serviceType: "NodePort" is not LoadBalancer or ClusterIP`},
		{data{"externalTrafficPolicy": "local"}, `data.externalTrafficPolicy: "local" is not Cluster or Local`},
		{data{"loadBalancerClass": ""}, `data.loadBalancerClass: "" is not a name such as example.com/name`},
		{data{"allocateLoadBalancerNodePorts": "no"}, `data.allocateLoadBalancerNodePorts: "no" is not true or false`},
		{data{"servicetype": "ClusterIP"}, "data.servicetype: there is no such key; is serviceType meant?"},
		{data{"x": ""}, "data.x: there is no such key: serviceType, externalTrafficPolicy, loadBalancerClass, " +
			"allocateLoadBalancerNodePorts"},
		{data{"serviceType": "ClusterIP", "externalTrafficPolicy": "Local"},
			"data: serviceType ClusterIP has no use for other keys"},
	} {
		c := readCluster(t, gatewayDB)
		c.configs[types.NamespacedName{Namespace: "edge", Name: "p"}] = r.data
		c.Classes[0].Spec.ParametersRef = paramsRef("p")
		p := Compute(&c.World)
		accepted := p.Classes[0].Status.Conditions[0]
		if r.message == "" {
			p.check(t, []string{"class verdict: good", "service db: ..."})
		} else if accepted.Message != "ConfigMap edge/p: "+r.message || accepted.Reason != "InvalidParameters" {
			t.Errorf("%v: %+v", r.data, accepted)
		} else {
			p.check(t, []string{"gateway db: Accepted=False/InvalidParameters Programmed=False/Invalid"})
		}
	}
}

func TestParametersReference(t *testing.T) {
	for text, message := range map[string]string{
		"{group: '', kind: Secret, name: p, namespace: edge}":     "parametersRef: Secret of group",
		"{group: a.b, kind: ConfigMap, name: p, namespace: edge}": "parametersRef: ConfigMap of group",
		"{group: '', kind: ConfigMap, name: p}":                   "parametersRef.namespace: a ConfigMap needs one",
		"{group: '', kind: ConfigMap, name: p, namespace: edge}":  "parametersRef: the ConfigMap edge/p does not exist",
	} {
		c := readCluster(t, classYAML("with", string(ControllerName), "parametersRef: "+text))
		got := Compute(&c.World).Classes[1].Status.Conditions[0]
		if !strings.HasPrefix(got.Message, message) || got.Reason != "InvalidParameters" || got.ObservedGeneration != 7 {
			t.Errorf("%s: %+v", text, got)
		}
	}
}

// TestParametersLost: a mistake in the parameters leaves the Services that there are as they are, and lets their routes
// change.
func TestParametersLost(t *testing.T) {
	c, s := live(t, gatewayDB+services)
	s.Spec.ExternalTrafficPolicy, s.Spec.LoadBalancerClass = corev1.ServiceExternalTrafficPolicyLocal, new("a.b/c")
	c.Classes[0].Spec.ParametersRef = paramsRef("gone")
	c.add(readCluster(t, routeDB).TCPRoutes[0])
	p := Compute(&c.World)
	p.check(t, []string{"class verdict: Accepted=False/InvalidParameters", "gateway db: good", "route db of db/: good"})
	merged, _ := MergeService(s, p.Gateways[0].Service)
	if merged.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal ||
		or(merged.Spec.LoadBalancerClass, "") != "a.b/c" {
		t.Errorf("became %+v", merged.Spec)
	}
}

func TestSupportedVersion(t *testing.T) {
	const no = "class verdict: SupportedVersion=False/UnsupportedVersion"
	for _, r := range []struct {
		bundles []Bundle
		want    string
	}{
		{[]Bundle{{"v1.6.3", "standard"}, {"v1.7.0", "standard"}}, "class verdict: good"},
		{[]Bundle{{"v1.7.0-rc.1", "experimental"}}, "class verdict: good"},
		{nil, no},
		{[]Bundle{{"v1.6.3", "standard"}, {}}, no},
		{[]Bundle{{"v1.5.0", "standard"}}, no},
		{[]Bundle{{"v1.70.0", "standard"}}, no},
		{[]Bundle{{"v1.7", "standard"}}, no},
	} {
		c := newCluster()
		c.Bundles = r.bundles
		Compute(&c.World).check(t, []string{r.want})
	}
}
