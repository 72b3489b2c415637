// Package metrics counts what the proxy does and what the kernel does for it, and shows both to Prometheus: under
// kube-proxy's names what kube-proxy shows, and under names of our own what it does not. docs/METRICS.md lists all of
// them.
package metrics

import (
	"errors"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Metrics is told what happens. Its methods may be called concurrently, and none keeps its caller for longer than a few
// microseconds. Make one with New.
type Metrics struct {
	registry *prometheus.Registry
	slis     *prometheus.Registry
	reader   *reader
	begin    time.Time
	// firstReceipt is what was written of the first state; nil before that. Only the loop uses it.
	firstReceipt *dataplane.Receipt
	kube         kubeProxy
	own          verdictMetrics
}

// families are the values of kube-proxy's label ip_family. Both are written in the same transactions, so most of what
// is counted is counted for both.
var families = [...]string{"IPv4", "IPv6"}

// New gives Metrics that show what the options say.
func New(o Options) *Metrics {
	if o.MaxSeries == 0 {
		o.MaxSeries = DefaultMaxSeries
	}
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		slis:     prometheus.NewRegistry(),
		reader:   newReader(&o),
		begin:    time.Now(),
	}
	m.registry.MustRegister(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collectors.NewGoCollector(),
		together{connectionMetrics, (&connections{m.reader, &o}).send})
	m.kube.register(m.registry, m.slis, &o, m.reader)
	m.own.register(m.registry, &o)
	return m
}

// Stop waits for a reading of the kernel's counters that is under way, and has no more made: Options.Counters may be
// closed then.
func (m *Metrics) Stop() { m.reader.stop() }

// Sink is where sources put what they see, as package watch has it.
type Sink interface {
	Put(snapshot.Delta)
	Synced()
}

// CountingSink gives a sink that counts what goes on to another one.
func (m *Metrics) CountingSink(next Sink) Sink { return countingSink{next, m} }

type countingSink struct {
	Sink
	m *Metrics
}

func (c countingSink) Put(d snapshot.Delta) {
	k := &c.m.kube
	k.serviceChanges.Add(float64(len(d.Services)))
	k.endpointChanges.Add(float64(len(d.Slices)))
	if !d.Empty() {
		setBoth(k.lastQueued, seconds(time.Now()))
	}
	c.Sink.Put(d)
}

// seconds is a time as Prometheus has it.
func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

// Listener gives what a loop has to tell the Metrics.
func (m *Metrics) Listener() reconcile.Listener {
	return reconcile.Listener{
		Committed: m.committed, Failed: m.failed, Written: m.written, InSync: m.inSync, Checked: m.checked,
	}
}

// committed takes over a transaction that the kernel acknowledged.
func (m *Metrics) committed(c reconcile.Commit) {
	// What comes after the beginning of new tables has counted nothing before us either.
	m.reader.committed(&c, c.First && (m.firstReceipt == nil || !m.firstReceipt.Full))
	if !c.First {
		return
	}
	r := c.Receipt
	if m.firstReceipt != nil {
		r = m.firstReceipt.Then(r)
	}
	if m.firstReceipt = &r; len(r.Left) == 0 {
		m.started(&r)
	}
}

func (m *Metrics) checked(c reconcile.Check) {
	m.own.foreignChanges.Add(float64(len(c.Found)))
	if c.Err != nil {
		m.own.checkFailures.Inc()
	}
}

// started takes note that the first state is written.
func (m *Metrics) started(r *dataplane.Receipt) {
	how := "corrected"
	switch {
	case r.Full:
		how = "full"
	case r.Adopted:
		how = "adopted"
	}
	m.own.start.WithLabelValues(how).Set(1)
	m.own.startDuration.Set(time.Since(m.begin).Seconds())
}

// failed takes note of a transaction that failed. One without the Scheduling that IPVS refuses follows at once.
func (m *Metrics) failed(f reconcile.Failure) {
	if refused := (*dataplane.Refused)(nil); errors.As(f.Err, &refused) && refused.Scheduling {
		return
	}
	m.own.transactions.WithLabelValues("failed").Inc()
	for _, family := range families {
		m.kube.syncFailures.WithLabelValues(family).Inc()
		m.kube.sync.WithLabelValues(family).Observe(f.Took.Seconds())
	}
}

