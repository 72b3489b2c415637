package dataplane

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func startingAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)}) }

// startingDelta gives a Service with some endpoints on nodes n1, n2, ..., and how some of them start, by their index.
func startingDelta(n snapshot.Name, s *snapshot.Scheduling, endpoints int, tenths map[int]uint8) snapshot.Delta {
	sl := &snapshot.Slice{Name: n, Service: n.Name, Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 80}}}
	starting := &snapshot.Starting{}
	for i := range endpoints {
		sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: startingAddr(i), Node: fmt.Sprint("n", i), Ready: true,
			Serving: true})
		if tenths[i] > 0 {
			starting.Endpoints = append(starting.Endpoints, snapshot.StartingEndpoint{
				Endpoint: netip.AddrPortFrom(startingAddr(i), 0), Tenths: tenths[i]})
		}
	}
	return snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{n: {Name: n, Scheduling: s, Age: snapshot.Age{UID: n.Name},
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
			Ports:      []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}},
		Slices:   map[snapshot.Name]*snapshot.Slice{n: sl},
		Starting: map[snapshot.Name]*snapshot.Starting{n: starting},
	}
}

// TestSlowStartWeights: an endpoint that starts has its part of its weight; if all are alike, or the choice knows no
// weights, the Service is as without a slow start.
func TestSlowStartWeights(t *testing.T) {
	n := snapshot.Name{Namespace: "a", Name: "web"}
	for _, test := range []struct {
		name   string
		s      *snapshot.Scheduling
		n      int
		tenths map[int]uint8
		want   string
	}{
		{"one of three", nil, 3, map[int]uint8{2: 4}, "[11 11 4]"},
		{"the least", nil, 3, map[int]uint8{2: 1}, "[11 11 1]"},
		{"the last step", nil, 3, map[int]uint8{2: 9}, "[11 11 10]"},
		{"all together", nil, 3, map[int]uint8{0: 3, 1: 3, 2: 3}, "[0 0 0]"},
		{"all, one before the others", nil, 3, map[int]uint8{0: 6, 1: 3, 2: 3}, "[7 3 3]"},
		{"alone", nil, 1, map[int]uint8{0: 1}, "[0]"},
		{"weights", &snapshot.Scheduling{Weights: map[string]uint16{"n0": 3, "n1": 2}}, 2, map[int]uint8{0: 5}, "[18 22]"},
		{"the largest weight", &snapshot.Scheduling{Weights: map[string]uint16{"n0": 65535, "n1": 1}}, 2,
			map[int]uint8{1: 5}, "[65535 1]"},
		{"hash", &snapshot.Scheduling{Scheduler: snapshot.Hash}, 3, map[int]uint8{2: 4}, "[0 0 0]"},
		{"wlc", &snapshot.Scheduling{Scheduler: "wlc"}, 3, map[int]uint8{2: 4}, "[11 11 4]"},
		{"ovf", &snapshot.Scheduling{Scheduler: "ovf"}, 3, map[int]uint8{2: 4}, "[1 1 1]"},
	} {
		snap := snapshot.New()
		snap.Apply(startingDelta(n, test.s, test.n, test.tenths))
		st, _ := Compute(Config{IPVS: IPVS{Mode: IPVSAuto}}, snap)
		var got []uint16
		for _, e := range st.Services[n].Ports[0].Cluster.Endpoints {
			got = append(got, e.Weight)
		}
		if fmt.Sprint(got) != test.want {
			t.Errorf("%s: %v, want %s", test.name, got, test.want)
		}
	}
}

// TestSlowStartSlots: while an endpoint starts, a pool has at most eleven slots for each, and large ones three.
func TestSlowStartSlots(t *testing.T) {
	n := snapshot.Name{Namespace: "a", Name: "web"}
	for endpoints, most := range map[int]int{2: 22, 10: 110, 93: 1023, 100: 700, 200: 1000, 1000: 3000} {
		for tenths := uint8(1); tenths < snapshot.FullTenths; tenths++ {
			snap := snapshot.New()
			snap.Apply(startingDelta(n, nil, endpoints, map[int]uint8{1: tenths}))
			st, _ := Compute(Config{}, snap)
			if slots := st.Services[n].Ports[0].Cluster.slots(NoHash); slots <= endpoints || slots > most {
				t.Errorf("%d endpoints, %d tenths: %d slots, want at most %d", endpoints, tenths, slots, most)
			}
		}
	}
}

// TestSlowStartsWithinTheSlots counts what the meanest tenant may have: thousands of Services of which endpoints start
// all the time have no more slots than a namespace may, and the others' endpoints have equal chances.
func TestSlowStartsWithinTheSlots(t *testing.T) {
	const services, endpoints = 3000, 10
	snap, p := snapshot.New(), NewPlanner(Config{})
	for i := range services {
		n := snapshot.Name{Namespace: "mean", Name: fmt.Sprintf("s%04d", i)}
		d := startingDelta(n, nil, endpoints, map[int]uint8{1: uint8(1 + i%9), 2: uint8(1 + i%7)})
		d.Services[n].ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}
		snap.Apply(d)
	}
	p.Apply(snap, snapshot.Change{})
	slots, equal := 0, 0
	for _, svc := range p.State().Services {
		if n := svc.Ports[0].Cluster.slots(NoHash); n > 0 {
			slots += n
		} else if equal++; svc.NotScheduled() != SlotsFull {
			t.Fatalf("%v has equal chances: %v", svc.Name, svc.NotScheduled())
		}
	}
	if slots > MaxSlotsPerNamespace || slots < MaxSlotsPerNamespace*3/4 || equal == 0 {
		t.Errorf("%d slots and %d Services with equal chances, want at most %d slots", slots, equal, MaxSlotsPerNamespace)
	}
}

// TestExplainSlowStart: explain says how an endpoint starts, with the weights that are programmed.
func TestExplainSlowStart(t *testing.T) {
	n := snapshot.Name{Namespace: "a", Name: "web"}
	snap := snapshot.New()
	snap.Apply(startingDelta(n, nil, 3, map[int]uint8{2: 4}))
	x := Explain(Config{}, snap, Question{Source: netip.MustParseAddr("10.244.9.9"),
		Key: Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80}})
	for i, e := range x.Endpoints {
		if want := i == 2; want != (e.Starting != nil) || want && (e.Starting.Tenths != 4 || e.Share() != 4) {
			t.Errorf("%v: %+v, share %d", e.AddrPort, e.Starting, e.Share())
		}
	}
}
