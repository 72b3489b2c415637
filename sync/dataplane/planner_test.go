package dataplane

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// shop is a snapshot with a Planner that follows it.
type shop struct {
	t *testing.T
	s *snapshot.Snapshot
	p *Planner
}

func openShop(t *testing.T, cfg Config, objects ...any) *shop {
	s := &shop{t: t, s: snapshot.New(), p: NewPlanner(cfg)}
	put(s.s, objects...)
	s.p.Apply(s.s, snapshot.Change{})
	return s
}

// expect applies a change and compares what the Planner says of it, as "globals name name | conflict; conflict".
func (s *shop) expect(what string, c snapshot.Change, want string) {
	s.t.Helper()
	change, found := s.p.Apply(s.s, c)
	got := ""
	if change.Globals {
		got = "globals "
	}
	for _, n := range change.Services {
		got += n.Name + " "
	}
	got += "|"
	for _, f := range found {
		got += " " + f.Winner.Port.Service.Name + " over " + f.Loser.Port.Service.Name + " at " + f.Key.String()
	}
	if got != want {
		s.t.Errorf("%s: got %q, want %q", what, got, want)
	}
	if change.Empty() != (len(change.Services) == 0 && !change.Globals) {
		s.t.Errorf("%s: %+v says Empty %v", what, change, change.Empty())
	}
}

// owner gives the Service that answers at a TCP key, or "".
func (s *shop) owner(k string) string {
	sp, fe := s.p.State().frontend(key(k))
	if fe == nil {
		return ""
	}
	return sp.Name.Service.Name + " " + fe.Kind.String()
}

func webService(n, clusterIP string) *snapshot.Service {
	return &snapshot.Service{Name: name(n), ClusterIPs: addrs(clusterIP), Ports: tcp80(0)}
}

func TestApplyNamesWhatChanged(t *testing.T) {
	s := openShop(t, Config{NodeName: "here"})
	s.expect("nothing", snapshot.Change{}, "|")
	s.expect("a slice before its Service", put(s.s, sliceOf("a", "a-1", endpoint("10.244.9.1", "x"))), "|")
	s.expect("its Service", put(s.s, webService("a", "10.96.0.1")), "a |")
	if got := s.p.State().Services[name("a")].Ports[0].Cluster.text(); got != "10.244.9.1:8080" {
		t.Errorf("got %s", got)
	}
	s.expect("the same again", put(s.s, webService("a", "10.96.0.1"), sliceOf("a", "a-1", endpoint("10.244.9.1", "x"))),
		"|")
	s.expect("an endpoint that is not used", put(s.s, sliceOf("a", "a-1", endpoint("10.244.9.1", "x"),
		snapshot.Endpoint{Addr: addr("10.244.9.2")})), "|")
	s.expect("one more endpoint", put(s.s, sliceOf("a", "a-2", endpoint("10.244.9.2", "x"))), "a |")
	s.expect("two Services, out of order", put(s.s, webService("c", "10.96.0.3"), webService("b", "10.96.0.2")), "b c |")
	s.expect("a slice moves", put(s.s, sliceOf("b", "a-2", endpoint("10.244.9.2", "x"))), "a b |")
	healthy := webService("c", "10.96.0.3")
	healthy.HealthCheckNodePort = 31000
	s.expect("where load balancers ask for health", put(s.s, healthy), "c |")
	delta := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("c"): nil, name("d"): nil}}
	s.expect("gone, and never there", s.s.Apply(delta), "c |")
	s.expect("renamed port", put(s.s, &snapshot.Service{Name: name("b"), ClusterIPs: addrs("10.96.0.2"),
		Ports: []snapshot.Port{{Name: "x", Protocol: snapshot.TCP, Port: 80}}}), "b |")
	if st := s.p.State(); len(st.Services) != 2 || s.owner("10.96.0.2:80") != "b ClusterIP" {
		t.Errorf("left: %v", st.Services)
	}
}

