package outlier

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/conntrack"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// world is a node: its kernel, its network, and the loop that ejects what a Detector puts.
type world struct {
	t        *testing.T
	detector *Detector
	mu       sync.Mutex
	evidence map[netip.AddrPort]dataplane.Evidence
	reads    int
	// outcomes of probes; endpoints without one are accepted.
	outcomes map[netip.AddrPort]Outcome
	probes   map[netip.AddrPort]int
	deleted  map[netip.AddrPort][]time.Time
	answers  []conntrack.Answers
	health   map[snapshot.Name]*snapshot.Health
	log      strings.Builder
	// keeps is true if the planner ejects nothing.
	keeps bool
	svc   *dataplane.Service
}

func (w *world) Read() (list []dataplane.Evidence, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reads++
	for _, e := range w.evidence {
		list = append(list, e)
	}
	return list, nil
}

func (w *world) Probe(ctx context.Context, e netip.AddrPort) Outcome {
	w.mu.Lock()
	o := w.outcomes[e]
	w.probes[e]++
	w.mu.Unlock()
	if o == Silent {
		pause(ctx, 500*time.Millisecond)
	}
	return o
}

func (w *world) Delete(_ context.Context, endpoints []netip.AddrPort,
	doomed func(netip.AddrPort, dataplane.Key) bool) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range endpoints {
		if !doomed(e, frontendKey) || doomed(e, dataplane.Key{Addr: frontendKey.Addr, Protocol: snapshot.TCP, Port: 81}) {
			w.t.Error("flows of the wrong frontends are deleted")
		}
		w.deleted[e] = append(w.deleted[e], time.Now())
	}
	return 8 * len(endpoints), nil
}

func (w *world) Answers(context.Context, netip.AddrPort) (conntrack.Answers, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	a := w.answers[0]
	w.answers = append(w.answers[1:], a)
	return a, nil
}

func (w *world) put(d snapshot.Delta) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n, h := range d.Health {
		w.health[n] = h
		if w.svc != nil && n == w.svc.Name && !w.keeps {
			go w.eject(h)
		}
	}
}

// eject commits the Service without its unhealthy endpoints.
func (w *world) eject(h *snapshot.Health) {
	time.Sleep(5 * time.Millisecond)
	w.mu.Lock()
	all := w.svc.Ports[0].Cluster
	sp := *w.svc.Ports[0]
	pool := dataplane.Pool{}
	for _, e := range append(slices.Clone(all.Endpoints), asEndpoints(all.Ejected)...) {
		if h != nil {
			if i := slices.IndexFunc(h.Unhealthy, func(u snapshot.Unhealthy) bool { return u.Endpoint == e.AddrPort }); i >= 0 {
				pool.Ejected = append(pool.Ejected, h.Unhealthy[i])
				continue
			}
		}
		pool.Endpoints = append(pool.Endpoints, e)
	}
	sp.Cluster = &pool
	w.mu.Unlock()
	w.commit(&sp)
}

func asEndpoints(list []snapshot.Unhealthy) (out []dataplane.Endpoint) {
	for _, u := range list {
		out = append(out, dataplane.Endpoint{AddrPort: u.Endpoint})
	}
	return out
}

// commit programs the Service with one port; nil removes it.
func (w *world) commit(sp *dataplane.ServicePort) {
	w.mu.Lock()
	before := w.svc
	w.svc = nil
	if sp != nil {
		w.svc = &dataplane.Service{Name: sp.Name.Service, Ports: []*dataplane.ServicePort{sp}}
	}
	c := reconcile.Commit{Before: []*dataplane.Service{before}, After: []*dataplane.Service{w.svc}}
	w.mu.Unlock()
	w.detector.Listener().Committed(c)
}

// saw adds evidence.
func (w *world) saw(n int, unanswered, refused uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.evidence[endpoint(n)]
	w.evidence[endpoint(n)] = dataplane.Evidence{Endpoint: endpoint(n), Unanswered: e.Unanswered + unanswered,
		Refused: e.Refused + refused}
}

func (w *world) set(n int, o Outcome) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.outcomes[endpoint(n)] = o
}

// unhealthy returns the last numbers of the unhealthy endpoints' addresses.
func (w *world) unhealthy() (out []int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if h := w.health[shop]; h != nil {
		for _, u := range h.Unhealthy {
			out = append(out, int(u.Endpoint.Addr().As4()[3]))
		}
	}
	return out
}

func (w *world) want(what string, numbers ...int) {
	w.t.Helper()
	synctest.Wait()
	if got := w.unhealthy(); !slices.Equal(got, numbers) {
		w.t.Errorf("%s: %v are unhealthy, want %v", what, got, numbers)
	}
}