// written takes note of a transaction that is all written.
func (m *Metrics) written(t reconcile.Transaction) {
	kind, outcome := m.kube.syncPartial, "partial"
	switch {
	case t.Full:
		kind, outcome = m.kube.syncFull, "full"
	case t.Adopted:
		kind, outcome = m.kube.syncFull, "adopted"
	}
	for _, f := range families {
		m.kube.sync.WithLabelValues(f).Observe(t.Total.Seconds())
		kind.WithLabelValues(f).Observe(t.Total.Seconds())
	}
	o := &m.own
	o.transactions.WithLabelValues(outcome).Inc()
	o.elements.WithLabelValues("added").Add(float64(t.Added))
	o.elements.WithLabelValues("replaced").Add(float64(t.Replaced))
	o.elements.WithLabelValues("removed").Add(float64(t.Removed))
	o.messages.Add(float64(t.Messages))
	o.bytes.Add(float64(t.Bytes))
	for i, took := range [...]time.Duration{t.Policy, t.Plan, t.Encode, t.Commit} {
		o.duration.WithLabelValues(phases[i]).Observe(took.Seconds())
	}
	o.services.Set(float64(t.Services))
	if t.Counted != "" {
		o.counted.Reset()
		o.counted.WithLabelValues(t.Counted).Set(1)
	}
}

// inSync takes note that the kernel holds everything. For what has changed in slices, the time
// since it happened ends here. By this machine's clock it may happen later than that: then it took no time, as a sum
// that falls would look like a restart to Prometheus.
func (m *Metrics) inSync(s reconcile.InSync) {
	at := time.Now()
	setBoth(m.kube.lastSynced, seconds(at))
	for _, t := range s.Triggers {
		m.kube.programming.WithLabelValues(families[t.Family]).Observe(max(at.Sub(t.At), 0).Seconds())
	}
}

// Flows is what a look at tracked connections found, which may be wrong after a transaction.
type Flows struct {
	Took time.Duration
	// Judged are the flows looked at, Removed those that were wrong: IPv4, IPv6.
	Judged, Removed ipfamily.Per[int]
	Failed          bool
}

// ObserveFlows takes note of such a look.
func (m *Metrics) ObserveFlows(l Flows) {
	for i, f := range families {
		m.kube.conntrackSync.WithLabelValues(f).Observe(l.Took.Seconds())
		m.kube.conntrackDeleted.WithLabelValues(f).Add(float64(l.Removed[i]))
		m.own.flowsJudged.WithLabelValues(f).Add(float64(l.Judged[i]))
	}
	if l.Failed {
		m.own.lookFailures.Inc()
	}
}

// ObserveRelease counts released connections. The reason is "unanswered", "drain" or "rebalance".
func (m *Metrics) ObserveRelease(reason string, connections int) {
	m.own.released.WithLabelValues(reason).Add(float64(connections))
}

// ObserveProbe takes note of an answer of the health server: probe is "healthz", "livez" or "readyz".
func (m *Metrics) ObserveProbe(probe string, code int) {
	status := "success"
	if code != 200 {
		status = "error"
	}
	m.kube.healthchecks.WithLabelValues("rules", probe, status).Inc()
	switch probe {
	case "healthz":
		m.kube.healthz.WithLabelValues(codeText(code)).Inc()
	case "livez":
		m.kube.livez.WithLabelValues(codeText(code)).Inc()
	case "readyz":
		m.own.readyz.WithLabelValues(codeText(code)).Inc()
	}
}

// ObserveRequest takes note of an HTTP request to the API server; a code of 0 means that there was no answer.
func (m *Metrics) ObserveRequest(method, host string, code int, took time.Duration) {
	m.kube.requests.WithLabelValues(codeText(code), method, host).Inc()
	m.kube.requestDuration.WithLabelValues(method, host).Observe(took.Seconds())
}
