// Package peers makes what tests compare with a real kube-proxy: a control plane beside it, and Services of every kind.
package peers

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// Last is the Service that Create makes last: whoever programs it has programmed all others.
var Last = struct {
	Name string
	Addr netip.Addr
}{"default/f97", netip.MustParseAddr("10.96.250.250")}

// Start starts a control plane on a host that is the node, too, with the given addresses. It returns the programs of
// some kube-proxies, which are built if need be. root is the way to the product's module.
func Start(t *testing.T, root string, addrs []string, proxies ...string) (*control.Plane, *lab.Host, []string) {
	t.Helper()
	build := filepath.Join(root, "conformance/peers/build")
	out, err := exec.Command(build, append([]string{"etcd", "kube-apiserver"}, proxies...)...).Output()
	labtest.Check(t, err)
	programs := strings.Fields(string(out))
	host := labtest.NewHost(t, labtest.NewNet(t), "node")
	for _, a := range addrs {
		labtest.Run(t, host, "", "ip", "addr", "add", a, "dev", "lo")
	}
	host.IP4 = netip.MustParsePrefix(addrs[0]).Addr()
	plane, err := control.Start(t.Context(), control.Config{
		Host: host, Etcd: programs[0], APIServer: programs[1], Dir: t.TempDir(), RequestTimeout: time.Minute,
		ServiceRanges: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")},
	})
	labtest.Check(t, err)
	t.Cleanup(func() { labtest.Check(t, plane.Close()) })
	return plane, host, programs[2:]
}

// Create makes node-1, and a Service of every combination of policies, affinity, source ranges and places of endpoints.
func Create(t *testing.T, c kubernetes.Interface) {
	t.Helper()
	node, err := c.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}},
		metav1.CreateOptions{})
	labtest.Check(t, err)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.10"},
		{Type: corev1.NodeInternalIP, Address: "2001:db8:2::10"}}
	_, err = c.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
	labtest.Check(t, err)
	i := 0
	for _, internal := range []string{"Cluster", "Local"} {
		for _, external := range []string{"Cluster", "Local"} {
			for _, affinity := range []string{"None", "ClientIP"} {
				for _, ranges := range []string{"[]", "[198.51.100.0/24, 198.51.101.7/32, \"2001:db8:64::/64\"]",
					"[192.0.2.0/24, \"2001:db8:2::/64\"]"} {
					for _, nodes := range [][]string{nil, {"node-1"}, {"node-2"}, {"node-1", "node-2", "node-2"}} {
						i++
						feature(t, c, i, i, internal, external, affinity, ranges, nodes)
					}
				}
			}
		}
	}
	feature(t, c, i+1, 250, "Cluster", "Cluster", "None", "[]", []string{"node-1"})
}

const serviceText = `
metadata: {name: f%[1]d, namespace: default}
spec:
  type: LoadBalancer
  ipFamilyPolicy: RequireDualStack
  clusterIP: 10.96.250.%[2]d
  clusterIPs: [10.96.250.%[2]d, "fd00:10:96::fa%[2]x"]
  internalTrafficPolicy: %[3]s
  externalTrafficPolicy: %[4]s
  healthCheckNodePort: %[10]d
  sessionAffinity: %[5]s
  loadBalancerSourceRanges: %[6]s
  externalIPs: [198.19.0.%[2]d, "2001:db8:19::%[2]x"]
  ports:
  - {name: tcp, port: 80, protocol: TCP, nodePort: %[7]d}
  - {name: udp, port: 53, protocol: UDP, nodePort: %[8]d}
  - {name: sctp, port: 99, protocol: SCTP, nodePort: %[9]d}
status: {loadBalancer: {ingress: [{ip: 198.18.0.%[2]d}, {ip: "2001:db8:18::%[2]x"}]}}
`

func feature(t *testing.T, c kubernetes.Interface, i, last int, internal, external, affinity, ranges string,
	nodes []string) {
	t.Helper()
	s, healthPort := &corev1.Service{}, 0
	if external == "Local" {
		healthPort = 32000 + i
	}
	labtest.Check(t, yaml.Unmarshal(fmt.Appendf(nil, serviceText, i, last, internal, external, affinity, ranges, 31100+i,
		31350+i, 31600+i, healthPort), s))
	var slices []*discoveryv1.EndpointSlice
	for n, kind := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		sl := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("f%d-%d", i, n),
			Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}}, AddressType: kind}
		for e, node := range nodes {
			sl.Endpoints = append(sl.Endpoints, discoveryv1.Endpoint{NodeName: &node, Addresses: []string{
				[]string{fmt.Sprintf("10.244.%d.%d", 1+e, i), fmt.Sprintf("fd00:10:244:%x::%x", 1+e, i)}[n]}})
		}
		for _, p := range s.Spec.Ports {
			port := p.Port + 8000
			sl.Ports = append(sl.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &port})
		}
		slices = append(slices, sl)
	}
	Put(t, c, s, slices...)
}

// Put makes a Service as it is, its status included, with its slices, and their namespace.
func Put(t *testing.T, c kubernetes.Interface, s *corev1.Service, slices ...*discoveryv1.EndpointSlice) {
	t.Helper()
	ctx, create := t.Context(), metav1.CreateOptions{}
	_, _ = c.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.Namespace}}, create)
	status := s.Status
	made, err := c.CoreV1().Services(s.Namespace).Create(ctx, s, create)
	labtest.Check(t, err)
	made.Status = status
	_, err = c.CoreV1().Services(s.Namespace).UpdateStatus(ctx, made, metav1.UpdateOptions{})
	labtest.Check(t, err)
	for _, sl := range slices {
		_, err := c.DiscoveryV1().EndpointSlices(s.Namespace).Create(ctx, sl, create)
		labtest.Check(t, err)
	}
}

// ReadBack writes what the API server has into a file of manifests.
func ReadBack(t *testing.T, c kubernetes.Interface) string {
	t.Helper()
	ctx, all := t.Context(), metav1.ListOptions{}
	var items []any
	services, err := c.CoreV1().Services("").List(ctx, all)
	labtest.Check(t, err)
	for _, s := range services.Items {
		s.APIVersion, s.Kind = "v1", "Service"
		items = append(items, s)
	}
	slices, err := c.DiscoveryV1().EndpointSlices("").List(ctx, all)
	labtest.Check(t, err)
	for _, s := range slices.Items {
		s.APIVersion, s.Kind = "discovery.k8s.io/v1", "EndpointSlice"
		items = append(items, s)
	}
	cidrs, err := c.NetworkingV1().ServiceCIDRs().List(ctx, all)
	labtest.Check(t, err)
	for _, s := range cidrs.Items {
		s.APIVersion, s.Kind = "networking.k8s.io/v1", "ServiceCIDR"
		items = append(items, s)
	}
	node, err := c.CoreV1().Nodes().Get(ctx, "node-1", metav1.GetOptions{})
	labtest.Check(t, err)
	node.APIVersion, node.Kind = "v1", "Node"
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": append(items, node)})
	labtest.Check(t, err)
	file := filepath.Join(t.TempDir(), "cluster.yaml")
	labtest.Check(t, os.WriteFile(file, text, 0o600))
	return file
}
