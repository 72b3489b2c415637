package iptshim

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestTraceAgreesWithExplain sends random packets through the rules of random clusters: their way must be what the
// policy says.
func TestTraceAgreesWithExplain(t *testing.T) {
	causes, n := map[dataplane.Cause]int{}, 0
	share := func(sp *dataplane.ServicePort) uint16 { return uint16(len(sp.Name.String()) % 3 * 1234) }
	for seed := range uint64(60) {
		w, snap := newWorld(seed, 1+int(seed)%25), snapshot.New()
		cfg := configs[seed%uint64(len(configs))]
		snap.Apply(w.All())
		if w.Yes() { // an endpoint on the node's own address
			here := append(slices.Clone(snap.HostAddrs), addr("10.244.1.2"))
			snap.Apply(snapshot.Delta{HostAddrs: &here})
		}
		st, _ := dataplane.Compute(cfg, snap)
		for _, svc := range st.Services {
			refuse(share, svc.Ports...)
		}
		model := New(Options{Dispatch: Dispatch(seed % 2)})
		model.Plan(st, dataplane.Change{})
		var chains ipfamily.Per[*packets.Chains]
		for _, f := range ipfamily.All {
			chains[f] = parsed(t, f, savedText(model, f), snap.HostAddrs)
		}
		for _, k := range w.keys(st) {
			q := w.question(snap, k)
			x := dataplane.Explain(cfg, snap, q)
			if x.Port != nil {
				refuse(share, x.Port)
			}
			p := dataplane.Packet{Source: q.Source, Destination: q.Key.Addr, Protocol: q.Key.Protocol, Port: q.Key.Port,
				Interface: q.Interface}
			got := traced(t, chains[ipfamily.Of(k.Addr)], p, nil)
			if slices.ContainsFunc(x.Endpoints, func(c dataplane.EndpointDecision) bool {
				return c.Addr() == q.Source && !c.Local
			}) {
				continue // one that is said to run elsewhere reaches itself
			}
			if k.Addr.IsLoopback() && q.Interface == "" && !q.Source.IsLoopback() {
				continue // the kubelet's rule drops what goes to the loopback range from another address, even from this node's
			}
			if passed := x.Cause == dataplane.FailoverPassed; passed &&
				slices.ContainsFunc(snap.ServiceCIDRs, func(r netip.Prefix) bool { return r.Contains(k.Addr) }) {
				continue // what passes is dropped there, as at any address that no Service has
			} else if passed && got.Cause == dataplane.NotService {
				causes[x.Cause]++ // no rule says why
				continue
			}
			if d := got.Disagreements(x); d != nil || got.Unclear != nil {
				t.Errorf("seed %d, %+v: %v %v\n%s", seed, q, d, got.Unclear, lines(got))
			}
			if got.Cause != x.Cause && got.Outcome() != "several" && got.Cause.Outcome() != dataplane.Dropped {
				t.Errorf("seed %d, %+v: it is said to be %v, and is %v\n%s", seed, q, got.Cause, x.Cause, lines(got))
			}
			n++
			causes[x.Cause]++
		}
	}
	if n < 5000 || len(causes) != 9 {
		t.Errorf("only %d packets, causes %v", n, causes)
	}
}

// savedText is what iptables-save prints once a Model's rules are there.
func savedText(m *Model, f ipfamily.Family) []byte {
	var out, inserted strings.Builder
	for line := range strings.Lines(string(m.Full(f))) {
		rule, inserts := strings.CutPrefix(line, "-I ")
		switch {
		case inserts:
			first := inserted.String()
			inserted.Reset()
			inserted.WriteString("-A " + rule + first)
			continue
		case line[0] == '*':
			for _, chain := range []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"} {
				line += ":" + chain + " ACCEPT [0:0]\n"
			}
		case line == "COMMIT\n":
			line = inserted.String() + line
			inserted.Reset()
		}
		out.WriteString(line)
	}
	return []byte(out.String())
}

