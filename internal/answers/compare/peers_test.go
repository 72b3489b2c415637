//go:build peers

package compare_test

import (
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
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/answers/compare"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
)

const proxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: node-1
clusterCIDR: 10.244.0.0/16,fd00:10:244::/48
nodePortAddresses: [192.0.2.10/32, "2001:db8:2::10/128", 127.0.0.0/8, 10.244.0.1/32]
clientConnection: {kubeconfig: %q, qps: 1000, burst: 1000}
conntrack: {maxPerCore: 0, min: 0}
metricsBindAddress: 127.0.0.1:10249
healthzBindAddress: 127.0.0.1:10256
oomScoreAdj: 0
`

// TestKubeProxy has real kube-proxies of two versions and both modes program the same objects, and compares every class
// of packets with the objects. Every difference must have a reason, and Verdict itself must have none.
func TestKubeProxy(t *testing.T) {
	plane, host, programs := startPlane(t, "kube-proxy", "kube-proxy-1.36")
	create(t, plane.Client)
	m := load(t, readBack(t, plane.Client), "--hostname-override", "node-1", "--cluster-cidr",
		"10.244.0.0/16,fd00:10:244::/48", "--nodeport-addresses",
		"192.0.2.10/32,2001:db8:2::10/128,127.0.0.0/8,10.244.0.1/32")
	ours := compare.NewSide(compare.Verdict, read(t, write(t, m.state), "verdict", m.host))
	for version, program := range map[string]string{"1.37": programs[2], "1.36": programs[3]} {
		for _, mode := range []string{"nftables", "iptables"} {
			t.Run(mode+" "+version, func(t *testing.T) {
				side := settled(t, host, plane, program, mode, m.host)
				r, err := compare.Compare(compare.Input{Host: m.host, Pods: podsOf(m.state), State: m.state,
					Sides: []compare.Side{ours, side}})
				labtest.Check(t, err)
				report(t, r)
				t.Logf("kube-proxy: %+v, Verdict: %+v", side.Size, ours.Size)
				if r.Unexplained+r.Unknown > 0 || r.Same < 1000 {
					t.Errorf("%d classes are unexplained, %d unknown", r.Unexplained, r.Unknown)
				}
			})
		}
	}
}

// TestAsKubeProxy: told to behave as kube-proxy, Verdict does with every class of packets what kube-proxy 1.37 does in
// the same mode.
func TestAsKubeProxy(t *testing.T) {
	plane, host, programs := startPlane(t, "kube-proxy")
	create(t, plane.Client)
	file := readBack(t, plane.Client)
	const mode = "nftables"
	m := load(t, file, "--hostname-override", "node-1", "--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48",
		"--nodeport-addresses", "192.0.2.10/32,2001:db8:2::10/128,127.0.0.0/8,10.244.0.1/32",
		"--proxy-mode", mode, "--behavior", "kube-proxy")
	ours := compare.NewSide(compare.Verdict, read(t, write(t, m.state), "verdict", m.host))
	r, err := compare.Compare(compare.Input{Host: m.host, Pods: podsOf(m.state), State: m.state,
		Sides: []compare.Side{ours, settled(t, host, plane, programs[2], mode, m.host)}})
	labtest.Check(t, err)
	report(t, r)
	if r.Same != r.Classes || r.Same < 1000 {
		t.Errorf("mode %s: %d of %d classes are the same", mode, r.Same, r.Classes)
	}
}

// settled has a kube-proxy program the node, ends it, and reads what it wrote.
func settled(t *testing.T, h *lab.Host, plane *control.Plane, program, mode string, addrs []netip.Addr) compare.Side {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "config.conf")
	labtest.Check(t, os.WriteFile(config, []byte(fmt.Sprintf(proxyConfig, mode, plane.Kubeconfig())), 0o600))
	proxy := control.NewProcess(h, filepath.Join(dir, "log"), program, "--config="+config)
	labtest.Check(t, proxy.Start())
	defer func() { _ = proxy.Kill() }()
	deadline := time.Now().Add(5 * time.Minute)
	for last := ""; time.Now().Before(deadline); time.Sleep(3 * time.Second) {
		side := sideOf(t, h, mode, addrs)
		digest := fmt.Sprint(side.Digest)
		for _, k := range side.Mentioned.Keys[0] {
			if k.Addr == netip.MustParseAddr("10.96.250.250") && digest == last {
				return side
			}
		}
		last = digest
	}
	t.Fatalf("kube-proxy has not programmed the node:\n%s", proxy.Tail())
	return compare.Side{}
}

// sideOf reads what a kube-proxy programmed.
func sideOf(t *testing.T, h *lab.Host, mode string, addrs []netip.Addr) compare.Side {
	t.Helper()
	if mode == "nftables" {
		return compare.NewSide(compare.NFTables, read(t, h, "kube-proxy", addrs))
	}
	var text ipfamily.Per[[]byte]
	for f, program := range []string{"iptables-nft-save", "ip6tables-nft-save"} {
		out, err := h.Run(program)
		labtest.Check(t, err)
		text[f] = []byte(out)
	}
	chains, err := packets.ParseChains(text, &packets.Host{Addrs: addrs})
	labtest.Check(t, err)
	return compare.NewSide(compare.IPTables, chains)
}

// startPlane starts a control plane on a host that is the node, too, and gives the programs: etcd, kube-apiserver and
// some kube-proxies.
func startPlane(t *testing.T, proxies ...string) (*control.Plane, *lab.Host, []string) {
	t.Helper()
	out, err := exec.Command("../../../conformance/peers/build", append([]string{"etcd", "kube-apiserver"},
		proxies...)...).Output()
	labtest.Check(t, err)
	programs := strings.Fields(string(out))
	host := labtest.NewHost(t, labtest.NewNet(t), "node")
	for _, a := range []string{"192.0.2.10/32", "2001:db8:2::10/128", "10.244.0.1/32", "fd00:10:244::1/128"} {
		_, err := host.Run("ip", "addr", "add", a, "dev", "lo")
		labtest.Check(t, err)
	}
	host.IP4 = netip.MustParseAddr("192.0.2.10")
	plane, err := control.Start(t.Context(), control.Config{
		Host: host, Etcd: programs[0], APIServer: programs[1], Dir: t.TempDir(), RequestTimeout: time.Minute,
		ServiceRanges: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")},
	})
	labtest.Check(t, err)
	t.Cleanup(func() { labtest.Check(t, plane.Close()) })
	return plane, host, programs
}

// create makes the node, and a Service of every combination of policies, affinity, source ranges and places of
// endpoints.
func create(t *testing.T, c kubernetes.Interface) {
	t.Helper()
	ctx := t.Context()
	node, err := c.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}},
		metav1.CreateOptions{})
	labtest.Check(t, err)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.10"},
		{Type: corev1.NodeInternalIP, Address: "2001:db8:2::10"}}
	_, err = c.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
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
status: {loadBalancer: {ingress: [{ip: 203.0.113.%[2]d}, {ip: "2001:db8:18::%[2]x"}]}}
`

