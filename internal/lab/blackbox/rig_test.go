package blackbox

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// rig is a node between a client outside and pods, with rules of the test's own, and a recorder.
type rig struct {
	*lab.Cluster
	t      *testing.T
	box    *Box
	client *lab.Host
	vip    netip.AddrPort
	pod    *lab.Host
}

const (
	servicePort = 80
	podPort     = 8080
)

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 1}), t: t,
		vip: netip.AddrPortFrom(lab.Nth(lab.ServiceRange[0], 10), servicePort)}
	r.client, r.pod = r.Outside, r.Pods[0]
	r.box = New(Config{Dir: t.TempDir()})
	t.Cleanup(func() { labtest.Check(t, r.box.Close()) })
	return r
}

// watch records in the client's host, the node and the pods.
func (r *rig) watch(hosts ...*lab.Host) {
	r.t.Helper()
	if len(hosts) == 0 {
		hosts = []*lab.Host{r.Outside, r.Node, r.Pods[0], r.Pods[1]}
	}
	labtest.Check(r.t, r.box.Watch(hosts...))
}

// service tells the recorder of the Service with the pods that are ready, as it was from the beginning.
func (r *rig) service(ready ...*lab.Host) {
	r.box.Service(Service{Name: "default/web", Addresses: []netip.Addr{r.vip.Addr()},
		Ports: []ServicePort{{Port: servicePort, NodePort: 30080}}})
	r.slice(ready...)
	r.box.Listed()
}

func (r *rig) slice(ready ...*lab.Host) {
	s := Slice{Name: "default/web-1", Service: "default/web"}
	for _, h := range ready {
		s.Endpoints = append(s.Endpoints, Endpoint{Addr: h.IP4, Ports: []uint16{podPort}, Ready: true})
	}
	r.box.Slice(s)
}

// rules loads chains into a host. They hook connection tracking in.
func (r *rig) rules(h *lab.Host, chains ...string) {
	r.t.Helper()
	labtest.Run(r.t, h, fmt.Sprintf("table ip blackbox\ndelete table ip blackbox\ntable ip blackbox {\n%s\n}\n",
		strings.Join(chains, "\n")), "nft", "-f", "-")
}

// translate sends the Service to a pod.
func (r *rig) translate(to *lab.Host) string {
	return fmt.Sprintf("chain services { type nat hook prerouting priority dstnat; "+
		"ip daddr %v tcp dport %d dnat to %v:%d; }", r.vip.Addr(), servicePort, to.IP4, podPort)
}

func chain(hook, rule string) string {
	return fmt.Sprintf("chain %s { type filter hook %s priority 0; %s; }", hook, hook, rule)
}

func (r *rig) serve(h *lab.Host) *lab.Server {
	r.t.Helper()
	s, err := h.Serve(snapshot.TCP, podPort)
	labtest.Check(r.t, err)
	return s
}

// fail opens a connection, which must fail.
func (r *rig) fail(patience time.Duration) Failure { return r.failTo(r.vip, patience) }

func (r *rig) failTo(to netip.AddrPort, patience time.Duration) Failure {
	r.t.Helper()
	began := time.Now()
	got := r.client.Dial(snapshot.TCP, to, lab.Options{Timeout: patience})
	if got.Outcome == lab.Answered {
		r.t.Fatalf("the connection was answered: %v", got)
	}
	return Failure{From: r.client.Name, Client: got.Client, Server: to, Began: began, Failed: time.Now(),
		Err: got.Err.Error()}
}

// hold opens a connection that is used until it breaks.
func (r *rig) hold(before func()) Failure {
	r.t.Helper()
	began := time.Now()
	c, got := r.client.Open(snapshot.TCP, r.vip, lab.Options{})
	if c == nil {
		r.t.Fatalf("the connection was not answered: %v", got)
	}
	defer c.Close()
	before()
	for got = c.Ping(time.Second); got.Outcome == lab.Answered; got = c.Ping(time.Second) {
		time.Sleep(10 * time.Millisecond)
	}
	return Failure{From: r.client.Name, Client: c.Local(), Server: r.vip, Began: began, Failed: time.Now(), Held: true,
		Err: got.Err.Error()}
}

// expect checks the cause of a failure, and words that its text must have.
func (r *rig) expect(f Failure, cause string, words ...string) {
	r.t.Helper()
	x := r.box.Explain(f)
	r.t.Logf("%v", &x)
	ok := x.Cause == cause
	for _, w := range words {
		ok = ok && strings.Contains(x.Text, w)
	}
	if !ok {
		records, _ := os.ReadFile(x.File)
		r.t.Errorf("the cause is %q, want %q with %q\n%s", x.Cause, cause, words, records)
	}
}
