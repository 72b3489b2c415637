package conntrack

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// proxied is a cluster with a proxy in its node, whose Cleaner looks when it is told to.
type proxied struct {
	*lab.Cluster
	t       *testing.T
	snap    *snapshot.Snapshot
	planner *dataplane.Planner
	cleaner *Cleaner
	backend reconcile.Writer
	// flows is for the test's own look at the table.
	flows *Conn
}

const (
	port     = 53
	nodePort = 30053
)

var served = []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}

func newProxied(t *testing.T) *proxied {
	t.Helper()
	c := labtest.NewCluster(t, lab.Config{LocalPods: 3, RemotePods: 1})
	for _, pod := range slices.Concat(c.Pods, c.RemotePods) {
		for _, p := range served {
			_, err := pod.Serve(p, 5353, 5454)
			labtest.Check(t, err)
		}
	}
	labtest.Check(t, c.Node.Sysctl("net/ipv4/conf/all/route_localnet", "1"))
	p := &proxied{Cluster: c, t: t, snap: snapshot.New()}
	p.restart(nil)
	p.flows = open(t, c.Node)
	addrs := []netip.Addr{c.Node.IP4, c.Node.IP6, netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	p.apply(snapshot.Delta{HostAddrs: &addrs, Node: &snapshot.Node{Name: "node", Addresses: addrs[:2]}})
	p.look()
	return p
}

// restart begins with a new proxy, which knows nothing yet. The kernel keeps what it has.
func (p *proxied) restart(looked func(SweepResult)) {
	p.t.Helper()
	var nft *kernel.Backend
	labtest.Check(p.t, p.Node.Do(func() (err error) {
		nft, err = kernel.Open(kernel.Options{})
		return err
	}))
	p.t.Cleanup(func() { nft.Close() })
	p.planner = dataplane.NewPlanner(dataplane.Config{NodeName: "node", LocalhostNodePorts: true,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}})
	p.cleaner = newCleaner(open(p.t, p.Node), looked)
	p.backend = behind(p.cleaner, nft)
}

func (p *proxied) apply(d snapshot.Delta) {
	p.t.Helper()
	change, conflicts := p.planner.Apply(p.snap, p.snap.Apply(d))
	if len(conflicts) > 0 {
		p.t.Fatal(conflicts)
	}
	_, err := p.backend.Apply(p.planner.State(), change)
	labtest.Check(p.t, err)
}

// look takes the turn that is due, and gives how many flows were removed.
func (p *proxied) look() int {
	p.t.Helper()
	l := lookNow(p.t, p.cleaner)
	return l.Flows[ipfamily.IPv4].Removed + l.Flows[ipfamily.IPv6].Removed
}

// end is an endpoint and its state: "" is ready, "draining" or "unready".
type end struct {
	host  *lab.Host
	state string
}

func ready(hosts ...*lab.Host) (out []end) {
	for _, h := range hosts {
		out = append(out, end{h, ""})
	}
	return out
}

// service is a Service with all addresses there are, and endpoints at a port.
func (p *proxied) service(change func(*snapshot.Service), target uint16, ends ...end) snapshot.Delta {
	svc := &snapshot.Service{Name: name("dns")}
	d := snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices:   map[snapshot.Name]*snapshot.Slice{},
	}
	for i, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		svc.ClusterIPs = append(svc.ClusterIPs, lab.Nth(lab.ServiceRange[i], 1))
		svc.ExternalIPs = append(svc.ExternalIPs, lab.Nth(lab.ExternalRange[i], 1))
		sl := &snapshot.Slice{Name: name(fmt.Sprintf("dns-%d", i)), Service: "dns"}
		for _, pr := range served {
			sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: pr.String(), Protocol: pr, Port: target})
		}
		for _, e := range ends {
			ep := snapshot.Endpoint{Addr: e.host.IP(f), Node: "node", Ready: e.state == "", Serving: e.state != "unready",
				Terminating: e.state == "draining"}
			if strings.HasPrefix(e.host.Name, "remote") {
				ep.Node = "node2"
			}
			sl.Endpoints = append(sl.Endpoints, ep)
		}
		d.Slices[sl.Name] = sl
	}
	for _, pr := range served {
		svc.Ports = append(svc.Ports, snapshot.Port{Name: pr.String(), Protocol: pr, Port: port, NodePort: nodePort})
	}
	if change != nil {
		change(svc)
	}
	return d
}

// client is who sends where.
type client struct {
	name string
	from *lab.Host
	to   netip.AddrPort
}

