package dataplane

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// keeping is a Service that keeps its clients' addresses, with an endpoint on each of some nodes, as node "a" sees it
// whose neighbours are "b" and "c".
func keeping(edit func(*snapshot.Snapshot, *Config), nodes ...string) (*State, *ServicePort) {
	s, cfg := snapshot.New(), Config{NodeName: "a"}
	svc := &snapshot.Service{Name: name("web"), ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		LoadBalancerIPs: []netip.Addr{netip.MustParseAddr("203.0.113.1")}, ClientAddress: snapshot.ClientAddressKeep,
		Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80, NodePort: 30080}}}
	slice := &snapshot.Slice{Name: name("web-1"), Service: "web",
		Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}}}
	addr := netip.MustParseAddr("10.244.0.1")
	for _, n := range nodes {
		slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: addr, Node: n, Ready: true, Serving: true})
		addr = addr.Next()
	}
	host := []netip.Addr{netip.MustParseAddr("192.0.2.2")}
	at := func(a string) snapshot.Neighbour {
		return snapshot.Neighbour{Addrs: ipfamily.Per[netip.Addr]{netip.MustParseAddr(a)}, MACs: []snapshot.MAC{{5: a[8]}}}
	}
	s.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc}, HostAddrs: &host,
		Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}, Node: &snapshot.Node{Name: "a", Addresses: host},
		Link: &snapshot.Link{Device: "eth0", Nodes: map[string]snapshot.Neighbour{
			"b": at("192.0.2.3"), "c": at("192.0.2.4")}}})
	if edit != nil {
		edit(s, &cfg)
	}
	st, _ := Compute(cfg, s)
	return st, st.Services[svc.Name].Ports[0]
}

