package outlier

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/system/clock"
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
	reads    atomic.Int64
	// last is when an endpoint answered last, up which ones answer several times a second.
	last map[netip.AddrPort]time.Time
	up   map[int]bool
	// known says that a client waits whom the endpoint accepted before. forsaken and accepted, if not nil, are when it was
	// last not accepted by endpoint 1, and accepted by endpoint 2.
	known              bool
	forsaken, accepted func() time.Time
	// outcomes of probes; endpoints without one are accepted.
	outcomes map[netip.AddrPort]Outcome
	probes   map[netip.AddrPort]int
	paths    map[netip.AddrPort]string // of the last probes
	deleted  map[netip.AddrPort][]time.Time
	waiting  []conntrack.WaitingFlow
	health   map[snapshot.Name]*snapshot.Health
	log      strings.Builder
	// keeps is true if the planner ejects nothing.
	keeps bool
	svc   *dataplane.Service
}

func (w *world) Read() (list []dataplane.Evidence, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reads.Add(1)
	for _, e := range w.evidence {
		list = append(list, e)
	}
	return list, nil
}

func (w *world) Answers() (list []dataplane.Answer, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n, up := range w.up {
		if up {
			w.last[endpoint(n)] = time.Now().Add(-50 * time.Millisecond)
		}
	}
	for e, at := range w.last {
		list = append(list, dataplane.Answer{Endpoint: e, Ago: time.Since(at)})
	}
	return list, nil
}

// Forsaken and Accepted know one client, whom every endpoint accepts that is up.
func (w *world) Forsaken() (list []dataplane.Pair, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.forsaken != nil {
		return []dataplane.Pair{{Client: client, Endpoint: endpoint(1), Ago: time.Since(w.forsaken())}}, nil
	}
	for e := range w.last {
		if w.known && !w.up[int(e.Addr().As4()[3])] {
			list = append(list, dataplane.Pair{Client: client, Endpoint: e, Ago: 100 * time.Millisecond})
		}
	}
	return list, nil
}

func (w *world) Accepted() (list []dataplane.Pair, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.accepted != nil {
		return []dataplane.Pair{{Client: client, Endpoint: endpoint(2), Ago: time.Since(w.accepted())}}, nil
	}
	for e, at := range w.last {
		list = append(list, dataplane.Pair{Client: client, Endpoint: e, Ago: time.Since(at)})
	}
	return list, nil
}

var client = netip.MustParseAddr("10.244.9.9")

// answers lets clients be answered by an endpoint from now on, or not any more.
func (w *world) answers(n int, yes bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.up[n] = yes
}

func (w *world) Probe(ctx context.Context, e netip.AddrPort, how Manner) Outcome {
	w.mu.Lock()
	w.paths[e] = how.Path
	o := w.outcomes[e]
	w.probes[e]++
	w.mu.Unlock()
	if o == Silent {
		clock.Pause(ctx, 500*time.Millisecond)
	}
	return o
}

