package kernel

import (
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// edgeConfig is what a proxy does at the edge by default.
var edgeConfig = dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR, PingServices: true,
	RejectUnusedPorts: true}

// edge builds a cluster with one Service in it, under edgeConfig.
func edge(t *testing.T, state endpointState, change func(*lab.Cluster, *snapshot.Service)) (*lab.Cluster, flowService) {
	t.Helper()
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
	s := flowService{number: 1, state: state}
	snap, d := snapshot.New(), s.delta(c)
	change(c, d.Services[s.name()])
	snap.Apply(facts(c))
	snap.Apply(d)
	st, _ := dataplane.Compute(edgeConfig, snap)
	apply(t, b, st)
	return c, s
}

const (
	answersWithin = 2 * time.Second
	silentFor     = 300 * time.Millisecond
)

// TestPing: cluster IPs answer everybody, load balancer addresses those outside, as long as there is an endpoint.
func TestPing(t *testing.T) {
	open := []netip.Prefix{}
	closed := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("128.0.0.0/1"),
		netip.MustParsePrefix("::/1"), netip.MustParsePrefix("8000::/1")}
	for _, test := range []struct {
		name              string
		state             endpointState
		sources           []netip.Prefix
		external          bool
		cluster, balanced bool
	}{
		{"with endpoints", both, open, false, true, true},
		{"source ranges", both, closed, false, true, false},
		{"no endpoint", endpointStates[0], open, false, false, false},
		{"policy Local without an endpoint here", endpointStates[2], open, true, true, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, s := edge(t, test.state, func(_ *lab.Cluster, svc *snapshot.Service) {
				svc.SourceRanges, svc.ExternalLocal = test.sources, test.external
			})
			var wg sync.WaitGroup // most get no answer
			for _, f := range ipfamily.All {
				for _, o := range origins(c) {
					outside := o.host == c.Outside || o.host == c.Node2
					wg.Go(func() { checkPing(t, c, s, f, o, dataplane.ClusterIP, test.cluster) })
					wg.Go(func() { checkPing(t, c, s, f, o, dataplane.LoadBalancerIP, test.balanced && outside) })
					wg.Go(func() { checkPing(t, c, s, f, o, dataplane.ExternalIP, false) })
				}
			}
			wg.Wait()
		})
	}
}

func checkPing(t *testing.T, c *lab.Cluster, s flowService, f ipfamily.Family, o origin, k dataplane.Kind, want bool) {
	t.Helper()
	patience := silentFor
	if want {
		patience = answersWithin
	}
	if got := o.host.Echo(s.frontendOf(c, k, f).Addr(), patience); (got.Outcome == lab.Answered) != want {
		t.Errorf("ping from %s of the %v (%s): %v; want an answer: %v", o.name, k, f, got, want)
	}
}

// TestOthersTranslate lets another program translate an address that is no Service's to a pod, as for hostPort: the
// pod sees who has sent it, although clients from outside would be masqueraded at a cluster IP.
func TestOthersTranslate(t *testing.T) {
	c, _, _, _ := one(t, both, asIs)
	pod := c.Pods[0]
	to := netip.AddrPortFrom(pod.IP(ipfamily.IPv4), targetPort)
	labtest.Run(t, c.Node, "table ip hostport {\n chain p { type nat hook prerouting priority -90;\n"+
		"tcp dport 9999 dnat to "+to.String()+"\n }\n }\n", "nft", "-f", "-")
	at := netip.AddrPortFrom(netip.MustParseAddr("203.0.113.99"), 9999)
	r := dialAsExpected(c.Outside, snapshot.TCP, at, lab.Answered)
	if r.Outcome != lab.Answered || r.Source.Addr() != c.Outside.IP(ipfamily.IPv4) {
		t.Errorf("from outside: %v; want an answer to its own address", r)
	}
}

// TestUnusedBalancerPort: ports of load balancer addresses that no Service has are refused from outside, and nowhere
// else. If this node's own address is among them, none is.
func TestUnusedBalancerPort(t *testing.T) {
	t.Run("of the balancer and another node", func(t *testing.T) { unusedBalancerPort(t, false, flowProtocols) })
	t.Run("of nodes, this one among them", func(t *testing.T) { unusedBalancerPort(t, true, flowProtocols[:1]) })
}