// TestKeep: where a client's address is kept, who shares its packets, and why it is not.
func TestKeep(t *testing.T) {
	service := func(s *snapshot.Snapshot) *snapshot.Service { return s.Services[name("web")] }
	neighbour := func(s *snapshot.Snapshot, n string, edit func(*snapshot.Neighbour)) {
		x := s.Link.Nodes[n]
		edit(&x)
		s.Link.Nodes[n] = x
	}
	endpoint := func(s *snapshot.Snapshot, i int) *snapshot.Endpoint {
		return &s.Slices[name("web")]["web-1"].Endpoints[i]
	}
	ends := func(at ...int) func(*snapshot.Snapshot, *Config) {
		return func(s *snapshot.Snapshot, _ *Config) {
			for _, i := range at {
				endpoint(s, i).Ready, endpoint(s, i).Terminating = false, true
			}
		}
	}
	for what, c := range map[string]struct {
		edit  func(*snapshot.Snapshot, *Config)
		on    []string
		nodes []string // those of other nodes, and this one if it gets new connections
		kept  bool
		local bool
		why   NotKept
	}{
		"others": {on: []string{"b", "c"}, nodes: []string{"b", "c"}, kept: true},
		"shared": {on: []string{"a", "c"}, nodes: []string{"a", "c"}, kept: true, local: true},
		"here":   {on: []string{"a", "a"}, nodes: []string{"a"}, kept: true, local: true},
		"failed": {on: []string{"b", "c"}, nodes: []string{"c"}, kept: true, edit: func(s *snapshot.Snapshot, _ *Config) {
			neighbour(s, "b", func(n *snapshot.Neighbour) { n.Failed = ipfamily.Per[bool]{true} })
		}},
		"all failed": {on: []string{"b"}, why: NotKeptFailed, edit: func(s *snapshot.Snapshot, _ *Config) {
			neighbour(s, "b", func(n *snapshot.Neighbour) { n.Failed = ipfamily.Per[bool]{true} })
		}},
		"failed in the other family": {on: []string{"b"}, nodes: []string{"b"}, kept: true,
			edit: func(s *snapshot.Snapshot, _ *Config) {
				neighbour(s, "b", func(n *snapshot.Neighbour) { n.Failed[ipfamily.IPv6] = true })
			}},
		"off": {on: []string{"b"}, why: NotKeptOff, edit: func(_ *snapshot.Snapshot, c *Config) {
			c.ClientAddress = KeepNone
		}},
		"one that ends":      {on: []string{"b", "c"}, nodes: []string{"b for no new ones", "c"}, kept: true, edit: ends(0)},
		"the last here ends": {on: []string{"a", "c"}, nodes: []string{"a for no new ones", "c"}, kept: true, edit: ends(0)},
		"all elsewhere end": {on: []string{"a", "b"}, nodes: []string{"a", "b for no new ones"}, kept: true, local: true,
			edit: ends(1)},
		"all end": {on: []string{"b", "c"}, nodes: []string{"b", "c"}, kept: true, edit: ends(0, 1)},
		"one that is not ready": {on: []string{"b", "c"}, nodes: []string{"b for no new ones", "c"}, kept: true,
			edit: func(s *snapshot.Snapshot, _ *Config) { endpoint(s, 0).Ready, endpoint(s, 0).Serving = false, false }},
		"of UDP, that is not ready": {on: []string{"b", "c"}, nodes: []string{"c"}, kept: true,
			edit: func(s *snapshot.Snapshot, _ *Config) {
				service(s).Ports[0].Protocol, s.Slices[name("web")]["web-1"].Ports[0].Protocol = snapshot.UDP, snapshot.UDP
				endpoint(s, 0).Ready, endpoint(s, 0).Serving = false, false
			}},
		"of UDP, that ends": {on: []string{"b", "c"}, nodes: []string{"b for no new ones", "c"}, kept: true,
			edit: func(s *snapshot.Snapshot, c *Config) {
				service(s).Ports[0].Protocol, s.Slices[name("web")]["web-1"].Ports[0].Protocol = snapshot.UDP, snapshot.UDP
				ends(0)(s, c)
			}},
		"one that ends behind a router": {on: []string{"b", "c"}, nodes: []string{"c"}, kept: true,
			edit: func(s *snapshot.Snapshot, c *Config) {
				neighbour(s, "b", func(n *snapshot.Neighbour) { n.Addrs[ipfamily.IPv4] = netip.Addr{} })
				ends(0)(s, c)
			}},
		"behind a router": {on: []string{"a", "b"}, why: NotKeptOffLink, edit: func(s *snapshot.Snapshot, _ *Config) {
			neighbour(s, "b", func(n *snapshot.Neighbour) { n.Addrs[ipfamily.IPv4] = netip.Addr{} })
		}},
		"unknown node": {on: []string{"a", ""}, why: NotKeptOffLink},
		"unknown node, and a known one": {on: []string{"b", ""}, nodes: []string{"a", "b for no new ones"},
			why: NotKeptOffLink},
		"none is ready": {on: []string{"b"}, nodes: []string{"a", "b for no new ones"}, why: NotKeptNowhere,
			edit: func(s *snapshot.Snapshot, _ *Config) { endpoint(s, 0).Ready, endpoint(s, 0).Serving = false, false }},
		"no endpoint": {why: NotKeptNowhere},
		"no device": {on: []string{"b"}, why: NotKeptDevice, edit: func(s *snapshot.Snapshot, _ *Config) {
			s.Link = snapshot.Link{}
		}},
		"backend": {on: []string{"b"}, why: NotKeptBackend, edit: func(_ *snapshot.Snapshot, c *Config) {
			c.CannotKeep = true
		}},
		"a device that the kernel refuses": {on: []string{"b"}, why: NotKeptBackend,
			edit: func(s *snapshot.Snapshot, _ *Config) { s.Link.Refused = true }},
		"not asked": {on: []string{"b"}, edit: func(s *snapshot.Snapshot, _ *Config) {
			service(s).ClientAddress = snapshot.ClientAddressDefault
		}},
		"by the node's setting": {on: []string{"b"}, nodes: []string{"b"}, kept: true,
			edit: func(s *snapshot.Snapshot, c *Config) {
				service(s).ClientAddress, c.ClientAddress = snapshot.ClientAddressDefault, KeepLoadBalancers
			}},
		"against the node's setting": {on: []string{"b"}, edit: func(s *snapshot.Snapshot, c *Config) {
			service(s).ClientAddress, c.ClientAddress = snapshot.ClientAddressMasquerade, KeepLoadBalancers
		}},
	} {
		st, sp := keeping(c.edit, c.on...)
		var nodes []string
		if sp.Keep != nil {
			if !slices.ContainsFunc(sp.Keep.Nodes, func(n KeepNode) bool { return n.Own }) {
				t.Errorf("%s: this node does not keep the connections that it has: %+v", what, sp.Keep.Nodes)
			}
			for _, n := range sp.Keep.Nodes {
				if n.Own && n.Weight == 0 && c.nodes[0] != "a for no new ones" {
					continue
				}
				if n.Weight == 0 {
					n.Name += " for no new ones"
				}
				nodes = append(nodes, n.Name)
			}
		}
		if !slices.Equal(nodes, c.nodes) || sp.NotKept != c.why {
			t.Errorf("%s: the nodes %v, and not kept because of %q", what, nodes, sp.NotKept)
		}
		served := c.why != NotKeptNowhere
		for i := range sp.Frontends {
			f := &sp.Frontends[i]
			r, outer := f.Route(Anyone), f.Kind == LoadBalancerIP
			if f.Kept != (c.kept && outer) ||
				f.Kind != ClusterIP && served && (r.Pool == sp.Local) != (c.local && outer) ||
				outer && r.SNAT == c.local || f.Kind != ClusterIP && f.Route(Node).Pool != sp.Cluster && served {
				t.Errorf("%s: %v: kept %v, routes %+v", what, f.Key, f.Kept, f.Routes)
			}
		}
		none := c.why == NotKeptDevice || c.why == NotKeptBackend || c.why == NotKeptOff
		if why := st.Services[name("web")].NotKept(); why != c.why && c.why != NotKeptNowhere {
			t.Errorf("%s: the Service is not kept because of %q", what, why)
		}
		if (st.Device == "") != none || (len(st.NodeMACs) == 2) == none {
			t.Errorf("%s: device %q, %v", what, st.Device, st.NodeMACs)
		}
	}
}
