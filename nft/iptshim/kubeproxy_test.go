//go:build peers

package iptshim

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// reason explains a kind of rules that only one of the two has, or that both have in another place.
type reason struct {
	why  string
	ours bool // it is Verdict that has them
	is   func(d Difference) bool
	// sometimes says that there is no such difference where the kernel lacks what kube-proxy wants to use.
	sometimes bool
}

func has(words ...string) func(Difference) bool {
	return func(d Difference) bool {
		return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains("-A "+d.Chain+d.Rule, w) })
	}
}

// reasons are all differences there may be between kube-proxy's rules and ours, each with its reason.
var reasons = []reason{
	{"ports of cluster IPs that no Service has are rejected, and addresses that no Service has dropped, as in nftables",
		true, has(clusterIPsChain), false},
	{"a process of this node that sends to an external address without endpoints is told so, as in nftables", true,
		has("-A "+servicesChain, "-j "+externalChain), false},
	{"node ports without endpoints are refused at the addresses of node ports only", true, func(d Difference) bool {
		return has("-A "+externalChain, "-d 192.0.2.10/32", "--dport 3")(d) ||
			has("-A "+externalChain, "-d 2001:db8:2::10/128", "--dport 3")(d) ||
			has("-A "+externalChain, "-d 127.0.0.1/32", "--dport 3")(d)
	}, false},
	{"node ports without endpoints are refused at the addresses of node ports only", false,
		has("-A "+externalChain, "--dst-type LOCAL"), false},
	{"who is in no source range is dropped even while there are no endpoints", true, has("-A "+externalChain, notOpen),
		false},
	{"who is in a source range is told that there are no endpoints", true, has("-A "+externalChain, "-s "), false},
	{"who is in no source range is not told so", false, has("-A "+externalChain, " -d 203.0.113.", "has no endpoints"),
		false},
	{"who is in no source range is not told so", false, has("-A "+externalChain, " -d 2001:db8:18::", "has no endpoints"),
		false},
	{"neighbours may not reach node ports at 127.0.0.1", true, has("-A "+servicesChain, "-d 127.0.0.1/32",
		"--src-type LOCAL", "-j "+nodePortsChain), false},
	{"neighbours may not reach node ports at 127.0.0.1", false, has("-A "+servicesChain, "-d 127.0.0.1/32",
		"-j "+nodePortsChain), false},
	{"packets to node ports at 127.0.0.1 are not counted by nfacct", false,
		has("-A "+nodePortsChain, "localhost_nps_accepted_pkts"), true},
	{"a health check node port is accepted once, and not again for each port of the Service", false,
		has("-A "+nodePortsChain, "health check node port"), false},
	{"in IPv6 there is no loopback range to guard", false, has("-j " + loopbackChain), false},
	{"invalid packets are dropped without being counted by nfacct", true, has("-A "+forwardChain, "INVALID -j DROP"),
		true},
	{"invalid packets are dropped without being counted by nfacct", false, has("-A "+forwardChain, "INVALID -m nfacct"),
		true},
}

// TestKubeProxy has a real kube-proxy write what it writes for the same objects, and explains every difference.
func TestKubeProxy(t *testing.T) {
	plane, host, programs := startPlane(t)
	create(t, plane.Client)
	file := readBack(t, plane.Client)
	dir := t.TempDir()
	config := filepath.Join(dir, "config.conf")
	labtest.Check(t, os.WriteFile(config, []byte(fmt.Sprintf(kubeProxyConfig, plane.Kubeconfig())), 0o600))
	proxy := control.NewProcess(host, filepath.Join(dir, "log"), programs[2], "--config="+config)
	labtest.Check(t, proxy.Start())
	t.Cleanup(func() { _ = proxy.Kill() })
	model := verdictModel(t, file)
	for _, f := range ipfamily.All {
		theirs := settled(t, host, f, proxy)
		ours := applied(t, f, model)
		compare(t, f, ours, theirs)
	}
	for _, r := range reasons {
		if !used[r.why] && !r.sometimes {
			t.Errorf("nothing differs for this reason: %s", r.why)
		}
	}
}

const kubeProxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
hostnameOverride: node-1
clusterCIDR: 10.244.0.0/16,fd00:10:244::/48
nodePortAddresses: [192.0.2.10/32, "2001:db8:2::10/128", 127.0.0.0/8]
clientConnection: {kubeconfig: %q, qps: 1000, burst: 1000}
conntrack: {maxPerCore: 0, min: 0}
iptables: {syncPeriod: 30s, minSyncPeriod: 100ms}
metricsBindAddress: 127.0.0.1:10249
healthzBindAddress: 127.0.0.1:10256
oomScoreAdj: 0
`

// verdictModel plans what Verdict makes of a dump, with the same configuration.
func verdictModel(t *testing.T, file string) *Model {
	t.Helper()
	snap, problems, err := watch.Load(t.Context(), file, "node-1")
	labtest.Check(t, err)
	for _, p := range problems {
		t.Error(p)
	}
	addrs := []netip.Addr{addr("127.0.0.1"), addr("192.0.2.10"), addr("2001:db8:2::10")}
	snap.Apply(snapshot.Delta{HostAddrs: &addrs})
	st, conflicts := dataplane.Compute(dataplane.Config{
		NodeName: "node-1", LocalhostNodePorts: true,
		NodePortAddresses: []netip.Prefix{prefix("192.0.2.10/32"), prefix("2001:db8:2::10/128"), prefix("127.0.0.0/8")},
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{prefix("10.244.0.0/16"),
			prefix("fd00:10:244::/48")}},
	}, snap)
	if conflicts != nil {
		t.Error(conflicts)
	}
	m := New(Options{Dispatch: List})
	m.Plan(st, dataplane.Change{})
	return m
}

// applied has a kernel take our text and gives what is saved then.
func applied(t *testing.T, f ipfamily.Family, m *Model) *Saved {
	t.Helper()
	h := labtest.NewHost(t, labtest.NewNet(t), "verdict")
	restore(t, h, f, "nft", m.Full(f))
	return save(t, h, f, "nft")
}

// settled waits until kube-proxy has written the same for a while.
func settled(t *testing.T, h *lab.Host, f ipfamily.Family, p *control.Process) *Saved {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for last := ""; time.Now().Before(deadline); time.Sleep(2 * time.Second) {
		saved, all := save(t, h, f, "nft"), ""
		for _, name := range []string{servicesChain, nodePortsChain} {
			c := saved.chain(NAT, name)
			for _, r := range c.rules {
				all += r.text() + "\n"
			}
		}
		if strings.Contains(all, "default/last") && all == last {
			return saved
		}
		last = all
	}
	t.Fatalf("kube-proxy has not programmed the node:\n%s", p.Tail())
	return nil
}

// used are the reasons that explained something.
var used = map[string]bool{}

// compare counts what is the same, and explains what is not.
func compare(t *testing.T, f ipfamily.Family, ours, theirs *Saved) {
	t.Helper()
	same, count := 0, map[string]int{}
	names := map[tableChain]bool{}
	for _, s := range []*Saved{ours, theirs} {
		for table, st := range s.tables {
			for name := range st.chains {
				names[tableChain{table, name}] = true
			}
		}
	}
	explain := func(d Difference) {
		for _, r := range reasons {
			if r.ours == d.Wanted && r.is(d) {
				used[r.why] = true
				count[r.why]++
				return
			}
		}
		t.Errorf("nobody said why: %s", d)
	}
	for tc := range names {
		a, b := ours.chain(tc.table, tc.chain), theirs.chain(tc.table, tc.chain)
		mine, yours := changed(a.rules, b.rules, func(r rule) string { return r.text() })
		same += len(a.rules) - len(mine)
		for i, rules := range [][]rule{yours, mine} {
			for _, r := range rules {
				explain(Difference{Family: f, Table: tc.table, Chain: tc.chain, Wanted: i == 1, Rule: r.text()})
			}
		}
		if a.name != tc.chain || ours.has(tc.table, tc.chain) != theirs.has(tc.table, tc.chain) &&
			tc.chain != clusterIPsChain && tc.chain != loopbackChain {
			t.Errorf("%s: only one of the two has table %s chain %s", f, tc.table, tc.chain)
		}
		ordered(t, tc, a, b)
	}
	t.Logf("%s: %d rules are the same", f, same)
	for why, n := range count {
		t.Logf("%s: %4d differ: %s", f, n, why)
	}
}

// ordered says whether the rules that two chains have in common come in the same order, where order matters.
func ordered(t *testing.T, tc tableChain, a, b chain) {
	t.Helper()
	if slices.Contains([]string{servicesChain, externalChain, nodePortsChain, firewallChain}, tc.chain) ||
		strings.HasPrefix(tc.chain, fwPrefix) {
		// There is one row for each address and port, in any order: kube-proxy's differs each time. So do source ranges.
		return
	}
	var x, y []string
	for _, r := range a.rules {
		if slices.Contains(b.rules, r) {
			x = append(x, r.text())
		}
	}
	for _, r := range b.rules {
		if slices.Contains(a.rules, r) {
			y = append(y, r.text())
		}
	}
	if !slices.Equal(x, y) && !nodeFirst(tc, x, y) {
		t.Errorf("%s %s: the order is another:\n  %s\nhere, and there\n  %s", tc.table, tc.chain, strings.Join(x, "\n  "),
			strings.Join(y, "\n  "))
	}
}

// nodeFirst is the one order that is another on purpose: a packet of this node that bears a pod's address, as a
// bridge's may be, is masqueraded, so the rules for this node stand before the one for pods.
func nodeFirst(tc tableChain, ours, theirs []string) bool {
	if !strings.HasPrefix(tc.chain, extPrefix) || len(ours) < 3 {
		return false
	}
	moved := append([]string{theirs[1], theirs[2], theirs[0]}, theirs[3:]...)
	return slices.Equal(ours, moved) && strings.Contains(theirs[0], "pod traffic for")
}

// startPlane starts a control plane on a host that is the node, too, and gives the programs: etcd, kube-apiserver,
// kube-proxy.
func startPlane(t *testing.T) (*control.Plane, *lab.Host, []string) {
	t.Helper()
	out, err := exec.Command("../../conformance/peers/build", "etcd", "kube-apiserver", "kube-proxy").Output()
	labtest.Check(t, err)
	programs := strings.Fields(string(out))
	host := labtest.NewHost(t, labtest.NewNet(t), "node")
	for _, a := range []string{"192.0.2.10/32", "2001:db8:2::10/128"} {
		_, err := host.Run("ip", "addr", "add", a, "dev", "lo")
		labtest.Check(t, err)
	}
	host.IP4 = addr("192.0.2.10")
	plane, err := control.Start(t.Context(), control.Config{
		Host: host, Etcd: programs[0], APIServer: programs[1], Dir: t.TempDir(),
		ServiceRanges: []netip.Prefix{prefix("10.96.0.0/16"), prefix("fd00:10:96::/112")},
	})
	labtest.Check(t, err)
	t.Cleanup(func() { labtest.Check(t, plane.Close()) })
	return plane, host, programs
}

// create makes the node, the Services of examples/cluster.yaml, and one of each kind there is.
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
	for _, o := range objects(t) {
		for _, n := range []string{o.service.Namespace} {
			_, _ = c.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: n}},
				metav1.CreateOptions{})
		}
		s := o.service.DeepCopy()
		made, err := c.CoreV1().Services(s.Namespace).Create(ctx, s, metav1.CreateOptions{})
		labtest.Check(t, err)
		if made.Status = o.service.Status; len(made.Status.LoadBalancer.Ingress) > 0 {
			_, err = c.CoreV1().Services(s.Namespace).UpdateStatus(ctx, made, metav1.UpdateOptions{})
			labtest.Check(t, err)
		}
		for _, sl := range o.slices {
			_, err := c.DiscoveryV1().EndpointSlices(s.Namespace).Create(ctx, sl, metav1.CreateOptions{})
			labtest.Check(t, err)
		}
	}
}

// object is a Service with its slices.
type object struct {
	service *corev1.Service
	slices  []*discoveryv1.EndpointSlice
}

// objects gives those of the example, and the features.
func objects(t *testing.T) (all []object) {
	t.Helper()
	text, err := os.ReadFile("../../examples/cluster.yaml")
	labtest.Check(t, err)
	var list struct{ Items []map[string]any }
	labtest.Check(t, yaml.Unmarshal(text, &list))
	services := map[string]*object{}
	var names []string
	for _, item := range list.Items {
		meta := item["metadata"].(map[string]any)
		for _, field := range []string{"resourceVersion", "uid", "creationTimestamp"} {
			delete(meta, field)
		}
		b, err := yaml.Marshal(item)
		labtest.Check(t, err)
		switch item["kind"] {
		case "Service":
			s := &corev1.Service{}
			labtest.Check(t, yaml.Unmarshal(b, s))
			if s.Name == "kubernetes" { // the API server makes that itself
				continue
			}
			key := s.Namespace + "/" + s.Name
			services[key] = &object{service: s}
			names = append(names, key)
		case "EndpointSlice":
			sl := &discoveryv1.EndpointSlice{}
			labtest.Check(t, yaml.Unmarshal(b, sl))
			sl.OwnerReferences = nil
			if o := services[sl.Namespace+"/"+sl.Labels[discoveryv1.LabelServiceName]]; o != nil {
				o.slices = append(o.slices, sl)
			}
		}
	}
	for _, n := range names {
		all = append(all, *services[n])
	}
	return append(all, features()...)
}

// features gives a Service of every combination of policies, affinity, source ranges and states of endpoints.
func features() (all []object) {
	i := 0
	for _, internal := range []corev1.ServiceInternalTrafficPolicy{"Cluster", "Local"} {
		for _, external := range []corev1.ServiceExternalTrafficPolicy{"Cluster", "Local"} {
			for _, affinity := range []corev1.ServiceAffinity{"None", "ClientIP"} {
				for _, ranges := range [][]string{nil, {"198.51.100.0/24", "2001:db8:64::/64"},
					{"192.0.2.0/24", "2001:db8:2::/64"}} {
					for _, nodes := range [][]string{nil, {"node-1"}, {"node-2"}, {"node-1", "node-2", "node-2"}} {
						i++
						all = append(all, feature(fmt.Sprintf("f%d", i), i, internal, external, affinity, ranges, nodes))
					}
				}
			}
		}
	}
	return append(all, feature("last", i+1, "Cluster", "Cluster", "None", nil, []string{"node-1"}))
}

func feature(name string, i int, internal corev1.ServiceInternalTrafficPolicy,
	external corev1.ServiceExternalTrafficPolicy,
	affinity corev1.ServiceAffinity, ranges, nodes []string) object {
	policy := corev1.IPFamilyPolicyRequireDualStack
	meta := metav1.ObjectMeta{Name: name, Namespace: "default"}
	s := &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, IPFamilyPolicy: &policy, SessionAffinity: affinity,
		ClusterIP: fmt.Sprintf("10.96.200.%d", i), ClusterIPs: []string{fmt.Sprintf("10.96.200.%d", i),
			fmt.Sprintf("fd00:10:96::c8%02x", i)},
		InternalTrafficPolicy: &internal, ExternalTrafficPolicy: external, LoadBalancerSourceRanges: ranges,
		ExternalIPs: []string{fmt.Sprintf("198.19.0.%d", i), fmt.Sprintf("2001:db8:19::%x", i)},
	}}
	protocols := []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}
	for n, p := range protocols[:1+i%3] {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: strings.ToLower(string(p)), Protocol: p,
			Port: int32(80 + n), TargetPort: intstr.FromInt(8080),
			NodePort: int32(31100 + 250*n + i)})
	}
	if external == corev1.ServiceExternalTrafficPolicyLocal {
		s.Spec.HealthCheckNodePort = int32(32000 + i)
	}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: fmt.Sprintf("203.0.113.%d", 100+i)},
		{IP: fmt.Sprintf("2001:db8:18::%x", i)}}
	o := object{service: s}
	for n, kind := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		sl := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", name, n),
			Namespace: "default",
			Labels:    map[string]string{discoveryv1.LabelServiceName: name}}, AddressType: kind}
		for e, node := range nodes {
			ready := true
			sl.Endpoints = append(sl.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{[]string{fmt.Sprintf("10.244.%d.%d", e, i), fmt.Sprintf("fd00:10:244:%x::%x", 1+e, i)}[n]},
				NodeName:  &node, Conditions: discoveryv1.EndpointConditions{Ready: &ready}})
		}
		for _, p := range s.Spec.Ports {
			port := int32(8000 + p.Port)
			sl.Ports = append(sl.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &port})
		}
		o.slices = append(o.slices, sl)
	}
	return o
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
	node, err := c.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
	labtest.Check(t, err)
	node.APIVersion, node.Kind = "v1", "Node"
	cidrs, err := c.NetworkingV1().ServiceCIDRs().List(t.Context(), metav1.ListOptions{})
	labtest.Check(t, err)
	for _, s := range cidrs.Items {
		s.APIVersion, s.Kind = "networking.k8s.io/v1", "ServiceCIDR"
		items = append(items, s)
	}
	text, err := yaml.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": append(items, node)})
	labtest.Check(t, err)
	file := filepath.Join(t.TempDir(), "cluster.yaml")
	labtest.Check(t, os.WriteFile(file, text, 0o600))
	return file
}
