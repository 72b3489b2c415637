package kernel

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/snapshot/snapshottest"
)

// tracedPods tells the pods of snapshottest's clusters.
var tracedPods = dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"),
	netip.MustParsePrefix("fd00:244::/32")}}

var traceConfigs = []dataplane.Config{
	{NodeName: "node-1", LocalhostNodePorts: true, PingServices: true, RejectUnusedPorts: true, DetectLocal: tracedPods,
		IPVS: dataplane.IPVS{Mode: dataplane.IPVSAuto}},
	{NodeName: "node-1", SecondChance: snapshot.SecondChanceOn},
	{NodeName: "node-1", MasqueradeAll: true, RejectUnusedPorts: true, Records: true, DetectLocal: tracedPods},
	{NodeName: "node-1", RejectUnusedPorts: true,
		DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"}},
	{NodeName: "node-1", AsKubeProxy: true, LocalhostNodePorts: true, DetectLocal: tracedPods},
	{NodeName: "node-1", PingServices: true,
		DetectLocal: dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: "pod"}},
}

// TestTraceAgreesWithExplain sends random packets through the rulesets of random clusters: their way must be what the
// policy says.
func TestTraceAgreesWithExplain(t *testing.T) {
	outcomes, n, full := map[dataplane.Outcome]int{}, 0, map[dataplane.Cause]int{}
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 2))
		w, snap := snapshottest.Cluster{Rand: r, Options: snapshottest.Options{Services: 4, Endpoints: 5, NodePorts: 3,
			Asking: true, Weights: true, Backends: true}}, snapshot.New()
		cfg := traceConfigs[r.IntN(len(traceConfigs))]
		delta := w.Host()
		for range 20 {
			snap.Apply(delta)
			delta = w.Step()
		}
		if w.Yes() { // an endpoint on the node's own address
			here := append(slices.Clone(snap.HostAddrs), addr("10.244.1.2"))
			snap.Apply(snapshot.Delta{HostAddrs: &here})
		}
		if seed%4 > 0 { // some clients keep their addresses
			snap.Apply(snapshot.Delta{Link: tracedLink(w.Yes())})
			for _, n := range slices.SortedFunc(maps.Keys(snap.Services), snapshot.Name.Compare) {
				kept := *snap.Services[n]
				kept.ClientAddress = snapshot.ClientAddressKeep
				snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: &kept}})
			}
		}
		st, _ := dataplane.Compute(cfg, snap)
		for _, svc := range st.Services {
			refuse(svc.Ports...)
		}
		replay := replayOf(t, st)
		tables := ipfamily.Per[*TableFound]{replay.held[0].found(ipfamily.IPv4), replay.held[1].found(ipfamily.IPv6)}
		for _, k := range keysOf(st, r) {
			q := question(r, snap, k)
			x, f := dataplane.Explain(cfg, snap, q), ipfamily.Of(k.Addr)
			if x.Port != nil {
				refuse(x.Port)
			}
			p := dataplane.Packet{Source: q.Source, Destination: k.Addr, Protocol: k.Protocol, Port: k.Port,
				Interface: q.Interface}
			if x.Origin.Pod || snap.Link.HasAddr(q.Source) { // of another node, as far as it comes in by eth0
				p.MAC = snapshot.MAC{2: 9}
			}
			w, unclear, err := tables[f].walk(replay, p, nodeOf(snap))
			labtest.Check(t, err)
			got := w.Trace(f)
			if slices.ContainsFunc(x.Endpoints, func(c dataplane.EndpointDecision) bool {
				return c.Addr() == q.Source && !c.Local
			}) {
				continue // another Service says that it runs here: then it may be known as a hairpin, and may not
			}
			cause := x.Cause
			if x.Port != nil && (x.Port.Full && got.Cause == dataplane.OverLimit || // which the objects do not know
				slices.Contains(x.Port.FullClients, q.Source) && got.Cause == dataplane.ClientOverLimit) {
				cause = got.Cause
				full[cause]++
			}
			if x.Onward != nil && x.Onward.ByAddr && got.Cause == dataplane.ForwardedToNode {
				cause = got.Cause // another node has this client's slot
			}
			if d := got.Disagreements(x); d != nil || unclear != nil || got.Cause != cause && !k.Protocol.IsPing() {
				t.Errorf("seed %d, %+v: %v %v, %v and not %v\n%s", seed, q, d, unclear, got.Cause, x.Cause, traceText(got))
			}
			n++
			outcomes[x.Cause.Outcome()]++
		}
	}
	if n < 1000 || len(outcomes) != 7 || len(full) != 2 {
		t.Errorf("%d packets, outcomes %v, %v to full pools", n, outcomes, full)
	}
}

