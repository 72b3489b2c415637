package iptshim

import (
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestSettings: the rules tell by what flags they were made.
func TestSettings(t *testing.T) {
	key := dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80}
	name := snapshot.Name{Namespace: "shop", Name: "cart"}
	for _, want := range []Settings{
		{Pods: dataplane.Pods{CIDR: netip.MustParsePrefix("10.244.0.0/16")}},
		{Pods: dataplane.Pods{Interface: "cni0"}, GuardLoopback: true},
		{Pods: dataplane.Pods{InterfacePrefix: "veth"}},
		{MasqueradeAll: true, GuardLoopback: true},
	} {
		snap := snapshot.New()
		snap.Apply(snapshot.Delta{
			Services: map[snapshot.Name]*snapshot.Service{name: {Name: name, ClusterIPs: []netip.Addr{key.Addr},
				Ports: []snapshot.Port{{Protocol: key.Protocol, Port: key.Port}}}},
			Slices: map[snapshot.Name]*snapshot.Slice{name: {Name: name, Service: name.Name,
				Ports:     []snapshot.SlicePort{{Protocol: key.Protocol, Port: 8080}},
				Endpoints: []snapshot.Endpoint{{Addr: netip.MustParseAddr("10.244.1.1"), Ready: true, Serving: true}}}}})
		config := dataplane.Config{NodeName: "node", MasqueradeAll: want.MasqueradeAll,
			LocalhostNodePorts: want.GuardLoopback}
		switch p := want.Pods; {
		case p.CIDR.IsValid():
			config.DetectLocal.ClusterCIDRs = []netip.Prefix{p.CIDR}
		case p.Interface != "":
			config.DetectLocal = dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: p.Interface}
		case p.InterfacePrefix != "":
			config.DetectLocal = dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: p.InterfacePrefix}
		}
		st, _ := dataplane.Compute(config, snap)
		m := New(Options{})
		m.Plan(st, dataplane.Change{})
		saved, err := Parse(m.Full(ipfamily.IPv4))
		if err != nil {
			t.Fatal(err)
		}
		if got := saved.Settings(); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		if saved.Rules() == 0 {
			t.Error("no rules were counted")
		}
	}
}
