package dataplane

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestExplainAgreesWithCompute asks at random in random clusters. Whatever Explain says, Compute's State must do.
func TestExplainAgreesWithCompute(t *testing.T) {
	usual := slotLimits
	slotLimits.MaxPerNamespace = hashSlots
	defer func() { slotLimits = usual }()
	r, pinged := rand.New(rand.NewPCG(7, 8)), rand.New(rand.NewPCG(7, 9))
	causes, reasons, sees, left := map[Cause]int{}, map[Reason]int{}, map[SourceSeen]int{}, map[NotScheduled]int{}
	shares := map[ShareState]int{}
	for range 3200 {
		data := make([]byte, 400)
		for j := range data {
			data[j] = byte(r.Uint32())
		}
		d, s := &dice{data}, snapshot.New()
		cfg := d.config()
		undo := referAtMost([]int{maxEndpoints, 7}[pinged.IntN(2)])
		for len(d.data) > 0 {
			s.Apply(d.delta())
		}
		if r.IntN(2) == 0 { // else zones would hardly matter
			node := s.Node
			node.Zone = "a"
			s.Apply(snapshot.Delta{Node: &node})
		}
		if r.IntN(4) == 0 { // an endpoint may be this node itself
			here := append(slices.Clone(s.HostAddrs), walkEnds[r.IntN(len(walkEnds))])
			s.Apply(snapshot.Delta{HostAddrs: &here})
		}
		st, conflicts := Compute(cfg, s)
		for _, q := range pings(pinged) {
			x := Explain(cfg, s, q)
			checkExplanation(t, st, conflicts, s, x)
			causes[x.Cause]++
		}
		for _, k := range questionKeys(st, r) {
			q := Question{Source: sources(k.Addr)[r.IntN(len(sources(k.Addr)))], Key: k, Interface: []string{"", "cni0",
				"eth0"}[r.IntN(3)]}
			x := Explain(cfg, s, q)
			checkExplanation(t, st, conflicts, s, x)
			causes[x.Cause]++
			if x.Frontend != nil {
				left[x.Frontend.NotScheduled]++
			}
			for _, c := range x.Endpoints {
				reasons[c.Reason]++
				if c.Reason.Included() {
					sees[c.SourceSeen]++
				}
			}
			for _, b := range x.Backends {
				shares[b.State]++
			}
		}
		undo()
	}
	if len(shares) != 3 {
		t.Errorf("shares of backends %v: more rounds are needed", shares)
	}
	expectAll(t, causes, causeNames[:])
	expectAll(t, reasons, reasonNames[:])
	expectAll(t, sees, sourceSeenNames[:])
	expectAll(t, left, notScheduledTexts[:])
}

// expectAll names the values that random clusters never met, and those without a name.
func expectAll[V ~uint8](t *testing.T, met map[V]int, names []string) {
	t.Helper()
	for v := range V(max(len(names), 1+int(slices.Max(slices.Collect(maps.Keys(met)))))) {
		switch {
		case int(v) >= len(names):
			t.Errorf("%T %d has no name", v, v)
		case met[v] == 0:
			t.Errorf("no random cluster meets %T %d, %q: nothing decides it, or more rounds are needed", v, v, names[v])
		}
	}
}

// questionKeys are all frontends, and some keys that are likely to be none.
func questionKeys(st *State, r *rand.Rand) (keys []Key) {
	for _, svc := range st.Services {
		svc.eachClaim(func(k Key, _ Claim) { keys = append(keys, k) })
	}
	slices.SortFunc(keys, Key.Compare)
	all := slices.Concat(walkHosts, walkVIPs, addrs("10.96.0.2 10.96.0.9 fd00:96::1 fd00:96::9 192.0.2.1"))
	for range 20 {
		keys = append(keys, Key{all[r.IntN(len(all))], walkProtocol[r.IntN(len(walkProtocol))],
			[]uint16{80, 81, 30080}[r.IntN(3)]})
	}
	return keys
}

// pings are questions about pings of addresses that are likely to be of Services.
func pings(r *rand.Rand) (questions []Question) {
	for range 10 {
		q := Question{Key: Key{Addr: walkVIPs[r.IntN(len(walkVIPs))], Protocol: snapshot.ICMP}}
		if q.Key.Addr.Is6() {
			q.Key.Protocol = snapshot.ICMPv6
		}
		q.Source = sources(q.Key.Addr)[r.IntN(len(sources(q.Key.Addr)))]
		questions = append(questions, q)
	}
	return questions
}

