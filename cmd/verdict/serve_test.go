package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// shown is a proxy at work on the node of a cluster, as others see it.
type shown struct {
	*victim
	taint string
}

// objects writes everything anew: a load balancer with policy Local, of which the first pod is ready or drains.
func (s *shown) objects(ready bool) {
	conditions, triggered := "{ready: true}", ""
	if !ready {
		conditions = "{ready: false, serving: true, terminating: true}"
	}
	triggered = time.Now().UTC().Format(time.RFC3339Nano)
	node := s.cluster.Node
	s.write("all.yaml", fmt.Sprintf(`
apiVersion: v1
kind: Node
metadata: {name: node}
spec: {taints: [{key: %q, effect: NoSchedule}]}
status: {addresses: [{type: InternalIP, address: %s}, {type: InternalIP, address: "%s"}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: LoadBalancer
  clusterIP: %s
  clusterIPs: [%s]
  externalTrafficPolicy: Local
  healthCheckNodePort: 30900
  ports: [{name: http, port: 80, protocol: TCP, nodePort: 30080}]
status: {loadBalancer: {ingress: [{ip: %s}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
  namespace: shop
  labels: {kubernetes.io/service-name: web}
  annotations: {endpoints.kubernetes.io/last-change-trigger-time: %q}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints: [{addresses: ["%s"], nodeName: node, conditions: %s}]
`, s.taint, node.IP(ipfamily.IPv4), node.IP(ipfamily.IPv6), s.clusterIP(), s.clusterIP(),
		lab.Nth(lab.ExternalRange[0], 1), triggered,
		s.cluster.Pods[0].IP(ipfamily.IPv4), conditions))
}

func (s *shown) clusterIP() netip.Addr { return lab.Nth(lab.ServiceRange[0], 1) }

// get asks from a host, and gives status, weight header and body; status 0 says that nobody answered.
func (s *shown) get(from *lab.Host, url string) (code int, weight, body string) {
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
			err = from.Do(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, addr)
				return err
			})
			return c, err
		}}}
	resp, err := client.Get(url)
	if err != nil {
		return 0, "", err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	labtest.Check(s.t, err)
	return resp.StatusCode, resp.Header.Get("X-Load-Balancing-Endpoint-Weight"), string(text)
}

// await asks until the answer is what it should be.
func (s *shown) await(what string, from *lab.Host, url string, code int, contains string) string {
	s.t.Helper()
	var got int
	var body string
	testkit.Eventually(s.t, patience, what, func() bool {
		got, _, body = s.get(from, url)
		return got == code && strings.Contains(body, contains)
	}, func() string { return fmt.Sprintf("%s: %d %s; want %d and %q", url, got, body, code, contains) }, s.said)
	return body
}

// metric gives the value of a series; what is not there is -1.
func (s *shown) metric(series string) float64 {
	s.t.Helper()
	_, _, body := s.get(s.cluster.Node, "http://127.0.0.1:10249/metrics")
	for line := range strings.Lines(body) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			var v float64
			if _, err := fmt.Sscan(value, &v); err != nil {
				s.t.Fatalf("%q: %v", line, err)
			}
			return v
		}
	}
	return -1
}

