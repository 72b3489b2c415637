package dataplane

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestResort: endpoints that are not ready and accept probes are used only while the Service has no other anywhere. It
// reads endpoints as TestTopology does, and health as TestEject.
func TestResort(t *testing.T) {
	const on, off = snapshot.LastResortOn, snapshot.LastResortOff
	for _, test := range []struct {
		what                                          string
		node                                          bool
		service                                       snapshot.LastResort
		endpoints, health, cluster, local, to, spared string
	}{
		{"nobody asks", false, 0, "1@here:U 2@there:U", "1:l1 2:l1", "reject", "reject", "", ""},
		{"the Service asks", false, on, "1@here:U 2@there:U", "1:l1 2:l1", "1 2", "1", "1 2", "1 2"},
		{"the node asks", true, 0, "1@here:U 2@there:U", "1:l1 2:l1", "1 2", "1", "1 2", "1 2"},
		{"the Service declines", true, off, "1@here:U 2@there:U", "1:l1 2:l1", "reject", "reject", "", ""},
		{"nobody has answered yet", true, 0, "1@here:U 2@there:U", "", "reject", "reject", "1 2", ""},
		{"one answers", true, 0, "1@here:U 2@there:U", "2:l1", "2", "drop", "1 2", "2"},
		{"one is ready", true, 0, "1@here:U 2@there", "1:l1", "2", "drop", "", "2"},
		{"one is ready and drains by weight", true, 0, "1@here:U 2@drained", "1:l1", "reject", "reject", "", "2"},
		{"one serves while it terminates", true, 0, "1@here:U 2@there:T", "1:l1", "2", "drop", "", "2"},
		{"one terminates and no longer serves", true, 0, "1@here:U 2@there:Z", "1:l1 2:l1", "1", "1", "1", "1"},
		{"one is published though not ready", true, 0, "1@here:U 2@there:P", "1:l1", "2", "drop", "", "2"},
		{"hints", true, 0, "1@here:U[b] 2@there:U[b]", "1:l1 2:l1", "1 2", "1", "1 2", "1 2"},
		{"one refuses clients", true, 0, "1@here:U 2@there:U", "1:r1 2:l1", "2", "drop", "1 2", "2"},
		{"none", true, 0, "", "1:l1", "reject", "reject", "", ""},
	} {
		t.Run(test.what, func(t *testing.T) {
			svc, sl := dnsService("dns", "10.96.0.10", ""), dnsSlice("dns", test.endpoints)
			svc.LastResort, svc.Scheduling = test.service, &snapshot.Scheduling{Weights: map[string]uint16{"drained": 0}}
			for i := range sl.Ports {
				sl.Ports[i].Port = 8080
			}
			s := snapshot.New()
			put(s, snapshot.Node{Name: "here", Zone: "a"}, svc, sl)
			s.Apply(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{svc.Name: sick(test.health)}})
			st, _ := Compute(Config{NodeName: "here", LastResort: test.node, SecondChance: snapshot.SecondChanceOn}, s)
			checkInvariants(t, st)
			for _, sp := range st.Services[svc.Name].Ports {
				var to []string
				for _, e := range sp.Resort {
					to = append(to, strings.TrimPrefix(e.Addr().String(), "10.244.9."))
				}
				spared := strings.TrimPrefix(numbers(&Pool{Endpoints: sp.Serving}), "reject")
				if got := numbers(sp.Cluster); got != test.cluster {
					t.Errorf("%v: cluster set %s, want %s", sp.Name, got, test.cluster)
				}
				if got := numbers(sp.Local); got != test.local {
					t.Errorf("%v: local set %s, want %s", sp.Name, got, test.local)
				}
				if sp.Name.Protocol == snapshot.TCP && strings.Join(to, " ") != test.to || spared != test.spared {
					t.Errorf("%v: to be probed are %v, want %s; serving %s, want %s", sp.Name, to, test.to, spared, test.spared)
				}
			}
		})
	}
}

// TestManyResorts: a node probes so many and no more, and each node others.
func TestManyResorts(t *testing.T) {
	sl := sliceOf("web", "web-1")
	for i := range 4 * MaxResort {
		ep := endpoint(fmt.Sprintf("10.244.%d.%d", i/200, 1+i%200), "here")
		ep.Ready, ep.Serving = false, false
		sl.Endpoints = append(sl.Endpoints, ep)
	}
	all := map[netip.AddrPort]bool{}
	for i := range 40 {
		s := openShop(t, Config{NodeName: fmt.Sprint("node-", i), LastResort: true}, webService("web", "10.96.0.1"), sl)
		sp := s.p.State().Services[name("web")].Ports[0]
		checkResort(t, sp)
		if len(sp.Resort) != MaxResort {
			t.Errorf("%d are probed", len(sp.Resort))
		}
		for _, e := range sp.Resort {
			all[e] = true
		}
	}
	if len(all) != len(sl.Endpoints) {
		t.Errorf("40 nodes probe %d of %d endpoints", len(all), len(sl.Endpoints))
	}
}