// sources are senders of a family: endpoints, this node, pods, and others.
func sources(of netip.Addr) []netip.Addr {
	if of.Is4() {
		return addrs("10.244.9.1 10.244.9.2 10.244.1.1 192.168.0.1 198.51.100.1 192.168.7.7 203.0.113.9")
	}
	return addrs("fd00:244::1 fd00:244:1::1 fd00:192::1 fe80::1 2001:db8::9")
}

func checkExplanation(t *testing.T, st *State, conflicts []Conflict, s *snapshot.Snapshot, x *Explanation) {
	t.Helper()
	q := x.Question
	sp, fe := st.frontend(q.Key)
	if (fe == nil) != (x.Frontend == nil) {
		t.Fatalf("%v: the State has %v, the explanation %v", q, fe, x.Frontend)
	}
	if want := unserved(st, conflicts, s, q.Key.Addr); !slices.Equal(x.Unserved, want) {
		t.Fatalf("%v: %v name the address in vain, want %v", q, x.Unserved, want)
	}
	guarded := st.LocalhostNodePorts && q.Key.Addr == localhost && !x.Origin.Node
	if guarded != (x.Cause == FromOutsideToLoopback) {
		t.Fatalf("%v: %v", q, x.Cause)
	}
	if guarded {
		return
	}
	if fe == nil {
		if want := causeWithout(st, s, x); x.Cause != want && !ousted(st, s, q.Key.Addr) {
			t.Fatalf("%v: %v, want %v", q, x.Cause, want)
		}
		return
	}
	if x.Port.Name != sp.Name || x.Port.Affinity != sp.Affinity || !x.Port.Cluster.equal(sp.Cluster) ||
		!x.Port.Local.equal(sp.Local) || x.Port.SecondChance != sp.SecondChance ||
		fe.Key != x.Frontend.Key || fe.Kind != x.Frontend.Kind || fe.NotScheduled != x.Frontend.NotScheduled ||
		!equalScheduling(sp.Scheduling, x.Port.Scheduling) {
		t.Fatalf("%v: the State has %+v, the explanation %+v", q, sp, x.Port)
	}
	var losers []Claim
	for _, c := range conflicts {
		if c.Key == q.Key {
			losers = append(losers, c.Loser)
		}
	}
	if !slices.Equal(losers, x.Claims[1:]) || x.Claims[0] != (Claim{sp.Name, fe.Kind, s.Services[sp.Name.Service].Age}) {
		t.Fatalf("%v: claims %v; lost %v", q, x.Claims, losers)
	}
	route := fe.Routes[x.Row]
	if first := slices.IndexFunc(fe.Routes, func(r Route) bool { return holds(st, s, r.From, q) }); q.Interface != "" &&
		x.Row != first {
		t.Fatalf("%v: row %d, want %d of %+v", q, x.Row, first, fe.Routes)
	}
	allowed := fe.Sources == nil || contain(fe.Sources, q.Source)
	if (x.Cause == SourceRefused) == allowed || (fe.Sources != nil && allowed) != x.Source.Contains(q.Source) {
		t.Fatalf("%v: cause %v, range %v of %v", q, x.Cause, x.Source, fe.Sources)
	}
	checkTaken(t, st, x, route)
}

// ousted reports whether a Service that names an address has lost all its frontends, there and elsewhere, to
// others. Then it has no part in the State. Explain looks at one address and does not know.
func ousted(st *State, s *snapshot.Snapshot, a netip.Addr) bool {
	for n, svc := range s.Services {
		if named, _ := referencesKey(svc, Key{Addr: a}); named && st.Services[n] == nil {
			return true
		}
	}
	return false
}

