package routes

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// addressCases are what Gateways ask for, what their Services ask for, and what comes of it with the Service's
// addresses that cluster.serve gives.
var addressCases = []struct {
	name, addresses string
	class           corev1.ServiceType
	// asks are loadBalancerIP and clusterIPs of the Service.
	asks string
	want []string
}{
	{"none", "[]", "LoadBalancer", " []", []string{"gateway db: good", "address db: IPAddress 203.0.113.7 "}},
	{"none in the cluster", "[]", "ClusterIP", " []", []string{"gateway db: good", "service db: ClusterIP ...",
		"address db: IPAddress 10.96.0.7 Cluster", "address db: IPAddress fd00::7 Cluster"}},
	{"any", "[{type: IPAddress}]", "LoadBalancer", " []",
		[]string{"gateway db: good", "address db: IPAddress 203.0.113.7 "}},
	{"any in the cluster", "[{type: IPAddress}]", "ClusterIP", " []",
		[]string{"gateway db: good", "address db: IPAddress 10.96.0.7 Cluster", "no address db: IPAddress fd00::7"}},
	{"a certain one", "[{value: 203.0.113.9}]", "LoadBalancer", "203.0.113.9 []",
		[]string{"gateway db: good", "address db: IPAddress 203.0.113.9 "}},
	{"a certain one in the cluster", "[{value: 10.96.0.50}]", "ClusterIP", " [10.96.0.50]",
		[]string{"gateway db: good", "address db: IPAddress 10.96.0.50 Cluster"}},
	{"routability Cluster", "[{routability: Cluster}]", "LoadBalancer", " []",
		[]string{"gateway db: good", "service db: ClusterIP ...", "address db: IPAddress 10.96.0.7 Cluster",
			"no address db: IPAddress fd00::7"}},
	{"routability Cluster, both families", "[{routability: Cluster, value: 'fd00::5'}, {routability: Cluster, " +
		"value: 10.96.0.5}]", "LoadBalancer", " [fd00::5 10.96.0.5]", []string{"gateway db: good",
		"address db: IPAddress 10.96.0.5 Cluster", "address db: IPAddress fd00::5 Cluster"}},
	{"routability Cluster, two of a family", "[{routability: Cluster, value: 10.96.0.5}, {routability: Cluster, " +
		"value: 10.96.0.6}]", "LoadBalancer", " [10.96.0.5]", []string{
		"gateway db: Programmed=False/AddressNotAssigned AddressesAssigned=False/NotAssigned",
		"address db: IPAddress 10.96.0.5 Cluster", "no address db: IPAddress 10.96.0.6"}},
	{"both routabilities", "[{}, {routability: Cluster}]", "LoadBalancer", " []",
		[]string{"gateway db: good", "service db: LoadBalancer ...", "address db: IPAddress 203.0.113.7 ",
			"address db: IPAddress 10.96.0.7 Cluster"}},
	{"the tests' own", "[{routability: testing.x-k8s.io/sentinel}]", "LoadBalancer", " []",
		[]string{"gateway db: good", "address db: IPAddress 203.0.113.7 testing.x-k8s.io/sentinel"}},
	{"another routability alone", "[{routability: example.com/wan}]", "LoadBalancer", "none", []string{
		"gateway db: Programmed=False/AddressNotAssigned AddressesAssigned=False/NotAssigned", "no address db",
		"no service db"}},
	{"another routability beside", "[{routability: example.com/wan}, {}]", "LoadBalancer", " []", []string{
		"gateway db: Programmed=False/AddressNotAssigned AddressesAssigned=False/NotAssigned",
		"address db: IPAddress 203.0.113.7 "}},
	{"two certain ones", "[{value: 203.0.113.8}, {value: 203.0.113.9}]", "LoadBalancer", "203.0.113.8 []", []string{
		"gateway db: Programmed=False/AddressNotUsable AddressesAssigned=False/NotAssigned",
		"address db: IPAddress 203.0.113.8 ", "no address db: IPAddress 203.0.113.9"}},
	{"two of any", "[{}, {}]", "LoadBalancer", " []", []string{
		"gateway db: Programmed=False/AddressNotAssigned AddressesAssigned=False/NotAssigned",
		"address db: IPAddress 203.0.113.7 "}},
	{"IPv4 in IPv6 notation", "[{value: '::ffff:203.0.113.9'}]", "LoadBalancer", "203.0.113.9 []",
		[]string{"gateway db: good", "address db: IPAddress 203.0.113.9 "}},
	{"no address", "[{value: PLACEHOLDER}]", "LoadBalancer", "none", []string{
		"gateway db: Programmed=False/AddressNotUsable AddressesAssigned=False/NotAssigned", "no service db"}},
	{"a zone", "[{value: 'fe80::1%eth0'}]", "LoadBalancer", "none", []string{
		"gateway db: Programmed=False/AddressNotUsable ..."}},
	{"a type that is not supported", "[{type: test/fake, value: x}, {value: 203.0.113.9}]", "LoadBalancer", "none",
		[]string{"gateway db: Accepted=False/UnsupportedAddress Programmed=False/Invalid", "no service db"}},
	{"a name", "[{type: Hostname, value: a.b}]", "LoadBalancer", "none",
		[]string{"gateway db: Accepted=False/UnsupportedAddress Programmed=False/Invalid", "no service db"}},
}

