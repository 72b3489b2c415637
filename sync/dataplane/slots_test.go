package dataplane

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestSlotsPerNamespace: hashes and weights take slots up to the share of a namespace, the oldest Services first. The
// others choose at random and with equal chances, until there is room.
func TestSlotsPerNamespace(t *testing.T) {
	const fit = MaxSlotsPerNamespace / hashSlots
	objects := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	add := func(namespace string, i int, s *snapshot.Scheduling) snapshot.Name {
		n := snapshot.Name{Namespace: namespace, Name: fmt.Sprintf("web-%02d", i)}
		objects.Services[n] = &snapshot.Service{Name: n, Age: snapshot.Age{Created: int64(i + 1)}, Scheduling: s,
			ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, namespace[0], byte(i)})},
			Ports:      []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}
		objects.Slices[n] = &snapshot.Slice{Name: n, Service: n.Name,
			Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 80}}, Endpoints: []snapshot.Endpoint{
				{Addr: netip.MustParseAddr("10.244.0.1"), Node: "a", Ready: true, Serving: true},
				{Addr: netip.MustParseAddr("10.244.0.2"), Node: "b", Ready: true, Serving: true}}}
		return n
	}
	for i := range fit + 2 {
		add("greedy", i, &snapshot.Scheduling{Scheduler: snapshot.Hash})
	}
	weighted := add("greedy", 99, &snapshot.Scheduling{Weights: map[string]uint16{"a": 997, "b": 1}})
	other := add("other", 1, &snapshot.Scheduling{Scheduler: snapshot.Hash})
	snap, p := snapshot.New(), NewPlanner(Config{})
	p.Apply(snap, snap.Apply(objects))
	count := func() (hashes int) {
		for n, svc := range p.State().Services {
			if n.Namespace == "greedy" && svc.Ports[0].Hash != NoHash {
				hashes++
			}
		}
		return hashes
	}
	if n := count(); n != fit {
		t.Errorf("%d Services have a hash, want %d", n, fit)
	}
	last := p.State().Services[weighted]
	if w := last.Ports[0].Cluster.Endpoints[0].Weight; w != 0 || last.NotScheduled() != SlotsFull {
		t.Errorf("the youngest Service has weight %d: %v", w, last.NotScheduled())
	}
	if p.State().Services[other].Ports[0].Hash == NoHash {
		t.Error("a Service of another namespace has no hash")
	}
	gone := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}}
	for i := range fit / 2 {
		gone.Services[snapshot.Name{Namespace: "greedy", Name: fmt.Sprintf("web-%02d", i)}] = nil
	}
	p.Apply(snap, snap.Apply(gone))
	if n := count(); n != fit+2-fit/2 {
		t.Errorf("once there is room, %d Services have a hash", n)
	}
	if w := p.State().Services[weighted].Ports[0].Cluster.Endpoints[0].Weight; w == 0 {
		t.Error("once there is room, the youngest Service has no weights")
	}
}
