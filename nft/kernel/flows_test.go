package kernel

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The flows are the specification: every source, to every kind of frontend, under every policy and state of
// endpoints, with real packets. What must happen is worked out here once more, from the sentences of kube-proxy's
// contract and not from our tables of routes.

// states of the endpoints of a Service: each endpoint is a pod with conditions.
type condition string

const (
	ready       condition = "ready"
	unready     condition = "not ready"
	terminating condition = "serving and terminating"
	gone        condition = "terminating, not serving"
)

type endpointState struct {
	name string
	// here are the conditions of endpoints on this node, there of those on the other.
	here, there []condition
}

var endpointStates = []endpointState{
	{"none", nil, nil},
	{"here", []condition{ready}, nil},
	{"there", nil, []condition{ready}},
	{"both", []condition{ready}, []condition{ready}},
	{"not ready", []condition{unready, gone}, []condition{unready}},
	{"all terminating", []condition{terminating}, []condition{terminating}},
	{"terminating here, ready there", []condition{terminating}, []condition{ready}},
	{"ready here, terminating there", []condition{ready}, []condition{terminating}},
	{"terminating there", []condition{unready}, []condition{terminating}},
}

// flowService is one Service of the matrix.
type flowService struct {
	number                       int
	state                        endpointState
	internalLocal, externalLocal bool
}

func (s flowService) name() snapshot.Name {
	return snapshot.Name{Namespace: "flows", Name: fmt.Sprintf("s%d", s.number)}
}

func (s flowService) String() string {
	return fmt.Sprintf("endpoints %s, internal local %v, external local %v", s.state.name, s.internalLocal,
		s.externalLocal)
}

func flowServices() []flowService {
	var out []flowService
	for _, st := range endpointStates {
		for policy := range 4 {
			out = append(out, flowService{len(out) + 1, st, policy&1 != 0, policy&2 != 0})
		}
	}
	return out
}

var flowProtocols = []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}

const (
	servicePort = 80
	targetPort  = 8080
	nodePorts   = 30000
)

// delta returns the Service object and its slices. Endpoints on this node are the first pods, on the other the first
// remote ones.
func (s flowService) delta(c *lab.Cluster) snapshot.Delta {
	svc := &snapshot.Service{
		Name: s.name(), InternalLocal: s.internalLocal, ExternalLocal: s.externalLocal,
	}
	for i := range lab.ServiceRange {
		svc.ClusterIPs = append(svc.ClusterIPs, lab.Nth(lab.ServiceRange[i], s.number))
		svc.LoadBalancerIPs = append(svc.LoadBalancerIPs, lab.Nth(lab.ExternalRange[i], s.number))
		svc.ExternalIPs = append(svc.ExternalIPs, lab.Nth(lab.ExternalRange[i], 100+s.number))
		if s.number%2 == 0 { // more frontends than have the class of their pool themselves
			svc.ExternalIPs = append(svc.ExternalIPs, lab.Nth(lab.ExternalRange[i], 200+s.number))
		}
	}
	d := snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices:   map[snapshot.Name]*snapshot.Slice{},
	}
	slices := [2]*snapshot.Slice{}
	for i := range slices {
		n := snapshot.Name{Namespace: svc.Name.Namespace, Name: fmt.Sprintf("%s-%d", svc.Name.Name, i)}
		slices[i] = &snapshot.Slice{Name: n, Service: svc.Name.Name}
		d.Slices[n] = slices[i]
	}
	for _, p := range flowProtocols {
		svc.Ports = append(svc.Ports,
			snapshot.Port{Name: p.String(), Protocol: p, Port: servicePort, NodePort: nodePorts + uint16(s.number)})
		for _, sl := range slices {
			sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: p.String(), Protocol: p, Port: targetPort})
		}
	}
	add := func(pods []*lab.Host, conditions []condition, node string) {
		for n, cond := range conditions {
			for i, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
				slices[i].Endpoints = append(slices[i].Endpoints, snapshot.Endpoint{
					Addr: pods[n].IP(f), Node: node, Ready: cond == ready,
					Serving: cond == ready || cond == terminating, Terminating: cond == terminating || cond == gone,
				})
			}
		}
	}
	add(c.Pods, s.state.here, "node")
	add(c.RemotePods, s.state.there, "node2")
	return d
}

