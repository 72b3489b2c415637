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

var one = trackKey{snapshot.Name{Namespace: "shop", Name: "web"}, endpoint(1)}

// clients are connections that come as a function of time gives them.
type clients struct {
	m *machine
	// read is when the kernel's set was read last, and answered when the endpoint answered last.
	read, answered time.Time
	// next returns when the endpoint answers next, after a time.
	next func(time.Time) time.Time
}

// every are clients that come at regular intervals.
func every(pause time.Duration) func(time.Time) time.Time {
	return func(at time.Time) time.Time { return at.Add(pause) }
}

// bursts are ten clients at once, with a pause behind.
func bursts(pause time.Duration) func(time.Time) time.Time {
	n := 0
	return func(at time.Time) time.Time {
		if n++; n%10 == 0 {
			return at.Add(pause)
		}
		return at.Add(10 * time.Millisecond)
	}
}

// until reads the kernel's set as often as a Detector does, until a time. The endpoint answers meanwhile, if it is up.
func (c *clients) until(end time.Time, up bool) {
	for !c.read.Add(readEvery).After(end) {
		c.read = c.read.Add(readEvery)
		for up && !c.next(c.answered).After(c.read) {
			c.answered = c.next(c.answered)
		}
		if c.read.Sub(c.answered) > 2*time.Minute {
			c.m.answers.observe(c.read, nil)
			continue
		}
		c.m.answers.observe(c.read, []dataplane.Answer{{Endpoint: endpoint(1), Ago: c.read.Sub(c.answered)}})
	}
}

// TestMachine follows an endpoint that was busy, and is dead from the beginning on, through evidence and probes.
func TestMachine(t *testing.T) {
	type step struct {
		after    time.Duration
		evidence bool     // or
		outcome  *Outcome // of the probe that must be due now
		up       bool     // it answers clients from here on
		want     string   // the state, and when the next probe is due
	}
	const s = time.Second
	suspect := step{after: 5 * s / 4, evidence: true, want: "suspected 0s"}
	probe := func(after time.Duration, o Outcome, want string) step {
		return step{after: after, outcome: &o, want: want}
	}
	dead := []step{suspect, probe(s/2, Silent, "unhealthy unanswered 1s")}
	then := func(before []step, more ...step) []step { return append(slices.Clone(before), more...) }
	for name, steps := range map[string][]step{
		"accepted":  {suspect, probe(s/2, Accepted, "cleared")},
		"dead":      dead,
		"refused":   {suspect, probe(s/2, Rejected, "unhealthy unanswered 1s")},
		"not sent":  {suspect, probe(s/2, Failed, "cleared")},
		"too early": {{after: s / 4, evidence: true, want: "suspected 0s"}, probe(s/2, Silent, "doubted 1s")},
		"once again": {{after: s / 4, evidence: true, want: "suspected 0s"}, probe(s/2, Silent, "doubted 1s"),
			{after: s / 2, evidence: true, want: "unhealthy unanswered 1s"}},
		"no evidence any more": {{after: s / 4, evidence: true, want: "suspected 0s"}, probe(s/2, Silent, "doubted 1s"),
			probe(s, Silent, "doubted 2s"), probe(2*s, Silent, "doubted 4s"), {after: 8 * s, want: "cleared"}},
		"evidence once more": {{after: s / 4, evidence: true, want: "suspected 0s"}, probe(s/2, Silent, "doubted 1s"),
			{after: 11 * s, up: true, want: "cleared"}, {after: s, evidence: true, want: "doubted 1s"},
			probe(s, Accepted, "cleared"), {after: 11 * s, evidence: true, want: "suspected 0s"}},
		"evidence in a pause": {suspect, probe(0, Accepted, "cleared"),
			{after: s / 4, evidence: true, want: "suspected 750ms"}},
		"pauses": then(dead, probe(s, Silent, "unhealthy unanswered 2s"), probe(2*s, Failed, "unhealthy unanswered 4s"),
			probe(4*s, Rejected, "unhealthy refused 8s"), probe(8*s, Accepted, "cleared")),
		"answers a client": then(dead, step{after: s, up: true, want: "cleared"}),
		"answers of a policy": {suspect, {after: s / 4, up: true, want: "suspected -250ms"},
			probe(s/4, Silent, "doubted 1s")},
		"flapping": then(dead, probe(s, Accepted, "cleared"),
			step{after: 3 * s, evidence: true, want: "suspected 0s"}, probe(s/2, Silent, "unhealthy unanswered 1s"),
			probe(s, Accepted, "unhealthy unanswered 1s"), probe(s, Accepted, "cleared")),
		"trial": then(dead, step{after: 59 * s, want: "unhealthy unanswered -58s"}, step{after: s, want: "cleared"},
			step{after: 5 * s / 4, evidence: true, want: "suspected 0s"}, probe(s/2, Silent, "unhealthy unanswered 1s"),
			step{after: 100 * s, want: "unhealthy unanswered -1m39s"}, step{after: 20 * s, want: "cleared"},
			step{after: 90 * s, evidence: true, want: "suspected 0s"}, probe(s/2, Silent, "unhealthy unanswered 1s"),
			step{after: 239 * s, want: "unhealthy unanswered -3m58s"}, step{after: s, want: "cleared"}),
		"forgotten": {suspect, probe(0, Accepted, "cleared"), {after: memory, want: "none"}},
	} {
		t.Run(name, func(t *testing.T) {
			m, now := newMachine(), begin
			before := begin.Add(-time.Minute)
			c := &clients{m: m, read: before, answered: before, next: every(100 * time.Millisecond)}
			c.until(begin, true)
			up := false
			for i, st := range steps {
				now = now.Add(st.after)
				if up = up || st.up; st.up {
					c.answered = now.Add(-time.Millisecond)
				}
				c.until(now, up)
				if st.evidence {
					m.suspect(now, one, snapshot.Unanswered, []*dataplane.ServicePort{port("shop", 1, 2)})
				}
				if st.outcome != nil {
					if len(m.start(now)) != 1 {
						t.Fatalf("step %d: no probe is due: %s", i, describe(m, one, now))
					}
					m.found(now, one, *st.outcome)
				}
				if tr := m.tracks[one]; tr != nil {
					tr.proof.found = now
				}
				m.advance(now)
				if got := describe(m, one, now); got != st.want {
					t.Fatalf("step %d: %s, want %s", i, got, st.want)
				}
			}
		})
	}
}