// TestApplyNoticesEveryField changes one thing at a time, and back.
func TestApplyNoticesEveryField(t *testing.T) {
	node := snapshot.Node{Name: "here", Addresses: addrs("192.168.0.1")}
	base := snapshot.Service{
		Name: name("a"), ClusterIPs: addrs("10.96.0.1 fd00:96::1"), LoadBalancerIPs: addrs("198.51.100.1"),
		ExternalIPs: addrs("198.51.100.2"), ExternalLocal: true, Ports: tcp80(30080),
	}
	ends := []any{sliceOf("a", "a-1", endpoint("10.244.9.1", "here"), endpoint("10.244.9.2", "x"))}
	for what, change := range map[string]func(*snapshot.Service){
		"cluster IPs":        func(s *snapshot.Service) { s.ClusterIPs = addrs("10.96.0.1") },
		"which one is first": func(s *snapshot.Service) { s.ClusterIPs = addrs("fd00:96::1 10.96.0.1") },
		"external IPs":       func(s *snapshot.Service) { s.ExternalIPs = nil },
		"load balancer IPs":  func(s *snapshot.Service) { s.LoadBalancerIPs = addrs("198.51.100.3") },
		"kind of an address": func(s *snapshot.Service) {
			s.LoadBalancerIPs, s.ExternalIPs = s.ExternalIPs,
				s.LoadBalancerIPs
		},
		"source ranges":           func(s *snapshot.Service) { s.SourceRanges = prefixes("10.0.0.0/8") },
		"internal traffic policy": func(s *snapshot.Service) { s.InternalLocal = true },
		"external traffic policy": func(s *snapshot.Service) { s.ExternalLocal = false },
		"affinity":                func(s *snapshot.Service) { s.Affinity = 10 * time.Second },
		"port": func(s *snapshot.Service) {
			s.Ports = []snapshot.Port{{Protocol: snapshot.TCP, Port: 81, NodePort: 30080}}
		},
		"protocol": func(s *snapshot.Service) {
			s.Ports = []snapshot.Port{{Protocol: snapshot.UDP, Port: 80, NodePort: 30080}}
		},
		"node port": func(s *snapshot.Service) { s.Ports = tcp80(30081) },
	} {
		changed := base
		change(&changed)
		s := openShop(t, Config{NodeName: "here"}, append(ends, node, &base)...)
		s.expect(what, put(s.s, &changed), "a |")
		s.expect(what+", back", put(s.s, &base), "a |")
	}

	s := openShop(t, Config{NodeName: "here"}, &snapshot.Service{
		Name: name("a"), ClusterIPs: addrs("10.96.0.1"), InternalLocal: true, Ports: tcp80(0),
	})
	s.expect("endpoints elsewhere only: drop, not reject", put(s.s, sliceOf("a", "a-1", endpoint("10.244.9.1", "x"))),
		"a |")
	s.expect("one moves here", put(s.s, sliceOf("a", "a-1", endpoint("10.244.9.1", "here"))), "a |")
	s.expect("its port", put(s.s, &snapshot.Slice{Name: name("a-1"), Service: "a", Ports: []snapshot.SlicePort{
		{Protocol: snapshot.TCP, Port: 9090}}, Endpoints: []snapshot.Endpoint{endpoint("10.244.9.1", "here")}}), "a |")
}

// TestCostFollowsTheChange counts allocations, which do not depend on the machine.
func TestCostFollowsTheChange(t *testing.T) {
	cost := func(services int) (slice, hostAddr float64) {
		s := benchSnapshot(services, 10)
		p := NewPlanner(benchConfig)
		p.Apply(s, snapshot.Change{})
		generation := 0
		apply := func(d snapshot.Delta) { p.Apply(s, s.Apply(d)) }
		slice = testing.AllocsPerRun(50, func() {
			generation++
			sl := benchSlice(7, 10, generation)
			apply(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{sl.Name: sl}})
		})
		hostAddr = testing.AllocsPerRun(50, func() {
			generation++
			list := []netip.Addr{addr("192.0.2.7"), netip.MustParseAddr(fmt.Sprintf("fe80::%x", generation))}
			apply(snapshot.Delta{HostAddrs: &list})
		})
		return slice, hostAddr
	}
	smallSlice, smallHost := cost(50)
	largeSlice, largeHost := cost(5000)
	if largeSlice > smallSlice+2 || largeHost > smallHost+2 || largeHost > 30 {
		t.Errorf("a slice costs %v and %v allocations, a host address %v and %v", smallSlice, largeSlice, smallHost,
			largeHost)
	}
}

