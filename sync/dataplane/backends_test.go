package dataplane

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// backed is a Service at 10.96.0.1:80 with some backends, and mesh a cluster of Services that it may refer to: "v1" and
// "v2" at port 80, whose slices have the port 8080.
func backed(to ...snapshot.Backend) *snapshot.Service {
	return &snapshot.Service{Name: name("gw"), ClusterIPs: addrs("10.96.0.1"), Ports: tcp80(0),
		Backends: &snapshot.Backends{For: "Gateway edge/db", Ports: []snapshot.PortBackends{{Listener: "l", To: to}}}}
}

// share is a backend of a weight.
func share(n string, weight uint32) snapshot.Backend {
	return snapshot.Backend{Service: name(n), Port: 80, Weight: weight}
}

// serves gives a Service with endpoints, for put.
func serves(n string, eps ...snapshot.Endpoint) []any {
	return []any{&snapshot.Service{Name: name(n), Ports: tcp80(0)}, sliceOf(n, n+"-1", eps...)}
}

// pods are ready endpoints "10.244.GROUP.1", and so on, on a node.
func pods(group, count int, node string) (list []snapshot.Endpoint) {
	for i := range count {
		e := endpoint("10.244.0.1", node)
		e.Addr = netip.AddrFrom4([4]byte{10, 244, byte(group), byte(i + 1)})
		list = append(list, e)
	}
	return list
}

// weights lists the weights of a pool, and what is refused: "4 4 1 1, refused 1000".
func (p *Pool) weights() string {
	text := ""
	for _, e := range p.Endpoints {
		text += fmt.Sprint(e.Weight, " ")
	}
	if p.Refused > 0 {
		text += fmt.Sprint("refused ", p.Refused)
	}
	if len(p.Endpoints) == 0 {
		text += p.Empty.String()
	}
	return text
}

// TestBackendShares: each backend gets the share of its weight, however many endpoints it has.
func TestBackendShares(t *testing.T) {
	notReady, weighted := pods(2, 1, "x"), pods(1, 2, "x")
	notReady[0].Ready = false
	weighted[0].Weight = snapshot.Weight{Given: true, Parts: 300}
	draining := pods(1, 2, "x")
	draining[0].Weight = snapshot.Weight{Given: true}
	refused := share("v2", 1)
	refused.Refused = "no"
	for _, test := range []struct {
		v1, v2 []snapshot.Endpoint
		to     []snapshot.Backend
		want   string
	}{
		{pods(1, 1, "x"), pods(2, 1, "x"), []snapshot.Backend{share("v1", 80), share("v2", 20)}, "4 1 "},
		{pods(1, 3, "x"), pods(2, 2, "x"), []snapshot.Backend{share("v1", 90), share("v2", 10)}, "6 6 6 1 1 "},
		{pods(1, 7, "x"), pods(2, 2, "x"), []snapshot.Backend{share("v1", 7), share("v2", 2)}, "0 0 0 0 0 0 0 0 0 "},
		{weighted, pods(2, 1, "x"), []snapshot.Backend{share("v1", 1), share("v2", 1)}, "3 1 4 "},
		{draining, pods(2, 1, "x"), []snapshot.Backend{share("v1", 1), share("v2", 3)}, "1 3 "},
		{pods(1, 1, "x"), pods(2, 1, "x"), []snapshot.Backend{share("v1", 1), share("v2", 0)}, "0 "},
		{pods(1, 1, "x"), pods(2, 1, "x"), []snapshot.Backend{share("v1", 1), share("v2", 1_000_000)}, "1 65535 "},
		{pods(1, 2, "x"), pods(1, 1, "x"), []snapshot.Backend{share("v1", 1), share("v2", 1)}, "3 1 "},
		{pods(1, 1, "x"), nil, []snapshot.Backend{share("v1", 90), share("v2", 10)}, "0 refused 1000"},
		{pods(1, 1, "x"), notReady, []snapshot.Backend{share("v1", 2), share("v2", 1)}, "0 refused 3333"},
		{pods(1, 1, "x"), nil, []snapshot.Backend{share("v1", 1_000_000), share("v2", 1)}, "0 refused 1"},
		{pods(1, 1, "x"), nil, []snapshot.Backend{share("v1", 1), share("v2", 1_000_000)}, "0 refused 9999"},
		{pods(1, 1, "x"), pods(2, 1, "x"), []snapshot.Backend{share("v1", 1), refused}, "0 refused 5000"},
		{pods(1, 1, "x"), nil, []snapshot.Backend{share("v1", 1), share("nobody", 3)}, "0 refused 7500"},
		{pods(1, 1, "x"), nil, []snapshot.Backend{share("v1", 1), share("gw", 1)}, "0 refused 5000"},
		{pods(1, 1, "x"), nil, []snapshot.Backend{share("v1", 0), share("v2", 1)}, "reject"},
		{pods(1, 1, "x"), nil, []snapshot.Backend{share("v1", 0)}, "reject"},
		{pods(1, 1, "x"), nil, nil, "reject"},
	} {
		s := snapshot.New()
		put(s, append(append(serves("v1", test.v1...), serves("v2", test.v2...)...), backed(test.to...),
			sliceOf("gw", "own", endpoint("10.9.9.9", "x")))...)
		st, _ := Compute(Config{}, s)
		checkInvariants(t, st)
		if got := st.Services[name("gw")].Ports[0].Cluster.weights(); got != test.want {
			t.Errorf("%v: %q, want %q", test.to, got, test.want)
		}
	}
}