func describe(m *machine, k trackKey, now time.Time) string {
	t := m.tracks[k]
	switch {
	case t == nil:
		return "none"
	case t.state == cleared:
		return "cleared"
	case t.state == suspected:
		return fmt.Sprintf("suspected %v", t.due.Sub(now))
	case t.state == doubted:
		return fmt.Sprintf("doubted %v", t.due.Sub(now))
	}
	return fmt.Sprintf("unhealthy %v %v", t.cause, t.due.Sub(now))
}

// TestSilence has policies forbid probes, and clients that they forbid wait for the endpoint all the time, for an hour,
// with all that else would be a proof. However rarely its other clients come, it is not ejected; once it is dead, it
// is, if they come often enough.
func TestSilence(t *testing.T) {
	// In an hour of the worst of these, the chance of a wrong ejection is some percent. So each has the same clients each
	// time, whichever is first.
	const seed = 1
	random := func(mean time.Duration) func(time.Time) time.Time {
		r := rand.New(rand.NewPCG(seed, uint64(mean)))
		return func(at time.Time) time.Time {
			return at.Add(time.Microsecond + time.Duration(r.ExpFloat64()*float64(mean)))
		}
	}
	const ms, s = time.Millisecond, time.Second
	for name, c := range map[string]struct {
		next func(time.Time) time.Time
		// within is when it is ejected after it died; 0: not at all.
		within time.Duration
	}{
		"a hundred a second, at random": {random(10 * ms), 2 * s},
		"ten a second":                  {every(100 * ms), 2 * s},
		"ten a second, at random":       {random(100 * ms), 4 * s},
		"three a second, at random":     {random(300 * ms), 15 * s},
		"one a second":                  {every(s), 5 * s},
		"one in two seconds":            {every(2 * s), 10 * s},
		"one in two seconds, at random": {random(2 * s), 2 * time.Minute},
		"one in ten seconds":            {every(10 * s), 110 * s},
		"bursts in five seconds":        {bursts(5 * s), 40 * s},
	} {
		t.Run(name, func(t *testing.T) {
			m, r := newMachine(), rand.New(rand.NewPCG(seed, 0))
			c2 := &clients{m: m, read: begin, answered: begin, next: memo(c.next)}
			now := begin.Add(historySlots * slotTime)
			c2.until(now, true)
			knock := func(up bool) bool {
				now = now.Add(readEvery)
				c2.until(now, up)
				m.suspect(now, one, snapshot.Cause(r.IntN(2)), []*dataplane.ServicePort{port("shop", 1, 2)})
				for _, p := range m.start(now) {
					m.found(now, p.trackKey, []Outcome{Silent, Rejected}[r.IntN(2)])
				}
				m.tracks[one].proof.found = now
				m.advance(now)
				return m.tracks[one].state == unhealthy
			}
			for now.Before(begin.Add(time.Hour)) {
				if knock(true) {
					t.Fatalf("ejected after %v, when it had answered %v before (seed %d)", now.Sub(begin), now.Sub(c2.answered), seed)
				}
			}
			died := now
			for now.Before(died.Add(2 * time.Minute)) {
				if knock(false) {
					break
				}
			}
			if took := now.Sub(died); took > c.within && c.within > 0 || c.within == 0 && took < 2*time.Minute {
				t.Errorf("ejected %v after it died, want %v (seed %d)", took, c.within, seed)
			}
		})
	}
}

