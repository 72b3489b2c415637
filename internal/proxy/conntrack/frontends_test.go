package conntrack

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func name(s string) snapshot.Name { return snapshot.Name{Namespace: "default", Name: s} }

// key reads "10.96.0.1:53/udp".
func key(s string) dataplane.Key {
	a, p, _ := strings.Cut(s, "/")
	ap := netip.MustParseAddrPort(a)
	protocol := map[string]snapshot.Protocol{"tcp": snapshot.TCP, "udp": snapshot.UDP, "sctp": snapshot.SCTP}[p]
	return dataplane.Key{Addr: ap.Addr(), Protocol: protocol, Port: ap.Port()}
}

func keys(list string) (out []dataplane.Key) {
	for _, w := range strings.Fields(list) {
		out = append(out, key(w))
	}
	return out
}

// service makes a Service from ports such as "10.96.0.1:53/udp,192.0.2.10:30053/udp>10.244.1.10:53,10.244.1.11:53",
// each with its frontends and its serving endpoints.
func service(n string, ports ...string) *dataplane.Service {
	svc := &dataplane.Service{Name: name(n)}
	for i, p := range ports {
		fronts, serving, _ := strings.Cut(p, ">")
		sp := &dataplane.ServicePort{Cluster: &dataplane.Pool{}, Local: &dataplane.Pool{}}
		for w := range strings.SplitSeq(fronts, ",") {
			sp.Frontends = append(sp.Frontends, dataplane.Frontend{Key: key(w)})
		}
		for w := range strings.SplitSeq(serving, ",") {
			if w != "" {
				sp.Serving = append(sp.Serving, dataplane.Endpoint{AddrPort: netip.MustParseAddrPort(w)})
			}
		}
		sp.Name = dataplane.PortName{Service: svc.Name, Port: fmt.Sprint(i), Protocol: sp.Frontends[0].Key.Protocol}
		svc.Ports = append(svc.Ports, sp)
	}
	return svc
}

func state(services ...*dataplane.Service) *dataplane.State {
	st := &dataplane.State{Services: map[snapshot.Name]*dataplane.Service{}}
	for _, s := range services {
		st.Services[s.Name] = s
	}
	return st
}

// TestFinishing: a flow that changes to another endpoint may wait for its first answer; one that is gone answers
// nobody.
func TestFinishing(t *testing.T) {
	svc := service("dns", "10.96.0.1:53/udp>10.0.0.9:53")
	svc.Ports[0].Finishing = []dataplane.Endpoint{{AddrPort: netip.MustParseAddrPort("10.0.0.1:53")}}
	fs := frontends{}
	fs.replace([]*dataplane.Service{nil}, []*dataplane.Service{svc})
	for _, test := range []struct {
		endpoint        string
		answered, stale bool
	}{
		{"10.0.0.9:53", false, false}, {"10.0.0.9:53", true, false}, {"10.0.0.1:53", false, false},
		{"10.0.0.1:53", true, true}, {"10.0.0.2:53", false, true}, {"10.0.0.2:53", true, true},
	} {
		f := flow{frontend: key("10.96.0.1:53/udp"), endpoint: netip.MustParseAddrPort(test.endpoint),
			answered: test.answered}
		if got := fs.stale(&f); got != test.stale {
			t.Errorf("%+v: stale is %v", test, got)
		}
	}
}

