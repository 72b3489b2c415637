package dataplane

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// poolsOf computes the one port of a Service with both policies Local and one external address, so that both pools are
// in use.
func poolsOf(t *testing.T, zone string, slices ...*snapshot.Slice) (cluster, local *Pool) {
	t.Helper()
	s := snapshot.New()
	put(s, snapshot.Node{Name: "here", Zone: zone}, &snapshot.Service{
		Name: name("web"), ClusterIPs: addrs("10.96.0.10"), ExternalIPs: addrs("198.51.100.2"),
		InternalLocal: true, Ports: tcp80(0),
	})
	for _, sl := range slices {
		put(s, sl)
	}
	st, _ := Compute(Config{NodeName: "here"}, s)
	checkInvariants(t, st)
	sp, _ := st.frontend(key("10.96.0.10:80"))
	return sp.Cluster, sp.Local
}

// TestTopology reads endpoints as "number@node[zones][nodes]state", where "here" is our node and a our zone.
func TestTopology(t *testing.T) {
	tests := []struct{ what, endpoints, zone, cluster, local string }{
		{"no hints", "1@here 2@there", "a", "1 2", "1"},
		{"all have zone hints, some ours", "1@x[a] 2@x[b] 3@x[a,b]", "a", "1 3", "drop"},
		{"one has none", "1@x[a] 2@x[b] 3@x", "a", "1 2 3", "drop"},
		{"the one without is not ready", "1@x[a] 2@x[b] 3@x:U", "a", "1", "drop"},
		{"the one without is draining", "1@x[a] 2@x[b] 3@x:T", "a", "1", "drop"},
		{"none for our zone", "1@x[b] 2@x[c]", "a", "1 2", "drop"},
		{"ours only on an unready one", "1@x[b] 2@x[a]:U", "a", "1", "drop"},
		{"our zone unknown", "1@x[a] 2@x[b]", "", "1 2", "drop"},
		{"our zone unknown, an empty hint", "1@x[a] 2@x[~]", "", "1 2", "drop"},
		{"node hints, some ours", "1@x[][here] 2@x[][there]", "a", "1", "drop"},
		{"node hints, one has none", "1@x[][here] 2@x", "a", "1 2", "drop"},
		{"node hints before zone hints", "1@x[a][there] 2@x[b][here] 3@x[a][there]", "a", "2", "drop"},
		{"node hints for others: zone hints decide", "1@x[a][there] 2@x[b][there]", "a", "1", "drop"},
		{"node hints incomplete: zone hints decide", "1@x[a][here] 2@x[b]", "a", "1", "drop"},
		{"neither names us", "1@x[b][there] 2@x[c][there]", "a", "1 2", "drop"},
		{"hints do not touch the local set", "1@here[b] 2@x[a]", "a", "2", "1"},
		{"the fallback knows no topology", "1@x[a]:T 2@x[b]:T", "a", "1 2", "drop"},
		{"cluster ready, local draining", "1@x 2@here:T", "a", "1", "2"},
		{"cluster falls back, local too", "1@x:T 2@here:T", "a", "1 2", "2"},
		{"local ready keeps local draining out", "1@here 2@here:T", "a", "1", "1"},
		{"terminating but ready: publishNotReadyAddresses", "1@here:P 2@x", "a", "1 2", "1"},
		{"terminating and no longer serving", "1@here:Z 2@x:Z", "a", "reject", "reject"},
		{"unknown node is not ours", "1@", "a", "1", "drop"},
		{"nothing", "", "a", "reject", "reject"},
	}
	for _, test := range tests {
		t.Run(test.what, func(t *testing.T) {
			sl := sliceOf("web", "web-1")
			for _, w := range strings.Fields(test.endpoints) {
				sl.Endpoints = append(sl.Endpoints, parseEndpoint(w))
			}
			cluster, local := poolsOf(t, test.zone, sl)
			if got := numbers(cluster); got != test.cluster {
				t.Errorf("cluster set %s, want %s", got, test.cluster)
			}
			if got := numbers(local); got != test.local {
				t.Errorf("local set %s, want %s", got, test.local)
			}
		})
	}
}