// TestBackendsOfManyParts: shares that no weight can hold exactly are rounded, and add up to what was asked.
func TestBackendsOfManyParts(t *testing.T) {
	s := snapshot.New()
	objects, to := []any{}, []snapshot.Backend{}
	for g := range snapshot.MaxBackends {
		eps := pods(g+1, 100+g, "x")
		for i := range eps {
			eps[i].Weight = snapshot.Weight{Given: true, Parts: uint32(1000 + 17*i)}
		}
		n := fmt.Sprint("v", g)
		objects, to = append(objects, serves(n, eps...)...), append(to, share(n, uint32(1+g)))
	}
	put(s, append(objects, backed(to...))...)
	st, _ := Compute(Config{}, s)
	sums, all := map[byte]int{}, 0
	for _, e := range st.Services[name("gw")].Ports[0].Cluster.Endpoints {
		sums[e.Addr().As4()[2]] += e.Share()
		all += e.Share()
	}
	for g := range snapshot.MaxBackends {
		if got, want := float64(sums[byte(g+1)])/float64(all), float64(1+g)/136; got < want*0.999 || got > want*1.001 {
			t.Errorf("group %d has %f of all, want %f", g, got, want)
		}
	}
}

// TestBackendRules: readiness, hints and the policy Local hold for each backend alone.
func TestBackendRules(t *testing.T) {
	terminating, here := pods(1, 1, "x"), pods(2, 2, "here")
	terminating[0].Ready, terminating[0].Terminating = false, true
	here[1].Node = "there"
	s := snapshot.New()
	svc := backed(share("v1", 1), share("v2", 1), share("v3", 2))
	svc.InternalLocal = true
	hinted := pods(3, 2, "there")
	hinted[0].ForZones, hinted[1].ForZones = []string{"a"}, []string{"b"}
	put(s, append(append(append(serves("v1", terminating...), serves("v2", here...)...), serves("v3", hinted...)...), svc,
		snapshot.Node{Name: "here", Zone: "a"})...)
	pools := func() (cluster, local string) {
		st, _ := Compute(Config{NodeName: "here"}, s)
		checkInvariants(t, st)
		sp := st.Services[name("gw")].Ports[0]
		return sp.Cluster.weights(), sp.Local.weights()
	}
	if _, local := pools(); local != "0 " {
		t.Errorf("local is %q: backends of other nodes have no share here", local)
	}
	open := *svc
	open.InternalLocal = false
	put(s, &open)
	if cluster, _ := pools(); cluster != "2 1 1 4 " { // all but one of v3, whose hint is for another zone
		t.Errorf("cluster is %q", cluster)
	}
	put(s, svc, sliceOf("v1", "v1-1"))
	if _, local := pools(); local != "0 refused 5000" {
		t.Errorf("local is %q: only a backend that has no endpoint anywhere is refused", local)
	}
	put(s, sliceOf("v2", "v2-1", pods(2, 2, "there")...))
	if _, local := pools(); local != "drop" {
		t.Errorf("local is %q", local)
	}
}

