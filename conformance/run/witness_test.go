package run

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// handmade is a Service proxy's ruleset in small, for both nodes: a Service with a1 and b1, addresses that are
// dropped and refused, and a port of ::1.
const handmade = `
table ip t {
	chain a1 { ip saddr 10.244.1.10 meta mark set 1; meta l4proto tcp dnat to 10.244.1.10:8080; }
	chain b1 { meta l4proto tcp dnat to 10.244.2.10:8080; }
	chain web { ip saddr != 10.244.0.0/16 meta mark set 1; numgen random mod 2 vmap { 0 : goto a1, 1 : goto b1 }; }
	chain port { meta mark set 1; goto web; }
	chain services { ip daddr . tcp dport vmap { 10.96.0.1 . 80 : goto web, 192.0.2.20 . 30080 : goto port }; }
	chain prerouting { type nat hook prerouting priority dstnat; jump services; }
	chain output { type nat hook output priority -100; jump services; }
	chain postrouting { type nat hook postrouting priority srcnat; meta mark 1 masquerade; }
	chain drops { type filter hook prerouting priority filter; ip daddr 10.96.0.2 drop; }
	chain rejects { type filter hook forward priority filter; ip daddr 10.96.0.3 reject with icmp admin-prohibited; }
}
table ip6 t {
	chain output { type nat hook output priority -100; ip6 daddr ::1 tcp dport 30080 dnat to [fd00:10:244:1::a]:8080; }
}
`

// question is what a sender asks of the handmade ruleset.
func question(from, to string, outcome cases.Outcome, sources map[string]string) asked {
	a := asked{
		from:     from,
		to:       netip.MustParseAddrPort(to),
		protocol: snapshot.TCP,
		want:     cases.Want{Outcome: outcome, Sources: sources},
	}
	for _, e := range []string{"a1", "b1"} {
		if sources[e] != "" {
			a.want.Endpoints = append(a.want.Endpoints, e)
		}
	}
	return a
}

var questions = []asked{
	question("pod-a", "10.96.0.1:80", cases.Answered, map[string]string{"a1": cases.Kept, "b1": cases.Kept}),
	question("a1", "10.96.0.1:80", cases.Answered, map[string]string{"a1": "node-a", "b1": cases.Kept}),
	question("node-a", "10.96.0.1:80", cases.Answered, map[string]string{"a1": "node-a", "b1": "node-a"}),
	question("client-a", "10.96.0.1:80", cases.Answered, map[string]string{"a1": "node-a", "b1": "node-a"}),
	question("client-b", "10.96.0.1:80", cases.Answered, map[string]string{"a1": "node-b", "b1": "node-b"}),
	question("pod-b", "192.0.2.20:30080", cases.Answered, map[string]string{"a1": "node-b", "b1": "node-b"}),
	question("client-a", "192.0.2.20:30080", cases.Answered, map[string]string{"a1": "node-b", "b1": "node-b"}),
	question("node-b", "192.0.2.20:8080", cases.Answered, nil), // no Service: the node itself
	question("node-a", "192.0.2.20:81", cases.Refused, nil),
	question("pod-a", "10.96.0.2:80", cases.Dropped, nil),
	question("pod-a", "10.96.0.3:80", cases.Refused, nil),
	question("pod-a", "10.96.0.9:80", cases.Dropped, nil), // no Service: it ends at the router
}

// mutations change the rules of node-a; some question finds each.
var mutations = []struct{ name, old, new, from, says string }{
	{"another endpoint", "dnat to 10.244.2.10:8080", "dnat to 10.244.2.11:8080", "pod-a",
		"the listing of node-a says: one of a1, b2; source kept; port 8080; packets: one of a1, b1; source kept; port 8080"},
	{"another port", "dnat to 10.244.2.10:8080", "dnat to 10.244.2.10:8081", "pod-a",
		"the listing of node-a says: one of a1, b1; source kept; port 8080; port 8081; packets: one of a1, b1; source " +
			"kept; port 8080"},
	{"a port that nobody serves", "dnat to 10.244.2.10:8080", "dnat to 10.244.2.10:9", "pod-a",
		"the listing of node-a says: a1; source kept; port 8080, or refused; packets: one of a1, b1; source kept; port 8080"},
	{"an endpoint less", "1 : goto b1", "1 : goto a1", "pod-a",
		"the listing of node-a says: a1; source kept; port 8080; packets: one of a1, b1; source kept; port 8080"},
	{"a lot that is dropped", "1 : goto b1", "1 : drop", "pod-a",
		"the listing of node-a says: a1; source kept; port 8080, or dropped; packets: one of a1, b1; source kept; port 8080"},
	{"no masquerade", "masquerade", "accept", "client-a",
		"the listing of node-a says: one of a1, b1; source kept; port 8080; packets: one of a1, b1; source node-a; port " +
			"8080"},
	{"no masquerade of what comes back", "masquerade", "accept", "a1",
		"the listing of node-a says: b1; source kept; port 8080, or refused, or dropped; " +
			"packets: one of a1, b1; source kept for b1; source node-a for a1; port 8080"},
	{"refused", " drop;", " reject;", "pod-a", "the listing of node-a says: refused; packets: dropped"},
	{"dropped", "reject with icmp admin-prohibited", "drop", "pod-a",
		"the listing of node-a says: dropped; packets: refused"},
}

