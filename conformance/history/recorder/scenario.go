package recorder

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/history"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

var (
	deleteOptions = metav1.DeleteOptions{}
	listOptions   = metav1.ListOptions{}
)

// scenario is how Services change, and what fails meanwhile.
type scenario struct {
	name     string
	services int
	affinity int // seconds
	// step changes one Service, and pauses.
	step func(*web, *rand.Rand) error
	// shared says that all Services have the same port, so that addresses can go from one to another; then all changes
	// them, and no step.
	shared bool
	all    func(*recording, *rand.Rand) error
	// fault lets something fail, and mends it before the end.
	fault func(*recording, *rand.Rand, time.Time) error
	// older says that the fault needs an older version of the proxy.
	older bool
}

// maxServices is how many Services, and so ports, a history has at most.
const maxServices = 4

// scenarios are all, in the order of the table.
var scenarios = []scenario{
	{name: "churn", services: 4, step: churn},
	{name: "rolling", services: 4, step: rolling},
	{name: "scale", services: 4, step: scale},
	{name: "reuse", services: 2, shared: true, all: reuse},
	{name: "affinity", services: 4, step: gentle, affinity: affinityTimeout},
	{name: "killed", services: 4, step: mixed, fault: killed},
	{name: "restarted", services: 4, step: mixed, fault: restarted},
	{name: "upgraded", services: 4, step: mixed, fault: upgraded, older: true},
	{name: "affinity-killed", services: 4, step: gentle, affinity: affinityTimeout, fault: killed},
	{name: "api-gone", services: 4, step: mixed, fault: apiGone},
}

// Names gives the names of all scenarios.
func Names() (names []string) {
	for _, s := range scenarios {
		names = append(names, s.name)
	}
	return names
}

const (
	// affinityTimeout is short, so that it is about kept connections and not about memory alone.
	affinityTimeout = 10 // seconds
	// fewest and most are how many endpoints a Service has, if it is not scaled to zero.
	fewest, most = 3, 6
)

// pause waits for a time by chance, of this mean.
func (w *web) pause(rng *rand.Rand, mean time.Duration) error {
	return sleep(w.ctx, mean/2+time.Duration(rng.Int64N(int64(mean))))
}

// fill makes a number of endpoints ready, by chance, and takes out the others.
func (w *web) fill(rng *rand.Rand, low, high int) {
	clear(w.states)
	n := low + rng.IntN(high-low+1)
	for _, i := range rng.Perm(len(w.pool))[:min(n, len(w.pool))] {
		w.states[w.pool[i]] = history.Ready
	}
}

// pick gives a server of the pool that is in a state, or with none in no state; nil if there is none.
func (w *web) pick(rng *rand.Rand, state history.State) *server {
	for _, i := range rng.Perm(len(w.pool)) {
		if w.states[w.pool[i]] == state {
			return w.pool[i]
		}
	}
	return nil
}

// none is the state of servers that are not in the EndpointSlice.
const none history.State = ""

// set changes a server's state; without a server it does nothing.
func (w *web) set(s *server, to history.State) {
	switch {
	case s == nil:
	case to == none:
		delete(w.states, s)
	default:
		w.states[s] = to
	}
}

func (w *web) ready() (n int) {
	for _, state := range w.states {
		if state == history.Ready {
			n++
		}
	}
	return n
}

// churn adds endpoints, takes them out, has them terminate, or not be ready, some three times a second.
func churn(w *web, rng *rand.Rand) error {
	switch few := w.ready() <= 2; {
	case few || w.ready() < most && rng.IntN(2) == 0:
		w.set(w.pick(rng, none), history.Ready)
		w.set(w.pick(rng, history.Unready), history.Ready)
	case rng.IntN(3) == 0:
		w.set(w.pick(rng, history.Ready), none)
	case rng.IntN(2) == 0:
		w.set(w.pick(rng, history.Ready), history.Unready)
	default:
		w.set(w.pick(rng, history.Serving), none)
		w.set(w.pick(rng, history.Ready), history.Serving)
	}
	return errors.Join(w.publish(), w.pause(rng, 300*time.Millisecond))
}

// rolling replaces one endpoint: a new one is ready, an old one terminates and goes.
func rolling(w *web, rng *rand.Rand) error {
	old := w.pick(rng, history.Ready)
	w.set(w.pick(rng, none), history.Ready)
	if err := errors.Join(w.publish(), w.pause(rng, 300*time.Millisecond)); err != nil {
		return err
	}
	w.set(old, history.Serving)
	if err := errors.Join(w.publish(), w.pause(rng, 300*time.Millisecond)); err != nil {
		return err
	}
	w.set(old, none)
	return errors.Join(w.publish(), w.pause(rng, 200*time.Millisecond))
}

// scale takes a Service to zero, at once or by way of endpoints that terminate, and back.
func scale(w *web, rng *rand.Rand) error {
	if rng.IntN(2) == 0 {
		for s := range w.states {
			w.states[s] = history.Serving
		}
		if err := errors.Join(w.publish(), w.pause(rng, 300*time.Millisecond)); err != nil {
			return err
		}
	}
	clear(w.states)
	if err := errors.Join(w.publish(), w.pause(rng, 600*time.Millisecond)); err != nil {
		return err
	}
	w.fill(rng, 1, fewest)
	return errors.Join(w.publish(), w.pause(rng, 1200*time.Millisecond))
}