// TestServing runs the proxy and asks it as kubelets, load balancers, Kubernetes' own tests and Prometheus do.
func TestServing(t *testing.T) {
	s := &shown{victim: &victim{t: t, cluster: labtest.NewCluster(t, lab.Config{LocalPods: 2}), dir: t.TempDir(),
		flags: []string{"--cluster-cidr", lab.PodRange[0].String(), "--metrics-bind-address", "127.0.0.1",
			"--records", "on"}}, taint: "none"}
	_, err := s.cluster.Pods[0].Serve(snapshot.TCP, 8080)
	labtest.Check(t, err)
	s.log, err = os.Create(filepath.Join(t.TempDir(), "log"))
	labtest.Check(t, err)
	s.objects(true)
	s.start()
	defer func() {
		_ = s.keeper.Process.Signal(syscall.SIGTERM)
		_ = s.keeper.Wait()
	}()
	node, balancer := s.cluster.Node, s.cluster.Outside
	healthz := "http://" + netip.AddrPortFrom(node.IP(ipfamily.IPv4), 10256).String()
	check := "http://" + netip.AddrPortFrom(node.IP(ipfamily.IPv4), 30900).String() + "/"

	s.await("started", balancer, healthz+"/healthz", 200,
		`"nodeEligible":true,"healthy":true,"status":{"IPv4":{"lastUpdated":`)
	s.await("started", balancer, healthz+"/readyz", 200, `"healthy":true`)
	s.await("has an endpoint", balancer, check, 200, "\"localEndpoints\": 1,\n\t\"serviceProxyHealthy\": true")
	s.pages()
	s.await("lists its Services", node, "http://127.0.0.1:10256/services", 200,
		`"service":"shop/web","type":"LoadBalancer","state":"programmed"`)
	s.counts()
	s.bundled()

	s.objects(false)
	s.await("drains", balancer, check, 503, `"localEndpoints": 0`)
	if v := s.metric(`kubeproxy_network_programming_duration_seconds_count{ip_family="IPv4"}`); v != 1 {
		t.Errorf("the latency of %v changes is known", v)
	}
	s.taint = "ToBeDeletedByClusterAutoscaler"
	s.objects(true)
	s.await("is to be deleted", balancer, healthz+"/healthz", 503,
		`"missing":["the Node has the taint ToBeDeletedByClusterAutoscaler"]`)
	s.await("is to be deleted", balancer, healthz+"/livez", 200, `"healthy":true`)
	s.await("is to be deleted", balancer, check, 200, `"localEndpoints": 1`)

	// After a crash the next process takes the same addresses, and finds the tables.
	crashed, started := s.child(), s.metric("process_start_time_seconds")
	labtest.Check(t, syscall.Kill(crashed, syscall.SIGKILL))
	testkit.Eventually(t, time.Minute, "another process", func() bool { return s.child() != crashed && s.child() != 0 },
		s.said)
	s.await("after a crash", balancer, healthz+"/readyz", 200, `"healthy":true`)
	s.await("after a crash", balancer, check, 200, `"localEndpoints": 1`)
	s.await("after a crash", node, "http://127.0.0.1:10256/services", 200,
		`"service":"shop/web","type":"LoadBalancer","state":"programmed"`)
	if v := s.metric(`verdict_start_info{how="adopted"}`); v != 1 {
		t.Errorf("after a crash: adopted %v", v)
	}
	if v := s.metric("process_start_time_seconds"); v <= started { // by which an alert sees it
		t.Errorf("after a crash: started at %v, and at %v before", v, started)
	}
	if v := s.metric(`kubeproxy_proxy_healthz_total{code="200"}`); v != 0 {
		t.Errorf("after a crash: healthz %v", v)
	}
	s.portTaken()
}

// pages asks for what the metrics server shows besides metrics.
func (s *shown) pages() {
	s.t.Helper()
	for path, want := range map[string]string{
		"/proxyMode": "nftables", "/healthz": "ok", "/flows": `{"node":"node","started":`,
		"/configz": `{"kubeproxy.config.k8s.io":{`, "/metrics/slis": `kubernetes_healthcheck{name="rules",type="healthz"} 1`,
	} {
		if code, _, body := s.get(s.cluster.Node, "http://127.0.0.1:10249"+path); code != 200 ||
			!strings.Contains(body, want) {
			s.t.Errorf("%s: %d %s; want %q", path, code, body, want)
		}
	}
	if code, _, _ := s.get(s.cluster.Node, "http://127.0.0.1:10249/debug/pprof/"); code != 404 {
		s.t.Errorf("profiles were not asked for: %d", code)
	}
	if code, _, _ := s.get(s.cluster.Outside, "http://"+
		netip.AddrPortFrom(s.cluster.Node.IP(ipfamily.IPv4), 10249).String()+"/metrics"); code != 0 {
		s.t.Errorf("metrics are shown to everybody: %d", code)
	}
}

