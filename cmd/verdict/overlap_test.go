package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// overlapping is a cluster whose ServiceCIDRs may hold addresses of hosts.
type overlapping struct {
	*lab.Cluster
	t *testing.T
	// backend is what writes the rules: nftables, or a variant of iptables.
	backend string
	// ranges are the ServiceCIDRs, node and node2 the nodes' addresses, and api the API server's, which is outside; each
	// by family.
	ranges           [2]string
	node, node2, api [2]string
	// cluster is the Service's cluster IPs.
	cluster [2]string
	log     string
}

// Ports: sshd's and the kubelet's on every node, the API server's, and what the Service and its pods have.
const (
	sshPort, kubeletPort, apiPort      = 22, 10250, 6443
	overlapServicePort, overlapPodPort = 80, 8080
)

func newOverlapping(t *testing.T, backend string) *overlapping {
	c := labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 1})
	o := &overlapping{Cluster: c, t: t, backend: backend, ranges: [2]string{"10.96.0.0/12", "fd00:10:96::/108"},
		cluster: [2]string{"10.96.0.80", "fd00:10:96::80"}}
	for i, f := range ipfamily.All {
		o.node[i], o.node2[i], o.api[i] = c.Node.IP(f).String(), c.Node2.IP(f).String(), c.Outside.IP(f).String()
	}
	for _, h := range c.Hosts() {
		_, err := h.Serve(snapshot.TCP, sshPort, kubeletPort, apiPort, overlapPodPort)
		labtest.Check(t, err)
	}
	return o
}

// inNetwork gives both nodes addresses in another network. Everybody else reaches them by the node.
func (o *overlapping) inNetwork(node, node2 [2]string, bits [2]int) {
	o.node, o.node2 = node, node2
	for i := range node {
		for h, a := range map[*lab.Host]string{o.Node: node[i], o.Node2: node2[i]} {
			labtest.Check(o.t, h.AddAddr("eth0", netip.PrefixFrom(netip.MustParseAddr(a), bits[i])))
		}
	}
}

// manifests are the objects that a proxy on the node sees.
func (o *overlapping) manifests() string {
	text := fmt.Sprintf(`apiVersion: v1
kind: Node
metadata: {name: node}
status: {addresses: [{type: InternalIP, address: %q}, {type: InternalIP, address: %q}]}
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: kubernetes}
spec: {cidrs: [%q, %q]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: %[5]q
  clusterIPs: [%[5]q, %[6]q]
  ports: [{port: 80, targetPort: 8080, protocol: TCP}]
`, o.node[0], o.node[1], o.ranges[0], o.ranges[1], o.cluster[0], o.cluster[1])
	for i, family := range [2]string{"IPv4", "IPv6"} {
		for name, at := range map[string]netip.AddrPort{
			"shop/web":           netip.AddrPortFrom(o.RemotePods[0].IP(ipfamily.All[i]), overlapPodPort),
			"default/kubernetes": netip.AddrPortFrom(netip.MustParseAddr(o.api[i]), apiPort),
		} {
			namespace, service, _ := strings.Cut(name, "/")
			if slice := service; service != "kubernetes" || i == 0 {
				text += fmt.Sprintf(`---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %q, namespace: %q, labels: {kubernetes.io/service-name: %q}}
addressType: %s
endpoints: [{addresses: [%q], nodeName: node2}]
ports: [{port: %d, protocol: TCP}]
`, slice+strings.TrimPrefix(family, "IPv4"), namespace, service, family, at.Addr(), at.Port())
			}
		}
	}
	return text
}

// file writes the manifests, and gives the path.
func (o *overlapping) file() string {
	o.t.Helper()
	path := filepath.Join(o.t.TempDir(), "objects.yaml")
	labtest.Check(o.t, os.WriteFile(path, []byte(o.manifests()), 0o644))
	return path
}

