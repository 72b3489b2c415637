package nft

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var walkConfigs = []dataplane.Config{
	testConfig,
	{NodeName: "node-1"},
	{NodeName: "node-1", MasqueradeAll: true, RejectUnusedPorts: true, Records: true,
		DetectLocal: testConfig.DetectLocal},
	{NodeName: "node-1", RejectUnusedPorts: true,
		DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"}},
	{NodeName: "node-1", AsKubeProxy: true, LocalhostNodePorts: true, DetectLocal: testConfig.DetectLocal},
	{NodeName: "node-1", PingServices: true, Records: true,
		DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: "pod"}},
}

// TestWalkAgreesWithExplain sends random packets through the rulesets of random clusters: their way must be what the
// policy says.
func TestWalkAgreesWithExplain(t *testing.T) {
	outcomes, n := map[dataplane.Outcome]int{}, 0
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 2))
		w, snap := newCluster(r), snapshot.New()
		cfg := walkConfigs[r.IntN(len(walkConfigs))]
		delta := w.Host()
		for range 20 {
			snap.Apply(delta)
			delta = w.Step()
		}
		if w.Yes() { // an endpoint on the node's own address
			here := append(slices.Clone(snap.HostAddrs), addr("10.244.1.2"))
			snap.Apply(snapshot.Delta{HostAddrs: &here})
		}
		st, _ := dataplane.Compute(cfg, snap)
		list := List(st)
		for _, k := range keysOf(st, r) {
			q := question(r, snap, k)
			x := dataplane.Explain(cfg, snap, q)
			table := &list[ipfamily.Of(k.Addr)]
			p := Packet{Source: q.Source, Destination: k.Addr, Protocol: k.Protocol, Port: k.Port, Interface: q.Interface}
			walk, err := WalkTable(&table.Table, table, p, walkHost(snap))
			if err != nil {
				t.Fatal(err)
			}
			if slices.ContainsFunc(x.Endpoints, func(c dataplane.EndpointDecision) bool {
				return c.Addr() == q.Source && !c.Local
			}) {
				continue // another Service says that it runs here: then it may be known as a hairpin, and may not
			}
			if d := walk.Trace(ipfamily.Of(k.Addr)).Disagreements(x); d != nil || walk.Unclear != nil {
				t.Errorf("seed %d, %+v: %v %v\n%s", seed, q, d, walk.Unclear, lines(walk, ipfamily.Of(k.Addr)))
			}
			n++
			outcomes[x.Cause.Outcome()]++
		}
	}
	if n < 1000 || len(outcomes) != 5 {
		t.Errorf("only %d packets, outcomes %v", n, outcomes)
	}
}

// walkHost has cni0 as a bridge that shows netfilter what it carries, with some of the endpoints on it.
func walkHost(snap *snapshot.Snapshot) Host {
	return Host{
		Local:   func(a netip.Addr) bool { return slices.Contains(snap.HostAddrs, a) },
		Bridged: func(iface string, to netip.Addr) bool { return iface == "cni0" && to.AsSlice()[to.BitLen()/8-1]%2 == 0 },
	}
}

// question is a packet to a frontend from somebody: a pod, an endpoint, this node or others.
func question(r *rand.Rand, s *snapshot.Snapshot, k dataplane.Key) dataplane.Question {
	who := []string{"10.244.1.1", "10.244.1.2", "10.244.7.7", "192.0.2.1", "198.51.100.9", "203.0.113.77"}
	if k.Addr.Is6() {
		who = []string{"fd00:244::1", "fd00:244::2", "fd00:244:7::7", "2001:db8::1", "2001:db8:9::9"}
	}
	q := dataplane.Question{Source: addr(who[r.IntN(len(who))]), Key: k}
	if !slices.Contains(s.HostAddrs, q.Source) {
		q.Interface = []string{"cni0", "eth0", "pod7"}[r.IntN(3)]
	}
	return q
}

func keysOf(st *dataplane.State, r *rand.Rand) (keys []dataplane.Key) {
	for _, name := range sortedNames(st.Services) {
		for _, sp := range st.Services[name].Ports {
			for _, f := range sp.Frontends {
				keys = append(keys, f.Key, f.Key)
			}
		}
	}
	for _, a := range []string{"10.96.0.1", "10.96.0.99", "fd00:96::99", "192.0.2.1", "203.0.113.1", "198.18.0.1"} {
		keys = append(keys, dataplane.Key{Addr: addr(a), Protocol: protocols[r.IntN(3)], Port: 81})
	}
	return keys
}