// clients gives every kind of client to every kind of frontend.
func (p *proxied) clients() (out []client) {
	for i, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		cluster := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[i], 1), port)
		external := netip.AddrPortFrom(lab.Nth(lab.ExternalRange[i], 1), port)
		node := netip.AddrPortFrom(p.Node.IP(f), nodePort)
		out = append(out, client{"pod to cluster IP", p.Pods[2], cluster}, client{"node to cluster IP", p.Node, cluster},
			client{"pod to external IP", p.Pods[2], external}, client{"outside to external IP", p.Outside, external},
			client{"outside to node port", p.Outside, node}, client{"node to its node port", p.Node, node})
	}
	return append(
		out,
		client{"node to localhost node port", p.Node, netip.MustParseAddrPort(fmt.Sprintf("127.0.0.1:%d", nodePort))},
	)
}

// held opens a flow of each client, and gives those that get an answer.
func (p *proxied) held(proto snapshot.Protocol) map[client]*lab.Conn {
	p.t.Helper()
	out := map[client]*lab.Conn{}
	for _, cl := range p.clients() {
		conn, r := cl.from.Open(proto, cl.to, lab.Options{Timeout: 20 * time.Second})
		if conn == nil {
			p.t.Fatalf("%s %v: %v", cl.name, cl.to, r)
		}
		out[cl] = conn
	}
	return out
}

// expect has each flow send again, and be answered by one of some endpoints.
func (p *proxied) expect(flows map[client]*lab.Conn, hosts ...*lab.Host) {
	p.t.Helper()
	for cl, conn := range flows {
		r := conn.Ping(20 * time.Second)
		if !slices.ContainsFunc(hosts, func(h *lab.Host) bool { return r.Endpoint == h.Name }) {
			p.t.Errorf("%s %v: %v", cl.name, cl.to, r)
		}
	}
}

// TestEndpointGone: open flows continue with another endpoint, but only after a sweep. A TCP connection to the removed
// endpoint is untouched.
func TestEndpointGone(t *testing.T) {
	p := newProxied(t)
	p.apply(p.service(nil, 5353, ready(p.Pods[0])...))
	udp, tcp := p.held(snapshot.UDP), p.held(snapshot.TCP)
	p.apply(p.service(nil, 5353, ready(p.Pods[1])...))
	p.expect(udp, p.Pods[0]) // black holes, were the pod really gone
	if n := p.look(); n != len(udp) {
		t.Errorf("removed %d flows; want %d", n, len(udp))
	}
	p.expect(udp, p.Pods[1])
	p.expect(tcp, p.Pods[0])
	if n := p.look(); n != 0 {
		t.Errorf("removed %d more", n)
	}
}

// TestTargetPort: the endpoints stay, but their port changes.
func TestTargetPort(t *testing.T) {
	p := newProxied(t)
	p.apply(p.service(nil, 5353, ready(p.Pods[0])...))
	udp := p.held(snapshot.UDP)
	p.apply(p.service(nil, 5454, ready(p.Pods[0])...))
	if n := p.look(); n != len(udp) {
		t.Errorf("removed %d flows; want %d", n, len(udp))
	}
	for cl, conn := range udp {
		if r := conn.Ping(20 * time.Second); r.Destination.Port() != 5454 {
			t.Errorf("%s: %v", cl.name, r)
		}
	}
}

// TestScaleToZero: the next datagram is rejected, and answered once there are endpoints again.
func TestScaleToZero(t *testing.T) {
	p := newProxied(t)
	p.apply(p.service(nil, 5353, ready(p.Pods[0])...))
	udp := p.held(snapshot.UDP)
	p.apply(p.service(nil, 5353))
	if n := p.look(); n != len(udp) {
		t.Errorf("removed %d flows; want %d", n, len(udp))
	}
	for cl, conn := range udp {
		if r := conn.Ping(20 * time.Second); r.Outcome != lab.Refused {
			t.Errorf("%s: %v", cl.name, r)
		}
	}
	p.apply(p.service(nil, 5353, ready(p.Pods[1])...))
	p.look()
	p.expect(udp, p.Pods[1])
}

// TestServiceGone: flows to a removed frontend end.
func TestServiceGone(t *testing.T) {
	p := newProxied(t)
	p.apply(p.service(nil, 5353, ready(p.Pods[0])...))
	udp := p.held(snapshot.UDP)
	p.apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("dns"): nil}})
	if n := p.look(); n != len(udp) {
		t.Errorf("removed %d flows; want %d", n, len(udp))
	}
	for cl, conn := range udp {
		if r := conn.Ping(300 * time.Millisecond); r.Outcome == lab.Answered {
			t.Errorf("%s: %v", cl.name, r)
		}
	}
}

