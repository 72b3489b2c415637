package iptshim

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestWalkAgreesWithExplain sends random packets through the rules of random clusters: their way must be what the
// policy says.
func TestWalkAgreesWithExplain(t *testing.T) {
	causes, n := map[dataplane.Cause]int{}, 0
	for seed := range uint64(60) {
		w, snap := newWorld(seed, 1+int(seed)%25), snapshot.New()
		cfg := configs[seed%uint64(len(configs))]
		snap.Apply(w.All())
		if w.Yes() { // an endpoint on the node's own address
			here := append(slices.Clone(snap.HostAddrs), addr("10.244.1.2"))
			snap.Apply(snapshot.Delta{HostAddrs: &here})
		}
		st, _ := dataplane.Compute(cfg, snap)
		model := New(Options{Dispatch: Dispatch(seed % 2)})
		model.Plan(st, dataplane.Change{})
		var saved ipfamily.Per[*Saved]
		for _, f := range ipfamily.All {
			var err error
			if saved[f], err = Parse(model.Full(f)); err != nil {
				t.Fatal(err)
			}
		}
		for _, k := range w.keys(st) {
			q := w.question(snap, k)
			x := dataplane.Explain(cfg, snap, q)
			walk := walked(t, saved[ipfamily.Of(k.Addr)], snap, q)
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
			} else if passed && walk.Cause() == dataplane.NotService {
				causes[x.Cause]++ // no rule says why
				continue
			}
			if d := walk.Trace().Disagreements(x); d != nil || walk.Unclear != nil {
				t.Errorf("seed %d, %+v: %v %v\n%s", seed, q, d, walk.Unclear, lines(walk))
			}
			if got := walk.Cause(); got != x.Cause && walk.Trace().Outcome() != "several" && got.Outcome() != dataplane.Dropped {
				t.Errorf("seed %d, %+v: it is said to be %v, and is %v\n%s", seed, q, got, x.Cause, lines(walk))
			}
			n++
			causes[x.Cause]++
		}
	}
	if n < 5000 || len(causes) != 9 {
		t.Errorf("only %d packets, causes %v", n, causes)
	}
}

func walked(t *testing.T, saved *Saved, snap *snapshot.Snapshot, q dataplane.Question) *Walk {
	t.Helper()
	p := Packet{Source: q.Source, Destination: q.Key.Addr, Protocol: q.Key.Protocol, Port: q.Key.Port,
		Interface: q.Interface}
	walk, err := saved.Walk(p, Host{Here: func(a netip.Addr) bool { return slices.Contains(snap.HostAddrs, a) }})
	if err != nil {
		t.Fatal(err)
	}
	return walk
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

func lines(w *Walk) string {
	var out []string
	for _, s := range w.Steps {
		out = append(out, fmt.Sprintf("%-5v %s", s.Matched, s))
	}
	for _, e := range w.Endings {
		out = append(out, fmt.Sprintf("%d/%d %v %v masquerade %v, remembered %v", e.Share, e.Of, e.Outcome, e.Endpoint,
			e.Masquerade, e.Remember))
	}
	return strings.Join(out, "\n")
}

// TestWalkRemembers follows a sender whom xt_recent knows, and one whom it does not.
func TestWalkRemembers(t *testing.T) {
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
	saved, err := Parse(model.Full(ipfamily.IPv4))
	if err != nil {
		t.Fatal(err)
	}
	known := endpointChain(st.Services[svc.Name].Ports[0].Name, netip.MustParseAddrPort("10.244.1.2:8080"))
	host := Host{Here: func(netip.Addr) bool { return false }, Recent: func(list string, sender netip.Addr,
		within time.Duration) bool {
		return list == known && sender == addr("10.244.7.7") && within == time.Hour
	}}
	p := Packet{Source: addr("10.244.7.7"), Destination: addr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80,
		Interface: "cni0"}
	walk, err := saved.Walk(p, host)
	if err != nil || len(walk.Endings) != 1 || !walk.Endings[0].Remembered ||
		walk.Endings[0].Endpoint.Addr() != addr("10.244.1.2") ||
		walk.Endings[0].Remember != time.Hour || walk.Endings[0].List != known {
		t.Errorf("%v\n%s", err, lines(walk))
	}
	p.Source = addr("10.244.7.8")
	if walk, err = saved.Walk(p, host); err != nil || len(walk.Endings) != 3 || walk.Endings[0].Remembered {
		t.Errorf("%v\n%s", err, lines(walk))
	}
}

// TestWalkForeign meets rules that Verdict did not write, and chains that lead round in a circle.
func TestWalkForeign(t *testing.T) {
	const text = "*nat\n-A PREROUTING -j KUBE-SERVICES\n" +
		"-A KUBE-SERVICES -m time --weekdays Mon -j KUBE-MARK-MASQ\n-A KUBE-SERVICES -j KUBE-SVC-A\n"
	p := Packet{Source: addr("10.0.0.1"), Destination: addr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80,
		Interface: "eth0"}
	host := Host{Here: func(netip.Addr) bool { return false }}
	saved, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	walk, err := saved.Walk(p, host)
	if err != nil || len(walk.Unclear) != 2 || walk.Trace().Outcome() != "untouched" {
		t.Errorf("%v %q %s", err, walk.Unclear, walk.Trace().Outcome())
	}
	if saved, err = Parse([]byte(text + ":KUBE-SVC-A - [0:0]\n-A KUBE-SVC-A -j KUBE-SERVICES\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := saved.Walk(p, host); err == nil {
		t.Error("a circle was walked to its end")
	}
}