// run starts a proxy, and waits until it has programmed all Services.
func (o *overlapping) run() {
	o.t.Helper()
	r := &tuned{t: o.t, host: o.Node, log: filepath.Join(o.t.TempDir(), "log")}
	log, err := os.Create(r.log)
	labtest.Check(o.t, err)
	defer log.Close()
	backend := "nftables"
	if o.backend != backend {
		backend = "iptables"
	}
	r.cmd = o.Node.Command("/proc/self/exe", "run", "--from", o.file(), "--hostname-override=node", "--keeper=none",
		"--cluster-cidr", lab.PodRange[0].String()+","+lab.PodRange[1].String(), "--backend="+backend, "--takeover=never")
	r.cmd.Env = append(os.Environ(), beVerdict+"=1")
	r.cmd.Stdout, r.cmd.Stderr = log, log
	labtest.Check(o.t, r.cmd.Start())
	o.t.Cleanup(r.stop)
	r.wait("all Services are programmed", 1)
	o.log = r.log
}

func (o *overlapping) said() string {
	text, err := os.ReadFile(o.log)
	labtest.Check(o.t, err)
	return string(text)
}

// path is a way that packets must get, whatever a proxy does.
type path struct {
	name string
	from *lab.Host
	to   string
	port uint16
	by   *lab.Host
}

// paths are those between all that are no Services.
func (o *overlapping) paths(i int) []path {
	f := ipfamily.All[i]
	pod, other, remote := o.Pods[0], o.Pods[1], o.RemotePods[0]
	return []path{
		{"ssh from outside to the node", o.Outside, o.node[i], sshPort, o.Node},
		{"ssh from the other node", o.Node2, o.node[i], sshPort, o.Node},
		{"kubelet from the other node", o.Node2, o.node[i], kubeletPort, o.Node},
		{"kubelet from the node itself", o.Node, o.node[i], kubeletPort, o.Node},
		{"pod to node", pod, o.node[i], kubeletPort, o.Node},
		{"pod to the other node", pod, o.node2[i], sshPort, o.Node2},
		{"node to the other node", o.Node, o.node2[i], sshPort, o.Node2},
		{"outside to the other node", o.Outside, o.node2[i], sshPort, o.Node2},
		{"pod to pod", pod, other.IP(f).String(), overlapPodPort, other},
		{"pod to a pod of the other node", pod, remote.IP(f).String(), overlapPodPort, remote},
		{"node to a pod of the other node", o.Node, remote.IP(f).String(), overlapPodPort, remote},
		{"a pod of the other node to a pod", remote, pod.IP(f).String(), overlapPodPort, pod},
		{"node to the API server", o.Node, o.api[i], apiPort, o.Outside},
		{"pod to the API server", pod, o.api[i], apiPort, o.Outside},
	}
}

// open checks that every path is open.
func (o *overlapping) open(when string) {
	o.t.Helper()
	for i := range ipfamily.All {
		for _, p := range o.paths(i) {
			o.reaches(when, p)
		}
	}
}

func (o *overlapping) reaches(when string, p path) {
	o.t.Helper()
	to := netip.AddrPortFrom(netip.MustParseAddr(p.to), p.port)
	if r := o.dial(p.from, to); r.Outcome != lab.Answered || r.Endpoint != p.by.Name {
		o.t.Errorf("%s, %s (%s): %v; want an answer of %s", when, p.name, to, r, p.by.Name)
	}
}

// dial tries twice, since a busy machine may be late.
func (o *overlapping) dial(from *lab.Host, to netip.AddrPort) (r lab.Result) {
	for range 2 {
		if r = from.Dial(snapshot.TCP, to, lab.Options{}); r.Outcome == lab.Answered {
			break
		}
	}
	return r
}

// served checks that the Service answers.
func (o *overlapping) served() {
	o.t.Helper()
	for i := range ipfamily.All {
		for _, from := range []*lab.Host{o.Node, o.Pods[0], o.Node2} {
			if from == o.Node2 && o.cluster[i] == o.node2[i] {
				continue // it sends this to itself
			}
			o.reaches("by the proxy", path{"Service from " + from.Name, from, o.cluster[i], overlapServicePort, o.RemotePods[0]})
		}
	}
}