// TestRefusedSharesTakeSlots: they are elements that take long to write, so a namespace has some, and the oldest first.
func TestRefusedSharesTakeSlots(t *testing.T) {
	usual := slotLimits
	slotLimits.MaxPerNamespace = 3 * refusedSlots
	defer func() { slotLimits = usual }()
	s := snapshot.New()
	put(s, append(serves("v1", pods(1, 1, "x")...), serves("v2")...)...)
	for i := range 4 {
		svc := backed(share("v1", 1), share("v2", 1))
		svc.Name, svc.ClusterIPs = name(fmt.Sprint("gw", i)), []netip.Addr{v4(10<<24 | 96<<16 | uint32(i+1))}
		svc.Age.Created = int64(i + 1)
		put(s, svc)
	}
	st, _ := Compute(Config{}, s)
	for i := range 4 {
		svc := st.Services[name(fmt.Sprint("gw", i))]
		if got := svc.Ports[0].Cluster.weights(); (got == "0 refused 5000") != (i < 3) || (got == "0 ") != (i == 3) ||
			(svc.NotScheduled() == SlotsFull) != (i == 3) {
			t.Errorf("%d: %s, %v", i, got, svc.NotScheduled())
		}
	}
}

// TestBackendsKeepFlows: a backend whose weight becomes 0 keeps its flows.
func TestBackendsKeepFlows(t *testing.T) {
	s := snapshot.New()
	put(s, append(append(serves("v1", pods(1, 1, "x")...), serves("v2", pods(1, 2, "y")...)...),
		backed(share("v1", 1), share("v2", 0)))...)
	st, _ := Compute(Config{}, s)
	sp := st.Services[name("gw")].Ports[0]
	if len(sp.Serving) != 2 || len(sp.Cluster.Endpoints) != 1 {
		t.Errorf("%+v", sp)
	}
}

// TestBackendsAreNotScheduled: IPVS has no part in shares, and zones neither.
func TestBackendsAreNotScheduled(t *testing.T) {
	s := snapshot.New()
	near := pods(1, 2, "x")
	near[0].Zone, near[1].Zone = "a", "b"
	svc := backed(share("v1", 1))
	svc.Scheduling = &snapshot.Scheduling{Scheduler: "lc", PreferNear: true}
	put(s, append(serves("v1", near...), svc, snapshot.Node{Name: "here", Zone: "a"})...)
	st, _ := Compute(Config{IPVS: IPVS{Mode: IPVSAuto}}, s)
	got := st.Services[name("gw")]
	if sp := got.Ports[0]; got.NotScheduled() != WithBackends || sp.Scheduling != nil || sp.Cluster.weights() != "0 0 " {
		t.Errorf("%v: %+v", got.NotScheduled(), sp)
	}
}

// TestExplainBackends names the backends with what becomes of their shares.
func TestExplainBackends(t *testing.T) {
	s := snapshot.New()
	svc := backed(share("v1", 80), share("v2", 10), share("no", 10))
	put(s, append(append(serves("v1", pods(1, 2, "x")...), serves("v2")...), svc)...)
	x := Explain(Config{}, s, Question{Source: addr("192.0.2.1"), Key: key("10.96.0.1:80")})
	to := svc.Backends.Ports[0].To
	want := []BackendShare{{&to[0], ShareServed, ""}, {&to[1], ShareRefused, ""},
		{&to[2], ShareRefused, "there is no such Service with a cluster IP"}}
	if !reflect.DeepEqual(x.Backends, want) || x.Refused() != 2000 || x.Cause != FrontendFound {
		t.Errorf("%+v, refused %d, %v", x.Backends, x.Refused(), x.Cause)
	}
	for _, e := range x.Endpoints {
		if e.Backend != want[0].Backend || e.Slice != "v1-1" || !e.Reason.Included() {
			t.Errorf("%+v", e)
		}
	}
	refused := Ending{Outcome: Rejected, Share: 2, Of: 10}
	trace := Trace{Endings: []Ending{refused, {Outcome: Sent, Share: 4, Of: 10, Endpoint: x.Endpoints[0].AddrPort},
		{Outcome: Sent, Share: 4, Of: 10, Endpoint: x.Endpoints[1].AddrPort}}}
	if d := trace.Disagreements(x); d != nil {
		t.Errorf("disagrees: %v", d)
	}
	trace.Endings[0].Share, trace.Endings[1].Share = 1, 5
	if d := trace.Disagreements(x); len(d) != 3 {
		t.Errorf("disagrees: %v", d)
	}
}