// TestBeforeTheFirst: a client that sends before the Service exists gets no answer until the Service has endpoints.
func TestBeforeTheFirst(t *testing.T) {
	t.Parallel()
	p := newProxied(t)
	for i, cl := range p.clients() {
		if cl.from == p.Node && cl.to.Addr() == p.Node.IP(ipfamily.Of(cl.to.Addr())) || cl.to.Addr().IsLoopback() {
			continue // refused by the node itself, at a port that nobody listens at
		}
		from := netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(20000+i))
		if cl.to.Addr().Is6() {
			from = netip.AddrPortFrom(netip.IPv6Unspecified(), from.Port())
		}
		dial := func(timeout time.Duration) lab.Result {
			return cl.from.Dial(snapshot.UDP, cl.to, lab.Options{From: from, Timeout: timeout})
		}
		p.apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("dns"): nil}})
		p.look()
		if r := dial(200 * time.Millisecond); r.Outcome == lab.Answered {
			t.Fatalf("%s: %v", cl.name, r)
		}
		p.apply(p.service(nil, 5353, ready(p.Pods[0])...))
		if r := dial(200 * time.Millisecond); r.Outcome == lab.Answered && cl.from != p.Outside {
			t.Errorf("%s: %v before the look", cl.name, r)
		}
		p.look()
		if r := dial(20 * time.Second); r.Endpoint != p.Pods[0].Name {
			t.Errorf("%s: %v after the look", cl.name, r)
		}
	}
}

// TestBeforeTheFirstTCP: a client's first SYN comes before the Service exists. The next ones from the same port are
// lost until the look, and then answered.
func TestBeforeTheFirstTCP(t *testing.T) {
	t.Parallel()
	p := newProxied(t)
	lost := 0
	for i, cl := range p.clients() {
		from := netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(20000+i))
		if cl.to.Addr().Is6() {
			from = netip.AddrPortFrom(netip.IPv6Unspecified(), from.Port())
		}
		dial := func(timeout time.Duration) lab.Result {
			return cl.from.Dial(snapshot.TCP, cl.to, lab.Options{From: from, Timeout: timeout})
		}
		p.apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("dns"): nil}})
		p.look()
		r := dial(200 * time.Millisecond)
		if r.Outcome == lab.Answered {
			t.Fatalf("%s: %v", cl.name, r)
		}
		if r.Outcome != lab.TimedOut {
			continue // refused: no flow is left of it
		}
		p.apply(p.service(nil, 5353, ready(p.Pods[0])...))
		if r := dial(200 * time.Millisecond); r.Outcome == lab.Answered {
			continue
		}
		lost++
		p.look()
		if r := dial(20 * time.Second); r.Endpoint != p.Pods[0].Name {
			t.Errorf("%s: %v after the look", cl.name, r)
		}
	}
	if lost == 0 {
		t.Error("no client had sent its SYN too early")
	}
}

// TestRightFlowsStay: draining endpoints, policies, more endpoints and a restart do not change any flow.
func TestRightFlowsStay(t *testing.T) {
	p := newProxied(t)
	first := append(ready(p.Pods[0], p.RemotePods[0]), end{p.Pods[1], "unready"})
	p.apply(p.service(nil, 5353, first...))
	p.held(snapshot.UDP)
	p.held(snapshot.UDP)
	p.held(snapshot.UDP)
	p.look()
	before := listAll(t, p.flows)
	local := func(s *snapshot.Service) { s.ExternalLocal, s.InternalLocal = true, true }
	draining := []end{{p.Pods[0], "draining"}, {p.RemotePods[0], ""}, {p.Pods[1], ""}}
	for _, step := range []struct {
		what string
		snapshot.Delta
	}{
		{"policies Local", p.service(local, 5353, first...)},
		{"an endpoint more", p.service(local, 5353, ready(p.Pods[0], p.RemotePods[0], p.Pods[1])...)},
		{"one drains", p.service(local, 5353, draining...)},
		{"affinity", p.service(func(s *snapshot.Service) { s.Affinity = time.Hour }, 5353, draining...)},
		{"another Service", snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("other"): {
			Name: name("other"), ClusterIPs: []netip.Addr{lab.Nth(lab.ServiceRange[0], 2)},
			Ports: []snapshot.Port{{Protocol: snapshot.UDP, Port: port}},
		}}}},
	} {
		p.apply(step.Delta)
		n := p.look()
		if gone := removed(t, before, listAll(t, p.flows)); n != 0 || len(gone) != 0 {
			t.Fatalf("%s: removed %d: %q", step.what, n, gone)
		}
	}
	p.restart(nil)
	p.apply(snapshot.Delta{})
	n := p.look()
	if gone := removed(t, before, listAll(t, p.flows)); n != 0 || len(gone) != 0 {
		t.Fatalf("restart: removed %d: %q", n, gone)
	}
	// When it is drained, its flows go, and only they: it was in no pool any more.
	p.apply(p.service(nil, 5353, draining[1:]...))
	p.look()
	want := func(f string) bool {
		return strings.Contains(f, "/udp") && strings.Contains(f, "-> "+p.Pods[0].IP4.String()+":") ||
			strings.Contains(f, "/udp") && strings.Contains(f, "-> ["+p.Pods[0].IP6.String()+"]")
	}
	gone := removed(t, before, listAll(t, p.flows))
	for f := range maps.Keys(before) {
		if want(f) != slices.Contains(gone, f) {
			t.Errorf("%s: removed is %v", f, !want(f))
		}
	}
	if len(gone) == 0 {
		t.Error("nobody had the endpoint that is gone")
	}
}