// usable gives the names of the endpoints that may answer: the ready ones, or if there are none the terminating ones
// that serve.
func (s flowService) usable(c *lab.Cluster, localOnly bool) []string {
	for _, want := range []condition{ready, terminating} {
		var names []string
		for n, cond := range s.state.here {
			if cond == want {
				names = append(names, c.Pods[n].Name)
			}
		}
		for n, cond := range s.state.there {
			if cond == want && !localOnly {
				names = append(names, c.RemotePods[n].Name)
			}
		}
		if names != nil {
			return names
		}
	}
	return nil
}

// origin is who sends.
type origin struct {
	name string
	host *lab.Host
	// pod says that the sender's address is a pod's; node that it is this node.
	pod, node bool
}

func origins(c *lab.Cluster) []origin {
	return []origin{
		{name: "pod here", host: c.Pods[len(c.Pods)-1], pod: true},
		{name: "pod elsewhere", host: c.RemotePods[len(c.RemotePods)-1], pod: true},
		{name: "this node", host: c.Node, node: true},
		{name: "other node", host: c.Node2},
		{name: "outside", host: c.Outside},
		{name: "the endpoint itself", host: c.Pods[0], pod: true},
	}
}

// detector is what the proxy was told about pods.
type detector struct {
	name    string
	cfg     dataplane.DetectLocal
	cluster lab.Config
	all     bool
	// knows says whether a sender counts as a pod.
	knows func(o origin) bool
}

var clusterCIDR = dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}

func detectors() []detector {
	here := func(o origin) bool { return o.name == "pod here" || o.name == "the endpoint itself" }
	pod := func(o origin) bool { return o.pod }
	nobody := func(origin) bool { return false }
	nodeCIDR := dataplane.DetectLocal{Mode: dataplane.DetectNodeCIDR}
	byBridge := dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"}
	byPrefix := func(p string) dataplane.DetectLocal {
		return dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: p}
	}
	// What is translated between two pods of a bridge stays there, if the bridge shows it to netfilter.
	bridge := lab.Config{PodBridge: "cni0"}
	return []detector{
		{name: "ClusterCIDR", cfg: clusterCIDR, knows: pod},
		{name: "ClusterCIDR on a bridge", cfg: clusterCIDR, cluster: bridge, knows: pod},
		{name: "unknown", knows: nobody},
		{name: "unknown on a bridge", cluster: bridge, knows: nobody},
		{name: "masquerade all", cfg: clusterCIDR, all: true, knows: pod},
		{name: "masquerade all on a bridge", cfg: clusterCIDR, cluster: bridge, all: true, knows: pod},
		{name: "NodeCIDR", cfg: nodeCIDR, knows: here},
		{name: "NodeCIDR on a bridge", cfg: nodeCIDR, cluster: bridge, knows: here},
		{name: "BridgeInterface", cfg: byBridge, cluster: bridge, knows: here},
		{name: "BridgeInterface on a plain bridge", cfg: byBridge,
			cluster: lab.Config{PodBridge: "cni0", PlainBridge: true}, knows: here},
		{name: "BridgeInterface of another bridge", cfg: byBridge, cluster: lab.Config{PodBridge: "br1"}, knows: nobody},
		{name: "InterfaceNamePrefix", cfg: byPrefix("pod"), cluster: lab.Config{PodLinkPrefix: "pod"}, knows: here},
		{name: "InterfaceNamePrefix on a bridge", cfg: byPrefix("cni"), cluster: bridge, knows: here},
		{name: "InterfaceNamePrefix of the bridge's ports", cfg: byPrefix("veth"), cluster: bridge, knows: nobody},
	}
}

// expectation is what must happen to a flow.
type expectation struct {
	outcome lab.Outcome
	// by are the endpoints of which one must answer.
	by []string
	// masqueraded says that the endpoint must see this node's address; else it sees the sender's. An endpoint that reaches
	// itself always sees the node's.
	masqueraded bool
}