// tracedLink is one with node-2 on it, and if there are two, with node-3, too.
func tracedLink(two bool) *snapshot.Link {
	l := &snapshot.Link{Device: "eth0", Nodes: map[string]snapshot.Neighbour{"node-2": {MACs: []snapshot.MAC{{2: 9}},
		Addrs: ipfamily.Per[netip.Addr]{addr("192.0.2.9"), addr("2001:db8::9")}}}}
	if two {
		l.Nodes["node-3"] = snapshot.Neighbour{Addrs: ipfamily.Per[netip.Addr]{addr("192.0.2.10"), addr("2001:db8::a")}}
	}
	return l
}

// replayOf returns the tables for a State.
func replayOf(t *testing.T, st *dataplane.State) *Replay {
	t.Helper()
	var m nft.Model
	var b batch
	r := &Replay{}
	_, err := r.Apply(b.encode(m.Plan(st, dataplane.Change{}, 0)))
	labtest.Check(t, err)
	return r
}

func traced(t *testing.T, r *Replay, p dataplane.Packet, node dataplane.LocalNode) *dataplane.Trace {
	t.Helper()
	got, err := trace(r, p, node)
	labtest.Check(t, err)
	return got
}

// nodeOf has cni0 as a bridge that shows netfilter what it carries, with some of the endpoints on it.
func nodeOf(snap *snapshot.Snapshot) dataplane.LocalNode {
	return dataplane.LocalNode{
		Addrs:   snap.HostAddrs,
		Bridged: func(iface string, to netip.Addr) bool { return iface == "cni0" && to.AsSlice()[to.BitLen()/8-1]%2 == 0 },
	}
}

// question is a packet to a frontend from somebody: a pod, an endpoint, this node or others.
func question(r *rand.Rand, s *snapshot.Snapshot, k dataplane.Key) dataplane.Question {
	who := senders(ipfamily.Of(k.Addr))
	q := dataplane.Question{Source: who[r.IntN(len(who))], Key: k}
	if !slices.Contains(s.HostAddrs, q.Source) {
		q.Interface = []string{"cni0", "eth0", "pod7"}[r.IntN(3)]
	}
	return q
}

// senders are who sends packets, sorted.
func senders(f ipfamily.Family) (list []netip.Addr) {
	who := []string{"10.244.1.1", "10.244.1.2", "10.244.7.7", "192.0.2.1", "198.51.100.9", "203.0.113.77"}
	if f == ipfamily.IPv6 {
		who = []string{"2001:db8::1", "2001:db8:9::9", "fd00:244::1", "fd00:244::2", "fd00:244:7::7"}
	}
	for _, a := range who {
		list = append(list, addr(a))
	}
	return list
}

func keysOf(st *dataplane.State, r *rand.Rand) (keys []dataplane.Key) {
	for _, name := range slices.SortedFunc(maps.Keys(st.Services), snapshot.Name.Compare) {
		for _, sp := range st.Services[name].Ports {
			for _, f := range sp.Frontends {
				ping := map[bool]snapshot.Protocol{true: snapshot.ICMP, false: snapshot.ICMPv6}[f.Key.Addr.Is4()]
				keys = append(keys, f.Key, f.Key, dataplane.Key{Addr: f.Key.Addr, Protocol: ping})
			}
		}
	}
	for _, a := range []string{"10.96.0.1", "10.96.0.99", "fd00:96::99", "192.0.2.1", "203.0.113.1", "198.18.0.1"} {
		keys = append(keys, dataplane.Key{Addr: addr(a), Protocol: flowProtocols[r.IntN(3)], Port: 81})
	}
	return keys
}