// unserved returns the Services that name an address and have no frontend there, not even one that another has won.
func unserved(st *State, conflicts []Conflict, s *snapshot.Snapshot, a netip.Addr) (names []snapshot.Name) {
	for n, svc := range s.Services {
		has := slices.ContainsFunc(conflicts, func(c Conflict) bool {
			return c.Key.Addr == a && c.Loser.Port.Service == n
		})
		st.Services[n].eachClaim(func(k Key, _ Claim) { has = has || k.Addr == a })
		if named, _ := referencesKey(svc, Key{Addr: a}); named && !has {
			names = append(names, n)
		}
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	return names
}

// servicesAlone says whether a frontend's address is one that nobody but Services can have, or this host's own.
func servicesAlone(st *State, f *Frontend) bool {
	a := f.Key.Addr
	switch f.Kind {
	case NodePort:
		return true
	case ClusterIP:
		return (st.ServiceCIDRs == nil || contain(st.ServiceCIDRs, a)) && !contain(st.SharedRanges, a) ||
			contain(st.IPVSAddresses, a)
	case LoadBalancerIP:
		return contain(st.IPVSAddresses, a)
	}
	return false
}

// checkTaken compares the endpoints that Explain says are in the pool with those that are.
func checkTaken(t *testing.T, st *State, x *Explanation, route Route) {
	t.Helper()
	var taken []Endpoint
	var ejected []snapshot.Unhealthy
	for _, c := range x.Endpoints {
		if c.Reason == ExcludedUnanswered || c.Reason == ExcludedRefused {
			ejected = append(ejected, *c.Unhealthy)
			if (c.Reason == ExcludedRefused) != (c.Unhealthy.Cause == snapshot.Refused) {
				t.Fatalf("%v: %v is %v, but %v", x.Question, c.Endpoint, c.Reason, c.Unhealthy.Cause)
			}
		}
		if c.Reason.Included() {
			taken = append(taken, c.Endpoint)
			if c.SourceSeen.Node() && !route.SNAT && c.Addr() != x.Question.Source || c.SourceSeen == SourceSeenClient &&
				route.SNAT {
				t.Fatalf("%v: %v sees %v by %+v", x.Question, c.Endpoint, c.SourceSeen, route)
			}
		}
	}
	if !slices.Equal(taken, route.Pool.Endpoints) {
		t.Fatalf("%v: the pool is %v, explained are %+v", x.Question, route.Pool.Endpoints, x.Endpoints)
	}
	if !slices.Equal(ejected, route.Pool.Ejected) {
		t.Fatalf("%v: ejected are %v, explained are %+v", x.Question, route.Pool.Ejected, x.Endpoints)
	}
	for i, r := range x.Frontend.Routes {
		if len(r.Pool.Endpoints) > 0 && x.Local[i] != (r.Pool == x.Port.Local) {
			t.Fatalf("%v: Local is %v", x.Question, x.Local)
		}
	}
	if x.Cause == SourceRefused {
		return
	}
	scheduled := x.Port.Scheduling != nil && len(taken) > 0 && !x.Question.Key.Addr.IsLoopback() &&
		servicesAlone(st, x.Frontend) &&
		x.Frontend.Routes[x.Row].Pool == x.Frontend.Routes[len(x.Frontend.Routes)-1].Pool
	switch want := x.Cause.Outcome(); {
	case (want == Scheduled) != scheduled, len(taken) > 0 && !scheduled && want != Sent,
		len(taken) == 0 && route.Pool.Empty == Drop && want != Dropped,
		len(taken) == 0 && route.Pool.Empty == Pass && want != Untouched,
		len(taken) == 0 && route.Pool.Empty == Reject && want != Rejected:
		t.Fatalf("%v: %v by %+v", x.Question, x.Cause, route)
	}
}

// holds reads State.Pods as a backend must, for packets of which the interface is known.
func holds(st *State, s *snapshot.Snapshot, f From, q Question) bool {
	node := slices.Contains(s.HostAddrs, q.Source)
	pods := ipfamily.Per[Pods]{st.Pods4, st.Pods6}[ipfamily.Of(q.Key.Addr)]
	switch f {
	case Node:
		return node
	case Pod:
		return pods.CIDR.IsValid() && pods.CIDR.Contains(q.Source) || !node && (pods.Interface == q.Interface &&
			q.Interface != "" ||
			pods.InterfacePrefix != "" && len(q.Interface) >= 3 && q.Interface[:3] == pods.InterfacePrefix)
	}
	return true
}

// causeWithout is what happens to packets to an address that are for no frontend.
func causeWithout(st *State, s *snapshot.Snapshot, x *Explanation) Cause {
	a, ping := x.Question.Key.Addr, x.Question.Key.Protocol.IsPing()
	outside := !x.Origin.Node && !x.Origin.Pod
	var allocated, silent, balanced, pingable bool
	for _, svc := range st.Services {
		silent = silent || slices.Contains(svc.SilentClusterIPs, a)
		balanced = balanced || slices.Contains(svc.LoadBalancerIPs, a)
		pingable = pingable || slices.Contains(svc.PingableIPs, a)
		for _, sp := range svc.Ports {
			for _, f := range sp.Frontends {
				allocated = allocated || f.Kind == ClusterIP && f.Key.Addr == a
			}
		}
	}
	switch {
	case ping && allocated && !silent && st.PingAddrs[ipfamily.Of(a)].IsValid():
		return PingAnswered
	case !st.Refuses(a, s.HostAddrs):
		return NotService
	case allocated && ping && silent:
		return NoEndpoints
	case allocated:
		return UnusedPort
	case contain(st.ServiceCIDRs, a):
		return Unallocated
	case outside && ping && pingable:
		return PingAnswered
	case outside && balanced:
		return UnusedPort
	}
	return NotService
}

// TestExplainNear: what one may have meant, where there is no frontend.
func TestExplainNear(t *testing.T) {
	s := snapshot.New()
	put(s, snapshot.Node{Name: "here", Addresses: addrs("192.168.0.1")},
		&snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.1"), ExternalIPs: addrs("198.51.100.1 2001:db8::1"),
			Ports: tcp80(30080)},
		sliceOf("web", "web-1", endpoint("10.244.9.1", "here"), endpoint("fd00:244::1", "here")),
		&snapshot.Slice{Name: name("web-2"), Service: "web", Endpoints: []snapshot.Endpoint{endpoint("10.244.9.2", "here")},
			Ports: []snapshot.SlicePort{{Name: "other", Protocol: snapshot.TCP, Port: 1}}},
		&snapshot.Slice{Name: name("web-3"), Service: "web", Endpoints: []snapshot.Endpoint{endpoint("fd00:244::2", "here")},
			Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}}})
	cfg := Config{NodeName: "here"}
	ask := func(k string) *Explanation {
		return Explain(cfg, s, Question{Source: sources(key(k).Addr)[0], Key: key(k)})
	}
	claim := func(kind Kind) Claim { return Claim{Port: PortName{name("web"), "", snapshot.TCP}, Kind: kind} }
	for _, test := range []struct {
		key  string
		near []NearMiss
	}{
		{"198.51.100.1:81", []NearMiss{{key("198.51.100.1:80"), claim(ExternalIP)}}},
		{"192.168.0.9:30080", []NearMiss{{key("192.168.0.1:30080"), claim(NodePort)}}},
		{"10.96.0.1:30080", []NearMiss{{key("10.96.0.1:80"), claim(ClusterIP)}, {key("192.168.0.1:30080"), claim(NodePort)}}},
		{"192.168.0.9:30081", nil},
	} {
		if x := ask(test.key); !slices.Equal(x.NearMisses, test.near) || x.Frontend != nil {
			t.Errorf("%s: near are %v", test.key, x.NearMisses)
		}
	}
	if x := ask("[2001:db8::1]:80"); x.Cause != NotService || !slices.Equal(x.Unserved, []snapshot.Name{name("web")}) {
		t.Errorf("an address of a family without cluster IP: %+v", x)
	}
	x := ask("10.96.0.1:80")
	if len(x.SkippedSlices) != 2 || x.SkippedSlices[0].Slice != "web-2" || len(x.SkippedSlices[0].Ports) != 1 ||
		!x.SkippedSlices[1].OtherFamily {
		t.Errorf("slices without endpoints for the port: %+v", x.SkippedSlices)
	}
}

// TestExplainGuess: where interfaces tell pods from others and the interface is not known, the Node's pod ranges stand
// in.
func TestExplainGuess(t *testing.T) {
	s := snapshot.New()
	put(s, snapshot.Node{Name: "here", PodCIDRs: prefixes("10.244.1.0/24")},
		&snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.1"), Ports: tcp80(0), Affinity: time.Hour})
	cfg := Config{NodeName: "here", DetectLocal: DetectLocal{Mode: DetectBridgeInterface, Interface: "cni0"}}
	for _, test := range []struct {
		source, iface string
		pod, guess    bool
	}{
		{"10.244.1.9", "", true, true}, {"10.244.2.9", "", false, false}, {"10.244.1.9", "eth0", false, false},
		{"10.244.2.9", "cni0", true, false},
	} {
		x := Explain(cfg, s, Question{Source: addr(test.source), Interface: test.iface, Key: key("10.96.0.1:80")})
		if x.Origin.Pod != test.pod || x.Origin.Guess.IsValid() != test.guess {
			t.Errorf("%+v: %+v", test, x.Origin)
		}
	}
}
