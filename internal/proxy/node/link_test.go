package node

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
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// keptManifest is a load balancer Service with an annotation and one endpoint of each family on two nodes.
func keptManifest(s *labtest.Segment, annotation string) string {
	var text strings.Builder
	fmt.Fprintf(&text, `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, annotations: {%s}}
spec:
  type: LoadBalancer
  clusterIPs: ["10.96.0.80", "fd00:96::80"]
  clusterIP: 10.96.0.80
  ipFamilies: [IPv4, IPv6]
  ports: [{name: tcp, port: 80, protocol: TCP}, {name: udp, port: 80, protocol: UDP}]
status: {loadBalancer: {ingress: [{ip: "%s"}, {ip: "%s"}]}}
`, annotation, s.VIP[0], s.VIP[1])
	for _, f := range ipfamily.All {
		fmt.Fprintf(&text, `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-%[1]s, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: %[1]s
ports: [{name: tcp, port: 8080, protocol: TCP}, {name: udp, port: 8080, protocol: UDP}]
endpoints:
`, ipfamily.Per[string]{"IPv4", "IPv6"}[f])
		for i, pod := range s.Pods {
			fmt.Fprintf(&text, "- {addresses: [\"%v\"], nodeName: %s, conditions: {ready: true}}\n", pod.IP(f),
				s.Nodes[i+1].Name)
		}
	}
	for i, n := range s.Nodes {
		fmt.Fprintf(&text, "---\napiVersion: v1\nkind: Node\nmetadata: {name: %s}\nstatus: {addresses: [%s]}\n", n.Name,
			fmt.Sprintf("{type: InternalIP, address: %q}, {type: InternalIP, address: %q}",
				labtest.SegmentAddr(0, i+2), labtest.SegmentAddr(1, i+2)))
	}
	return text.String()
}

// TestClientAddress: with the annotation, pods on other nodes see the client's own address and port, though it came to
// a node without a pod, which tracks nothing of it. When a node is cut off, its share goes to the others. Without the
// annotation, clients are masqueraded again.
func TestClientAddress(t *testing.T) {
	s := labtest.NewSegment(t)
	file := filepath.Join(t.TempDir(), "web.yaml")
	write := func(annotation string) {
		labtest.Check(t, os.WriteFile(file+".new", []byte(keptManifest(s, annotation)), 0o644))
		labtest.Check(t, os.Rename(file+".new", file))
	}
	write("verdict-proxy.github.io/client-address: keep")
	logs := make([]logBuffer, len(s.Nodes))
	for i, n := range s.Nodes {
		startProxy(t, n, &logs[i], "--from", file, "--hostname-override="+n.Name,
			"--cluster-cidr=10.244.0.0/16,fd00:244::/32", "--healthz-bind-address=127.0.0.1:10256",
			"--client-address=annotated")
	}
	dial := func(p snapshot.Protocol, f ipfamily.Family) (by string, kept bool) {
		r := s.Outside.Dial(p, netip.AddrPortFrom(s.VIP[f], 80), lab.Options{Timeout: 400 * time.Millisecond})
		return r.Endpoint, r.Outcome == lab.Answered && r.Source == r.Client
	}
	keeps := func(want bool) func() bool {
		return func() bool { _, kept := dial(snapshot.TCP, ipfamily.IPv4); return kept == want }
	}
	testkit.Eventually(t, 20*time.Second, "the client's address is kept", keeps(true), logs[0].String)
	for _, f := range ipfamily.All {
		for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
			by := map[string]int{}
			for range 100 {
				name, kept := dial(p, f)
				if !kept {
					t.Fatalf("%s %s: %s has another source, or nobody answered", p, f, name)
				}
				by[name]++
			}
			if by["pod-b"] < 20 || by["pod-c"] < 20 {
				t.Errorf("%s %s: %v", p, f, by)
			}
		}
	}
	if out := labtest.Run(t, s.Nodes[0], "", "cat", "/proc/sys/net/netfilter/nf_conntrack_count"); out != "0\n" {
		t.Errorf("the node that forwards tracks %s connections", out)
	}
	labtest.Run(t, s.Wire, "", "ip", "link", "set", labtest.SegmentPort(1), "down")
	cut := time.Now()
	row := 0
	testkit.Eventually(t, 20*time.Second, "all go to the other node", func() bool {
		if by, kept := dial(snapshot.TCP, ipfamily.IPv4); !kept || by != "pod-c" {
			row = 0
		} else if row++; row == 1 {
			t.Logf("since %v after the cut, or before the next failure", time.Since(cut))
		}
		return row == 30
	}, logs[0].String)
	labtest.Run(t, s.Wire, "", "ip", "link", "set", labtest.SegmentPort(1), "up")
	write("example.com/x: y")
	testkit.Eventually(t, 20*time.Second, "clients are masqueraded", keeps(false), logs[0].String)
}

// TestClientAddressRefused: if the kernel takes no more rules at the ingress of the node's device, clients are
// masqueraded, and the status and the log say so.
func TestClientAddressRefused(t *testing.T) {
	s := labtest.NewSegment(t)
	file := filepath.Join(t.TempDir(), "web.yaml")
	labtest.Check(t, os.WriteFile(file, []byte(keptManifest(s, "verdict-proxy.github.io/client-address: keep")), 0o644))
	labtest.FillIngress(t, s.Nodes[0], "eth0")
	var log logBuffer
	startProxy(t, s.Nodes[0], &log, "--from", file, "--hostname-override="+s.Nodes[0].Name,
		"--cluster-cidr=10.244.0.0/16,fd00:244::/32", "--healthz-bind-address=127.0.0.1:10256",
		"--client-address=annotated")
	var page string
	testkit.Eventually(t, 20*time.Second, "the status", func() bool {
		page = labtest.Run(t, s.Nodes[0], "", "curl", "-s", "http://127.0.0.1:10256/status")
		return strings.Contains(page, dataplane.NotKeptBackend.Text())
	}, func() string { return page + log.String() })
	if !strings.Contains(log.String(), "the kernel takes no rules at the ingress") {
		t.Errorf("the log does not say why:\n%s", log.String())
	}
	r := s.Outside.Dial(snapshot.TCP, netip.AddrPortFrom(s.VIP[0], 80), lab.Options{Timeout: 2 * time.Second})
	if r.Outcome != lab.Answered || r.Source == r.Client {
		t.Errorf("the client is not masqueraded: %s", r)
	}
}