// expect works out a flow from the contract.
func expect(c *lab.Cluster, d detector, s flowService, kind dataplane.Kind, o origin) expectation {
	isPod := d.knows(o)
	known := d.cfg.Mode != dataplane.DetectClusterCIDR || d.cfg.ClusterCIDRs != nil
	e := expectation{}
	localOnly := false
	switch {
	case kind == dataplane.ClusterIP:
		localOnly = s.internalLocal
		e.masqueraded = d.all || known && !isPod
	case !s.externalLocal:
		e.masqueraded = true
	case isPod:
	case o.node:
		e.masqueraded = true
	default:
		localOnly = true
	}
	e.by = s.usable(c, localOnly)
	switch {
	case len(e.by) > 0:
		e.outcome = lab.Answered
	case localOnly && len(s.usable(c, false)) > 0:
		e.outcome = lab.TimedOut
	default:
		e.outcome = lab.Refused
	}
	return e
}

func (e expectation) check(c *lab.Cluster, o origin, f ipfamily.Family, r lab.Result) error {
	if r.Outcome != e.outcome {
		return fmt.Errorf("%v; want %v by %v", r, e.outcome, e.by)
	}
	if e.outcome != lab.Answered {
		return nil
	}
	if !slices.Contains(e.by, r.Endpoint) {
		return fmt.Errorf("%v; want one of %v", r, e.by)
	}
	masqueraded := e.masqueraded || r.Endpoint == o.host.Name
	switch source := r.Source.Addr(); {
	case masqueraded && !slices.Contains(nodeAddrs(c), source):
		return fmt.Errorf("%v; want an address of the node", r)
	case !masqueraded && source != o.host.IP(f) && !(o.node && slices.Contains(nodeAddrs(c), source)):
		return fmt.Errorf("%v; want the sender's own address %v", r, o.host.IP(f))
	}
	return nil
}

// nodeAddrs are the addresses a masqueraded packet can have.
func nodeAddrs(c *lab.Cluster) []netip.Addr {
	out := []netip.Addr{c.Node.IP(ipfamily.IPv4), c.Node.IP(ipfamily.IPv6)}
	for _, r := range lab.NodePodRange {
		out = append(out, lab.Nth(r, 1))
	}
	return out
}

// proxied builds a cluster with a backend in its node, and servers in every pod.
func proxied(t testing.TB, conf lab.Config) (*lab.Cluster, *Backend) {
	t.Helper()
	c := labtest.NewCluster(t, conf)
	for _, pod := range slices.Concat(c.Pods, c.RemotePods) {
		for _, p := range flowProtocols {
			_, err := pod.Serve(p, targetPort)
			labtest.Check(t, err)
		}
	}
	return c, open(t, c.Node, Options{})
}

// facts are what a proxy on the cluster's node knows of it.
func facts(c *lab.Cluster) snapshot.Delta {
	addrs := append(nodeAddrs(c), netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	slices.SortFunc(addrs, netip.Addr.Compare)
	cidrs := slices.Clone(lab.ServiceRange)
	return snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &cidrs, Node: &snapshot.Node{Name: "node",
		Addresses: []netip.Addr{c.Node.IP(ipfamily.IPv4), c.Node.IP(ipfamily.IPv6)}, PodCIDRs: lab.NodePodRange}}
}

// frontendOf gives where a Service is reached at.
func (s flowService) frontendOf(c *lab.Cluster, kind dataplane.Kind, f ipfamily.Family) netip.AddrPort {
	i := 0
	if f == ipfamily.IPv6 {
		i = 1
	}
	switch kind {
	case dataplane.ClusterIP:
		return netip.AddrPortFrom(lab.Nth(lab.ServiceRange[i], s.number), servicePort)
	case dataplane.LoadBalancerIP:
		return netip.AddrPortFrom(lab.Nth(lab.ExternalRange[i], s.number), servicePort)
	case dataplane.ExternalIP:
		return netip.AddrPortFrom(lab.Nth(lab.ExternalRange[i], 100+s.number), servicePort)
	}
	return netip.AddrPortFrom(c.Node.IP(f), nodePorts+uint16(s.number))
}

var kinds = []dataplane.Kind{dataplane.ClusterIP, dataplane.LoadBalancerIP, dataplane.ExternalIP, dataplane.NodePort}

