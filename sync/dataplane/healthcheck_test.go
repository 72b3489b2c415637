package dataplane

import (
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestLocalReady: what a health check node port says. kube-proxy counts the addresses of endpoints on this node that
// are ready, whatever the policy, and none that only drain.
func TestLocalReady(t *testing.T) {
	here := func(a string) snapshot.Endpoint { return endpoint(a, "here") }
	with := func(e snapshot.Endpoint, ready, serving, terminating bool) snapshot.Endpoint {
		e.Ready, e.Serving, e.Terminating = ready, serving, terminating
		return e
	}
	twoPorts := func(slice string, eps ...snapshot.Endpoint) *snapshot.Slice {
		s := sliceOf("web", slice, eps...)
		s.Ports = append(s.Ports, snapshot.SlicePort{Name: "https", Protocol: snapshot.TCP, Port: 8443},
			snapshot.SlicePort{Name: "other", Protocol: snapshot.TCP, Port: 1})
		return s
	}
	for _, test := range []struct {
		what   string
		slices []*snapshot.Slice
		v4, v6 int
	}{
		{"no slice", nil, 0, 0},
		{"here and elsewhere", []*snapshot.Slice{sliceOf("web", "a", here("10.1.0.1"), endpoint("10.1.0.2", "there"))}, 1, 0},
		{"nowhere known", []*snapshot.Slice{sliceOf("web", "a", endpoint("10.1.0.1", ""))}, 0, 0},
		{"each address once, in two ports", []*snapshot.Slice{twoPorts("a", here("10.1.0.1"), here("10.1.0.2"))}, 2, 0},
		{"both families", []*snapshot.Slice{sliceOf("web", "a", here("10.1.0.1")), sliceOf("web", "b", here("fd00::1"),
			here("fd00::2"))},
			1, 2},
		{"in two slices", []*snapshot.Slice{sliceOf("web", "a", here("10.1.0.1")), sliceOf("web", "b", here("10.1.0.1"))}, 1,
			0},
		{"draining", []*snapshot.Slice{sliceOf("web", "a", with(here("10.1.0.1"), false, true, true))}, 0, 0},
		{"not ready", []*snapshot.Slice{sliceOf("web", "a", with(here("10.1.0.1"), false, false, false))}, 0, 0},
		{"publishNotReadyAddresses", []*snapshot.Slice{sliceOf("web", "a", with(here("10.1.0.1"), true, true, true))}, 1, 0},
		{"an address whose next pod is not ready yet",
			[]*snapshot.Slice{sliceOf("web", "a", with(here("10.1.0.1"), true, true, true)),
				sliceOf("web", "b", with(here("10.1.0.1"), false, false, false))}, 0, 0},
		{"without ports", []*snapshot.Slice{{Name: name("a"), Service: "web",
			Endpoints: []snapshot.Endpoint{here("10.1.0.1")}}}, 0, 0},
		{"a port the Service does not have", []*snapshot.Slice{{Name: name("a"), Service: "web",
			Ports:     []snapshot.SlicePort{{Name: "x", Protocol: snapshot.TCP, Port: 1}},
			Endpoints: []snapshot.Endpoint{here("10.1.0.1")}}}, 0, 0},
	} {
		s := snapshot.New()
		svc := &snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.1 fd00:96::1"), ExternalLocal: true,
			Ports: tcp80(0)}
		svc.Ports = append(svc.Ports, snapshot.Port{Name: "https", Protocol: snapshot.TCP, Port: 443})
		put(s, svc)
		for _, sl := range test.slices {
			put(s, sl)
		}
		if v4, v6 := LocalReady("here", s, name("web")); v4 != test.v4 || v6 != test.v6 {
			t.Errorf("%s: %d and %d; want %d and %d", test.what, v4, v6, test.v4, test.v6)
		}
	}
	if v4, v6 := LocalReady("here", snapshot.New(), name("web")); v4 != 0 || v6 != 0 {
		t.Errorf("no Service: %d and %d", v4, v6)
	}
}

func TestHealthCheckAddrs(t *testing.T) {
	const host = "127.0.0.1 192.168.0.1 192.168.0.2 ::1 fd00:192::1 fe80::1"
	for _, test := range []struct {
		what, list, host, want string
		primary                bool
	}{
		{"primary", "", host, "192.168.0.1 fd00:192::1", false},
		{"a range", "192.168.0.0/24", host, "192.168.0.1 192.168.0.2", false},
		{"primary and a range", "192.168.0.2/32", host, "192.168.0.1 192.168.0.2 fd00:192::1", true},
		{"primary and everything of IPv4", "0.0.0.0/0", host, "0.0.0.0 fd00:192::1", true},
		{"everything", "0.0.0.0/0 ::/0", host, "0.0.0.0 ::", false},
		{"all of a family", "10.0.0.0/8 0.0.0.0/0 fd00::/8", host, "0.0.0.0 fd00:192::1", false},
		{"a family the host does not speak", "0.0.0.0/0 ::/0", "192.168.0.1", "0.0.0.0", false},
		{"nothing is known of the host", "0.0.0.0/0", "", "0.0.0.0", false},
		{"never at loopback", "127.0.0.0/8", host, "", false},
	} {
		s := snapshot.New()
		s.Node = snapshot.Node{Name: "here", Addresses: addrs("192.168.0.1 fd00:192::1")}
		s.HostAddrs = addrs(test.host)
		cfg := Config{NodePortAddresses: prefixes(test.list), NodePortPrimary: test.primary, LocalhostNodePorts: true}
		if got := HealthCheckAddrs(cfg, s); !slices.Equal(got, addrs(test.want)) {
			t.Errorf("%s: %v; want %s", test.what, got, test.want)
		}
	}
}
