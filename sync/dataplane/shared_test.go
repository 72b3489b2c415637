package dataplane

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestOverlaps: what a host knows to be used in a ServiceCIDR, and how much of the range that makes.
func TestOverlaps(t *testing.T) {
	const kubeadm = "10.96.0.0/12"
	for _, test := range []struct {
		name          string
		cidrs         string // the ServiceCIDRs; kubeadm's by default
		node, host    string // addresses of the Node object, and of the host
		own, routes   string
		pods, cluster string
		api, server   string
		want          string // SharedRanges
	}{
		{name: "nothing is known"},
		{name: "apart", node: "192.168.0.5", own: "192.168.0.0/24", pods: "10.244.1.0/24", api: "192.168.0.2",
			routes: "0.0.0.0/0 10.244.0.0/16 192.168.0.0/24"},
		{name: "the nodes' network", node: "10.100.0.5", own: "10.100.0.0/16", routes: "0.0.0.0/0 10.100.0.0/16",
			want: kubeadm},
		{name: "an address without a network", node: "10.100.0.5", routes: "0.0.0.0/0 10.100.0.1/32", want: kubeadm},
		{name: "no Node object", host: "10.100.0.5 127.0.0.1", want: kubeadm},
		{name: "the address of a DNS cache is a cluster IP", node: "192.168.0.5", host: "10.96.0.10 192.168.0.5"},
		{name: "a flat network around the range", node: "10.1.0.5", own: "10.0.0.0/8", want: kubeadm},
		{name: "another network of the host", node: "192.168.0.5", own: "10.97.0.0/24 192.168.0.0/24",
			want: "10.97.0.0/24"},
		{name: "a network and its route are one", node: "192.168.0.5", own: "10.97.0.0/24",
			routes: "10.97.0.0/24 10.97.0.9/32", want: "10.97.0.0/24"},
		{name: "routes to the whole range, or more", routes: "10.0.0.0/8 10.96.0.0/12"},
		{name: "a route into the range", routes: "10.0.0.0/8 10.99.8.0/24", want: "10.99.8.0/24"},
		{name: "this node's pods", pods: "10.96.1.0/24", want: kubeadm},
		{name: "all pods", pods: "10.98.1.0/24", cluster: "10.98.0.0/16", want: "10.98.0.0/16"},
		{name: "pods around the range", cluster: "10.0.0.0/8", want: kubeadm},
		{name: "API servers", api: "10.96.7.1 10.96.7.2 192.0.2.1", want: "10.96.7.1/32 10.96.7.2/32"},
		{name: "the API server, by a balancer's address", server: "10.96.7.9", want: "10.96.7.9/32"},
		{name: "the API server, by its cluster IP", server: "10.96.0.1"},
		{name: "IPv6", cidrs: "fd00:10:96::/108", node: "192.0.2.1 fd00:10:96::a:5", own: "fd00:10:96::/64",
			want: "fd00:10:96::/108"},
		{name: "IPv6, a route", cidrs: "10.96.0.0/12 fd00:10:96::/108", routes: "fd00:10:96::8:0/112",
			want: "fd00:10:96::8:0/112"},
		{name: "one of two ranges", cidrs: "10.96.0.0/16 10.112.0.0/16", node: "10.112.0.5", want: "10.112.0.0/16"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s, cfg := snapshot.New(), Config{DetectLocal: DetectLocal{ClusterCIDRs: prefixes(test.cluster)}}
			if test.server != "" {
				cfg.APIServer = addr(test.server)
			}
			put(s, &snapshot.Service{Name: KubernetesService, ClusterIPs: addrs("10.96.0.1")})
			s.ServiceCIDRs = prefixes(kubeadm)
			if test.cidrs != "" {
				s.ServiceCIDRs = prefixes(test.cidrs)
			}
			s.Node = snapshot.Node{Name: "node", Addresses: addrs(test.node), PodCIDRs: prefixes(test.pods)}
			s.HostAddrs = addrs(test.host)
			s.HostNetworks = snapshot.HostNetworks{Own: prefixes(test.own), Routes: prefixes(test.routes)}
			for n, of := range map[string]string{"kubernetes": test.api, "a-tenant-s": "10.96.66.66"} {
				var eps []snapshot.Endpoint
				for _, a := range addrs(of) {
					eps = append(eps, endpoint(a.String(), ""))
				}
				put(s, sliceOf("kubernetes", n, eps...))
			}
			st, _ := Compute(cfg, s)
			if want := prefixes(test.want); !slices.Equal(st.SharedRanges, want) {
				t.Errorf("shared are %v, want %v: %v", st.SharedRanges, want, Overlaps(cfg, s))
			}
			if text := DescribeOverlaps(Overlaps(cfg, s)); (text == "") != (test.want == "") {
				t.Errorf("it is said %q", text)
			}
		})
	}
}