// TestFlows sends every flow of the matrix, once for each way to tell pods from others.
func TestFlows(t *testing.T) {
	for _, d := range detectors() {
		t.Run(d.name, func(t *testing.T) {
			services := flowServices()
			d.cluster.LocalPods, d.cluster.RemotePods = 3, 3
			c, b := proxied(t, d.cluster)
			snap := snapshot.New()
			delta := facts(c)
			for _, s := range services {
				delta.Merge(s.delta(c))
			}
			snap.Apply(delta)
			st, conflicts := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: d.cfg, MasqueradeAll: d.all},
				snap)
			if conflicts != nil {
				t.Fatal(conflicts)
			}
			apply(t, b, st)
			sendFlows(t, c, d, services)
		})
	}
}

func sendFlows(t *testing.T, c *lab.Cluster, d detector, services []flowService) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, 128)
	count := map[lab.Outcome]int{}
	var mu sync.Mutex
	for _, s := range services {
		for _, o := range origins(c) {
			for _, kind := range kinds {
				e := expect(c, d, s, kind, o)
				for _, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
					for _, p := range flowProtocols {
						count[e.outcome]++
						slots <- struct{}{}
						wg.Go(func() {
							defer func() { <-slots }()
							r := dialAsExpected(o.host, p, s.frontendOf(c, kind, f), e.outcome)
							if err := e.check(c, o, f, r); err != nil {
								mu.Lock()
								defer mu.Unlock()
								t.Errorf("%s: %s -> %s (%s, %s): %v", s, o.name, kind, f, p, err)
							}
						})
					}
				}
			}
		}
	}
	wg.Wait()
	t.Logf("%d flows answered, %d refused, %d dropped", count[lab.Answered], count[lab.Refused], count[lab.TimedOut])
	if count[lab.Answered] == 0 || count[lab.Refused] == 0 || count[lab.TimedOut] == 0 {
		t.Error("the matrix does not hold every outcome")
	}
}

// dialAsExpected waits long for an answer that should come, and tries once more: these are many packets at a time on
// a small machine. It does not wait long for one that should not come.
func dialAsExpected(from *lab.Host, p snapshot.Protocol, to netip.AddrPort, want lab.Outcome) lab.Result {
	if want == lab.TimedOut {
		return from.Dial(p, to, lab.Options{Timeout: 300 * time.Millisecond})
	}
	r := from.Dial(p, to, lab.Options{Timeout: 3 * time.Second})
	if r.Outcome == lab.TimedOut {
		r = from.Dial(p, to, lab.Options{Timeout: 3 * time.Second})
	}
	return r
}

// one gives a cluster with one Service in it, made from the matrix's by a change.
func one(
	t *testing.T,
	state endpointState,
	change func(*snapshot.Service),
) (*lab.Cluster, *Backend, flowService, *dataplane.State) {
	t.Helper()
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
	s := flowService{number: 1, state: state}
	st := oneState(c, s, change)
	apply(t, b, st)
	return c, b, s, st
}

func oneState(c *lab.Cluster, s flowService, change func(*snapshot.Service)) *dataplane.State {
	snap := snapshot.New()
	d := s.delta(c)
	change(d.Services[s.name()])
	snap.Apply(facts(c))
	snap.Apply(d)
	st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR, LocalhostNodePorts: true},
		snap)
	return st
}

func asIs(*snapshot.Service) {}

var both = endpointState{"both", []condition{ready, ready}, []condition{ready}}

