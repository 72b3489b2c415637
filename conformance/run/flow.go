package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// opened is a connection that is kept, or a flow from one port.
type opened struct {
	target
	conn     *lab.Conn      // of TCP
	own      netip.AddrPort // of a flow of UDP or SCTP
	endpoint string         // who answered last
}

func (c *opened) close() error {
	if c.conn == nil {
		return nil
	}
	return c.conn.Close()
}

// retryAfter is how long a client of UDP or SCTP waits until it asks again, where a change takes effect within some
// time.
const retryAfter = 400 * time.Millisecond

// firstFlowPort is where the ports of flows begin: below those that other clients get.
const firstFlowPort = 10000

func (t *teller) openOne(s *cases.Step) error {
	o := s.Open
	family := o.Family
	if family == "" {
		family = cases.IPv4
	}
	var ports []string
	if o.Port != "" {
		ports = []string{o.Port}
	}
	var frontends []cases.Frontend
	if o.Frontend != "" {
		frontends = []cases.Frontend{o.Frontend}
	}
	all, err := t.targets([]string{o.From}, o.To, ports, frontends, []cases.Family{family})
	if err != nil {
		return err
	}
	c := &opened{target: all[0]}
	host := t.testbed.Host(o.From)
	if c.protocol != cases.TCP {
		c.own = netip.AddrPortFrom(host.IP(labFamily(family)), uint16(firstFlowPort+t.nextNumber()))
	}
	t.open[o.As] = c
	d := t.differs(s)
	want := cases.Want{Outcome: o.Answer.Outcome, Endpoints: o.Answer.Endpoints}
	if d != nil {
		want = d.Wants(want)
	}
	var r lab.Result
	if c.protocol == cases.TCP {
		c.conn, r = host.Open(snapshot.TCP, c.to, lab.Options{Timeout: t.patience(want)})
	} else {
		r = host.Dial(labProtocol(c.protocol), c.to, lab.Options{Timeout: t.patience(want), From: c.own})
	}
	t.told(s, c, want, r, 0, d)
	return nil
}

func (t *teller) patience(w cases.Want) time.Duration {
	if w.Outcome == cases.Answered {
		return t.testbed.Slow.Times(answerTimeout)
	}
	return silence
}

// ping asks on what is open. Answered without endpoints means: by the one that answered before.
func (t *teller) ping(ctx context.Context, s *cases.Step) error {
	c := t.open[s.Ping.As]
	if c == nil {
		return fmt.Errorf("ping: nothing is open as %s", s.Ping.As)
	}
	d := t.differs(s)
	want := cases.Want{Outcome: s.Ping.Answer.Outcome, Endpoints: s.Ping.Answer.Endpoints}
	if want.Outcome == cases.Answered && len(want.Endpoints) == 0 && c.endpoint != "" {
		want.Endpoints = []string{c.endpoint}
	}
	if d != nil {
		want = d.Wants(want)
	}
	patience := t.patience(want)
	if s.Ping.Within > 0 {
		// A packet on its way while a flow is removed is lost, and UDP and SCTP send it once here: there is time for
		// another one.
		patience = min(patience, retryAfter)
	}
	var r lab.Result
	t.within(ctx, s.Ping.Within, func() bool {
		switch {
		case c.own.IsValid():
			r = t.testbed.Host(c.from).Dial(labProtocol(c.protocol), c.to, lab.Options{Timeout: patience, From: c.own})
		case c.conn == nil:
			r = lab.Result{Err: errors.New("the connection was not opened")}
		default:
			r = c.conn.Ping(patience)
		}
		return met(want, r, s.Ping.At)
	})
	t.told(s, c, want, r, s.Ping.At, d)
	return nil
}

// told adds what a single packet showed.
func (t *teller) told(s *cases.Step, c *opened, want cases.Want, r lab.Result, at uint16, d *cases.Difference) {
	want.Some = true
	l := report.Look{Step: s.Step, From: c.from, To: c.words(), Count: 1, Want: want.String(), OK: met(want, r, at)}
	switch r.Outcome {
	case lab.Answered:
		c.endpoint = r.Endpoint
		l.Got = r.Endpoint
		if at != 0 {
			l.Got += fmt.Sprintf("; port %d", r.Destination.Port())
		}
	case lab.Refused:
		l.Got = string(cases.Refused)
	case lab.TimedOut:
		l.Got = string(cases.Dropped)
	default:
		l.Got = r.String()
	}
	t.look(l, d)
}

func met(w cases.Want, r lab.Result, at uint16) bool {
	switch w.Outcome {
	case cases.Answered:
		return r.Outcome == lab.Answered && (len(w.Endpoints) == 0 || slices.Contains(w.Endpoints, r.Endpoint)) &&
			(at == 0 || r.Destination.Port() == at)
	case cases.Refused:
		return r.Outcome == lab.Refused
	case cases.Dropped:
		return r.Outcome == lab.TimedOut
	}
	return r.Outcome == lab.Refused || r.Outcome == lab.TimedOut
}

// traffic is connections that are opened one after the other.
type traffic struct {
	cancel context.CancelFunc
	wait   sync.WaitGroup

	mu        sync.Mutex
	opened    int
	endpoints map[string]int
	failures  []string
	box       *blackbox.Box
}

func (c *traffic) end() {
	c.cancel()
	c.wait.Wait()
}

func (t *teller) begin(s *cases.TrafficStep) error {
	all, err := t.targets(s.From, s.To, s.Ports, s.Frontends, s.Families)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &traffic{cancel: cancel, endpoints: make(map[string]int), box: t.testbed.Box}
	t.traffic[s.As] = c
	for _, a := range all {
		c.wait.Go(func() {
			for ctx.Err() == nil {
				c.dial(t.testbed.Host(a.from), a, t.testbed.Slow.Times(answerTimeout))
				_ = pause(ctx, 5*time.Millisecond)
			}
		})
	}
	return nil
}

