package everywhere

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/health"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/wake"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const (
	// maxWaiting bounds the requests that wait on a node: more pods than a node usually has. A pod has maxOfPod of them.
	maxWaiting = 256
	maxOfPod   = 4
	// withoutCollector is how long a request waits for a connection to the collector; but until its deadline if one was
	// lost less than successorWithin ago: another process will lead.
	withoutCollector, successorWithin = 2 * time.Second, 30 * time.Second
	// grace is how much later than the collector a node gives up.
	grace = 500 * time.Millisecond
)

// Outcomes are the values of the label of the counted answers: all nodes have it; some do not; nobody could be asked;
// the request was refused; whoever asked went away.
var Outcomes = []string{outcomeEverywhere, outcomeMissing, outcomeUnknown, outcomeRefused, outcomeAbandoned}

const (
	outcomeEverywhere = "everywhere"
	outcomeMissing    = "missing"
	outcomeUnknown    = "unknown"
	outcomeRefused    = "refused"
	outcomeAbandoned  = "abandoned"
)

// response is what the node answers.
type response struct {
	Service string `json:"service"`
	Answer
	Seconds float64 `json:"seconds"`
}

// Off answers GET /everywhere on a node that has no Agent, so that a hook fails.
func Off(w http.ResponseWriter, r *http.Request) {
	n, _, err := parseQuery(r)
	if err != nil {
		refuse(w, r, http.StatusBadRequest, err.Error())
		return
	}
	write(w, r, http.StatusNotImplemented,
		response{Service: n.String(), Answer: Answer{Why: "the setting everywhere is off on this node"}})
}

// ServeHTTP answers GET /everywhere?service=NAMESPACE/NAME[&timeout=10s]. The status is 200 also if not all nodes have
// answered, so that a hook that asks does not fail because of a node. It is another one if the question is wrong, and a
// hook of the kubelet's gets no answer then. Only processes of this host may ask, and the Service's endpoints on this
// node.
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	begin := time.Now()
	service, timeout, err := parseQuery(r)
	if err != nil {
		refuse(w, r, http.StatusBadRequest, err.Error())
		return
	}
	leave, ok := a.admit(r, service)
	if !ok {
		a.count(outcomeRefused)
		refuse(w, r, http.StatusForbidden,
			"only processes of this host and the Service's own pods on it may ask, the latter a few times at once")
		return
	}
	defer leave()
	defer health.Hold(r)()
	control := http.NewResponseController(w)
	// The server's timeouts are for requests that take no time.
	_ = control.SetReadDeadline(time.Time{})
	_ = control.SetWriteDeadline(begin.Add(timeout + 2*grace + sendPatience))
	answer, outcome := a.wait(r.Context(), service, timeout)
	a.count(outcome)
	code := http.StatusOK
	if answer.Nothing {
		code = http.StatusNotFound
	}
	write(w, r, code, response{service.String(), answer, time.Since(begin).Seconds()})
}

func (a *Agent) count(outcome string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stats.Answers[outcome]++
}

// hangUp gives the kubelet no answer instead of one that is not 200. For a hook of httpGet it looks at no status
// (runHTTPHandler in pkg/kubelet/lifecycle): only a connection that breaks has it write the event FailedPreStopHook.
func hangUp(r *http.Request, code int) {
	if code != http.StatusOK && strings.HasPrefix(r.UserAgent(), "kube-lifecycle/") {
		panic(http.ErrAbortHandler) // net/http closes the connection
	}
}

// refuse answers with a text.
func refuse(w http.ResponseWriter, r *http.Request, code int, text string) {
	hangUp(r, code)
	http.Error(w, text, code)
}

func write(w http.ResponseWriter, r *http.Request, code int, body response) {
	hangUp(r, code)
	health.AnswerJSON(w, code, body)
}