func TestApplyFollowsTheHost(t *testing.T) {
	node := snapshot.Node{Name: "here", Addresses: addrs("192.168.0.1"), PodCIDRs: prefixes("10.244.1.0/24")}
	open := webService("open", "10.96.0.2")
	open.Ports = tcp80(30080)
	hinted := func(a, zone string) snapshot.Endpoint {
		e := endpoint(a, "x")
		e.ForZones = []string{zone}
		return e
	}
	cfg := Config{NodeName: "here", DetectLocal: DetectLocal{Mode: DetectNodeCIDR}}
	s := openShop(t, cfg, webService("closed", "10.96.0.1"), open,
		sliceOf("closed", "closed-1", hinted("10.244.9.1", "a"), hinted("10.244.9.2", "b")))
	hostAddrs := func(list string) snapshot.Change {
		a := addrs(list)
		return s.s.Apply(snapshot.Delta{HostAddrs: &a})
	}
	s.expect("the host's addresses alone", hostAddrs("127.0.0.1 192.168.0.1"), "|")
	s.expect("the node is known: its ports, its pods", put(s.s, node), "globals closed open |")
	podless := node
	podless.PodCIDRs = nil
	s.expect("the pods are unknown again", put(s.s, podless), "globals closed open |")
	s.expect("and known", put(s.s, node), "globals closed open |")
	s.expect("a pod's link-local address", hostAddrs("127.0.0.1 192.168.0.1 fe80::1"), "|")
	node.Zone = "a"
	s.expect("the zone", put(s.s, node), "closed |")
	node.Addresses = addrs("192.168.0.2")
	s.expect("an address that is not on the host yet", put(s.s, node), "open |")
	s.expect("and now is", hostAddrs("127.0.0.1 192.168.0.1 192.168.0.2"), "open |")
	if s.owner("192.168.0.1:30080") != "" || s.owner("192.168.0.2:30080") != "open NodePort" {
		t.Error("the node port did not follow the address")
	}
	cidrs := prefixes("10.96.0.0/16")
	s.expect("the service ranges", s.s.Apply(snapshot.Delta{ServiceCIDRs: &cidrs}), "globals |")
	node.PodCIDRs = prefixes("10.244.7.0/24")
	s.expect("the pod range: the rows stay, what they mean does not", put(s.s, node), "globals |")
}

func TestFirstApplyLooksAtEverything(t *testing.T) {
	s := snapshot.New()
	put(s, webService("a", "10.96.0.1"))
	p := NewPlanner(Config{})
	if c, _ := p.Apply(s, snapshot.Change{}); !c.Globals || !slices.Equal(c.Services, []snapshot.Name{name("a")}) {
		t.Errorf("got %+v", c)
	}
	if c, _ := NewPlanner(Config{}).Apply(snapshot.New(), snapshot.Change{}); !c.Globals || c.Empty() {
		t.Errorf("an empty cluster is an answer too: %+v", c)
	}
}