func unusedBalancerPort(t *testing.T, own bool, protocols []snapshot.Protocol) {
	c, s := edge(t, both, func(c *lab.Cluster, svc *snapshot.Service) {
		for _, f := range ipfamily.All { // as balancers do that need no addresses of their own
			if svc.LoadBalancerIPs = append(svc.LoadBalancerIPs, c.Node2.IP(f)); own {
				svc.LoadBalancerIPs = append(svc.LoadBalancerIPs, c.Node.IP(f))
			}
		}
	})
	for _, h := range []*lab.Host{c.Node, c.Node2} {
		for _, p := range protocols {
			_, err := h.Serve(p, 9999)
			labtest.Check(t, err)
		}
	}
	var wg sync.WaitGroup // many get no answer
	check := func(o origin, p snapshot.Protocol, to netip.Addr, port uint16, want lab.Outcome) {
		wg.Go(func() {
			if r := dialAsExpected(o.host, p, netip.AddrPortFrom(to, port), want); r.Outcome != want {
				t.Errorf("%s -> %s:%d/%s: %v; want %v", o.name, to, port, p, r, want)
			}
		})
	}
	for _, f := range ipfamily.All {
		for _, o := range origins(c) {
			for _, p := range protocols {
				balanced := s.frontendOf(c, dataplane.LoadBalancerIP, f)
				check(o, p, balanced.Addr(), servicePort, lab.Answered)
				check(o, p, s.frontendOf(c, dataplane.ExternalIP, f).Addr(), 81, lab.TimedOut)
				unused, other := lab.Refused, lab.Refused
				if o.pod || o.node || own {
					unused, other = lab.TimedOut, lab.Answered
				}
				check(o, p, balanced.Addr(), 81, unused)
				check(o, p, c.Node.IP(f), 9999, lab.Answered)
				if o.host != c.Node2 {
					check(o, p, c.Node2.IP(f), 9999, other)
				}
			}
			wg.Wait()
		}
	}
}

// TestExternalFailover: what happens to clients from outside, with externalTrafficPolicy Local, without an endpoint
// here. internalTrafficPolicy Local goes on to drop.
func TestExternalFailover(t *testing.T) {
	for failover, want := range map[snapshot.ExternalFailover]lab.Outcome{
		snapshot.FailoverDrop: lab.TimedOut, snapshot.FailoverCluster: lab.Answered, snapshot.FailoverReject: lab.Refused,
		snapshot.FailoverPass: lab.Answered,
	} {
		t.Run(failover.String(), func(t *testing.T) {
			c, s := edge(t, endpointStates[2], func(_ *lab.Cluster, svc *snapshot.Service) {
				svc.ExternalLocal, svc.InternalLocal, svc.ExternalFailover = true, true, failover
			})
			outside, pass := origins(c)[3], failover == snapshot.FailoverPass // node2: the default route leads to outside
			for i, f := range ipfamily.All {
				if pass { // somebody there has the address
					for _, k := range []dataplane.Kind{dataplane.LoadBalancerIP, dataplane.ExternalIP} {
						a := s.frontendOf(c, k, f).Addr()
						labtest.Check(t, c.Outside.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())))
					}
				}
				if _, err := c.Outside.Serve(snapshot.TCP, servicePort); i == 0 {
					labtest.Check(t, err)
				}
				for _, k := range []dataplane.Kind{dataplane.LoadBalancerIP, dataplane.ExternalIP} {
					r := dialAsExpected(outside.host, snapshot.TCP, s.frontendOf(c, k, f), want)
					if r.Outcome != want {
						t.Errorf("%s -> %v (%s): %v; want %v", outside.name, k, f, r, want)
					}
					if want == lab.Answered && (r.Endpoint == c.Outside.Name) != pass {
						t.Errorf("%s -> %v (%s): answered by %s", outside.name, k, f, r.Endpoint)
					}
				}
				r := dialAsExpected(outside.host, snapshot.TCP, s.frontendOf(c, dataplane.ClusterIP, f), lab.TimedOut)
				if r.Outcome != lab.TimedOut {
					t.Errorf("%s -> cluster IP (%s): %v; want no answer", outside.name, f, r)
				}
				r = dialAsExpected(c.Pods[2], snapshot.TCP, s.frontendOf(c, dataplane.LoadBalancerIP, f), lab.Answered)
				if r.Outcome != lab.Answered || r.Endpoint == c.Outside.Name {
					t.Errorf("pod -> load balancer (%s): %v; want an endpoint elsewhere", f, r)
				}
			}
		})
	}
}
