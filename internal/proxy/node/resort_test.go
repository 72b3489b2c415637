package node

import (
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// probingNode is a shopNode whose Service has IPv4 endpoints with conditions.
type probingNode struct {
	shopNode
	dir string
	at  []netip.Addr
}

// newProbingNode starts a proxy with a Service that has an annotation, and hosts as its endpoints.
func newProbingNode(t *testing.T, annotation string, endpoints func(*lab.Cluster) []*lab.Host,
	flags ...string) *probingNode {
	t.Helper()
	n := &probingNode{dir: t.TempDir()}
	n.t, n.Cluster = t, labtest.NewCluster(t, lab.Config{LocalPods: 1, RemotePods: 2})
	var conditions []string
	for _, h := range endpoints(n.Cluster) {
		n.at, conditions = append(n.at, h.IP(ipfamily.IPv4)), append(conditions, "ready: true")
	}
	n.write("web.yaml",
		strings.Replace(webManifest, "namespace: shop", "namespace: shop, annotations: {"+annotation+"}", 1))
	n.are(conditions...)
	startProxy(t, n.Node, &n.log, append([]string{"--from", n.dir, "--hostname-override=node",
		"--cluster-cidr=10.244.0.0/16,fd00:10:244::/48"}, flags...)...)
	return n
}

func (n *probingNode) write(name, text string) {
	n.t.Helper()
	path := filepath.Join(n.dir, name)
	labtest.Check(n.t, os.WriteFile(path+".new", []byte(text), 0o644))
	labtest.Check(n.t, os.Rename(path+".new", path))
}

// are tells the proxy of the endpoints' conditions.
func (n *probingNode) are(conditions ...string) {
	n.t.Helper()
	text := fmt.Sprintf(sliceManifest, "IPv4")
	for i, c := range conditions {
		text += fmt.Sprintf("  - {addresses: [\"%v\"], conditions: {%s}}\n", n.at[i], c)
	}
	n.write("slice.yaml", text)
}

func remotePods(c *lab.Cluster) []*lab.Host { return c.RemotePods }

// knocks has clients connect all the time, until stop is called. That says how many did, how many failed, and the time
// from the first failure to the last one.
func (n *probingNode) knocks() (stop func() (dials, failed int, gap time.Duration)) {
	var mu sync.Mutex
	var all sync.WaitGroup
	var first, last time.Time
	dials, failed, done := 0, 0, make(chan struct{})
	for range 4 {
		all.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				r := n.Pods[0].Dial(snapshot.TCP, n.web(ipfamily.IPv4), lab.Options{Timeout: dialTimeout})
				mu.Lock()
				if dials++; r.Outcome != lab.Answered {
					if last = time.Now(); failed == 0 {
						first = last
					}
					failed++
				}
				mu.Unlock()
			}
		})
	}
	return func() (int, int, time.Duration) {
		close(done)
		all.Wait()
		return dials, failed, last.Sub(first)
	}
}

// reaches waits until ten connections in a row were answered at once by one host.
func (n *probingNode) reaches(what, name string) {
	n.t.Helper()
	row := 0
	testkit.Eventually(n.t, 60*time.Second, what, func() bool {
		r := n.Pods[0].Dial(snapshot.TCP, n.web(ipfamily.IPv4), lab.Options{Timeout: dialTimeout})
		if row++; r.Endpoint != name || r.Latency > 900*time.Millisecond {
			row = 0
		}
		return row == 10
	}, n.log.String)
}

// ejects waits until an endpoint is ejected.
func (n *probingNode) ejects() {
	n.t.Helper()
	testkit.Eventually(n.t, 30*time.Second, "the ejection", func() bool {
		return n.metric("verdict_endpoints_ejected") == 1
	}, n.log.String)
}

