package dataplane

import (
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestScheduling(t *testing.T) {
	standard := Scheduling{Scheduler: "rr"}
	for _, c := range []struct {
		title string
		mode  IPVSMode
		asks  *snapshot.Scheduling
		want  *Scheduling
	}{
		{"nobody asks", IPVSAuto, nil, nil},
		{"asked for", IPVSAuto, &snapshot.Scheduling{Scheduler: "mh", Port: true}, &Scheduling{Scheduler: "mh", Port: true}},
		{"weights alone ask for nothing", IPVSAuto, &snapshot.Scheduling{Weights: map[string]uint16{"here": 2}}, nil},
		{"always", IPVSAlways, nil, &standard},
		{"always, with a wish", IPVSAlways, &snapshot.Scheduling{Scheduler: "lc"}, &Scheduling{Scheduler: "lc"}},
		{"always, but not this one", IPVSAlways, &snapshot.Scheduling{Scheduler: snapshot.NFTables}, nil},
		{"never", IPVSNever, &snapshot.Scheduling{Scheduler: "lc"}, nil},
	} {
		h := host{ipvs: IPVS{Mode: c.mode, Default: standard}}
		if got := h.scheduling(&snapshot.Service{Scheduling: c.asks}); !equalScheduling(got, c.want) {
			t.Errorf("%s: %+v, want %+v", c.title, got, c.want)
		}
	}
}

// TestWeights: an endpoint's own weight goes before that of its node, and where IPVS does not schedule there is none,
// so that nothing changes by it.
func TestWeights(t *testing.T) {
	s := snapshot.New()
	svc := &snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.1"),
		Ports:      []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}},
		Scheduling: &snapshot.Scheduling{Scheduler: "wrr", Weights: map[string]uint16{"there": 5}}}
	slice := &snapshot.Slice{Name: name("web-1"), Service: "web",
		Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}}}
	for i, a := range addrs("10.244.9.1 10.244.9.2 10.244.9.3") {
		slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: a, Node: []string{"here", "there", "there"}[i],
			Ready: true, Serving: true,
			Weight: []uint16{0, 0, 7}[i]})
	}
	s.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}})
	for mode, want := range map[IPVSMode][]uint16{IPVSAuto: {1, 5, 7}, IPVSNever: {0, 0, 0}} {
		st, _ := Compute(Config{NodeName: "here", IPVS: IPVS{Mode: mode}}, s)
		for i, ep := range st.Services[svc.Name].Ports[0].Cluster.Endpoints {
			if ep.Weight != want[i] {
				t.Errorf("mode %d: %v has weight %d, want %d", mode, ep.AddrPort, ep.Weight, want[i])
			}
		}
	}
}
