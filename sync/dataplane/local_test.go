package dataplane

import (
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestLocal: the ready endpoints of Local on this node come before all of the Service's. It reads endpoints as
// TestTopology does.
func TestLocal(t *testing.T) {
	tests := []struct{ what, dns, cache, cluster, local, serving, finishing string }{
		{"no cache", "1@there 2@here", "", "1 2", "2", "1 2", ""},
		{"a cache elsewhere", "1@there 2@here", "8@there", "1 2", "2", "1 2", ""},
		{"a cache here", "1@there 2@here", "8@there 9@here", "9", "9", "9", "1 2"},
		{"two", "1@there", "8@here 9@here", "8 9", "8 9", "8 9", "1"},
		{"it starts", "1@there 2@here", "9@here:U", "1 2", "2", "1 2", ""},
		{"it drains", "1@there 2@here", "9@here:T", "1 2", "2", "1 2", "9"},
		{"one of two drains", "1@there", "8@here:T 9@here", "9", "9", "8 9", "1"},
		{"it drains, and others do", "1@there:T", "9@here:T", "1", "drop", "1", "9"},
		{"it drains, and no other is left", "", "9@here:T", "reject", "reject", "reject", "9"},
		{"no other is left", "", "9@here", "9", "9", "9", ""},
		{"hints are the Service's own", "1@x[a] 2@x[b]", "9@here", "9", "9", "9", "1 2"},
		{"it is the Service's own, too", "1@there 9@here", "9@here", "9", "9", "9", "1"},
		{"and not ready there", "1@there 9@here", "9@here:U", "1 9", "9", "1 9", ""},
		{"on no known node", "1@there", "9@", "1", "drop", "1", ""},
	}
	for _, test := range tests {
		t.Run(test.what, func(t *testing.T) {
			s := snapshot.New()
			put(s, snapshot.Node{Name: "here", Zone: "a"}, dnsService("dns", "10.96.0.10", "cache"), dnsSlice("dns", test.dns),
				dnsService("cache", "10.96.0.11", ""), dnsSlice("cache", test.cache))
			st, _ := Compute(Config{NodeName: "here"}, s)
			checkInvariants(t, st)
			for _, sp := range st.Services[name("dns")].Ports {
				serving, finishing := strings.Fields(test.serving), strings.Fields(test.finishing)
				if got := numbers(sp.Cluster); got != test.cluster {
					t.Errorf("%v: cluster set %s, want %s", sp.Name, got, test.cluster)
				}
				if got := numbers(sp.Local); got != test.local {
					t.Errorf("%v: local set %s, want %s", sp.Name, got, test.local)
				}
				if sp.Name.Protocol == snapshot.UDP {
					got, left := numbers(&Pool{Endpoints: sp.Serving}), numbers(&Pool{Endpoints: sp.Finishing, Empty: Drop})
					if got != test.serving || left != strings.Join(append(finishing, "drop")[:max(len(finishing), 1)], " ") {
						t.Errorf("%v: serving %s, want %s; finishing %s, want %s", sp.Name, got, test.serving, left, test.finishing)
					}
				} else if len(sp.Finishing) > 0 || test.serving != "reject" && len(sp.Serving) != len(serving)+len(finishing) {
					t.Errorf("%v: connections may stay with %v only", sp.Name, sp.Serving)
				}
			}
		})
	}
}

// dnsService has a port of UDP and one of TCP, and what policy Local asks for at other addresses.
func dnsService(n, ip, local string) *snapshot.Service {
	return &snapshot.Service{Name: name(n), ClusterIPs: addrs(ip), Local: local, ExternalLocal: true,
		ExternalIPs: addrs(strings.Replace(ip, "10.96.0", "198.51.100", 1)), Ports: []snapshot.Port{
			{Name: "udp", Protocol: snapshot.UDP, Port: 53}, {Name: "tcp", Protocol: snapshot.TCP, Port: 53}}}
}

func dnsSlice(of, endpoints string) *snapshot.Slice {
	sl := &snapshot.Slice{Name: name(of + "-1"), Service: of, Ports: []snapshot.SlicePort{
		{Name: "udp", Protocol: snapshot.UDP, Port: 53}, {Name: "tcp", Protocol: snapshot.TCP, Port: 53}}}
	for _, w := range strings.Fields(endpoints) {
		sl.Endpoints = append(sl.Endpoints, parseEndpoint(w))
	}
	return sl
}

// TestLocalIsFollowed: a change of Local's slices changes the Services that name it, and no other.
func TestLocalIsFollowed(t *testing.T) {
	s, p := snapshot.New(), NewPlanner(Config{NodeName: "here"})
	p.Apply(s, put(s, dnsService("dns", "10.96.0.10", "cache"), dnsSlice("dns", "1@there"),
		dnsService("other", "10.96.0.12", ""), dnsSlice("other", "1@there")))
	for _, step := range []struct{ what, cache, want, changed string }{
		{"the cache comes, without a Service", "9@here", "9", "default/dns"},
		{"one elsewhere", "8@there 9@here", "9", ""},
		{"it goes", "8@there", "1", "default/dns"},
	} {
		change, _ := p.Apply(s, put(s, dnsSlice("cache", step.cache)))
		var changed []string
		for _, n := range change.Services {
			changed = append(changed, n.String())
		}
		if got := numbers(p.State().Services[name("dns")].Ports[0].Cluster); got != step.want {
			t.Errorf("%s: %s, want %s", step.what, got, step.want)
		}
		if got := strings.Join(changed, " "); got != step.changed {
			t.Errorf("%s: changed %s, want %s", step.what, got, step.changed)
		}
	}
}