// TestLastResort: while no endpoint is ready, clients reach those that answer, and only as long as no other is ready.
// That they are refused without the setting is kube-proxy's way.
func TestLastResort(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		what, annotation string
		flags            []string
	}{
		{"the node's setting", "", []string{"--last-resort=on", "--second-chance=off"}},
		{"the Service's annotation", `verdict/last-resort: "on"`, nil},
	} {
		t.Run(test.what, func(t *testing.T) {
			t.Parallel()
			n := newProbingNode(t, test.annotation, remotePods, test.flags...)
			one, err := n.RemotePods[0].Serve(snapshot.TCP, 8080)
			labtest.Check(t, err)
			n.are("ready: true", "ready: false")
			n.reaches("the ready one", "remote-1")
			stop := n.knocks()
			n.are("ready: false", "ready: false")
			n.reaches("the one that answers", "remote-1")
			dials, failed, gap := stop()
			t.Logf("%d of %d connections failed, within %v", failed, dials, gap)
			if failed == dials || gap > 20*time.Second {
				t.Errorf("%d of %d connections failed, within %v", failed, dials, gap)
			}
			if v := n.metric("verdict_last_resort_endpoints"); v != 1 {
				t.Errorf("%v endpoints are a last resort", v)
			}
			_, err = n.RemotePods[1].Serve(snapshot.TCP, 8080)
			labtest.Check(t, err)
			labtest.Check(t, one.Close())
			n.reaches("the other one, which answers now", "remote-2")
			one, err = n.RemotePods[0].Serve(snapshot.TCP, 8080)
			labtest.Check(t, err)
			n.are("ready: true", "ready: false")
			n.reaches("the ready one again", "remote-1")
			if v := n.metric("verdict_last_resort_endpoints"); v != 0 {
				t.Errorf("%v endpoints are a last resort", v)
			}
			labtest.Check(t, one.Close())
			for range 20 {
				r := n.Pods[0].Dial(snapshot.TCP, n.web(ipfamily.IPv4), lab.Options{Timeout: dialTimeout})
				if r.Outcome != lab.Refused {
					t.Errorf("while one is ready, and refuses: %v", r)
				}
			}
			n.are("ready: false, serving: false, terminating: true", "ready: false")
			n.reaches("the one that does not terminate", "remote-2")
			page := labtest.Run(t, n.Node, "", "curl", "-s", "http://127.0.0.1:10256/outliers")
			if !strings.Contains(page, `"cause":"last-resort"`) || !strings.Contains(n.log.String(), "a last resort is used") {
				t.Errorf("/outliers: %s\n%s", page, n.log.String())
			}
		})
	}
}

// TestNoLastResort: by default, nobody is sent to an endpoint that is not ready.
func TestNoLastResort(t *testing.T) {
	t.Parallel()
	n := newProbingNode(t, "", remotePods)
	_, err := n.RemotePods[0].Serve(snapshot.TCP, 8080)
	labtest.Check(t, err)
	n.are("ready: true", "ready: false")
	n.reaches("the ready one", "remote-1")
	n.are("ready: false", "ready: false")
	testkit.Eventually(t, 20*time.Second, "a refusal", func() bool {
		return n.Pods[0].Dial(snapshot.TCP, n.web(ipfamily.IPv4), lab.Options{}).Outcome == lab.Refused
	}, n.log.String)
	if v := n.metric("verdict_probes_total"); v > 0 {
		t.Errorf("%v probes", v)
	}
}

// TestOutsideEndpoint: an endpoint outside the cluster dies and returns. Of those clients that come seldom, none has to
// find out by itself.
func TestOutsideEndpoint(t *testing.T) {
	t.Parallel()
	n := newProbingNode(t, "verdict/probe: tcp", func(c *lab.Cluster) []*lab.Host {
		return []*lab.Host{c.Outside, c.RemotePods[0]}
	})
	for _, h := range []*lab.Host{n.Outside, n.RemotePods[0]} {
		_, err := h.Serve(snapshot.TCP, 8080)
		labtest.Check(t, err)
	}
	n.dial(n.Pods[0], ipfamily.IPv4, 32) // both are in use
	n.firewall(n.Outside, "meta l4proto tcp drop")
	n.ejects()
	if by, longest := n.dial(n.Pods[0], ipfamily.IPv4, 40); by["remote-1"] != 40 || longest > 900*time.Millisecond {
		t.Errorf("answered: %v, longest %v", by, longest)
	}
	n.firewall(n.Outside)
	n.returns("outside")
}