func (w *world) Delete(_ context.Context, endpoints []netip.AddrPort, doomed func(conntrack.WaitingFlow) bool) (n int,
	err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range endpoints {
		flows := slices.DeleteFunc(slices.Clone(w.waiting), func(f conntrack.WaitingFlow) bool { return f.Endpoint != e })
		if flows == nil {
			flows = []conntrack.WaitingFlow{{ID: "a", Endpoint: e, Frontend: frontendKey}}
		}
		gone := 0
		for _, f := range flows {
			if doomed(f) {
				gone++
			}
			if f.Frontend.Port++; doomed(f) {
				w.t.Error("flows of the wrong frontends are deleted")
			}
		}
		if n += gone; gone > 0 {
			w.deleted[e] = append(w.deleted[e], time.Now())
		}
	}
	return n, nil
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
			if i := slices.IndexFunc(h.Unhealthy, func(u snapshot.Unhealthy) bool {
				return u.Endpoint == e.AddrPort && !u.Doubtful
			}); i >= 0 {
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
	w.evidence[endpoint(n)] = dataplane.Evidence{Frontend: frontendKey, Endpoint: endpoint(n),
		Unanswered: e.Unanswered + unanswered, Refused: e.Refused + refused}
}

// sees adds the same evidence again and again, ten times a second.
func (w *world) sees(times, n int, unanswered, refused uint64) {
	for range times {
		w.saw(n, unanswered, refused)
		time.Sleep(100 * time.Millisecond)
	}
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
			if u.Doubtful {
				continue
			}
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
			probes: map[netip.AddrPort]int{}, paths: map[netip.AddrPort]string{}, deleted: map[netip.AddrPort][]time.Time{},
			health: map[snapshot.Name]*snapshot.Health{}, last: map[netip.AddrPort]time.Time{}, up: map[int]bool{}, known: true}
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

// TestEjects: a dead endpoint is ejected and its flows are deleted within a second after the evidence, and again a
// second later. It comes back when it answers a probe.
func TestEjects(t *testing.T) {
	run(t, func(w *world) {
		w.busy(port("shop", 1, 2))
		died := time.Now()
		w.die(1, Silent)
		time.Sleep(1100 * time.Millisecond)
		saw := time.Now()
		w.saw(1, 8, 0)
		time.Sleep(2 * time.Second)
		w.want("dead", 1)
		at := w.deletions(1)
		if saw.Sub(died) > 2*time.Second || len(at) != 2 ||
			at[0].Sub(saw) > time.Second || at[1].Sub(at[0]).Round(time.Second/10) != time.Second {
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
		w.want("back")
		if s := w.detector.Stats(); s.Ejections != [2]uint64{1, 0} || s.FlowsDeleted != 2 || s.Ejected != [2]int{} {
			t.Errorf("%+v", s)
		}
		if n := strings.Count(w.log.String(), "\n"); n != 2 || !strings.Contains(w.log.String(), "ejected an endpoint") {
			t.Errorf("the log has\n%s", &w.log)
		}
	})
}

// busy programs a Service whose endpoints all answer clients for longer than youngFor.
func (w *world) busy(sp *dataplane.ServicePort) {
	w.commit(sp)
	for _, e := range sp.Cluster.Endpoints {
		w.answers(int(e.Addr().As4()[3]), true)
	}
	time.Sleep(youngFor + time.Second)
	synctest.Wait()
}

// die has an endpoint answer nobody from now on.
func (w *world) die(n int, o Outcome) {
	w.answers(n, false)
	w.set(n, o)
}

// TestDoesNotEject lists evidence that is no reason: whatever becomes of probes, an endpoint that answers anybody is
// healthy, and so is one that nobody knows. While it answers, no flow is touched either.
func TestDoesNotEject(t *testing.T) {
	for _, o := range []Outcome{Accepted, Rejected, Silent, Failed} {
		for _, up := range []bool{true, false} {
			t.Run(fmt.Sprint(o, ", answers others: ", up), func(t *testing.T) {
				run(t, func(w *world) {
					w.commit(port("shop", 1, 2, 3))
					w.set(1, o)
					w.answers(1, up)
					for range 600 {
						w.saw(1, 5, 5)
						time.Sleep(100 * time.Millisecond)
						w.want("suspected")
					}
					if w.probed(1) == 0 {
						t.Error("it was never probed")
					}
					if up && len(w.deletions(1)) > 0 {
						t.Errorf("flows were deleted at %v", w.deletions(1))
					}
				})
			})
		}
	}
}

// TestSilentToAll: that an endpoint answers nobody is told while nothing proves that it is the endpoint, so that
// connections which it does not answer may be released.
func TestSilentToAll(t *testing.T) {
	run(t, func(w *world) {
		w.busy(port("shop", 1, 2))
		w.known = false
		w.die(1, Silent)
		told := func() bool {
			w.want("doubted")
			w.mu.Lock()
			defer w.mu.Unlock()
			h := w.health[shop]
			return h != nil && len(h.Unhealthy) == 1 && h.Unhealthy[0].Cause == snapshot.Unanswered
		}
		for n := range 60 {
			if at := time.Duration(n) * 100 * time.Millisecond; told() != (at >= 3500*time.Millisecond) && (at < 3*time.Second ||
				at >= 3500*time.Millisecond) {
				t.Errorf("after %v: told %v", at, told())
			}
			w.saw(1, 1, 0)
			time.Sleep(100 * time.Millisecond)
		}
		w.answers(1, true)
		time.Sleep(time.Second)
		if told() {
			t.Error("it answers, and still does not")
		}
	})
}

// TestStopped: the clients of a busy endpoint stop, and one that was never accepted, or that no endpoint accepts any
// more, goes on. Nothing is ejected.
func TestStopped(t *testing.T) {
	for name, stop := range map[string]func(w *world){
		"never accepted":    func(w *world) { w.known = false },
		"nowhere any more":  func(w *world) { w.answers(2, false) },
		"no clients at all": func(w *world) { w.answers(2, false); w.known = false },
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				w.busy(port("shop", 1, 2))
				w.die(1, Rejected)
				stop(w)
				w.sees(600, 1, 1, 1)
				w.want("a policy forbids")
			})
		})
	}
}

