package lab_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) {
	if enterModes() {
		return
	}
	labtest.Main(m)
}

var protocols = []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}

var layouts = map[string]lab.Config{
	"routed":  {LocalPods: 2, RemotePods: 2},
	"prefix":  {LocalPods: 2, RemotePods: 2, PodLinkPrefix: "cali"},
	"bridged": {LocalPods: 2, RemotePods: 2, PodBridge: "cni0"},
	"plain":   {LocalPods: 2, RemotePods: 2, PodBridge: "cni0", PlainBridge: true},
}

// everybody gives all hosts that have an address.
func everybody(c *lab.Cluster) []*lab.Host {
	return append(append([]*lab.Host{c.Node, c.Node2, c.Outside}, c.Pods...), c.RemotePods...)
}

func serve(t testing.TB, hosts []*lab.Host, port uint16) {
	t.Helper()
	for _, h := range hosts {
		for _, p := range protocols {
			_, err := h.Serve(p, port)
			labtest.Check(t, err)
		}
	}
}

// Everybody reaches everybody, himself included, right after the cluster was built, and without any translation.
func TestClusterReach(t *testing.T) {
	for name, conf := range layouts {
		t.Run(name, func(t *testing.T) {
			c := labtest.NewCluster(t, conf)
			serve(t, everybody(c), 8080)
			for _, f := range lab.Families() {
				for _, p := range protocols {
					for _, from := range everybody(c) {
						for _, to := range everybody(c) {
							dst := netip.AddrPortFrom(to.IP(f), 8080)
							r := from.Dial(p, dst, lab.Options{})
							if r.Outcome != lab.Answered || r.Endpoint != to.Name || r.Destination != dst ||
								from != to && c.Node != from && r.Source.Addr() != from.IP(f) {
								t.Errorf("%s %s: %s to %s: %s", f, p, from.Name, to.Name, r)
							}
						}
					}
				}
			}
		})
	}
}

// A packet to any address of the free ranges meets the node, whoever sends it, and so does the answer, whoever gives
// it, with the client's own address as source or with the node's.
func TestClusterNAT(t *testing.T) {
	needNft(t)
	for name, conf := range layouts {
		for _, masquerade := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s masquerade %v", name, masquerade), func(t *testing.T) {
				c := labtest.NewCluster(t, conf)
				serve(t, everybody(c), 8080)
				for i, f := range lab.Families() {
					vips := make(map[*lab.Host]netip.AddrPort)
					for n, to := range everybody(c) {
						vips[to] = netip.AddrPortFrom(lab.Nth([]netip.Prefix{lab.ServiceRange[i], lab.ExternalRange[i]}[n%2], 5+n), 80)
					}
					labtest.Run(t, c.Node, natRules(f, vips, masquerade), "nft", "-f", "-")
					testNAT(t, c, f, vips, masquerade)
				}
			})
		}
	}
}

func testNAT(t *testing.T, c *lab.Cluster, f ipfamily.Family, vips map[*lab.Host]netip.AddrPort, masquerade bool) {
	for _, p := range protocols {
		for _, from := range everybody(c) {
			for _, to := range everybody(c) {
				if to == from && !masquerade || to == c.Outside && from == c.Node {
					continue // a host does not take packets from itself; the last is no Service traffic
				}
				r := from.Dial(p, vips[to], lab.Options{})
				// The node's own packets have its address anyway; packets to itself are past postrouting.
				changed := masquerade && from != c.Node && to != c.Node
				if r.Outcome != lab.Answered || r.Endpoint != to.Name || r.Destination != netip.AddrPortFrom(to.IP(f), 8080) ||
					changed == (r.Source.Addr() == from.IP(f)) && from != c.Node {
					t.Errorf("%s %s: %s to %s via %s (masquerade %v): %s", f, p, from.Name, to.Name, vips[to], masquerade, r)
				}
			}
		}
	}
}