// TestFollow goes from one state to another, and lists the frontends that are worth a look then.
func TestFollow(t *testing.T) {
	dns := service("dns", "10.96.0.1:53/udp>10.0.0.1:53,10.0.0.2:53", "10.96.0.1:53/tcp>10.0.0.1:53")
	tests := []struct {
		what          string
		before, after *dataplane.Service
		look          string
	}{
		{"new", nil, dns, "10.96.0.1:53/udp"},
		{"new and empty", nil, service("dns", "10.96.0.1:53/udp"), "10.96.0.1:53/udp"},
		{"gone", dns, nil, "10.96.0.1:53/udp"},
		{"TCP only", nil, service("dns", "10.96.0.1:53/tcp>10.0.0.1:53"), ""},
		{"the same", dns, service("dns", "10.96.0.1:53/udp>10.0.0.1:53,10.0.0.2:53"), ""},
		{"endpoint more", dns, service("dns", "10.96.0.1:53/udp>10.0.0.1:53,10.0.0.2:53,10.0.0.3:53"), ""},
		{"endpoint less", dns, service("dns", "10.96.0.1:53/udp>10.0.0.2:53"), "10.96.0.1:53/udp"},
		{"endpoint replaced", dns, service("dns", "10.96.0.1:53/udp>10.0.0.1:53,10.0.0.3:53"), "10.96.0.1:53/udp"},
		{"target port", dns, service("dns", "10.96.0.1:53/udp>10.0.0.1:54,10.0.0.2:54"), "10.96.0.1:53/udp"},
		{"scaled to zero", dns, service("dns", "10.96.0.1:53/udp"), "10.96.0.1:53/udp"},
		{"still at zero", service("dns", "10.96.0.1:53/udp"), service("dns", "10.96.0.1:53/udp"), ""},
		{"scaled from zero", service("dns", "10.96.0.1:53/udp"), dns, "10.96.0.1:53/udp"},
		{
			"frontend more",
			dns,
			service("dns", "10.96.0.1:53/udp,192.0.2.1:30053/udp>10.0.0.1:53,10.0.0.2:53"),
			"192.0.2.1:30053/udp",
		},
		{
			"frontend less",
			service("dns", "10.96.0.1:53/udp,192.0.2.1:30053/udp>10.0.0.1:53,10.0.0.2:53"),
			dns,
			"192.0.2.1:30053/udp",
		},
		{
			"other address",
			dns,
			service("dns", "10.96.0.2:53/udp>10.0.0.1:53,10.0.0.2:53"),
			"10.96.0.1:53/udp 10.96.0.2:53/udp",
		},
		{"SCTP", service("x", "10.96.0.1:53/sctp>10.0.0.1:53"), service("x", "10.96.0.1:53/sctp"), "10.96.0.1:53/sctp"},
		{"every frontend of a port", service("x", "10.96.0.1:53/udp,192.0.2.1:30053/udp>10.0.0.1:53"),
			service("x", "10.96.0.1:53/udp,192.0.2.1:30053/udp>10.0.0.2:53"), "10.96.0.1:53/udp 192.0.2.1:30053/udp"},
	}
	for _, test := range tests {
		t.Run(test.what, func(t *testing.T) {
			fs, before, after := frontends{}, []*dataplane.Service{nil}, []*dataplane.Service{nil}
			if test.before != nil {
				before[0] = test.before
			}
			if test.after != nil {
				after[0] = test.after
			}
			fs.replace([]*dataplane.Service{nil}, before)
			got := fs.replace(before, after)
			if !slices.Equal(got, keys(test.look)) {
				t.Errorf("look at %v, want %s", got, test.look)
			}
		})
	}
}

// TestNewTCP says which TCP frontends of a Service are new.
func TestNewTCP(t *testing.T) {
	web := service("web", "10.96.0.1:80/tcp,10.96.0.1:81/tcp,192.0.2.1:30080/tcp>10.0.0.1:80", "10.96.0.1:53/udp")
	for _, test := range []struct {
		what          string
		before, after *dataplane.Service
		want          string
	}{
		{"none", nil, nil, ""},
		{"gone", web, nil, ""},
		{"the same", web, web, ""},
		{"new", nil, web, "10.96.0.1:80/tcp 10.96.0.1:81/tcp 192.0.2.1:30080/tcp"},
		{"UDP only", nil, service("dns", "10.96.0.1:53/udp>10.0.0.1:53"), ""},
		{"the first", service("web", "10.96.0.1:81/tcp,192.0.2.1:30080/tcp"), web, "10.96.0.1:80/tcp"},
		{"the last", service("web", "10.96.0.1:80/tcp,10.96.0.1:81/tcp"), web, "192.0.2.1:30080/tcp"},
		{"one in between", service("web", "10.96.0.1:80/tcp,192.0.2.1:30080/tcp"), web, "10.96.0.1:81/tcp"},
		{"other endpoints", service("web", "10.96.0.1:80/tcp,10.96.0.1:81/tcp,192.0.2.1:30080/tcp>10.0.0.9:80"), web, ""},
	} {
		got := newTCP([]*dataplane.Service{test.before}, []*dataplane.Service{test.after})
		if !slices.Equal(got, keys(test.want)) {
			t.Errorf("%s: %v, want %s", test.what, got, test.want)
		}
	}
}