// TestFewClients: an endpoint of few clients is silent most of the time. What a policy makes of them when it begins and
// when it ends does not eject it, nor does a lost packet; that it is dead does. The node is forbidden to probe it.
func TestFewClients(t *testing.T) {
	const s = time.Second
	type times = []time.Duration
	for name, c := range map[string]struct {
		// forsaken and accepted are when the client is not accepted by the endpoint, and accepted by the other one.
		forsaken, accepted times
		// open is when probes are accepted.
		open time.Duration
		want []int
	}{
		"a policy begins":  {forsaken: times{0, s, 2 * s, 3 * s, 4 * s, 5 * s}, accepted: times{-s / 5}},
		"a policy ends":    {forsaken: times{-5 * s, -4 * s, -2 * s, 0}, accepted: times{s}, open: s * 9 / 10},
		"a packet is lost": {forsaken: times{0}, accepted: times{-s, s, 2 * s, 3 * s, 4 * s, 5 * s}},
		"and another one":  {forsaken: times{0, 2 * s}, accepted: times{-s, s, 3 * s, 4 * s, 5 * s}},
		"dead":             {forsaken: times{0, 3 * s}, accepted: times{-s, s, 4 * s, 5 * s}, want: []int{1}},
		"dead, beside many": {forsaken: times{0, s / 2, s, 3 * s / 2}, accepted: times{0, s, 2 * s, 3 * s, 4 * s},
			want: []int{1}},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(w *world) {
				w.commit(port("shop", 1, 2))
				w.set(1, Silent)
				begun := time.Now().Add(6 * s)
				last := func(list times) func() time.Time {
					return func() (at time.Time) {
						for _, d := range list {
							if e := begun.Add(d); !e.After(time.Now()) {
								at = e
							}
						}
						return at
					}
				}
				w.mu.Lock()
				w.forsaken, w.accepted, w.last[endpoint(1)] = last(c.forsaken), last(c.accepted), begun.Add(-11*s/2)
				w.mu.Unlock()
				for now := time.Duration(0); now < 13*s; now += s / 10 {
					if slices.Contains(c.forsaken, now-6*s) {
						w.saw(1, 1, 0)
					}
					if c.open > 0 && time.Since(begun) >= c.open {
						w.set(1, Accepted)
					}
					time.Sleep(s / 10)
					if len(c.want) == 0 {
						w.want(fmt.Sprint(time.Since(begun)))
					}
				}
				time.Sleep(s / 20) // so that what was just put is committed
				w.want("in the end", c.want...)
			})
		})
	}
}