func parseQuery(r *http.Request) (n snapshot.Name, timeout time.Duration, err error) {
	q := r.URL.Query()
	if n, err = status.ParseName(q.Get("service")); err != nil {
		return n, 0, fmt.Errorf("service: %w", err)
	}
	timeout = DefaultTimeout
	if text := q.Get("timeout"); text != "" {
		if timeout, err = time.ParseDuration(text); err != nil || timeout <= 0 || timeout > MaxTimeout {
			return n, 0, fmt.Errorf("timeout: %.100q is not a duration such as 5s, up to %v", text, MaxTimeout)
		}
	}
	return n, timeout, nil
}

// admit reports whether a request comes from this host, or from an endpoint of the Service on it that does not ask too
// often at once. So pods make nodes work for their own Services only.
func (a *Agent) admit(r *http.Request, service snapshot.Name) (leave func(), ok bool) {
	if health.FromHost(r) {
		return func() {}, true
	}
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return nil, false
	}
	pod := from.Addr().Unmap()
	a.mu.Lock()
	defer a.mu.Unlock()
	if !slices.Contains(a.local[service], pod) || a.ofPod[pod] >= maxOfPod {
		return nil, false
	}
	a.ofPod[pod]++
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.ofPod[pod]--; a.ofPod[pod] == 0 {
			delete(a.ofPod, pod)
		}
	}, true
}

// wait waits for the collector's answer.
func (a *Agent) wait(ctx context.Context, service snapshot.Name, timeout time.Duration) (Answer, string) {
	w := &waiting{until: time.Now().Add(timeout), result: make(chan Answer, 1)}
	first := Wait{Service: service.String(), Milliseconds: timeout.Milliseconds()}
	crowded := Answer{Why: "too many wait on this node"}
	leave, ok := a.room.Enter(service.Namespace, func() { w.finish(crowded) })
	if !ok {
		return crowded, outcomeUnknown
	}
	defer leave()
	s := a.begin(w, &first)
	defer a.abandon(w)
	if s != nil {
		_ = s.stream.Send(FromNode{Wait: &first}, sendPatience) // a failure ends the session, and the next one gets it
	}
	connected := time.NewTimer(min(withoutCollector, timeout))
	defer connected.Stop()
	deadline := time.NewTimer(timeout + grace)
	defer deadline.Stop()
	for {
		select {
		case <-ctx.Done():
			return Answer{}, outcomeAbandoned
		case answer := <-w.result:
			return answer, outcomeOf(&answer)
		case <-connected.C:
			if why, recently := a.unconnected(); why != "" && !recently {
				return Answer{Why: "no collector answers: " + why}, outcomeUnknown
			}
		case <-deadline.C:
			why := "the collector did not answer in time"
			if gone, _ := a.unconnected(); gone != "" {
				why = "no collector answers: " + gone
			}
			return Answer{Why: why}, outcomeUnknown
		}
	}
}

func outcomeOf(a *Answer) string {
	switch {
	case a.Everywhere:
		return outcomeEverywhere
	case a.Nodes > 0:
		return outcomeMissing
	}
	return outcomeUnknown
}

// begin registers a request and returns the session; nil if there is none: then the next one sends it.
func (a *Agent) begin(w *waiting, first *Wait) *session {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lastID++
	first.ID = a.lastID
	w.wait = *first
	a.waits[first.ID] = w
	if a.session == nil {
		wake.Up(a.wake)
	}
	return a.session
}

// abandon takes a request back, unless it is answered.
func (a *Agent) abandon(w *waiting) {
	a.mu.Lock()
	_, waits := a.waits[w.wait.ID]
	delete(a.waits, w.wait.ID)
	s := a.session
	a.mu.Unlock()
	if waits && s != nil {
		_ = s.stream.Send(FromNode{Cancel: w.wait.ID}, sendPatience)
	}
}

// unconnected says why there is no connection, "" if there is one, and whether there was one recently.
func (a *Agent) unconnected() (why string, recently bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.session != nil {
		return "", true
	}
	return a.failure, time.Since(a.lost) < successorWithin
}