// unallocated checks whether packets to unallocated addresses pass, to all of them at once: silence lasts a second.
func (o *overlapping) unallocated(addresses [2]string, passing bool) {
	o.t.Helper()
	var dials sync.WaitGroup
	for _, address := range addresses {
		o.give(address)
		for _, from := range []*lab.Host{o.Node, o.Pods[0]} {
			dials.Go(func() {
				if got := o.passes(from, address); got != passing {
					o.t.Errorf("%s -> unallocated address %s passes: %v", from.Name, address, got)
				}
			})
		}
	}
	dials.Wait()
}

// give gives the host outside an address that nobody on the node has.
func (o *overlapping) give(address string) {
	o.t.Helper()
	a := netip.MustParseAddr(address)
	labtest.Check(o.t, o.Outside.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())))
}

// passes says whether packets to an address leave the node, after give.
func (o *overlapping) passes(from *lab.Host, address string) bool {
	o.t.Helper()
	a := netip.MustParseAddr(address)
	return from.Dial(snapshot.TCP, netip.AddrPortFrom(a, sshPort), lab.Options{}).Outcome == lab.Answered
}

// foretold checks what "takeover --dry-run" says before a proxy runs.
func (o *overlapping) foretold(want bool) {
	o.t.Helper()
	out, err := callTakeover(o.t, o.Node, "--dry-run", "--hostname-override=node", "--from", o.file(), "--cluster-cidr",
		lab.PodRange[0].String()+","+lab.PodRange[1].String())
	if err != nil || strings.Contains(out, "overlap: the range of Services") != want ||
		strings.Contains(out, "overlap: none") == want {
		o.t.Errorf("takeover --dry-run: %v\n%s", err, out)
	}
}

// shown checks what the proxy says of itself.
func (o *overlapping) shown(want bool) {
	o.t.Helper()
	for format, marker := range map[string]string{"text": "overlap  ", "json": `"check": "overlap"`} {
		cmd := o.Node.Command("/proc/self/exe", "status", "-o", format)
		cmd.Env = append(os.Environ(), beVerdict+"=1")
		out, err := cmd.CombinedOutput()
		if err != nil || strings.Contains(string(out), marker) != want {
			o.t.Errorf("status -o %s: %v; want an overlap: %v\n%s", format, err, want, out)
		}
	}
}

const overlapWarning = "level=WARN msg=\"the range of Services overlaps"