// TestFewClientsDeleted: connections that are deleted before their client sends again are evidence, too: without them,
// a client that gives up soon, or chooses again, would be seen once.
func TestFewClientsDeleted(t *testing.T) {
	for _, waits := range []bool{true, false} {
		run(t, func(w *world) {
			w.commit(port("shop", 1, 2))
			w.set(1, Silent)
			time.Sleep(6 * time.Second)
			begun := time.Now()
			w.mu.Lock()
			w.last[endpoint(1)] = begun.Add(-2 * time.Second)
			w.forsaken, w.accepted = func() time.Time { return begun }, time.Now
			w.mu.Unlock()
			w.saw(1, 1, 0)
			for n := range 25 {
				w.mu.Lock()
				if w.waiting = []conntrack.WaitingFlow{}; waits {
					w.waiting = append(w.waiting, conntrack.WaitingFlow{ID: fmt.Sprint(n), Client: client,
						Endpoint: endpoint(1), Frontend: frontendKey})
				}
				w.mu.Unlock()
				time.Sleep(600 * time.Millisecond)
			}
			if synctest.Wait(); (len(w.unhealthy()) > 0) != waits {
				t.Errorf("unhealthy are %v; connections wait: %v", w.unhealthy(), waits)
			}
		})
	}
}

// TestOtherServices: what clients see at the frontends of one Service says nothing about its endpoints in another, and
// fills nobody else's account.
func TestOtherServices(t *testing.T) {
	run(t, func(w *world) {
		w.busy(port("shop", 1, 2))
		other := port("aaa", 1, 9)
		other.Frontends = []dataplane.Frontend{{Key: dataplane.Key{Addr: netip.MustParseAddr("10.96.0.9"),
			Protocol: snapshot.TCP, Port: 80}}}
		svc := &dataplane.Service{Name: other.Name.Service, Ports: []*dataplane.ServicePort{other}}
		w.detector.Listener().Committed(reconcile.Commit{Before: []*dataplane.Service{nil}, After: []*dataplane.Service{svc}})
		w.answers(9, true)
		w.die(1, Silent)
		for range 40 {
			time.Sleep(100 * time.Millisecond)
			w.mu.Lock()
			w.evidence[endpoint(100)] = dataplane.Evidence{Frontend: other.Frontends[0].Key, Endpoint: endpoint(1),
				Unanswered: uint64(time.Now().UnixNano())}
			w.mu.Unlock()
		}
		w.want("by another Service's clients")
		w.mu.Lock()
		if h := w.health[other.Name.Service]; h == nil || len(h.Unhealthy) != 1 {
			t.Errorf("of the other Service: %+v", h)
		}
		w.mu.Unlock()
		w.saw(1, 1, 0)
		time.Sleep(2 * time.Second)
		w.want("by its own clients", 1)
		for _, name := range []string{"shop/web", "aaa/web"} {
			if !strings.Contains(w.log.String(), `msg="ejected an endpoint: unanswered" service=`+name) && name == "shop/web" {
				t.Errorf("the log does not name %s:\n%s", name, &w.log)
			}
		}
	})
}

// TestTrial: an ejection ends after a time, and when the endpoint answers anybody.
func TestTrial(t *testing.T) {
	run(t, func(w *world) {
		w.busy(port("shop", 1, 2))
		w.die(1, Silent)
		time.Sleep(1100 * time.Millisecond)
		w.saw(1, 1, 0)
		time.Sleep(3 * time.Second)
		w.want("ejected", 1)
		time.Sleep(trialFirst)
		w.want("after the trial")
		time.Sleep(1100 * time.Millisecond)
		w.saw(1, 1, 0)
		time.Sleep(3 * time.Second)
		w.want("ejected again", 1)
		w.answers(1, true)
		time.Sleep(time.Second)
		w.want("back with the first answer")
	})
}

