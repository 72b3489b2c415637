package outlier

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var begin = time.Date(2026, 11, 22, 14, 2, 7, 0, time.UTC)

// port returns a TCP port of a Service that has endpoints 10.244.0.N:80.
func port(namespace string, endpoints ...int) *dataplane.ServicePort {
	sp := &dataplane.ServicePort{
		Name:    dataplane.PortName{Service: snapshot.Name{Namespace: namespace, Name: "web"}, Protocol: snapshot.TCP},
		Cluster: &dataplane.Pool{}, Local: &dataplane.Pool{},
		SecondChance: snapshot.SecondChanceOn,
		Frontends:    []dataplane.Frontend{{Key: frontendKey}},
	}
	for _, n := range endpoints {
		sp.Cluster.Endpoints = append(sp.Cluster.Endpoints, dataplane.Endpoint{AddrPort: endpoint(n)})
	}
	return sp
}

var frontendKey = dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80}

func endpoint(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(n >> 8), byte(n)}), 80)
}

// TestMachine follows an endpoint through evidence and probes.
func TestMachine(t *testing.T) {
	accepted, refused, failed := finding{outcome: Accepted}, finding{outcome: Rejected}, finding{outcome: Failed}
	dead := finding{outcome: Silent, proven: true}
	doubtful := func(waiting int, answered bool) finding {
		return finding{outcome: Silent, waiting: waiting, answered: answered}
	}
	type step struct {
		after    time.Duration
		evidence bool     // or
		found    *finding // of the probe that must be due now
		want     string   // the state, and when the next probe is due
	}
	const s = time.Second
	suspect := step{evidence: true, want: "suspected 0s"}
	probe := func(after time.Duration, f finding, want string) step {
		return step{after: after, found: &f, want: want}
	}
	for name, steps := range map[string][]step{
		"accepted":           {suspect, probe(0, accepted, "cleared")},
		"refused":            {suspect, probe(0, refused, "unhealthy refused 1s")},
		"dead":               {suspect, probe(0, dead, "unhealthy unanswered 1s")},
		"not sent":           {suspect, probe(0, failed, "cleared")},
		"policy, one client": {suspect, probe(0, doubtful(1, false), "cleared")},
		"policy, some":       {suspect, probe(0, doubtful(9, true), "cleared")},
		"policy, some are answered now and then": {suspect, probe(0, doubtful(9, true), "cleared"),
			{after: 9 * s, evidence: true, want: "suspected 0s"}, probe(0, doubtful(9, false), "cleared"),
			{after: 55 * s, evidence: true, want: "suspected 0s"}, probe(0, doubtful(9, false), "unhealthy unanswered 1s")},
		"nobody is answered": {suspect, probe(0, doubtful(2, false), "unhealthy unanswered 1s")},
		"evidence in a pause": {suspect, probe(0, accepted, "cleared"),
			{after: s / 4, evidence: true, want: "suspected 750ms"}},
		"pauses": {suspect, probe(0, dead, "unhealthy unanswered 1s"), probe(s, dead, "unhealthy unanswered 2s"),
			probe(2*s, failed, "unhealthy unanswered 4s"), probe(4*s, refused, "unhealthy refused 8s"),
			probe(8*s, dead, "unhealthy unanswered 16s"), probe(16*s, dead, "unhealthy unanswered 32s"),
			probe(32*s, dead, "unhealthy unanswered 1m0s"), probe(60*s, dead, "unhealthy unanswered 1m0s"),
			probe(60*s, accepted, "cleared")},
		"flapping": {suspect, probe(0, dead, "unhealthy unanswered 1s"), probe(s, accepted, "cleared"),
			suspect, probe(0, dead, "unhealthy unanswered 1s"), probe(s, accepted, "unhealthy unanswered 1s"),
			probe(s, accepted, "cleared"),
			suspect, probe(0, dead, "unhealthy unanswered 1s"), probe(s, accepted, "unhealthy unanswered 1s"),
			probe(s, dead, "unhealthy unanswered 2s"), probe(2*s, accepted, "unhealthy unanswered 1s"),
			probe(s, accepted, "unhealthy unanswered 1s"), probe(s, accepted, "cleared")},
		"long ago": {suspect, probe(0, dead, "unhealthy unanswered 1s"), probe(s, accepted, "cleared"),
			{after: 299 * s, evidence: true, want: "suspected 0s"}, probe(s, dead, "unhealthy unanswered 1s"),
			probe(s, accepted, "cleared")},
		"trial": {suspect, probe(0, doubtful(2, false), "unhealthy unanswered 1s"),
			probe(s, doubtful(0, false), "unhealthy unanswered 2s"), {after: 9*s + 1, want: "cleared"},
			suspect, probe(0, doubtful(2, false), "unhealthy unanswered 1s"), {after: 10 * s, want: "unhealthy unanswered -9s"},
			{after: 10 * s, want: "cleared"}},
		"no trial any more": {suspect, probe(0, doubtful(2, false), "unhealthy unanswered 1s"),
			probe(s, dead, "unhealthy unanswered 2s"), {after: 20 * s, want: "unhealthy unanswered -18s"}},
		"trial later": {suspect, probe(0, dead, "unhealthy unanswered 1s"),
			probe(s, doubtful(0, false), "unhealthy unanswered 2s"), {after: 10 * s, want: "cleared"}},
		"forgotten": {suspect, probe(0, accepted, "cleared"), {after: memory, want: "none"}},
	} {
		t.Run(name, func(t *testing.T) {
			m, now, e := newMachine(), begin, endpoint(1)
			for i, st := range steps {
				now = now.Add(st.after)
				m.advance(now)
				if st.evidence {
					m.suspect(now, e, []*dataplane.ServicePort{port("shop", 1, 2)})
				}
				if st.found != nil {
					if len(m.start(now)) != 1 {
						t.Fatalf("step %d: no probe is due", i)
					}
					m.found(now, e, *st.found)
				}
				if got := describe(m, e, now); got != st.want {
					t.Fatalf("step %d: %s, want %s", i, got, st.want)
				}
			}
		})
	}
}