func feature(t *testing.T, c kubernetes.Interface, i, last int, internal, external, affinity, ranges string,
	nodes []string) {
	t.Helper()
	s, healthPort := &corev1.Service{}, 0
	if external == "Local" {
		healthPort = 31000 + i
	}
	labtest.Check(t, yaml.Unmarshal(fmt.Appendf(nil, serviceText, i, last, internal, external, affinity, ranges, 30000+i,
		30250+i, 30500+i, healthPort), s))
	status := s.Status
	made, err := c.CoreV1().Services(s.Namespace).Create(t.Context(), s, metav1.CreateOptions{})
	labtest.Check(t, err)
	made.Status = status
	_, err = c.CoreV1().Services(s.Namespace).UpdateStatus(t.Context(), made, metav1.UpdateOptions{})
	labtest.Check(t, err)
	for n, kind := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		sl := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("f%d-%d", i, n),
			Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}}, AddressType: kind}
		for e, node := range nodes {
			sl.Endpoints = append(sl.Endpoints, discoveryv1.Endpoint{NodeName: &node, Addresses: []string{
				[]string{fmt.Sprintf("10.244.%d.%d", 1+e, i), fmt.Sprintf("fd00:10:244:%x::%x", 1+e, i)}[n]}})
		}
		for _, p := range s.Spec.Ports {
			port := p.Port + 8000
			sl.Ports = append(sl.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &port})
		}
		_, err := c.DiscoveryV1().EndpointSlices("default").Create(t.Context(), sl, metav1.CreateOptions{})
		labtest.Check(t, err)
	}
}

// readBack writes what the API server has into a file of manifests.
func readBack(t *testing.T, c kubernetes.Interface) string {
	t.Helper()
	var items []any
	services, err := c.CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
	labtest.Check(t, err)
	for _, s := range services.Items {
		s.APIVersion, s.Kind = "v1", "Service"
		items = append(items, s)
	}
	slices, err := c.DiscoveryV1().EndpointSlices("").List(t.Context(), metav1.ListOptions{})
	labtest.Check(t, err)
	for _, s := range slices.Items {
		s.APIVersion, s.Kind = "discovery.k8s.io/v1", "EndpointSlice"
		items = append(items, s)
	}
	cidrs, err := c.NetworkingV1().ServiceCIDRs().List(t.Context(), metav1.ListOptions{})
	labtest.Check(t, err)
	for _, s := range cidrs.Items {
		s.APIVersion, s.Kind = "networking.k8s.io/v1", "ServiceCIDR"
		items = append(items, s)
	}
	node, err := c.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
	labtest.Check(t, err)
	node.APIVersion, node.Kind = "v1", "Node"
	text, err := yaml.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": append(items, node)})
	labtest.Check(t, err)
	file := filepath.Join(t.TempDir(), "cluster.yaml")
	labtest.Check(t, os.WriteFile(file, text, 0o600))
	return file
}