func TestConflicts(t *testing.T) {
	claiming := func(n, clusterIP string, lb, external string, nodePort uint16) *snapshot.Service {
		return &snapshot.Service{Name: name(n), ClusterIPs: addrs(clusterIP), LoadBalancerIPs: addrs(lb),
			ExternalIPs: addrs(external), Ports: tcp80(nodePort)}
	}
	gone := func(s *shop, n string) snapshot.Change {
		return s.s.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name(n): nil}})
	}
	const vip = "198.51.100.1:80"

	t.Run("by kind, then name; back when the winner goes", func(t *testing.T) {
		s := openShop(t, Config{})
		s.expect("first", put(s.s, claiming("b", "10.96.0.2", "", "198.51.100.1", 0)), "b |")
		s.expect("higher name", put(s.s, claiming("c", "10.96.0.3", "", "198.51.100.1", 0)), "c | b over c at "+vip+"/tcp")
		s.expect("lower name", put(s.s, claiming("a", "10.96.0.1", "", "198.51.100.1", 0)),
			"a b | a over b at "+vip+"/tcp a over c at "+vip+"/tcp")
		s.expect("endpoints of a loser", put(s.s, sliceOf("c", "c-1", endpoint("10.244.9.1", "x"))), "c |")
		s.expect("lower kind", put(s.s, claiming("d", "10.96.0.4", "198.51.100.1", "", 0)), "a d | d over a at "+vip+
			"/tcp d over b at "+vip+"/tcp d over c at "+vip+"/tcp")
		if got := s.owner(vip); got != "d LoadBalancerIP" {
			t.Errorf("owner %q", got)
		}
		s.expect("the winner gives it up", put(s.s, claiming("d", "10.96.0.4", "", "", 0)),
			"a d | a over b at "+vip+"/tcp a over c at "+vip+"/tcp")
		s.expect("a loser goes", gone(s, "b"), "b |")
		s.expect("the winner goes", gone(s, "a"), "a c |")
		if got := s.owner(vip); got != "c ExternalIP" || len(s.p.conflicts()) != 0 {
			t.Errorf("owner %q, conflicts %v", got, s.p.conflicts())
		}
	})

	t.Run("a Service that loses everything", func(t *testing.T) {
		s := openShop(t, Config{}, claiming("a", "10.96.0.1", "", "", 0), claiming("b", "10.96.0.1", "", "", 0))
		if s.p.State().Services[name("b")] != nil || len(s.p.conflicts()) != 1 {
			t.Errorf("%v %v", s.p.State().Services, s.p.conflicts())
		}
		s.expect("endpoints of one without a frontend", put(s.s, sliceOf("b", "b-1", endpoint("10.244.9.1", "x"))), "|")
		s.expect("the winner moves", put(s.s, claiming("a", "10.96.0.7", "", "", 0)), "a b |")
		if got := s.owner("10.96.0.1:80"); got != "b ClusterIP" {
			t.Errorf("owner %q", got)
		}
	})

	t.Run("a swap in one change", func(t *testing.T) {
		s := openShop(t, Config{}, claiming("a", "10.96.0.1", "", "", 0), claiming("b", "10.96.0.2", "", "", 0))
		s.expect("swap", put(s.s, claiming("a", "10.96.0.2", "", "", 0), claiming("b", "10.96.0.1", "", "", 0)), "a b |")
		if s.owner("10.96.0.1:80") != "b ClusterIP" || s.owner("10.96.0.2:80") != "a ClusterIP" {
			t.Error("not swapped")
		}
	})

	t.Run("node ports and other kinds", func(t *testing.T) {
		node := snapshot.Node{Name: "here", Addresses: addrs("192.168.0.1")}
		s := openShop(t, Config{}, node, claiming("a", "10.96.0.1", "", "", 80), claiming("b", "10.96.0.2", "192.168.0.1",
			"", 0))
		if got := s.owner("192.168.0.1:80"); got != "b LoadBalancerIP" {
			t.Errorf("owner %q", got)
		}
		node.Addresses = addrs("192.168.0.2")
		s.expect("the node's address moves out of the way", put(s.s, node), "a |")
		node.Addresses = addrs("192.168.0.1")
		s.expect("and back", put(s.s, node), "a | b over a at 192.168.0.1:80/tcp")
		both := claiming("b", "10.96.0.2", "192.168.0.1", "", 30080)
		s.expect("one Service may have its address as both", put(s.s, both), "b |")
		if got := s.owner("192.168.0.1:30080"); got != "b NodePort" {
			t.Errorf("owner %q", got)
		}
	})
}