// TestFrontendMoves: an address goes from one Service to another in one change, in either order of their names.
func TestFrontendMoves(t *testing.T) {
	for _, from := range []string{"a", "z"} {
		fs, old, next := frontends{}, service(
			from,
			"10.96.0.1:53/udp>10.0.0.1:53",
		), service(
			"m",
			"10.96.0.1:53/udp>10.0.0.2:53",
		)
		fs.replace([]*dataplane.Service{nil}, []*dataplane.Service{old})
		if got := fs.replace([]*dataplane.Service{old, nil}, []*dataplane.Service{nil, next}); !slices.Equal(
			got,
			keys("10.96.0.1:53/udp"),
		) {
			t.Errorf("from %s: look at %v", from, got)
		}
		if sp := fs[key("10.96.0.1:53/udp")]; sp == nil || sp.Name.Service != name("m") {
			t.Errorf("from %s: the frontend belongs to %v", from, sp)
		}
	}
}

// TestFrontendMovesInParts: the Service that gets an address is written before the one that loses it.
func TestFrontendMovesInParts(t *testing.T) {
	fs, old, next := frontends{}, service(
		"a",
		"10.96.0.1:53/udp>10.0.0.1:53",
	), service(
		"m",
		"10.96.0.1:53/udp>10.0.0.2:53",
	)
	fs.replace([]*dataplane.Service{nil}, []*dataplane.Service{old})
	if got := fs.replace([]*dataplane.Service{nil}, []*dataplane.Service{next}); !slices.Equal(
		got,
		keys("10.96.0.1:53/udp"),
	) {
		t.Errorf("look at %v", got)
	}
	fs.replace([]*dataplane.Service{old}, []*dataplane.Service{nil})
	if sp := fs[key("10.96.0.1:53/udp")]; sp == nil || sp.Name.Service != name("m") {
		t.Errorf("the frontend belongs to %v", sp)
	}
}

func TestWrong(t *testing.T) {
	fs := frontends{}
	fs.replace(nil, []*dataplane.Service{
		service(
			"dns",
			"10.96.0.1:53/udp,192.0.2.1:30053/udp>10.0.0.1:53,192.0.2.1:30053",
		), service("none", "10.96.0.2:53/udp")})
	tests := []struct {
		what, frontend, endpoint string
		zoned, wrong             bool
	}{
		{"right", "10.96.0.1:53/udp", "10.0.0.1:53", false, false},
		{"gone endpoint", "10.96.0.1:53/udp", "10.0.0.2:53", false, true},
		{"other port", "10.96.0.1:53/udp", "10.0.0.1:54", false, true},
		{"untranslated", "10.96.0.1:53/udp", "10.96.0.1:53", false, true},
		{"the endpoint is the frontend", "192.0.2.1:30053/udp", "192.0.2.1:30053", false, false},
		{"no endpoints", "10.96.0.2:53/udp", "10.0.0.1:53", false, true},
		{"no endpoints, untranslated", "10.96.0.2:53/udp", "10.96.0.2:53", false, true},
		{"frontend gone", "10.96.0.3:53/udp", "10.0.0.1:53", false, true},
		{"frontend gone, untranslated", "192.0.2.1:30054/udp", "192.0.2.1:30054", false, false},
		{"zone, right", "10.96.0.1:53/udp", "10.0.0.1:53", true, false},
		{"zone, gone endpoint", "10.96.0.1:53/udp", "10.0.0.2:53", true, true},
		{"zone, untranslated", "10.96.0.1:53/udp", "10.96.0.1:53", true, false},
	}
	for _, test := range tests {
		f := flow{frontend: key(test.frontend), endpoint: netip.MustParseAddrPort(test.endpoint), zoned: test.zoned}
		if got := fs.stale(&f); got != test.wrong {
			t.Errorf("%s: wrong is %v", test.what, got)
		}
	}
}