// memo gives the same answer to the same question.
func memo(f func(time.Time) time.Time) func(time.Time) time.Time {
	var at, is time.Time
	return func(t time.Time) time.Time {
		if t != at || is.IsZero() {
			at, is = t, f(t)
		}
		return is
	}
}

// suspect records evidence of an endpoint.
func suspect(m *machine, now time.Time, namespace string, n int) {
	sp := port(namespace, n)
	m.suspect(now, trackKey{sp.Name.Service, endpoint(n)}, snapshot.Unanswered, []*dataplane.ServicePort{sp})
}

// TestFairProbes: one namespace with many suspects neither uses all probes nor delays another's.
func TestFairProbes(t *testing.T) {
	m := newMachine()
	for i := range 1000 {
		suspect(m, begin, "big", i)
	}
	if n := len(m.start(begin)); n != maxAloneProbes {
		t.Errorf("a namespace alone has %d probes, want %d", n, maxAloneProbes)
	}
	for i := range 5 {
		suspect(m, begin.Add(time.Second), "small", 2000+i)
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
		suspect(m, begin, fmt.Sprint("ns-", i%3), i)
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

// TestMachineInvariants plays random worlds: an endpoint that answers a client is not unhealthy from then on, and one
// that answers all the time never is; every unhealthy one is probed within a minute, and for five minutes at most.
func TestMachineInvariants(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	ejected := 0
	for range 10 {
		ejected += playWorld(t, r)
	}
	if ejected == 0 {
		t.Error("nothing was ever unhealthy")
	}
	if t.Failed() {
		t.Log("seed", seed)
	}
}

func playWorld(t *testing.T, r *rand.Rand) (ejected int) {
	const endpoints = 40
	m, now := newMachine(), begin
	alwaysUp := func(n int) bool { return n%3 == 0 }
	results, lastProbe := map[trackKey]time.Time{}, map[trackKey]time.Time{}
	last := map[netip.AddrPort]time.Time{}
	for range 3000 {
		now = now.Add(time.Duration(r.IntN(400)) * time.Millisecond)
		var answers []dataplane.Answer
		for n := range endpoints {
			// The others are up for half a minute, and then down.
			if alwaysUp(n) || now.Unix()/30%2 == 0 {
				last[endpoint(n)] = now.Add(-time.Duration(r.IntN(200)) * time.Millisecond)
			}
			if ago := now.Sub(last[endpoint(n)]); ago < 2*time.Minute {
				answers = append(answers, dataplane.Answer{Endpoint: endpoint(n), Ago: ago})
			}
		}
		m.answers.observe(now, answers)
		for _, t := range m.tracks {
			t.proof.found = now
		}
		for _, t := range m.advance(now) {
			if t.state == unhealthy {
				ejected++
			}
		}
		if n := r.IntN(endpoints); r.IntN(3) == 0 {
			suspect(m, now, fmt.Sprint("ns", n%4), n)
		}
		if n := r.IntN(endpoints); r.IntN(10) == 0 {
			k := trackKey{snapshot.Name{Namespace: fmt.Sprint("ns", n%4), Name: "web"}, endpoint(n)}
			if t := m.tracks[k]; t != nil && t.asks != unasked && r.IntN(4) == 0 {
				m.unask(t)
			} else if t := m.ask(now, k, []asks{byService, asResort}[n%5/4]); t != nil {
				t.ports, t.proof.found = []*dataplane.ServicePort{{}}, now
			}
		}
		for k, at := range results {
			if !now.Before(at) {
				delete(results, k)
				m.found(now, k, []Outcome{Accepted, Silent, Rejected, Failed, Silent, Silent}[r.IntN(6)])
			}
		}
		for _, p := range m.start(now) {
			results[p.trackKey] = now.Add(550 * time.Millisecond)
			lastProbe[p.trackKey] = now
		}
		checkWorld(t, m, now, lastProbe, alwaysUp)
	}
	return ejected
}

func checkWorld(t *testing.T, m *machine, now time.Time, lastProbe map[trackKey]time.Time, up func(int) bool) {
	t.Helper()
	probing, asked, owned := 0, 0, 0
	for ns := range m.owned {
		asked, owned = asked+m.asked[ns], owned+m.owned[ns]
	}
	next, any := m.next()
	for k, tr := range m.tracks {
		e := k.endpoint
		if tr.probing {
			probing++
		}
		if tr.asks != unasked {
			asked--
		}
		if tr.state != unhealthy || tr.asks == asResort {
			continue
		}
		if up(int(e.Addr().As4()[3])) {
			t.Fatalf("%v always answers, and is unhealthy", e)
		}
		if p := m.answers.of[e]; p != nil && p.last.After(tr.judged.Add(time.Second)) {
			t.Fatalf("%v is unhealthy since %v, and answered at %v", e, tr.judged, p.last)
		}
		if now.Sub(tr.judged) > trialMost+time.Second {
			t.Fatalf("%v is unhealthy for %v", e, now.Sub(tr.judged))
		}
		if age := now.Sub(lastProbe[k]); age > recoverMost+2*time.Second {
			t.Fatalf("%v was probed %v ago", e, age)
		}
		if !tr.probing && (!any || next.After(now.Add(recoverMost))) {
			t.Fatalf("%v is unhealthy, and nothing is due before %v", e, next)
		}
	}
	if probing > maxProbes {
		t.Fatalf("%d probes at a time", probing)
	}
	if asked != 0 || owned != len(m.tracks) {
		t.Fatalf("%d tracks more are asked for than there are; %d of %d are somebody's", asked, owned, len(m.tracks))
	}
}

// TestTrackedBound: evidence about more endpoints than the limits is ignored, and a namespace that has reached its own
// leaves room for others. Who is forgotten makes room.
func TestTrackedBound(t *testing.T) {
	m := newMachine()
	for i := range maxNamespaceTracked + 100 {
		suspect(m, begin, "shop", i)
	}
	if len(m.tracks) != maxNamespaceTracked {
		t.Errorf("%d endpoints of one namespace are remembered", len(m.tracks))
	}
	for i := range maxTracked {
		suspect(m, begin, fmt.Sprint("ns-", i/(maxNamespaceTracked/2)), 1<<15+i)
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
	m.suspect(begin, one, snapshot.Refused, nil)
	if len(m.start(begin)) > 0 {
		t.Error("an endpoint of no Service is probed")
	}
}