// TestManyRoutes: thousands of routes into a range make few elements, and few words.
func TestManyRoutes(t *testing.T) {
	s := snapshot.New()
	s.ServiceCIDRs = prefixes("10.96.0.0/12 10.240.0.0/16")
	var routes []netip.Prefix
	for n := range 5000 {
		routes = append(routes, netip.MustParsePrefix(fmt.Sprintf("10.%d.%d.%d/32", 96+n/4096, n/16%256, n%16*16)))
	}
	few := slices.Clone(routes[:MaxSharedRanges])
	s.HostNetworks.Routes = few
	if st, _ := Compute(Config{}, s); !slices.Equal(st.SharedRanges, few) {
		t.Errorf("%d routes share %v", len(few), st.SharedRanges)
	}
	s.HostNetworks.Routes = routes
	st, _ := Compute(Config{}, s)
	if want := s.ServiceCIDRs[:1]; !slices.Equal(st.SharedRanges, want) {
		t.Errorf("%d routes share %v, want %v", len(routes), st.SharedRanges, want)
	}
	if text := DescribeOverlaps(Overlaps(Config{}, s)); len(text) > 600 || !strings.Contains(text, "more") {
		t.Errorf("it is said %q", text)
	}
	s.HostNetworks = snapshot.HostNetworks{TooMany: true}
	if st, _ := Compute(Config{}, s); !slices.Equal(st.SharedRanges, s.ServiceCIDRs) {
		t.Errorf("too many routes share %v", st.SharedRanges)
	}
}

// TestRouteOfAPod: a route that overlaps no ServiceCIDR, or is known to be shared, changes nothing for Services.
func TestRouteOfAPod(t *testing.T) {
	s := snapshot.New()
	p := NewPlanner(Config{})
	s.Apply(snapshot.Delta{ServiceCIDRs: &[]netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
		Node: &snapshot.Node{Name: "node", Addresses: addrs("192.0.2.1")}})
	p.Apply(s, snapshot.Change{Globals: true})
	routes := func(list string) (snapshot.Change, Change) {
		c := s.Apply(snapshot.Delta{HostNetworks: &snapshot.HostNetworks{Routes: prefixes(list)}})
		change, _ := p.Apply(s, c)
		return c, change
	}
	if c, _ := routes("10.0.0.0/8 10.244.1.7/32"); c.Globals {
		t.Error("a pod's route is looked at")
	}
	if _, change := routes("10.99.0.0/16"); !change.Globals {
		t.Error("a route into the range changes nothing")
	}
	if _, change := routes("10.99.0.0/16 10.99.3.4/32"); !change.Empty() {
		t.Errorf("a route within that one changes %+v", change)
	}
	api := sliceOf("kubernetes", "kubernetes", endpoint("10.96.0.77", ""))
	if change, _ := p.Apply(s, put(s, api)); !change.Globals || len(p.State().SharedRanges) != 2 {
		t.Errorf("the API server's endpoint changes %+v: %v", change, p.State().SharedRanges)
	}
}
