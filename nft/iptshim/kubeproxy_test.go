//go:build peers

package iptshim

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/lab/control/peers"
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
	{"who is in no source range is not told so", false, has("-A "+externalChain, " -d 198.18.0.", "has no endpoints"),
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
	{"TCP is refused by a reset, as in nftables", true, has("-p tcp ", "--reject-with tcp-reset"), false},
	{"TCP is refused by a reset, as in nftables", false, has("-p tcp ", "--reject-with icmp"), false},
	{"in IPv6 there is no loopback range to guard", false, has("-j " + loopbackChain), false},
	{"invalid packets are dropped without being counted by nfacct", true, has("-A "+forwardChain, "INVALID -j DROP"),
		true},
	{"invalid packets are dropped without being counted by nfacct", false, has("-A "+forwardChain, "INVALID -m nfacct"),
		true},
}

// TestKubeProxy has a real kube-proxy write what it writes for the same objects, and explains every difference.
func TestKubeProxy(t *testing.T) {
	plane, host, programs := peers.Start(t, "../..", []string{"192.0.2.10/32", "2001:db8:2::10/128"}, "kube-proxy")
	createExample(t, plane.Client)
	peers.Create(t, plane.Client)
	file := peers.ReadBack(t, plane.Client)
	dir := t.TempDir()
	config := filepath.Join(dir, "config.conf")
	labtest.Check(t, os.WriteFile(config, []byte(fmt.Sprintf(kubeProxyConfig, plane.Kubeconfig())), 0o600))
	proxy := control.NewProcess(host, filepath.Join(dir, "log"), programs[0], "--config="+config)
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
		if strings.Contains(all, peers.Last.Name) && all == last {
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

// createExample makes the Services of examples/cluster.yaml.
func createExample(t *testing.T, c kubernetes.Interface) {
	t.Helper()
	text, err := os.ReadFile("../../examples/cluster.yaml")
	labtest.Check(t, err)
	var list struct{ Items []map[string]any }
	labtest.Check(t, yaml.Unmarshal(text, &list))
	var services []*corev1.Service
	slicesOf := map[string][]*discoveryv1.EndpointSlice{}
	for _, item := range list.Items {
		meta := item["metadata"].(map[string]any)
		for _, field := range []string{"resourceVersion", "uid", "creationTimestamp", "ownerReferences"} {
			delete(meta, field)
		}
		b, err := yaml.Marshal(item)
		labtest.Check(t, err)
		switch item["kind"] {
		case "Service":
			s := &corev1.Service{}
			labtest.Check(t, yaml.Unmarshal(b, s))
			services = append(services, s)
		case "EndpointSlice":
			sl := &discoveryv1.EndpointSlice{}
			labtest.Check(t, yaml.Unmarshal(b, sl))
			of := sl.Namespace + "/" + sl.Labels[discoveryv1.LabelServiceName]
			slicesOf[of] = append(slicesOf[of], sl)
		}
	}
	for _, s := range services {
		if s.Name != "kubernetes" { // the API server makes that itself
			peers.Put(t, c, s, slicesOf[s.Namespace+"/"+s.Name]...)
		}
	}
}