var shop = snapshot.Name{Namespace: "shop", Name: "web"}

// run runs a test in a bubble, with a Detector at work.
func run(t *testing.T, do func(w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, evidence: map[netip.AddrPort]dataplane.Evidence{}, outcomes: map[netip.AddrPort]Outcome{},
			probes: map[netip.AddrPort]int{}, deleted: map[netip.AddrPort][]time.Time{},
			health: map[snapshot.Name]*snapshot.Health{}, answers: []conntrack.Answers{{}}}
		log := slog.New(slog.NewTextHandler(&w.log, nil))
		w.detector = New(Options{Evidence: w, Prober: w, Flows: w, Put: w.put, Log: log})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- w.detector.Run(ctx) }()
		do(w)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// deletions returns when flows to an endpoint were deleted, and probed how often it was probed.
func (w *world) deletions(n int) []time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.deleted[endpoint(n)])
}

func (w *world) probed(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.probes[endpoint(n)]
}

// TestEjects: a dead endpoint is ejected and its flows are deleted within 0.8 s after the evidence, and again a second
// later. It comes back when it answers.
func TestEjects(t *testing.T) {
	run(t, func(w *world) {
		w.commit(port("shop", 1, 2))
		time.Sleep(time.Minute)
		synctest.Wait()
		w.set(1, Silent)
		saw := time.Now()
		w.saw(1, 8, 0)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		w.want("dead", 1)
		at := w.deletions(1)
		if len(at) != 2 || at[0].Sub(saw) > 800*time.Millisecond || at[1].Sub(at[0]).Round(time.Second/10) != time.Second {
			t.Errorf("flows are deleted at %v after the evidence at %v", at, saw)
		}
		recorder := httptest.NewRecorder()
		request := httptest.NewRequest("GET", "/outliers", nil)
		w.detector.ServeHTTP(recorder, request)
		var report Report
		if err := json.Unmarshal(recorder.Body.Bytes(), &report); err != nil || len(report.Services) != 1 ||
			report.Services[0].Service != "shop/web" || len(report.Services[0].Endpoints) != 1 {
			t.Fatal(recorder.Body, err)
		}
		e := report.Services[0].Endpoints[0]
		if e.Endpoint != "10.244.0.1:80" || e.Cause != "unanswered" || !e.Ejected || e.Since.Sub(saw) > time.Second ||
			!e.NextProbe.After(saw) {
			t.Errorf("reported is %+v", e)
		}
		w.set(1, Accepted)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		w.want("back")
		if s := w.detector.Stats(); s.Ejections != [2]uint64{1, 0} || s.FlowsDeleted != 16 || s.Ejected != [2]int{} {
			t.Errorf("%+v", s)
		}
		if n := strings.Count(w.log.String(), "\n"); n != 2 || !strings.Contains(w.log.String(), "ejected an endpoint") {
			t.Errorf("the log has\n%s", &w.log)
		}
	})
}

// TestDoesNotEject lists evidence that is no reason.
func TestDoesNotEject(t *testing.T) {
	waits := func(addrs ...string) conntrack.Answers {
		a := conntrack.Answers{Waiting: map[netip.Addr]struct{}{}, Answered: map[string]struct{}{"old": {}}}
		for _, text := range addrs {
			a.Waiting[netip.MustParseAddr(text)] = struct{}{}
		}
		return a
	}
	answering := waits("10.1.0.1", "10.1.0.2")
	answering.Answered = map[string]struct{}{"old": {}, "new": {}}
	allSilent := map[int]Outcome{1: Silent, 2: Silent, 3: Silent}
	for name, c := range map[string]struct {
		outcomes map[int]Outcome
		answers  []conntrack.Answers
	}{
		"the endpoint answers":        {},
		"policy, one client":          {allSilent, []conntrack.Answers{waits("10.1.0.1")}},
		"policy, others are answered": {allSilent, []conntrack.Answers{waits("10.1.0.1", "10.1.0.2"), answering}},
		"probes cannot be sent":       {map[int]Outcome{1: Failed}, []conntrack.Answers{waits("10.1.0.1", "10.1.0.2")}},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				w.commit(port("shop", 1, 2, 3))
				if c.answers != nil {
					w.answers = c.answers
				}
				for n, o := range c.outcomes {
					w.set(n, o)
				}
				for range 30 {
					w.saw(1, 5, 5)
					time.Sleep(100 * time.Millisecond)
					synctest.Wait()
					w.want("suspected")
				}
				if w.probed(1) == 0 {
					t.Error("it was never probed")
				}
			})
		})
	}
}