func parsed(t *testing.T, f ipfamily.Family, text []byte, node []netip.Addr) *packets.Chains {
	t.Helper()
	c, err := packets.ParseTraced(f, text, &packets.Host{Addrs: node})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func traced(t *testing.T, c *packets.Chains, p dataplane.Packet, recent func(string, uint32) bool) *dataplane.Trace {
	t.Helper()
	got, err := Trace(c, p, recent)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// question is a packet to a frontend from somebody: a pod, an endpoint, this node or others.
func (w world) question(s *snapshot.Snapshot, k dataplane.Key) dataplane.Question {
	who := []string{"10.244.1.1", "10.244.1.2", "10.244.7.7", "192.0.2.1", "198.51.100.9", "203.0.113.200", "127.0.0.1"}
	if k.Addr.Is6() {
		who = []string{"fd00:244::1", "fd00:244::2", "fd00:244:7::7", "2001:db8::1", "2001:db8:9::9"}
	}
	q := dataplane.Question{Source: addr(who[w.IntN(len(who))]), Key: k}
	if !slices.Contains(s.HostAddrs, q.Source) {
		q.Interface = []string{"cni0", "eth0", "pod7"}[w.IntN(3)]
	}
	return q
}

func (w world) keys(st *dataplane.State) (keys []dataplane.Key) {
	for _, name := range sortedNames(st.Services) {
		for _, sp := range st.Services[name].Ports {
			for _, f := range sp.Frontends {
				keys = append(keys, f.Key, f.Key)
			}
		}
	}
	for _, a := range []string{"10.96.0.1", "10.96.0.99", "fd00:96::99", "192.0.2.1", "203.0.113.1", "198.18.0.1",
		"127.0.0.1", "10.98.0.1", "10.96.0.200"} {
		for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP} {
			keys = append(keys, dataplane.Key{Addr: addr(a), Protocol: p, Port: 81})
		}
	}
	return keys
}

func lines(x *dataplane.Trace) string {
	var out []string
	for _, s := range x.Steps {
		out = append(out, fmt.Sprintf("%-5v %s %s", s.Matched, s.Chain, s.Rule))
	}
	for _, e := range x.Endings {
		out = append(out, fmt.Sprintf("%d/%d %v %v masquerade %v, remembered %v", e.Share, e.Of, e.Outcome, e.Endpoint,
			e.Masquerade, e.Remember))
	}
	return strings.Join(out, "\n")
}

// TestTraceRemembers follows a sender whom xt_recent knows, and one whom it does not.
func TestTraceRemembers(t *testing.T) {
	snap := snapshot.New()
	svc := &snapshot.Service{Name: snapshot.Name{Namespace: "default", Name: "web"},
		ClusterIPs: []netip.Addr{addr("10.96.0.1")},
		Ports:      []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}, Affinity: time.Hour}
	slice := &snapshot.Slice{Name: svc.Name, Service: "web",
		Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}}}
	for n := range 3 {
		slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: addr(fmt.Sprintf("10.244.1.%d", n+1)), Ready: true,
			Serving: true})
	}
	snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}})
	st, _ := dataplane.Compute(configs[0], snap)
	model := New(Options{})
	model.Plan(st, dataplane.Change{})
	known := endpointChain(st.Services[svc.Name].Ports[0].Name, netip.MustParseAddrPort("10.244.1.2:8080"))
	p := dataplane.Packet{Source: addr("10.244.7.7"), Destination: addr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80,
		Interface: "cni0"}
	chains := parsed(t, ipfamily.IPv4, savedText(model, ipfamily.IPv4), nil)
	got := traced(t, chains, p, func(list string, seconds uint32) bool {
		return list == known && seconds == 3600
	})
	if len(got.Endings) != 1 || !got.Endings[0].Remembered || got.Endings[0].Endpoint.Addr() != addr("10.244.1.2") ||
		got.Endings[0].Remember != time.Hour {
		t.Error(lines(got))
	}
	got = traced(t, chains, p, func(string, uint32) bool { return false })
	if len(got.Endings) != 3 || got.Endings[0].Remembered {
		t.Error(lines(got))
	}
}

// TestTraceForeign meets rules that Verdict did not write, and chains that lead round in a circle.
func TestTraceForeign(t *testing.T) {
	const text = "*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n" +
		"-A PREROUTING -j KUBE-SERVICES\n" +
		"-A KUBE-SERVICES -m time --weekdays Mon -j KUBE-MARK-MASQ\n-A KUBE-SERVICES -j KUBE-SVC-A\n"
	p := dataplane.Packet{Source: addr("10.0.0.1"), Destination: addr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80,
		Interface: "eth0"}
	if got := traced(t, parsed(t, ipfamily.IPv4, []byte(text), nil), p, nil); len(got.Unclear) != 2 ||
		got.Outcome() != "untouched" {
		t.Errorf("%q %s", got.Unclear, got.Outcome())
	}
	circle := strings.Replace(text, "-A PRE", ":KUBE-SVC-A - [0:0]\n-A KUBE-SVC-A -j KUBE-SERVICES\n-A PRE", 1)
	if _, err := Trace(parsed(t, ipfamily.IPv4, []byte(circle), nil), p, nil); err == nil {
		t.Error("a circle was walked to its end")
	}
}