func describe(m *machine, e netip.AddrPort, now time.Time) string {
	t := m.tracks[e]
	switch {
	case t == nil:
		return "none"
	case t.state == cleared:
		return "cleared"
	case t.state == suspected:
		return fmt.Sprintf("suspected %v", t.due.Sub(now))
	}
	return fmt.Sprintf("unhealthy %v %v", t.cause, t.due.Sub(now))
}

// TestFairProbes: one namespace with many suspects neither uses all probes nor delays another's.
func TestFairProbes(t *testing.T) {
	m := newMachine()
	for i := range 1000 {
		m.suspect(begin, endpoint(i), []*dataplane.ServicePort{port("big", i)})
	}
	if n := len(m.start(begin)); n != maxAloneProbes {
		t.Errorf("a namespace alone has %d probes, want %d", n, maxAloneProbes)
	}
	for i := range 5 {
		m.suspect(begin.Add(time.Second), endpoint(2000+i), []*dataplane.ServicePort{port("small", 2000+i)})
	}
	next := m.start(begin.Add(time.Second))
	if len(next) != 5 {
		t.Errorf("%d probes begin, want the 5 of the other namespace", len(next))
	}
	for _, p := range next {
		if p.namespace() != "small" {
			t.Errorf("%v of namespace %s is probed", p.endpoint, p.namespace())
		}
	}
	m = newMachine()
	for i := range 1000 {
		ns := fmt.Sprint("ns-", i%3)
		m.suspect(begin, endpoint(i), []*dataplane.ServicePort{port(ns, i)})
	}
	of := map[string]int{}
	for _, p := range m.start(begin) {
		of[p.namespace()]++
	}
	for ns, n := range of {
		if n > maxNamespaceProbes {
			t.Errorf("%s has %d probes, though others wait", ns, n)
		}
	}
}

