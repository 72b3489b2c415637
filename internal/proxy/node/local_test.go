package node

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const dnsManifest = `
apiVersion: v1
kind: Service
metadata: {name: dns, namespace: shop, annotations: {verdict-proxy.github.io/local: cache}}
spec:
  clusterIPs: ["10.96.0.1"]
  clusterIP: 10.96.0.1
  ipFamilies: [IPv4]
  ports: [{name: dns, port: 53, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: dns, namespace: shop, labels: {kubernetes.io/service-name: dns}}
addressType: IPv4
ports: [{name: dns, port: 5353, protocol: UDP}]
endpoints: [{addresses: ["%v"]}]
`

const cacheManifest = `
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: cache, namespace: shop, labels: {kubernetes.io/service-name: cache}}
addressType: IPv4
ports: [{name: dns, port: 5353, protocol: UDP}]
endpoints:
`

// localNodes are two nodes with a proxy each. The DNS server of the cluster is a pod elsewhere, and each node has a
// cache: a pod of the first one, and a pod beside the second one.
type localNodes struct {
	*lab.Cluster
	t    *testing.T
	dirs [2]string
	logs [2]logBuffer
	dns  netip.AddrPort
}

func newLocalNodes(t *testing.T) *localNodes {
	t.Helper()
	n := &localNodes{t: t, Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 2}),
		dns: netip.AddrPortFrom(lab.Nth(lab.ServiceRange[ipfamily.IPv4], 1), 53)}
	labtest.Check(t, n.Node2.AddRoute(lab.Route{To: lab.Node2PodRange[ipfamily.IPv4], Link: "eth0"}))
	for _, pod := range n.RemotePods {
		_, err := pod.Serve(snapshot.UDP, 5353)
		labtest.Check(t, err)
	}
	for i, host := range []*lab.Host{n.Node, n.Node2} {
		n.dirs[i] = t.TempDir()
		n.write(i, "dns.yaml", fmt.Sprintf(dnsManifest, n.RemotePods[0].IP(ipfamily.IPv4)))
		n.cache("ready: true")
		startProxy(t, host, &n.logs[i], "--from", n.dirs[i], fmt.Sprintf("--hostname-override=node-%d", i+1),
			"--second-chance=on")
	}
	return n
}

// write replaces a file of one node at once.
func (n *localNodes) write(i int, name, text string) {
	n.t.Helper()
	path := filepath.Join(n.dirs[i], name)
	labtest.Check(n.t, os.WriteFile(path+".new", []byte(text), 0o644))
	labtest.Check(n.t, os.Rename(path+".new", path))
}

// cache tells both nodes of the caches: the one of the first node has some conditions, or is gone.
func (n *localNodes) cache(conditions string) {
	n.t.Helper()
	endpoint := func(pod *lab.Host, node int, conditions string) string {
		return fmt.Sprintf("- {addresses: [\"%v\"], nodeName: node-%d, conditions: {%s}}\n", pod.IP(ipfamily.IPv4), node,
			conditions)
	}
	text := cacheManifest + endpoint(n.RemotePods[1], 2, "ready: true")
	if conditions != "" {
		text += endpoint(n.Pods[1], 1, conditions)
	}
	for i, dir := range n.dirs {
		if dir != "" {
			n.write(i, "cache.yaml", text)
		}
	}
}

// queries are those of a client that asks from a new port each time, and by whom they were answered.
type queries struct {
	mu   sync.Mutex
	by   map[string]int
	lost []time.Time // when each was sent
	last string
	stop chan struct{}
	all  sync.WaitGroup
}

func (n *localNodes) ask(from *lab.Host) *queries {
	q := &queries{by: map[string]int{}, stop: make(chan struct{})}
	for range 4 {
		q.all.Go(func() {
			for {
				select {
				case <-q.stop:
					return
				default:
				}
				sent := time.Now()
				r := from.Dial(snapshot.UDP, n.dns, lab.Options{Timeout: 2 * time.Second})
				q.mu.Lock()
				if q.by[r.Endpoint]++; r.Outcome != lab.Answered {
					q.lost = append(q.lost, sent)
				}
				q.last = r.Endpoint
				q.mu.Unlock()
			}
		})
	}
	return q
}

