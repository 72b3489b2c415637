package dataplane

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestFrontends(t *testing.T) {
	s := snapshot.New()
	s.Node.Addresses = addrs("192.168.0.1 fd00:192::1")
	put(s, &snapshot.Service{
		Name:            name("web"),
		ClusterIPs:      addrs("fd00:96::10 10.96.0.10"),
		LoadBalancerIPs: addrs("198.51.100.2 198.51.100.1 198.51.100.1 2001:db8::1"),
		ExternalIPs:     addrs("198.51.100.1 198.51.100.3 198.51.100.3 192.168.0.1"),
		Affinity:        3 * time.Hour,
		Ports: []snapshot.Port{
			{Name: "web", Protocol: snapshot.TCP, Port: 80, NodePort: 30080},
			{Name: "quic", Protocol: snapshot.UDP, Port: 443},
		},
	})
	st, found := Compute(Config{}, s)
	checkInvariants(t, st)
	if len(found) != 0 {
		t.Errorf("an address a port names twice is no conflict: %v", found)
	}
	want := `default/web:web 10.96.0.10:80/tcp ClusterIP
default/web:web 192.168.0.1:80/tcp ExternalIP
default/web:web 192.168.0.1:30080/tcp NodePort
default/web:web 198.51.100.1:80/tcp LoadBalancerIP
default/web:web 198.51.100.2:80/tcp LoadBalancerIP
default/web:web 198.51.100.3:80/tcp ExternalIP
default/web:quic 10.96.0.10:443/udp ClusterIP
default/web:quic 192.168.0.1:443/udp ExternalIP
default/web:quic 198.51.100.1:443/udp LoadBalancerIP
default/web:quic 198.51.100.2:443/udp LoadBalancerIP
default/web:quic 198.51.100.3:443/udp ExternalIP
default/web:web [2001:db8::1]:80/tcp LoadBalancerIP
default/web:web [fd00:96::10]:80/tcp ClusterIP
default/web:web [fd00:192::1]:30080/tcp NodePort
default/web:quic [2001:db8::1]:443/udp LoadBalancerIP
default/web:quic [fd00:96::10]:443/udp ClusterIP
`
	if got := frontendsText(st.Services[name("web")]); got != want {
		t.Errorf("got\n%s", got)
	}
	for _, sp := range st.Services[name("web")].Ports {
		if sp.Affinity != 3*time.Hour {
			t.Errorf("%v: affinity %v", sp.Name, sp.Affinity)
		}
	}
	if got := st.Services[name("web")].ClusterIPs; !slices.Equal(got, addrs("fd00:96::10 10.96.0.10")) {
		t.Errorf("cluster IPs %v", got)
	}
}

func frontendsText(svc *Service) string {
	var out strings.Builder
	for _, sp := range svc.Ports {
		for _, f := range sp.Frontends {
			fmt.Fprintln(&out, sp.Name, f.Key, f.Kind)
		}
	}
	return out.String()
}

// TestFamilies: a Service answers only in the families it has a cluster IP of, whatever else it names.
func TestFamilies(t *testing.T) {
	s := snapshot.New()
	s.Node.Addresses = addrs("192.168.0.1 fd00:192::1")
	put(s, &snapshot.Service{
		Name: name("six"), ClusterIPs: addrs("fd00:96::10"), LoadBalancerIPs: addrs("198.51.100.1"),
		ExternalIPs: addrs("198.51.100.2"), Ports: tcp80(30080),
	}, &snapshot.Service{Name: name("portless"), ClusterIPs: addrs("10.96.0.11")},
		&snapshot.Service{Name: name("headless"), Ports: tcp80(0)},
		sliceOf("six", "six-4", endpoint("10.244.9.1", "x")), sliceOf("six", "six-6", endpoint("fd00:244::1", "x")))
	st, _ := Compute(Config{}, s)
	if len(st.Services) != 1 {
		t.Errorf("Services without a frontend are left out: %v", st.Services)
	}
	want := "default/six [fd00:96::10]:80/tcp ClusterIP\ndefault/six [fd00:192::1]:30080/tcp NodePort\n"
	if got := frontendsText(st.Services[name("six")]); got != want {
		t.Errorf("got\n%s", got)
	}
	if got := st.Services[name("six")].Ports[0].Cluster.text(); got != "[fd00:244::1]:8080" {
		t.Errorf("got %s", got)
	}
}