// dial opens one connection. UDP and SCTP send once here, and a busy machine loses packets: only two in a row are a
// failure.
func (c *traffic) dial(host *lab.Host, a target, timeout time.Duration) {
	began := time.Now()
	r := host.Dial(labProtocol(a.protocol), a.to, lab.Options{Timeout: timeout})
	if r.Outcome == lab.TimedOut && a.protocol != cases.TCP {
		r = host.Dial(labProtocol(a.protocol), a.to, lab.Options{Timeout: timeout})
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.opened++
	if r.Outcome == lab.Answered {
		c.endpoints[r.Endpoint]++
		return
	}
	i := len(c.failures)
	c.failures = append(c.failures, fmt.Sprintf("%s to %s at %s: %s", a.from, a.words(), began.Format("15:04:05.000"), r))
	if i < maxShown {
		c.wait.Go(func() {
			cause := c.box.Cause(host, labProtocol(a.protocol), a.to, r, began, false)
			c.mu.Lock()
			defer c.mu.Unlock()
			c.failures[i] += cause
		})
	}
}

// maxShown is how many failures of one traffic are explained and shown.
const maxShown = 3

func (t *teller) stop(s *cases.Step) error {
	c := t.traffic[s.Stop.As]
	if c == nil {
		return fmt.Errorf("stop: there is no traffic %s", s.Stop.As)
	}
	c.end()
	delete(t.traffic, s.Stop.As)
	names := slices.Sorted(maps.Keys(c.endpoints))
	l := report.Look{
		Step:  s.Step,
		From:  "traffic " + s.Stop.As,
		To:    "all it asks",
		Count: c.opened,
		Want:  "no failure",
		OK:    len(c.failures) == 0 && c.opened > 0,
	}
	l.Got = fmt.Sprintf("%d connections, answered by %s", c.opened, strings.Join(names, ", "))
	if len(s.Stop.Only) > 0 {
		l.Want += ", answered by " + strings.Join(s.Stop.Only, ", ")
		for _, n := range names {
			l.OK = l.OK && slices.Contains(s.Stop.Only, n)
		}
	}
	if n := len(c.failures); n > 0 {
		l.Got += fmt.Sprintf("; %d failed: %s", n, strings.Join(c.failures[:min(n, maxShown)], "; "))
	}
	d := t.differs(s)
	switch {
	case len(c.failures) == 0:
		d = nil // by chance none failed
	case d != nil:
		l.OK = c.opened > 0
	}
	t.look(l, d)
	return nil
}

// http asks a health check of a node.
func (t *teller) http(ctx context.Context, s *cases.Step) error {
	h := s.HTTP
	port := int32(h.Port)
	if h.Of != "" {
		made, err := t.testbed.Client.CoreV1().Services(t.namespace).Get(ctx, h.Of, metav1.GetOptions{})
		if err != nil {
			return err
		}
		port = made.Spec.HealthCheckNodePort
	}
	for _, f := range lab.Families() {
		to := netip.AddrPortFrom(t.testbed.Host(h.Node).IP(f), uint16(port))
		l := report.Look{Step: s.Step, From: h.From, To: fmt.Sprintf("http://%s%s", to, h.Path), Count: 1, Want: httpWords(h)}
		t.within(ctx, h.Within, func() bool {
			l.OK, l.Got = t.get(ctx, h, l.To)
			return l.OK
		})
		t.look(l, nil)
	}
	return nil
}

func httpWords(h *cases.HTTPStep) string {
	if h.Status == 0 {
		return "nobody listens"
	}
	return strings.Join(append([]string{fmt.Sprintf("status %d", h.Status)}, append(h.Says, h.Header)...), " ")
}

func (t *teller) get(ctx context.Context, h *cases.HTTPStep, url string) (ok bool, got string) {
	client := &http.Client{
		Timeout:   t.testbed.Slow.Times(answerTimeout),
		Transport: &http.Transport{DialContext: t.testbed.Host(h.From).DialContext, DisableKeepAlives: true},
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false, err.Error()
	}
	response, err := client.Do(request)
	if err != nil {
		return h.Status == 0, err.Error()
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return false, err.Error()
	}
	ok = response.StatusCode == h.Status
	for _, word := range h.Says {
		ok = ok && strings.Contains(string(body), word)
	}
	if name, value, _ := strings.Cut(h.Header, ": "); h.Header != "" {
		ok = ok && response.Header.Get(name) == value
	}
	return ok, fmt.Sprintf("status %d %s", response.StatusCode, body)
}

// objects gives the Services and EndpointSlices of the story as they are in the end.
func (t *teller) objects() string {
	if t.apiDown {
		return "# the API server is down"
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	services, err1 := t.testbed.Client.CoreV1().Services(t.namespace).List(ctx, metav1.ListOptions{})
	slices, err2 := t.testbed.Client.DiscoveryV1().EndpointSlices(t.namespace).List(ctx, metav1.ListOptions{})
	if err := errors.Join(err1, err2); err != nil {
		return "# " + err.Error()
	}
	var all strings.Builder
	add := func(kind, version string, object metav1.Object) {
		object.SetManagedFields(nil)
		text, err := yaml.Marshal(object)
		if err != nil {
			text = []byte(err.Error())
		}
		fmt.Fprintf(&all, "---\napiVersion: %s\nkind: %s\n%s", version, kind, text)
	}
	for i := range services.Items {
		add("Service", "v1", &services.Items[i])
	}
	for i := range slices.Items {
		add("EndpointSlice", "discovery.k8s.io/v1", &slices.Items[i])
	}
	return strings.TrimPrefix(all.String(), "---\n")
}