func traceText(x *dataplane.Trace) string {
	var out []string
	for _, s := range x.Steps {
		out = append(out, fmt.Sprintf("%-20s %v %s %q", s.Chain, s.Matched, s.Rule, s.Found))
	}
	for _, e := range x.Endings {
		out = append(out, fmt.Sprintf("%d/%d %v %v masquerade %v", e.Share, e.Of, e.Outcome, e.Endpoint, e.Masquerade))
	}
	return strings.Join(out, "\n")
}

// service is one with endpoints 10.244.1.1, 10.244.1.2 and so on, on this node.
func service(svc snapshot.Service, endpoints int) *snapshot.Snapshot {
	svc.Name, svc.ClusterIPs = snapshot.Name{Namespace: "default", Name: "web"}, []netip.Addr{addr("10.96.0.1")}
	svc.Ports = []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}
	slice := &snapshot.Slice{Name: svc.Name, Service: "web",
		Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}}}
	for n := range endpoints {
		slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Node: "node-1", Ready: true, Serving: true,
			Addr: netip.AddrFrom4([4]byte{10, 244, byte(1 + (n+1)/256), byte(n + 1)})})
	}
	snap := snapshot.New()
	snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: &svc},
		Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}})
	return snap
}

// toService is a packet to the Service, from a pod.
var toService = dataplane.Packet{Source: addr("10.244.3.3"), Destination: addr("10.96.0.1"), Protocol: snapshot.TCP,
	Port: 80, Interface: "cni0"}

// TestDisagreements takes things away from a table, and puts others in.
func TestDisagreements(t *testing.T) {
	config := configs["cluster CIDR"]
	snap := service(snapshot.Service{Affinity: time.Hour}, 2)
	x := dataplane.Explain(config, snap, dataplane.Question{Source: toService.Source, Interface: toService.Interface,
		Key: dataplane.Key{Addr: toService.Destination, Protocol: snapshot.TCP, Port: 80}})
	slots := func(r *replayed) []nft.Element { return r.sorted(nft.UncountedEndpoints) }
	put := func(r *replayed, like nft.Element, set nft.SetID, key, data []byte) {
		e, ok := nft.ElementFrom(ipfamily.IPv4, set, key, nil, data, "", "")
		if !ok {
			t.Fatalf("%v is no element of %s", like, set)
		}
		if r.elements[set] == nil {
			r.elements[set] = map[string]nft.Element{}
		}
		r.elements[set][replayKey(&e)] = e
	}
	for _, test := range []struct {
		name   string
		change func(r *replayed)
		want   string
	}{
		{"as it is", func(*replayed) {}, ""},
		{"frontend gone", func(r *replayed) { r.elements[nft.Services] = nil },
			"the objects say endpoint, the kernel reject"},
		{"slot gone", func(r *replayed) { delete(r.elements[nft.UncountedEndpoints], replayKey(&slots(r)[1])) },
			"10.244.1.1:8080: the objects say 1 of 2 connections, the kernel 1 of 1; " +
				"10.244.1.2:8080: the objects say an endpoint, the kernel none of the endpoints"},
		{"first slot gone", func(r *replayed) { delete(r.elements[nft.UncountedEndpoints], replayKey(&slots(r)[0])) },
			"the objects say endpoint, the kernel drop in 1 of 2 cases; " +
				"10.244.1.1:8080: the objects say an endpoint, the kernel none of the endpoints"},
		{"another endpoint", func(r *replayed) {
			e := slots(r)[1]
			put(r, e, e.Set, e.Key(), []byte{10, 244, 9, 9, 0, 1, 0, 0})
		}, "10.244.1.2:8080: the objects say an endpoint, the kernel none of the endpoints; " +
			"10.244.9.9:1: the objects say none of the endpoints, the kernel an endpoint"},
		{"forgotten", func(r *replayed) { r.elements[nft.Remember] = nil },
			"session affinity: the objects say 1h, the kernel none"},
		{"twice the same", func(r *replayed) {
			e := slots(r)[1]
			put(r, e, e.Set, e.Key(), slots(r)[0].Data())
		}, "10.244.1.1:8080: the objects say 1 of 2 connections, the kernel 2 of 2; " +
			"10.244.1.2:8080: the objects say an endpoint, the kernel none of the endpoints"},
		{"remembered", func(r *replayed) {
			key := nft.AffinityElement(slots(r)[0].ID(), toService.Source)
			put(r, key, nft.Affinity, key.Key(), slots(r)[1].Data())
		}, ""},
		{"masqueraded", func(r *replayed) {
			r.rules["from-cluster-ip"] = [][]byte{expressionsOf(&expr.Masq{})}
		}, "10.244.1.1:8080: the objects say it sees the sender's own address, the kernel it sees an address of this node; " +
			"10.244.1.2:8080: the objects say it sees the sender's own address, the kernel it sees an address of this node"},
	} {
		st, _ := dataplane.Compute(config, snap)
		replay := replayOf(t, st)
		test.change(&replay.held[0])
		trace := traced(t, replay, toService, dataplane.LocalNode{})
		var got []string
		for _, d := range trace.Disagreements(x) {
			got = append(got, d.String())
		}
		if strings.Join(got, "; ") != test.want {
			t.Errorf("%s:\n got %s\nwant %s\n%s", test.name, strings.Join(got, "; "), test.want, traceText(trace))
		}
		if _, bound := trace.Bound(); bound != (test.name == "remembered") {
			t.Errorf("%s: bound %v", test.name, bound)
		}
	}
}