// TestChoosesAgain: of an endpoint that nobody knows to be dead, those flows are deleted that have waited for a time,
// again and again as long as there is evidence, and no others.
func TestChoosesAgain(t *testing.T) {
	run(t, func(w *world) {
		w.commit(port("shop", 1, 2))
		w.set(1, Silent)
		w.waiting = []conntrack.WaitingFlow{{ID: "old", Endpoint: endpoint(1), Frontend: frontendKey}}
		for n := range 20 {
			w.saw(1, 1, 0)
			time.Sleep(250 * time.Millisecond)
			w.mu.Lock()
			w.waiting[0].ID = fmt.Sprint(n / 8)
			w.waiting = append(w.waiting[:1], conntrack.WaitingFlow{ID: fmt.Sprint("new", n), Endpoint: endpoint(1),
				Frontend: frontendKey})
			w.mu.Unlock()
		}
		w.want("doubted")
		if n := w.detector.Stats().FlowsDeleted; n < 3 || n > 12 {
			t.Errorf("%d flows were deleted", n)
		}
	})
}

// TestRefusedByPolicy: that an endpoint refuses some clients and this node is known, so that it is not tried again and
// again, and it is not ejected.
func TestRefusedByPolicy(t *testing.T) {
	run(t, func(w *world) {
		w.busy(port("shop", 1, 2))
		w.set(1, Rejected)
		w.sees(30, 1, 0, 1)
		w.want("refuses some")
		w.mu.Lock()
		if h := w.health[shop]; h == nil || len(h.Unhealthy) != 1 || h.Unhealthy[0].Cause != snapshot.Refused {
			t.Errorf("known is %+v", h)
		}
		w.mu.Unlock()
		if r := w.detector.Report(); len(r.Services) > 0 || len(w.deletions(1)) > 0 {
			t.Errorf("reported is %+v; flows were deleted at %v", r, w.deletions(1))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		w.mu.Lock()
		defer w.mu.Unlock()
		if h := w.health[shop]; h != nil {
			t.Errorf("nobody is refused any more, and known is %+v", h)
		}
	})
}

// TestKept: while a Service keeps an unhealthy endpoint, its unanswered flows are deleted once a second as long as
// evidence comes.
func TestKept(t *testing.T) {
	run(t, func(w *world) {
		w.keeps = true
		w.busy(port("shop", 1, 2))
		w.die(1, Silent)
		time.Sleep(2 * time.Second)
		w.saw(1, 1, 0)
		time.Sleep(time.Second)
		synctest.Wait()
		before := len(w.deletions(1))
		for range 100 {
			w.saw(1, 1, 0)
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		w.want("kept", 1)
		if n := len(w.deletions(1)) - before; n < 8 || n > 11 {
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

// TestAllDead: if nobody else is there, nothing is deleted, and nobody can tell whether it is the endpoint.
func TestAllDead(t *testing.T) {
	run(t, func(w *world) {
		w.busy(port("shop", 1))
		w.die(1, Rejected)
		w.sees(30, 1, 1, 1)
		w.want("the only one")
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
		w.busy(sp)
		w.die(1, Silent)
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
		if w.reads.Load() > 0 {
			t.Errorf("evidence was read %d times though nobody asks for it", w.reads.Load())
		}
		w.mu.Unlock()
		w.busy(port("shop", 1, 2))
		w.die(1, Rejected)
		time.Sleep(time.Second)
		w.saw(1, 0, 1)
		time.Sleep(time.Second)
		w.want("refusing", 1)
		w.saw(7, 9, 9)
		time.Sleep(time.Second)
		synctest.Wait()
		if n := w.probed(7); n > 0 {
			t.Errorf("an endpoint of no Service was probed %d times", n)
		}
		w.commit(port("shop", 2, 3))
		time.Sleep(time.Second)
		w.want("left")
		probes := w.probed(1)
		time.Sleep(time.Minute)
		synctest.Wait()
		if w.probed(1) != probes {
			t.Error("an endpoint was probed that left its Service")
		}
		w.answers(3, true)
		w.die(2, Rejected)
		time.Sleep(1100 * time.Millisecond)
		w.saw(2, 0, 1)
		time.Sleep(500 * time.Millisecond)
		w.want("refusing", 2)
		w.commit(nil)
		time.Sleep(time.Second)
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
