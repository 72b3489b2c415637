package nft

import (
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestSlowStartWrites counts the slots that the steps of a slow start write: the first and the last step write about
// those that the pool has for its time, and at most one of the others writes more than two for an endpoint that starts.
func TestSlowStartWrites(t *testing.T) {
	for _, endpoints := range []int{2, 10, 50, 93, 146, 1000} {
		n := snapshot.Name{Namespace: "a", Name: "web"}
		svc := &snapshot.Service{Name: n, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
			Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}
		sl := &snapshot.Slice{Name: n, Service: n.Name, Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 80}}}
		for i := range endpoints {
			sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Ready: true,
				Addr: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})})
		}
		snap := snapshot.New()
		snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: svc},
			Slices: map[snapshot.Name]*snapshot.Slice{n: sl}})
		slots := func(tenths int) *pool {
			var st *snapshot.Starting
			if tenths < snapshot.FullTenths {
				st = &snapshot.Starting{Endpoints: []snapshot.StartingEndpoint{{Tenths: uint8(tenths),
					Endpoint: netip.AddrPortFrom(sl.Endpoints[endpoints-1].Addr, 0)}}}
			}
			snap.Apply(snapshot.Delta{Starting: map[snapshot.Name]*snapshot.Starting{n: st}})
			state, _ := dataplane.Compute(dataplane.Config{}, snap)
			pl := &pool{}
			pl.fill(poolID{}, state.Services[n].Ports[0].Cluster.Endpoints, dataplane.NoHash, 1<<17)
			pl.sortSlots()
			return pl
		}
		before, many := slots(snapshot.FullTenths).slots, 0
		var steps []int
		for tenths := 1; tenths <= snapshot.FullTenths; tenths++ {
			now := slots(tenths).assigned(before)
			steps = append(steps, changedSlots(before, now))
			if tenths > 1 && tenths < snapshot.FullTenths && steps[tenths-1] > 2 {
				many++ // fewer slots were enough for an error of 1 %
			}
			before = now
		}
		t.Logf("%d endpoints: %v slots written by each step", endpoints, steps)
		if len(before) != endpoints || many > 1 {
			t.Errorf("%d endpoints: %v slots written by each step, %d in the end", endpoints, steps, len(before))
		}
	}
}

// changedSlots counts slots that differ, came or went.
func changedSlots(a, b []netip.AddrPort) (n int) {
	for i := range max(len(a), len(b)) {
		if i >= len(a) || i >= len(b) || a[i] != b[i] {
			n++
		}
	}
	return n
}