// TestWrongTCP says which flows of TCP are deleted when all frontends are checked, and which frontends leave packets
// alone.
func TestWrongTCP(t *testing.T) {
	const web = "10.96.0.1:80/tcp"
	served := func(endpoints int, empty dataplane.Verdict) *dataplane.Pool {
		return &dataplane.Pool{Endpoints: make([]dataplane.Endpoint, endpoints), Empty: empty}
	}
	for _, test := range []struct {
		what   string
		change func(*dataplane.Service, *flow)
		wrong  bool
	}{
		{"untranslated", func(*dataplane.Service, *flow) {}, true},
		{"translated", func(_ *dataplane.Service, f *flow) { f.endpoint = netip.MustParseAddrPort("10.0.0.9:80") }, false},
		{"answered", func(_ *dataplane.Service, f *flow) { f.answered = true }, false},
		{"in a zone", func(_ *dataplane.Service, f *flow) { f.zoned = true }, false},
		{"to another port", func(_ *dataplane.Service, f *flow) {
			f.frontend, f.endpoint = key("10.96.0.1:81/tcp"), netip.MustParseAddrPort("10.96.0.1:81")
		}, false},
		{"no endpoints", func(s *dataplane.Service, _ *flow) {
			s.Ports[0].Frontends[0].Routes = []dataplane.Route{{Pool: served(0, dataplane.Reject)}}
		}, true},
		{"no endpoints here", func(s *dataplane.Service, _ *flow) {
			s.Ports[0].Frontends[0].Routes = []dataplane.Route{{Pool: served(0, dataplane.Drop)}}
		}, true},
		{"passed on", func(s *dataplane.Service, _ *flow) {
			s.Ports[0].Frontends[0].Routes = []dataplane.Route{{From: dataplane.Node, Pool: served(1, 0)},
				{Pool: served(0, dataplane.Pass)}}
		}, false},
		{"IPVS", func(s *dataplane.Service, _ *flow) {
			s.Ports[0].Scheduling = &dataplane.Scheduling{Scheduler: "lc"}
			s.Ports[0].Frontends[0].Routes = []dataplane.Route{{Pool: served(1, 0)}}
		}, false},
		{"IPVS does not take it", func(s *dataplane.Service, _ *flow) {
			s.Ports[0].Scheduling = &dataplane.Scheduling{Scheduler: "lc"}
			s.Ports[0].Frontends[0].Routes = []dataplane.Route{{Pool: served(0, dataplane.Reject)}}
		}, true},
		{"too many endpoints", func(s *dataplane.Service, _ *flow) { s.OverCapacity = true }, true},
	} {
		svc := service("web", web+">10.0.0.1:80")
		f := flow{frontend: key(web), endpoint: netip.MustParseAddrPort("10.96.0.1:80")}
		test.change(svc, &f)
		c := newCleaner(&fakeTable{}, nil)
		_, err := behind(c, backendFunc(fine)).Apply(state(svc), dataplane.Change{})
		labtest.Check(t, err)
		s := c.takeDue()
		if got := s.covers(f.frontend) && s.isStale(&f); got != test.wrong {
			t.Errorf("%s: wrong is %v", test.what, got)
		}
	}
}

// TestPassed: a frontend that no longer passes packets is as good as new, and flows of UDP that it passes are right.
func TestPassed(t *testing.T) {
	passes := []dataplane.Route{{Pool: &dataplane.Pool{Empty: dataplane.Pass}}}
	for _, k := range []string{"10.96.0.1:80/tcp", "10.96.0.1:80/udp"} {
		before, after := service("web", k+">10.0.0.1:80"), service("web", k+">10.0.0.1:80")
		before.Ports[0].Frontends[0].Routes = passes
		c := newCleaner(&fakeTable{}, nil)
		b := behind(c, backendFunc(fine))
		f := flow{frontend: key(k), endpoint: netip.MustParseAddrPort("10.96.0.1:80")}
		for _, step := range []struct {
			svc   *dataplane.Service
			wrong bool
		}{{before, false}, {after, true}, {before, false}} {
			_, err := b.Apply(state(step.svc), dataplane.Change{})
			labtest.Check(t, err)
			s := c.takeDue()
			if got := s.covers(f.frontend) && s.isStale(&f); got != step.wrong {
				t.Errorf("%s: wrong is %v, want %v", k, got, step.wrong)
			}
		}
	}
}