func TestAddresses(t *testing.T) {
	for _, r := range addressCases {
		t.Run(r.name, func(t *testing.T) {
			c := readCluster(t, gatewayYAML("db", tcp5432, "addresses: "+r.addresses))
			c.Bundles = []Bundle{{"v1.7.0", "experimental"}}
			c.configs[types.NamespacedName{Namespace: "edge", Name: "p"}] = map[string]string{
				"serviceType": string(r.class)}
			c.Classes[0].Spec.ParametersRef = paramsRef("p")
			p := c.compute()
			p.check(t, r.want)
			asks := "none"
			if s := p.Gateways[0].Service; s != nil {
				asks = s.Spec.LoadBalancerIP + " [" + strings.Join(s.Spec.ClusterIPs, " ") + "]"
				if len(s.Spec.ClusterIPs) > 0 && s.Spec.ClusterIP != s.Spec.ClusterIPs[0] {
					t.Errorf("clusterIP %s", s.Spec.ClusterIP)
				}
			}
			if asks != r.asks {
				t.Errorf("the Service asks for %s, want %s", asks, r.asks)
			}
		})
	}
}

// TestAddressesOfBalancer: names of load balancers are addresses, and what is none is left out.
func TestAddressesOfBalancer(t *testing.T) {
	c, s := live(t, gatewayDB)
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "lb.example.com"}, {IP: "::ffff:203.0.113.1"},
		{IP: "203.0.113.1"}, {IP: "wrong"}, {}}
	Compute(&c.World).check(t, []string{"gateway db: good", "address db: Hostname lb.example.com unsaid",
		"address db: IPAddress 203.0.113.1 unsaid"})
	if n := len(Compute(&c.World).Gateways[0].Programmed.Addresses); n != 2 {
		t.Errorf("%d addresses", n)
	}
	s.Status.LoadBalancer.Ingress = s.Status.LoadBalancer.Ingress[:1]
	c.Gateways[0].Spec.Addresses = make([]SpecAddress, 1)
	Compute(&c.World).check(t, []string{"gateway db: Programmed=False/AddressNotAssigned", "no address db"})
	c.Gateways[0].Spec.Addresses = nil
	for i := range 2 * mostAddresses {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: fmt.Sprint("203.0.113.", i)})
	}
	if n := len(Compute(&c.World).Gateways[0].Programmed.Addresses); n != mostAddresses {
		t.Errorf("%d addresses", n)
	}
	s.Status.LoadBalancer.Ingress = nil
	p := Compute(&c.World)
	p.check(t, []string{"gateway db: Programmed=False/AddressNotAssigned", "no address db",
		"listener db/db: Programmed=False/Pending [TCPRoute] 0"})
	if !equal(p.Gateways[0].Programmed, p.Gateways[0].Waiting) {
		t.Error("it shows something else until nodes are ready")
	}
}

// TestRoutabilityField: a Gateway is read and written with the field of version 1.7, and without it if the definitions
// have no such field.
func TestRoutabilityField(t *testing.T) {
	c := readCluster(t, gatewayYAML("db", tcp5432, "addresses: [{routability: Cluster}]"))
	for _, r := range []struct {
		bundle  Bundle
		present bool
	}{{Bundle{"v1.7.0", "experimental"}, true}, {Bundle{"v1.7.0", "standard"}, false}, {Bundle{"v1.6.3", "experimental"},
		false}} {
		c.Bundles = []Bundle{r.bundle}
		text, err := json.Marshal(c.compute().Gateways[0].Programmed)
		if err != nil {
			t.Fatal(err)
		}
		for _, word := range []string{`"routability":"Cluster"`, "AddressesAssigned"} {
			if strings.Contains(string(text), word) != r.present {
				t.Errorf("%v: %s", r.bundle, text)
			}
		}
	}
	c.Bundles = []Bundle{{"v1.7.0", "experimental"}}
	c.Gateways[0].Spec.Listeners[0].Protocol = "HTTP"
	if s := c.compute().Gateways[0].Programmed; len(s.Conditions) != 2 || len(s.Addresses) > 0 {
		t.Errorf("a Gateway that is not accepted has %+v", s)
	}
	copied := c.Gateways[0].DeepCopyObject().(*Gateway)
	if !equal(copied, c.Gateways[0]) {
		t.Errorf("a copy is %+v", copied)
	}
	copied.Spec.Addresses[0].Routability = ""
	if c.Gateways[0].Spec.Addresses[0].Routability != RoutabilityCluster {
		t.Error("a copy is none")
	}
}