// TestTheOldestKeepsItsAddress: who comes later takes no address in use, whatever his Service is called.
func TestTheOldestKeepsItsAddress(t *testing.T) {
	service := func(namespace, n, clusterIP string, a snapshot.Age, change func(*snapshot.Service)) *snapshot.Service {
		s := &snapshot.Service{Name: snapshot.Name{Namespace: namespace, Name: n}, Age: a, ClusterIPs: addrs(clusterIP),
			Ports: tcp80(0)}
		if change != nil {
			change(s)
		}
		return s
	}
	external := func(s *snapshot.Service) { s.ExternalIPs = addrs("198.51.100.7") }
	balanced := func(s *snapshot.Service) { s.LoadBalancerIPs = addrs("198.51.100.7") }
	nodePort := func(s *snapshot.Service) { s.Ports = tcp80(30080) }
	atNodePort := func(s *snapshot.Service) {
		s.ExternalIPs, s.Ports = addrs("192.168.0.1"), []snapshot.Port{{Protocol: snapshot.TCP, Port: 30080}}
	}
	balancedAtNodePort := func(s *snapshot.Service) {
		atNodePort(s)
		s.ExternalIPs, s.LoadBalancerIPs = nil,
			s.ExternalIPs
	}
	atClusterIP := func(s *snapshot.Service) { s.ExternalIPs = addrs("10.96.0.1") }
	old, late := snapshot.Age{Created: 100, UID: "9"}, snapshot.Age{Created: 200, UID: "1"}
	for _, c := range []struct {
		what, key    string
		victim, evil *snapshot.Service
	}{
		{"an external IP", "198.51.100.7:80",
			service("shop", "web", "10.96.0.1", old, external), service("aaa", "evil", "10.96.0.2", late, external)},
		{"a load balancer address", "198.51.100.7:80",
			service("shop", "web", "10.96.0.1", old, balanced), service("aaa", "evil", "10.96.0.2", late, balanced)},
		{"a node port", "192.168.0.1:30080",
			service("shop", "web", "10.96.0.1", old, nodePort), service("aaa", "evil", "10.96.0.2", late, nodePort)},
		{"a node port, by a load balancer at the node's address", "192.168.0.1:30080",
			service("shop", "web", "10.96.0.1", old, nodePort), service("aaa", "evil", "10.96.0.2", late, balancedAtNodePort)},
		{"a load balancer at the node's address, by a node port", "192.168.0.1:30080",
			service("shop", "web", "10.96.0.1", old, balancedAtNodePort), service("aaa", "evil", "10.96.0.2", late, nodePort)},
		{"a cluster IP", "10.96.0.1:80",
			service("shop", "web", "10.96.0.1", old, nil), service("aaa", "evil", "10.96.0.1", late, nil)},
		{"the UID decides in the same second", "198.51.100.7:80",
			service("shop", "web", "10.96.0.1", snapshot.Age{Created: 100, UID: "1"}, external),
			service("aaa", "evil", "10.96.0.2", snapshot.Age{Created: 100, UID: "9"}, external)},
		{"an age that is not known is the youngest", "198.51.100.7:80",
			service("shop", "web", "10.96.0.1", late, external), service("aaa", "evil", "10.96.0.2", snapshot.Age{}, external)},
		// What somebody only wrote down takes nothing that was handed out, not even if he wrote it down before.
		{"a cluster IP that was expected", "10.96.0.1:80",
			service("shop", "web", "10.96.0.1", late, nil), service("aaa", "evil", "10.96.0.2", old, atClusterIP)},
		{"a node port that was expected", "192.168.0.1:30080",
			service("shop", "web", "10.96.0.1", late, nodePort), service("aaa", "evil", "10.96.0.2", old, atNodePort)},
		{"a load balancer address that was expected", "198.51.100.7:80",
			service("shop", "web", "10.96.0.1", late, balanced), service("aaa", "evil", "10.96.0.2", old, external)},
	} {
		t.Run(c.what, func(t *testing.T) {
			node := snapshot.Node{Name: "here", Addresses: addrs("192.168.0.1")}
			owner := func(s *shop) snapshot.Name {
				sp, _ := s.p.State().frontend(key(c.key))
				if x := Explain(Config{}, s.s, Question{Key: key(c.key)}); x.Port.Name != sp.Name {
					t.Errorf("explain says %v, the State %v", x.Port.Name, sp.Name)
				}
				return sp.Name.Service
			}
			s := openShop(t, Config{}, node, c.victim)
			s.p.Apply(s.s, put(s.s, c.evil))
			if got := owner(s); got != c.victim.Name || len(s.p.conflicts()) != 1 {
				t.Errorf("%v has it; conflicts %v", got, s.p.conflicts())
			}
			if again := openShop(t, Config{}, node, c.evil, c.victim); owner(again) != c.victim.Name {
				t.Errorf("after a restart %v has it", owner(again))
			}
			s.p.Apply(s.s, s.s.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{c.victim.Name: nil}}))
			if got := owner(s); got != c.evil.Name || len(s.p.conflicts()) != 0 {
				t.Errorf("when the owner is gone %v has it; conflicts %v", got, s.p.conflicts())
			}
			// A Service of the same name that is made anew is young.
			anew := *c.victim
			anew.Age = snapshot.Age{Created: 300}
			s.p.Apply(s.s, put(s.s, &anew))
			want := c.evil.Name
			if c.evil.Age == (snapshot.Age{}) || c.what[len(c.what)-8:] == "expected" {
				want = c.victim.Name
			}
			if got := owner(s); got != want {
				t.Errorf("made anew: %v has it; want %v", got, want)
			}
		})
	}
}