// TestBalance opens many connections: each endpoint gets its share, and the counters in the elements tell the same.
func TestBalance(t *testing.T) {
	c, b, s, _ := one(t, both, asIs)
	const n = 900
	got := map[string]int{}
	for range n {
		r := c.Pods[2].Dial(snapshot.TCP, s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4),
			lab.Options{Timeout: 3 * time.Second})
		got[r.Endpoint]++
	}
	counted := map[string]uint64{}
	pool := ""
	for _, l := range elementTexts(t, b) {
		if strings.HasPrefix(l, "services 10.96.0.1 . tcp") {
			_, pool, _ = strings.Cut(l, " : ")
		}
	}
	for _, l := range elementTexts(t, b) {
		var key string
		var packets, bytes uint64
		if k, rest, ok := strings.Cut(l, " counter "); ok {
			key, _ = k, rest
			fmt.Sscanf(rest, "packets %d bytes %d", &packets, &bytes)
			_, target, _ := strings.Cut(rest, " : ")
			if strings.HasPrefix(key, "endpoints "+pool+" . tcp") {
				counted[strings.ReplaceAll(target, " . ", ":")] = packets
			}
			if strings.HasPrefix(key, "services 10.96.0.1 . tcp") && packets != n {
				t.Errorf("the frontend counted %d connections; want %d", packets, n)
			}
		}
	}
	for _, pod := range []*lab.Host{c.Pods[0], c.Pods[1], c.RemotePods[0]} {
		// The standard deviation is 14: 100 away is 7 of them.
		if k := got[pod.Name]; k < n/3-100 || k > n/3+100 {
			t.Errorf("%s answered %d of %d", pod.Name, k, n)
		}
		at := netip.AddrPortFrom(pod.IP(ipfamily.IPv4), targetPort).String()
		if counted[at] != uint64(got[pod.Name]) {
			t.Errorf("%s answered %d times, its element counted %d", pod.Name, got[pod.Name], counted[at])
		}
	}
}

// elementTexts gives "SET ELEMENT" for every element of the IPv4 table.
func elementTexts(t *testing.T, b *Backend) []string {
	t.Helper()
	l, err := b.List()
	labtest.Check(t, err)
	var out []string
	for i := range l[0].Table.Sets {
		set := &l[0].Table.Sets[i]
		for _, e := range l[0].Elements[set.ID] {
			out = append(out, set.Name()+" "+e.Text(l[0].Table.Family, set))
		}
	}
	return out
}

// TestUnusedPort refuses other ports of a cluster IP, whoever asks.
func TestUnusedPort(t *testing.T) {
	c, _, s, _ := one(t, both, asIs)
	for _, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		for _, o := range origins(c) {
			for _, p := range flowProtocols {
				unused := netip.AddrPortFrom(s.frontendOf(c, dataplane.ClusterIP, f).Addr(), 81)
				if r := dialAsExpected(o.host, p, unused, lab.Refused); r.Outcome != lab.Refused {
					t.Errorf("%s -> unused port (%s, %s): %v; want refused", o.name, f, p, r)
				}
			}
		}
	}
}

// TestUnallocated drops what is sent to a cluster IP that no Service has, as long as it lies in a service range.
// Somebody who has that address shows what would happen otherwise.
func TestUnallocated(t *testing.T) {
	c, b, _, st := one(t, both, asIs)
	_, err := c.Outside.Serve(snapshot.TCP, 80)
	labtest.Check(t, err)
	reach := func(want lab.Outcome) {
		t.Helper()
		for _, r := range lab.ServiceRange {
			nobody := lab.Nth(r, 77)
			for _, o := range []*lab.Host{c.Node, c.Pods[2], c.RemotePods[2]} {
				if r := dialAsExpected(o, snapshot.TCP, netip.AddrPortFrom(nobody, 80), want); r.Outcome != want {
					t.Errorf("%s -> %s: %v; want %v", o.Name, nobody, r, want)
				}
			}
		}
	}
	for _, r := range lab.ServiceRange {
		nobody := lab.Nth(r, 77)
		labtest.Check(t, c.Outside.AddAddr("lo", netip.PrefixFrom(nobody, nobody.BitLen())))
	}
	reach(lab.TimedOut)
	without := *st
	without.ServiceCIDRs = nil
	_, err = b.ApplyAll(&without, dataplane.Change{Globals: true})
	labtest.Check(t, err)
	reach(lab.Answered)
	_, err = b.ApplyAll(st, dataplane.Change{Globals: true})
	labtest.Check(t, err)
	reach(lab.TimedOut)
}