// count waits until more queries were asked, of which the last ones were answered by one host, and says which were
// lost.
func (q *queries) count(t *testing.T, what, by string, atLeast int) (lost []time.Time) {
	t.Helper()
	q.mu.Lock()
	clear(q.by)
	q.lost = nil
	q.mu.Unlock()
	streak := 0
	testkit.Eventually(t, 60*time.Second, what, func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		if streak++; q.last != by {
			streak = 0
		}
		sum := 0
		for _, n := range q.by {
			sum += n
		}
		return streak >= 10 && sum >= atLeast
	}, func() string { q.mu.Lock(); defer q.mu.Unlock(); return fmt.Sprint(q.by) })
	q.mu.Lock()
	defer q.mu.Unlock()
	t.Logf("%s: answered by %v, %d lost", what, q.by, len(q.lost))
	return q.lost
}

// TestLocalCache: each node asks its own cache. No query is lost while a cache is replaced, or comes back; one that
// dies loses what was sent to it before the cluster said so. A client that asks from the same port all the time goes
// where new ones go.
func TestLocalCache(t *testing.T) {
	t.Parallel()
	n := newLocalNodes(t)
	server, err := n.Pods[1].Serve(snapshot.UDP, 5353)
	labtest.Check(t, err)
	q := n.ask(n.Pods[0])
	defer q.all.Wait()
	defer close(q.stop)
	none := func(what string, lost []time.Time) {
		t.Helper()
		if len(lost) > 0 {
			t.Errorf("%s: %d queries are lost", what, len(lost))
		}
	}
	none("the cache of this node", q.count(t, "the cache of this node", "pod-2", 1000))
	if r := n.Node2.Dial(snapshot.UDP, n.dns, lab.Options{}); r.Endpoint != "remote-2" {
		t.Errorf("the other node: %v", r)
	}
	held, r := n.Pods[0].Open(snapshot.UDP, n.dns, lab.Options{})
	if held == nil || r.Endpoint != "pod-2" {
		t.Fatal(r)
	}
	follows := func(by string) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, "the client with one port at "+by, func() bool {
			return held.Ping(time.Second).Endpoint == by
		}, n.logs[0].String)
	}
	n.cache("ready: false, serving: true, terminating: true")
	none("it is replaced", q.count(t, "it is replaced", "remote-1", 2000))
	follows("remote-1")
	labtest.Check(t, server.Close())
	n.cache("")
	none("it is gone", q.count(t, "it is gone", "remote-1", 1000))

	server, err = n.Pods[1].Serve(snapshot.UDP, 5353)
	labtest.Check(t, err)
	n.cache("ready: true")
	none("it is back", q.count(t, "it is back", "pod-2", 4000))
	follows("pod-2")

	killed := time.Now()
	labtest.Check(t, server.Close())
	n.cache("ready: false")
	lost := q.count(t, "it is killed", "remote-1", 2000)
	var first, last time.Duration
	for i, sent := range lost {
		if since := sent.Sub(killed); i == 0 || since < first {
			first = since
		} else {
			last = max(last, since)
		}
	}
	t.Logf("lost are queries from %v to %v after it was killed", first, last)
	if last > 2*time.Second {
		t.Errorf("a query that was sent %v after the cache was killed is lost", last)
	}
	follows("remote-1")
	if r := n.Node2.Dial(snapshot.UDP, n.dns, lab.Options{}); r.Endpoint != "remote-2" {
		t.Errorf("the other node: %v", r)
	}
	if t.Failed() {
		t.Log(strings.Join([]string{n.logs[0].String(), n.logs[1].String()}, "\n"))
	}
}