// TestWitness holds a handmade ruleset against packets, and then changes in its listing, each of which has to be found.
func TestWitness(t *testing.T) {
	topology, l := witnessed(t)
	shown := make([]*seen, len(questions))
	for i, a := range questions {
		var ok bool
		if shown[i], ok = look(topology, 1, a); !ok {
			t.Errorf("%s to %s: got %s, want %s", a.from, a.to, shown[i].words(topology, a), a.want)
		}
		m := l.testify(a)
		if m.err != nil {
			t.Fatalf("%s to %s: %v", a.from, a.to, m.err)
		}
		if said := m.disagrees(topology, a, shown[i]); said != "" {
			t.Errorf("%s to %s: %s", a.from, a.to, said)
		}
	}
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			l := mutated(t, topology, m.old, m.new)
			var found []string
			for i, a := range questions {
				if said := l.testify(a).disagrees(topology, a, shown[i]); said != "" && a.from == m.from {
					found = append(found, said)
				}
			}
			if len(found) != 1 || found[0] != m.says {
				t.Errorf("got %q\nwant %q", found, m.says)
			}
		})
	}
}

// handmadeChains is the Service of the handmade ruleset in chains of iptables.
const handmadeChains = `*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-WEB - [0:0]
:KUBE-A1 - [0:0]
:KUBE-B1 - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-WEB
-A KUBE-WEB ! -s 10.244.0.0/16 -j MARK --set-xmark 0x4000/0x4000
-A KUBE-WEB -m statistic --mode random --probability 0.5 -j KUBE-A1
-A KUBE-WEB -j KUBE-B1
-A KUBE-A1 -p tcp -j DNAT --to-destination 10.244.1.10:8080
-A KUBE-B1 -p tcp -j DNAT --to-destination 10.244.2.10:8080
-A KUBE-POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE
COMMIT
`

// TestWitnessOfChains holds chains of iptables against packets, and then without masquerade.
func TestWitnessOfChains(t *testing.T) {
	topology, err := testbed.NewTopology()
	labtest.Check(t, err)
	t.Cleanup(func() { labtest.Check(t, topology.Close()) })
	for _, node := range topology.Nodes() {
		labtest.Run(t, topology.Host(node), handmadeChains, "iptables-restore")
	}
	kind, err := testbed.FindKind("kube-proxy-iptables")
	labtest.Check(t, err)
	l, err := list(t.Context(), topology, kind)
	labtest.Check(t, err)
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Run(t, h, strings.Replace(handmadeChains, "MASQUERADE", "ACCEPT", 1), "iptables-restore")
	wrong, err := list(t.Context(), topology, kind)
	labtest.Check(t, err)
	wrong.rules["node-a"], err = readRules(topology, "node-a", h, kind)
	labtest.Check(t, err)
	for _, a := range questions {
		if a.to.Addr() != questions[0].to.Addr() || a.from != "pod-a" && a.from != "client-a" {
			continue
		}
		shown, _ := look(topology, 1, a)
		m := l.testify(a)
		if said := m.disagrees(topology, a, shown); m.err != nil || said != "" {
			t.Errorf("%s: %q (%v)", a.from, said, m.err)
		}
		if said := wrong.testify(a).disagrees(topology, a, shown); (said == "") != (a.from == "pod-a") {
			t.Errorf("without masquerade, %s: %q", a.from, said)
		}
	}
}