// TestRestart: an endpoint is removed while no proxy runs.
func TestRestart(t *testing.T) {
	p := newProxied(t)
	p.apply(p.service(nil, 5353, ready(p.Pods[0])...))
	udp := p.held(snapshot.UDP)
	p.restart(nil)
	p.snap.Apply(p.service(nil, 5353, ready(p.Pods[1])...))
	p.apply(snapshot.Delta{})
	if n := p.look(); n != len(udp) {
		t.Errorf("removed %d flows; want %d", n, len(udp))
	}
	p.expect(udp, p.Pods[1])
}

// TestExternalLocal: the endpoint on this node leaves; clients from outside are dropped then, and pods are served
// elsewhere.
func TestExternalLocal(t *testing.T) {
	p := newProxied(t)
	local := func(s *snapshot.Service) { s.ExternalLocal = true }
	p.apply(p.service(local, 5353, ready(p.Pods[0])...))
	udp := p.held(snapshot.UDP)
	p.apply(p.service(local, 5353, ready(p.RemotePods[0])...))
	p.look()
	for cl, conn := range udp {
		want, timeout := lab.Answered, 3*time.Second
		if cl.from == p.Outside {
			want, timeout = lab.TimedOut, 300*time.Millisecond
		}
		if r := conn.Ping(timeout); r.Outcome != want {
			t.Errorf("%s: %v", cl.name, r)
		}
	}
	p.apply(p.service(local, 5353, ready(p.Pods[1], p.RemotePods[0])...))
	p.look()
	p.expect(udp, p.Pods[1], p.RemotePods[0])
}

// TestSCTP: an association cannot move to another endpoint, but a client that starts again from the same port must not
// use the old flow.
func TestSCTP(t *testing.T) {
	p := newProxied(t)
	for i, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		p.apply(p.service(nil, 5353, ready(p.Pods[0])...))
		p.look()
		to := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[i], 1), port)
		o := lab.Options{From: netip.AddrPortFrom(netip.Addr{}, 21000), Timeout: 3 * time.Second}
		if r := p.Pods[2].Dial(snapshot.SCTP, to, o); r.Endpoint != p.Pods[0].Name {
			t.Fatalf("%v: %v", f, r)
		}
		p.apply(p.service(nil, 5353, ready(p.Pods[1])...))
		if n := p.look(); n != 1 {
			t.Errorf("%v: removed %d", f, n)
		}
		if r := p.Pods[2].Dial(snapshot.SCTP, to, o); r.Endpoint != p.Pods[1].Name {
			t.Errorf("%v: %v", f, r)
		}
	}
}

// TestRun runs the Cleaner in real time, with clients that never stop sending while endpoints come and go.
func TestRun(t *testing.T) {
	t.Parallel()
	p := newProxied(t)
	told := make(chan SweepResult, 100)
	p.restart(func(l SweepResult) { told <- l })
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- p.cleaner.walker.Run(ctx) }()
	p.apply(p.service(nil, 5353, ready(p.Pods[0])...))
	udp := p.held(snapshot.UDP)
	for i := range 6 {
		now := p.Pods[(i+1)%2]
		p.apply(p.service(nil, 5353, ready(now)...))
		start := time.Now()
		for cl, conn := range udp {
			// What is on its way when its flow is removed is lost.
			r := conn.Ping(200 * time.Millisecond)
			for ; r.Endpoint != now.Name && time.Since(start) < time.Minute; r = conn.Ping(200 * time.Millisecond) {
			}
			if r.Endpoint != now.Name {
				t.Fatalf("%s: %v", cl.name, r)
			}
		}
		t.Logf("all with %s after %v", now.Name, time.Since(start).Round(time.Millisecond))
	}
	cancel()
	labtest.Check(t, <-done)
	for len(told) > 0 {
		if l := <-told; l.Err != nil {
			t.Errorf("%+v", l)
		}
	}
}
