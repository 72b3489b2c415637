package dataplane

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestLines: no setting is forgotten in the lines, and what is read from them is what was written.
func TestLines(t *testing.T) {
	testkit.Compares(t, func(a, b *Config) bool {
		// Only two modes have an interface.
		a.DetectLocal.Mode, b.DetectLocal.Mode = a.DetectLocal.Mode%4, b.DetectLocal.Mode%4
		a.IPVS.Mode, b.IPVS.Mode = a.IPVS.Mode%3, b.IPVS.Mode%3
		a.ClientAddress, b.ClientAddress = a.ClientAddress%3, b.ClientAddress%3
		return slices.Equal(a.Lines(), b.Lines())
	}, "NodeName", "DetectLocal.Interface", // tested below
		"IPVS.Default.Port", "IPVS.Default.Fallback", // which follow from the scheduler
		"IPVS.MaxPerService", "IPVS.MaxPerNamespace") // which only tests change
	for _, c := range []Config{
		{},
		{SecondChance: snapshot.SecondChanceOn, PingServices: true, RejectUnusedPorts: true, LocalhostNodePorts: true,
			IPVS: IPVS{Mode: IPVSAuto, Default: Scheduling{Scheduler: "mh", Port: true},
				Addresses: prefixes("192.0.2.0/24 2001:db8::/64")}},
		{SecondChance: snapshot.SecondChanceObserve, MasqueradeAll: true, NoExternalIPs: true, NodeIP: addr("fd00::1"),
			APIServer:       addr("192.0.2.5"),
			NodePortPrimary: true, NodePortAddresses: append(prefixes("10.0.0.0/8 ::/0"), netip.Prefix{}),
			DetectLocal: DetectLocal{ClusterCIDRs: prefixes("10.244.0.0/16 fd00:244::/48")}},
		{DetectLocal: DetectLocal{Mode: DetectBridgeInterface, Interface: "cni0"}},
		{DetectLocal: DetectLocal{Mode: DetectInterfaceNamePrefix, Interface: "veth"}},
		{DetectLocal: DetectLocal{Mode: DetectNodeCIDR}, LastResort: true},
	} {
		if c.SecondChance == snapshot.SecondChanceDefault {
			c.SecondChance = snapshot.SecondChanceOff // which it means
		}
		got := ConfigOf(append(c.Lines(), "a line", "of=another version"))
		if !reflect.DeepEqual(got, c) {
			t.Errorf("of %q: %+v, want %+v", c.Lines(), got, c)
		}
	}
}

// TestEjectionsFromBackends: what a backend tells of all pools of a Service, in whole seconds, gives the same pools
// again, and the same rules for refused connections.
func TestEjectionsFromBackends(t *testing.T) {
	svc := &snapshot.Service{Name: name("a"), ClusterIPs: addrs("10.96.0.1"), Ports: tcp80(0), ExternalLocal: true,
		LoadBalancerIPs: addrs("192.0.2.1")}
	var endpoints []snapshot.Endpoint
	health := &snapshot.Health{}
	at := time.Date(2026, 11, 26, 12, 3, 4, 0, time.UTC)
	for i := range 8 {
		node := "n1"
		if i%2 == 0 {
			node = "n2"
		}
		ep := endpoint(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}).String(), node)
		endpoints = append(endpoints, ep)
		if i < 7 {
			health.Unhealthy = append(health.Unhealthy, snapshot.Unhealthy{Endpoint: netip.AddrPortFrom(ep.Addr, 8080),
				Cause: snapshot.Refused, Since: at.Add(time.Duration(-i*3) * time.Second / 7)})
		}
	}
	cfg := Config{NodeName: "n1", SecondChance: snapshot.SecondChanceOn,
		DetectLocal: DetectLocal{ClusterCIDRs: prefixes("10.0.0.0/8")}}
	compute := func(h map[snapshot.Name]*snapshot.Health) *ServicePort {
		s := snapshot.New()
		put(s, svc, sliceOf("a", "a", endpoints...))
		s.Apply(snapshot.Delta{Health: h})
		st, _ := Compute(cfg, s)
		return st.Services[svc.Name].Ports[0]
	}
	want := compute(map[snapshot.Name]*snapshot.Health{svc.Name: health})
	if len(want.Cluster.Ejected) != 4 || len(want.Cluster.Kept) != 3 || len(want.Local.Ejected) != 2 {
		t.Fatalf("%+v, %+v", want.Cluster, want.Local)
	}
	var told []EndpointHealth
	for i, p := range []*Pool{want.Cluster, want.Local} {
		for _, u := range slices.Concat(p.Ejected, p.Kept) {
			u.Since = u.Since.Truncate(time.Second)
			told = append(told, EndpointHealth{Port: want.Name, Pool: uint32(i), Unhealthy: u, Ejected: p.Ejects(u.Endpoint)})
		}
	}
	slices.Reverse(told)
	got := compute(HealthOf(told))
	for i, p := range []*Pool{got.Cluster, got.Local} {
		w := []*Pool{want.Cluster, want.Local}[i]
		if !slices.Equal(p.Endpoints, w.Endpoints) || p.RetryRefused != w.RetryRefused || len(p.Ejected) != len(w.Ejected) {
			t.Errorf("%+v\nwant %+v", p, w)
		}
	}
}
