package dataplane

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestNodesAsBalancers: a Service whose balancer gives it nodes' own addresses has none of them taken for its own.
func TestNodesAsBalancers(t *testing.T) {
	cfg := Config{NodeName: "node-1", PingServices: true, RejectUnusedPorts: true,
		DetectLocal: DetectLocal{ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}}
	for balancers, want := range map[string]int{"203.0.113.1 203.0.113.2": 2, "192.0.2.11 192.0.2.12": 2,
		"192.0.2.10 192.0.2.11": 0} {
		snap := snapshot.New()
		snap.Apply(snapshot.Delta{
			Node:      &snapshot.Node{Name: "node-1", Addresses: addrs("192.0.2.10")},
			HostAddrs: new(addrs("192.0.2.10")),
			Services: map[snapshot.Name]*snapshot.Service{name("web"): {
				Name: name("web"), ClusterIPs: addrs("10.96.0.1"), LoadBalancerIPs: addrs(balancers),
				Ports: []snapshot.Port{
					{Name: "a", Protocol: snapshot.TCP, Port: 80}, {Name: "b", Protocol: snapshot.TCP, Port: 81}},
			}},
			Slices: map[snapshot.Name]*snapshot.Slice{name("web-1"): {
				Name: name("web-1"), Service: "web",
				Ports:     []snapshot.SlicePort{{Name: "b", Protocol: snapshot.TCP, Port: 8081}},
				Endpoints: []snapshot.Endpoint{{Addr: netip.MustParseAddr("10.244.0.9"), Ready: true, Serving: true}},
			}},
		})
		st, _ := Compute(cfg, snap)
		svc := st.Services[name("web")]
		if len(svc.LoadBalancerIPs) != want || !slices.Equal(svc.LoadBalancerIPs, svc.PingableIPs) {
			t.Errorf("%s: ports of %v are refused, and %v answer a ping", balancers, svc.LoadBalancerIPs, svc.PingableIPs)
		}
	}
}

// TestSilentClusterIPs: a cluster IP answers a ping if any port has an endpoint for clients from outside; one is
// enough.
func TestSilentClusterIPs(t *testing.T) {
	cfg := Config{NodeName: "node-1", PingServices: true}
	for endpoints, silent := range []bool{true, false, false} {
		snap := snapshot.New()
		slice := &snapshot.Slice{Name: name("web-1"), Service: "web",
			Ports: []snapshot.SlicePort{{Name: "b", Protocol: snapshot.TCP, Port: 8081}}}
		for _, a := range addrs("10.244.0.9 10.244.0.10")[:endpoints] {
			slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: a, Ready: true, Serving: true})
		}
		snap.Apply(snapshot.Delta{
			Node:      &snapshot.Node{Name: "node-1", Addresses: addrs("192.0.2.10")},
			HostAddrs: new(addrs("192.0.2.10")),
			Services: map[snapshot.Name]*snapshot.Service{name("web"): {
				Name: name("web"), ClusterIPs: addrs("10.96.0.1"),
				Ports: []snapshot.Port{
					{Name: "a", Protocol: snapshot.TCP, Port: 80}, {Name: "b", Protocol: snapshot.TCP, Port: 81}},
			}},
			Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice},
		})
		st, _ := Compute(cfg, snap)
		if got := len(st.Services[name("web")].SilentClusterIPs) > 0; got != silent {
			t.Errorf("%d endpoints: silent is %v", endpoints, got)
		}
	}
}