// TestSourceRanges says who may use a load balancer address with loadBalancerSourceRanges, and that nothing else is
// restricted.
func TestSourceRanges(t *testing.T) {
	outsideOnly := []netip.Prefix{lab.OutsideRange[0], lab.OutsideRange[1]}
	withNode := append(slices.Clone(outsideOnly), lab.NodeRange...)
	for _, c := range []struct {
		name    string
		sources []netip.Prefix
		allowed []string
	}{
		{"outside only", outsideOnly, []string{"outside"}},
		{"outside and nodes", withNode, []string{"outside", "this node", "other node"}},
		{"one family only", outsideOnly[:1], []string{"outside"}},
		{"nested", append([]netip.Prefix{netip.MustParsePrefix("198.51.100.0/26")}, outsideOnly...), []string{"outside"}},
		// What package watch makes of ranges it cannot read.
		{"nobody", []netip.Prefix{netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("::/128")}, []string{}},
		{"everybody", []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl, _, s, _ := one(t, both, func(svc *snapshot.Service) { svc.SourceRanges = c.sources })
			var wg sync.WaitGroup
			for _, o := range origins(cl) {
				for _, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
					for _, kind := range kinds {
						want := lab.Answered
						open := c.allowed == nil || c.name == "one family only" && f == ipfamily.IPv6
						if kind == dataplane.LoadBalancerIP && !open && !slices.Contains(c.allowed, o.name) {
							want = lab.TimedOut
						}
						wg.Go(func() {
							if r := dialAsExpected(o.host, snapshot.TCP, s.frontendOf(cl, kind, f), want); r.Outcome != want {
								t.Errorf("%s -> %s (%s): %v; want %v", o.name, kind, f, r, want)
							}
						})
					}
				}
			}
			wg.Wait()
		})
	}
}

// TestLocalhostNodePort reaches a node port at 127.0.0.1 from the node; nobody else reaches the loopback range.
func TestLocalhostNodePort(t *testing.T) {
	for _, external := range []bool{false, true} {
		c, _, s, _ := one(t, both, func(svc *snapshot.Service) { svc.ExternalLocal = external })
		labtest.Check(t, c.Node.Sysctl("net/ipv4/conf/all/route_localnet", "1"))
		local := func(port uint16) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)
		}
		for _, p := range flowProtocols {
			at := local(nodePorts + uint16(s.number))
			for range 6 {
				r := dialAsExpected(c.Node, p, at, lab.Answered)
				if r.Outcome != lab.Answered || !slices.Contains(nodeAddrs(c), r.Source.Addr()) {
					t.Errorf("external local %v: 127.0.0.1 (%s): %v; want an answer to the node's address", external, p, r)
				}
			}
		}
	}
}

// TestGuardLoopback lets a neighbour route the node's loopback range to it (CVE-2020-8558): with route_localnet,
// which node ports at 127.0.0.1 need, the kernel alone would let him in.
func TestGuardLoopback(t *testing.T) {
	c, b, _, st := one(t, both, asIs)
	_, err := c.Node.Serve(snapshot.TCP, 9999)
	labtest.Check(t, err)
	for _, h := range []*lab.Host{c.Node, c.Outside} {
		labtest.Check(t, h.Sysctl("net/ipv4/conf/all/route_localnet", "1"))
	}
	for _, args := range []string{
		"rule del pref 0", "rule add pref 1 lookup local", "rule add pref 0 to 127.0.0.9 lookup 9",
		"route add 127.0.0.9/32 via " + c.Node.IP(ipfamily.IPv4).String() + " dev eth0 onlink table 9",
	} {
		labtest.Run(t, c.Outside, "", "ip", strings.Fields(args)...)
	}
	attack := func() lab.Outcome {
		martian := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 9}), 9999)
		from := netip.AddrPortFrom(c.Outside.IP(ipfamily.IPv4), 0)
		return c.Outside.Dial(snapshot.TCP, martian, lab.Options{Timeout: 300 * time.Millisecond, From: from}).Outcome
	}
	if got := attack(); got != lab.TimedOut {
		t.Errorf("a neighbour's packet to the node's loopback was %v", got)
	}
	labtest.Check(t, b.Remove())
	if got := attack(); got != lab.Answered {
		t.Fatalf("the attack proves nothing: without the guard it was %v", got)
	}
	apply(t, b, st)
}