// TestMachineInvariants plays random worlds: an endpoint that answers is never unhealthy, every unhealthy one is probed
// within a minute, and memory is bounded.
func TestMachineInvariants(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for range 10 {
		playWorld(t, r)
	}
	if t.Failed() {
		t.Log("seed", seed)
	}
}

func playWorld(t *testing.T, r *rand.Rand) {
	const endpoints = 40
	m, now := newMachine(), begin
	alwaysUp := func(n int) bool { return n%3 == 0 }
	results := map[netip.AddrPort]time.Time{}
	lastProbe := map[netip.AddrPort]time.Time{}
	for range 3000 {
		now = now.Add(time.Duration(r.IntN(400)) * time.Millisecond)
		m.advance(now)
		if n := r.IntN(endpoints); r.IntN(3) == 0 {
			m.suspect(now, endpoint(n), []*dataplane.ServicePort{port(fmt.Sprint("ns", n%4), n)})
		}
		for e, at := range results {
			if now.Before(at) {
				continue
			}
			delete(results, e)
			f := finding{outcome: Outcome(r.IntN(4)), proven: r.IntN(2) == 0, waiting: r.IntN(4), answered: r.IntN(2) == 0}
			if alwaysUp(int(e.Addr().As4()[3])) {
				f.outcome = Accepted
			}
			m.found(now, e, f)
		}
		for _, p := range m.start(now) {
			results[p.endpoint] = now.Add(550 * time.Millisecond)
			lastProbe[p.endpoint] = now
		}
		checkWorld(t, m, now, lastProbe, alwaysUp)
	}
}

func checkWorld(t *testing.T, m *machine, now time.Time, lastProbe map[netip.AddrPort]time.Time, up func(int) bool) {
	t.Helper()
	probing := 0
	next, any := m.next()
	for e, tr := range m.tracks {
		if tr.probing {
			probing++
		}
		if tr.state != unhealthy {
			continue
		}
		if up(int(e.Addr().As4()[3])) {
			t.Fatalf("%v always answers, and is unhealthy", e)
		}
		if age := now.Sub(lastProbe[e]); age > recoverMost+2*time.Second {
			t.Fatalf("%v was probed %v ago", e, age)
		}
		if !tr.probing && (!any || next.After(now.Add(recoverMost))) {
			t.Fatalf("%v is unhealthy, and nothing is due before %v", e, next)
		}
	}
	if probing > maxProbes {
		t.Fatalf("%d probes at a time", probing)
	}
}

// TestTrackedBound: evidence about more endpoints than the limits is ignored, and a namespace that has reached its own
// leaves room for others. Who is forgotten makes room.
func TestTrackedBound(t *testing.T) {
	m, ports := newMachine(), []*dataplane.ServicePort{port("shop", 1)}
	for i := range maxNamespaceTracked + 100 {
		m.suspect(begin, endpoint(i), ports)
	}
	if len(m.tracks) != maxNamespaceTracked {
		t.Errorf("%d endpoints of one namespace are remembered", len(m.tracks))
	}
	for i := range maxTracked {
		ns := fmt.Sprint("ns-", i/(maxNamespaceTracked/2))
		m.suspect(begin, endpoint(1<<15+i), []*dataplane.ServicePort{port(ns, 1)})
	}
	if len(m.tracks) != maxTracked {
		t.Errorf("%d endpoints are remembered", len(m.tracks))
	}
	for _, tr := range m.tracks {
		m.forget(tr)
	}
	if len(m.owned) != 0 {
		t.Errorf("after all is forgotten, namespaces own %v", m.owned)
	}
	m.suspect(begin, netip.MustParseAddrPort("192.0.2.1:1"), nil)
	if slices.ContainsFunc(m.start(begin), func(p *track) bool { return len(p.ports) == 0 }) {
		t.Error("an endpoint of no Service is probed")
	}
}