// natRules sends each VIP to a host's port 8080, for packets from elsewhere and from the node itself.
func natRules(f ipfamily.Family, vips map[*lab.Host]netip.AddrPort, masquerade bool) string {
	family, word := "ip", "ip"
	if f == ipfamily.IPv6 {
		family, word = "ip6", "ip6"
	}
	var dnat strings.Builder
	for h, vip := range vips {
		for _, p := range protocols {
			to := netip.AddrPortFrom(h.IP(f), 8080)
			fmt.Fprintf(&dnat, "%s daddr %s %s dport %d dnat to %s\n", word, vip.Addr(), p, vip.Port(), to)
		}
	}
	post := ""
	if masquerade {
		post = "ct status dnat masquerade;"
	}
	return fmt.Sprintf(`
		table %[1]s t
		delete table %[1]s t
		table %[1]s t {
			chain pre { type nat hook prerouting priority dstnat; %[2]s }
			chain out { type nat hook output priority -100; %[2]s }
			chain post { type nat hook postrouting priority srcnat; %[3]s }
		}`, family, dnat.String(), post)
}

// Names, ranges and links are what the documentation says.
func TestClusterNames(t *testing.T) {
	c := labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 1, PodLinkPrefix: "cali", PodBridge: "cni0"})
	links, err := c.Node.Netlink().LinkList()
	labtest.Check(t, err)
	got := make(map[string]bool)
	for _, l := range links {
		got[l.Attrs().Name] = true
	}
	for _, want := range []string{"lo", "eth0", "cni0", "cali1", "cali2"} {
		if !got[want] {
			t.Errorf("node has no link %s", want)
		}
	}
	if c.Pods[1].Name != "pod-2" || c.RemotePods[0].Name != "remote-1" {
		t.Errorf("pods are called %s, %s", c.Pods[1].Name, c.RemotePods[0].Name)
	}
	for i, f := range lab.Families() {
		for _, pair := range []struct {
			host *lab.Host
			in   []netip.Prefix
		}{
			{c.Node, lab.NodeRange},
			{c.Node2, lab.NodeRange},
			{c.Outside, lab.OutsideRange},
			{c.Pods[0], lab.NodePodRange},
			{c.Pods[1], lab.PodRange},
			{c.RemotePods[0], lab.Node2PodRange},
			{c.RemotePods[0], lab.PodRange},
		} {
			if !pair.in[i].Contains(pair.host.IP(f)) {
				t.Errorf("%s %s is not in %s", pair.host.Name, pair.host.IP(f), pair.in[i])
			}
		}
	}
}

func TestNth(t *testing.T) {
	for _, c := range []struct {
		p    string
		n    int
		want string
	}{
		{"10.96.0.0/16", 10, "10.96.0.10"},
		{"10.96.0.0/16", 300, "10.96.1.44"},
		{"fd00:10:96::/112", 65535, "fd00:10:96::ffff"},
	} {
		if got := lab.Nth(netip.MustParsePrefix(c.p), c.n).String(); got != c.want {
			t.Errorf("Nth(%s, %d) = %s, want %s", c.p, c.n, got, c.want)
		}
	}
}

// TestBridgeCallsNetfilter tells by which interface a translated packet between two pods of a bridge came in, as
// postrouting has it: by none if it stayed on the bridge.
func TestBridgeCallsNetfilter(t *testing.T) {
	needNft(t)
	if !lab.BridgesCallNetfilter() {
		t.Skip("this kernel has no br_netfilter, or has not loaded it")
	}
	for _, plain := range []bool{false, true} {
		c := labtest.NewCluster(t, lab.Config{LocalPods: 2, PodBridge: "cni0", PlainBridge: plain})
		serve(t, c.Pods, 8080)
		for i, f := range lab.Families() {
			vip := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[i], 5), 80)
			labtest.Run(t, c.Node, natRules(f, map[*lab.Host]netip.AddrPort{c.Pods[1]: vip}, false), "nft", "-f", "-")
			table := []string{"ip", "ip6"}[i] + " t"
			labtest.Run(t, c.Node, "add rule "+table+" post ct status dnat iif 0 counter", "nft", "-f", "-")
			if r := c.Pods[0].Dial(snapshot.TCP, vip, lab.Options{}); r.Endpoint != c.Pods[1].Name {
				t.Fatalf("plain %v, %s: %s", plain, f, r)
			}
			chain := labtest.Run(t, c.Node, "", "nft", "list", "chain", strings.Fields(table)[0], "t", "post")
			if stayed := !strings.Contains(chain, "counter packets 0 "); stayed == plain {
				t.Errorf("plain %v, %s: stayed on the bridge: %v", plain, f, stayed)
			}
		}
	}
}