// TestWitnessOfAffinity: a client sees one endpoint of those that the rules know, and has to be one of them.
func TestWitnessOfAffinity(t *testing.T) {
	topology, l := witnessed(t)
	a := questions[0]
	a.want.Sticky = true
	m := l.testify(a)
	for endpoint, agrees := range map[string]bool{"a1": true, "b1": true, "a2": false} {
		shown := newSeen()
		shown.note(answered(endpoint, "10.244.1.9"))
		if said := m.disagrees(topology, a, shown); (said == "") != agrees {
			t.Errorf("%s: %q", endpoint, said)
		}
	}
	less := mutated(t, topology, "1 : goto b1", "1 : goto a1").testify(a)
	shown := newSeen()
	shown.note(answered("a1", "10.244.1.9"))
	if less.disagrees(topology, a, shown) == "" {
		t.Error("nobody notices that the rules know an endpoint less than is wanted")
	}
}

// TestExclusions: what a listing does not say is told apart, by its reason.
func TestExclusions(t *testing.T) {
	topology, l := witnessed(t)
	odd := mutated(t, topology, " drop;", " limit rate 1/second drop;")
	w := testimonies{notAsked: make(map[exclusion]report.NotAsked)}
	for _, c := range []struct {
		l    *listings
		a    asked
		want exclusion
	}{
		{l, question("client-a", "203.0.113.250:80", cases.Answered, nil), pastNodes},
		{l, question("node-a", "[::1]:30080", cases.Refused, nil), fromLoopback},
		{odd, question("pod-a", "10.96.0.2:80", cases.Dropped, nil), notKnown},
	} {
		m := c.l.testify(c.a)
		if !errors.Is(m.err, c.want) {
			t.Errorf("%s to %s: got %v, want %s", c.a.from, c.a.to, m.err, c.want)
			continue
		}
		w.exclude(m.err)
		got := w.notAsked[c.want]
		named := strings.HasPrefix(got.Example, "node-a: ") && strings.Contains(got.Example, "what limit does is not known")
		if got.Count != 1 || got.Why != string(c.want) || named != (c.want == notKnown) {
			t.Errorf("%s: %+v", c.want, got)
		}
	}
}

// witnessed gives the testbed's hosts with the handmade ruleset on both nodes, and what is listed of it.
func witnessed(t *testing.T) (*testbed.Topology, *listings) {
	t.Helper()
	topology, err := testbed.NewTopology()
	labtest.Check(t, err)
	t.Cleanup(func() { labtest.Check(t, topology.Close()) })
	for _, node := range topology.Nodes() {
		labtest.Run(t, topology.Host(node), handmade, "nft", "-f", "-")
	}
	l, err := list(t.Context(), topology, &testbed.Kind{})
	labtest.Check(t, err)
	return topology, l
}

// mutated gives listings of which that of node-a has one thing changed, on a host of its own.
func mutated(t *testing.T, topology *testbed.Topology, from, to string) *listings {
	t.Helper()
	if strings.Count(handmade, from) != 1 {
		t.Fatalf("%q is not once in the rules", from)
	}
	l, err := list(t.Context(), topology, &testbed.Kind{})
	labtest.Check(t, err)
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Run(t, h, strings.Replace(handmade, from, to, 1), "nft", "-f", "-")
	l.rules["node-a"], err = readRules(topology, "node-a", h, &testbed.Kind{})
	labtest.Check(t, err)
	return l
}

// TestEntry holds where packets are first seen against the router's tables, by hand.
func TestEntry(t *testing.T) {
	topology, err := testbed.NewTopology()
	labtest.Check(t, err)
	t.Cleanup(func() { labtest.Check(t, topology.Close()) })
	for _, c := range []struct{ from, to, node, link string }{
		{"pod-a", "10.96.0.1", "node-a", "veth-pod-a"},
		{"b3", "192.0.2.10", "node-b", testbed.PodBridge},
		{"node-b", "192.0.2.10", "node-b", ""},
		{"client-a", "198.18.0.1", "node-a", "eth0"},
		{"client-b", "fd00:10:96::1", "node-b", "eth0"},
		{"client-b", "192.0.2.10", "node-a", "eth0"},
		{"client-a", topology.SecondAddr("node-b", ipfamily.IPv6).String(), "node-b", "eth0"},
		{"client-a", "10.244.2.10", "node-b", "eth0"},
		{"client-a", "2001:db8:cb::fa", "", "eth0"},
	} {
		if node, link := topology.Entry(c.from, netip.MustParseAddr(c.to)); node != c.node || node != "" && link != c.link {
			t.Errorf("%s to %s: %q, %q", c.from, c.to, node, link)
		}
	}
}