// expressionsOf are the expressions of a rule as they are on the wire.
func expressionsOf(list ...expr.Any) []byte {
	var w netlink.Buffer
	for _, e := range list {
		w.Attr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, marshal(ipfamily.IPv4, e)...)
	}
	return w.Bytes()
}

// TestTraceShares: every endpoint has its share, however many there are, whether the chain draws again, or a hash of
// the client chooses. What a thousand draws lead to takes no more steps than one.
func TestTraceShares(t *testing.T) {
	for _, test := range []struct {
		endpoints int
		hash      dataplane.Hash
		endings   int
		slots     int
	}{{1, 0, 1, 1}, {7, 0, 7, 7}, {41, 0, 41, 41}, {700, 0, 700, 700}, {5000, 0, 5000, 5000},
		{7, dataplane.HashAddr, 1, 1}, {7, dataplane.HashAddrPort, 7, 4093}} {
		st, _ := dataplane.Compute(configs["cluster CIDR"], service(snapshot.Service{}, test.endpoints))
		for _, sp := range st.Services[snapshot.Name{Namespace: "default", Name: "web"}].Ports {
			sp.Hash = test.hash
		}
		got := traced(t, replayOf(t, st), toService, dataplane.LocalNode{})
		for _, e := range got.Endings {
			if off := float64(e.Share)/float64(e.Of)*float64(test.endings) - 1; off < -0.03 || off > 0.03 ||
				e.Outcome != dataplane.Sent || e.Of != test.slots {
				t.Errorf("%+v: %+v", test, e)
			}
		}
		if len(got.Endings) != test.endings || len(got.Steps) > 20 {
			t.Errorf("%+v: %d endings, %d steps\n%.5000s", test, len(got.Endings), len(got.Steps), traceText(got))
		}
	}
}