func parseEndpoint(w string) snapshot.Endpoint {
	list := func(s string) []string {
		if s = strings.Trim(s, "[]"); s == "" {
			return nil
		}
		return strings.Split(strings.ReplaceAll(s, "~", ""), ",")
	}
	w, state, _ := strings.Cut(w, ":")
	number, where, _ := strings.Cut(w, "@")
	ep := snapshot.Endpoint{Addr: addr("10.244.9." + number)}
	node, hints, _ := strings.Cut(where, "[")
	zones, nodes, _ := strings.Cut(hints, "]")
	ep.Node, ep.ForZones, ep.ForNodes = node, list(zones), list(nodes)
	ep.Ready = state == "" || state == "P"
	ep.Serving = ep.Ready || state == "T"
	ep.Terminating = state == "T" || state == "P" || state == "Z"
	return ep
}

func numbers(p *Pool) string {
	if len(p.Endpoints) == 0 {
		return p.Empty.String()
	}
	var out []string
	for _, e := range p.Endpoints {
		out = append(out, strings.TrimPrefix(e.Addr().String(), "10.244.9."))
	}
	return strings.Join(out, " ")
}

func TestEndpointsOfSeveralSlices(t *testing.T) {
	terminating := snapshot.Endpoint{Addr: addr("10.244.9.1"), Node: "here", Serving: true, Terminating: true}
	unready := snapshot.Endpoint{Addr: addr("10.244.9.1"), Node: "here"}
	onPort := func(port uint16, sl *snapshot.Slice) *snapshot.Slice {
		sl.Ports[0].Port = port
		return sl
	}
	tests := []struct {
		what           string
		slices         []*snapshot.Slice
		cluster, local string
	}{
		{"added up and sorted", []*snapshot.Slice{
			sliceOf("web", "b", endpoint("10.244.9.3", "x"), endpoint("10.244.9.1", "here")),
			sliceOf("web", "a", endpoint("10.244.9.20", "x"), endpoint("10.244.9.2", "x")),
		}, "10.244.9.1:8080 10.244.9.2:8080 10.244.9.3:8080 10.244.9.20:8080", "10.244.9.1:8080"},
		{"the same twice", []*snapshot.Slice{
			sliceOf("web", "a", endpoint("10.244.9.1", "here"), endpoint("10.244.9.1", "here")),
			sliceOf("web", "b", endpoint("10.244.9.1", "here")),
		}, "10.244.9.1:8080", "10.244.9.1:8080"},
		{"on two target ports", []*snapshot.Slice{
			sliceOf("web", "a", endpoint("10.244.9.1", "here")),
			onPort(9090, sliceOf("web", "b", endpoint("10.244.9.1", "here"))),
		}, "10.244.9.1:8080 10.244.9.1:9090", "10.244.9.1:8080 10.244.9.1:9090"},
		{"ready beats terminating", []*snapshot.Slice{sliceOf("web", "a", terminating),
			sliceOf("web", "b", endpoint("10.244.9.1", "here"))}, "10.244.9.1:8080", "10.244.9.1:8080"},
		{"unready beats terminating: the address has a new pod", []*snapshot.Slice{sliceOf("web", "a", terminating),
			sliceOf("web", "b", unready)}, "reject", "reject"},
		{"ready beats unready", []*snapshot.Slice{sliceOf("web", "a", unready),
			sliceOf("web", "b", endpoint("10.244.9.1", "here"))}, "10.244.9.1:8080", "10.244.9.1:8080"},
		{"unready beats terminating that is published all the same", []*snapshot.Slice{
			sliceOf("web", "a", snapshot.Endpoint{Addr: addr("10.244.9.1"), Ready: true, Terminating: true}),
			sliceOf("web", "b", unready),
		}, "reject", "reject"},
		{"draining beats gone", []*snapshot.Slice{
			sliceOf("web", "a", snapshot.Endpoint{Addr: addr("10.244.9.1"), Node: "here", Terminating: true}),
			sliceOf("web", "b", terminating),
		}, "10.244.9.1:8080", "10.244.9.1:8080"},
		{"ready beats serving", []*snapshot.Slice{
			sliceOf("web", "a", snapshot.Endpoint{Addr: addr("10.244.9.1"), Node: "here", Serving: true}),
			sliceOf("web", "b", snapshot.Endpoint{Addr: addr("10.244.9.1"), Node: "x", Ready: true}),
		}, "10.244.9.1:8080", "drop"},
		{"here beats elsewhere", []*snapshot.Slice{sliceOf("web", "a", endpoint("10.244.9.1", "x")),
			sliceOf("web", "b", endpoint("10.244.9.1", "here"))}, "10.244.9.1:8080", "10.244.9.1:8080"},
		{"the other family", []*snapshot.Slice{sliceOf("web", "a", endpoint("fd00::1", "here"))}, "reject", "reject"},
		{"a mixed slice", []*snapshot.Slice{
			sliceOf("web", "a", endpoint("fd00::1", "here"), endpoint("10.244.9.1", "here")),
		}, "10.244.9.1:8080", "10.244.9.1:8080"},
		{"an address that could not be read", []*snapshot.Slice{sliceOf("web", "a", snapshot.Endpoint{Ready: true})},
			"reject", "reject"},
		{"another Service's", []*snapshot.Slice{sliceOf("other", "a", endpoint("10.244.9.1", "here"))}, "reject", "reject"},
	}
	for _, test := range tests {
		t.Run(test.what, func(t *testing.T) {
			for range 8 { // whatever the order of a Go map
				cluster, local := poolsOf(t, "", test.slices...)
				if cluster.text() != test.cluster || local.text() != test.local {
					t.Fatalf("got %s and %s, want %s and %s", cluster.text(), local.text(), test.cluster, test.local)
				}
			}
		})
	}
}

