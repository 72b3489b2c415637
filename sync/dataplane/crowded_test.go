package dataplane

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestCrowdedServices: a Service may have very many ports, slices and endpoints; what it costs is bounded all the same.
func TestCrowdedServices(t *testing.T) {
	large := func(ports, slices, endpoints int) *snapshot.Snapshot {
		s := snapshot.New()
		svc := webService("a", "10.96.0.1")
		svc.Ports = nil
		var slicePorts []snapshot.SlicePort
		for i := range ports {
			svc.Ports = append(svc.Ports, snapshot.Port{Name: fmt.Sprint("p", i), Protocol: snapshot.TCP, Port: uint16(i + 1)})
			slicePorts = append(slicePorts, snapshot.SlicePort{Name: fmt.Sprint("p", i), Protocol: snapshot.TCP,
				Port: uint16(i + 1)})
		}
		put(s, svc)
		for i := range slices {
			sl := sliceOf("a", fmt.Sprintf("a-%04d", i))
			sl.Ports = slicePorts
			for j := range endpoints {
				e := endpoint("10.0.0.1", "x")
				e.Addr = netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(j)})
				sl.Endpoints = append(sl.Endpoints, e)
			}
			put(s, sl)
		}
		return s
	}
	for _, c := range []struct {
		ports, slices, endpoints int
		want                     int
		crowded                  bool
	}{
		{1, 40, 250, 10_000, false},
		{50, 10, 100, 50_000, false},
		{1024, 10, 250, maxEndpoints, true},
		{1, 600, 250, maxEndpoints, true},
		{1024, 1000, 0, 0, true},
	} {
		svc := large(c.ports, c.slices, c.endpoints)
		st, _ := Compute(Config{}, svc)
		got := 0
		for _, sp := range st.Services[name("a")].Ports {
			got += len(sp.Cluster.Endpoints)
		}
		if got != c.want || st.Services[name("a")].OverCapacity != c.crowded {
			t.Errorf("%d ports, %d slices of %d endpoints: %d endpoints, crowded %v; want %d, %v", c.ports, c.slices,
				c.endpoints,
				got, st.Services[name("a")].OverCapacity, c.want, c.crowded)
		}
	}
}
