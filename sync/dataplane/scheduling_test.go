package dataplane

import (
	"cmp"
	"fmt"
	"strings"
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
		if got := h.scheduling(&snapshot.Service{Scheduling: c.asks}, nil); !equalScheduling(got, c.want) {
			t.Errorf("%s: %+v, want %+v", c.title, got, c.want)
		}
	}
}

// TestSharesNeedNoScheduler: where IPVS schedules all Services, weights, zones and slow starts count without the name
// of a scheduler, as they do with nftables.
func TestSharesNeedNoScheduler(t *testing.T) {
	weights := &snapshot.Scheduling{Weights: map[string]uint16{"here": 3}}
	given := &snapshot.Slice{Endpoints: []snapshot.Endpoint{{}, {Weight: snapshot.Weight{Given: true, Parts: 300}}}}
	for _, c := range []struct {
		title   string
		mode    IPVSMode
		normal  Scheduling
		svc     snapshot.Service
		slice   *snapshot.Slice
		want    string
		nothing bool
	}{
		{title: "weights of nodes", svc: snapshot.Service{Scheduling: weights}, want: "wrr"},
		{title: "weights of a slice", slice: given, want: "wrr"},
		{title: "zones", svc: snapshot.Service{Scheduling: &snapshot.Scheduling{PreferNear: true}}, want: "wrr"},
		{title: "a slow start", svc: snapshot.Service{SlowStart: 30}, want: "wrr"},
		{title: "least connections", normal: Scheduling{Scheduler: "lc"}, svc: snapshot.Service{Scheduling: weights},
			want: "wlc"},
		{title: "a default that counts weights itself", normal: Scheduling{Scheduler: "mh", Port: true},
			svc: snapshot.Service{Scheduling: weights}, want: "mh,port"},
		{title: "a scheduler of its own", slice: given,
			svc: snapshot.Service{Scheduling: &snapshot.Scheduling{Scheduler: "rr"}}, want: "rr"},
		{title: "no shares", slice: &snapshot.Slice{Endpoints: make([]snapshot.Endpoint, 2)}, want: "rr"},
		{title: "not all Services", mode: IPVSAuto, slice: given, svc: snapshot.Service{Scheduling: weights}, nothing: true},
	} {
		h := host{ipvs: IPVS{Mode: cmp.Or(c.mode, IPVSAlways), Default: cmp.Or(c.normal, Scheduling{Scheduler: "rr"})}}
		var all []*snapshot.Slice
		if c.slice != nil {
			all = append(all, c.slice)
		}
		got := h.scheduling(&c.svc, all)
		if c.nothing != (got == nil) || got != nil && got.String() != c.want {
			t.Errorf("%s: %v, want %s", c.title, got, c.want)
		}
	}
}

// TestWeights: an endpoint's own weight goes before that of its node, whoever chooses, and 0 drains. Equal weights are
// no weights unless IPVS chooses. An endpoint without a weight has 100 of Cilium's.
func TestWeights(t *testing.T) {
	given := func(parts uint32) snapshot.Weight { return snapshot.Weight{Given: true, Parts: parts} }
	none, third := [3]snapshot.Weight{}, [3]snapshot.Weight{2: given(700)}
	for _, c := range []struct {
		title string
		mode  IPVSMode
		nodes map[string]uint16
		own   [3]snapshot.Weight
		want  string
	}{
		{"of the node, and its own", IPVSAuto, map[string]uint16{"there": 5}, third, "1:1 2:5 3:7"},
		{"without IPVS", IPVSNever, map[string]uint16{"there": 5}, third, "1:1 2:5 3:7"},
		{"equal", IPVSNever, map[string]uint16{"there": 5, "here": 5}, none, "1:0 2:0 3:0"},
		{"equal, and IPVS chooses", IPVSAuto,
			map[string]uint16{"there": 5, "here": 5}, none, "1:5 2:5 3:5"},
		{"a node drains", IPVSNever, map[string]uint16{"there": 0}, none, "1:0"},
		{"all drain", IPVSAuto, map[string]uint16{"there": 0, "here": 0}, none, ""},
		{"Cilium's", IPVSNever, nil, [3]snapshot.Weight{1: given(50)}, "1:100 2:50 3:100"},
		{"too large together", IPVSNever, map[string]uint16{"here": 65535}, [3]snapshot.Weight{2: given(1)},
			"1:65535 2:1 3:1"},
	} {
		s := snapshot.New()
		svc := &snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.1"),
			Ports:      []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}},
			Scheduling: &snapshot.Scheduling{Scheduler: "wrr", Weights: c.nodes}}
		slice := &snapshot.Slice{Name: name("web-1"), Service: "web",
			Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}}}
		for i, a := range addrs("10.244.9.1 10.244.9.2 10.244.9.3") {
			slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: a, Node: []string{"here", "there", "there"}[i],
				Ready: true, Serving: true, Weight: c.own[i]})
		}
		s.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
			Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}})
		st, _ := Compute(Config{NodeName: "here", IPVS: IPVS{Mode: c.mode}}, s)
		port := st.Services[svc.Name].Ports[0]
		var got []string
		for _, ep := range port.Cluster.Endpoints {
			got = append(got, fmt.Sprintf("%d:%d", ep.Addr().As4()[3], ep.Weight))
		}
		if text := strings.Join(got, " "); text != c.want {
			t.Errorf("%s: %s, want %s", c.title, text, c.want)
		}
		if len(port.Serving) != 3 {
			t.Errorf("%s: earlier flows may keep %v", c.title, port.Serving)
		}
	}
}