func lines(w *Walk, f ipfamily.Family) string {
	var out []string
	for i := range w.Steps {
		out = append(out, fmt.Sprintf("%-20s %v %s", w.Steps[i].Chain.Name(), w.Steps[i].Matched, w.Steps[i].Line(f)))
	}
	for _, e := range w.Endings {
		out = append(out, fmt.Sprintf("%d/%d %v %v masquerade %v", e.Share, e.Of, e.Outcome, e.Endpoint, e.Masquerade))
		for i := range e.Steps {
			out = append(out, fmt.Sprintf("    %-20s %v %s", e.Steps[i].Chain.Name(), e.Steps[i].Matched, e.Steps[i].Line(f)))
		}
	}
	return strings.Join(out, "\n")
}

// TestDisagreements takes things away from a table, and puts others in.
func TestDisagreements(t *testing.T) {
	svc := &snapshot.Service{Name: snapshot.Name{Namespace: "default", Name: "web"},
		ClusterIPs: []netip.Addr{addr("10.96.0.1")},
		Ports:      []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}, Affinity: 3600e9}
	slice := &snapshot.Slice{Name: snapshot.Name{Namespace: "default", Name: "web-1"}, Service: "web",
		Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}}}
	for n := range 2 {
		slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: addr(fmt.Sprintf("10.244.1.%d", n+1)), Ready: true,
			Serving: true})
	}
	snap := snapshot.New()
	snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}})
	k := dataplane.Key{Addr: addr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80}
	x := dataplane.Explain(testConfig, snap, dataplane.Question{Source: addr("10.244.3.3"), Key: k})
	st, _ := dataplane.Compute(testConfig, snap)
	for _, test := range []struct {
		name   string
		change func(l *Listing)
		want   string
	}{
		{"as it is", func(*Listing) {}, ""},
		{"frontend gone", func(l *Listing) { l.Elements[Services] = nil }, "the objects say endpoint, the kernel reject"},
		{"slot gone", func(l *Listing) { l.Elements[UncountedEndpoints] = l.Elements[UncountedEndpoints][:1] },
			"10.244.1.1:8080: the objects say 1 of 2 connections, the kernel 2 of 2; " +
				"10.244.1.2:8080: the objects say an endpoint, the kernel none of the endpoints"},
		{"first slot gone", func(l *Listing) { l.Elements[UncountedEndpoints] = l.Elements[UncountedEndpoints][1:] },
			"the objects say endpoint, the kernel drop in 1 of 2 cases; " +
				"10.244.1.1:8080: the objects say an endpoint, the kernel none of the endpoints"},
		{"another endpoint",
			func(l *Listing) {
				l.Elements[UncountedEndpoints][1].setTarget(netip.MustParseAddrPort("10.244.9.9:1"))
			},
			"10.244.1.2:8080: the objects say an endpoint, the kernel none of the endpoints; " +
				"10.244.9.9:1: the objects say none of the endpoints, the kernel an endpoint"},
		{"forgotten", func(l *Listing) { l.Elements[Remember] = nil },
			"session affinity: the objects say 1h, the kernel none"},
		{"twice the same",
			func(l *Listing) {
				l.Elements[UncountedEndpoints][1].data = l.Elements[UncountedEndpoints][0].data
			},
			"10.244.1.1:8080: the objects say 1 of 2 connections, the kernel 2 of 2; " +
				"10.244.1.2:8080: the objects say an endpoint, the kernel none of the endpoints"},
		{"remembered", func(l *Listing) {
			e := AffinityElement(l.Elements[Services][0].PoolID(), addr("10.244.3.3"))
			e.setTarget(l.Elements[UncountedEndpoints][1].Target())
			l.Elements[Affinity] = []Listed{{Element: e}}
		}, ""},
		{"masqueraded", func(l *Listing) {
			e := frontendElement(ExternalServices, k)
			e.setID(externalAll)
			l.Elements[ExternalServices] = []Listed{{Element: e}}
			l.Elements[SourceKinds] = []Listed{{Element: kindElement(SourceKinds, k.Addr, 1|stickyKind|bothKind)}}
		}, "10.244.1.1:8080: the objects say it sees the sender's own address, the kernel it sees an address of this node; " +
			"10.244.1.2:8080: the objects say it sees the sender's own address, the kernel it sees an address of this node"},
	} {
		list := List(st)[0]
		test.change(&list)
		walk, err := WalkTable(&list.Table, &list, Packet{Source: addr("10.244.3.3"), Destination: k.Addr,
			Protocol: k.Protocol, Port: k.Port, Interface: "cni0"}, Host{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, d := range walk.Trace(ipfamily.IPv4).Disagreements(x) {
			got = append(got, d.String())
		}
		if strings.Join(got, "; ") != test.want {
			t.Errorf("%s:\n got %s\nwant %s\n%s", test.name, strings.Join(got, "; "), test.want, lines(walk, ipfamily.IPv4))
		}
		if _, bound := walk.Trace(ipfamily.IPv4).Bound(); bound != (test.name == "remembered") {
			t.Errorf("%s: bound %v", test.name, bound)
		}
	}
}

// TestWalkForeign meets rules and verdicts that Verdict did not write, and chains that lead round in a circle.
func TestWalkForeign(t *testing.T) {
	table := Table{Family: ipfamily.IPv4, Chains: []Chain{
		{ID: Prerouting.id(), Hook: &Hook{"nat", "prerouting", priorityDstNAT}, Rules: []Rule{{Foreign{"meta, cmp"}},
			{Goto{Split.id()}}}},
		{ID: Split.id(), Rules: []Rule{dispatch(Services, Picks)}},
	}}
	p := Packet{Source: addr("10.0.0.1"), Destination: addr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80,
		Interface: "eth0"}
	list := Listing{Table: table}
	e := frontendElement(Services, dataplane.Key{Addr: p.Destination, Protocol: p.Protocol, Port: p.Port})
	e.setPool(NoEndpoints.id(), 7)
	foreign := leadingTo(NoEndpoints.id())[0]
	foreign.Chain = ChainID{}
	list.Elements[Services], list.Elements[Picks] = []Listed{{Element: e}}, []Listed{{Element: foreign}}
	walk, err := WalkTable(&table, &list, p, Host{})
	if err != nil || len(walk.Unclear) != 2 || walk.Trace(ipfamily.IPv4).Outcome() != "untouched" {
		t.Errorf("%v %q %s", err, walk.Unclear, walk.Trace(ipfamily.IPv4).Outcome())
	}
	table.Chains[1].Rules = []Rule{{Jump{Split.id()}}}
	if _, err := WalkTable(&table, &list, p, Host{}); err == nil {
		t.Error("a circle was walked to its end")
	}
}

// TestWalkBridged follows a pod's packet to an endpoint on the same bridge. The kernel tells no incoming interface
// for it, so a rule that takes it for one of the node's own must be seen to do so.
func TestWalkBridged(t *testing.T) {
	for _, test := range []struct {
		detect dataplane.DetectLocal
		to     string
	}{
		{testConfig.DetectLocal, "203.0.113.1"},
		{dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"}, "203.0.113.1"},
		{dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"}, "10.96.0.1"},
		{dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: "cni"}, "10.96.0.1"},
	} {
		list := bridgedService(test.detect)
		for _, bridged := range []bool{false, true} {
			for _, kept := range []bool{true, false} {
				table := list.Table
				if !kept {
					table.Chains = withoutBridged(table.Chains)
				}
				p := Packet{Source: addr("10.244.3.3"), Destination: addr(test.to), Protocol: snapshot.TCP, Port: 80,
					Interface: "cni0"}
				walk, err := WalkTable(&table, list, p, Host{Bridged: func(string, netip.Addr) bool { return bridged }})
				if err != nil {
					t.Fatal(err)
				}
				if end := walk.Endings[0]; end.Outcome != dataplane.Sent || end.Masquerade != (bridged && !kept) {
					t.Errorf("%v to %s, bridged %v, with the rule %v:\n%s", test.detect, test.to, bridged, kept,
						lines(walk, ipfamily.IPv4))
				}
			}
		}
	}
}

// bridgedService lists a Service of externalTrafficPolicy Local with an endpoint on this node.
func bridgedService(d dataplane.DetectLocal) *Listing {
	svc := &snapshot.Service{Name: snapshot.Name{Namespace: "default", Name: "web"}, ExternalLocal: true,
		ClusterIPs: []netip.Addr{addr("10.96.0.1")}, LoadBalancerIPs: []netip.Addr{addr("203.0.113.1")},
		Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}
	slice := &snapshot.Slice{Name: snapshot.Name{Namespace: "default", Name: "web-1"}, Service: "web",
		Ports:     []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}},
		Endpoints: []snapshot.Endpoint{{Addr: addr("10.244.3.4"), Node: "node-1", Ready: true, Serving: true}}}
	snap := snapshot.New()
	snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}})
	st, _ := dataplane.Compute(dataplane.Config{NodeName: "node-1", DetectLocal: d}, snap)
	list := List(st)
	return &list[0]
}

func withoutBridged(chains []Chain) []Chain {
	out := slices.Clone(chains)
	for i := range out {
		out[i].Rules = slices.DeleteFunc(slices.Clone(out[i].Rules), func(r Rule) bool {
			_, is := r[0].(Bridged)
			return is
		})
	}
	return out
}

// TestSum: what is not known of one part is not known of the whole.
func TestSum(t *testing.T) {
	two, three := uint64(2), uint64(3)
	for _, c := range []struct {
		a, b *uint64
		want uint64 // 0 is unknown
	}{{&two, &three, 5}, {nil, &three, 0}, {&two, nil, 0}, {nil, nil, 0}} {
		if got := sum(c.a, c.b); (got == nil) != (c.want == 0) || got != nil && *got != c.want {
			t.Errorf("sum of %v and %v is %v; want %d", c.a, c.b, got, c.want)
		}
	}
}