// TestTrial: where this node's probes reach nobody, an endpoint is ejected on trial if several clients wait.
func TestTrial(t *testing.T) {
	run(t, func(w *world) {
		w.commit(port("shop", 1, 2))
		w.set(1, Silent)
		w.set(2, Silent)
		w.answers = []conntrack.Answers{{Waiting: map[netip.Addr]struct{}{
			netip.MustParseAddr("10.1.0.1"): {}, netip.MustParseAddr("10.1.0.2"): {},
		}}}
		w.saw(1, 2, 0)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		w.want("trial", 1)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		w.want("after the trial")
	})
}

// TestKept: while a Service keeps an unhealthy endpoint, its unanswered flows are deleted once a second as long as
// evidence comes.
func TestKept(t *testing.T) {
	run(t, func(w *world) {
		w.keeps = true
		w.commit(port("shop", 1, 2))
		w.set(1, Silent)
		for range 100 {
			w.saw(1, 1, 0)
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		w.want("kept", 1)
		if n := len(w.deletions(1)); n < 8 || n > 10 {
			t.Errorf("flows were deleted %d times in 10 s", n)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		n := len(w.deletions(1))
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if more := len(w.deletions(1)); more != n {
			t.Errorf("flows are deleted though nobody waits: %d times, then %d", n, more)
		}
		if !strings.Contains(w.log.String(), "an unhealthy endpoint stays") {
			t.Errorf("the log has\n%s", &w.log)
		}
	})
}

// TestAllDead: if nobody else is there, nothing is deleted.
func TestAllDead(t *testing.T) {
	run(t, func(w *world) {
		w.keeps = true
		w.commit(port("shop", 1))
		w.set(1, Rejected)
		for range 30 {
			w.saw(1, 0, 1)
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		w.want("refusing", 1)
		if len(w.deleted) > 0 {
			t.Errorf("flows were deleted: %v", w.deleted)
		}
	})
}

// TestObserve: what would be ejected is put and logged, and no flow is touched.
func TestObserve(t *testing.T) {
	run(t, func(w *world) {
		w.keeps = true
		sp := port("shop", 1, 2)
		sp.SecondChance = snapshot.SecondChanceObserve
		w.commit(sp)
		w.set(1, Silent)
		for range 30 {
			w.saw(1, 1, 0)
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		w.want("observed", 1)
		if n := strings.Count(w.log.String(), "an endpoint would be ejected: unanswered"); n != 1 || len(w.deleted) > 0 {
			t.Errorf("deleted %v; the log has\n%s", w.deleted, &w.log)
		}
	})
}

// TestFollowsServices: nothing is read while no Service asks for it, strangers are not probed, and an endpoint that
// left its Service is forgotten.
func TestFollowsServices(t *testing.T) {
	run(t, func(w *world) {
		off := port("shop", 1, 2)
		off.SecondChance = snapshot.SecondChanceOff
		w.commit(off)
		w.set(1, Rejected)
		w.saw(1, 1, 1)
		time.Sleep(time.Minute)
		synctest.Wait()
		w.mu.Lock()
		if w.reads > 0 {
			t.Errorf("evidence was read %d times though nobody asks for it", w.reads)
		}
		w.mu.Unlock()
		w.commit(port("shop", 1, 2))
		time.Sleep(time.Second)
		synctest.Wait()
		w.want("refusing", 1)
		w.saw(7, 9, 9)
		time.Sleep(time.Second)
		synctest.Wait()
		if n := w.probed(7); n > 0 {
			t.Errorf("an endpoint of no Service was probed %d times", n)
		}
		w.commit(port("shop", 2, 3))
		time.Sleep(time.Second)
		synctest.Wait()
		w.want("left")
		probes := w.probed(1)
		time.Sleep(time.Minute)
		synctest.Wait()
		if w.probed(1) != probes {
			t.Error("an endpoint was probed that left its Service")
		}
		w.saw(2, 0, 1)
		w.set(2, Rejected)
		time.Sleep(500 * time.Millisecond)
		synctest.Wait()
		w.want("refusing", 2)
		w.commit(nil)
		time.Sleep(time.Second)
		synctest.Wait()
		w.want("no Service")
		if d := w.detector; len(d.machine.tracks)+len(d.services.byName)+len(d.put) > 0 || d.services.watched != 0 {
			t.Errorf("left are %v, %v, %v", d.machine.tracks, d.services, d.put)
		}
	})
}

// TestNeverProbesItself: addresses that mean this node or its link are nobody's endpoints.
func TestNeverProbesItself(t *testing.T) {
	for _, text := range []string{"127.0.0.1", "::1", "169.254.169.254", "fe80::1", "0.0.0.0", "224.0.0.1", "ff02::1"} {
		if mayProbe(netip.MustParseAddr(text)) {
			t.Error(text)
		}
	}
}