// TestProbedByHTTP: what an endpoint answers to a path decides.
func TestProbedByHTTP(t *testing.T) {
	t.Parallel()
	n := newProbingNode(t, "verdict/probe: http:/healthz", remotePods)
	var status atomic.Int64
	status.Store(http.StatusOK)
	paths := make(chan string, 1000)
	for i, pod := range n.RemotePods {
		l, err := pod.Listen("tcp4", ":8080")
		labtest.Check(t, err)
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.UserAgent() == "verdict-probe" {
				paths <- r.URL.Path
			}
			w.Header().Set("Pod", pod.Name)
			if i == 0 && r.URL.Path == "/healthz" {
				w.WriteHeader(int(status.Load()))
			}
		})}
		go func() { _ = server.Serve(l) }()
		t.Cleanup(func() { server.Close() })
	}
	client := http.Client{Transport: &http.Transport{DialContext: n.Pods[0].DialContext, DisableKeepAlives: true}}
	ask := func(times int) map[string]int {
		by := map[string]int{}
		for range times {
			r, err := client.Get(fmt.Sprintf("http://%v/", n.web(ipfamily.IPv4)))
			if err != nil {
				t.Error(err)
				continue
			}
			by[r.Header.Get("Pod")]++
			r.Body.Close()
		}
		return by
	}
	ask(32) // both are in use
	status.Store(http.StatusServiceUnavailable)
	n.ejects()
	if by := ask(40); by["remote-2"] != 40 {
		t.Errorf("answered: %v", by)
	}
	if path := <-paths; path != "/healthz" {
		t.Errorf("asked for %s", path)
	}
	status.Store(http.StatusNoContent)
	testkit.Eventually(t, 30*time.Second, "the return", func() bool { return ask(8)["remote-1"] > 0 }, n.log.String)
}

// TestProbesHarmNobody: a policy that forbids this node what it allows clients has nothing ejected, and if all
// endpoints are dead, half of them stay.
func TestProbesHarmNobody(t *testing.T) {
	t.Parallel()
	n := newProbingNode(t, "verdict/probe: tcp", remotePods)
	for _, pod := range n.RemotePods {
		_, err := pod.Serve(snapshot.TCP, 8080)
		labtest.Check(t, err)
	}
	n.dial(n.Pods[0], ipfamily.IPv4, 32) // both are in use
	for _, pod := range n.RemotePods {
		n.firewall(pod, fmt.Sprintf("ip saddr %v accept", n.Pods[0].IP(ipfamily.IPv4)), "meta l4proto tcp drop")
	}
	stop := n.knocks()
	testkit.Eventually(t, 60*time.Second, "probes that a policy drops", func() bool {
		return n.metric(`verdict_probes_total{result="silent"}`) >= 6
	}, n.log.String)
	if dials, failed, _ := stop(); failed > 0 {
		t.Errorf("%d of %d connections failed", failed, dials)
	}
	if v := n.metric("verdict_ejections_total"); v > 0 {
		t.Errorf("%v ejections", v)
	}
	for _, pod := range n.RemotePods {
		n.firewall(pod, "meta l4proto tcp drop")
	}
	n.ejects()
	probes := n.metric("verdict_probes_total")
	testkit.Eventually(t, 60*time.Second, "more probes", func() bool {
		return n.metric("verdict_probes_total") >= probes+4
	}, n.log.String)
	if v := n.metric("verdict_endpoints_ejected"); v != 1 {
		t.Errorf("%v of two endpoints are ejected", v)
	}
}