func TestQueries(t *testing.T) {
	few := keys("10.96.0.1:53/udp 10.96.0.2:53/sctp 10.96.0.2:54/sctp [fd00::1]:53/udp [fd00::2]:53/udp [fd00::2]:53/sctp")
	want := []query{
		{family: ipfamily.IPv4, protocol: snapshot.UDP, addr: few[0].Addr, port: 53},
		{family: ipfamily.IPv4, protocol: snapshot.SCTP, addr: few[1].Addr},
		{family: ipfamily.IPv6, protocol: snapshot.UDP, port: 53}, {family: ipfamily.IPv6, protocol: snapshot.SCTP},
	}
	if got := queries(few, true); !slices.Equal(got, want) {
		t.Errorf("few: %v", got)
	}
	many := keys("[fd00::1]:53/udp")
	for i := range maxSingle + 1 {
		many = append(many, key(fmt.Sprintf("10.96.0.%d:53/udp", i)))
	}
	if got := queries(many, true); !slices.Equal(got, []query{{family: ipfamily.IPv4, protocol: snapshot.UDP}, want[2]}) {
		t.Errorf("many: %v", got)
	}
	if got := queries(few, false); !slices.Equal(got, []query{{family: ipfamily.IPv4}, {family: ipfamily.IPv6}}) {
		t.Errorf("without filters: %v", got)
	}
	slices.Reverse(few)
	if got := queries(few, true); !slices.Equal(got, want) {
		t.Errorf("in another order: %v", got)
	}
	if got := queries(nil, true); len(got) != 0 {
		t.Errorf("nothing: %v", got)
	}
}

// walk is a small crowded cluster that changes at random.
type walk struct{ *rand.Rand }

func (w walk) yes() bool { return w.IntN(2) == 0 }

func (w walk) delta() snapshot.Delta {
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	protocols := []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}
	for range 1 + w.IntN(3) {
		n := name(string(rune('a' + w.IntN(4))))
		switch w.IntN(8) {
		case 0:
			d.Services[n] = nil
		case 1, 2, 3:
			svc := &snapshot.Service{Name: n, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(w.IntN(4))})},
				InternalLocal: w.yes(), ExternalLocal: w.yes()}
			for i := range w.IntN(3) {
				svc.Ports = append(svc.Ports, snapshot.Port{Name: fmt.Sprint(i), Protocol: protocols[w.IntN(3)], Port: 53,
					NodePort: uint16(w.IntN(2) * 30053)})
			}
			d.Services[n] = svc
		case 4:
			d.Slices[n] = nil
		case 5, 6:
			d.Slices[n] = w.slice(n)
		case 7:
			addrs := []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(w.IntN(3))})}
			d.Node = &snapshot.Node{Name: "here", Zone: "a", Addresses: addrs}
		}
	}
	return d
}

func (w walk) slice(n snapshot.Name) *snapshot.Slice {
	sl := &snapshot.Slice{Name: n, Service: n.Name}
	for i := range 3 {
		for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP} {
			sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: fmt.Sprint(i), Protocol: p, Port: 53})
		}
	}
	for i := range 4 {
		if w.yes() {
			ep := snapshot.Endpoint{
				Addr:        netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}),
				Ready:       w.yes(),
				Serving:     w.yes(),
				Terminating: w.yes(),
			}
			if w.yes() {
				ep.Node, ep.ForZones = "here", []string{"a"}
			}
			sl.Endpoints = append(sl.Endpoints, ep)
		}
	}
	return sl
}