// TestAffinity follows a sticky client over all frontends, protocols and families, over the loss of its endpoint and of
// another, and over its timeout.
func TestAffinity(t *testing.T) {
	sticky := func(d time.Duration) func(*snapshot.Service) {
		return func(svc *snapshot.Service) { svc.Affinity = d }
	}
	c, b, s, _ := one(t, both, sticky(time.Hour))
	pods := map[string]int{c.Pods[0].Name: 0, c.Pods[1].Name: 1}
	for _, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		for _, p := range flowProtocols {
			for _, o := range origins(c) {
				first := ""
				for n := range 12 {
					kind := kinds[n%len(kinds)]
					r := dialAsExpected(o.host, p, s.frontendOf(c, kind, f), lab.Answered)
					if first == "" {
						first = r.Endpoint
					}
					if r.Endpoint != first || first == "" {
						t.Errorf("%s -> %s (%s, %s), dial %d: %v; first was %s", o.name, kind, f, p, n, r, first)
						break
					}
				}
			}
		}
	}
	kernelsBuckets(t, c, b, s)
	// Outside's first endpoint goes: outside moves once and stays, and whoever was elsewhere stays.
	stays := c.Pods[2].Dial(snapshot.TCP, s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4), lab.Options{}).Endpoint
	victim := 0
	if pods[stays] == 0 {
		victim = 1
	}
	reduced := s
	reduced.state = endpointState{"one less", []condition{ready, ready}, []condition{ready}}
	reduced.state.here[victim] = unready
	change := dataplane.Change{Services: []snapshot.Name{s.name()}}
	_, err := b.ApplyAll(oneState(c, reduced, sticky(time.Hour)), change)
	labtest.Check(t, err)
	quiet(t, b)
	for _, o := range origins(c) {
		at := s.frontendOf(c, dataplane.LoadBalancerIP, ipfamily.IPv4)
		r := dialAsExpected(o.host, snapshot.TCP, at, lab.Answered)
		if r.Endpoint == c.Pods[victim].Name {
			t.Errorf("%s: %v, which is gone", o.name, r)
		}
		if again := dialAsExpected(o.host, snapshot.TCP, at, lab.Answered); again.Endpoint != r.Endpoint {
			t.Errorf("%s: %v, then %v", o.name, r, again)
		}
	}
	at := s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4)
	if now := c.Pods[2].Dial(snapshot.TCP, at, lab.Options{}).Endpoint; now != stays {
		t.Errorf("the pod's endpoint was %s and stayed, but it moved to %s", stays, now)
	}
	// After the timeout a client is balanced anew: of 30 tries not all can hit the same of three.
	_, err = b.ApplyAll(oneState(c, s, sticky(time.Second)), change)
	labtest.Check(t, err)
	seen := map[string]bool{}
	for try := 0; try < 30 && len(seen) < 2; try++ {
		seen[c.Node2.Dial(snapshot.UDP, s.frontendOf(c, dataplane.NodePort, ipfamily.IPv6), lab.Options{}).Endpoint] = true
		time.Sleep(1200 * time.Millisecond) // the timeout is a second
	}
	if len(seen) < 2 {
		t.Errorf("after its timeout the client always came back to %v", seen)
	}
}

// TestAffinityHostNetwork binds clients to an endpoint that is the node itself: their packets are delivered here and
// never pass postrouting.
func TestAffinityHostNetwork(t *testing.T) {
	c, b, s, _ := one(t, both, asIs)
	for _, p := range flowProtocols {
		_, err := c.Node.Serve(p, targetPort)
		labtest.Check(t, err)
	}
	snap := snapshot.New()
	d := s.delta(c)
	d.Services[s.name()].Affinity = time.Hour
	for _, sl := range d.Slices {
		own := sl.Endpoints[0]
		own.Addr = c.Node.IP(ipfamily.Of(own.Addr))
		sl.Endpoints[0] = own
	}
	snap.Apply(facts(c))
	snap.Apply(d)
	st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR}, snap)
	_, err := b.ApplyAll(st, dataplane.Change{Services: []snapshot.Name{s.name()}})
	labtest.Check(t, err)
	answered := map[string]int{}
	for _, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		for _, p := range flowProtocols {
			for _, o := range origins(c) {
				at := s.frontendOf(c, dataplane.LoadBalancerIP, f)
				first := dialAsExpected(o.host, p, at, lab.Answered)
				answered[first.Endpoint]++
				for range 8 {
					if r := dialAsExpected(o.host, p, at, lab.Answered); r.Endpoint != first.Endpoint || r.Outcome != lab.Answered {
						t.Errorf("%s (%s, %s): %v, then %v", o.name, f, p, first, r)
						break
					}
				}
			}
		}
	}
	if answered["node"] == 0 {
		t.Errorf("the node never answered: %v", answered)
	}
}