func TestSourceRanges(t *testing.T) {
	const (
		node = "192.168.0.1 fd00:192::1"
		lbs  = "198.51.100.1 198.51.100.2 2001:db8:1::1"
	)
	tests := []struct{ what, ranges, want4, want6 string }{
		{"none", "", "", ""},
		{"one family leaves the other open", "10.0.0.0/8", "10.0.0.0/8", ""},
		{"both, sorted", "172.16.0.0/12 10.0.0.0/8 fd01::/16", "10.0.0.0/8 172.16.0.0/12", "fd01::/16"},
		{"a range of length zero opens its family", "10.0.0.0/8 0.0.0.0/0 fd01::/16", "", "fd01::/16"},
		{"nested and repeated", "10.1.0.0/16 10.0.0.0/8 10.0.0.0/8 10.1.2.3/32 11.0.0.0/8", "10.0.0.0/8 11.0.0.0/8", ""},
		{"this node may, so may the addresses themselves", "192.168.0.0/24",
			"192.168.0.0/24 198.51.100.1/32 198.51.100.2/32", ""},
		{"this node may in IPv6 only", "10.0.0.0/8 fd00:192::/32", "10.0.0.0/8", "2001:db8:1::1/128 fd00:192::/32"},
		{"the addresses are in the ranges already", "192.168.0.0/24 198.51.100.0/24", "192.168.0.0/24 198.51.100.0/24", ""},
	}
	for _, test := range tests {
		t.Run(test.what, func(t *testing.T) {
			s := snapshot.New()
			s.Node.Addresses = addrs(node)
			put(s, &snapshot.Service{
				Name: name("web"), ClusterIPs: addrs("10.96.0.10 fd00:96::10"), LoadBalancerIPs: addrs(lbs),
				ExternalIPs: addrs("198.51.100.9"), SourceRanges: prefixes(test.ranges), Ports: tcp80(30080),
			})
			st, _ := Compute(Config{}, s)
			checkInvariants(t, st)
			want := map[string]string{
				"198.51.100.1:80": test.want4, "198.51.100.2:80": test.want4, "[2001:db8:1::1]:80": test.want6,
				// Only load balancer addresses are restricted.
				"10.96.0.10:80": "", "198.51.100.9:80": "", "192.168.0.1:30080": "", "[fd00:192::1]:30080": "",
			}
			for k, w := range want {
				_, fe := st.frontend(key(k))
				if !slices.Equal(fe.Sources, prefixes(w)) {
					t.Errorf("%s: got %v, want %s", k, fe.Sources, w)
				}
				if w == "" && fe.Sources != nil {
					t.Errorf("%s: open to everybody is nil, not %#v", k, fe.Sources)
				}
			}
		})
	}
}

// TestRepeatedPort: a manifest may hold what the API server refuses.
func TestRepeatedPort(t *testing.T) {
	s := snapshot.New()
	put(s, &snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.10"), Ports: []snapshot.Port{
		{Name: "a", Protocol: snapshot.TCP, Port: 80}, {Name: "a", Protocol: snapshot.TCP, Port: 81},
		{Name: "a", Protocol: snapshot.UDP, Port: 82}, {Name: "b", Protocol: snapshot.TCP, Port: 80},
	}})
	st, found := Compute(Config{}, s)
	checkInvariants(t, st)
	want := "default/web:a 10.96.0.10:80/tcp ClusterIP\ndefault/web:a 10.96.0.10:82/udp ClusterIP\n"
	if got := frontendsText(st.Services[name("web")]); got != want {
		t.Errorf("got\n%s", got)
	}
	const conflict = "[10.96.0.10:80/tcp is claimed twice: default/web:a (ClusterIP) keeps it, " +
		"default/web:b (ClusterIP) is left out there]"
	if got := fmt.Sprint(found); got != conflict {
		t.Errorf("got %s", got)
	}
}
