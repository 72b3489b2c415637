package compare_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/answers/compare"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// keeping is a Service of both families that keeps its clients' addresses, with endpoints on some nodes, as node-1 sees
// it on a link with node-2 and node-3.
func keeping(edit func(*snapshot.Service), device string, nodes ...string) *dataplane.State {
	name := snapshot.Name{Namespace: "shop", Name: "web"}
	addrs := func(text ...string) (list []netip.Addr) {
		for _, s := range text {
			list = append(list, netip.MustParseAddr(s))
		}
		return list
	}
	svc := &snapshot.Service{Name: name, ClientAddress: snapshot.ClientAddressKeep,
		ClusterIPs: addrs("10.96.0.80", "fd00:96::80"), LoadBalancerIPs: addrs("203.0.113.10", "2001:db8:113::10"),
		Ports: []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80, NodePort: 30080},
			{Name: "dns", Protocol: snapshot.UDP, Port: 53}}}
	if edit != nil {
		edit(svc)
	}
	d := snapshot.Delta{HostAddrs: &keepHost, Services: map[snapshot.Name]*snapshot.Service{name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{}, Node: &snapshot.Node{Name: "node-1", Addresses: keepHost[1:]},
		Link: &snapshot.Link{Device: device, Nodes: map[string]snapshot.Neighbour{}}}
	for n := 2; n < 4; n++ {
		at := addrs(fmt.Sprint("192.0.2.", n), fmt.Sprint("2001:db8:2::", n))
		d.Link.Nodes[fmt.Sprint("node-", n)] = snapshot.Neighbour{Addrs: ipfamily.Per[netip.Addr]{at[0], at[1]},
			MACs: []snapshot.MAC{{2, 5: byte(n)}}}
	}
	for _, f := range ipfamily.All {
		slice := &snapshot.Slice{Name: snapshot.Name{Namespace: "shop", Name: "web-" + f.String()}, Service: "web",
			Ports: []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080},
				{Name: "dns", Protocol: snapshot.UDP, Port: 5353}}}
		for i, n := range nodes {
			slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Node: n, Ready: true, Serving: true,
				Addr: addrs(fmt.Sprint("10.244.1.", i+1), fmt.Sprint("fd00:244::", i+1))[f]})
		}
		d.Slices[slice.Name] = slice
	}
	snap := snapshot.New()
	snap.Apply(d)
	state, _ := dataplane.Compute(dataplane.Config{NodeName: "node-1", DetectLocal: dataplane.DetectLocal{
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/64")}}}, snap)
	return state
}

// keepHost are the addresses of node-1.
var keepHost = []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.1"),
	netip.MustParseAddr("2001:db8:2::1")}

// verdictSide reads Verdict's tables of a host.
func verdictSide(t *testing.T, h *lab.Host) (s compare.Side) {
	t.Helper()
	labtest.Check(t, h.Do(func() (err error) {
		s, err = compare.ReadVerdict(&packets.Host{Addrs: keepHost})
		return err
	}))
	return s
}

// compared compares sides with what a State asks for.
func compared(t *testing.T, state *dataplane.State, sides ...compare.Side) *compare.Result {
	t.Helper()
	r, err := compare.Compare(compare.Input{Host: keepHost, Pods: podsOf(state), State: state, Sides: sides})
	labtest.Check(t, err)
	report(t, r)
	return r
}

// TestClientAddress walks packets through the tables at the ingress: they divide clients as the objects say, whoever
// sends a packet, on a node with and without endpoints, and what others change there is found.
func TestClientAddress(t *testing.T) {
	ranges := func(s *snapshot.Service) {
		s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("2001:db8::/33")}
	}
	sticky := func(s *snapshot.Service) { s.Affinity = 60e9 }
	for what, c := range map[string]struct {
		edit   func(*snapshot.Service)
		nodes  []string
		device string
	}{
		"others":                      {nil, []string{"node-2", "node-3", "node-3"}, "eth5"},
		"shared":                      {nil, []string{"node-1", "node-1", "node-2"}, "eth5"},
		"here":                        {nil, []string{"node-1"}, "eth5"},
		"by address":                  {sticky, []string{"node-1", "node-1", "node-3"}, "eth5"},
		"source ranges":               {ranges, []string{"node-1", "node-2"}, "eth5"},
		"by manifests alone":          {nil, []string{"node-1", "node-2"}, snapshot.AnyDevice},
		"with externalTrafficPolicy":  {func(s *snapshot.Service) { s.ExternalLocal = true }, []string{"node-2"}, "eth5"},
		"as many nodes as there are":  {nil, []string{"node-1", "node-2", "node-3"}, "eth5"},
		"one that is behind a router": {nil, []string{"node-1", "node-4"}, "eth5"},
	} {
		t.Run(what, func(t *testing.T) {
			state := keeping(c.edit, c.device, c.nodes...)
			side, err := compare.Compile(state, keepHost)
			labtest.Check(t, err)
			r := compared(t, state, side)
			for _, g := range r.Groups {
				if g.Reason != "slots" || g.Kind != compare.LoadBalancerIP {
					t.Errorf("%d classes differ: %+v", g.Count, g.Examples)
				}
			}
			if r.Same+r.Explained != r.Classes || r.Same == 0 {
				t.Errorf("%d and %d of %d classes are the same", r.Same, r.Explained, r.Classes)
			}
		})
	}
}

