package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// guardedAddr is the address of a Service with source ranges.
const guardedAddr = "203.0.113.11"

// keptManifest are two Services that keep their clients' addresses, with an endpoint on the second and the third node
// of a Segment. One has source ranges.
func keptManifest(s *labtest.Segment) string {
	text := fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, annotations: {verdict-proxy.github.io/client-address: keep}}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.80
  clusterIPs: [10.96.0.80, "fd00:96::80"]
  ipFamilies: [IPv4, IPv6]
  ports: [{port: 80, protocol: TCP}]
status: {loadBalancer: {ingress: [{ip: "%s"}, {ip: "%s"}]}}
---
apiVersion: v1
kind: Service
metadata: {name: guarded, namespace: shop, annotations: {verdict-proxy.github.io/client-address: keep}}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.81
  loadBalancerSourceRanges: [192.0.2.0/24]
  ports: [{port: 80, protocol: TCP}]
status: {loadBalancer: {ingress: [{ip: "%s"}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: guarded-1, namespace: shop, labels: {kubernetes.io/service-name: guarded}}
addressType: IPv4
ports: [{port: 8080, protocol: TCP}]
endpoints:
- {addresses: ["%s"], nodeName: node-b, conditions: {ready: true}}
- {addresses: ["%s"], nodeName: node-c, conditions: {ready: true}}
`, s.VIP[0], s.VIP[1], guardedAddr, s.Pods[0].IP4, s.Pods[1].IP4)
	for f, family := range []string{"IPv4", "IPv6"} {
		text += fmt.Sprintf(`---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-%[1]d, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: %[2]s
ports: [{port: 8080, protocol: TCP}]
endpoints:
- {addresses: ["%[3]s"], nodeName: node-b, conditions: {ready: true}}
- {addresses: ["%[4]s"], nodeName: node-c, conditions: {ready: true}}
`, f, family, s.Pods[0].IP(ipfamily.Family(f)), s.Pods[1].IP(ipfamily.Family(f)))
	}
	for i, n := range s.Nodes {
		text += fmt.Sprintf("---\napiVersion: v1\nkind: Node\nmetadata: {name: %s}\nstatus: {addresses: [%s]}\n", n.Name,
			fmt.Sprintf("{type: InternalIP, address: %q}, {type: InternalIP, address: %q}",
				labtest.SegmentAddr(0, i+2), labtest.SegmentAddr(1, i+2)))
	}
	return text
}

// TestKeptClients: beside proxies that forward packets untranslated, verify and compare find nothing, as packets and as
// elements, and explain says to whom a client is forwarded.
func TestKeptClients(t *testing.T) {
	s := labtest.NewSegment(t)
	file := filepath.Join(t.TempDir(), "web.yaml")
	labtest.Check(t, os.WriteFile(file, []byte(keptManifest(s)), 0o644))
	as := func(n *lab.Host, args ...string) (string, error) {
		cmd := n.Command("/proc/self/exe", append(args, "--from", file, "--hostname-override", n.Name)...)
		cmd.Env = append(os.Environ(), beVerdict+"=1")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for _, n := range s.Nodes {
		run := n.Command("/proc/self/exe", "run", "--keeper=none", "--backend=nftables", "--from", file,
			"--hostname-override", n.Name, "--cluster-cidr=10.244.0.0/16,fd00:244::/32", "--client-address=annotated",
			"--healthz-bind-address=", "--metrics-bind-address=")
		run.Env = append(os.Environ(), beVerdict+"=1")
		labtest.Check(t, run.Start())
		t.Cleanup(func() { _, _ = run.Process.Kill(), run.Wait() })
	}
	testkit.Eventually(t, 30*time.Second, "clients keep their addresses", func() bool {
		r := s.Outside.Dial(snapshot.TCP, netip.AddrPortFrom(s.VIP[1], 80), lab.Options{})
		return r.Outcome == lab.Answered && r.Source == r.Client
	}, nil)
	for _, n := range s.Nodes {
		for _, args := range [][]string{{"verify"}, {"verify", "--packets"}, {"compare"}, {"compare", "--compile"}} {
			if out, err := as(n, args...); err != nil {
				t.Errorf("%s: %v: %v\n%s", n.Name, args, err, out)
			}
		}
	}
	for n, c := range []struct{ to, says string }{{s.VIP[0].String(), "50% to node-b (192.0.2.3)"},
		{guardedAddr, "dropped: 198.51.100.7 is in none of the Service's loadBalancerSourceRanges; 50% of the clients are " +
			"forwarded untranslated to node-c, which drops it"}} {
		out, err := as(s.Nodes[n], "explain", "198.51.100.7", c.to+":80", "--live")
		if err != nil || !strings.Contains(out, c.says) || !strings.Contains(out, "Kernel     does the same") {
			t.Errorf("explain: %v\n%s", err, out)
		}
	}
}
