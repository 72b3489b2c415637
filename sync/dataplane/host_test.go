package dataplane

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// nodePortKeys gives the keys of the node port frontends of a dual-stack Service.
func nodePortKeys(cfg Config, s *snapshot.Snapshot) (out []netip.Addr) {
	put(s, &snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.10 fd00:96::10"), Ports: tcp80(30080)})
	st, _ := Compute(cfg, s)
	for _, sp := range st.Services[name("web")].Ports {
		for _, f := range sp.Frontends {
			if f.Kind == NodePort {
				out = append(out, f.Key.Addr)
			}
		}
	}
	return out
}

func TestNodePortAddresses(t *testing.T) {
	const (
		node      = "192.168.0.1 fd00:192::1"
		hostAddrs = "127.0.0.1 127.0.0.2 169.254.20.10 192.168.0.1 192.168.0.2 203.0.113.1 " +
			"::1 fd00:192::1 fd00:192::2 fe80::1"
	)
	tests := []struct {
		what              string
		list, node, host  string
		localhost         bool
		serviceCIDRs      string
		want              string
		loopbackIsClaimed bool
		nodeIP            string
		primary           bool
	}{
		{what: "primary", node: node, host: hostAddrs, want: node},
		{what: "primary, the host's addresses unknown", node: node, want: node},
		{what: "primary, the first of each family", node: "192.168.0.2 192.168.0.1 203.0.113.1 fd00:192::2 fd00:192::1",
			host: hostAddrs, want: "192.168.0.2 fd00:192::2"},
		{what: "primary, only what is on the host", node: "198.51.100.1 192.168.0.2 fd00::bad", host: hostAddrs,
			want: "192.168.0.2"},
		{what: "primary, one family", node: "192.168.0.1", host: hostAddrs, want: "192.168.0.1"},
		{what: "primary is loopback", node: "127.0.0.1 ::1", host: hostAddrs, want: ""},
		{what: "primary, no node yet", host: hostAddrs, want: ""},
		{what: "primary and localhost", node: node, host: hostAddrs, localhost: true,
			want: "127.0.0.1 " + node, loopbackIsClaimed: true},
		{what: "primary by name, localhost not listed", primary: true, node: node, host: hostAddrs, localhost: true,
			want: node},
		{what: "primary and localhost by name", primary: true, list: "127.0.0.0/8 ::1/128", node: node, host: hostAddrs,
			localhost: true, want: "127.0.0.1 " + node, loopbackIsClaimed: true},
		{what: "primary and a range that holds it", primary: true, list: "192.168.0.0/24", node: node, host: hostAddrs,
			want: "192.168.0.1 192.168.0.2 fd00:192::1"},
		{what: "primary and a range that holds nothing", primary: true, list: "-", node: node, host: hostAddrs,
			localhost: true, want: node},
		{what: "localhost by name", list: "127.0.0.0/8 ::1/128", node: node, host: hostAddrs, localhost: true,
			want: "127.0.0.1", loopbackIsClaimed: true},
		{what: "localhost does not wait for the node", host: hostAddrs, localhost: true, want: "127.0.0.1",
			loopbackIsClaimed: true},
		{what: "primary is what the operator says", node: node, host: hostAddrs, nodeIP: "192.168.0.2",
			want: "192.168.0.2 fd00:192::1"},
		{what: "the operator says it in IPv6", node: node, host: hostAddrs, nodeIP: "fd00:192::2",
			want: "192.168.0.1 fd00:192::2"},
		{what: "the operator says loopback", node: node, host: hostAddrs, nodeIP: "127.0.0.1", want: "fd00:192::1"},
		{what: "the operator says it before there is a node", host: hostAddrs, nodeIP: "192.168.0.2", want: "192.168.0.2"},
		{what: "a range, whatever the operator says the node is", list: "192.168.0.0/24", node: node, host: hostAddrs,
			nodeIP: "203.0.113.1",
			want:   "192.168.0.1 192.168.0.2"},
		{what: "a range that holds nothing", list: "-", node: node, host: hostAddrs, localhost: true, want: ""},
		{what: "a range that holds nothing, the host's addresses unknown", list: "-", node: node, want: ""},
		{what: "a range", list: "192.168.0.0/24", node: node, host: hostAddrs, want: "192.168.0.1 192.168.0.2"},
		{what: "a range without loopback, localhost wished", list: "192.168.0.0/24", host: hostAddrs, localhost: true,
			want: "192.168.0.1 192.168.0.2"},
		{what: "ranges of both families, overlapping", list: "192.168.0.2/32 192.168.0.0/24 fd00:192::/32", host: hostAddrs,
			want: "192.168.0.1 192.168.0.2 fd00:192::1 fd00:192::2"},
		{what: "loopback alone", list: "127.0.0.0/8", host: hostAddrs, want: ""},
		{what: "loopback alone, localhost wished", list: "127.0.0.0/8", host: hostAddrs, localhost: true,
			want: "127.0.0.1", loopbackIsClaimed: true},
		{what: "loopback, but not 127.0.0.1", list: "127.0.0.2/32", host: hostAddrs, localhost: true, want: ""},
		{what: "all of IPv4", list: "0.0.0.0/0", host: hostAddrs, localhost: true,
			want: "127.0.0.1 169.254.20.10 192.168.0.1 192.168.0.2 203.0.113.1", loopbackIsClaimed: true},
		{what: "all of IPv6, never ::1", list: "::/0", host: hostAddrs, localhost: true, want: "fd00:192::1 fd00:192::2"},
		{what: "IPv6 link-local asked for", list: "fe80::/10", host: hostAddrs, want: "fe80::1"},
		{what: "the service ranges' addresses on an IPVS device", list: "0.0.0.0/0",
			host:         "10.96.0.10 10.96.0.11 192.168.0.1",
			serviceCIDRs: "10.96.0.0/16", want: "192.168.0.1"},
		{what: "the node's own address in a service range", list: "0.0.0.0/0", node: "10.96.7.1",
			host: "10.96.0.10 10.96.7.1", serviceCIDRs: "10.96.0.0/16", want: "10.96.7.1"},
		{what: "a list, the host's addresses unknown", list: "192.168.0.0/24 192.168.0.7/32 fd00::7/128",
			want: "192.168.0.7 fd00::7"},
		{what: "an address on two interfaces", list: "192.168.0.0/24", host: "192.168.0.1 192.168.0.1", want: "192.168.0.1"},
	}
	for _, test := range tests {
		t.Run(test.what, func(t *testing.T) {
			s := snapshot.New()
			s.Node = snapshot.Node{Name: "here", Addresses: addrs(test.node)}
			s.HostAddrs, s.ServiceCIDRs = addrs(test.host), prefixes(test.serviceCIDRs)
			cfg := Config{LocalhostNodePorts: test.localhost, NodePortPrimary: test.primary}
			if test.list == "-" {
				cfg.NodePortAddresses = []netip.Prefix{{}}
			} else {
				cfg.NodePortAddresses = prefixes(test.list)
			}
			if test.nodeIP != "" {
				cfg.NodeIP = netip.MustParseAddr(test.nodeIP)
			}
			if got := nodePortKeys(cfg, s); !slices.Equal(got, addrs(test.want)) {
				t.Errorf("got %v, want %v", got, test.want)
			}
			if st, _ := Compute(cfg, s); st.LocalhostNodePorts != test.loopbackIsClaimed {
				t.Errorf("LocalhostNodePorts is %v", st.LocalhostNodePorts)
			}
		})
	}
}

func TestPods(t *testing.T) {
	const node = "10.244.1.0/24 10.244.8.0/24 fd00:244:1::/48"
	cidr := func(s string) Pods { return Pods{CIDR: netip.MustParsePrefix(s)} }
	tests := []struct {
		what         string
		detect       DetectLocal
		pods4, pods6 Pods
	}{
		{"nothing said", DetectLocal{}, Pods{}, Pods{}},
		{"first of each family", DetectLocal{ClusterCIDRs: prefixes("fd00:244::/32 10.244.0.0/16 10.245.0.0/16")},
			cidr("10.244.0.0/16"), cidr("fd00:244::/32")},
		{"one family only", DetectLocal{ClusterCIDRs: prefixes("fd00:244::/32")}, Pods{}, cidr("fd00:244::/32")},
		{"the node's", DetectLocal{Mode: DetectNodeCIDR, ClusterCIDRs: prefixes("10.0.0.0/8")},
			cidr("10.244.1.0/24"), cidr("fd00:244:1::/48")},
		{"a bridge", DetectLocal{Mode: DetectBridgeInterface, Interface: "cni0", ClusterCIDRs: prefixes("10.0.0.0/8")},
			Pods{Interface: "cni0"}, Pods{Interface: "cni0"}},
		{"a prefix", DetectLocal{Mode: DetectInterfaceNamePrefix, Interface: "cali"},
			Pods{InterfacePrefix: "cali"}, Pods{InterfacePrefix: "cali"}},
		{"no bridge", DetectLocal{Mode: DetectBridgeInterface}, Pods{}, Pods{}},
	}
	for _, test := range tests {
		s := snapshot.New()
		put(s, snapshot.Node{Name: "here", PodCIDRs: prefixes(node)})
		st, _ := Compute(Config{DetectLocal: test.detect}, s)
		if st.Pods4 != test.pods4 || st.Pods6 != test.pods6 {
			t.Errorf("%s: got %+v and %+v", test.what, st.Pods4, st.Pods6)
		}
	}
}

// TestPodsPerFamily: where the pods of one family are unknown, only that family loses the row for them.
func TestPodsPerFamily(t *testing.T) {
	s := snapshot.New()
	put(s, &snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.10 fd00:96::10"), Ports: tcp80(0)})
	st, _ := Compute(Config{DetectLocal: DetectLocal{ClusterCIDRs: prefixes("10.244.0.0/16")}}, s)
	_, four := st.frontend(key("10.96.0.10:80"))
	_, six := st.frontend(key("[fd00:96::10]:80"))
	if len(four.Routes) != 2 || !four.Route(Anyone).SNAT || len(six.Routes) != 1 || six.Route(Anyone).SNAT {
		t.Errorf("IPv4 %+v, IPv6 %+v", four.Routes, six.Routes)
	}
}