// TestClientAddressFaults: what others change in the tables at the ingress is found.
func TestClientAddressFaults(t *testing.T) {
	state := keeping(nil, "eth5", "node-1", "node-2", "node-2")
	for what, fault := range map[string]string{
		"no slots":             "flush map netdev verdict kept-slots",
		"no node":              "flush map netdev verdict6 kept-nodes",
		"not its own":          "flush set netdev verdict kept-own",
		"all packets go on":    "insert rule netdev verdict keep-ingress counter accept",
		"forwards those again": "flush set netdev verdict6 node-macs",
		"no frontend":          "flush map netdev verdict kept",
		"one table is gone":    "delete table netdev verdict6",
		"to nobody's address": "flush chain netdev verdict keep-forward\n" +
			"add rule netdev verdict keep-forward fwd ip to 192.0.2.99 device eth5",
	} {
		t.Run(what, func(t *testing.T) {
			h := hostWith(t, "eth5", state)
			before := verdictSide(t, h)
			if r := compared(t, state, before); !r.OK() {
				t.Fatal("it differs before")
			}
			labtest.Run(t, h, fault+"\n", "nft", "-f", "-")
			after := verdictSide(t, h)
			if r := compared(t, state, after); r.OK() || after.Digest == before.Digest {
				t.Error("nothing differs")
			}
		})
	}
}

// hostWith has Verdict write a State on a host with a device.
func hostWith(t *testing.T, device string, state *dataplane.State) *lab.Host {
	t.Helper()
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Run(t, h, "", "ip", "link", "add", device, "type", "veth")
	writeOn(t, h, state)
	return h
}

// TestClientAddressAsKubeProxy: a proxy that masquerades differs for clients from outside and for pods, and for a known
// reason. Without objects, the tables say which device it is about.
func TestClientAddressAsKubeProxy(t *testing.T) {
	state := keeping(nil, "eth5", "node-1", "node-2")
	ours, err := compare.Compile(state, keepHost)
	labtest.Check(t, err)
	masquerade := func(s *snapshot.Service) { s.ClientAddress = snapshot.ClientAddressMasquerade }
	theirs, err := compare.Compile(keeping(masquerade, "eth5", "node-1", "node-2"), keepHost)
	labtest.Check(t, err)
	theirs.Name = compare.NFTables
	r := compared(t, state, ours, theirs)
	found := map[compare.Sender]bool{}
	for _, g := range r.Groups {
		found[g.Sender] = found[g.Sender] || g.Reason == "client-address"
	}
	if !r.OK() || !found[compare.FromOutside] || !found[compare.FromNeighbour] || found[compare.FromNode] {
		t.Errorf("%d are unexplained; of these senders there are differences: %v", r.Unexplained, found)
	}
	r, err = compare.Compare(compare.Input{Host: keepHost, Pods: podsOf(state), Sides: []compare.Side{ours, theirs}})
	labtest.Check(t, err)
	forwarded := false
	for _, g := range r.Groups {
		for _, d := range g.Examples {
			forwarded = forwarded || strings.Contains(d.Outcomes[0], "forwarded to 192.0.2.2")
		}
	}
	if !forwarded {
		t.Errorf("without objects, nothing is forwarded: %+v", r.Groups)
	}
}