// TestHintsOfTwinsAreStable: two slices hint the same endpoints differently. Which one counts does not matter, that it
// is always the same one does. There are enough of them that sorting does not keep their order by chance.
func TestHintsOfTwinsAreStable(t *testing.T) {
	hinted := func(zone string) (eps []snapshot.Endpoint) {
		for i := range 40 {
			e := endpoint(fmt.Sprint("10.244.9.", 7*i%40), "x")
			e.ForZones = []string{zone}
			eps = append(eps, e)
		}
		return eps
	}
	second := append(hinted("b"), endpoint("10.244.9.99", "x"))
	second[40].ForZones = []string{"b"}
	for range 20 {
		cluster, _ := poolsOf(t, "a", sliceOf("web", "1", hinted("a")...), sliceOf("web", "2", second...))
		if len(cluster.Endpoints) != 40 || strings.Contains(cluster.text(), "9.99:") {
			t.Fatalf("got %s, want the slice that comes first by name to decide", cluster.text())
		}
	}
}

func TestPortsMatchByNameAndProtocol(t *testing.T) {
	s := snapshot.New()
	put(s, &snapshot.Service{Name: name("dns"), ClusterIPs: addrs("10.96.0.10"), Ports: []snapshot.Port{
		{Name: "dns", Protocol: snapshot.UDP, Port: 53},
		{Name: "dns-tcp", Protocol: snapshot.TCP, Port: 53},
		{Name: "metrics", Protocol: snapshot.TCP, Port: 9153},
		{Name: "sctp", Protocol: snapshot.SCTP, Port: 53},
	}}, &snapshot.Slice{
		Name: name("dns-1"), Service: "dns", Endpoints: []snapshot.Endpoint{endpoint("10.244.9.1", "x")},
		Ports: []snapshot.SlicePort{
			{Name: "dns", Protocol: snapshot.UDP, Port: 5353},
			{Name: "dns-tcp", Protocol: snapshot.TCP, Port: 5354},
			{Name: "metrics", Protocol: snapshot.UDP, Port: 9153},
			{Name: "sctp", Protocol: snapshot.SCTP, Port: 5355},
			{Name: "", Protocol: snapshot.TCP, Port: 1},
		},
	}, &snapshot.Slice{
		Name: name("dns-2"), Service: "dns", Endpoints: []snapshot.Endpoint{endpoint("10.244.9.2", "x")},
		Ports: []snapshot.SlicePort{{Name: "dns", Protocol: snapshot.UDP, Port: 53}},
	})
	st, found := Compute(Config{}, s)
	checkInvariants(t, st)
	if len(found) != 0 {
		t.Errorf("one port number in three protocols is no conflict: %v", found)
	}
	for _, want := range []struct {
		port  uint16
		proto snapshot.Protocol
		name  string
		pool  string
	}{
		{53, snapshot.UDP, "default/dns:dns", "10.244.9.1:5353 10.244.9.2:53"},
		{53, snapshot.TCP, "default/dns:dns-tcp", "10.244.9.1:5354"},
		{53, snapshot.SCTP, "default/dns:sctp", "10.244.9.1:5355"},
		{9153, snapshot.TCP, "default/dns:metrics", "reject"},
	} {
		sp, _ := st.frontend(Key{addr("10.96.0.10"), want.proto, want.port})
		if sp.Name.String() != want.name || sp.Cluster.text() != want.pool {
			t.Errorf("%v %d: got %s %s, want %s %s", want.proto, want.port, sp.Name, sp.Cluster.text(), want.name, want.pool)
		}
	}
}