// mixed is churn, and scaling now and then.
func mixed(w *web, rng *rand.Rand) error {
	if rng.IntN(8) == 0 {
		return scale(w, rng)
	}
	return churn(w, rng)
}

// gentle changes few endpoints, so that most clients could stay.
func gentle(w *web, rng *rand.Rand) error {
	if w.ready() <= fewest {
		w.set(w.pick(rng, none), history.Ready)
	} else {
		w.set(w.pick(rng, history.Ready), none)
	}
	return errors.Join(w.publish(), w.pause(rng, time.Second))
}

// reuseMean is how long an address is nobody's, on average, before another Service's endpoint has it.
const reuseMean = 1500 * time.Millisecond

// reuse takes an endpoint out of a Service, and gives its address to one of another Service after a while.
func reuse(r *recording, rng *rand.Rand) error {
	i := rng.IntN(len(r.services))
	from, to := r.services[i], r.services[(i+1)%len(r.services)]
	if len(from.pool) < 3 {
		from, to = to, from
	}
	s := from.pool[rng.IntN(len(from.pool))]
	from.set(s, none)
	if err := errors.Join(from.publish(), from.pause(rng, reuseMean)); err != nil {
		return err
	}
	from.drop(s)
	r.give(s, to)
	to.pool = append(to.pool, s)
	to.set(s, history.Ready)
	return errors.Join(to.publish(), to.pause(rng, 300*time.Millisecond))
}

// drop takes a server out of the pool.
func (w *web) drop(s *server) {
	var rest []*server
	for _, other := range w.pool {
		if other != s {
			rest = append(rest, other)
		}
	}
	w.pool = rest
}

// faultTime is how long a fault takes at least, and faultPause is between two of them. No fault begins later than
// faultTail before the end.
const (
	proxyTime = 500 * time.Millisecond
	apiTime   = 3 * time.Second
	faultMean = 3 * time.Second
	faultTail = 3 * time.Second
)

// killed kills the proxy of a node by SIGKILL, and starts it again.
func killed(r *recording, rng *rand.Rand, end time.Time) error {
	return r.proxyFault(rng, end, true, func(*testbed.Proxy) string { return "proxy killed" })
}

// restarted ends the proxy of a node as the kubelet does, and starts it again.
func restarted(r *recording, rng *rand.Rand, end time.Time) error {
	return r.proxyFault(rng, end, false, func(*testbed.Proxy) string { return "proxy restarted" })
}

// upgraded does the same and starts the other version of the proxy. Each node begins with the newer one.
func upgraded(r *recording, rng *rand.Rand, end time.Time) error {
	return r.proxyFault(rng, end, false, func(proxy *testbed.Proxy) string {
		if r.old[proxy] = !r.old[proxy]; r.old[proxy] {
			proxy.SetProgram(r.older)
			return "proxy downgraded"
		}
		proxy.SetProgram(r.newer)
		return "proxy upgraded"
	})
}

// renew restarts the proxies that a history has left in their older version.
func (r *recording) renew() error {
	ctx := context.WithoutCancel(r.ctx)
	var errs []error
	for proxy, old := range r.old {
		if old {
			proxy.SetProgram(r.newer)
			errs = append(errs, proxy.Restart(ctx, false))
		}
	}
	return errors.Join(errs...)
}

// proxyFault ends the proxy of a node and starts it again. Change is called before and says what happens.
func (r *recording) proxyFault(rng *rand.Rand, end time.Time, kill bool, change func(*testbed.Proxy) string) error {
	if over, err := r.untilFault(rng, end); over || err != nil {
		return err
	}
	node := r.Nodes()[rng.IntN(len(r.Nodes()))]
	proxy := r.Proxies[node]
	f := history.Fault{From: r.floor(), Node: node, What: change(proxy)}
	err := errors.Join(proxy.End(r.ctx, kill), sleep(r.ctx, proxyTime), proxy.Start())
	f.To = r.ceil()
	r.note(func(h *history.History) { h.Faults = append(h.Faults, f) })
	return err
}

// untilFault waits for the next fault, and says whether the time for faults is over.
func (r *recording) untilFault(rng *rand.Rand, end time.Time) (over bool, err error) {
	wait := faultMean/2 + time.Duration(rng.Int64N(int64(faultMean)))
	if time.Until(end) < wait+faultTail {
		return true, sleep(r.ctx, time.Until(end))
	}
	return false, sleep(r.ctx, wait)
}

// apiGone kills the API server, and starts it again after a while.
func apiGone(r *recording, rng *rand.Rand, end time.Time) error {
	if over, err := r.untilFault(rng, end); over || err != nil {
		return err
	}
	f := history.Fault{From: r.floor(), What: "API server killed"}
	if err := errors.Join(r.Plane.KillServer(), sleep(r.ctx, apiTime)); err != nil {
		return err
	}
	// It is started even if everybody is told to stop, because the testbed is used again.
	err := r.Plane.StartServer(context.WithoutCancel(r.ctx))
	f.To = r.ceil()
	r.note(func(h *history.History) { h.Faults = append(h.Faults, f) })
	return err
}
