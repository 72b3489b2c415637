package dataplane

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestEqual: no field is forgotten when two versions of a Service, or of what all Services depend on, are compared.
func TestEqual(t *testing.T) {
	// The pool of a route is one of its port's, which are compared by themselves.
	testkit.Compares(t, (*Service).equal, "Ports[].Frontends[].Routes[].Pool")
	testkit.Compares(t, equalScheduling)
	testkit.Compares(t, (*IPVS).equal)
	// Those of host that are left out follow, or matter to no Service.
	testkit.Compares(t, (*host).equal, "loopback", "records", "settings", "device", "index", "macs")
	testkit.Compares(t, (*Service).sameClaims, "Name", "ClusterIPs", "SilentClusterIPs", "PingableIPs",
		"LoadBalancerIPs", "HealthCheckNodePort", "OverCapacity", "Counters", "Ports[].Hash",
		"Ports[].Affinity", "Ports[].Cluster", "Ports[].Local", "Ports[].Serving", "Ports[].Finishing", "Ports[].Scheduling",
		"Ports[].SecondChance", "Ports[].Probe", "Ports[].Resort", "Ports[].Drain", "Ports[].Rebalance",
		"Ports[].Limits", "Ports[].Full", "Ports[].FullClients", "Ports[].Keep", "Ports[].NotKept",
		"Ports[].Frontends[].Kept",
		"Ports[].Frontends[].NotScheduled", "Ports[].Frontends[].Routes", "Ports[].Frontends[].Sources")
}

// TestSetGlobals: a State takes over every field that is no Service's, and tells of a change of any of them.
func TestSetGlobals(t *testing.T) {
	h, cidrs := testkit.Filled[host](), []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	found := []Overlap{{Range: cidrs[0], Shared: cidrs[0]}}
	for field := range reflect.TypeFor[State]().Fields() {
		if field.Name == "Services" {
			continue
		}
		st := &State{}
		st.setGlobals(h, cidrs, found)
		reflect.ValueOf(st).Elem().FieldByIndex(field.Index).SetZero()
		if !st.setGlobals(h, cidrs, found) {
			t.Errorf("nobody notices that %s changed", field.Name)
		}
	}
	st := &State{}
	if !st.setGlobals(h, cidrs, found) || st.setGlobals(h, cidrs, found) {
		t.Error("a change is told once")
	}
}

// TestThen: no field of either Receipt is forgotten when two are added up. What the first left, the second has done,
// and whether the kernel refuses the device, the second says.
func TestThen(t *testing.T) {
	other := Receipt{Adopted: true}
	testkit.Compares(t, func(a, b *Receipt) bool { return reflect.DeepEqual(other.Then(*a), other.Then(*b)) })
	testkit.Compares(t, func(a, b *Receipt) bool { return reflect.DeepEqual(a.Then(other), b.Then(other)) }, "Left",
		"Refused")
}

// TestSamePackets: who decides about counters and shared addresses may differ, and a Service that is not there does
// what no other does.
func TestSamePackets(t *testing.T) {
	a := &Service{Name: name("a"), Counters: snapshot.CountersFirst, Age: snapshot.Age{Created: 1}}
	for _, c := range []struct {
		what string
		x, y *Service
		same bool
	}{
		{"neither is there", nil, nil, true},
		{"one comes", nil, a, false},
		{"one goes", a, nil, false},
		{"older, and not counted", a, &Service{Name: name("a"), Age: snapshot.Age{Created: 2}}, true},
		{"another port for health checks", a, &Service{Name: name("a"), HealthCheckNodePort: 1}, false},
	} {
		if got := c.x.SamePackets(c.y); got != c.same {
			t.Errorf("%s: the same is %v", c.what, got)
		}
	}
}