// TestNodeNameUnknown: an endpoint on an unknown node is not local to a proxy that does not know its own.
func TestNodeNameUnknown(t *testing.T) {
	s := snapshot.New()
	put(s, matrixService(true, true), sliceOf("web", "a", endpoint("10.244.9.1", "")))
	st, _ := Compute(Config{}, s)
	if sp, _ := st.frontend(key("10.96.0.10:80")); sp.Local.text() != "drop" {
		t.Errorf("got %s", sp.Local.text())
	}
}

// TestPoolsAreApart: a pool with endpoints is one of the two, even while both have the same, so that a backend that
// remembers things of a pool does not mix them up when the two part.
func TestPoolsAreApart(t *testing.T) {
	s := snapshot.New()
	put(s, matrixService(true, true), sliceOf("web", "a", endpoint("10.244.9.1", "here")))
	st, _ := Compute(Config{NodeName: "here"}, s)
	sp, _ := st.frontend(key("10.96.0.10:80"))
	if sp.Cluster == sp.Local || sp.Cluster.text() != sp.Local.text() {
		t.Errorf("pools %v and %v", sp.Cluster, sp.Local)
	}
}

// TestUnusedPool: what no route leads to is not computed, so that a thousand remote endpoints cost a Local Service
// nothing.
func TestUnusedPool(t *testing.T) {
	for _, test := range []struct {
		svc            snapshot.Service
		cluster, local string
	}{
		{snapshot.Service{}, "10.244.9.1:8080 10.244.9.2:8080", "reject"},
		{snapshot.Service{InternalLocal: true}, "reject", "10.244.9.2:8080"},
		{snapshot.Service{ExternalLocal: true}, "10.244.9.1:8080 10.244.9.2:8080", "reject"},
		{snapshot.Service{ExternalLocal: true, ExternalIPs: addrs("198.51.100.2")},
			"10.244.9.1:8080 10.244.9.2:8080", "10.244.9.2:8080"},
		{snapshot.Service{InternalLocal: true, ExternalLocal: true, ExternalIPs: addrs("198.51.100.2")},
			"10.244.9.1:8080 10.244.9.2:8080", "10.244.9.2:8080"},
		{snapshot.Service{InternalLocal: true, ExternalLocal: true, ExternalIPs: addrs("fd00::9")}, "reject",
			"10.244.9.2:8080"},
	} {
		s := snapshot.New()
		test.svc.Name, test.svc.ClusterIPs, test.svc.Ports = name("web"), addrs("10.96.0.10"), tcp80(0)
		put(s, &test.svc, sliceOf("web", "a", endpoint("10.244.9.1", "x"), endpoint("10.244.9.2", "here")))
		st, _ := Compute(Config{NodeName: "here"}, s)
		sp, _ := st.frontend(key("10.96.0.10:80"))
		if sp.Cluster.text() != test.cluster || sp.Local.text() != test.local {
			t.Errorf("%+v: got %s and %s, want %s and %s", test.svc, sp.Cluster.text(), sp.Local.text(), test.cluster,
				test.local)
		}
	}
}