// counts opens connections and finds them in the metrics.
func (s *shown) counts() {
	s.t.Helper()
	const n = 5
	for range n {
		to := netip.AddrPortFrom(s.clusterIP(), 80)
		if r := s.cluster.Pods[1].Dial(snapshot.TCP, to, lab.Options{Timeout: 5 * time.Second}); r.Outcome != lab.Answered {
			s.t.Fatal(r)
		}
	}
	for series, want := range map[string]float64{
		`verdict_service_connections_total{protocol="tcp",service_name="web",` +
			`service_namespace="shop",service_port="http"}`: n,
		`verdict_ready`:                                 1,
		`verdict_start_info{how="full"}`:                1,
		`verdict_services`:                              1,
		`verdict_transactions_total{outcome="full"}`:    1,
		`verdict_health_check_node_ports{state="open"}`: 1,
		// cluster IP, load balancer, node port, and that at 127.0.0.1
		`verdict_map_elements{ip_family="IPv4",map="services"}`:                     4,
		`verdict_map_elements{ip_family="IPv4",map="affinity"}`:                     0,
		`verdict_flow_losses_total{kind="sampled"}`:                                 0,
		`verdict_map_max_elements{ip_family="IPv6",map="affinity"}`:                 262144,
		`kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"}`: 0,
		`kubeproxy_sync_proxy_rules_service_changes_total`:                          1,
		`kubeproxy_sync_proxy_rules_service_changes_pending`:                        0,
	} {
		if got := s.metric(series); got != want {
			s.t.Errorf("%s is %v; want %v", series, got, want)
		}
	}
	for _, series := range []string{"process_start_time_seconds", "go_goroutines", "verdict_conntrack_max_entries",
		"verdict_start_duration_seconds",
		`kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"}`,
		`kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"}`} {
		if got := s.metric(series); got <= 0 {
			s.t.Errorf("%s is %v", series, got)
		}
	}
}

// bundled: an archive about the node has its tables, the flows by Service, and what the proxy says.
func (s *shown) bundled() {
	s.t.Helper()
	file := filepath.Join(s.t.TempDir(), "bundle.tar.gz")
	labtest.Check(s.t, s.cluster.Node.Do(func() error {
		_, err := command("bundle", "-o", file)
		return err
	}))
	packed, err := os.Open(file)
	labtest.Check(s.t, err)
	defer packed.Close()
	zip, err := gzip.NewReader(packed)
	labtest.Check(s.t, err)
	files := map[string]string{}
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		labtest.Check(s.t, err)
		text, err := io.ReadAll(r)
		labtest.Check(s.t, err)
		files[h.Name] = string(text)
	}
	for name, want := range map[string]string{"tables.txt": "table ip verdict {", "flows.txt": "shop/web",
		"config.json": "kubeproxy.config.k8s.io", "status.json": `"digests":[{"service":"shop/web"`,
		"services.json": `"service": "shop/web"`, "verify.json": `"same": true`, "version.json": `"nftables"`,
		"in-force.txt": "--cluster-cidr", "metrics.txt": "verdict_ready 1", "programs.txt": "Linux version",
		"outliers.json": "{", "slow-starts.json": "{", "missing.txt": "ledger.jsonl: there is no ledger"} {
		if !strings.Contains(files[name], want) {
			s.t.Errorf("%s does not have %q, but\n%.2000s", name, want, files[name])
		}
	}
}

// portTaken: a health check node port that somebody has is told by the name of the Service, and taken once it is free.
func (s *shown) portTaken() {
	s.t.Helper()
	var taken net.Listener
	at := netip.AddrPortFrom(s.cluster.Node.IP(ipfamily.IPv4), 30901)
	labtest.Check(s.t, s.cluster.Node.Do(func() (err error) {
		taken, err = net.Listen("tcp4", at.String())
		return err
	}))
	text, err := os.ReadFile(filepath.Join(s.dir, "all.yaml"))
	labtest.Check(s.t, err)
	s.write("all.yaml", string(bytes.ReplaceAll(text, []byte("30900"), []byte("30901"))))
	s.wait("health check node port of Service shop/web: listen tcp4 "+at.String()+": bind: address already in use", 1)
	taken.Close()
	s.await("is free again", s.cluster.Outside, "http://"+at.String(), 200, `"localEndpoints": 1`)
}
