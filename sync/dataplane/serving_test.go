package dataplane

import (
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestServing reads endpoints as TestTopology does.
func TestServing(t *testing.T) {
	tests := []struct{ what, endpoints, cluster, serving string }{
		{"none", "", "reject", "reject"},
		{"none serves", "1@here:U 2@there:Z", "reject", "reject"},
		{"all ready", "1@here 2@there", "1 2", "1 2"},
		{"draining beside ready", "1@here:T 2@there", "2", "1 2"},
		{"all draining", "1@here:T 2@there:T", "1 2", "1 2"},
		{"unready beside ready", "1@here:U 2@there", "2", "2"},
		{"in another zone", "1@x[a] 2@x[b]", "1", "1 2"},
		{"published though not ready", "1@here:P", "1", "1"},
	}
	for _, test := range tests {
		t.Run(test.what, func(t *testing.T) {
			svc := &snapshot.Service{Name: name("dns"), ClusterIPs: addrs("10.96.0.10"), Ports: []snapshot.Port{
				{Name: "udp", Protocol: snapshot.UDP, Port: 53}, {Name: "tcp", Protocol: snapshot.TCP, Port: 53}}}
			sl := &snapshot.Slice{Name: name("dns-1"), Service: "dns", Ports: []snapshot.SlicePort{
				{Name: "udp", Protocol: snapshot.UDP, Port: 53}, {Name: "tcp", Protocol: snapshot.TCP, Port: 53}}}
			for _, w := range strings.Fields(test.endpoints) {
				sl.Endpoints = append(sl.Endpoints, parseEndpoint(w))
			}
			s := snapshot.New()
			put(s, snapshot.Node{Name: "here", Zone: "a"}, svc, sl)
			st, _ := Compute(Config{NodeName: "here"}, s)
			checkInvariants(t, st)
			for _, sp := range st.Services[svc.Name].Ports {
				if got := numbers(sp.Cluster); got != test.cluster {
					t.Errorf("%v: cluster set %s, want %s", sp.Name, got, test.cluster)
				}
				if got := numbers(&Pool{Endpoints: sp.Serving}); got != test.serving {
					t.Errorf("%v: serving %s, want %s", sp.Name, got, test.serving)
				}
				if test.cluster == test.serving && len(sp.Serving) > 0 && &sp.Serving[0] != &sp.Cluster.Endpoints[0] {
					t.Errorf("%v: the same endpoints are held twice", sp.Name)
				}
			}
		})
	}
}

// TestServingIsAChange: an endpoint that ends to drain was in no pool any more, but flows may still point at it.
func TestServingIsAChange(t *testing.T) {
	svc := &snapshot.Service{Name: name("dns"), ClusterIPs: addrs("10.96.0.10"),
		Ports: []snapshot.Port{{Protocol: snapshot.UDP, Port: 53}}}
	slice := func(endpoints ...string) *snapshot.Slice {
		sl := &snapshot.Slice{Name: name("dns-1"), Service: "dns",
			Ports: []snapshot.SlicePort{{Protocol: snapshot.UDP, Port: 53}}}
		for _, w := range endpoints {
			sl.Endpoints = append(sl.Endpoints, parseEndpoint(w))
		}
		return sl
	}
	s, p := snapshot.New(), NewPlanner(Config{NodeName: "here"})
	p.Apply(s, put(s, svc, slice("1@here:T", "2@there")))
	before := p.State().Services[svc.Name].Ports[0].Cluster
	change, _ := p.Apply(s, put(s, slice("2@there")))
	if after := p.State().Services[svc.Name].Ports[0]; !after.Cluster.equal(before) ||
		numbers(&Pool{Endpoints: after.Serving}) != "2" {
		t.Fatalf("cluster %s, serving %v", numbers(after.Cluster), after.Serving)
	}
	if len(change.Services) != 1 {
		t.Errorf("the change names %v", change.Services)
	}
}