// TestPoolsAgainstOracle compares thousands of random sets of endpoints with kube-proxy's rules, spelled out the slow
// way.
func TestPoolsAgainstOracle(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	some := func(of ...string) (out []string) {
		for _, s := range of {
			if r.IntN(2) == 0 {
				out = append(out, s)
			}
		}
		return out
	}
	seen := map[string]int{}
	for range 20000 {
		sl := sliceOf("web", "web-1")
		hintless := r.IntN(3)
		for i := range r.IntN(5) {
			e := snapshot.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 244, 9, byte(i)}),
				Node: []string{"here", "x", ""}[r.IntN(3)]}
			e.Ready, e.Serving, e.Terminating = r.IntN(2) == 0, r.IntN(2) == 0, r.IntN(2) == 0
			if hintless > 0 {
				e.ForZones, e.ForNodes = some("a", "b"), some("here", "x")
			}
			sl.Endpoints = append(sl.Endpoints, e)
		}
		zone := []string{"a", "a", ""}[r.IntN(3)]
		cluster, local := poolsOf(t, zone, sl)
		wantCluster, wantLocal := oracle(sl.Endpoints, "here", zone)
		if cluster.text() != wantCluster || local.text() != wantLocal {
			t.Fatalf("%+v in zone %q: got %s and %s, want %s and %s",
				sl.Endpoints, zone, cluster.text(), local.text(), wantCluster, wantLocal)
		}
		seen[fmt.Sprint(len(cluster.Endpoints), len(local.Endpoints), local.Empty)]++
	}
	if len(seen) < 15 {
		t.Errorf("the walk met only %d kinds of result: %v", len(seen), seen)
	}
}

func oracle(all []snapshot.Endpoint, node, zone string) (cluster, local string) {
	filter := func(in []snapshot.Endpoint, keep func(snapshot.Endpoint) bool) (out []snapshot.Endpoint) {
		for _, e := range in {
			if keep(e) {
				out = append(out, e)
			}
		}
		return out
	}
	every := func(in []snapshot.Endpoint, is func(snapshot.Endpoint) bool) bool {
		return len(filter(in, is)) == len(in)
	}
	isLocal := func(e snapshot.Endpoint) bool { return e.Node == node }
	nodeHinted := func(e snapshot.Endpoint) bool { return len(e.ForNodes) != 0 }
	zoneHinted := func(e snapshot.Endpoint) bool { return len(e.ForZones) != 0 }

	ready := filter(all, func(e snapshot.Endpoint) bool { return e.Ready })
	fallback := filter(all, func(e snapshot.Endpoint) bool { return e.Serving && e.Terminating && !e.Ready })
	forNode := filter(ready, func(e snapshot.Endpoint) bool { return slices.Contains(e.ForNodes, node) })
	forZone := filter(ready, func(e snapshot.Endpoint) bool { return zone != "" && slices.Contains(e.ForZones, zone) })

	set := ready
	if every(ready, nodeHinted) && len(forNode) > 0 {
		set = forNode
	} else if every(ready, zoneHinted) && len(forZone) > 0 {
		set = forZone
	}
	if len(set) == 0 {
		set = fallback
	}
	here := filter(ready, isLocal)
	if len(here) == 0 {
		here = filter(fallback, isLocal)
	}
	text := func(in []snapshot.Endpoint, none string) string {
		var words []string
		for _, e := range in {
			words = append(words, netip.AddrPortFrom(e.Addr, 8080).String())
		}
		if words == nil {
			return none
		}
		return strings.Join(words, " ")
	}
	none := "reject"
	if len(ready)+len(fallback) > 0 {
		none = "drop"
	}
	return text(set, "reject"), text(here, none)
}