// TestOverlap: where ServiceCIDRs overlap what nodes, pods or the API server use, all of them reach each other with a
// proxy as without, and it is said.
func TestOverlap(t *testing.T) {
	nodes4, nodes6 := [2]string{"10.100.0.10", "fd00:10:96::a:10"}, [2]string{"10.100.0.20", "fd00:10:96::a:20"}
	for _, test := range []struct {
		name    string
		arrange func(o *overlapping)
		// passing says whether packets to these unallocated addresses pass, by family.
		unallocated [2]string
		passing     bool
	}{
		{"nothing", func(*overlapping) {}, [2]string{"10.100.0.99", "fd00:10:96::a:99"}, false},
		{"the nodes' network", func(o *overlapping) { o.inNetwork(nodes4, nodes6, [2]int{16, 112}) },
			[2]string{"10.111.0.99", "fd00:10:96::b:99"}, true},
		{"single addresses of nodes", func(o *overlapping) {
			o.inNetwork(nodes4, nodes6, [2]int{32, 128})
			for i, a := range nodes6 {
				for h, to := range map[*lab.Host]string{o.Node: a, o.Node2: nodes4[i]} {
					p := netip.MustParseAddr(to)
					labtest.Check(t, h.AddRoute(lab.Route{To: netip.PrefixFrom(p, p.BitLen()), Link: "eth0"}))
				}
			}
		}, [2]string{"10.111.0.99", "fd00:10:96::b:99"}, true},
		{"pods", func(o *overlapping) {
			o.ranges = [2]string{"10.240.0.0/12", "fd00:10:240::/44"}
			o.cluster = [2]string{"10.250.0.80", "fd00:10:24f::80"}
		}, [2]string{"10.251.0.99", "fd00:10:24f::99"}, false},
		{"API server", func(o *overlapping) {
			o.api = [2]string{"10.111.0.1", "fd00:10:96::f:1"}
			for _, a := range o.api[:1] { // a slice has one family
				p := netip.MustParseAddr(a)
				labtest.Check(t, o.Outside.AddAddr("lo", netip.PrefixFrom(p, p.BitLen())))
			}
			o.api[1] = o.Outside.IP6.String()
		}, [2]string{"10.111.0.2", "fd00:10:96::f:2"}, false},
		{"a cluster IP that is the other node's address", func(o *overlapping) {
			o.inNetwork(nodes4, nodes6, [2]int{16, 112})
			o.cluster = nodes6
		}, [2]string{"10.111.0.99", "fd00:10:96::b:99"}, true},
		{"a cluster IP that is the node's address", func(o *overlapping) {
			o.inNetwork(nodes4, nodes6, [2]int{16, 112})
			o.cluster = nodes4
		}, [2]string{"10.111.0.99", "fd00:10:96::b:99"}, true},
	} {
		for _, backend := range []string{"nftables", "iptables"} {
			t.Run(test.name+"/"+backend, func(t *testing.T) {
				o := newOverlapping(t, backend)
				test.arrange(o)
				o.open("without a proxy")
				o.foretold(test.name != "nothing")
				o.run()
				o.open("with a proxy")
				o.served()
				o.shown(test.name != "nothing")
				o.unallocated(test.unallocated, test.passing)
				if said := strings.Count(o.said(), overlapWarning); (said == 1) != (test.name != "nothing") {
					t.Errorf("it is said %d times:\n%s", said, o.said())
				}
			})
		}
	}
}

// TestOverlapAppears: a network that comes while a proxy runs is left alone within seconds, and one that goes is not
// any more. Both are said once, whatever routes come in between.
func TestOverlapAppears(t *testing.T) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			o := newOverlapping(t, backend)
			o.run()
			r := tuned{t: t, log: o.log}
			network := netip.MustParsePrefix("10.97.0.20/24")
			labtest.Check(t, o.Node2.AddAddr("eth0", network))
			o.give("10.97.1.99")
			o.give("10.97.0.99")
			if o.passes(o.Pods[0], "10.97.1.99") {
				t.Error("an unallocated address passes before")
			}
			route := lab.Route{To: network.Masked(), Link: "eth0"}
			labtest.Check(t, o.Node.AddRoute(route))
			r.wait(overlapWarning, 1)
			pod := lab.Route{To: netip.MustParsePrefix("10.97.0.21/32"), Link: "eth0"}
			labtest.Check(t, o.Node.AddRoute(pod))
			to := path{"pod to the network", o.Pods[0], network.Addr().String(), sshPort, o.Node2}
			testkit.Eventually(t, patience, "the network is reached", func() bool {
				return o.dial(to.from, netip.AddrPortFrom(network.Addr(), to.port)).Outcome == lab.Answered
			}, o.said)
			if o.passes(o.Pods[0], "10.97.1.99") {
				t.Error("an unallocated address beside the network passes")
			}
			labtest.Check(t, o.Node.DelRoute(pod))
			labtest.Check(t, o.Node.DelRoute(route))
			r.wait("no longer overlaps", 1)
			testkit.Eventually(t, patience, "the network is refused again", func() bool {
				return !o.passes(o.Pods[0], "10.97.0.99")
			}, o.said)
			if n := strings.Count(o.said(), overlapWarning); n != 1 {
				t.Errorf("it is said %d times:\n%s", n, o.said())
			}
		})
	}
}