// TestTraceForeign meets rules and verdicts that Verdict did not write, and chains that lead round in a circle.
func TestTraceForeign(t *testing.T) {
	st, _ := dataplane.Compute(configs["cluster CIDR"], service(snapshot.Service{}, 1))
	limit := expressionsOf(&expr.Limit{Type: expr.LimitTypePkts, Rate: 1}, &expr.Verdict{Kind: expr.VerdictDrop})
	circle := expressionsOf(&expr.Verdict{Kind: expr.VerdictGoto, Chain: "unallocated"})
	for _, test := range []struct {
		name    string
		change  func(r *replayed)
		outcome string
		unclear int
	}{
		{"a limit", func(r *replayed) {
			r.rules["prerouting"] = slices.Insert(r.rules["prerouting"], 0, limit)
		}, "endpoint", 1},
		{"a drop", func(r *replayed) {
			r.rules["prerouting"] = slices.Insert(r.rules["prerouting"], 0,
				expressionsOf(&expr.Verdict{Kind: expr.VerdictDrop}))
		}, "drop", 0},
		{"a chain and a verdict of others", func(r *replayed) {
			for key, e := range r.elements[nft.Picks] {
				e.Chain = nft.ChainID{}
				r.elements[nft.Picks][key] = e
			}
			r.chains["mine"] = netlink.Attributes{unix.NFTA_CHAIN_NAME: []byte("mine\x00")}
			r.rules["mine"] = [][]byte{limit}
			r.rules["prerouting"] = slices.Insert(r.rules["prerouting"], 0,
				expressionsOf(&expr.Verdict{Kind: expr.VerdictJump, Chain: "mine"}))
		}, "drop", 2},
		{"a circle", func(r *replayed) {
			r.rules["prerouting"], r.rules["unallocated"] = [][]byte{circle}, [][]byte{circle}
		}, "", 0},
	} {
		replay := replayOf(t, st)
		test.change(&replay.held[0])
		got, err := trace(replay, toService, dataplane.LocalNode{})
		if (err != nil) != (test.outcome == "") {
			t.Errorf("%s: %v", test.name, err)
		} else if err == nil && (len(got.Unclear) != test.unclear || got.Outcome() != test.outcome) {
			t.Errorf("%s: %s, %q\n%s", test.name, got.Outcome(), got.Unclear, traceText(got))
		}
	}
}

// TestTraceBridged follows a pod's packet to an endpoint on the same bridge. The kernel tells no incoming interface for
// it, so a rule that takes it for one of the node's own must be seen to do so.
func TestTraceBridged(t *testing.T) {
	bridge := dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"}
	for _, test := range []struct {
		detect dataplane.DetectLocal
		to     string
	}{
		{configs["cluster CIDR"].DetectLocal, "203.0.113.1"},
		{bridge, "203.0.113.1"},
		{bridge, "10.96.0.1"},
		{dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix, Interface: "cni"}, "10.96.0.1"},
	} {
		st, _ := dataplane.Compute(dataplane.Config{NodeName: "node-1", DetectLocal: test.detect},
			service(snapshot.Service{ExternalLocal: true, LoadBalancerIPs: []netip.Addr{addr("203.0.113.1")}}, 1))
		for _, bridged := range []bool{false, true} {
			for _, kept := range []bool{true, false} {
				replay := replayOf(t, st)
				if !kept {
					withoutBridged(&replay.held[0])
				}
				p := toService
				p.Destination = addr(test.to)
				got := traced(t, replay, p,
					dataplane.LocalNode{Bridged: func(string, netip.Addr) bool { return bridged }})
				if end := got.Endings[0]; end.Outcome != dataplane.Sent || end.Masquerade != (bridged && !kept) {
					t.Errorf("%v to %s, bridged %v, with the rule %v:\n%s", test.detect, test.to, bridged, kept, traceText(got))
				}
			}
		}
	}
}

// withoutBridged takes the rules away that except what stays on a bridge.
func withoutBridged(r *replayed) {
	for _, c := range r.found(ipfamily.IPv4).Table.Chains {
		for i, rule := range slices.Backward(c.Rules) {
			if _, is := rule[0].(nft.Bridged); is {
				r.rules[c.ID.Name()] = slices.Delete(r.rules[c.ID.Name()], i, i+1)
			}
		}
	}
}