// TestAffinityLocal keeps clients that are taken for outside on this node's endpoints when externalTrafficPolicy is
// Local, though the same client is bound to another endpoint by the cluster IP; and binds pods to one endpoint of
// all.
func TestAffinityLocal(t *testing.T) {
	for _, d := range detectors() {
		t.Run(d.name, func(t *testing.T) {
			d.cluster.LocalPods, d.cluster.RemotePods = 3, 3
			c, b := proxied(t, d.cluster)
			snap := snapshot.New()
			snap.Apply(facts(c))
			s := flowService{number: 1, state: both, externalLocal: true}
			delta := s.delta(c)
			delta.Services[s.name()].Affinity = time.Hour
			snap.Apply(delta)
			st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: d.cfg, MasqueradeAll: d.all}, snap)
			apply(t, b, st)
			for _, o := range origins(c) {
				if o.name == "outside" || o.name == "pod here" {
					bindLocally(t, c, s, o, !d.knows(o))
				}
			}
		})
	}
}

// bindLocally dials a sticky Service of policy Local by all its frontends. Somebody from outside has an endpoint of
// this node by all but the cluster IP.
func bindLocally(t *testing.T, c *lab.Cluster, s flowService, o origin, outside bool) {
	t.Helper()
	here := []string{c.Pods[0].Name, c.Pods[1].Name}
	for _, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		bound := map[bool]string{}
		for n := range 40 {
			kind := kinds[n%len(kinds)]
			r := dialAsExpected(o.host, snapshot.TCP, s.frontendOf(c, kind, f), lab.Answered)
			locally := outside && kind != dataplane.ClusterIP
			if locally && !slices.Contains(here, r.Endpoint) {
				t.Errorf("%s -> %s (%s): %v; want an endpoint on this node", o.name, kind, f, r)
			}
			if first, ok := bound[locally]; ok && first != r.Endpoint {
				t.Errorf("%s -> %s (%s), dial %d: %v; first was %s", o.name, kind, f, n, r, first)
				break
			}
			bound[locally] = r.Endpoint
		}
	}
}

// TestConnectionsSurvive holds connections while their Service is scaled, reprogrammed and removed.
func TestConnectionsSurvive(t *testing.T) {
	c, b, s, _ := one(t, both, asIs)
	var held []*lab.Conn
	for range 20 {
		conn, r := c.Outside.Open(snapshot.TCP, s.frontendOf(c, dataplane.LoadBalancerIP, ipfamily.IPv4),
			lab.Options{Timeout: 3 * time.Second})
		if conn == nil {
			t.Fatal(r)
		}
		held = append(held, conn)
	}
	fewer := s
	fewer.state = endpointState{"one", nil, []condition{ready}}
	none := s
	none.state = endpointState{"none", nil, nil}
	for _, st := range []*dataplane.State{oneState(c, fewer, asIs), oneState(c, none, asIs), oneState(c, s, asIs), {}} {
		_, err := b.ApplyAll(st, dataplane.Change{Services: []snapshot.Name{s.name()}, Globals: true})
		labtest.Check(t, err)
		for _, conn := range held {
			if r := conn.Ping(3 * time.Second); r.Outcome != lab.Answered {
				t.Fatalf("a held connection broke: %v", r)
			}
		}
	}
}

// kernelsBuckets says that a pod's entry stands where our own hash of its address says.
func kernelsBuckets(t *testing.T, c *lab.Cluster, b *Backend, s flowService) {
	t.Helper()
	listed, err := b.List()
	labtest.Check(t, err)
	for i, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		at := s.frontendOf(c, dataplane.ClusterIP, f)
		for _, e := range listed[i].Elements[nft.Services] {
			if e.FrontendKey() != (dataplane.Key{Addr: at.Addr(), Protocol: snapshot.TCP, Port: at.Port()}) {
				continue
			}
			key := nft.AffinityElement(e.PoolID(), c.Pods[2].IP(f))
			if !slices.ContainsFunc(
				listed[i].Elements[nft.Affinity],
				func(l nft.Listed) bool { return bytes.Equal(l.Key(), key.Key()) },
			) {
				t.Errorf("%v: the pod's entry is in another bucket", f)
			}
		}
	}
}