func TestLocalReadyOfBackends(t *testing.T) {
	s := snapshot.New()
	put(s, append(append(serves("v1", pods(1, 2, "here")...), serves("v2", pods(1, 3, "here")...)...),
		backed(share("v1", 1), share("v2", 1), share("no", 1)))...)
	if v4, _ := LocalReady("here", s, name("gw")); v4 != 3 {
		t.Errorf("%d endpoints, want 3", v4)
	}
}

// meanTenant has n Services that refer to one, of which each slice has 100 endpoints.
func meanTenant(n, slices, ports, backends int) (d snapshot.Delta, one snapshot.Name) {
	d = snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	one = name("one")
	d.Services[one] = &snapshot.Service{Name: one, Ports: tcp80(0)}
	for i := range slices {
		sl := sliceOf("one", fmt.Sprintf("one-%04d", i))
		for j := range 100 {
			e := endpoint("10.0.0.1", "x")
			e.Addr = netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(j)})
			sl.Endpoints = append(sl.Endpoints, e)
		}
		d.Slices[sl.Name] = sl
	}
	for i := range n {
		svc := backed()
		svc.Name, svc.ClusterIPs = name(fmt.Sprintf("gw-%04d", i)), []netip.Addr{v4(10<<24 | 96<<16 | uint32(i+1))}
		svc.Age, svc.Ports, svc.Backends.Ports = snapshot.Age{Created: int64(i + 1)}, nil, nil
		for p := range ports {
			port := fmt.Sprint("p", p)
			svc.Ports = append(svc.Ports, snapshot.Port{Name: port, Protocol: snapshot.TCP, Port: uint16(1000 + p)})
			to := make([]snapshot.Backend, backends)
			for b := range to {
				to[b] = share("one", 1)
			}
			svc.Backends.Ports = append(svc.Backends.Ports, snapshot.PortBackends{Port: port, To: to})
		}
		d.Services[svc.Name] = svc
	}
	return d, one
}

// served counts the Services with endpoints.
func served(st *State) (n int) {
	for _, svc := range st.Services {
		if len(svc.Ports[0].Cluster.Endpoints) > 0 {
			n++
		}
	}
	return n
}

// TestReferredPerNamespace: the Services of a namespace refer to as many endpoints as one may have, the oldest first.
func TestReferredPerNamespace(t *testing.T) {
	const fit = maxEndpoints / 10_000
	d, one := meanTenant(fit+5, 100, 1, 1)
	other := backed(snapshot.Backend{Service: one, Port: 80, Weight: 1})
	other.Name, other.ClusterIPs = snapshot.Name{Namespace: "other", Name: "gw"}, addrs("10.97.0.1")
	d.Services[other.Name] = other
	b := newBooks(t, IPVS{})
	b.apply(d)
	if n := served(b.State()); n != fit+1 {
		t.Errorf("%d Services have endpoints, want %d and that of another namespace", n, fit)
	}
	youngest := b.State().Services[name("gw-0017")]
	if youngest.NotScheduled() != TooManyBackends || !youngest.OverCapacity {
		t.Errorf("%v: %+v", youngest.NotScheduled(), youngest)
	}
	b.fresh()
	gone := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("gw-0000"): nil, name("gw-0003"): nil,
		name("gw-0004"): nil}}
	c := b.apply(gone) // of which one gives its place to another: an eighth must stay free then
	if served(b.State()) != fit-1 || len(c.Services) != 4 {
		t.Errorf("of %d changed, %d Services have endpoints", len(c.Services), served(b.State()))
	}
}

// BenchmarkReferred is one endpoint that comes or goes, of one Service to which a thousand others refer.
func BenchmarkReferred(b *testing.B) {
	for _, c := range []struct{ slices, ports, backends int }{{100, 1, 1}, {1, 64, 1}, {1, 64, 16}, {1, 1, 1}} {
		b.Run(fmt.Sprintf("endpoints=%d/ports=%d/backends=%d", 100*c.slices, c.ports, c.backends), func(b *testing.B) {
			d, _ := meanTenant(1000, c.slices, c.ports, c.backends)
			p, s := NewPlanner(benchConfig), snapshot.New()
			p.Apply(s, s.Apply(d))
			b.ReportMetric(float64(served(p.State())), "served")
			both := [2]*snapshot.Slice{d.Slices[name("one-0000")], {}}
			*both[1] = *both[0]
			both[1].Endpoints = both[0].Endpoints[1:]
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				sl := both[(i+1)%2]
				p.Apply(s, s.Apply(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{sl.Name: sl}}))
			}
		})
	}
}