// TestFollowProperty changes the cluster at random. After every step, the frontends that were updated by changes must
// equal those computed from the full state. A flow that has become stale must be to a frontend that is checked. No flow
// to a serving endpoint, as the snapshot says, is ever stale.
func TestFollowProperty(t *testing.T) {
	for seed := range uint64(300) {
		w := walk{rand.New(rand.NewPCG(seed, 1))}
		snap, planner, fs := snapshot.New(), dataplane.NewPlanner(dataplane.Config{NodeName: "here"}), frontends{}
		for step := range 60 {
			before := maps.Clone(fs)
			change, _ := planner.Apply(snap, snap.Apply(w.delta()))
			var after []*dataplane.Service
			for _, n := range change.Services {
				after = append(after, planner.State().Services[n])
			}
			look := fs.replace(planner.Before(), after)
			full := frontends{}
			full.replace(nil, slices.Collect(maps.Values(planner.State().Services)))
			if !reflect.DeepEqual(fs, full) {
				t.Fatalf("seed %d step %d: %v by change, %v from the full state", seed, step, fs, full)
			}
			for f := range everyFlow(before, fs) {
				checkFlow(t, before, fs, look, snap, &f)
			}
		}
	}
}

// everyFlow returns every possible flow to a frontend of before or after.
func everyFlow(before, after frontends) func(func(flow) bool) {
	return func(yield func(flow) bool) {
		all := maps.Clone(before)
		maps.Copy(all, after)
		for k := range all {
			ends := []netip.AddrPort{netip.AddrPortFrom(k.Addr, k.Port)}
			for i := range 4 {
				ends = append(ends, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 53))
			}
			for _, e := range ends {
				if !yield(flow{frontend: k, endpoint: e}) {
					return
				}
			}
		}
	}
}

func checkFlow(t *testing.T, before, after frontends, look []dataplane.Key, snap *snapshot.Snapshot, f *flow) {
	t.Helper()
	if f.frontend.Protocol == snapshot.TCP {
		t.Fatal("TCP is followed")
	}
	_, had := before[f.frontend]
	sp, has := after[f.frontend]
	// One that was wrong before has had its look.
	if right := !had || !before.stale(f); right && after.stale(f) && !slices.Contains(look, f.frontend) {
		t.Fatalf("%v -> %v is wrong now, and its frontend gets no look", f.frontend, f.endpoint)
	}
	if !has {
		return
	}
	for _, sl := range snap.Slices[sp.Name.Service] {
		for _, ep := range sl.Endpoints {
			if ep.Addr == f.endpoint.Addr() && (ep.Ready || ep.Serving) && after.stale(f) {
				t.Fatalf("%v -> %v, which serves, is wrong", f.frontend, f.endpoint)
			}
		}
	}
}

// TestLeftByKubeProxy: told to do as kube-proxy, the Cleaner leaves what kube-proxy leaves, and nothing more.
func TestLeftByKubeProxy(t *testing.T) {
	fs := frontends{}
	none := service("none", "10.96.0.2:53/udp,192.0.2.1:30054/udp")
	none.Ports[0].Frontends[1].Kind = dataplane.NodePort
	dns := service("dns", "10.96.0.1:53/udp,192.0.2.1:30053/udp>10.0.0.1:53", "10.96.0.1:99/sctp>10.0.0.1:99")
	dns.Ports[0].Frontends[1].Kind = dataplane.NodePort
	fs.replace(nil, []*dataplane.Service{dns, none})
	for frontend, want := range map[string]bool{
		"10.96.0.1:53/udp": false, "192.0.2.1:30053/udp": false, "10.96.0.2:53/udp": false,
		"192.0.2.1:30054/udp": true, // a node port without endpoints
		"10.96.0.3:53/udp":    true, // a Service that is gone
		"10.96.0.1:99/sctp":   true, "10.96.0.1:53/tcp": true,
	} {
		f := flow{frontend: key(frontend), endpoint: netip.MustParseAddrPort("10.0.0.2:53")}
		if got := fs.leftByKubeProxy(&f); got != want {
			t.Errorf("%s: %v", frontend, got)
		}
	}
}