// TestReservedAddresses: a cluster IP is its Service's with all ports, and a health check node port is no address of
// others; what somebody named first is not served any more once it is somebody's.
func TestReservedAddresses(t *testing.T) {
	evil := func(address string, port uint16) *snapshot.Service {
		return &snapshot.Service{Name: snapshot.Name{Namespace: "aaa", Name: "evil"}, Age: snapshot.Age{Created: 1},
			ClusterIPs:  addrs("10.96.0.2"),
			ExternalIPs: addrs(address), Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: port}}}
	}
	dns := &snapshot.Service{Name: name("dns"), Age: snapshot.Age{Created: 2}, ClusterIPs: addrs("10.96.0.10"),
		Ports: tcp80(0)}
	balanced := &snapshot.Service{Name: name("balanced"), Age: snapshot.Age{Created: 2}, ClusterIPs: addrs("10.96.0.11"),
		Ports:               tcp80(0),
		HealthCheckNodePort: 30900, ExternalLocal: true}
	node := snapshot.Node{Name: "here", Addresses: addrs("192.168.0.1")}
	for _, c := range []struct {
		key    string
		evil   *snapshot.Service
		victim *snapshot.Service
	}{
		{"10.96.0.10:853", evil("10.96.0.10", 853), dns},
		{"192.168.0.1:30900", evil("192.168.0.1", 30900), balanced},
	} {
		s := openShop(t, Config{}, node, c.evil)
		expect := func(what string, want bool) {
			t.Helper()
			_, fe := s.p.State().frontend(key(c.key))
			if x := Explain(Config{}, s.s, Question{Key: key(c.key)}); (fe != nil) != want || (x.Frontend != nil) != want {
				t.Errorf("%s: %s: served %v, explained %v; want %v", c.key, what, fe != nil, x.Frontend != nil, want)
			}
		}
		expect("nobody's", true)
		s.p.Apply(s.s, put(s.s, c.victim))
		expect("somebody's", false)
		s.p.Apply(s.s, s.s.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{c.victim.Name: nil}}))
		expect("nobody's again", true)
	}
	own := evil("10.96.0.2", 853)
	if s := openShop(t, Config{}, own); s.owner("10.96.0.2:853") != "evil ClusterIP" {
		t.Error("a Service may name its own cluster IP")
	}
}

// TestUnchangedServicesKeepTheirPointer also when everything was looked at.
func TestUnchangedServicesKeepTheirPointer(t *testing.T) {
	open := webService("open", "10.96.0.2")
	open.Ports = tcp80(30080)
	s := openShop(t, Config{}, webService("closed", "10.96.0.1"), open)
	before := maps.Clone(s.p.State().Services)
	s.expect("the node", put(s.s, snapshot.Node{Name: "here", Addresses: addrs("192.168.0.1")}), "open |")
	after := s.p.State().Services
	if before[name("closed")] != after[name("closed")] || before[name("open")] == after[name("open")] {
		t.Error("closed must be the same pointer, open another")
	}
	if got := fmt.Sprint(len(before[name("open")].Ports[0].Frontends),
		len(after[name("open")].Ports[0].Frontends)); got != "1 2" {
		t.Errorf("a Service that is in the map is never changed: %s", got)
	}
}

// TestBeforeOfThoseWrittenTwice: the endpoints of Services change, and others take a key from each, all at once.
func TestBeforeOfThoseWrittenTwice(t *testing.T) {
	const pairs = 100 // few are sorted in another way than many
	vip := func(i int) []netip.Addr { return []netip.Addr{v4(198<<24 | 18<<16 | uint32(i))} }
	var losers, winners []any
	want := map[snapshot.Name]*Service{}
	for i := range pairs {
		loser, winner := fmt.Sprint("loser-", i), fmt.Sprint("winner-", i)
		l, w := webService(loser, fmt.Sprint("10.96.0.", i)), webService(winner, fmt.Sprint("10.96.1.", i))
		l.ExternalIPs, w.LoadBalancerIPs = vip(i), vip(i)
		losers = append(losers, l, sliceOf(loser, loser, endpoint("10.244.9.1", "x")))
		winners = append(winners, w, sliceOf(loser, loser, endpoint("10.244.9.2", "x")))
		want[name(winner)] = nil
	}
	s := openShop(t, Config{NodeName: "here"}, losers...)
	if before := s.p.Before(); len(before) != pairs ||
		slices.ContainsFunc(before, func(s *Service) bool { return s != nil }) {
		t.Errorf("before the first Apply there was %v", before)
	}
	maps.Copy(want, s.p.State().Services)
	change, conflicts := s.p.Apply(s.s, put(s.s, winners...))
	before := s.p.Before()
	if len(conflicts) != pairs || len(change.Services) != 2*pairs || len(before) != 2*pairs {
		t.Fatalf("%d conflicts, %d changed, %d before", len(conflicts), len(change.Services), len(before))
	}
	for i, n := range change.Services {
		if before[i] != want[n] {
			t.Errorf("%v was %p; want %p", n, before[i], want[n])
		}
	}
	if before := s.p.Before(); before != nil {
		t.Errorf("handed over twice: %v", before)
	}
	s.expect("nothing", snapshot.Change{}, "|")
	if before := s.p.Before(); before != nil {
		t.Errorf("nothing changed, and before it was %v", before)
	}
}
