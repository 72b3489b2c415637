package node

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const webManifest = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIPs: ["10.96.0.1", "fd00:10:96::1"]
  clusterIP: 10.96.0.1
  ipFamilies: [IPv4, IPv6]
  ports: [{name: http, port: 80, protocol: TCP}]
`

const sliceManifest = `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-%[1]s, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: %[1]s
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints:
`

// shopNode is a node with a proxy, whose Service shop/web has remote pods as endpoints, and three pods as clients.
type shopNode struct {
	*lab.Cluster
	t       *testing.T
	log     logBuffer
	servers []*lab.Server
	// manifest is the file with the Service.
	manifest string
}

func newShopNode(t *testing.T, endpoints int, mode string, flags ...string) *shopNode {
	t.Helper()
	n := &shopNode{t: t, Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 3, RemotePods: endpoints})}
	for _, pod := range n.RemotePods {
		s, err := pod.Serve(snapshot.TCP, 8080)
		labtest.Check(t, err)
		n.servers = append(n.servers, s)
	}
	text := webManifest
	for _, f := range lab.Families() {
		text += fmt.Sprintf(sliceManifest, fmt.Sprint("IPv", f.Version()))
		for _, pod := range n.RemotePods {
			text += fmt.Sprintf("  - {addresses: [\"%v\"], conditions: {ready: true}}\n", pod.IP(f))
		}
	}
	dir := t.TempDir()
	// Anybody may write a Service of his own with the endpoints of others.
	change := strings.NewReplacer("namespace: shop", "namespace: aaa", "10.96.0.1", "10.96.0.2", "96::1", "96::2")
	other := change.Replace(text)
	n.manifest = filepath.Join(dir, "web.yaml")
	labtest.Check(t, os.WriteFile(n.manifest, []byte(text+"---\n"+other), 0o644))
	startProxy(t, n.Node, &n.log, append(flags, "--from", dir, "--hostname-override=node",
		"--cluster-cidr=10.244.0.0/16,fd00:10:244::/48", "--second-chance="+mode)...)
	return n
}

// startProxy starts a proxy on a host, waits until it has programmed its Services, and ends it with the test, or when
// stop is called.
func startProxy(t *testing.T, on *lab.Host, log *logBuffer, flags ...string) (stop func()) {
	t.Helper()
	cmd := on.Command("/proc/self/exe", append([]string{"--backend=nftables", "--keeper=none"}, flags...)...)
	cmd.Env = append(os.Environ(), beToy+"=1")
	cmd.Stdout, cmd.Stderr = log, log
	labtest.Check(t, cmd.Start())
	stop = sync.OnceFunc(func() {
		err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
		if err != nil || t.Failed() {
			t.Errorf("%v\n%s", err, log.String())
		}
	})
	t.Cleanup(stop)
	testkit.Eventually(t, 30*time.Second, "the proxy's start", func() bool {
		return strings.Contains(log.String(), "all Services are programmed")
	}, log.String)
	return stop
}

// firewall replaces the rules for what a pod receives.
func (n *shopNode) firewall(pod *lab.Host, rules ...string) {
	n.t.Helper()
	labtest.Run(n.t, pod, "table inet filter\nflush table inet filter\ntable inet filter { chain input { "+
		"type filter hook input priority 0\n"+strings.Join(rules, "\n")+"\n}\n}\n", "nft", "-f", "-")
}

// dial opens connections at once, and gives how many each endpoint answered, and the longest time that one took. None
// may fail: without a second chance, a connection to a dead endpoint takes longer than dialTimeout.
func (n *shopNode) dial(from *lab.Host, f ipfamily.Family, times int) (by map[string]int, longest time.Duration) {
	n.t.Helper()
	return n.dialTo(from, n.web(f), times)
}

// dialTo is dial to any Service.
func (n *shopNode) dialTo(from *lab.Host, to netip.AddrPort, times int) (by map[string]int, longest time.Duration) {
	n.t.Helper()
	var mu sync.Mutex
	var all sync.WaitGroup
	by = map[string]int{}
	for range times {
		all.Go(func() {
			r := from.Dial(snapshot.TCP, to, lab.Options{Timeout: dialTimeout})
			mu.Lock()
			defer mu.Unlock()
			if longest = max(longest, r.Latency); r.Outcome != lab.Answered {
				n.t.Error(r)
			}
			by[r.Endpoint]++
		})
	}
	all.Wait()
	return by, longest
}

const dialTimeout = 30 * time.Second

// avoids waits until clients neither reach an endpoint nor wait for it: a client that does sends again after a second.
func (n *shopNode) avoids(name string, f ipfamily.Family) {
	n.t.Helper()
	testkit.Eventually(n.t, 20*time.Second, "connections that avoid "+name, func() bool {
		by, longest := n.dial(n.Pods[0], f, 40)
		return by[name] == 0 && longest < 900*time.Millisecond
	}, n.log.String)
}

func (n *shopNode) web(f ipfamily.Family) netip.AddrPort {
	return netip.AddrPortFrom(lab.Nth(lab.ServiceRange[f], 1), 80)
}

// warm has clients connect for as long as it takes to learn how often the endpoints answer, and on until stop is
// called. Of those that choose an endpoint which dies, none may fail.
func (n *shopNode) warm(f ipfamily.Family) (stop func()) {
	n.t.Helper()
	done := make(chan struct{})
	var all sync.WaitGroup
	from := []*lab.Host{n.Pods[0], n.Pods[1]}
	all.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			case <-time.After(10 * time.Millisecond):
			}
			all.Go(func() {
				r := from[i%2].Dial(snapshot.TCP, n.web(f), lab.Options{Timeout: dialTimeout})
				if r.Outcome != lab.Answered {
					n.t.Error(r)
				}
			})
		}
	})
	time.Sleep(8 * time.Second) // the history that an endpoint must have is made of time
	return func() { close(done); all.Wait() }
}

// metric gives the sum of a metric.
func (n *shopNode) metric(name string) (sum float64) {
	n.t.Helper()
	page := labtest.Run(n.t, n.Node, "", "curl", "-s", "http://127.0.0.1:10249/metrics")
	for _, m := range regexp.MustCompile(`(?m)^`+name+`(\{.*\})? (.*)$`).FindAllStringSubmatch(page, -1) {
		v, err := strconv.ParseFloat(m[2], 64)
		labtest.Check(n.t, err)
		sum += v
	}
	return sum
}

// returns waits until an endpoint is used again.
func (n *shopNode) returns(name string) {
	n.t.Helper()
	testkit.Eventually(n.t, 20*time.Second, "return of "+name, func() bool {
		by, _ := n.dial(n.Pods[0], ipfamily.IPv4, 8)
		return by[name] > 0
	}, n.log.String)
}

// TestDeadEndpoint: all clients that choose a dead endpoint are connected by one of their next retransmissions, the
// second one unless the machine is busy. Later ones are not sent there. It is used again when it answers.
func TestDeadEndpoint(t *testing.T) {
	t.Parallel() // as others of this file that mostly wait
	for _, endpoints := range []int{2, 4} {
		for _, f := range lab.Families() {
			t.Run(fmt.Sprint(endpoints, " endpoints, ", f), func(t *testing.T) {
				t.Parallel()
				n := newShopNode(t, endpoints, "on")
				stop := n.warm(f)
				n.firewall(n.RemotePods[0], "meta l4proto tcp drop")
				by, longest := n.dial(n.Pods[0], f, 8*endpoints)
				t.Logf("answered: %v, longest %v", by, longest)
				if longest < 900*time.Millisecond || by["remote-1"] > 0 {
					t.Errorf("answered: %v, longest %v", by, longest)
				}
				n.avoids("remote-1", f)
				stop()
				if n := n.metric("verdict_endpoints_ejected"); n != 1 {
					t.Errorf("%v endpoints are ejected", n)
				}
				page := labtest.Run(t, n.Node, "", "curl", "-s", "http://127.0.0.1:10256/outliers")
				if !strings.Contains(page, `"service":"shop/web"`) || !strings.Contains(page, `"ejected":true`) {
					t.Errorf("/outliers: %s", page)
				}
				n.firewall(n.RemotePods[0])
				if f == ipfamily.IPv4 {
					n.returns("remote-1")
				}
			})
		}
	}
}

// TestRefusingEndpoint: an endpoint that refuses is ejected, and no client sees a refusal.
func TestRefusingEndpoint(t *testing.T) {
	t.Parallel()
	n := newShopNode(t, 4, "on")
	defer n.warm(ipfamily.IPv4)()
	labtest.Check(t, n.servers[0].Close())
	by, longest := n.dial(n.Pods[0], ipfamily.IPv4, 32)
	t.Logf("answered: %v, longest %v", by, longest)
	testkit.Eventually(t, 20*time.Second, "ejection", func() bool { return n.metric("verdict_endpoints_ejected") == 1 },
		n.log.String)
	n.avoids("remote-1", ipfamily.IPv4)
	_, err := n.RemotePods[0].Serve(snapshot.TCP, 8080)
	labtest.Check(t, err)
	n.returns("remote-1")
}

// TestUnknownEndpoint: an endpoint that never answered may be there for others only. It stays, and each client that
// chooses it is sent elsewhere with one of its next retransmissions.
func TestUnknownEndpoint(t *testing.T) {
	t.Parallel()
	for _, f := range lab.Families() {
		t.Run(f.String(), func(t *testing.T) {
			t.Parallel()
			n := newShopNode(t, 4, "on")
			n.firewall(n.RemotePods[0], "meta l4proto tcp drop")
			for range 3 {
				by, longest := n.dial(n.Pods[0], f, 32)
				t.Logf("answered: %v, longest %v", by, longest)
				if longest < 900*time.Millisecond || by["remote-1"] > 0 {
					t.Errorf("answered: %v, longest %v", by, longest)
				}
			}
			if sum := n.metric("verdict_ejections_total"); sum > 0 {
				t.Errorf("%v ejections", sum)
			}
		})
	}
}

// TestLastEndpointStays: the only endpoint is never ejected.
func TestLastEndpointStays(t *testing.T) {
	t.Parallel()
	n := newShopNode(t, 1, "on")
	n.warm(ipfamily.IPv4)()
	n.firewall(n.RemotePods[0], "meta l4proto tcp drop")
	for range 4 {
		go n.Pods[0].Dial(snapshot.TCP, n.web(ipfamily.IPv4), lab.Options{Timeout: 4 * time.Second})
	}
	testkit.Eventually(t, 20*time.Second, "probe", func() bool { return n.metric("verdict_probes_total") > 0 },
		n.log.String)
	time.Sleep(time.Second) // what must not happen has no moment at which to look
	if sum := n.metric("verdict_ejections_total"); sum > 0 {
		t.Errorf("%v ejections", sum)
	}
	n.firewall(n.RemotePods[0])
	n.dial(n.Pods[0], ipfamily.IPv4, 4)
}

// TestObservedEndpoint: with observe, a dead endpoint stays in use.
func TestObservedEndpoint(t *testing.T) {
	t.Parallel()
	n := newShopNode(t, 2, "observe")
	n.warm(ipfamily.IPv4)()
	n.firewall(n.RemotePods[0], "meta l4proto tcp drop")
	testkit.Eventually(t, 20*time.Second, "the log", func() bool {
		go n.Pods[0].Dial(snapshot.TCP, n.web(ipfamily.IPv4), lab.Options{Timeout: 4 * time.Second})
		return strings.Contains(n.log.String(), "an endpoint would be ejected: unanswered")
	}, n.log.String)
	if sum := n.metric("verdict_ejections_total"); sum > 0 {
		t.Errorf("%v ejections", sum)
	}
}

// policyCase is a policy that forbids two pods and this node what it allows another pod.
type policyCase struct {
	// verdict is what becomes of what it forbids, and at the number of endpoints that have it.
	verdict string
	at      int
	// pause is how long the pod that it allows waits between two connections.
	pause time.Duration
	// known says that the two were allowed before. other says that they use a Service of another namespace.
	known, other bool
}

// TestPolicies has policies forbid two pods and this node what they allow another pod. The two connect all the time,
// and go on when the other one has stopped. Nothing is ejected; whoever is allowed is answered at once, and by all
// endpoints, however seldom he comes. The two are refused where the policy does.
func TestPolicies(t *testing.T) {
	var all sync.WaitGroup
	stalls := labtest.WatchStalls(t)
	for i, verdict := range []string{"drop", "reject with tcp reset", "reject"} {
		for at := 1; at <= 3; at += 2 {
			for n, pause := range []time.Duration{20 * time.Millisecond, 2 * time.Second} {
				c := policyCase{verdict, at, pause, at == 3, (i+n)%2 == 0}
				node := newShopNode(t, 3, "on")
				all.Go(func() { node.tryPolicy(c, stalls) })
			}
		}
	}
	all.Wait()
}

// tryPolicy may be called in another goroutine than the test's.
func (n *shopNode) tryPolicy(c policyCase, stalls *labtest.Stalls) {
	allowed, forbidden := n.Pods[0], n.Pods[1:]
	to := n.web(ipfamily.IPv4)
	own := to
	if c.other {
		own = netip.AddrPortFrom(lab.Nth(lab.ServiceRange[ipfamily.IPv4], 2), 80)
	}
	dial := func(from *lab.Host, to netip.AddrPort, until time.Time, pause time.Duration, check func(lab.Result)) {
		for time.Now().Before(until) {
			check(from.Dial(snapshot.TCP, to, lab.Options{Timeout: 12 * time.Second}))
			time.Sleep(pause)
		}
	}
	by := map[string]int{}
	answered := func(r lab.Result) {
		late := r.Latency > 900*time.Millisecond && !stalls.Since(time.Now().Add(-r.Latency))
		if by[r.Endpoint]++; r.Outcome != lab.Answered || late {
			n.t.Errorf("%+v: who is allowed: %v after %v", c, r, r.Latency)
		}
	}
	now := time.Now()
	if dial(allowed, to, now.Add(8*time.Second), c.pause, answered); c.known {
		for _, from := range forbidden {
			dial(from, own, time.Now().Add(2*time.Second), 20*time.Millisecond, func(lab.Result) {})
		}
	}
	for _, pod := range n.RemotePods[:c.at] {
		n.firewall(pod, fmt.Sprintf("ip saddr %v accept", allowed.IP(ipfamily.IPv4)), "meta l4proto tcp "+c.verdict)
	}
	clear(by)
	var all sync.WaitGroup
	now = time.Now()
	for _, from := range forbidden {
		all.Go(func() {
			dial(from, own, now.Add(35*time.Second), 50*time.Millisecond, func(r lab.Result) {
				if c.at == 3 && r.Outcome != lab.Refused && c.verdict != "drop" {
					n.t.Errorf("%+v: who is forbidden: %v after %v", c, r, r.Latency)
				}
			})
		})
	}
	dial(allowed, to, now.Add(25*time.Second), c.pause, answered)
	all.Wait()
	n.t.Logf("%+v: answered: %v, %v probes", c, by, n.metric("verdict_probes_total"))
	if sum := n.metric("verdict_ejections_total"); sum > 0 || c.pause < time.Second && len(by) != 3 {
		n.t.Errorf("%+v: %v ejections; answered: %v", c, sum, by)
	}
}
